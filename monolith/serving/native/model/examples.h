// Classify and Regress: signatures that take serialized tf.Examples, as estimators of TensorFlow
// export them.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_EXAMPLES_H_
#define MONOLITH_SERVING_NATIVE_MODEL_EXAMPLES_H_

#include <string>
#include <string_view>
#include <vector>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/predict.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

inline constexpr char kClassifyMethod[] = "tensorflow/serving/classify";
inline constexpr char kRegressMethod[] = "tensorflow/serving/regress";

// The examples of a request, each preceded by the context that all share.
struct Examples {
  std::string_view context;
  std::vector<std::string_view> examples;
};

// Reads a serialized Input; the result points into it.
Status ReadExamples(std::string_view input, Examples* examples);

// Runs signatures of one model on the examples of one request.
class ExampleRunner {
 public:
  // `lease` counts the memory of examples and answers. The arguments are not owned.
  ExampleRunner(Servable* servable, const PredictLimits& limits, const Runner& runner,
                MemoryLease* lease)
      : servable_(servable), limits_(limits), runner_(runner), lease_(lease) {}

  // Makes the input tensor of every run.
  Status SetExamples(const Examples& examples);

  // Finds a signature, "" for serving_default. Refuses one that is not of the method: with
  // UNIMPLEMENTED if the model has none.
  Status FindSignature(const std::string& name, const std::string& method,
                       const Signature** signature) const;

  // Fail for outputs that are not a class or value for each example.
  Status Classify(const Signature& signature, api::ClassificationResult* result);
  Status Regress(const Signature& signature, api::RegressionResult* result);

 private:
  Status Run(const Signature& signature, Servable::Tensors* outputs);

  Servable* const servable_;
  const PredictLimits& limits_;
  const Runner& runner_;
  MemoryLease* const lease_;
  // One tensor, under the only input's name once that is known.
  Servable::Tensors examples_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_EXAMPLES_H_
