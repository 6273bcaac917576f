#include "monolith/native_training/runtime/data/flow_queues.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace monolith {
namespace data {
namespace {

using Queues = FlowQueues<std::string>;

constexpr std::chrono::milliseconds kShort(1);

std::string Take(Queues* queues, size_t flow) {
  std::string item;
  const Popped popped = queues->Pop(flow, &item);
  return popped == Popped::kItem ? item : popped == Popped::kEnd ? "end" : "cancelled";
}

std::string TakeNext(Queues* queues) {
  std::string item;
  const Popped popped = queues->PopNext(&item);
  return popped == Popped::kItem ? item : popped == Popped::kEnd ? "end" : "cancelled";
}

// Runs fn() in a thread, and knows whether it has returned.
class Waiting {
 public:
  explicit Waiting(std::function<void()> fn)
      : thread_([this, fn] {
          fn();
          returned_ = true;
        }) {}
  ~Waiting() { thread_.join(); }

  bool returned() const { return returned_; }

 private:
  std::atomic<bool> returned_{false};
  std::thread thread_;
};

TEST(FlowQueuesTest, EachFlowKeepsItsOrder) {
  Queues queues(2, 10);
  queues.Open(0);
  queues.Open(1);
  for (const char* item : {"a", "b"}) ASSERT_TRUE(queues.Push(0, item));
  ASSERT_TRUE(queues.Push(1, "x"));
  queues.EndAll();

  EXPECT_EQ(Take(&queues, 1), "x");
  EXPECT_EQ(Take(&queues, 1), "end");
  EXPECT_EQ(Take(&queues, 0), "a");
  EXPECT_EQ(Take(&queues, 0), "b");
  EXPECT_EQ(Take(&queues, 0), "end");
  EXPECT_FALSE(queues.Push(0, "late"));
}

TEST(FlowQueuesTest, AFullQueueWaitsForRoom) {
  Queues queues(1, 2);
  queues.Open(0);
  std::vector<std::string> got;
  {
    const Waiting reader([&queues] {
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(queues.Push(0, std::to_string(i)));
      queues.End(0);
    });
    for (std::string item = Take(&queues, 0); item != "end"; item = Take(&queues, 0)) {
      got.push_back(item);
    }
  }

  ASSERT_EQ(got.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(got[i], std::to_string(i));
}

TEST(FlowQueuesTest, TakesTurnsAmongFlowsThatHaveItems) {
  Queues queues(3, 10);
  for (const char* item : {"a1", "a2", "a3"}) queues.Push(0, item);
  for (const char* item : {"c1", "c2"}) queues.Push(2, item);
  queues.EndAll();

  std::vector<std::string> got;
  for (std::string item = TakeNext(&queues); item != "end"; item = TakeNext(&queues)) {
    got.push_back(item);
  }
  EXPECT_EQ(got, (std::vector<std::string>{"a1", "c1", "a2", "c2", "a3"}));
}

TEST(FlowQueuesTest, FlowsThatWereLeftDropTheirItems) {
  Queues queues(2, 1);
  queues.Open(0);
  queues.Open(1);
  queues.Push(0, "dropped");
  queues.Leave(0);

  // More than fit: nothing waits in a flow that was left while another one is open.
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(queues.Push(0, "gone"));
  queues.Open(0);
  queues.Push(0, "new");
  EXPECT_EQ(Take(&queues, 0), "new");
}

TEST(FlowQueuesTest, WithoutAnOpenFlowPushesWait) {
  Queues queues(1, 1);
  queues.Open(0);
  queues.Leave(0);
  std::string got;
  {
    const Waiting reader([&queues] { EXPECT_TRUE(queues.Push(0, "kept")); });
    queues.Open(0);
    got = Take(&queues, 0);
  }
  EXPECT_EQ(got, "kept");
}

TEST(FlowQueuesTest, UnopenedFlowsCanBeKeptBeyondTheLimit) {
  Queues queues(2, 1);
  queues.Open(0);
  queues.Push(1, "first");
  EXPECT_TRUE(queues.WaitsForConsumer(1));
  queues.Push(0, "full");
  EXPECT_FALSE(queues.WaitsForConsumer(0));  // it has one

  queues.KeepUnopened();
  EXPECT_FALSE(queues.WaitsForConsumer(1));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(queues.Push(1, std::to_string(i)));
  queues.Open(1);
  EXPECT_EQ(Take(&queues, 1), "first");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Take(&queues, 1), std::to_string(i));
}

TEST(FlowQueuesTest, AnErrorIsTheLastItemOfFlowsThatHaveNotEnded) {
  Queues queues(2, 10);
  queues.Open(0);
  queues.Open(1);
  queues.Push(0, "a");
  queues.End(1);
  queues.Fail("error");

  EXPECT_EQ(Take(&queues, 0), "a");
  EXPECT_EQ(Take(&queues, 0), "error");
  EXPECT_EQ(Take(&queues, 0), "end");
  EXPECT_EQ(Take(&queues, 1), "end");
}

TEST(FlowQueuesTest, ALongWaitForAConsumerCanFail) {
  std::atomic<int> asked{0};
  Queues queues(
      2, 1,
      [&asked](size_t flow, bool full) -> std::optional<std::string> {
        EXPECT_EQ(flow, 1u);
        EXPECT_TRUE(full);
        return ++asked < 3 ? std::optional<std::string>() : "nobody came";
      },
      kShort);
  queues.Open(0);
  queues.Push(1, "one");

  EXPECT_FALSE(queues.Push(1, "two"));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(Take(&queues, 0), "nobody came");
}

TEST(FlowQueuesTest, ALongWaitForAnItemCanFail) {
  Queues queues(
      1, 1, [](size_t, bool full) { return std::optional<std::string>(full ? "full" : "empty"); },
      kShort);
  queues.Open(0);
  EXPECT_TRUE(queues.WaitsForItem(0));
  EXPECT_EQ(Take(&queues, 0), "empty");
  EXPECT_EQ(Take(&queues, 0), "end");
}

// Takes longer than kPatience to be put into a queue, whose lock is held meanwhile.
constexpr std::chrono::milliseconds kPatience(50);
std::atomic<bool> is_in_queue{false};

struct SlowItem {
  explicit SlowItem(int n) : number(n) {}
  SlowItem(const SlowItem&) = default;
  SlowItem& operator=(const SlowItem&) = default;
  SlowItem(SlowItem&& other) : number(other.number) {
    std::this_thread::sleep_for(3 * kPatience);
    is_in_queue = true;
  }

