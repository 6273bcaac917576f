// Memory that one process fills and another one of the same machine reads.
//
//   writer                                reader
//   Segment::Create
//   fill data()
//   Send(size) ---- ticket, by a message --> OpenSegment(ticket)
//   IsFree() is false                     data() of the view
//   IsFree() is true <------------------- the view is destroyed
//
// The memory is a file without a name that belongs to the writer's process, so it goes with it, and
// the reader gets at it as /proc/<pid>/fd/<number>: on the same machine, as the same user, where
// both see the same processes. Anything else is an error of OpenSegment, and no other data: the
// file carries a number that only a ticket knows.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SHARED_SEGMENT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SHARED_SEGMENT_H_

#include <cstdint>
#include <memory>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace distribution {

struct SegmentHeader;

// Tells where something was sent. It can be opened once.
struct SegmentTicket {
  int64_t pid = 0;  // of the writer; 0: there is no segment
  int64_t fd = 0;
  int64_t nonce = 0;
  int64_t turn = 0;  // how often the segment was sent
  int64_t size = 0;  // bytes
};

// The writer's end. One thread at a time uses it.
class Segment {
 public:
  // Null where the system has no such memory, or none left.
  static std::unique_ptr<Segment> Create(int64_t capacity);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Aligned to 64 bytes.
  char* data() const;
  int64_t capacity() const { return capacity_; }

  // Whether the reader is done with what was sent last; true before anything was.
  bool IsFree() const;

  // Hands the first `size` bytes over. They must not change until IsFree().
  SegmentTicket Send(int64_t size);

 private:
  Segment() = default;

  int fd_ = -1;
  SegmentHeader* header_ = nullptr;
  int64_t capacity_ = 0;
  int64_t turn_ = 0;
};

// The memory of one segment in the reader's process.
class SegmentMapping;

// Lets a reader at what was sent. When it is destroyed, the writer may fill the segment anew.
class SegmentView {
 public:
  SegmentView(std::shared_ptr<SegmentMapping> mapping, int64_t turn, int64_t size);
  ~SegmentView();
  SegmentView(const SegmentView&) = delete;
  SegmentView& operator=(const SegmentView&) = delete;

  // Aligned to 64 bytes.
  char* data() const;
  int64_t size() const { return size_; }

 private:
  const std::shared_ptr<SegmentMapping> mapping_;
  const int64_t turn_;
  const int64_t size_;
};

// Unavailable: the memory cannot be reached from here. InvalidArgument: the ticket is not one, or
// was opened before. Segments stay mapped until the writer has given them up.
engine::Status OpenSegment(const SegmentTicket& ticket, std::unique_ptr<SegmentView>* view);

}  // namespace distribution
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DISTRIBUTION_SHARED_SEGMENT_H_
