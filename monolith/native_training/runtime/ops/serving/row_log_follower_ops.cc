// Ops of a reader of a row log: the tables of a serving process follow those of a parameter server.
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/named_resource_op.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "monolith/native_training/runtime/ops/tables/hash_table_resource.h"
#include "monolith/native_training/runtime/ops/tables/multi_hash_table_resource.h"
#include "monolith/native_training/runtime/row_log/batch_follower.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

constexpr int64_t kStateSize = 13;

Status StateShape(InferenceContext* c) {
  c->set_output(0, c->Vector(kStateSize));
  c->set_output(1, c->Scalar());
  return OkStatus();
}

Status DigestShape(InferenceContext* c) {
  for (int i = 0; i < 3; ++i) c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  return OkStatus();
}

REGISTER_OP("MonolithRowLogFollower")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates what remembers which batch of a row log was applied last.

handle: For MonolithRowLogSeek and MonolithRowLogApply.
)doc");

REGISTER_OP("MonolithRowLogSeek")
    .Input("handle: resource")
    .Input("tables: num_tables * resource")
    .Input("epoch: int64")
    .Input("seq: int64")
    .Attr("num_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Lets a follower go on behind a batch whose embeddings its tables have.

handle: From MonolithRowLogFollower.
tables: Single tables and groups of tables. A single one goes by the name of its handle.
epoch: Of the batch.
seq: Of the batch.
num_tables: Number of handles.
)doc");

REGISTER_OP("MonolithRowLogApply")
    .Input("handle: resource")
    .Input("tables: num_tables * resource")
    .Input("messages: string")
    .Output("state: int64")
    .Output("send_time: double")
    .Attr("num_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(StateShape)
    .Doc(R"doc(
Applies messages to tables: each batch when all its chunks have come, if it is newer.

handle: From MonolithRowLogFollower.
tables: Single tables and groups of tables. A single one goes by the name of its handle.
messages: A vector of values of messages. At the first that is bad the op fails; those before it
  count.
state: epoch and seq of the newest batch; newest event time; how many batches, embeddings and
  deletions were applied; messages skipped as old; batches that were never complete; batches whose
  predecessor is missing; parts for unknown tables; chunks that wait; seq at which digests were
  compared, and whether they were equal (-1: none came).
send_time: Of the newest batch, seconds since 1970.
num_tables: Number of handles.
)doc");

REGISTER_OP("MonolithRowLogFollowerDigests")
    .Input("handle: resource")
    .Output("names: string")
    .Output("digests: uint64")
    .Output("num_rows: int64")
    .SetIsStateful()
    .SetShapeFn(DigestShape)
    .Doc(R"doc(
Returns the digests that a follower keeps with each batch.

handle: From MonolithRowLogFollower.
names: Of tables.
digests: One for each table.
num_rows: How many embeddings of each table are not zeros.
)doc");

REGISTER_OP("MonolithRowLogDigests")
    .Input("tables: num_tables * resource")
    .Output("names: string")
    .Output("digests: uint64")
    .Output("num_rows: int64")
    .Attr("num_tables: int >= 0")
    .SetIsStateful()
    .SetShapeFn(DigestShape)
    .Doc(R"doc(
Reads all embeddings of tables and returns their digests.

tables: Single tables and groups of tables. A single one goes by the name of its handle.
names: Of tables.
digests: One for each table.
num_rows: How many embeddings of each table are not zeros.
num_tables: Number of handles.
)doc");

class Follower : public ResourceBase {
 public:
  engine::BatchFollower* get() { return &follower_; }
  std::string DebugString() const override { return "follower of a row log"; }

 private:
  engine::BatchFollower follower_;
};

class RowLogFollowerOp : public NamedResourceOp<Follower> {
 public:
  using NamedResourceOp<Follower>::NamedResourceOp;

 private:
  Status Create(OpKernelContext*, const std::string&, Follower** resource) override {
    *resource = new Follower;
    return OkStatus();
  }
};

// Tables, and what keeps them alive.
struct HeldTables {
  std::vector<core::RefCountPtr<HashTableResource>> singles;
  std::vector<core::RefCountPtr<MultiHashTableResource>> groups;
  std::vector<engine::BatchFollower::NamedTable> tables;
};

Status GetTables(OpKernelContext* ctx, int begin, int n, HeldTables* held) {
  for (int i = begin; i < begin + n; ++i) {
    const std::string input = strings::StrCat("tables[", i - begin, "]");
    TF_RETURN_IF_ERROR(CheckScalar(input, ctx->input(i)));
    const ResourceHandle& handle = HandleFromInput(ctx, i);
    core::RefCountPtr<HashTableResource> single;
    if (LookupResource(ctx, handle, &single).ok()) {
      held->tables.push_back({handle.name(), single->table()});
      held->singles.push_back(std::move(single));
      continue;
    }
    core::RefCountPtr<MultiHashTableResource> group;
    TF_RETURN_IF_ERROR(LookupHandleInput(ctx, i, input, &group));
    for (const NamedTable& table : group->named_tables()) {
      held->tables.push_back({table.name, table.table});
    }
    held->groups.push_back(std::move(group));
  }
  return OkStatus();
}

class RowLogSeekOp : public OpKernel {
 public:
  explicit RowLogSeekOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_tables", &num_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<Follower> follower;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &follower));
    HeldTables held;
    OP_REQUIRES_OK(ctx, GetTables(ctx, 1, num_tables_, &held));
    const Tensor& epoch = ctx->input(1 + num_tables_);
    const Tensor& seq = ctx->input(2 + num_tables_);
    OP_REQUIRES_OK(ctx, CheckScalar("epoch", epoch));
    OP_REQUIRES_OK(ctx, CheckScalar("seq", seq));
    follower->get()->Seek(held.tables, epoch.scalar<int64_t>()(), seq.scalar<int64_t>()());
  }

 private:
  int num_tables_ = 0;
};

