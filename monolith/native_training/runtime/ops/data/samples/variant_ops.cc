// Ops between strings and samples, and on whole samples: StringToVariant,
// StringToVariantWithTransform, VariantToZeros, HasVariant, SwitchSlotBatch.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data/parse/conversions.h"
#include "monolith/native_training/runtime/ops/data/samples/record_source.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/data/samples/sample_reader.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::HeaderFlags;
using ::monolith::data::MemorySource;
using ::monolith::data::ReadResult;
using ::monolith::data::RecordReader;
using ::monolith::engine::MakeFidV2;
using shape_inference::InferenceContext;

#define HEADER_ATTRS()                         \
  Attr("has_header: bool = false")             \
      .Attr("has_sort_id: bool = false")       \
      .Attr("lagrangex_header: bool = false")  \
      .Attr("kafka_dump_prefix: bool = false") \
      .Attr("kafka_dump: bool = false")        \
      .Attr("chnids: list(int) = []")          \
      .Attr("datasources: list(string) = []")  \
      .Attr("default_datasource: string = ''")

REGISTER_OP("StringToVariant")
    .Input("input: string")
    .Output("output: variant")
    .Attr("variant_type: string = 'example'")
    .HEADER_ATTRS()
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc(R"doc(
Parses samples; an empty string is a default one.

has_header: the strings are framed records with the headers that the next four say.
chnids: a sample of channel chnids[i] is of data source datasources[i], others of
  default_datasource.
)doc");

REGISTER_OP("StringToVariantWithTransform")
    .Input("input: string")
    .Output("output: variant")
    .Attr("input_type: string = 'example'")
    .Attr("output_type: string = 'example'")
    .HEADER_ATTRS()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc("Parses samples and converts them; every row of an ExampleBatch becomes a sample.");

REGISTER_OP("VariantToZeros")
    .Input("input: variant")
    .Output("output: int64")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("Zeros of the same shape.");

REGISTER_OP("HasVariant")
    .Input("input: variant")
    .Output("output: bool")
    .Attr("variant_type: string = 'example'")
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc("Whether the sample has any content.");

REGISTER_OP("SwitchSlotBatch")
    .Input("input: variant")
    .Output("output: variant")
    .Attr("features: list(string)")
    .Attr("inplaces: list(bool)")
    .Attr("slots: list(int)")
    .Attr("suffix: string")
    .Attr("variant_type: string = 'example_batch'")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc(R"doc(
Replaces the slot of the ids of features, in place or in a copy named <name>_<suffix>.

input: an ExampleBatch, or Examples of any shape.
)doc");

class VariantToZerosOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    output->flat<int64_t>().setZero();
  }
};

class HasVariantOp : public OpKernel {
 public:
  explicit HasVariantOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variant_type", &name));
    OP_REQUIRES_OK(ctx, ParseSampleType("variant_type", name, &type_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("input", ctx->input(0)));
    const auto variant_scalar = ctx->input(0).scalar<Variant>();
    const Variant& variant = variant_scalar();
    size_t size = 0;
    OP_REQUIRES_OK(ctx, VisitSampleType(type_, [&](auto tag) {
                     return Size<ProtoOf<decltype(tag)>>(variant, &size);
                   }));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<bool>()() = size > 0;
  }

 private:
  template <typename Proto>
  static Status Size(const Variant& variant, size_t* size) {
    const Proto* sample;
    TF_RETURN_IF_ERROR(GetSample<Proto>(variant, &sample));
    *size = sample->ByteSizeLong();
    return OkStatus();
  }

  SampleType type_;
};

// Headers, data sources and payloads of StringToVariant and its variant with conversion.
class SampleDecoder {
 public:
  Status Init(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_header", &has_header_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_sort_id", &flags_.has_sort_id));
    TF_RETURN_IF_ERROR(ctx->GetAttr("lagrangex_header", &flags_.lagrangex_header));
    TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump_prefix", &flags_.kafka_dump_prefix));
    TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump", &flags_.kafka_dump));
    return keys_.Init(ctx);
  }

  // Parses one string; empty without header is a default sample.
  template <typename Proto>
  Status Decode(const tstring& bytes, Proto* proto) const {
    std::string payload(bytes.data(), bytes.size());
    uint32_t key = 0;
    if (has_header_ && !bytes.empty()) {
      const std::string framed = std::move(payload);
      MemorySource source(framed);
      RecordReader reader(&source, flags_);
      const ReadResult result = reader.Next(&payload, &key);
      TF_RETURN_IF_ERROR(RecordError("input", reader, result));
    }
    if (!proto->ParseFromString(payload)) {
      return errors::InvalidArgument("Failed to parse the ", SampleTraits<Proto>::kName,
                                     ". It has ", payload.size(), " bytes");
    }
    if (!payload.empty())
      proto->set_data_source_key(flags_.lagrangex_header ? key : keys_.Of(*proto));
    return OkStatus();
  }

 private:
  bool has_header_;
  HeaderFlags flags_;
  DataSourceKeys keys_;
};

