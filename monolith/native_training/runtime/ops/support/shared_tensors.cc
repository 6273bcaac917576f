#include "monolith/native_training/runtime/ops/support/shared_tensors.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::distribution::Segment;
using ::monolith::distribution::SegmentTicket;

constexpr char kMark[] = "_monolith_shared";
constexpr int64_t kMinSegmentBytes = 1 << 16;
// Those that are under way, or kept for what comes. A process holds a file for each.
constexpr size_t kMaxSegments = 64;
// So long after it was sent, a segment that nobody has read is taken to be lost.
constexpr std::chrono::minutes kLostAfter{5};

// The segments of this process that tensors lie in.
class SegmentPool {
 public:
  static SegmentPool& Get() {
    // Tensors may outlive static objects.
    static SegmentPool* const pool = std::make_unique<SegmentPool>().release();
    return *pool;
  }

  // Returns memory until GiveBack; null where none is to be had.
  char* Take(int64_t bytes) {
    mutex_lock lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->segment->capacity() < bytes || !it->segment->IsFree()) continue;
      if (best == idle_.end() || it->segment->capacity() < best->segment->capacity()) best = it;
    }
    std::unique_ptr<Segment> segment;
    if (best != idle_.end()) {
      segment = std::move(best->segment);
      idle_.erase(best);
    } else {
      if (idle_.size() + used_.size() >= kMaxSegments && !DropOne()) return nullptr;
      // Pages that are never touched take no memory.
      int64_t capacity = kMinSegmentBytes;
      while (capacity < bytes) capacity *= 2;
      segment = Segment::Create(capacity);
      if (segment == nullptr) return nullptr;
    }
    char* const data = segment->data();
    used_.emplace(data, Used{std::move(segment), false});
    return data;
  }

  void GiveBack(const char* data) {
    mutex_lock lock(mutex_);
    const auto it = used_.find(data);
    idle_.push_back({std::move(it->second.segment), Clock::now()});
    used_.erase(it);
  }

  bool Send(const char* data, int64_t bytes, SegmentTicket* ticket) {
    mutex_lock lock(mutex_);
    const auto it = used_.find(data);
    if (it == used_.end() || it->second.is_sent) return false;
    it->second.is_sent = true;
    *ticket = it->second.segment->Send(bytes);
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Used {
    std::unique_ptr<Segment> segment;
    bool is_sent;
  };
  struct Idle {
    std::unique_ptr<Segment> segment;
    Clock::time_point since;
  };

  // Gives up a segment that nobody reads, or that has been lost with its reader. One that is read
  // all the same stays the reader's.
  bool DropOne() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto now = Clock::now();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->segment->IsFree() || now - it->since > kLostAfter) {
        idle_.erase(it);
        return true;
      }
    }
    return false;
  }

  mutex mutex_;
  std::vector<Idle> idle_ TF_GUARDED_BY(mutex_);
  std::map<const char*, Used> used_ TF_GUARDED_BY(mutex_);
};

// Not TensorFlow's to write to in place: another process may read it by then.
class SharedBuffer : public TensorBuffer {
 public:
  SharedBuffer(char* data, int64_t size) : TensorBuffer(data), size_(size) {}
  ~SharedBuffer() override { SegmentPool::Get().GiveBack(static_cast<const char*>(data())); }

  size_t size() const override { return static_cast<size_t>(size_); }
  TensorBuffer* root_buffer() override { return this; }
  bool OwnsMemory() const override { return false; }
  void FillAllocationDescription(AllocationDescription* description) const override {
    description->set_requested_bytes(size_);
    description->set_allocated_bytes(size_);
    description->set_allocator_name("shared");
  }

 private:
  const int64_t size_;
};

}  // namespace

bool MayMemoryBeShared() {
  static const bool may = [] {
    const char* const value = std::getenv("MONOLITH_SHARED_MEMORY");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return may;
}

bool WantsSharedOutputs(OpKernelContext* ctx) {
  return ctx->op_kernel().def().attr().count(kMark) != 0 && MayMemoryBeShared();
}

bool AllocateShared(DataType dtype, const TensorShape& shape, Tensor* tensor) {
  const int64_t bytes = shape.num_elements() * DataTypeSize(dtype);
  if (bytes < kMinSharedBytes || !DataTypeCanUseMemcpy(dtype)) return false;
  char* const data = SegmentPool::Get().Take(bytes);
  if (data == nullptr) return false;
  core::RefCountPtr<TensorBuffer> buffer(new SharedBuffer(data, bytes));
  *tensor = Tensor(dtype, shape, buffer.get());
  return true;
}

bool SendShared(const Tensor& tensor, SegmentTicket* ticket) {
  return tensor.TotalBytes() > 0 &&
         SegmentPool::Get().Send(static_cast<const char*>(tensor.data()),
                                 static_cast<int64_t>(tensor.TotalBytes()), ticket);
}

}  // namespace monolith_tf
}  // namespace tensorflow
