#include "monolith/serving/native/row_log/log_follower.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "monolith/serving/native/base/log.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::chrono::seconds kRetryTime(1);
constexpr std::chrono::milliseconds kReadTime(100);
constexpr int64_t kMessagesPerRead = 100;

}  // namespace

LogFollower::LogFollower(std::string servers, const SyncState& state,
                         std::chrono::duration<double> interval, LogHandler* handler)
    : servers_(std::move(servers)),
      state_(state),
      name_(state.Describe()),
      interval_(interval),
      handler_(handler),
      next_offset_(state.next_offset) {}

void LogFollower::Start(std::function<void()> on_change) {
  on_change_ = std::move(on_change);
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    Say("no thread can be made to read " + name_ + ": " + error.what());
  }
}

void LogFollower::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  closed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool LogFollower::is_caught_up() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_caught_up_;
}

std::string LogFollower::reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void LogFollower::Run() {
  while (!stopping_) {
    Status status;
    try {
      PartitionReader reader(servers_, state_.topic, static_cast<int32_t>(state_.partition));
      status = reader.Open();
      if (status.ok()) status = Follow(&reader);
    } catch (const std::exception& error) {
      status = Status(Code::kInternal, error.what());
    }
    if (!status.ok() && !stopping_) {
      Say("cannot read " + name_ + " at " + servers_ + ": " + status.message);
    }
    Sleep(kRetryTime);
  }
}

Status LogFollower::Follow(PartitionReader* reader) {
  int64_t low = 0;
  int64_t high = 0;
  Status status = reader->Bounds(stopping_, &low, &high);
  if (status.code == Code::kNotFound && next_offset_ == 0) {
    // Nobody has written yet: there is nothing to catch up with.
    SetCaughtUp();
    return Status();
  }
  if (!status.ok()) return status;
  if (target_ < 0) target_ = high;
  if (next_offset_ < low || next_offset_ > high) {
    const std::string gap = "offset " + std::to_string(next_offset_) + " of " + name_ +
                            " is gone: the log holds " + std::to_string(low) + " to " +
                            std::to_string(high);
    if (!handler_->GoesOnAfterGap(is_caught_up())) {
      Say(gap + "; a newer export is needed");
      return Status();
    }
    ++lost_;
    LogError(gap + "; going on at " + std::to_string(low));
    next_offset_ = low;
  }
  status = reader->Seek(next_offset_);
  if (!status.ok()) return status;
  NoteProgress(high);
  bool is_idle = true;
  while (!stopping_) {
    if (interval_.count() > 0 && is_idle && is_caught_up()) Sleep(interval_);
    int64_t num_read = 0;
    int64_t end = -1;
    bool is_gone = false;
    status = reader->Read(
        kMessagesPerRead, kReadTime,
        [&](int64_t offset, std::string_view value) { return Handle(offset, value); }, &num_read,
        &end, &is_gone);
    if (!status.ok()) return status;
    if (is_gone) {
      // The next call looks at the bounds.
      LogWarning("offset " + std::to_string(next_offset_) + " of " + name_ + " does not come");
      return Status();
    }
    next_offset_ = std::max(next_offset_, end);
    high = std::max({high, reader->KnownEnd(), next_offset_});
    NoteProgress(high);
    is_idle = end >= 0 || num_read == 0;
  }
  return Status();
}

Status LogFollower::Handle(int64_t offset, std::string_view value) {
  if (stopping_) return Status(Code::kCancelled, "it was closed");
  Status status;
  try {
    status = handler_->Handle(target_ >= 0 && offset >= target_, value);
  } catch (const std::bad_alloc&) {
    status = Status(Code::kResourceExhausted, "there is not enough memory for a message");
  }
  if (status.code == Code::kResourceExhausted) return status;
  if (!status.ok()) {
    // The next message may be fine.
    ++skipped_;
    LogError("Skipped the message at offset " + std::to_string(offset) + " of " + name_ + ": " +
             status.message);
  }
  next_offset_ = offset + 1;
  return Status();
}

void LogFollower::NoteProgress(int64_t high) {
  lag_ = std::max<int64_t>(0, high - next_offset_);
  if (target_ >= 0 && next_offset_ >= target_) {
    SetCaughtUp();
  } else if (!is_caught_up()) {
    Say("at offset " + std::to_string(next_offset_) + " of " + std::to_string(target_) + " of " +
            name_,
        true);
  }
}

void LogFollower::SetCaughtUp() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_caught_up_ && reason_.empty()) return;
    if (!is_caught_up_) {
      LogInfo("Caught up with " + name_ + " at offset " + std::to_string(next_offset_));
    }
    is_caught_up_ = true;
    reason_.clear();
  }
  on_change_();
}

void LogFollower::Say(const std::string& reason, bool quietly) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reason == reason_) return;
    reason_ = reason;
  }
  if (!quietly) LogWarning(reason);
  on_change_();
}

void LogFollower::Sleep(std::chrono::duration<double> time) {
  // A time beyond the range of the clock means forever.
  constexpr std::chrono::hours kLongest(24 * 365);
  const auto limit = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::min<std::chrono::duration<double>>(time, kLongest));
  std::unique_lock<std::mutex> lock(mutex_);
  closed_.wait_for(lock, limit, [&] { return stopping_.load(); });
}

}  // namespace serving
}  // namespace monolith
