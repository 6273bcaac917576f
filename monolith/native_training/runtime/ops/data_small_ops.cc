// Small ops on ids and samples: SwitchSlot, FeatureCombine, ExtractFid, MapId, MonolithGenFidMask,
// StringToVariant, VariantToZeros, HasVariant, SwitchSlotBatch.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "monolith/native_training/runtime/data/fid.h"
#include "monolith/native_training/runtime/data/fid_hash.h"
#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data_conversions.h"
#include "monolith/native_training/runtime/ops/data_record_source.h"
#include "monolith/native_training/runtime/ops/data_sample.h"
#include "monolith/native_training/runtime/ops/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::HeaderFlags;
using ::monolith::data::MakeFidV1;
using ::monolith::data::MakeFidV2;
using ::monolith::data::MemorySource;
using ::monolith::data::ReadResult;
using ::monolith::data::RecordReader;
using shape_inference::InferenceContext;

REGISTER_OP("SwitchSlot")
    .Input("rt_nested_splits: RAGGED_RANK * int64")
    .Input("rt_dense_values: int64")
    .Output("nested_splits_out: RAGGED_RANK * int64")
    .Output("dense_values_out: int64")
    .Attr("RAGGED_RANK: int >= 1")
    .Attr("slot: int >= 1")
    .Attr("fid_version: int = 2")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    })
    .Doc("Replaces the slot of every id.");

REGISTER_OP("FeatureCombine")
    .Input("rt_nested_splits_src1: RAGGED_RANK * int64")
    .Input("rt_dense_values_src1: int64")
    .Input("rt_nested_splits_src2: RAGGED_RANK * int64")
    .Input("rt_dense_values_src2: int64")
    .Output("nested_splits_out: RAGGED_RANK * int64")
    .Output("dense_values_out: int64")
    .Attr("RAGGED_RANK: int >= 1")
    .Attr("slot: int >= 1")
    .Attr("fid_version: int = 2")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i + 1 < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      c->set_output(c->num_outputs() - 1, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc("Crosses the ids of each row, those of the first feature outer.");

REGISTER_OP("ExtractFid")
    .Input("input: int64")
    .Output("output: int64")
    .Attr("slot: int")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("Hashes numbers to v2 ids of a slot.");

REGISTER_OP("MapId")
    .Input("input: T")
    .Output("output: T")
    .Attr("T: {int32, int64}")
    .Attr("from_value: list(int)")
    .Attr("to_value: list(int)")
    .Attr("default_value: int = -1")
    .SetShapeFn(shape_inference::UnchangedShape)
    .Doc("Maps from_value[i] to to_value[i], everything else to default_value.");

REGISTER_OP("MonolithGenFidMask")
    .Input("splits: T")
    .Input("values: int64")
    .Output("mask: float")
    .Attr("T: {int32, int64} = DT_INT64")
    .Attr("fid: int")
    .SetShapeFn([](InferenceContext* c) {
      shape_inference::DimensionHandle rows;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(c->input(0), 0), 1, &rows));
      c->set_output(0, c->Vector(rows));
      return OkStatus();
    })
    .Doc("1 for every row that has the id, else 0.");

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
    .SetDoNotOptimize()
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
    .SetDoNotOptimize()
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

Status GetSlotAttrs(OpKernelConstruction* ctx, int64_t* slot, int64_t* version) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("slot", slot));
  TF_RETURN_IF_ERROR(ctx->GetAttr("fid_version", version));
  if (*version != 1 && *version != 2) {
    return errors::InvalidArgument("fid_version is ", *version, ", want 1 or 2");
  }
  const int64_t limit =
      *version == 1 ? ::monolith::data::kMaxSlotsV1 : ::monolith::data::kMaxSlotsV2;
  if (*slot < limit) return OkStatus();
  return errors::InvalidArgument("slot is ", *slot, ", want less than ", limit);
}

int64_t WithSlot(int64_t version, int64_t slot, uint64_t bits) {
  return static_cast<int64_t>(version == 1 ? MakeFidV1(slot, bits) : MakeFidV2(slot, bits));
}

class SwitchSlotOp final : public OpKernel {
 public:
  explicit SwitchSlotOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetSlotAttrs(ctx, &slot_, &version_));
  }

  void Compute(OpKernelContext* ctx) override {
    const int last = ctx->num_inputs() - 1;
    for (int i = 0; i < last; ++i) ctx->set_output(i, ctx->input(i));
    const auto values = ctx->input(last).flat<int64_t>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(last, ctx->input(last).shape(), &output));
    auto out = output->flat<int64_t>();
    for (int64_t i = 0; i < values.size(); ++i) {
      out(i) = WithSlot(version_, slot_, static_cast<uint64_t>(values(i)));
    }
  }

 private:
  int64_t slot_;
  int64_t version_;
};

