// Writes the JSON of TensorFlow Serving's REST API: answers and signatures.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_TENSORS_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_TENSORS_H_

#include <cstdint>
#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/rest/json_request.h"

namespace monolith {
namespace serving {

// Writes the answer. Instances need outputs with a row for each of them.
Status WriteJsonAnswer(const JsonRequest& request, const Servable::Tensors& outputs,
                       std::string* body);

// Returns the JSON of GetModelMetadata.
void WriteJsonMetadata(const std::string& model, int64_t version, const Servable& servable,
                       std::string* body);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_TENSORS_H_
