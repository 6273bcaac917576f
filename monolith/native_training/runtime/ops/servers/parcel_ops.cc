// MonolithPackParcel and MonolithUnpackParcel take several tensors to another process as one.
//
// Each tensor that crosses from one process to another costs TensorFlow a call of its own, about
// 0.2 ms of CPU time of both together, and 2 ns for each byte, most of it for copies. So what goes
// the same way at the same time goes as one tensor, the parcel:
//
//   magic | number of tensors | where | ticket | tensor | tensor | ... | padding | data
//                                                tensor:  dtype, rank, sizes, where, [ticket]
//
// Where both processes are on one machine, a parcel that is large has no data: they lie in a
// segment of shared memory, of which the ticket tells, and the unpacked tensors are views of it.
// Tensors that were made in such memory stay in segments of their own.
// Whether the receiver can reach such memory, only it can tell. So the first large parcel of a
// kernel travels whole, with the ticket of an empty segment; a receiver that can opens it, which
// the sender sees in the segment itself.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/distribution/shared_segment.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/output_shape.h"
#include "monolith/native_training/runtime/ops/support/shared_tensors.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::OpenSegment;
using ::monolith::distribution::Segment;
using ::monolith::distribution::SegmentTicket;
using ::monolith::distribution::SegmentView;
using shape_inference::InferenceContext;

constexpr int64_t kMagic = 0x4d4c5041524345;  // "MLPARCE"
constexpr int64_t kInTensor = 0, kInSegment = 1;
constexpr int64_t kTicketWords = 5;
constexpr int64_t kFixedWords = 3 + kTicketWords;
constexpr int64_t kAlignment = 64;  // views that kernels of TensorFlow take have to be aligned
constexpr int64_t kWord = sizeof(int64_t);
constexpr int64_t kMaxRank = 8;
constexpr int64_t kMinSegmentBytes = 1 << 16;
// Those that are under way. With more, somebody opens none.
constexpr size_t kMaxSegments = 32;
constexpr int64_t kPieceBytes = 1 << 19;
// Parcels after which a receiver that has not answered is taken to be elsewhere.
constexpr int kMaxUnanswered = 64;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void WriteTicket(const SegmentTicket& ticket, int64_t* to) {
  const int64_t words[] = {ticket.pid, ticket.fd, ticket.nonce, ticket.turn, ticket.size};
  static_assert(sizeof(words) == kTicketWords * kWord);
  std::copy_n(words, kTicketWords, to);
}

SegmentTicket ReadTicket(const int64_t* words) {
  return {words[0], words[1], words[2], words[3], words[4]};
}

Status CheckTypes(const DataTypeVector& types) {
  for (size_t i = 0; i < types.size(); ++i) {
    if (!DataTypeCanUseMemcpy(types[i])) {
      return errors::InvalidArgument("T[", i, "] is ", DataTypeString(types[i]),
                                     ", want a type whose values are plain bytes");
    }
  }
  return OkStatus();
}