class StringToVariantOp : public OpKernel {
 public:
  explicit StringToVariantOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variant_type", &name));
    OP_REQUIRES_OK(ctx, ParseSampleType("variant_type", name, &type_));
    OP_REQUIRES_OK(ctx, decoder_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    VisitSampleType(type_, [&](auto tag) { Run<ProtoOf<decltype(tag)>>(ctx); });
  }

 private:
  template <typename Proto>
  void Run(OpKernelContext* ctx) const {
    const auto strings = ctx->input(0).flat<tstring>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<Variant>();
    for (int64_t i = 0; i < strings.size(); ++i) {
      Proto proto;
      OP_REQUIRES_OK(ctx, decoder_.Decode(strings(i), &proto));
      out(i) = SampleVariant<Proto>(std::move(proto));
    }
  }

  SampleType type_;
  SampleDecoder decoder_;
};

class StringToVariantWithTransformOp : public OpKernel {
 public:
  explicit StringToVariantWithTransformOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string input_type, output_type;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("input_type", &input_type));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_type", &output_type));
    OP_REQUIRES_OK(ctx, ParseSampleType("input_type", input_type, &input_));
    OP_REQUIRES_OK(ctx, ParseSampleType("output_type", output_type, &output_));
    OP_REQUIRES(ctx, output_ != SampleType::kExampleBatch || input_ == output_,
                errors::InvalidArgument("output_type is ", output_type, ", but input_type is ",
                                        input_type));
    OP_REQUIRES_OK(ctx, decoder_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const auto strings = ctx->input(0).flat<tstring>();
    std::vector<Variant> samples;
    for (int64_t i = 0; i < strings.size(); ++i) {
      switch (input_) {
        case SampleType::kInstance: {
          Instance instance;
          OP_REQUIRES_OK(ctx, decoder_.Decode(strings(i), &instance));
          if (output_ == SampleType::kInstance) {
            samples.emplace_back(SampleVariant<Instance>(std::move(instance)));
          } else {
            samples.emplace_back(SampleVariant<Example>(InstanceToExample(instance)));
          }
          break;
        }
        case SampleType::kExample: {
          Example example;
          OP_REQUIRES_OK(ctx, decoder_.Decode(strings(i), &example));
          OP_REQUIRES_OK(ctx, Emit(std::move(example), &samples));
          break;
        }
        case SampleType::kExampleBatch: {
          ExampleBatch batch;
          OP_REQUIRES_OK(ctx, decoder_.Decode(strings(i), &batch));
          if (output_ == SampleType::kExampleBatch) {
            samples.emplace_back(SampleVariant<ExampleBatch>(std::move(batch)));
            break;
          }
          OP_REQUIRES_OK(ctx, CheckExpandedSize(batch));
          for (int64_t row = 0; row < batch.batch_size(); ++row) {
            Example example;
            OP_REQUIRES_OK(ctx, ExampleBatchRow(batch, row, &example));
            OP_REQUIRES_OK(ctx, Emit(std::move(example), &samples));
          }
          break;
        }
      }
    }
    Tensor* output;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {static_cast<int64_t>(samples.size())}, &output));
    std::move(samples.begin(), samples.end(), output->flat<Variant>().data());
  }

 private:
  Status Emit(Example&& example, std::vector<Variant>* samples) const {
    if (output_ == SampleType::kExample) {
      samples->emplace_back(SampleVariant<Example>(std::move(example)));
      return OkStatus();
    }
    Instance instance;
    TF_RETURN_IF_ERROR(ExampleToInstance(example, &instance));
    samples->emplace_back(SampleVariant<Instance>(std::move(instance)));
    return OkStatus();
  }

  SampleType input_;
  SampleType output_;
  SampleDecoder decoder_;
};