class FeatureCombineOp final : public OpKernel {
 public:
  explicit FeatureCombineOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t ragged_rank;
    OP_REQUIRES_OK(ctx, GetSlotAttrs(ctx, &slot_, &version_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("RAGGED_RANK", &ragged_rank));
    OP_REQUIRES(ctx, ragged_rank == 1,
                errors::InvalidArgument("RAGGED_RANK is ", ragged_rank, ", want 1"));
  }

  void Compute(OpKernelContext* ctx) override {
    for (int i = 0; i < 4; ++i) OP_REQUIRES_OK(ctx, CheckVector("input", ctx->input(i)));
    const auto splits1 = ctx->input(0).vec<int64_t>();
    const auto values1 = ctx->input(1).vec<int64_t>();
    const auto splits2 = ctx->input(2).vec<int64_t>();
    const auto values2 = ctx->input(3).vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits of src1", splits1, values1.size()));
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits of src2", splits2, values2.size()));
    OP_REQUIRES_OK(ctx, CheckEqual("size of the splits of src1", splits1.size(), "that of src2",
                                   splits2.size()));
    const int64_t rows = splits1.size() - 1;
    Tensor* splits_tensor;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &splits_tensor));
    auto splits = splits_tensor->vec<int64_t>();
    splits(0) = 0;
    for (int64_t row = 0; row < rows; ++row) {
      splits(row + 1) =
          splits(row) + (splits1(row + 1) - splits1(row)) * (splits2(row + 1) - splits2(row));
    }
    Tensor* values_tensor;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({splits(rows)}), &values_tensor));
    int64_t* out = values_tensor->flat<int64_t>().data();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = splits1(row); i < splits1(row + 1); ++i) {
        for (int64_t j = splits2(row); j < splits2(row + 1); ++j) {
          *out++ = WithSlot(version_, slot_, ::monolith::data::CombineFids(values1(i), values2(j)));
        }
      }
    }
  }

 private:
  int64_t slot_;
  int64_t version_;
};

class ExtractFidOp final : public OpKernel {
 public:
  explicit ExtractFidOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("slot", &slot_));
    OP_REQUIRES(ctx, slot_ >= 0 && slot_ < ::monolith::data::kMaxSlotsV2,
                errors::InvalidArgument("slot is ", slot_, ", want 0 to ",
                                        ::monolith::data::kMaxSlotsV2 - 1));
  }

  void Compute(OpKernelContext* ctx) override {
    const auto input = ctx->input(0).flat<int64_t>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<int64_t>();
    for (int64_t i = 0; i < input.size(); ++i) {
      const uint64_t hash = ::monolith::data::HashNumber(static_cast<uint64_t>(input(i)));
      out(i) = static_cast<int64_t>(MakeFidV2(slot_, hash));
    }
  }

 private:
  int64_t slot_;
};

template <typename T>
class MapIdOp final : public OpKernel {
 public:
  explicit MapIdOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> from, to;
    int64_t default_value;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("from_value", &from));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("to_value", &to));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("default_value", &default_value));
    OP_REQUIRES_OK(ctx, CheckEqual("length of to_value", static_cast<int64_t>(to.size()),
                                   "length of from_value", static_cast<int64_t>(from.size())));
    for (size_t i = 0; i < from.size(); ++i) {
      map_[static_cast<T>(from[i])] = static_cast<T>(to[i]);
    }
    default_ = static_cast<T>(default_value);
  }

  void Compute(OpKernelContext* ctx) override {
    const auto input = ctx->input(0).flat<T>();
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    auto out = output->flat<T>();
    for (int64_t i = 0; i < input.size(); ++i) {
      const auto it = map_.find(input(i));
      out(i) = it == map_.end() ? default_ : it->second;
    }
  }

 private:
  absl::flat_hash_map<T, T> map_;
  T default_;
};

template <typename T>
class GenFidMaskOp final : public OpKernel {
 public:
  explicit GenFidMaskOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fid", &fid_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckVector("splits", ctx->input(0)));
    OP_REQUIRES_OK(ctx, CheckVector("values", ctx->input(1)));
    const auto splits = ctx->input(0).vec<T>();
    const auto values = ctx->input(1).vec<int64_t>();
    OP_REQUIRES_OK(ctx, CheckRowSplits("splits", splits, values.size()));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({splits.size() - 1}), &output));
    auto out = output->vec<float>();
    for (int64_t row = 0; row + 1 < splits.size(); ++row) {
      const int64_t* end = values.data() + splits(row + 1);
      out(row) = std::find(values.data() + splits(row), end, fid_) == end ? 0.0f : 1.0f;
    }
  }

 private:
  int64_t fid_;
};

class VariantToZerosOp final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ctx->input(0).shape(), &output));
    output->flat<int64_t>().setZero();
  }
};

