#include "monolith/native_training/runtime/distribution/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <utility>

namespace monolith {
namespace distribution {

using ::monolith::engine::Status;
using ::monolith::engine::StatusCode;

// Lies before the data. What the reader's process writes is checked nowhere: it could as well have
// written other data.
struct SegmentHeader {
  int64_t magic;
  int64_t nonce;
  int64_t capacity;
  std::atomic<int64_t> sent;     // turns that the writer has handed over
  std::atomic<int64_t> taken;    // turns that a reader has opened
  std::atomic<int64_t> read;     // turns that a reader is done with
  std::atomic<int64_t> is_over;  // whether the writer has given the segment up
};

namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free, "two processes share them");

constexpr int64_t kMagic = 0x5045454d474553;  // "SEGMEEP"
constexpr int64_t kHeaderBytes = 64;          // keeps the data aligned
static_assert(sizeof(SegmentHeader) <= kHeaderBytes);
// Begins the links below /proc/<pid>/fd that lead to our files.
constexpr char kName[] = "monolith_parcel";
constexpr char kLink[] = "/memfd:monolith_parcel";
constexpr int64_t kMaxBytes = int64_t{1} << 46;

#ifndef MFD_CLOEXEC
constexpr unsigned MFD_CLOEXEC = 1, MFD_ALLOW_SEALING = 2;
#endif
#ifndef F_ADD_SEALS
constexpr int F_ADD_SEALS = 1033, F_GET_SEALS = 1034;
constexpr int F_SEAL_SEAL = 1, F_SEAL_SHRINK = 2, F_SEAL_GROW = 4;
#endif

// Closes a file at the end of a scope.
struct File {
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

SegmentHeader* Map(int fd, int64_t capacity) {
  void* const memory =
      mmap(nullptr, kHeaderBytes + capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<SegmentHeader*>(memory);
}

char* DataOf(SegmentHeader* header) { return reinterpret_cast<char*>(header) + kHeaderBytes; }

int64_t RandomNumber() {
  std::random_device random;
  return static_cast<int64_t>((uint64_t{random()} << 32) ^ random());
}

std::string PathOf(int64_t pid, int64_t fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

Status Unreachable(const std::string& path, const std::string& why) {
  return {StatusCode::kUnavailable, "the memory " + path + " of another process " + why};
}

}  // namespace

std::unique_ptr<Segment> Segment::Create(int64_t capacity) {
  if (capacity < 0 || capacity > kMaxBytes) return nullptr;
  std::unique_ptr<Segment> segment(new (std::nothrow) Segment());
  if (segment == nullptr) return nullptr;
#ifdef SYS_memfd_create
  segment->fd_ =
      static_cast<int>(syscall(SYS_memfd_create, kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
#endif
  if (segment->fd_ < 0) return nullptr;
  if (ftruncate(segment->fd_, kHeaderBytes + capacity) != 0) return nullptr;
  // A reader would be killed by memory that its file has lost.
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(segment->fd_, F_ADD_SEALS, seals) != 0) return nullptr;
  segment->header_ = Map(segment->fd_, capacity);
  if (segment->header_ == nullptr) return nullptr;
  segment->capacity_ = capacity;
  new (segment->header_) SegmentHeader{kMagic, RandomNumber(), capacity, {0}, {0}, {0}, {0}};
  return segment;
}

Segment::~Segment() {
  if (header_ != nullptr) {
    header_->is_over.store(1, std::memory_order_release);
    munmap(header_, kHeaderBytes + capacity_);
  }
  if (fd_ >= 0) close(fd_);
}

char* Segment::data() const { return DataOf(header_); }

bool Segment::IsFree() const { return header_->read.load(std::memory_order_acquire) == turn_; }

SegmentTicket Segment::Send(int64_t size) {
  ++turn_;
  header_->sent.store(turn_, std::memory_order_release);
  return {getpid(), fd_, header_->nonce, turn_, size};
}

class SegmentMapping {
 public:
  SegmentMapping(SegmentHeader* header, int64_t capacity, std::string path, ino_t inode)
      : header_(header), capacity_(capacity), path_(std::move(path)), inode_(inode) {}
  ~SegmentMapping() { munmap(header_, kHeaderBytes + capacity_); }
  SegmentMapping(const SegmentMapping&) = delete;
  SegmentMapping& operator=(const SegmentMapping&) = delete;

  SegmentHeader* header() const { return header_; }
  int64_t capacity() const { return capacity_; }

  // Whether the writer has given the segment up, or is gone.
  bool IsOver() const {
    if (header_->is_over.load(std::memory_order_acquire) != 0) return true;
    struct stat found;
    return stat(path_.c_str(), &found) != 0 || found.st_ino != inode_;
  }

 private:
  SegmentHeader* const header_;
  const int64_t capacity_;
  const std::string path_;
  const ino_t inode_;
};

namespace {

// The segments of other processes that are mapped here.
class Mappings {
 public:
  static Mappings& Get() {
    static Mappings* const mappings = new Mappings();
    return *mappings;
  }

  Status Find(const SegmentTicket& ticket, std::shared_ptr<SegmentMapping>* mapping) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<SegmentMapping>& known = known_[{ticket.pid, ticket.fd, ticket.nonce}];
    if (known == nullptr) {
      Status status = Open(ticket, &known);
      if (!status.ok()) {
        known_.erase({ticket.pid, ticket.fd, ticket.nonce});
        return status;
      }
      *mapping = known;
      Sweep();  // New segments are rare.
      return Status::Ok();
    }
    *mapping = known;
    return Status::Ok();
  }

 private:
  static Status Open(const SegmentTicket& ticket, std::shared_ptr<SegmentMapping>* mapping) {
    const std::string path = PathOf(ticket.pid, ticket.fd);
    // Other files may mind being opened.
    char link[sizeof(kLink)] = {};
    if (readlink(path.c_str(), link, sizeof(link) - 1) != sizeof(link) - 1 ||
        std::memcmp(link, kLink, sizeof(link) - 1) != 0) {
      return Unreachable(path, "is not to be seen from here");
    }
    const File file{open(path.c_str(), O_RDWR | O_CLOEXEC)};
    if (file.fd < 0) return Unreachable(path, "cannot be opened");
    struct stat found;
    const int seals = fcntl(file.fd, F_GET_SEALS);
    if (fstat(file.fd, &found) != 0 || found.st_size < kHeaderBytes || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
      return Unreachable(path, "is no parcel");
    }
    const int64_t capacity = found.st_size - kHeaderBytes;
    SegmentHeader* const header = Map(file.fd, capacity);
    if (header == nullptr) return Unreachable(path, "cannot be mapped");
    *mapping = std::make_shared<SegmentMapping>(header, capacity, path, found.st_ino);
    if (header->magic != kMagic || header->nonce != ticket.nonce) {
      return Unreachable(path, "belongs to something else by now");
    }
    return Status::Ok();
  }

  void Sweep() {
    for (auto it = known_.begin(); it != known_.end();) {
      it = it->second.use_count() == 1 && it->second->IsOver() ? known_.erase(it) : std::next(it);
    }
  }

  std::mutex mutex_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::shared_ptr<SegmentMapping>> known_;
};

}  // namespace

SegmentView::SegmentView(std::shared_ptr<SegmentMapping> mapping, int64_t turn, int64_t size)
    : mapping_(std::move(mapping)), turn_(turn), size_(size) {}

SegmentView::~SegmentView() { mapping_->header()->read.store(turn_, std::memory_order_release); }

char* SegmentView::data() const { return DataOf(mapping_->header()); }

Status OpenSegment(const SegmentTicket& ticket, std::unique_ptr<SegmentView>* view) {
  if (ticket.pid <= 0 || ticket.fd < 0 || ticket.turn <= 0 || ticket.size < 0) {
    return Status::InvalidArgument("ticket has pid " + std::to_string(ticket.pid) + ", fd " +
                                   std::to_string(ticket.fd) + ", turn " +
                                   std::to_string(ticket.turn) + ", size " +
                                   std::to_string(ticket.size) + ", want positive ones");
  }
  std::shared_ptr<SegmentMapping> mapping;
  Status status = Mappings::Get().Find(ticket, &mapping);
  if (!status.ok()) return status;
  if (ticket.size > mapping->capacity()) {
    return Status::InvalidArgument("ticket has size " + std::to_string(ticket.size) + ", want " +
                                   std::to_string(mapping->capacity()) + " at most");
  }
  SegmentHeader* const header = mapping->header();
  int64_t before = ticket.turn - 1;
  if (header->sent.load(std::memory_order_acquire) != ticket.turn ||
      !header->taken.compare_exchange_strong(before, ticket.turn)) {
    return Status::InvalidArgument("ticket is of turn " + std::to_string(ticket.turn) +
                                   ", which was opened before, or is not the segment's last");
  }
  view->reset(new SegmentView(std::move(mapping), ticket.turn, ticket.size));
  return Status::Ok();
}

}  // namespace distribution
}  // namespace monolith