class RowLogApplyOp : public OpKernel {
 public:
  explicit RowLogApplyOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_tables", &num_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<Follower> follower;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &follower));
    HeldTables held;
    OP_REQUIRES_OK(ctx, GetTables(ctx, 1, num_tables_, &held));
    const Tensor& messages = ctx->input(1 + num_tables_);
    OP_REQUIRES_OK(ctx, CheckVector("messages", messages));
    const auto texts = messages.flat<tstring>();
    for (int64_t i = 0; i < messages.NumElements(); ++i) {
      const tstring& message = texts(i);
      engine::BatchFollower::Outcome outcome;
      OP_REQUIRES_OK(
          ctx, FromEngine(follower->get()->Apply(held.tables, message.data(),
                                                 static_cast<int64_t>(message.size()), &outcome)));
    }
    const engine::FollowerState state = follower->get()->GetState();
    Tensor* out = nullptr;
    Tensor* send_time = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {kStateSize}, &out));
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 1, TensorShape({}), &send_time));
    const int64_t values[kStateSize] = {state.epoch,
                                        state.seq,
                                        state.newest_event_time,
                                        state.batches,
                                        state.rows,
                                        state.deleted,
                                        state.skipped,
                                        state.torn,
                                        state.gaps,
                                        state.unknown_tables,
                                        state.waiting_chunks,
                                        state.digest_seq,
                                        state.digest_ok};
    std::copy(values, values + kStateSize, out->flat<int64_t>().data());
    send_time->scalar<double>()() = state.send_time;
  }

 private:
  int num_tables_ = 0;
};

Status WriteDigests(OpKernelContext* ctx,
                    const std::map<std::string, engine::TableDigest>& digests) {
  Tensor* names = nullptr;
  Tensor* sums = nullptr;
  Tensor* rows = nullptr;
  const int64_t n = static_cast<int64_t>(digests.size());
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {n}, &names));
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {n}, &sums));
  TF_RETURN_IF_ERROR(AllocateOutput(ctx, 2, {n}, &rows));
  int64_t i = 0;
  for (const auto& table : digests) {
    names->flat<tstring>()(i) = table.first;
    sums->flat<uint64>()(i) = table.second.sum;
    rows->flat<int64_t>()(i) = table.second.rows;
    ++i;
  }
  return OkStatus();
}

class RowLogFollowerDigestsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<Follower> follower;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "handle", &follower));
    OP_REQUIRES_OK(ctx, WriteDigests(ctx, follower->get()->Digests()));
  }
};

class RowLogDigestsOp : public OpKernel {
 public:
  explicit RowLogDigestsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_tables", &num_tables_));
  }

  void Compute(OpKernelContext* ctx) override {
    HeldTables held;
    OP_REQUIRES_OK(ctx, GetTables(ctx, 0, num_tables_, &held));
    std::map<std::string, engine::TableDigest> digests;
    for (const auto& table : held.tables) digests[table.name] = engine::DigestOf(*table.table);
    OP_REQUIRES_OK(ctx, WriteDigests(ctx, digests));
  }

 private:
  int num_tables_ = 0;
};

REGISTER_GUARDED_KERNEL(Name("MonolithRowLogFollower").Device(DEVICE_CPU), RowLogFollowerOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogSeek").Device(DEVICE_CPU), RowLogSeekOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogApply").Device(DEVICE_CPU), RowLogApplyOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogFollowerDigests").Device(DEVICE_CPU),
                        RowLogFollowerDigestsOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRowLogDigests").Device(DEVICE_CPU), RowLogDigestsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
