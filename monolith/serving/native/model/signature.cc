#include "monolith/serving/native/model/signature.h"

#include <algorithm>
#include <set>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// An error quotes no more of a request's names.
constexpr size_t kMaxNamed = 16;

// Lists the sent names that are no inputs of the signature, and the inputs that were not sent.
Status CompareInputNames(const std::string& name, const tensorflow::SignatureDef& signature,
                         const std::vector<std::string>& sent) {
  const std::set<std::string> names(sent.begin(), sent.end());
  std::set<std::string> expected;
  std::set<std::string> surplus;
  std::set<std::string> missing;
  for (const auto& [alias, info] : signature.inputs()) {
    expected.insert(alias);
    if (names.count(alias) == 0) missing.insert(alias);
  }
  for (const std::string& alias : names) {
    if (expected.count(alias) == 0 && surplus.size() < kMaxNamed) surplus.insert(alias);
  }
  if (surplus.empty() && missing.empty()) return Status();
  return Status(Code::kInvalidArgument, "signature '" + name + "' takes " + ListNames(expected) +
                                            ": missing " + ListNames(missing) + ", surplus " +
                                            ListNames(surplus));
}

Status CheckInput(const std::string& alias, const tensorflow::TensorInfo& info,
                  const tensorflow::Tensor& tensor) {
  if (info.dtype() != tensor.dtype()) {
    return Status(Code::kInvalidArgument,
                  "input '" + alias + "' is " + tensorflow::DataTypeString(tensor.dtype()) +
                      ", the signature wants " + tensorflow::DataTypeString(info.dtype()));
  }
  const tensorflow::PartialTensorShape wanted(info.tensor_shape());
  if (!wanted.IsCompatibleWith(tensor.shape())) {
    return Status(Code::kInvalidArgument, "input '" + alias + "' has shape " +
                                              tensor.shape().DebugString() +
                                              ", the signature wants " + wanted.DebugString());
  }
  return Status();
}

}  // namespace

Status Signature::Check(const Tensors& inputs,
                        const std::vector<std::string>& output_filter) const {
  bool complete = static_cast<int>(inputs.size()) == definition_->inputs_size();
  for (const auto& [alias, tensor] : inputs) {
    const auto info = definition_->inputs().find(alias);
    complete = complete && info != definition_->inputs().end();
    if (!complete) break;
    const Status status = CheckInput(alias, info->second, tensor);
    if (!status.ok()) return status;
  }
  if (!complete) {
    std::vector<std::string> names;
    for (const auto& [alias, tensor] : inputs) names.push_back(alias);
    return CompareInputNames(name_, *definition_, names);
  }
  for (const std::string& alias : output_filter) {
    if (definition_->outputs().count(alias) > 0) continue;
    std::set<std::string> known;
    for (const auto& [name, info] : definition_->outputs()) known.insert(name);
    return Status(Code::kInvalidArgument, "output_filter has '" + alias +
                                              "', the outputs of signature '" + name_ + "' are " +
                                              ListNames(known));
  }
  return Status();
}

Status Signature::CheckInputNames(const std::vector<std::string>& names) const {
  const bool fits = static_cast<int>(names.size()) == definition_->inputs_size() &&
                    std::all_of(names.begin(), names.end(), [&](const std::string& name) {
                      return definition_->inputs().count(name) > 0;
                    });
  return fits ? Status() : CompareInputNames(name_, *definition_, names);
}

}  // namespace serving
}  // namespace monolith
