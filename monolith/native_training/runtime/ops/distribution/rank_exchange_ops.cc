// An exchange between ranks: the op of a training step, and those of the session that carries it
// out with TensorFlow's collectives (rank_exchange.h).
//
//   MonolithRankExchange                     in the step: waits until it is done
//   MonolithRankExchangeTake -> header       what this rank wants, of one shape for all calls
//      CollectiveGatherV2 -> headers
//   MonolithRankExchangePack -> words        the data, padded to what the largest part needs
//      a collective -> words
//   MonolithRankExchangeGive                 the results, to the op that waits
//
// Data travel as int32 words, whatever their type, except for sums. A padded size is one of a few,
// so that the collectives' instances, which TensorFlow never forgets, are few as well.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/distribution/rank_exchange.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/hash.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

constexpr int64_t kWordBytes = sizeof(int32_t);
// A message between servers is a protobuf, which holds less than 2 GiB.
constexpr int64_t kMaxBytes = int64_t{2000} << 20;
// Instance 1 of a group gathers the headers.
constexpr int64_t kFirstInstance = 2;

int64_t CountWords(int64_t bytes) { return (bytes + kWordBytes - 1) / kWordBytes; }

// A number for the size `words` is padded to, with eight sizes from one power of two to the next.
// The padded size replaces `words`.
int64_t PadWords(int64_t* words) {
  constexpr int64_t kSmallest = 64;
  int64_t step = kSmallest / 8;
  int64_t number = 0;
  int64_t size = kSmallest;
  while (size < *words) {
    // Eight steps double the size.
    size += step;
    ++number;
    if (number % 8 == 0) step = size / 8;
  }
  *words = size;
  return number;
}

int64_t RowBytes(const Tensor& tensor) {
  int64_t bytes = DataTypeSize(tensor.dtype());
  for (int d = 1; d < tensor.dims(); ++d) bytes *= tensor.dim_size(d);
  return bytes;
}

const char* Bytes(const Tensor& tensor) { return tensor.tensor_data().data(); }

char* MutableBytes(const Tensor& tensor) { return const_cast<char*>(tensor.tensor_data().data()); }

// memcpy may not be given null, which empty tensors have.
void Copy(char* target, const char* source, int64_t size) {
  if (size > 0) std::memcpy(target, source, static_cast<size_t>(size));
}

std::string Describe(const Tensor& tensor, bool is_by_rows) {
  const std::string type = DataTypeString(tensor.dtype());
  if (!is_by_rows) return type + tensor.shape().DebugString();
  std::string shape = "[rows";
  for (int d = 1; d < tensor.dims(); ++d) shape += "," + std::to_string(tensor.dim_size(d));
  return type + shape + "]";
}

// The op's attribute allows no other text.
ExchangeKind ParseKind(const std::string& text) {
  if (text == "alltoall") return ExchangeKind::kAllToAll;
  if (text == "allgather") return ExchangeKind::kAllGather;
  if (text == "broadcast") return ExchangeKind::kBroadcast;
  return ExchangeKind::kAllReduce;
}

bool IsByRows(ExchangeKind kind) {
  return kind == ExchangeKind::kAllToAll || kind == ExchangeKind::kAllGather;
}

REGISTER_OP("MonolithRankExchange")
    .Input("inputs: T")
    .Input("splits: int32")
    .Output("outputs: T")
    .Output("received: int32")
    .Attr("T: list(type) >= 1")
    .Attr("exchange: string")
    .Attr("kind: {'alltoall', 'allgather', 'broadcast', 'allreduce'}")
    .Attr("root: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* c) {
      std::string text;
      TF_RETURN_IF_ERROR(c->GetAttr("kind", &text));
      const ExchangeKind kind = ParseKind(text);
      for (int i = 0; i < c->num_outputs() - 1; ++i) {
        ShapeHandle shape = c->input(i);
        if (IsByRows(kind) && c->RankKnown(shape)) {
          TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, 1, &shape));
          TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
        }
        c->set_output(i, shape);
      }
      c->set_output(c->num_outputs() - 1, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Exchanges tensors with the other ranks, which all do the same under the same name.

inputs: one tensor for `alltoall` and `allgather`.
splits: how many rows go to each rank, for `alltoall`; empty for the others.
outputs: what this rank gets.
received: how many rows came from each rank, for `alltoall` and `allgather`; empty for the others.
exchange: the name. One exchange of a name is carried out at a time.
kind: `allreduce` sums.
root: whose tensors `broadcast` gives to all.
)doc");

