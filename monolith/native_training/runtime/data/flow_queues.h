// Bounded queues between the threads that read flows of samples and those that want them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FLOW_QUEUES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FLOW_QUEUES_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace monolith {
namespace data {

enum class Popped { kItem, kEnd, kCancelled };

// One queue per flow, all behind one lock. Thread-safe. The order of a queue is that of its pushes.
// An Item is a sample, or the error that came in its place.
template <typename Item>
class FlowQueues {
 public:
  // Asked, under the lock, whenever nothing has happened for `patience`: a Push waits for the first
  // consumer of the flow (`full`), or a Pop for an item. An item that it returns ends all flows, as
  // that of Fail does.
  using LongWait = std::function<std::optional<Item>(size_t flow, bool full)>;

  FlowQueues(size_t flows, int64_t max_queue_size, LongWait long_wait = nullptr,
             std::chrono::milliseconds patience = std::chrono::milliseconds(0))
      : max_queue_size_(static_cast<size_t>(max_queue_size)),
        long_wait_(std::move(long_wait)),
        patience_(patience),
        flows_(flows) {}

  size_t size() const { return flows_.size(); }

  // Begins and ends taking from a flow. Items of a flow that was never opened wait; those of a flow
  // that was left are dropped, unless no flow is open: then Push waits until one is.
  void Open(size_t flow) {
    const Lock lock(mutex_);
    if (flows_[flow].consumer != Consumer::kOpen) ++open_;
    flows_[flow].consumer = Consumer::kOpen;
    flows_[flow].kept = false;
    flows_[flow].cancelled = false;
    room_.notify_all();
  }
  void Leave(size_t flow) {
    std::deque<Item> dropped;  // outlives the lock: samples may be large
    const Lock lock(mutex_);
    if (flows_[flow].consumer == Consumer::kOpen) --open_;
    flows_[flow].consumer = Consumer::kLeft;
    dropped.swap(flows_[flow].items);
    room_.notify_all();
  }

  // Whether a push would wait for the first consumer of the flow.
  bool WaitsForConsumer(size_t flow) const {
    const Lock lock(mutex_);
    return flows_[flow].consumer == Consumer::kNone && MustWaitToPush(flow);
  }

  // Lets flows that were never opened grow past the limit, so that the others can go on. Opening
  // such a flow finds all of its items.
  void KeepUnopened() {
    const Lock lock(mutex_);
    for (Flow& flow : flows_) flow.kept = flow.consumer == Consumer::kNone;
    room_.notify_all();
  }

  // Waits for room. False: the flow has ended, and the item is gone.
  bool Push(size_t flow, Item item) {
    Lock lock(mutex_);
    while (MustWaitToPush(flow)) Wait(&room_, flow, /*full=*/true, &lock);
    Flow& to = flows_[flow];
    if (cancelled_ || to.ended) return false;
    if (to.consumer == Consumer::kLeft) return true;
    to.items.push_back(std::move(item));
    items_.notify_all();
    return true;
  }

  // Ends a flow: later pushes are refused, items in the queue stay.
  void End(size_t flow) {
    const Lock lock(mutex_);
    flows_[flow].ended = true;
    NotifyAll();
  }

  // Ends all flows at once: a consumer that sees the end of one can rely on the others.
  void EndAll() {
    const Lock lock(mutex_);
    for (Flow& flow : flows_) flow.ended = true;
    NotifyAll();
  }

  // Ends all flows that have not ended, with this error as their last item.
  void Fail(const Item& error) {
    const Lock lock(mutex_);
    FailLocked(error);
  }

  // Whether Pop would wait.
  bool WaitsForItem(size_t flow) const {
    const Lock lock(mutex_);
    return MustWaitToPop(flow);
  }

  // Waits for an item of the flow.
  Popped Pop(size_t flow, Item* item) {
    Lock lock(mutex_);
    while (MustWaitToPop(flow)) Wait(&items_, flow, /*full=*/false, &lock);
    Flow& from = flows_[flow];
    if (cancelled_ || from.cancelled) return Popped::kCancelled;
    if (from.items.empty()) return Popped::kEnd;
    Take(&from, item);
    return Popped::kItem;
  }

  // Waits for an item of any flow; takes turns among those that have one. kEnd: all have ended.
  Popped PopNext(Item* item) {
    Lock lock(mutex_);
    while (!cancelled_) {
      bool ended = true;
      for (size_t i = 0; i < flows_.size(); ++i) {
        const size_t flow = (turn_ + i) % flows_.size();
        ended = ended && flows_[flow].ended;
        if (flows_[flow].items.empty()) continue;
        Take(&flows_[flow], item);
        turn_ = flow + 1;
        return Popped::kItem;
      }
      if (ended) return Popped::kEnd;
      items_.wait(lock);
    }
    return Popped::kCancelled;
  }

  // Wakes Pop for this flow, which returns kCancelled until the flow is opened again.
  void Cancel(size_t flow) {
    const Lock lock(mutex_);
    flows_[flow].cancelled = true;
    items_.notify_all();
  }

  // Wakes all waits: pushes are refused, Pop and PopNext return kCancelled.
  void CancelAll() {
    const Lock lock(mutex_);
    cancelled_ = true;
    NotifyAll();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  enum class Consumer { kNone, kOpen, kLeft };

  struct Flow {
    std::deque<Item> items;
    Consumer consumer = Consumer::kNone;
    bool kept = false;  // without a limit until it is opened
    bool ended = false;
    bool cancelled = false;
  };

  // The functions below are called with the lock held.

  bool MustWaitToPush(size_t flow) const {
    const Flow& to = flows_[flow];
    if (cancelled_ || to.ended) return false;
    if (to.consumer == Consumer::kLeft) return open_ == 0;
    if (to.kept) return false;
    return to.items.size() >= max_queue_size_;
  }

  bool MustWaitToPop(size_t flow) const {
    const Flow& from = flows_[flow];
    return !cancelled_ && !from.cancelled && !from.ended && from.items.empty();
  }

  void Take(Flow* from, Item* item) {
    *item = std::move(from->items.front());
    from->items.pop_front();
    room_.notify_all();
  }

  void Wait(std::condition_variable* changed, size_t flow, bool full, Lock* lock) {
    if (!long_wait_) return changed->wait(*lock);
    if (changed->wait_for(*lock, patience_) != std::cv_status::timeout) return;
    // While the lock was taken back, what this waits for may have come.
    if (!(full ? MustWaitToPush(flow) : MustWaitToPop(flow))) return;
    if (full && flows_[flow].consumer != Consumer::kNone) return;
    if (const std::optional<Item> error = long_wait_(flow, full)) FailLocked(*error);
  }

  void FailLocked(const Item& error) {
    for (Flow& flow : flows_) {
      if (flow.ended) continue;
      flow.ended = true;
      flow.items.push_back(error);
    }
    NotifyAll();
  }

  void NotifyAll() {
    room_.notify_all();
    items_.notify_all();
  }

  const size_t max_queue_size_;
  const LongWait long_wait_;
  const std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  std::condition_variable room_;   // for pushes
  std::condition_variable items_;  // for pops
  std::vector<Flow> flows_;
  size_t open_ = 0;
  size_t turn_ = 0;
  bool cancelled_ = false;
};

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_FLOW_QUEUES_H_
