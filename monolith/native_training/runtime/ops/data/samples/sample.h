// A training sample in a variant tensor, and how kernels get samples out of tensors.
//
// A variant shares one immutable proto: batching, caching and handing on copy a pointer. An op that
// changes a sample copies it first, unless it is the only holder. Variants can be encoded, so they
// survive a checkpoint and a trip to another process.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "idl/matrix/proto/example.pb.h"
#include "idl/matrix/proto/line_id.pb.h"
#include "idl/matrix/proto/proto_parser.pb.h"
#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/data/fid_sharding.h"
#include "monolith/native_training/runtime/data/label_rules.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_encode_decode.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

using ::idl::matrix::proto::LineId;
using ::monolith::io::proto::Example;
using ::monolith::io::proto::ExampleBatch;
using ::parser::proto::Instance;
using InstanceFeature = ::idl::matrix::proto::Feature;
using ExampleFeature = ::monolith::io::proto::Feature;

inline constexpr char kLineIdName[] = "__LINE_ID__";
inline constexpr char kLabelName[] = "__LABEL__";
inline constexpr char kWeightName[] = "instance_weight";
using ::monolith::data::kInvalidLabel;

enum class SampleType { kInstance, kExample, kExampleBatch };

// "instance", "example", "example_batch" or "examplebatch". `attr` names the argument in the error.
Status ParseSampleType(std::string_view attr, const std::string& name, SampleType* type);

// Reads attribute variant_type of an op on single samples. InvalidArgument: it is neither instance
// nor example.
Status GetRowType(OpKernelConstruction* ctx, SampleType* type);

// Carries a type of sample to a generic lambda, which gets it back by ProtoOf<decltype(tag)>.
template <typename Proto>
struct SampleTag {
  using type = Proto;
};
template <typename Tag>
using ProtoOf = typename Tag::type;

// Returns fn(SampleTag<Proto>()) for the proto of the type.
template <typename Fn>
auto VisitSampleType(SampleType type, const Fn& fn) {
  switch (type) {
    case SampleType::kInstance:
      return fn(SampleTag<Instance>());
    case SampleType::kExample:
      return fn(SampleTag<Example>());
    case SampleType::kExampleBatch:
      break;
  }
  return fn(SampleTag<ExampleBatch>());
}

// The same for a type that GetRowType gave.
template <typename Fn>
auto VisitRowType(SampleType type, const Fn& fn) {
  return type == SampleType::kInstance ? fn(SampleTag<Instance>()) : fn(SampleTag<Example>());
}

template <typename Proto>
struct SampleTraits;
template <>
struct SampleTraits<Instance> {
  static constexpr SampleType kType = SampleType::kInstance;
  static constexpr char kName[] = "Instance";
  static constexpr char kVariantName[] = "monolith::Instance";
};
template <>
struct SampleTraits<Example> {
  static constexpr SampleType kType = SampleType::kExample;
  static constexpr char kName[] = "Example";
  static constexpr char kVariantName[] = "monolith::Example";
};
template <>
struct SampleTraits<ExampleBatch> {
  static constexpr SampleType kType = SampleType::kExampleBatch;
  static constexpr char kName[] = "ExampleBatch";
  static constexpr char kVariantName[] = "monolith::ExampleBatch";
};

// The value of a variant tensor. One whose sample was moved away, as a batch that is taken apart
// leaves them behind, is as good as an empty sample.
template <typename Proto>
class SampleVariant {
 public:
  SampleVariant() : proto_(std::make_shared<Proto>()) {}
  explicit SampleVariant(Proto&& proto) : proto_(std::make_shared<Proto>(std::move(proto))) {}

  const Proto& proto() const { return proto_ ? *proto_ : Proto::default_instance(); }

  // Gives the proto for writing; call it only on a variant no other kernel can see.
  Proto* MutableUnshared() {
    if (proto_.use_count() != 1) proto_ = std::make_shared<Proto>(proto());
    return proto_.get();
  }

  std::string TypeName() const { return SampleTraits<Proto>::kVariantName; }
  std::string DebugString() const { return proto().ShortDebugString(); }
  void Encode(VariantTensorData* data) const {
    data->set_type_name(TypeName());
    data->set_metadata(proto().SerializeAsString());
  }
  bool Decode(const VariantTensorData& data) {
    auto proto = std::make_shared<Proto>();
    if (!proto->ParseFromString(data.metadata_string())) return false;
    proto_ = std::move(proto);
    return true;
  }

 private:
  std::shared_ptr<Proto> proto_;
};

// InvalidArgument when `variant` holds something else.
template <typename Proto>
Status GetSample(const Variant& variant, const Proto** sample) {
  const auto* held = variant.get<SampleVariant<Proto>>();
  if (held == nullptr) {
    return errors::InvalidArgument("the variant holds ",
                                   variant.is_empty() ? "nothing" : variant.TypeName(), ", want ",
                                   SampleTraits<Proto>::kVariantName);
  }
  *sample = &held->proto();
  return OkStatus();
}

// Checks that an iterator gave one scalar variant. A dataset whose shapes are unknown may promise
// it and give something else.
inline Status CheckSampleElement(const std::vector<Tensor>& element) {
  if (element.size() == 1 && element[0].dtype() == DT_VARIANT && element[0].dims() == 0) {
    return OkStatus();
  }
  return errors::InvalidArgument("the input has an element of ", element.size(),
                                 " tensors, the first of them ",
                                 element.empty() ? "missing" : element[0].DeviceSafeDebugString(),
                                 ", want one scalar variant: a sample");
}