REGISTER_OP("MonolithRankExchangeTake")
    .Input("exchange: string")
    .Output("header: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(1, InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Waits for a `MonolithRankExchange` of the name, and tells what it is.

header: `[1, 1 + ranks]`, a fingerprint of what has to be the same on all ranks, and how many rows
  go to each.
)doc");

REGISTER_OP("MonolithRankExchangePack")
    .Input("exchange: string")
    .Input("headers: int64")
    .Output("words: T")
    .Output("instance: int32")
    .Attr("T: {int32, int64, half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->UnknownShape());
      c->set_output(1, c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Returns what the request that was taken sends.

headers: `[ranks, 1 + ranks]`, those of all ranks.
words: `[ranks, n]` for `alltoall`, `[1, n]` for `allgather`, `[n]` for the others.
instance: a number for the shape of `words`.
)doc");

REGISTER_OP("MonolithRankExchangeGive")
    .Input("exchange: string")
    .Input("headers: int64")
    .Input("words: T")
    .Attr("T: {int32, int64, half, bfloat16, float, double}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs)
    .Doc(R"doc(
Ends the request that was taken with what the other ranks have sent.

words: `[ranks, n]` for `alltoall` and `allgather`, `[n]` for the others.
)doc");

class RankExchangeOp : public AsyncOpKernel {
 public:
  explicit RankExchangeOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("exchange", &exchange_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kind", &kind_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
    kind_ = ParseKind(kind_name_);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    ExchangeRequestPtr request;
    OP_REQUIRES_OK_ASYNC(ctx, CatchExceptions([&] { return MakeRequest(ctx, done, &request); }),
                         done);
    SubmitExchange(exchange_, request);
  }

 private:
  Status MakeRequest(OpKernelContext* ctx, const DoneCallback& done,
                     ExchangeRequestPtr* result) const {
    const auto request = std::make_shared<ExchangeRequest>();
    request->kind = kind_;
    request->ctx = ctx;
    request->done = done;
    const int num_tensors = ctx->num_inputs() - 1;
    request->description = kind_name_;
    if (kind_ == ExchangeKind::kBroadcast) {
      request->description += " from rank " + std::to_string(root_);
    }
    for (int i = 0; i < num_tensors; ++i) {
      const Tensor& tensor = ctx->input(i);
      if (!DataTypeCanUseMemcpy(tensor.dtype())) {
        return errors::InvalidArgument("Exchange '", exchange_, "' of ",
                                       DataTypeString(tensor.dtype()), ", want numbers");
      }
      if (IsByRows(kind_) && (tensor.dims() == 0 || num_tensors != 1)) {
        return errors::InvalidArgument("Exchange '", exchange_, "' is an ", kind_name_, " of ",
                                       num_tensors, " tensors, the last one of shape ",
                                       tensor.shape().DebugString(), ", want one with rows");
      }
      if (kind_ == ExchangeKind::kAllReduce && tensor.dtype() != ctx->input(0).dtype()) {
        return errors::InvalidArgument("Exchange '", exchange_, "' sums ",
                                       DataTypeString(tensor.dtype()), " and ",
                                       DataTypeString(ctx->input(0).dtype()), ", want one type");
      }
      request->description += (i == 0 ? " of " : ", ") + Describe(tensor, IsByRows(kind_));
      request->inputs.push_back(tensor);
    }
    const ExchangePlace place = GetExchangePlace();
    const Tensor& splits = ctx->input(num_tensors);
    TF_RETURN_IF_ERROR(CheckVector("splits", splits));
    const int64_t num_splits = kind_ == ExchangeKind::kAllToAll ? place.ranks : 0;
    // Without an engine, waiting for it says what is wrong.
    if (place.ranks > 0) {
      TF_RETURN_IF_ERROR(CheckEqual("size of splits", splits.NumElements(), "ranks", num_splits));
    }
    int64_t sum = 0;
    for (int64_t i = 0; i < splits.NumElements(); ++i) {
      const int64_t split = splits.vec<int32_t>()(i);
      if (split < 0) return errors::InvalidArgument("splits[", i, "] is ", split, ", want >= 0");
      request->splits.push_back(split);
      sum += split;
    }
    if (kind_ == ExchangeKind::kAllToAll) {
      TF_RETURN_IF_ERROR(
          CheckEqual("sum of splits", sum, "rows of the tensor", request->inputs[0].dim_size(0)));
    }
    *result = request;
    return OkStatus();
  }

  std::string exchange_;
  std::string kind_name_;
  ExchangeKind kind_ = ExchangeKind::kAllToAll;
  int root_ = 0;
};

class RankExchangeTakeOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    OP_REQUIRES_OK_ASYNC(ctx, CheckScalar("exchange", ctx->input(0)), done);
    TakeExchange(ctx->input(0).scalar<tstring>()(), ctx, std::move(done),
                 [ctx](const ExchangeRequest& request) { return MakeHeader(ctx, request); });
  }

 private:
  static Status MakeHeader(OpKernelContext* ctx, const ExchangeRequest& request) {
    const int64_t ranks = GetExchangePlace().ranks;
    Tensor* header = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, {1, 1 + ranks}, &header));
    auto values = header->flat<int64_t>();
    values.setZero();
    values(0) = static_cast<int64_t>(Hash64(request.description));
    if (request.kind == ExchangeKind::kAllGather && ranks > 0) {
      values(1) = request.inputs[0].dim_size(0);
    }
    for (size_t i = 0; i < request.splits.size() && static_cast<int64_t>(i) < ranks; ++i) {
      values(static_cast<int64_t>(1 + i)) = request.splits[i];
    }
    return OkStatus();
  }
};