  int number;
};

TEST(FlowQueuesTest, AnItemThatComesAsPatienceEndsIsTaken) {
  std::atomic<bool> asked_in_vain{false};
  FlowQueues<SlowItem> queues(
      1, 10,
      [&](size_t, bool) {
        if (is_in_queue) asked_in_vain = true;
        return std::optional<SlowItem>();
      },
      kPatience);
  queues.Open(0);
  SlowItem got(0);
  {
    const Waiting consumer([&] { queues.Pop(0, &got); });
    std::this_thread::sleep_for(kShort);
    ASSERT_TRUE(queues.Push(0, SlowItem(7)));
  }
  EXPECT_EQ(got.number, 7);
  EXPECT_FALSE(asked_in_vain);
}

// A consumer that is slow is not one that is missing. The wait for flow 1 tells that time passes.
TEST(FlowQueuesTest, ALongWaitForASlowConsumerIsNoError) {
  std::atomic<int> asked{0};
  std::atomic<bool> taking{false};  // from flow 0, whose reader may be late on a busy machine
  Queues queues(
      2, 1,
      [&asked, &taking](size_t flow, bool full) {
        EXPECT_TRUE(flow == 1 || taking) << flow;
        EXPECT_FALSE(full);
        asked += flow == 1;
        return std::optional<std::string>();
      },
      kShort);
  queues.Open(0);
  queues.Open(1);
  queues.Push(0, "one");
  const Waiting reader([&queues] { EXPECT_TRUE(queues.Push(0, "two")); });
  const Waiting consumer([&queues] { EXPECT_EQ(Take(&queues, 1), "end"); });
  while (asked < 5) std::this_thread::yield();
  EXPECT_FALSE(reader.returned());
  taking = true;
  EXPECT_EQ(Take(&queues, 0), "one");
  EXPECT_EQ(Take(&queues, 0), "two");
  queues.End(1);
}

TEST(FlowQueuesTest, CancelWakesWaits) {
  Queues queues(2, 1);
  queues.Open(0);
  queues.Open(1);
  {
    const Waiting consumer([&queues] { EXPECT_EQ(Take(&queues, 0), "cancelled"); });
    queues.Cancel(0);
  }
  queues.Open(0);  // again
  queues.Push(0, "a");
  EXPECT_EQ(Take(&queues, 0), "a");

  queues.Push(0, "b");
  {
    const Waiting reader([&queues] { EXPECT_FALSE(queues.Push(0, "c")); });
    const Waiting consumer([&queues] { EXPECT_EQ(Take(&queues, 1), "cancelled"); });
    queues.CancelAll();
  }
  EXPECT_EQ(TakeNext(&queues), "cancelled");
}

}  // namespace
}  // namespace data
}  // namespace monolith
