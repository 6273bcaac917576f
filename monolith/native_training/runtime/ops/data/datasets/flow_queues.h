// Bounded queues between the threads that read flows of samples and those who want them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_QUEUES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_QUEUES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// A sample, or the error that came in its place.
struct FlowItem {
  Status status;
  Tensor sample;
};

// One queue per flow, all behind one lock. Thread-safe. The order of a queue is that of its pushes.
class FlowQueues {
 public:
  enum class Popped { kItem, kEnd, kCancelled };

  // Asked, under the lock, whenever nothing has happened for `patience`: a Push waits for the first
  // consumer of the flow (`full`), or a Pop for an item. An error ends all flows, see Fail.
  using LongWait = std::function<Status(size_t flow, bool full)>;

  FlowQueues(size_t flows, int64_t max_queue_size, LongWait long_wait = nullptr,
             std::chrono::milliseconds patience = std::chrono::milliseconds(0));

  size_t size() const { return flows_.size(); }

  // Who takes from a flow. Items of a flow that nobody has opened yet wait; those of a flow that
  // was left are dropped, unless no flow is open: then Push waits for somebody.
  void Open(size_t flow);
  void Leave(size_t flow);

  // Whether a push would wait for the first consumer of the flow.
  bool WaitsForConsumer(size_t flow);

  // Lets flows that nobody has opened yet grow past the limit, so that the others can go on.
  // Opening such a flow finds all of its items.
  void KeepUnopened();

  // Waits for room. False: the flow has ended, and the item is gone.
  bool Push(size_t flow, FlowItem item);

  // Nothing more comes. Later pushes are refused; items in the queue stay.
  void End(size_t flow);

  // Ends all flows at once: whoever sees the end of one can rely on the others.
  void EndAll();

  // Ends all flows that have not ended, with this error as their last item.
  void Fail(const Status& status);

  // Whether Pop would wait.
  bool WaitsForItem(size_t flow);

  // Waits for an item of the flow.
  Popped Pop(size_t flow, FlowItem* item);

  // Waits for an item of any flow; takes turns among those that have one. kEnd: all have ended.
  Popped PopNext(FlowItem* item);

  // Wakes whoever waits in Pop for this flow, until it is opened again.
  void Cancel(size_t flow);

  // Wakes everybody: pushes are refused, Pop and PopNext return kCancelled.
  void CancelAll();

 private:
  enum class Consumer { kNone, kOpen, kLeft };

  struct Flow {
    std::deque<FlowItem> items;
    Consumer consumer = Consumer::kNone;
    bool kept = false;  // without a limit until somebody opens it
    bool ended = false;
    bool cancelled = false;
  };

  bool MustWaitToPush(size_t flow) const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MustWaitToPop(size_t flow) const TF_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wait(condition_variable* changed, size_t flow, bool full, mutex_lock* lock)
      TF_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailLocked(const Status& status) TF_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const size_t max_queue_size_;
  const LongWait long_wait_;
  const std::chrono::milliseconds patience_;
  mutex mu_;
  condition_variable room_;   // for who pushes
  condition_variable items_;  // for who pops
  std::vector<Flow> flows_ TF_GUARDED_BY(mu_);
  size_t open_ TF_GUARDED_BY(mu_) = 0;
  size_t turn_ TF_GUARDED_BY(mu_) = 0;
  bool cancelled_ TF_GUARDED_BY(mu_) = false;
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_QUEUES_H_