// The request as the two kernels that follow the headers read it.
struct TakenRequest {
  std::string exchange;
  ExchangeRequestPtr request;
  int64_t ranks = 0;
  const Tensor* headers = nullptr;

  Status Read(OpKernelContext* ctx) {
    TF_RETURN_IF_ERROR(ReadHeaders(ctx));
    return GetCurrentExchange(exchange, &request);
  }

  Status ReadHeaders(OpKernelContext* ctx) {
    TF_RETURN_IF_ERROR(CheckScalar("exchange", ctx->input(0)));
    exchange = ctx->input(0).scalar<tstring>()();
    headers = &ctx->input(1);
    ranks = GetExchangePlace().ranks;
    TF_RETURN_IF_ERROR(CheckMatrix("headers", *headers));
    TF_RETURN_IF_ERROR(CheckEqual("rows of headers", headers->dim_size(0), "ranks", ranks));
    return CheckEqual("columns of headers", headers->dim_size(1), "1 + ranks", 1 + ranks);
  }

  // How many rows `sender` has for `receiver`.
  int64_t Rows(int64_t sender, int64_t receiver) const {
    return headers->matrix<int64_t>()(sender, 1 + receiver);
  }

  // All ranks see the same headers, so that all of them fail here or none does.
  Status CheckSame() const {
    const auto own = static_cast<int64_t>(Hash64(request->description));
    std::string others;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (headers->matrix<int64_t>()(rank, 0) != own) {
        others += (others.empty() ? "" : ", ") + std::to_string(rank);
      }
    }
    if (others.empty()) return OkStatus();
    return errors::InvalidArgument("Exchange '", exchange, "': ranks [", others,
                                   "] do something else than this rank, whose part is an ",
                                   request->description);
  }
};

// How many elements of type T a tensor takes that is packed as a whole: itself where it is summed,
// else whole words.
template <typename T>
int64_t PackedElements(const ExchangeRequest& request, const Tensor& tensor) {
  if (request.kind == ExchangeKind::kAllReduce) return tensor.NumElements();
  return CountWords(static_cast<int64_t>(tensor.tensor_data().size()));
}

