#include "monolith/native_training/runtime/ops/data/datasets/flow_queues.h"

#include <utility>

namespace tensorflow {
namespace monolith_tf {

FlowQueues::FlowQueues(size_t flows, int64_t max_queue_size, LongWait long_wait,
                       std::chrono::milliseconds patience)
    : max_queue_size_(static_cast<size_t>(max_queue_size)),
      long_wait_(std::move(long_wait)),
      patience_(patience),
      flows_(flows) {}

void FlowQueues::Open(size_t flow) {
  mutex_lock lock(mu_);
  if (flows_[flow].consumer != Consumer::kOpen) ++open_;
  flows_[flow].consumer = Consumer::kOpen;
  flows_[flow].kept = false;
  flows_[flow].cancelled = false;
  room_.notify_all();
}

void FlowQueues::Leave(size_t flow) {
  std::deque<FlowItem> dropped;  // outlives the lock: samples may be large
  mutex_lock lock(mu_);
  if (flows_[flow].consumer == Consumer::kOpen) --open_;
  flows_[flow].consumer = Consumer::kLeft;
  dropped.swap(flows_[flow].items);
  room_.notify_all();
}

bool FlowQueues::WaitsForConsumer(size_t flow) {
  mutex_lock lock(mu_);
  return flows_[flow].consumer == Consumer::kNone && MustWaitToPush(flow);
}

void FlowQueues::KeepUnopened() {
  mutex_lock lock(mu_);
  for (Flow& flow : flows_) flow.kept = flow.consumer == Consumer::kNone;
  room_.notify_all();
}

bool FlowQueues::Push(size_t flow, FlowItem item) {
  mutex_lock lock(mu_);
  while (MustWaitToPush(flow)) Wait(&room_, flow, /*full=*/true, &lock);
  Flow& to = flows_[flow];
  if (cancelled_ || to.ended) return false;
  if (to.consumer == Consumer::kLeft) return true;
  to.items.push_back(std::move(item));
  items_.notify_all();
  return true;
}

void FlowQueues::End(size_t flow) {
  mutex_lock lock(mu_);
  flows_[flow].ended = true;
  room_.notify_all();
  items_.notify_all();
}

void FlowQueues::EndAll() {
  mutex_lock lock(mu_);
  for (Flow& flow : flows_) flow.ended = true;
  room_.notify_all();
  items_.notify_all();
}

void FlowQueues::Fail(const Status& status) {
  mutex_lock lock(mu_);
  FailLocked(status);
}

void FlowQueues::FailLocked(const Status& status) {
  for (Flow& flow : flows_) {
    if (flow.ended) continue;
    flow.ended = true;
    flow.items.push_back({status, Tensor()});
  }
  room_.notify_all();
  items_.notify_all();
}

bool FlowQueues::WaitsForItem(size_t flow) {
  mutex_lock lock(mu_);
  return MustWaitToPop(flow);
}

FlowQueues::Popped FlowQueues::Pop(size_t flow, FlowItem* item) {
  mutex_lock lock(mu_);
  while (MustWaitToPop(flow)) Wait(&items_, flow, /*full=*/false, &lock);
  Flow& from = flows_[flow];
  if (cancelled_ || from.cancelled) return Popped::kCancelled;
  if (from.items.empty()) return Popped::kEnd;
  *item = std::move(from.items.front());
  from.items.pop_front();
  room_.notify_all();
  return Popped::kItem;
}

FlowQueues::Popped FlowQueues::PopNext(FlowItem* item) {
  mutex_lock lock(mu_);
  while (!cancelled_) {
    bool ended = true;
    for (size_t i = 0; i < flows_.size(); ++i) {
      const size_t flow = (turn_ + i) % flows_.size();
      Flow& from = flows_[flow];
      ended = ended && from.ended;
      if (from.items.empty()) continue;
      *item = std::move(from.items.front());
      from.items.pop_front();
      turn_ = flow + 1;
      room_.notify_all();
      return Popped::kItem;
    }
    if (ended) return Popped::kEnd;
    items_.wait(lock);
  }
  return Popped::kCancelled;
}

void FlowQueues::Cancel(size_t flow) {
  mutex_lock lock(mu_);
  flows_[flow].cancelled = true;
  items_.notify_all();
}

void FlowQueues::CancelAll() {
  mutex_lock lock(mu_);
  cancelled_ = true;
  room_.notify_all();
  items_.notify_all();
}

bool FlowQueues::MustWaitToPush(size_t flow) const {
  const Flow& to = flows_[flow];
  if (cancelled_ || to.ended) return false;
  if (to.consumer == Consumer::kLeft) return open_ == 0;
  if (to.kept) return false;
  return to.items.size() >= max_queue_size_;
}

bool FlowQueues::MustWaitToPop(size_t flow) const {
  const Flow& from = flows_[flow];
  return !cancelled_ && !from.cancelled && !from.ended && from.items.empty();
}

void FlowQueues::Wait(condition_variable* changed, size_t flow, bool full, mutex_lock* lock) {
  if (!long_wait_) {
    changed->wait(*lock);
    return;
  }
  if (changed->wait_for(*lock, patience_) != std::cv_status::timeout) return;
  if (full && flows_[flow].consumer != Consumer::kNone) return;
  const Status status = long_wait_(flow, full);
  if (!status.ok()) FailLocked(status);
}

}  // namespace monolith_tf
}  // namespace tensorflow
