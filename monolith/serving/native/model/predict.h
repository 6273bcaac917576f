// A PredictRequest run on a servable.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_
#define MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

struct PredictLimits {
  // Of one tensor. A few bytes may name a shape of any size, and memory is reserved for it.
  int64_t max_tensor_bytes = 256 << 20;
};

// Runs a signature now, as Servable::Run, or together with other requests.
using Runner = std::function<Status(
    Servable* servable, const std::string& signature, const Servable::Tensors& inputs,
    const std::vector<std::string>& output_filter, Servable::Tensors* outputs)>;

// The runner without batching.
Status RunDirectly(Servable* servable, const std::string& signature,
                   const Servable::Tensors& inputs, const std::vector<std::string>& output_filter,
                   Servable::Tensors* outputs);

// Fills the outputs; the caller knows the model's version.
Status Predict(Servable* servable, const api::PredictRequest& request, const PredictLimits& limits,
               const Runner& runner, api::PredictResponse* response);

// Parses a TensorProto; the error names `alias`. Refuses a shape beyond the limits before memory is
// reserved for it.
Status ParseTensor(const std::string& alias, const std::string& serialized,
                   const PredictLimits& limits, tensorflow::Tensor* tensor);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_
