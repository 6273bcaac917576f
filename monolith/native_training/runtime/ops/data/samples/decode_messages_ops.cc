// MonolithDecodeMessages: the samples of messages of a stream.
#include <cstdint>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/data/samples/message_decoder.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithDecodeMessages")
    .Input("message: string")
    .Input("origin: string")
    .Output("samples: out_type") MONOLITH_MESSAGE_DECODER_ATTRS
    // Not SetDoNotOptimize, which makes an op stateful: iterators over its samples are saved.
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

class DecodeMessagesOp : public OpKernel {
 public:
  explicit DecodeMessagesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, decoder_.InitWithOptions(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckSameShape("origin", ctx->input(1), "message", ctx->input(0)));
    const auto messages = ctx->input(0).flat<tstring>();
    const auto origins = ctx->input(1).flat<tstring>();
    std::vector<Tensor> samples;
    for (int64_t i = 0; i < messages.size(); ++i) {
      OP_REQUIRES_OK(ctx, decoder_.Decode(messages(i), origins(i), &samples));
    }
    ctx->set_output(0, decoder_.Batch(std::move(samples)));
  }

 private:
  MessageDecoder decoder_;
};

REGISTER_GUARDED_KERNEL(Name("MonolithDecodeMessages").Device(DEVICE_CPU), DecodeMessagesOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
