// Ops of the writer of a row log: a parameter server, or a process that trains alone.
//
// MonolithRowLogClient is told of changes by tables that are created with it. Begin and Take make a
// batch of messages from them; the marks let hooks of the chief and the thread that publishes meet.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/serving/sync_client.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/row_log/row_batch.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

constexpr int64_t kInfoSize = 15;
constexpr int64_t kMaxCapacity = int64_t{1} << 32;

Status InfoShape(InferenceContext* c) {
  c->set_output(0, c->Vector(kInfoSize));
  return OkStatus();
}

Status BeginShape(InferenceContext* c) {
  c->set_output(0, c->Vector(3));
  return OkStatus();
}

Status TakeShape(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(2));
  return OkStatus();
}

REGISTER_OP("MonolithRowLogClient")
    .Output("handle: resource")
    .Attr("capacity: int = 2097152")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a client that remembers which embeddings were touched or removed since the last batch.

handle: For tables and the ops of a row log.
capacity: When more were touched, the next batch holds all embeddings.
)doc");

REGISTER_OP("MonolithRowLogInfo")
    .Input("handle: resource")
    .Output("info: int64")
    .SetIsStateful()
    .SetShapeFn(InfoShape)
    .Doc(R"doc(
Tells where the writer of a row log stands.

handle: From MonolithRowLogClient.
info: tables, touched ids, bytes they take at most, why the next batch holds all (1: overflow,
  2: replaced content), how often there was such a reason, chunks that are not taken yet; the
  position (epoch, seq, next offset); how often tables became ready, and the position (epoch, seq,
  next offset) and the step of the checkpoint they came from; the step of the newest checkpoint.
)doc");

REGISTER_OP("MonolithRowLogMark")
    .Input("handle: resource")
    .Input("values: int64")
    .Attr("kind: {'position', 'ready', 'saved'}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Notes what others read with MonolithRowLogInfo.

handle: From MonolithRowLogClient.
values: position: epoch, seq and next offset. ready: those of the checkpoint that the tables came
  from, and its step, negative for none. saved: the step of a complete checkpoint.
kind: What the values are.
)doc");

REGISTER_OP("MonolithRowLogBegin")
    .Input("handle: resource")
    .Input("header: string")
    .Input("full_scan: bool")
    .Input("digest: bool")
    .Output("counts: int64")
    .Attr("keep_hashes: bool = true")
    .Attr("fp16: bool = false")
    .SetIsStateful()
    .SetShapeFn(BeginShape)
    .Doc(R"doc(
Begins a batch with all embeddings that were touched or removed since the last one.

handle: From MonolithRowLogClient.
header: A serialized RowBatch without tables.
full_scan: Whether to take all embeddings.
digest: Whether the batch tells the digest of the tables.
counts: chunks of the batch, ids in it, whether it holds all embeddings.
keep_hashes: Whether to remember what was published, for digests.
fp16: Whether embeddings are sent in half precision.
)doc");

REGISTER_OP("MonolithRowLogTake")
    .Input("handle: resource")
    .Output("messages: string")
    .Output("counts: int64")
    .Attr("max_bytes: int = 67108864")
    .SetIsStateful()
    .SetShapeFn(TakeShape)
    .Doc(R"doc(
Takes the next chunks of the batch that MonolithRowLogBegin began.

handle: From MonolithRowLogClient.
messages: Values of messages, none if all were taken.
counts: embeddings and deleted ids in them.
max_bytes: No further chunk is made when this many bytes are there.
)doc");

REGISTER_OP("MonolithRowLogAbandon")
    .Input("handle: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Drops what is left of a batch. The next one holds all embeddings.

handle: From MonolithRowLogClient.
)doc");

REGISTER_OP("MonolithRowLogTouch")
    .Input("handle: resource")
    .Input("messages: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Lets the next batch have every id that messages of the log have, with its present value.

handle: From MonolithRowLogClient.
messages: A vector of values of messages.
)doc");

REGISTER_OP("MonolithRowLogForgetReplaced")
    .Input("handle: resource")
    .Input("generation: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Says that replaced content needs no batch of all embeddings: what differs was touched.

handle: From MonolithRowLogClient.
generation: The number of reasons in MonolithRowLogInfo when that was found. If there was another
  one since, nothing happens.
)doc");