template <typename T>
class RankExchangePackOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TakenRequest taken;
    OP_REQUIRES_OK(ctx, taken.Read(ctx));
    const ExchangeRequest& request = *taken.request;
    int64_t words = 0;
    const Status status = CountPartWords(taken, &words);
    // An error here would end the collectives of this process for good. What is wrong with the
    // headers is wrong on all ranks, as all see the same: they send next to nothing.
    if (!status.ok()) FinishExchange(taken.exchange, status, nullptr);
    words = std::max<int64_t>(words, 1);
    const int64_t number = request.kind == ExchangeKind::kAllReduce ? words : PadWords(&words);
    Tensor* instance = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &instance));
    instance->scalar<int32_t>()() = static_cast<int32_t>(kFirstInstance + number);
    TensorShape shape({words});
    if (request.kind == ExchangeKind::kAllToAll) shape = TensorShape({taken.ranks, words});
    if (request.kind == ExchangeKind::kAllGather) shape = TensorShape({1, words});
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, shape, &output));
    const auto part_bytes = words * static_cast<int64_t>(sizeof(T));
    if (!status.ok()) {
      std::memset(MutableBytes(*output), 0, output->tensor_data().size());
    } else if (request.kind == ExchangeKind::kAllToAll) {
      PackParts(request, part_bytes, MutableBytes(*output));
    } else {
      PackAll(request, part_bytes, MutableBytes(*output));
    }
  }

 private:
  // Counts the words of the largest part that any rank sends to another.
  static Status CountPartWords(const TakenRequest& taken, int64_t* words) {
    TF_RETURN_IF_ERROR(taken.CheckSame());
    const ExchangeRequest& request = *taken.request;
    const DataType type =
        request.kind == ExchangeKind::kAllReduce ? request.inputs[0].dtype() : DT_INT32;
    if (type != DataTypeToEnum<T>::v()) {
      return errors::Internal("Exchange '", taken.exchange, "' packs ", DataTypeString(type),
                              " as ", DataTypeString(DataTypeToEnum<T>::v()));
    }
    int64_t count = 0;
    if (IsByRows(request.kind)) {
      for (int64_t i = 0; i < taken.ranks; ++i) {
        for (int64_t j = 0; j < taken.ranks; ++j) count = std::max(count, taken.Rows(i, j));
      }
      int64_t bytes = 0;
      TF_RETURN_IF_ERROR(
          MultiplySizes("size of a part", count, RowBytes(request.inputs[0]), &bytes));
      count = bytes / kWordBytes + (bytes % kWordBytes == 0 ? 0 : 1);
    } else {
      for (const Tensor& tensor : request.inputs) count += PackedElements<T>(request, tensor);
    }
    constexpr int64_t kMaxWords = kMaxBytes / static_cast<int64_t>(sizeof(T));
    if (count > kMaxWords) {
      return errors::ResourceExhausted("Exchange '", taken.exchange, "' sends ", count,
                                       " words from one rank to another, want at most ", kMaxWords);
    }
    *words = count;
    return OkStatus();
  }

  // Nobody reads the padding, but it leaves this process: it is zero.
  static void PackParts(const ExchangeRequest& request, int64_t part_bytes, char* target) {
    const char* source = Bytes(request.inputs[0]);
    const int64_t row_bytes = RowBytes(request.inputs[0]);
    for (const int64_t rows : request.splits) {
      const int64_t size = rows * row_bytes;
      Copy(target, source, size);
      std::memset(target + size, 0, static_cast<size_t>(part_bytes - size));
      source += size;
      target += part_bytes;
    }
  }

  static void PackAll(const ExchangeRequest& request, int64_t part_bytes, char* target) {
    char* const end = target + part_bytes;
    for (const Tensor& tensor : request.inputs) {
      const auto size = static_cast<int64_t>(tensor.tensor_data().size());
      const int64_t room = PackedElements<T>(request, tensor) * static_cast<int64_t>(sizeof(T));
      Copy(target, Bytes(tensor), size);
      std::memset(target + size, 0, static_cast<size_t>(room - size));
      target += room;
    }
    std::memset(target, 0, static_cast<size_t>(end - target));
  }
};

