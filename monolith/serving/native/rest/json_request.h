// Reads the JSON of TensorFlow Serving's REST API into tensors.
//
//   {"signature_name": "...", "instances": [...]}   a list of examples; answer {"predictions": ...}
//   {"signature_name": "...", "inputs": ...}        a tensor per input; answer {"outputs": ...}
//
// Bytes are {"b64": "<base64>"}.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_REQUEST_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_REQUEST_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/predict.h"
#include "monolith/serving/native/model/servable.h"

namespace monolith {
namespace serving {

struct JsonRequest {
  // The model's signature; null before parsing.
  const Signature* signature = nullptr;
  Servable::Tensors inputs;
  // How many instances it has; -1 if it names `inputs`.
  int64_t rows = -1;
};

// Parses `body` for a signature of `servable`. Nothing is rounded or cut off: a number that the
// type of its input cannot hold is an error. The body is read piece by piece, first to find the
// shapes, then into the tensors, which `lease` counts.
Status ParseJsonRequest(std::string_view body, const Servable& servable,
                        const PredictLimits& limits, MemoryLease* lease, JsonRequest* request);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_REQUEST_H_
