// KafkaGroupReadableInit, ...Next and ...NextV2: a consumer as a resource, and reads from it.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/kafka/kafka_reader.h"
#include "monolith/native_training/runtime/ops/data/kafka/kafka_readers.h"
#include "monolith/native_training/runtime/ops/data/samples/message_decoder.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::kafka::KafkaFetch;
using ::monolith::kafka::KafkaReader;
using ::monolith::kafka::KafkaSource;
using shape_inference::InferenceContext;

REGISTER_OP("KafkaGroupReadableInit")
    .Input("topics: string")
    .Input("metadata: string")
    .Output("resource: resource")
    .Attr("input_pb_type: string = 'instance'")
    .Attr("output_pb_type: string = 'instance'")
    .Attr("has_sort_id: bool = false")
    .Attr("lagrangex_header: bool = false")
    .Attr("kafka_dump_prefix: bool = false")
    .Attr("kafka_dump: bool = false")
    .Attr("anonymous: bool = false")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
A consumer of Kafka topics; it connects when first read.

topics: names.
metadata: key=value settings of the consumer, group.id and bootstrap.servers among them.
input_pb_type: instance, example, examplebatch or plaintext: what records in messages are.
output_pb_type: what samples are.
anonymous: every run makes a consumer, which is closed when nobody holds its handle. Otherwise runs
  of the same node, or of nodes with the same shared_name, give the same one.
)doc");

REGISTER_OP("KafkaGroupReadableNext")
    .Input("input: resource")
    .Input("index: int64")
    .Input("message_poll_timeout: int64")
    .Input("stream_timeout: int64")
    .Output("message: string")
    .Output("key: string")
    .Output("continue_fetch: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      c->set_output(2, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Messages as they are: message and key are [k], maybe empty.

index: the number of the read; makes reads differ, and has no other use.
message_poll_timeout: milliseconds to wait for a message; the fetch ends when none came.
stream_timeout: continue_fetch is 0 once no message came for this many milliseconds; -1: it is always 1.
)doc");

REGISTER_OP("KafkaGroupReadableNextV2")
    .Input("input: resource")
    .Input("index: int64")
    .Input("message_poll_timeout: int64")
    .Input("stream_timeout: int64")
    .Output("message: variant")
    .Output("continue_fetch: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
The samples [n] of the messages of one fetch; see KafkaGroupReadableNext.
)doc");

class KafkaResource final : public ResourceBase {
 public:
  KafkaResource(std::shared_ptr<KafkaReader> reader, MessageDecoder decoder)
      : reader_(std::move(reader)), decoder_(std::move(decoder)) {}

  std::string DebugString() const override { return "Kafka: " + reader_->source().Describe(); }

  KafkaReader* reader() const { return reader_.get(); }
  const MessageDecoder& decoder() const { return decoder_; }

 private:
  const std::shared_ptr<KafkaReader> reader_;
  const MessageDecoder decoder_;
};

class KafkaInitOp : public NamedResourceOp<KafkaResource> {
 public:
  explicit KafkaInitOp(OpKernelConstruction* ctx) : NamedResourceOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("anonymous", &is_anonymous_));
    OP_REQUIRES_OK(ctx, decoder_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    if (!is_anonymous_) {
      NamedResourceOp::Compute(ctx);
      return;
    }
    KafkaResource* resource;
    OP_REQUIRES_OK(ctx, Create(ctx, name(), &resource));
    Tensor handle(DT_RESOURCE, TensorShape({}));
    handle.scalar<ResourceHandle>()() =
        ResourceHandle::MakeRefCountingHandle(resource, ctx->device()->name());
    ctx->set_output(0, handle);
  }

 protected:
  Status Create(OpKernelContext* ctx, const std::string&, KafkaResource** resource) override {
    TF_RETURN_IF_ERROR(CheckVector("topics", ctx->input(0)));
    TF_RETURN_IF_ERROR(CheckVector("metadata", ctx->input(1)));
    const auto strings = [](const Tensor& tensor) {
      const auto flat = tensor.vec<tstring>();
      return std::vector<std::string>(flat.data(), flat.data() + flat.size());
    };
    KafkaSource source;
    TF_RETURN_IF_ERROR(ToStatus(
        ::monolith::kafka::ParseSource(strings(ctx->input(0)), strings(ctx->input(1)), &source)));
    std::shared_ptr<KafkaReader> reader;
    TF_RETURN_IF_ERROR(GetKafkaReader(source, container_, shared_name_, &reader));
    *resource = std::make_unique<KafkaResource>(std::move(reader), decoder_).release();
    return OkStatus();
  }

 private:
  std::string container_;
  std::string shared_name_;
  bool is_anonymous_;
  MessageDecoder decoder_;
};

class KafkaNextOp : public OpKernel {
 public:
  explicit KafkaNextOp(OpKernelConstruction* ctx)
      : OpKernel(ctx), decodes_(ctx->def().op() == "KafkaGroupReadableNextV2") {}

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<KafkaResource> resource;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "input", &resource));
    const char* const names[] = {"index", "message_poll_timeout", "stream_timeout"};
    for (int i = 0; i < 3; ++i) OP_REQUIRES_OK(ctx, CheckScalar(names[i], ctx->input(i + 1)));
    const int64_t message_poll_timeout = ctx->input(2).scalar<int64_t>()();
    int64_t stream_timeout = ctx->input(3).scalar<int64_t>()();
    OP_REQUIRES_OK(
        ctx, ToStatus(::monolith::kafka::CheckTimeouts(message_poll_timeout, &stream_timeout)));
    if (decodes_) {
      OP_REQUIRES(ctx, resource->decoder().out_type() == DT_VARIANT,
                  errors::InvalidArgument(
                      "output_pb_type of the resource is plaintext, which is no sample: read "
                      "messages with KafkaGroupReadableNext"));
    }
    KafkaFetch fetch;
    CancellationManager* const manager = ctx->cancellation_manager();
    OP_REQUIRES_OK(ctx,
                   ReadFetch(
                       resource->reader(), message_poll_timeout, stream_timeout,
                       [manager] { return manager != nullptr && manager->IsCancelled(); }, &fetch));
    const int last = decodes_ ? 1 : 2;
    ctx->set_output(last, Tensor(static_cast<int64_t>(fetch.continue_fetch)));
    if (decodes_) {
      std::vector<Tensor> samples;
      for (size_t i = 0; i < fetch.messages.size(); ++i) {
        OP_REQUIRES_OK(ctx, resource->decoder().Decode(std::move(fetch.messages[i]),
                                                       fetch.Origin(i), &samples));
      }
      ctx->set_output(0, resource->decoder().Batch(std::move(samples)));
      return;
    }
    ctx->set_output(0, ToTensor(std::move(fetch.messages)));
    ctx->set_output(1, ToTensor(std::move(fetch.keys)));
  }

  // Waits for brokers, not for the processor.
  bool IsExpensive() override { return true; }

 private:
  const bool decodes_;
};

REGISTER_GUARDED_KERNEL(Name("KafkaGroupReadableInit").Device(DEVICE_CPU), KafkaInitOp);
REGISTER_GUARDED_KERNEL(Name("KafkaGroupReadableNext").Device(DEVICE_CPU), KafkaNextOp);
REGISTER_GUARDED_KERNEL(Name("KafkaGroupReadableNextV2").Device(DEVICE_CPU), KafkaNextOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
