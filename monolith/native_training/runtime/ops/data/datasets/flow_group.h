// How the iterators over the flows of one input find each other, and the thread that feeds them.
//
// Every flow is a dataset of its own, and before it runs TensorFlow may copy the input below each
// of them. So flows know each other by name: an iterator joins the newest group of its name that
// lacks its index. The iterator over index 0 brings the reader. Inside of a MergeFlowDataset
// iterator that iterator is the group's home: flows of two mergers never mix, and the reader lives
// as long as the merger even if flow 0 is not read to its end.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_GROUP_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_GROUP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/data/flow_queues.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

class FlowGroup;
class FlowHome;
class FlowReader;

using ::monolith::data::Popped;

// A sample, or the error that came in its place.
struct FlowItem {
  Status status;
  Tensor sample;
};

using FlowQueues = ::monolith::data::FlowQueues<FlowItem>;

// Whether cancelling has begun. Inputs hear of it before it is complete.
inline bool WasCancelled(CancellationManager* manager) {
  return manager->IsCancelling() || manager->IsCancelled();
}

// Returns which flow of the input a sample belongs to.
using FlowRoute = std::function<Status(const Tensor& sample, size_t* flow)>;

// Identifies a reader: iterators that agree in all of it share one.
struct FlowName {
  std::string shared_name;
  std::vector<std::string> data_flow;

  bool operator==(const FlowName& other) const {
    return shared_name == other.shared_name && data_flow == other.data_flow;
  }
};

// The threads of mergers that read flows. A flow that is opened again, as `repeat` does, waits for
// the next pass over the input, which index 0 opens. When every thread that still reads waits for
// another one, nothing seems to come: then samples for flows that were never opened are kept beyond
// the limit of their queues, and flows that wait for a pass after the last one of index 0 end.
// Those that never had a pass go on waiting, as long as FlowQueues has patience.
//
// That is a guess: a thread that is not the merger's, such as one of `prefetch`, may still open a
// flow. If it does it finds all of its samples, or, should it be index 0 of flows that have ended,
// an error. So a wrong guess loses nothing silently.
class FlowWaits {
 public:
  // Around all that a thread reads.
  void AddThread();
  void RemoveThread();

  // Around a wait of such a thread for a flow.
  void Add(std::shared_ptr<FlowGroup> group, size_t flow);
  void Remove(const std::shared_ptr<FlowGroup>& group, size_t flow);

  // To be called when a group begins to wait.
  void Check();

  // Whether the input of flows of these names was ever read.
  void NoteReader(const FlowName& name);
  bool HadReader(const FlowName& name);

 private:
  struct Waiting {
    std::shared_ptr<FlowGroup> group;
    size_t flow;
  };

  mutex mu_;
  size_t threads_ TF_GUARDED_BY(mu_) = 0;
  std::vector<Waiting> waiting_ TF_GUARDED_BY(mu_);
  std::vector<FlowName> read_ TF_GUARDED_BY(mu_);
};

class FlowGroup {
 public:
  // Joins, or makes, the group of an iterator that is being initialized. Leave must follow.
  //   runtime: the function library of the iterator; iterators of one pipeline have the same.
  static std::shared_ptr<FlowGroup> Join(const FlowName& name, size_t index, const void* runtime,
                                         int64_t max_queue_size);
  static void Leave(const std::shared_ptr<FlowGroup>& group, size_t index);

  // Waits for a sample of flow `index`.
  static Popped Pop(const std::shared_ptr<FlowGroup>& group, size_t index, FlowItem* item);

  FlowQueues* queues() { return &queues_; }
  const FlowName& name() const { return name_; }

 private:
  friend class FlowReader;
  friend class FlowWaits;

  FlowGroup(const FlowName& name, int64_t max_queue_size, const FlowHome* home,
            const void* runtime);

  // Starts the reader now, or when there is one.
  void Start();

  // Whether it takes another thread of the merger for a flow to go on, and what to do without. A
  // thread that was given an item, but has not woken up yet, does not wait.
  bool IsStuck(size_t flow) {
    return !finished_ && (!has_reader_ || is_blocked_) && queues_.WaitsForItem(flow);
  }
  void Free();