class RowLogClientOp : public NamedResourceOp<SyncClient> {
 public:
  explicit RowLogClientOp(OpKernelConstruction* ctx) : NamedResourceOp<SyncClient>(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("capacity", &capacity_));
    OP_REQUIRES_OK(ctx, CheckCount("capacity", capacity_, 0, kMaxCapacity));
  }

 private:
  Status Create(OpKernelContext*, const std::string&, SyncClient** resource) override {
    *resource = new SyncClient(capacity_);
    return OkStatus();
  }

  int64_t capacity_ = 0;
};

Status GetClient(OpKernelContext* ctx, core::RefCountPtr<SyncClient>* client) {
  TF_RETURN_IF_ERROR(LookupHandleInput(ctx, 0, "handle", client));
  if ((*client)->builder() != nullptr) return OkStatus();
  return errors::InvalidArgument("handle is a ", (*client)->DebugString(),
                                 ", want one of MonolithRowLogClient");
}

// An op of a client's handle, its first input.
class ClientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<SyncClient> client;
    OP_REQUIRES_OK(ctx, GetClient(ctx, &client));
    OP_REQUIRES_OK(ctx, Run(ctx, client.get()));
  }

 private:
  virtual Status Run(OpKernelContext* ctx, SyncClient* client) = 0;
};

class RowLogInfoOp : public ClientOp {
 public:
  using ClientOp::ClientOp;

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    const engine::BatchBuilder::Info info = client->builder()->GetInfo();
    const RowLogMarks marks = client->marks();
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {kInfoSize}, &out));
    const int64_t values[kInfoSize] = {
        info.num_tables,      info.waiting_ids,  info.waiting_bytes, int64_t{info.scan_reasons},
        info.scan_generation, info.chunks_left,  marks.position[0],  marks.position[1],
        marks.position[2],    marks.ready_count, marks.restored[0],  marks.restored[1],
        marks.restored[2],    marks.restored[3], marks.saved_step};
    std::copy(values, values + kInfoSize, out->flat<int64_t>().data());
    return OkStatus();
  }
};

class RowLogMarkOp : public ClientOp {
 public:
  explicit RowLogMarkOp(OpKernelConstruction* ctx) : ClientOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kind", &kind_));
  }

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    const Tensor& values = ctx->input(1);
    const int64_t want = kind_ == "position" ? 3 : kind_ == "ready" ? 4 : 1;
    TF_RETURN_IF_ERROR(
        CheckEqual("size of values", values.NumElements(), "that of " + kind_, want));
    const int64_t* from = values.flat<int64_t>().data();
    client->UpdateMarks([&](RowLogMarks* marks) {
      if (kind_ == "position") {
        std::copy(from, from + 3, marks->position);
      } else if (kind_ == "ready") {
        std::copy(from, from + 4, marks->restored);
        ++marks->ready_count;
      } else {
        marks->saved_step = from[0];
      }
    });
    return OkStatus();
  }

  std::string kind_;
};

class RowLogBeginOp : public ClientOp {
 public:
  explicit RowLogBeginOp(OpKernelConstruction* ctx) : ClientOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep_hashes", &options_.keep_hashes));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fp16", &options_.half));
  }

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    TF_RETURN_IF_ERROR(CheckScalar("header", ctx->input(1)));
    TF_RETURN_IF_ERROR(CheckScalar("full_scan", ctx->input(2)));
    TF_RETURN_IF_ERROR(CheckScalar("digest", ctx->input(3)));
    const auto header_scalar = ctx->input(1).scalar<tstring>();
    const tstring& header = header_scalar();
    engine::BatchBuilder::Options options = options_;
    options.full_scan = ctx->input(2).scalar<bool>()();
    options.digest = ctx->input(3).scalar<bool>()();
    engine::BatchView batch;
    TF_RETURN_IF_ERROR(
        FromEngine(engine::ParseBatch(header.data(), static_cast<int64_t>(header.size()), &batch)));
    if (!batch.tables.empty()) {
      return errors::InvalidArgument("header has ", batch.tables.size(), " tables, want none");
    }
    if (batch.header.epoch < 1 || batch.header.seq <= batch.header.prev_seq) {
      return errors::InvalidArgument("header has epoch ", batch.header.epoch, ", seq ",
                                     batch.header.seq, " and prev_seq ", batch.header.prev_seq,
                                     ", want an epoch of at least 1 and a larger seq");
    }
    batch.header.has_digest = false;
    engine::BatchBuilder::Counts counts;
    TF_RETURN_IF_ERROR(FromEngine(client->builder()->Begin(batch.header, options, &counts)));
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {3}, &out));
    out->flat<int64_t>()(0) = counts.num_chunks;
    out->flat<int64_t>()(1) = counts.num_ids;
    out->flat<int64_t>()(2) = counts.full_scan ? 1 : 0;
    return OkStatus();
  }

  engine::BatchBuilder::Options options_;
};