template <typename T>
class RankExchangeGiveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TakenRequest taken;
    OP_REQUIRES_OK(ctx, taken.ReadHeaders(ctx));
    // Ended with an error while it was packed.
    if (!GetCurrentExchange(taken.exchange, &taken.request).ok()) return;
    const Tensor& words = ctx->input(2);
    FinishExchange(taken.exchange, OkStatus(), [&](OpKernelContext* waiting) {
      return CatchExceptions([&] { return Give(taken, words, waiting); });
    });
  }

 private:
  static Status Give(const TakenRequest& taken, const Tensor& words, OpKernelContext* ctx) {
    if (IsByRows(taken.request->kind)) return GiveRows(taken, words, ctx);
    int64_t wanted = 0;
    for (const Tensor& tensor : taken.request->inputs) {
      wanted += PackedElements<T>(*taken.request, tensor);
    }
    if (words.NumElements() < wanted) return Lacking(taken, words);
    const char* source = Bytes(words);
    for (size_t i = 0; i < taken.request->inputs.size(); ++i) {
      const Tensor& input = taken.request->inputs[i];
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, static_cast<int64_t>(i), input.shape(), &output));
      Copy(MutableBytes(*output), source, static_cast<int64_t>(input.tensor_data().size()));
      source += PackedElements<T>(*taken.request, input) * static_cast<int64_t>(sizeof(T));
    }
    Tensor* received = nullptr;
    return AllocateOutput(ctx, static_cast<int64_t>(taken.request->inputs.size()), {0}, &received);
  }

  static Status GiveRows(const TakenRequest& taken, const Tensor& words, OpKernelContext* ctx) {
    const Tensor& input = taken.request->inputs[0];
    const int64_t receiver =
        taken.request->kind == ExchangeKind::kAllToAll ? GetExchangePlace().rank : 0;
    const int64_t row_bytes = RowBytes(input);
    const int64_t part_bytes = words.NumElements() / std::max<int64_t>(taken.ranks, 1) * kWordBytes;
    Tensor* received = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 1, {taken.ranks}, &received));
    int64_t sum = 0;
    for (int64_t rank = 0; rank < taken.ranks; ++rank) {
      const int64_t rows = taken.Rows(rank, receiver);
      if (rows < 0 || rows * row_bytes > part_bytes) return Lacking(taken, words);
      received->vec<int32_t>()(rank) = static_cast<int32_t>(rows);
      sum += rows;
    }
    TensorShape shape = input.shape();
    shape.set_dim(0, sum);
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(AllocateOutput(ctx, 0, shape, &output));
    const char* source = Bytes(words);
    char* target = MutableBytes(*output);
    for (int64_t rank = 0; rank < taken.ranks; ++rank) {
      const int64_t size = taken.Rows(rank, receiver) * row_bytes;
      Copy(target, source, size);
      target += size;
      source += part_bytes;
    }
    return OkStatus();
  }

  static Status Lacking(const TakenRequest& taken, const Tensor& words) {
    return errors::Internal("Exchange '", taken.exchange,
                            "' got too few words: ", words.shape().DebugString());
  }
};

REGISTER_GUARDED_KERNEL(Name("MonolithRankExchange").Device(DEVICE_CPU), RankExchangeOp);
REGISTER_GUARDED_KERNEL(Name("MonolithRankExchangeTake").Device(DEVICE_CPU), RankExchangeTakeOp);

#define REGISTER_EXCHANGE_KERNELS(T)                                              \
  REGISTER_GUARDED_KERNEL(                                                        \
      Name("MonolithRankExchangePack").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
      RankExchangePackOp<T>);                                                     \
  REGISTER_GUARDED_KERNEL(                                                        \
      Name("MonolithRankExchangeGive").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
      RankExchangeGiveOp<T>)
REGISTER_EXCHANGE_KERNELS(int32_t);
REGISTER_EXCHANGE_KERNELS(int64_t);
REGISTER_EXCHANGE_KERNELS(Eigen::half);
REGISTER_EXCHANGE_KERNELS(bfloat16);
REGISTER_EXCHANGE_KERNELS(float);
REGISTER_EXCHANGE_KERNELS(double);
#undef REGISTER_EXCHANGE_KERNELS

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
