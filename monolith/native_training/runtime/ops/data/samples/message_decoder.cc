#include "monolith/native_training/runtime/ops/data/samples/message_decoder.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::HeaderFlags;
using ::monolith::data::MemorySource;

// The only thing a sample without content may have is its data source.
template <typename Proto>
bool IsDefault(const Proto& sample) {
  Proto empty;
  empty.set_data_source_key(sample.data_source_key());
  return sample.ByteSizeLong() <= empty.ByteSizeLong();
}

bool IsDefault(const Tensor& element) {
  if (element.dtype() == DT_STRING) return element.scalar<tstring>()().empty();
  const auto variant_scalar = element.scalar<Variant>();
  const Variant& variant = variant_scalar();
  if (const auto* held = variant.get<SampleVariant<Instance>>()) return IsDefault(held->proto());
  if (const auto* held = variant.get<SampleVariant<Example>>()) return IsDefault(held->proto());
  const auto* held = variant.get<SampleVariant<ExampleBatch>>();
  return held != nullptr && IsDefault(held->proto());
}

}  // namespace

Status MessageDecoder::Init(OpKernelConstruction* ctx) {
  std::string input_type, output_type;
  TF_RETURN_IF_ERROR(ctx->GetAttr("input_pb_type", &input_type));
  TF_RETURN_IF_ERROR(ctx->GetAttr("output_pb_type", &output_type));
  TF_RETURN_IF_ERROR(ctx->GetAttr("has_sort_id", &options_.flags.has_sort_id));
  TF_RETURN_IF_ERROR(ctx->GetAttr("lagrangex_header", &options_.flags.lagrangex_header));
  TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump_prefix", &options_.flags.kafka_dump_prefix));
  TF_RETURN_IF_ERROR(ctx->GetAttr("kafka_dump", &options_.flags.kafka_dump));
  TF_RETURN_IF_ERROR(ParsePbType("input_pb_type", input_type, &options_.input_type));
  TF_RETURN_IF_ERROR(ParsePbType("output_pb_type", output_type, &options_.output_type));
  return CheckTypes(options_);
}

Status MessageDecoder::InitWithOptions(OpKernelConstruction* ctx) {
  int32_t pruning;
  TF_RETURN_IF_ERROR(Init(ctx));
  TF_RETURN_IF_ERROR(ctx->GetAttr("feature_pruning_type", &pruning));
  TF_RETURN_IF_ERROR(ctx->GetAttr("filter_empty", &filter_empty_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("has_header", &has_header_));
  if (!has_header_) options_.flags = HeaderFlags();
  if (pruning < 0 || pruning > 2) {
    return errors::InvalidArgument("feature_pruning_type is ", pruning, ", want 0 to 2");
  }
  options_.pruning = static_cast<Pruning>(pruning);
  TF_RETURN_IF_ERROR(options_.keys.Init(ctx));
  DataType out_type;
  TF_RETURN_IF_ERROR(ctx->GetAttr("out_type", &out_type));
  if (out_type == this->out_type()) return OkStatus();
  return errors::InvalidArgument("out_type is ", DataTypeString(out_type), ", want ",
                                 DataTypeString(this->out_type()), " for this output_pb_type");
}

Status MessageDecoder::Decode(std::string message, std::string_view origin,
                              std::vector<Tensor>* samples) const {
  SampleReader reader(options_, std::string(origin));
  reader.set_skip_empty(true);
  if (has_header_) {
    TF_RETURN_IF_ERROR(reader.Open(std::make_unique<MemorySource>(message), 0, 0));
  } else {
    reader.OpenRecord(std::move(message));
  }
  while (true) {
    Tensor sample;
    bool end;
    TF_RETURN_IF_ERROR(reader.Next(&sample, &end));
    if (end) return OkStatus();
    if (!filter_empty_ || !IsDefault(sample)) samples->push_back(std::move(sample));
  }
}

Tensor MessageDecoder::Batch(std::vector<Tensor> samples) const {
  Tensor batch(out_type(), TensorShape({static_cast<int64_t>(samples.size())}));
  for (size_t i = 0; i < samples.size(); ++i) {
    if (out_type() == DT_STRING) {
      batch.flat<tstring>()(i) = std::move(samples[i].scalar<tstring>()());
    } else {
      batch.flat<Variant>()(i) = std::move(samples[i].scalar<Variant>()());
    }
  }
  return batch;
}

}  // namespace monolith_tf
}  // namespace tensorflow