  // Ends the flows when nothing has happened for long. Called under the lock of the queues.
  std::optional<FlowItem> EndOfPatience(size_t flow, bool full, int64_t max_queue_size);
  // Whether an iterator over index 0 is alive, now in another pass over the input.
  bool MayGetReader();

  bool IsOver(bool is_newest) const;
  // Forgets the groups that are over.
  static void Prune();

  void Attach(FlowReader* reader);
  void Detach();

  const FlowName name_;
  // Only compared.
  const FlowHome* const home_;
  const void* const runtime_;
  const std::shared_ptr<FlowWaits> waits_;
  FlowQueues queues_;
  // Guarded by the lock of all groups: which flows have an iterator, and which ever had.
  std::vector<bool> live_, joined_;

  mutex mu_;
  FlowReader* reader_ TF_GUARDED_BY(mu_) = nullptr;
  bool wanted_ TF_GUARDED_BY(mu_) = false;
  // Nothing more will be read.
  std::atomic<bool> finished_{false};
  // Its flows ended because the input seemed to be read no more.
  std::atomic<bool> abandoned_{false};
  std::atomic<bool> has_reader_{false};
  // The reader waits for a flow to be opened.
  std::atomic<bool> is_blocked_{false};
};

// Reads the input in a thread and hands samples to the flows of a group. Errors of the input, and
// samples that belong to no flow, are errors of all flows; then reading goes on. An end ends all.
class FlowReader {
 public:
  FlowReader(std::shared_ptr<FlowGroup> group, FlowRoute route);
  // Waits for the thread. Flows that have not ended get an error.
  ~FlowReader();

  bool is_finished() const { return group_->finished_; }

  // `ctx` and `parent` must outlive the reader. To be called once.
  Status Open(data::IteratorContext* ctx, const data::IteratorBase* parent,
              const data::DatasetBase* input, const std::string& prefix);

 private:
  friend class FlowGroup;

  void StartThread();
  void Run();
  bool Push(size_t flow, FlowItem item);
  // Flows that have not ended get an error.
  void Close();

  const std::shared_ptr<FlowGroup> group_;
  const FlowRoute route_;
  std::unique_ptr<CancellationManager> cancellation_;
  std::unique_ptr<data::IteratorContext> ctx_;
  std::unique_ptr<data::IteratorBase> input_;
  bool attached_ = false;
  std::unique_ptr<Thread> thread_;
};

// Where the readers of an iterator tree live: in the outermost merger.
class FlowHome {
 public:
  // `ctx` and `parent` must outlive the home.
  FlowHome(data::IteratorContext* ctx, const data::IteratorBase* parent)
      : ctx_(ctx), parent_(parent) {}

  // In this thread, iterators over flows that are made get this home, unless they have one.
  class Scope {
   public:
    explicit Scope(FlowHome* home);
    ~Scope();

   private:
    FlowHome* const outer_;
  };

  // Marks a thread that reads for the merger.
  class ThreadScope {
   public:
    explicit ThreadScope(FlowHome* home);
    ~ThreadScope();

   private:
    const std::shared_ptr<FlowWaits> waits_;
    const Scope scope_;
  };

  // Returns the home of this thread, or null.
  static FlowHome* Current();

  data::IteratorContext* ctx() const { return ctx_; }
  const data::IteratorBase* parent() const { return parent_; }
  const std::shared_ptr<FlowWaits>& waits() const { return waits_; }
  // Takes over a reader, and ends those that have nothing more to read. Thread-safe.
  void Keep(std::unique_ptr<FlowReader> reader);

 private:
  data::IteratorContext* const ctx_;
  const data::IteratorBase* const parent_;
  const std::shared_ptr<FlowWaits> waits_ = std::make_shared<FlowWaits>();
  mutex mu_;
  std::vector<std::unique_ptr<FlowReader>> readers_ TF_GUARDED_BY(mu_);
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_FLOW_GROUP_H_