class PackParcelOp : public OpKernel {
 public:
  explicit PackParcelOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    DataTypeVector types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &types));
    OP_REQUIRES_OK(ctx, CheckTypes(types));
  }

  void Compute(OpKernelContext* ctx) override {
    const int n = ctx->num_inputs();
    SegmentTicket ticket;
    const bool is_near = CanReceiverRead(ctx, &ticket);
    std::vector<Place> places(n);
    int64_t words = kFixedWords, bytes = 0;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckCount(strings::StrCat("rank of tensors[", i, "]"),
                                     ctx->input(i).dims(), 0, kMaxRank));
      places[i].is_own = is_near && SendShared(ctx->input(i), &places[i].ticket);
      words += 3 + ctx->input(i).dims() + (places[i].is_own ? kTicketWords : 0);
      if (!places[i].is_own) bytes += Aligned(ctx->input(i).TotalBytes());
    }
    words = Aligned(words * kWord) / kWord;

    std::unique_ptr<Segment> segment;
    if (bytes >= kMinSharedBytes && is_near) segment = TakeSegment(bytes);
    const bool is_shared = segment != nullptr;

    Tensor* parcel = nullptr;
    OP_REQUIRES_OK(ctx, AllocateOutput(ctx, 0, {words + (is_shared ? 0 : bytes / kWord)}, &parcel));
    int64_t* const header = parcel->vec<int64_t>().data();
    std::fill_n(header, words, int64_t{0});
    int64_t* next = header + kFixedWords;
    for (int i = 0; i < n; ++i) {
      const Tensor& tensor = ctx->input(i);
      *next++ = tensor.dtype();
      *next++ = tensor.dims();
      for (int d = 0; d < tensor.dims(); ++d) *next++ = tensor.dim_size(d);
      *next++ = places[i].is_own;
      if (places[i].is_own) {
        WriteTicket(places[i].ticket, next);
        next += kTicketWords;
      }
    }
    Copy(ctx, places, is_shared ? segment->data() : reinterpret_cast<char*>(header + words));
    if (is_shared) {
      ticket = segment->Send(bytes);
      mutex_lock lock(mutex_);
      segments_.push_back(std::move(segment));
      --num_taken_;
    }
    header[0] = kMagic;
    header[1] = n;
    header[2] = is_shared ? kInSegment : kInTensor;
    WriteTicket(ticket, header + 3);
  }

 private:
  // Where a tensor of the parcel is.
  struct Place {
    bool is_own = false;  // in a segment of its own, of which the ticket tells
    SegmentTicket ticket;
  };

  // Whether the receiver has told that it reads this process's memory. If nobody knows yet, and the
  // parcel is large, `ticket` becomes one by which it can tell.
  bool CanReceiverRead(OpKernelContext* ctx, SegmentTicket* ticket) {
    if (!MayMemoryBeShared()) return false;
    int64_t bytes = 0;
    for (int i = 0; i < ctx->num_inputs(); ++i) bytes += ctx->input(i).TotalBytes();
    if (bytes < kMinSharedBytes) return false;
    mutex_lock lock(mutex_);
    if (is_far_) return false;
    if (probe_ == nullptr) {
      probe_ = Segment::Create(0);
      is_far_ = probe_ == nullptr;
      if (probe_ != nullptr) *ticket = probe_->Send(0);
      return false;
    }
    if (probe_->IsFree()) return true;
    if (++num_unanswered_ >= kMaxUnanswered) {
      // A worker of many servers would run out of files.
      is_far_ = true;
      probe_.reset();
    }
    return false;
  }

  // Returns a free segment of that size. Null: the parcel travels whole.
  std::unique_ptr<Segment> TakeSegment(int64_t bytes) {
    mutex_lock lock(mutex_);
    for (auto it = segments_.begin(); it != segments_.end();) {
      if (!(*it)->IsFree()) {
        ++it;
      } else if ((*it)->capacity() < bytes) {
        it = segments_.erase(it);
      } else {
        std::unique_ptr<Segment> free = std::move(*it);
        segments_.erase(it);
        ++num_taken_;
        return free;
      }
    }
    if (segments_.size() + num_taken_ >= kMaxSegments) return nullptr;
    // Pages that are never touched take no memory.
    int64_t capacity = kMinSegmentBytes;
    while (capacity < bytes) capacity *= 2;
    std::unique_ptr<Segment> created = Segment::Create(capacity);
    if (created != nullptr) ++num_taken_;
    return created;
  }

  // Copies the tensors that have no place of their own.
  static void Copy(OpKernelContext* ctx, const std::vector<Place>& places, char* to) {
    struct Piece {
      const char* from;
      char* to;
      int64_t bytes;
    };
    std::vector<Piece> pieces;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      if (places[i].is_own) continue;
      const Tensor& tensor = ctx->input(i);
      const int64_t size = tensor.TotalBytes();
      const char* const from = static_cast<const char*>(tensor.data());
      for (int64_t at = 0; at < size; at += kPieceBytes) {
        pieces.push_back({from + at, to + at, std::min(kPieceBytes, size - at)});
      }
      std::memset(to + size, 0, Aligned(size) - size);
      to += Aligned(size);
    }
    DeviceRunner(ctx).RunTasks(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
      std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    });
  }

  mutex mutex_;
  bool is_far_ TF_GUARDED_BY(mutex_) = false;  // the receiver does not reach this memory
  int num_unanswered_ TF_GUARDED_BY(mutex_) = 0;
  // Tells by being free that the receiver does.
  std::unique_ptr<Segment> probe_ TF_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Segment>> segments_ TF_GUARDED_BY(mutex_);
  size_t num_taken_ TF_GUARDED_BY(mutex_) = 0;  // that are being filled
};

