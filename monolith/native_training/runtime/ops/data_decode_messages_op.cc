// MonolithDecodeMessages: the samples of messages of a stream.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data_sample.h"
#include "monolith/native_training/runtime/ops/data_sample_reader.h"
#include "monolith/native_training/runtime/ops/kernel_registration.h"
#include "monolith/native_training/runtime/ops/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::data::HeaderFlags;
using ::monolith::data::MakeRecordHeader;
using ::monolith::data::MemorySource;
using shape_inference::InferenceContext;

REGISTER_OP("MonolithDecodeMessages")
    .Input("message: string")
    .Input("origin: string")
    .Output("samples: out_type")
    .Attr("out_type: {variant, string}")
    .Attr("input_pb_type: string")
    .Attr("output_pb_type: string")
    .Attr("feature_pruning_type: int = 2")
    .Attr("filter_empty: bool = false")
    .Attr("has_header: bool = true")
    .Attr("has_sort_id: bool = false")
    .Attr("lagrangex_header: bool = false")
    .Attr("kafka_dump_prefix: bool = false")
    .Attr("kafka_dump: bool = false")
    .Attr("chnids: list(int) = []")
    .Attr("datasources: list(string) = []")
    .Attr("default_datasource: string = ''")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return OkStatus();
    })
    .Doc(R"doc(
The samples of messages, converted. Records without payload give none.

message: any shape.
origin: the same shape, where each message comes from; errors name it.
samples: [k], in the order of the messages and of the records in them.
out_type: string for plaintext samples, else variant.
input_pb_type: instance, example, examplebatch or plaintext: what a record is.
output_pb_type: what a sample is.
feature_pruning_type: 0: keep all; 1: drop features; 2: drop raw features.
filter_empty: leave out samples that have no content.
has_header: a message is a sequence of framed records, with the headers that the next four
  say; otherwise it is one record.
chnids: a sample of channel chnids[i] is of data source datasources[i], others of
  default_datasource; a lagrangex header wins.
)doc");

// The only thing a sample without content may have is its data source.
template <typename Proto>
bool IsDefault(const Proto& sample) {
  Proto empty;
  empty.set_data_source_key(sample.data_source_key());
  return sample.ByteSizeLong() <= empty.ByteSizeLong();
}

bool IsDefault(const Tensor& element) {
  if (element.dtype() == DT_STRING) return element.scalar<tstring>()().empty();
  const Variant& variant = element.scalar<Variant>()();
  if (const auto* held = variant.get<SampleVariant<Instance>>()) return IsDefault(held->proto());
  if (const auto* held = variant.get<SampleVariant<Example>>()) return IsDefault(held->proto());
  const auto* held = variant.get<SampleVariant<ExampleBatch>>();
  return held != nullptr && IsDefault(held->proto());
}

class DecodeMessagesOp : public OpKernel {
 public:
  explicit DecodeMessagesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string input_type, output_type;
    int32_t pruning;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("out_type", &out_type_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("input_pb_type", &input_type));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_pb_type", &output_type));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("feature_pruning_type", &pruning));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("filter_empty", &filter_empty_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_header", &has_header_));
    HeaderFlags flags;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("has_sort_id", &flags.has_sort_id));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lagrangex_header", &flags.lagrangex_header));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kafka_dump_prefix", &flags.kafka_dump_prefix));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kafka_dump", &flags.kafka_dump));
    if (has_header_) options_.flags = flags;
    OP_REQUIRES_OK(ctx, ParsePbType("input_pb_type", input_type, &options_.input_type));
    OP_REQUIRES_OK(ctx, ParsePbType("output_pb_type", output_type, &options_.output_type));
    OP_REQUIRES_OK(ctx, CheckTypes(options_));
    OP_REQUIRES(ctx, pruning >= 0 && pruning <= 2,
                errors::InvalidArgument("feature_pruning_type is ", pruning, ", want 0 to 2"));
    options_.pruning = static_cast<Pruning>(pruning);
    OP_REQUIRES_OK(ctx, options_.keys.Init(ctx));
    const DataType want = options_.output_type == PbType::kPlaintext ? DT_STRING : DT_VARIANT;
    OP_REQUIRES(ctx, out_type_ == want,
                errors::InvalidArgument("out_type is ", DataTypeString(out_type_), ", want ",
                                        DataTypeString(want), " for this output_pb_type"));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckSameShape("origin", ctx->input(1), "message", ctx->input(0)));
    const auto messages = ctx->input(0).flat<tstring>();
    const auto origins = ctx->input(1).flat<tstring>();
    std::vector<Tensor> elements;
    for (int64_t i = 0; i < messages.size(); ++i) {
      OP_REQUIRES_OK(ctx, Decode(messages(i), origins(i), &elements));
    }
    Tensor* output;
    const TensorShape shape({static_cast<int64_t>(elements.size())});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &output));
    for (size_t i = 0; i < elements.size(); ++i) {
      if (out_type_ == DT_STRING) {
        output->flat<tstring>()(i) = std::move(elements[i].scalar<tstring>()());
      } else {
        output->flat<Variant>()(i) = std::move(elements[i].scalar<Variant>()());
      }
    }
  }

 private:
  Status Decode(const tstring& message, const tstring& origin,
                std::vector<Tensor>* elements) const {
    std::string bytes;
    if (!has_header_) bytes = MakeRecordHeader(HeaderFlags(), "", message.size());
    bytes.append(message.data(), message.size());
    SampleReader reader(options_, std::string(origin.data(), origin.size()));
    reader.set_skip_empty(true);
    TF_RETURN_IF_ERROR(reader.Open(std::make_unique<MemorySource>(bytes), 0, 0));
    while (true) {
      Tensor element;
      bool end;
      TF_RETURN_IF_ERROR(reader.Next(&element, &end));
      if (end) return OkStatus();
      if (!filter_empty_ || !IsDefault(element)) elements->push_back(std::move(element));
    }
  }

  DataType out_type_;
  bool filter_empty_;
  bool has_header_;
  SampleReadOptions options_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithDecodeMessages").Device(DEVICE_CPU), DecodeMessagesOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