class SwitchSlotBatchOp : public OpKernel {
 public:
  explicit SwitchSlotBatchOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<std::string> features;
    std::vector<bool> inplaces;
    std::vector<int64_t> slots;
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("features", &features));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("inplaces", &inplaces));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slots", &slots));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("suffix", &suffix_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variant_type", &name));
    OP_REQUIRES_OK(ctx, ParseSampleType("variant_type", name, &type_));
    OP_REQUIRES(
        ctx, type_ != SampleType::kInstance,
        errors::InvalidArgument("variant_type is '", name, "', want example or example_batch"));
    OP_REQUIRES(ctx, features.size() == inplaces.size() && features.size() == slots.size(),
                errors::InvalidArgument("features, inplaces and slots have ", features.size(), ", ",
                                        inplaces.size(), " and ", slots.size(), " elements"));
    for (size_t i = 0; i < features.size(); ++i) {
      OP_REQUIRES(ctx, slots[i] >= 0 && slots[i] < ::monolith::engine::kMaxSlotsV2,
                  errors::InvalidArgument("slot of '", features[i], "' is ", slots[i],
                                          ", want 0 to ", ::monolith::engine::kMaxSlotsV2 - 1));
      switches_[features[i]] = {inplaces[i], slots[i]};
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const auto input = ctx->input(0).flat<Variant>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<Variant>();
    for (int64_t i = 0; i < input.size(); ++i) {
      if (type_ == SampleType::kExample) {
        const Example* example;
        OP_REQUIRES_OK(ctx, GetSample<Example>(input(i), &example));
        Example changed = *example;
        SwitchAll(changed.mutable_named_feature(),
                  [](auto* named, int64_t slot) { Reslot(slot, named->mutable_feature()); });
        out(i) = SampleVariant<Example>(std::move(changed));
      } else {
        const ExampleBatch* batch;
        OP_REQUIRES_OK(ctx, GetSample<ExampleBatch>(input(i), &batch));
        ExampleBatch changed = *batch;
        SwitchAll(changed.mutable_named_feature_list(), [](auto* column, int64_t slot) {
          for (ExampleFeature& feature : *column->mutable_feature()) Reslot(slot, &feature);
        });
        out(i) = SampleVariant<ExampleBatch>(std::move(changed));
      }
    }
  }

 private:
  struct Switch {
    bool inplace;
    int64_t slot;
  };

  // v1 ids become v2: slots above 1023 do not fit into them.
  static void Reslot(int64_t slot, ExampleFeature* feature) {
    if (feature->has_fid_v1_list()) {
      ::monolith::io::proto::FidList list = feature->fid_v1_list();
      for (uint64_t& fid : *list.mutable_value()) fid = ::monolith::engine::FidV1ToV2(fid);
      *feature->mutable_fid_v2_list() = std::move(list);
    }
    if (!feature->has_fid_v2_list()) return;
    for (uint64_t& fid : *feature->mutable_fid_v2_list()->mutable_value()) {
      fid = MakeFidV2(slot, fid);
    }
  }

  template <typename List, typename Apply>
  void SwitchAll(List* features, Apply apply) const {
    const int size = features->size();
    for (int i = 0; i < size; ++i) {
      const auto it = switches_.find(features->Get(i).name());
      if (it == switches_.end()) continue;
      auto* target = features->Mutable(i);
      if (!it->second.inplace) {
        const auto copy = features->Get(i);
        target = features->Add();
        *target = copy;
        target->set_name(copy.name() + "_" + suffix_);
      }
      target->set_id(static_cast<int32_t>(it->second.slot));
      apply(target, it->second.slot);
    }
  }

  SampleType type_;
  std::string suffix_;
  absl::flat_hash_map<std::string, Switch> switches_;
};

REGISTER_GUARDED_KERNEL(Name("VariantToZeros").Device(DEVICE_CPU), VariantToZerosOp);
REGISTER_GUARDED_KERNEL(Name("HasVariant").Device(DEVICE_CPU), HasVariantOp);
REGISTER_GUARDED_KERNEL(Name("StringToVariant").Device(DEVICE_CPU), StringToVariantOp);
REGISTER_GUARDED_KERNEL(Name("StringToVariantWithTransform").Device(DEVICE_CPU),
                        StringToVariantWithTransformOp);
REGISTER_GUARDED_KERNEL(Name("SwitchSlotBatch").Device(DEVICE_CPU), SwitchSlotBatchOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