// A part of memory that an owner keeps. Not TensorFlow's to write to in place: parts of one owner
// are several tensors.
class PartBuffer : public TensorBuffer {
 public:
  PartBuffer(char* data, int64_t size, std::shared_ptr<const void> owner)
      : TensorBuffer(data), size_(size), owner_(std::move(owner)) {}

  size_t size() const override { return static_cast<size_t>(size_); }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(AllocationDescription* description) const override {
    description->set_requested_bytes(size_);
    description->set_allocated_bytes(size_);
    description->set_allocator_name("parcel");
  }

 private:
  const int64_t size_;
  const std::shared_ptr<const void> owner_;
};

class UnpackParcelOp : public OpKernel {
 public:
  explicit UnpackParcelOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("T", &types_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(ctx, CheckTypes(types_));
    OP_REQUIRES_OK(ctx, CheckEqual("length of shapes", shapes_.size(), "length of T",
                                   static_cast<int64_t>(types_.size())));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& parcel = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckVector("parcel", parcel));
    const int64_t* const header = parcel.vec<int64_t>().data();
    const int64_t size = parcel.NumElements();
    OP_REQUIRES(ctx, size >= kFixedWords && header[0] == kMagic,
                errors::InvalidArgument("parcel has ", size,
                                        " elements that MonolithPackParcel has not written"));
    OP_REQUIRES_OK(ctx, CheckEqual("number of tensors in parcel", header[1], "length of T",
                                   static_cast<int64_t>(types_.size())));
    std::vector<Part> parts;
    int64_t words = 0, bytes = 0;
    OP_REQUIRES_OK(ctx, ReadParts(header, size, &parts, &words, &bytes));

