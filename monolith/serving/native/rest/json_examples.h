// Reads the JSON of Classify and Regress in TensorFlow Serving's REST API into tf.Examples.
//
//   {"signature_name": "...", "context": {...}, "examples": [{"feature": value or list, ...}, ...]}
//
// Bytes are {"b64": "<base64>"}.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_EXAMPLES_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_EXAMPLES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

struct JsonExamples {
  std::string signature_name;
  // Serialized, as the examples are.
  std::string context;
  std::vector<std::string> examples;
};

// Parses `body`. Examples that take more than `max_bytes` are refused, and those that `lease` has
// no room for.
Status ParseJsonExamples(std::string_view body, int64_t max_bytes, MemoryLease* lease,
                         JsonExamples* examples);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_EXAMPLES_H_