class RowLogTakeOp : public ClientOp {
 public:
  explicit RowLogTakeOp(OpKernelConstruction* ctx) : ClientOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_bytes", &max_bytes_));
  }

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    std::vector<std::string> chunk;
    std::vector<tstring> messages;
    int64_t num_rows = 0, num_deleted = 0, bytes = 0;
    do {
      int64_t rows = 0, deleted = 0;
      // One at a time, so that all are made in the same memory.
      TF_RETURN_IF_ERROR(FromEngine(client->builder()->Take(1, &chunk, &rows, &deleted)));
      for (const std::string& message : chunk) {
        messages.emplace_back(message);
        bytes += static_cast<int64_t>(message.size());
      }
      num_rows += rows;
      num_deleted += deleted;
    } while (!chunk.empty() && bytes < max_bytes_);
    Tensor* out = nullptr;
    Tensor* counts = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {static_cast<int64_t>(messages.size())}, &out));
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {2}, &counts));
    for (size_t i = 0; i < messages.size(); ++i) {
      out->flat<tstring>()(static_cast<int64_t>(i)) = std::move(messages[i]);
    }
    counts->flat<int64_t>()(0) = num_rows;
    counts->flat<int64_t>()(1) = num_deleted;
    return OkStatus();
  }

  int64_t max_bytes_ = 0;
};

class RowLogAbandonOp : public ClientOp {
 public:
  using ClientOp::ClientOp;

 private:
  Status Run(OpKernelContext*, SyncClient* client) override {
    client->builder()->Abandon();
    return OkStatus();
  }
};

class RowLogTouchOp : public ClientOp {
 public:
  using ClientOp::ClientOp;

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    const Tensor& messages = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckVector("messages", messages));
    const auto texts = messages.flat<tstring>();
    // All are checked before any counts.
    std::vector<engine::BatchView> batches(static_cast<size_t>(messages.NumElements()));
    for (int64_t i = 0; i < messages.NumElements(); ++i) {
      const tstring& message = texts(i);
      TF_RETURN_IF_ERROR(FromEngine(engine::ParseMessage(
          message.data(), static_cast<int64_t>(message.size()), &batches[static_cast<size_t>(i)])));
    }
    for (const engine::BatchView& batch : batches) client->builder()->TouchMessage(batch);
    return OkStatus();
  }
};

class RowLogForgetReplacedOp : public ClientOp {
 public:
  using ClientOp::ClientOp;

 private:
  Status Run(OpKernelContext* ctx, SyncClient* client) override {
    TF_RETURN_IF_ERROR(CheckScalar("generation", ctx->input(1)));
    client->builder()->ForgetReplaced(ctx->input(1).scalar<int64_t>()());
    return OkStatus();
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithRowLogClient").Device(DEVICE_CPU), RowLogClientOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogInfo").Device(DEVICE_CPU), RowLogInfoOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogMark").Device(DEVICE_CPU), RowLogMarkOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogBegin").Device(DEVICE_CPU), RowLogBeginOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogTake").Device(DEVICE_CPU), RowLogTakeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogAbandon").Device(DEVICE_CPU), RowLogAbandonOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogTouch").Device(DEVICE_CPU), RowLogTouchOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogForgetReplaced").Device(DEVICE_CPU),
                        RowLogForgetReplacedOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