    const SegmentTicket ticket = ReadTicket(header + 3);
    std::shared_ptr<const void> owner;
    char* data = nullptr;
    if (header[2] == kInSegment) {
      OP_REQUIRES_OK(ctx, Open(ticket, bytes, &owner, &data));
    } else {
      OP_REQUIRES_OK(ctx, CheckEqual("size of parcel", size, "size of header and data",
                                     words + bytes / kWord));
      if (ticket.pid != 0) {
        // Tells the sender that later ones can be shared. If they cannot, all is well, too.
        std::unique_ptr<SegmentView> probe;
        (void)OpenSegment(ticket, &probe);
      }
      auto holder = std::make_shared<Tensor>(parcel);
      if (!holder->IsAligned()) {
        Tensor copy;
        OP_REQUIRES_OK(ctx, AllocateTemp(ctx, DT_INT64, parcel.shape(), &copy));
        std::memcpy(copy.data(), parcel.data(), parcel.TotalBytes());
        *holder = copy;
      }
      data = static_cast<char*>(holder->data()) + words * kWord;
      owner = std::move(holder);
    }
    for (size_t i = 0; i < types_.size(); ++i) {
      std::shared_ptr<const void> own_owner;
      char* own_data = nullptr;
      if (parts[i].is_own) {
        OP_REQUIRES_OK(ctx, Open(parts[i].ticket, parts[i].length, &own_owner, &own_data));
      }
      core::RefCountPtr<TensorBuffer> buffer(
          parts[i].is_own ? new PartBuffer(own_data, parts[i].length, std::move(own_owner))
                          : new PartBuffer(data, parts[i].length, owner));
      ctx->set_output(static_cast<int>(i), Tensor(types_[i], parts[i].shape, buffer.get()));
      if (!parts[i].is_own) data += Aligned(parts[i].length);
    }
  }

 private:
  // Tells of one tensor in a parcel.
  struct Part {
    TensorShape shape;
    int64_t length;  // bytes
    bool is_own;     // in a segment of its own, of which the ticket tells
    SegmentTicket ticket;
  };

  // Opens a segment of `bytes`. It stays as it is while somebody has `owner`.
  static Status Open(const SegmentTicket& ticket, int64_t bytes, std::shared_ptr<const void>* owner,
                     char** data) {
    std::unique_ptr<SegmentView> view;
    Status opened = FromEngine(OpenSegment(ticket, &view));
    // TensorFlow takes no other op's word for it that a process is gone, and workers make a new
    // session after this error: its kernels begin with parcels that travel whole.
    if (errors::IsUnavailable(opened)) opened = errors::Aborted(opened.message());
    TF_RETURN_IF_ERROR(opened);
    TF_RETURN_IF_ERROR(CheckEqual("size of the segment", view->size(), "size of data", bytes));
    *data = view->data();
    *owner = std::move(view);
    return OkStatus();
  }

  // Reads what is told of all tensors; `words` is the size of the header, `bytes` that of the data
  // of tensors that have no segment of their own.
  Status ReadParts(const int64_t* header, int64_t size, std::vector<Part>* parts, int64_t* words,
                   int64_t* bytes) const {
    int64_t at = kFixedWords;
    for (size_t i = 0; i < types_.size(); ++i) {
      const std::string name = strings::StrCat("tensor ", i, " of parcel");
      if (size - at < 3) return errors::InvalidArgument(name, " is missing");
      if (header[at] != types_[i]) {
        return errors::InvalidArgument(name, " has dtype ", header[at], ", want ", types_[i], " (",
                                       DataTypeString(types_[i]), ")");
      }
      const int64_t rank = header[at + 1];
      TF_RETURN_IF_ERROR(CheckCount(strings::StrCat("rank of ", name), rank, 0,
                                    std::min<int64_t>(kMaxRank, size - at - 3)));
      Part part;
      TF_RETURN_IF_ERROR(TensorShape::BuildTensorShape(
          gtl::ArraySlice<int64_t>(header + at + 2, static_cast<size_t>(rank)), &part.shape));
      if (!shapes_[i].IsCompatibleWith(part.shape)) {
        return errors::InvalidArgument(name, " has shape ", part.shape.DebugString(), ", want ",
                                       shapes_[i].DebugString());
      }
      TF_RETURN_IF_ERROR(MultiplySizes(strings::StrCat("size of ", name), part.shape.num_elements(),
                                       DataTypeSize(types_[i]), &part.length));
      at += 2 + rank;
      part.is_own = header[at++] != 0;
      if (part.is_own) {
        if (size - at < kTicketWords) return errors::InvalidArgument(name, " has no ticket");
        part.ticket = ReadTicket(header + at);
        at += kTicketWords;
      } else {
        if (part.length > std::numeric_limits<int64_t>::max() - kAlignment - *bytes) {
          return errors::InvalidArgument(name, " has ", part.length, " bytes: too large");
        }
        *bytes += Aligned(part.length);
      }
      parts->push_back(std::move(part));
    }
    *words = Aligned(at * kWord) / kWord;
    if (*words > size) return errors::InvalidArgument("parcel ends within its header");
    return OkStatus();
  }

  DataTypeVector types_;
  std::vector<PartialTensorShape> shapes_;
};

REGISTER_OP("MonolithPackParcel")
    .Input("tensors: T")
    .Output("parcel: int64")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return OkStatus();
    })
    .Doc(R"doc(
Packs tensors for another process, which unpacks them once. Large ones are left in memory that
both share, where that can be done.

tensors: of types whose values are plain bytes.
)doc");

REGISTER_OP("MonolithUnpackParcel")
    .Input("parcel: int64")
    .Output("tensors: T")
    .Attr("T: list(type) >= 1")
    .Attr("shapes: list(shape) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
      TF_RETURN_IF_ERROR(CheckEqual("length of shapes", shapes.size(), "length of T",
                                    static_cast<int64_t>(c->num_outputs())));
      for (int i = 0; i < c->num_outputs(); ++i) {
        shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        SetOutputShape(c, i, shape);
      }
      return OkStatus();
    })
    .Doc(R"doc(
Unpacks what MonolithPackParcel has packed, without copying.

shapes: Of the tensors, as far as they are known.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithPackParcel").Device(DEVICE_CPU), PackParcelOp);
REGISTER_GUARDED_KERNEL(Name("MonolithUnpackParcel").Device(DEVICE_CPU), UnpackParcelOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
