#include "monolith/serving/native/model/examples.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "monolith/native_training/runtime/base/utf8.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/protobuf.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

using tensorflow::protobuf::internal::WireFormatLite;
using tensorflow::protobuf::io::CodedInputStream;

constexpr size_t kMaxExamples = 100'000;
// The largest size of a class or value in an answer, without its label.
constexpr int64_t kResultBytes = 80;

constexpr char kClasses[] = "classes";
constexpr char kScores[] = "scores";
constexpr char kValues[] = "outputs";
// Stands for the name of the only input before a signature is known.
constexpr char kUnnamed[] = "";

Status Invalid(const std::string& text) { return Status(Code::kInvalidArgument, text); }

Status NoMemoryForExamples() {
  return Status(Code::kResourceExhausted, "the tensors of all requests take too much memory");
}

// Calls `take(field, bytes)` for each field of bytes; other fields are skipped. Returns false if
// `message` is malformed, or if `take` does.
template <typename Take>
bool VisitFields(std::string_view message, Take take) {
  CodedInputStream stream(reinterpret_cast<const uint8_t*>(message.data()),
                          static_cast<int>(message.size()));
  while (const uint32_t tag = stream.ReadTag()) {
    if (WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      if (!WireFormatLite::SkipField(&stream, tag)) return false;
      continue;
    }
    uint32_t size = 0;
    if (!stream.ReadVarint32(&size)) return false;
    const size_t begin = static_cast<size_t>(stream.CurrentPosition());
    if (size > message.size() - begin || !stream.Skip(static_cast<int>(size))) return false;
    if (!take(WireFormatLite::GetTagFieldNumber(tag), message.substr(begin, size))) return false;
  }
  return stream.ConsumedEntireMessage();
}

Status OddOutputs(const Signature& signature, const Servable::Tensors& outputs,
                  const char* method) {
  std::string shapes;
  for (const auto& [name, tensor] : outputs) {
    shapes += (shapes.empty() ? "'" : ", '") + name +
              "': " + tensorflow::DataTypeString(tensor.dtype()) + tensor.shape().DebugString();
  }
  return Status(Code::kFailedPrecondition, "signature '" + signature.name() + "' answers with {" +
                                               shapes + "}, which is not a " + method);
}

bool IsReal(const tensorflow::Tensor& tensor) {
  return tensor.dtype() == tensorflow::DT_FLOAT || tensor.dtype() == tensorflow::DT_DOUBLE;
}

float RealAt(const tensorflow::Tensor& tensor, int64_t index) {
  return tensor.dtype() == tensorflow::DT_FLOAT ? tensor.flat<float>()(index)
                                                : static_cast<float>(tensor.flat<double>()(index));
}

const tensorflow::Tensor* Find(const Servable::Tensors& outputs, const char* name) {
  const auto found = outputs.find(name);
  return found == outputs.end() ? nullptr : &found->second;
}

}  // namespace

Status ReadExamples(std::string_view input, Examples* examples) {
  std::string_view list;
  bool has_context = false;
  bool valid = VisitFields(input, [&](int field, std::string_view bytes) {
    if (field != api::Input::kExampleListFieldNumber &&
        field != api::Input::kExampleListWithContextFieldNumber) {
      return true;
    }
    list = bytes;
    has_context = field == api::Input::kExampleListWithContextFieldNumber;
    return true;
  });
  bool too_many = false;
  valid = valid && VisitFields(list, [&](int field, std::string_view bytes) {
            if (field == api::ExampleListWithContext::kExamplesFieldNumber) {
              too_many = examples->examples.size() == kMaxExamples;
              if (too_many) return false;
              examples->examples.push_back(bytes);
            } else if (has_context && field == api::ExampleListWithContext::kContextFieldNumber) {
              examples->context = bytes;
            }
            return true;
          });
  if (too_many) {
    return Invalid("the request has more than " + std::to_string(kMaxExamples) + " examples");
  }
  if (!valid) return Invalid("the input of the request is not an Input");
  return examples->examples.empty() ? Invalid("the request has no examples") : Status();
}

Status ExampleRunner::SetExamples(const Examples& examples) {
  int64_t bytes = 0;
  for (const std::string_view example : examples.examples) {
    bytes += StringElementBytes(static_cast<int64_t>(examples.context.size() + example.size()));
    if (bytes > limits_.max_tensor_bytes) {
      return Invalid("the examples, each with the context, take more than " +
                     std::to_string(limits_.max_tensor_bytes) + " bytes");
    }
  }
  if (!lease_->Resize(lease_->bytes() + bytes)) return NoMemoryForExamples();
  tensorflow::Tensor tensor(
      tensorflow::DT_STRING,
      tensorflow::TensorShape({static_cast<int64_t>(examples.examples.size())}));
  auto elements = tensor.flat<tensorflow::tstring>();
  for (size_t i = 0; i < examples.examples.size(); ++i) {
    // Concatenated messages are one message, in which the last feature of a name counts.
    tensorflow::tstring& element = elements(static_cast<int64_t>(i));
    element.append(examples.context.data(), examples.context.size());
    element.append(examples.examples[i].data(), examples.examples[i].size());
  }
  examples_.clear();
  examples_.emplace(kUnnamed, std::move(tensor));
  return Status();
}

