// Runs a PredictRequest on a servable.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_
#define MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

struct PredictLimits {
  // Limits all inputs of a request, with the heap of long strings. A few bytes may name a shape of
  // any size, with one value for all of it.
  int64_t max_tensor_bytes = 256 << 20;
  // Shared by the tensors and answers of all requests under way; null for no bound.
  std::shared_ptr<MemoryBudget> budget;
};

// Returns the memory of a string of `size` bytes as an element of a tensor.
int64_t StringElementBytes(int64_t size);

// Runs a signature now, as Servable::Run, or together with other requests.
using Runner = std::function<Status(
    Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
    const std::vector<std::string>& output_filter, Servable::Tensors* outputs)>;

// The runner without batching.
Status RunDirectly(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                   const std::vector<std::string>& output_filter, Servable::Tensors* outputs);

// Fills the outputs; the caller knows the model's version, and has found the signature of the
// request. `lease` counts what that takes, with a copy that the caller makes to send it, and goes
// with the answer.
Status Predict(Servable* servable, const Signature& signature, const api::PredictRequest& request,
               const PredictLimits& limits, const Runner& runner, MemoryLease* lease,
               api::PredictResponse* response);

// Computes the size of the inputs as tensors without making them, and that of the largest one as a
// message, which exists while its tensor is made. The error names the input.
Status MeasureInputs(const api::PredictRequest& request, const PredictLimits& limits,
                     int64_t* tensor_bytes, int64_t* message_bytes);

// The format of the answer.
enum class AnswerKind { kMessage, kJson };

// Runs a signature. `lease` counts the inputs already. The outputs, as tensors and as an answer,
// are reserved as expected before the run, and counted afterwards.
Status RunCounted(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                  const std::vector<std::string>& output_filter, const Runner& runner,
                  AnswerKind kind, MemoryLease* lease, Servable::Tensors* outputs);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_PREDICT_H_