class HasVariantOp final : public OpKernel {
 public:
  explicit HasVariantOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variant_type", &name));
    OP_REQUIRES_OK(ctx, ParseSampleType("variant_type", name, &type_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckScalar("input", ctx->input(0)));
    const Variant& variant = ctx->input(0).scalar<Variant>()();
    size_t size = 0;
    switch (type_) {
      case SampleType::kInstance:
        OP_REQUIRES_OK(ctx, Size<Instance>(variant, &size));
        break;
      case SampleType::kExample:
        OP_REQUIRES_OK(ctx, Size<Example>(variant, &size));
        break;
      case SampleType::kExampleBatch:
        OP_REQUIRES_OK(ctx, Size<ExampleBatch>(variant, &size));
        break;
    }
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
    std::vector<int64_t> chnids;
    std::vector<std::string> datasources;
    std::string default_datasource;
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_header", &has_header_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("has_sort_id", &flags_.has_sort_id));
    TF_RETURN_IF_ERROR(ctx->GetAttr("lagrangex_header", &flags_.lagrangex_header));
    TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump_prefix", &flags_.kafka_dump_prefix));
    TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump", &flags_.kafka_dump));
    TF_RETURN_IF_ERROR(ctx->GetAttr("chnids", &chnids));
    TF_RETURN_IF_ERROR(ctx->GetAttr("datasources", &datasources));
    TF_RETURN_IF_ERROR(ctx->GetAttr("default_datasource", &default_datasource));
    TF_RETURN_IF_ERROR(CheckEqual("length of datasources", static_cast<int64_t>(datasources.size()),
                                  "length of chnids", static_cast<int64_t>(chnids.size())));
    for (size_t i = 0; i < chnids.size(); ++i) {
      key_of_chnid_[chnids[i]] = ::monolith::data::DataSourceKey(datasources[i]);
    }
    default_key_ = ::monolith::data::DataSourceKey(default_datasource);
    return OkStatus();
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
    if (!payload.empty()) proto->set_data_source_key(flags_.lagrangex_header ? key : Key(*proto));
    return OkStatus();
  }

 private:
  uint32_t Key(const ExampleBatch&) const { return default_key_; }
  template <typename Proto>
  uint32_t Key(const Proto& proto) const {
    const auto it = key_of_chnid_.find(proto.line_id().chnid());
    return it == key_of_chnid_.end() ? default_key_ : it->second;
  }

  bool has_header_;
  HeaderFlags flags_;
  absl::flat_hash_map<int64_t, uint32_t> key_of_chnid_;
  uint32_t default_key_;
};

class StringToVariantOp final : public OpKernel {
 public:
  explicit StringToVariantOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string name;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("variant_type", &name));
    OP_REQUIRES_OK(ctx, ParseSampleType("variant_type", name, &type_));
    OP_REQUIRES_OK(ctx, decoder_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    switch (type_) {
      case SampleType::kInstance:
        return Run<Instance>(ctx);
      case SampleType::kExample:
        return Run<Example>(ctx);
      case SampleType::kExampleBatch:
        return Run<ExampleBatch>(ctx);
    }
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

class StringToVariantWithTransformOp final : public OpKernel {
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
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({static_cast<int64_t>(samples.size())}), &output));
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

class SwitchSlotBatchOp final : public OpKernel {
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
      OP_REQUIRES(ctx, slots[i] >= 0 && slots[i] < ::monolith::data::kMaxSlotsV2,
                  errors::InvalidArgument("slot of '", features[i], "' is ", slots[i],
                                          ", want 0 to ", ::monolith::data::kMaxSlotsV2 - 1));
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
      for (uint64_t& fid : *list.mutable_value()) fid = ::monolith::data::FidV1ToV2(fid);
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

REGISTER_KERNEL_BUILDER(Name("SwitchSlot").Device(DEVICE_CPU), SwitchSlotOp);
REGISTER_KERNEL_BUILDER(Name("FeatureCombine").Device(DEVICE_CPU), FeatureCombineOp);
REGISTER_KERNEL_BUILDER(Name("ExtractFid").Device(DEVICE_CPU), ExtractFidOp);
REGISTER_KERNEL_BUILDER(Name("MapId").Device(DEVICE_CPU).TypeConstraint<int32_t>("T"),
                        MapIdOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("MapId").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
                        MapIdOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("MonolithGenFidMask").Device(DEVICE_CPU).TypeConstraint<int32_t>("T"),
                        GenFidMaskOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("MonolithGenFidMask").Device(DEVICE_CPU).TypeConstraint<int64_t>("T"),
                        GenFidMaskOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("VariantToZeros").Device(DEVICE_CPU), VariantToZerosOp);
REGISTER_KERNEL_BUILDER(Name("HasVariant").Device(DEVICE_CPU), HasVariantOp);
REGISTER_KERNEL_BUILDER(Name("StringToVariant").Device(DEVICE_CPU), StringToVariantOp);
REGISTER_KERNEL_BUILDER(Name("StringToVariantWithTransform").Device(DEVICE_CPU),
                        StringToVariantWithTransformOp);
REGISTER_KERNEL_BUILDER(Name("SwitchSlotBatch").Device(DEVICE_CPU), SwitchSlotBatchOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
