// One signature of a loaded model, found once for each request.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_SIGNATURE_H_
#define MONOLITH_SERVING_NATIVE_MODEL_SIGNATURE_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/status.h"

namespace tensorflow {
class SignatureDef;
class Tensor;
}  // namespace tensorflow

namespace monolith {
namespace serving {

// Lives as long as its model. Thread-safe.
class Signature {
 public:
  using Tensors = std::map<std::string, tensorflow::Tensor>;

  // `definition` must outlive this.
  Signature(std::string name, const tensorflow::SignatureDef* definition)
      : name_(std::move(name)), definition_(definition) {}

  // Returns the name in the model, also where a request leaves it out.
  const std::string& name() const { return name_; }
  const tensorflow::SignatureDef& definition() const { return *definition_; }

  // Refuses inputs that do not fit, and outputs that the signature does not have.
  Status Check(const Tensors& inputs, const std::vector<std::string>& output_filter) const;

  // Refuses names other than exactly those of the inputs.
  Status CheckInputNames(const std::vector<std::string>& names) const;

 private:
  const std::string name_;
  const tensorflow::SignatureDef* const definition_;
};

// Returns "['a', 'b']", as errors list names.
template <typename Names>
std::string ListNames(const Names& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ", '" : "'") + name + "'";
  return text + "]";
}

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_SIGNATURE_H_