// Input 0, a scalar variant, as an output that the kernel may change.
template <typename Proto>
Status MutableSample(OpKernelContext* ctx, Tensor* tensor, Proto** sample) {
  const Tensor& input = ctx->input(0);
  if (input.dims() != 0) {
    return errors::InvalidArgument("input has shape ", input.shape().DebugString(),
                                   ", want a scalar");
  }
  const Proto* unused;
  TF_RETURN_IF_ERROR(GetSample<Proto>(input.scalar<Variant>()(), &unused));
  // A forwarded buffer has no other reader, so its proto may be changed in place.
  std::unique_ptr<Tensor> forwarded = ctx->forward_input(
      0, 0, DT_VARIANT, input.shape(), ctx->input_memory_type(0), ctx->input_alloc_attr(0));
  if (forwarded != nullptr) {
    *tensor = *forwarded;
  } else {
    *tensor = Tensor(DT_VARIANT, TensorShape({}));
    tensor->scalar<Variant>()() = input.scalar<Variant>()();
  }
  *sample = tensor->scalar<Variant>()().get<SampleVariant<Proto>>()->MutableUnshared();
  return OkStatus();
}

// A scalar variant tensor.
template <typename Proto>
Tensor MakeSampleTensor(Proto&& proto) {
  Tensor tensor(DT_VARIANT, TensorShape({}));
  tensor.scalar<Variant>()() = SampleVariant<std::decay_t<Proto>>(std::forward<Proto>(proto));
  return tensor;
}

// Fills line_id, label and instance_weight of an Example from its reserved features, which stay.
Status ExtendExample(Example* example);

// Keeps the first error of several threads.
class FirstError {
 public:
  void Update(const Status& status) {
    if (status.ok()) return;
    mutex_lock lock(mu_);
    status_.Update(status);
  }
  Status status() const {
    mutex_lock lock(mu_);
    return status_;
  }

 private:
  mutable mutex mu_;
  Status status_ TF_GUARDED_BY(mu_);
};

// The samples of a vector (or scalar): variants are borrowed, serialized strings parsed. The tensor
// must outlive the batch.
template <typename Proto>
class SampleBatch {
 public:
  Status Load(std::string_view name, const Tensor& input,
              const ::monolith::engine::ParallelRunner& parallel) {
    if (input.dims() > 1) {
      return errors::InvalidArgument(name, " has shape ", input.shape().DebugString(),
                                     ", want a scalar or a vector");
    }
    const int64_t n = input.NumElements();
    samples_.resize(static_cast<size_t>(n));
    if (input.dtype() == DT_VARIANT) {
      const auto variants = input.flat<Variant>();
      for (int64_t i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(GetSample<Proto>(variants(i), &samples_[i]));
      }
      return OkStatus();
    }
    const auto strings = input.flat<tstring>();
    owned_.resize(static_cast<size_t>(n));
    FirstError error;
    parallel.For(n, kParseCycles, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        error.Update(Parse(name, strings(i), i));
        samples_[i] = &owned_[i];
      }
    });
    return error.status();
  }

  int64_t size() const { return static_cast<int64_t>(samples_.size()); }
  const Proto& operator[](int64_t i) const { return *samples_[i]; }

  // Moves a sample that was parsed from a string out.
  Proto&& Take(int64_t i) { return std::move(owned_[i]); }

 private:
  static constexpr int64_t kParseCycles = 20000;

  Status Parse(std::string_view name, const tstring& bytes, int64_t i) {
    if (bytes.size() > INT32_MAX ||
        !owned_[i].ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return errors::InvalidArgument("Failed to parse the ", SampleTraits<Proto>::kName, ". ", name,
                                     "[", i, "] has ", bytes.size(), " bytes");
    }
    if constexpr (std::is_same_v<Proto, Example>) {
      return ExtendExample(&owned_[i]);
    } else {
      return OkStatus();
    }
  }

  std::vector<const Proto*> samples_;
  std::vector<Proto> owned_;
};

// Parses serialized samples into variants of the same shape.
template <typename Proto>
Status StringsToVariants(std::string_view name, const Tensor& strings,
                         const ::monolith::engine::ParallelRunner& parallel, Tensor* variants) {
  SampleBatch<Proto> batch;
  TF_RETURN_IF_ERROR(batch.Load(name, strings, parallel));
  *variants = Tensor(DT_VARIANT, strings.shape());
  if (!variants->IsInitialized()) {
    return errors::ResourceExhausted("Out of memory for ", batch.size(), " variants of ", name);
  }
  auto out = variants->flat<Variant>();
  for (int64_t i = 0; i < batch.size(); ++i) out(i) = SampleVariant<Proto>(batch.Take(i));
  return OkStatus();
}

// Appends the ids of a feature to the current row. No feature and a feature without a value have no
// ids. InvalidArgument: it holds something else.
Status AppendFids(std::string_view name, const ExampleFeature* feature,
                  ::monolith::data::FeatureRows* rows);

// A batch says how many rows it has, and memory is sized by that: InvalidArgument unless a column
// has as many values, or the message as many bytes, or they are few.
Status CheckBatchSize(const ExampleBatch& batch);

// The same for who makes a sample of each row, all at once: every one gets the shared values.
Status CheckExpandedSize(const ExampleBatch& batch);

// A batch column has one value per row, or one for all rows. OutOfRange otherwise.
Status CheckColumn(const ExampleBatch& batch,
                   const ::monolith::io::proto::NamedFeatureList& column);

inline bool IsShared(const ::monolith::io::proto::NamedFeatureList& column) {
  return column.type() == ::monolith::io::proto::FeatureListType::SHARED;
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_SAMPLES_SAMPLE_H_