Status ExampleRunner::FindSignature(const std::string& name, const std::string& method,
                                    const Signature** signature) const {
  const std::map<std::string, Signature>& known = servable_->signatures();
  const auto has_method = [&](const auto& item) {
    return item.second.definition().method_name() == method;
  };
  if (std::none_of(known.begin(), known.end(), has_method)) {
    return Status(Code::kUnimplemented,
                  "the model has no signature of the method " + method.substr(0, 100));
  }
  const Signature* found = nullptr;
  const Status status = servable_->FindSignature(name, &found);
  if (!status.ok()) return status;
  if (found->definition().method_name() != method) {
    return Invalid("signature '" + found->name() + "' is of the method '" +
                   std::string(found->definition().method_name()) + "', want '" + method + "'");
  }
  *signature = found;
  return Status();
}

Status ExampleRunner::Run(const Signature& signature, Servable::Tensors* outputs) {
  const auto& wanted = signature.definition().inputs();
  if (wanted.size() != 1) {
    return Status(Code::kFailedPrecondition, "signature '" + signature.name() + "' takes " +
                                                 std::to_string(wanted.size()) +
                                                 " inputs, want serialized examples");
  }
  const Servable::Tensors inputs = {{wanted.begin()->first, examples_.at(kUnnamed)}};
  return RunCounted(servable_, signature, inputs, {}, runner_, AnswerKind::kMessage, lease_,
                    outputs);
}

Status ExampleRunner::Classify(const Signature& signature, api::ClassificationResult* result) {
  Servable::Tensors outputs;
  const Status status = Run(signature, &outputs);
  if (!status.ok()) return status;
  const int64_t rows = examples_.at(kUnnamed).NumElements();
  const tensorflow::Tensor* const classes = Find(outputs, kClasses);
  const tensorflow::Tensor* const scores = Find(outputs, kScores);
  for (const tensorflow::Tensor* tensor : {classes, scores}) {
    if (tensor != nullptr && (tensor->dims() != 2 || tensor->dim_size(0) != rows)) {
      return OddOutputs(signature, outputs, kClassifyMethod);
    }
  }
  if ((classes == nullptr && scores == nullptr) ||
      (classes != nullptr && classes->dtype() != tensorflow::DT_STRING) ||
      (scores != nullptr && !IsReal(*scores)) ||
      (classes != nullptr && scores != nullptr && classes->dim_size(1) != scores->dim_size(1))) {
    return OddOutputs(signature, outputs, kClassifyMethod);
  }
  const int64_t width = (scores != nullptr ? scores : classes)->dim_size(1);
  if (!lease_->Resize(lease_->bytes() + rows * (width + 1) * kResultBytes))
    return NoMemoryForExamples();
  for (int64_t row = 0; row < rows; ++row) {
    api::Classifications* const found = result->add_classifications();
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      api::Class* const one = found->add_classes();
      if (classes != nullptr) {
        const tensorflow::tstring& label = classes->flat<tensorflow::tstring>()(i);
        if (!engine::IsUtf8({label.data(), label.size()})) {
          return Status(Code::kFailedPrecondition,
                        "signature '" + signature.name() + "' has classes that are not UTF-8");
        }
        one->set_label(label.data(), label.size());
      }
      if (scores != nullptr) one->set_score(RealAt(*scores, i));
    }
  }
  return Status();
}

Status ExampleRunner::Regress(const Signature& signature, api::RegressionResult* result) {
  Servable::Tensors outputs;
  const Status status = Run(signature, &outputs);
  if (!status.ok()) return status;
  const int64_t rows = examples_.at(kUnnamed).NumElements();
  const tensorflow::Tensor* const values = Find(outputs, kValues);
  if (values == nullptr || !IsReal(*values) || values->NumElements() != rows) {
    return OddOutputs(signature, outputs, kRegressMethod);
  }
  if (!lease_->Resize(lease_->bytes() + rows * kResultBytes)) return NoMemoryForExamples();
  for (int64_t i = 0; i < rows; ++i) result->add_regressions()->set_value(RealAt(*values, i));
  return Status();
}

}  // namespace serving
}  // namespace monolith
