#include "monolith/native_training/runtime/hash_table/batch/filter_rounds.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"

namespace monolith {
namespace engine {
namespace {

// Lets an id in once it was seen `threshold` times before. Remembers what it was asked.
class ExactFilter : public OccurrenceFilter {
 public:
  explicit ExactFilter(uint32_t threshold) : threshold_(threshold) {}
  void Filter(const int64_t* ids, const uint32_t* counts, int64_t n, bool for_table,
              uint8_t* filtered) override {
    EXPECT_TRUE(for_table);
    ++calls;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t& seen = counted[ids[i]];
      filtered[i] = seen < threshold_ ? 1 : 0;
      seen += counts == nullptr ? 1 : counts[i];
    }
  }

  int calls = 0;
  std::map<int64_t, uint32_t> counted;

 private:
  const uint32_t threshold_;
};

struct Occurrence {
  int64_t key;
  bool erases;
};

// One by one, as the promise says.
std::string AskEach(const std::vector<Occurrence>& batch, std::map<int64_t, bool> present,
                    OccurrenceFilter* filter) {
  std::string dropped;
  for (const Occurrence& id : batch) {
    uint8_t answer = 0;
    if (id.erases) {
      present[id.key] = false;
    } else if (!present[id.key]) {
      const uint32_t count = 1;
      filter->Filter(&id.key, &count, 1, true, &answer);
      present[id.key] = answer == 0;
    }
    dropped += answer == 0 ? '.' : 'x';
  }
  return dropped;
}

std::string AskTogether(const std::vector<Occurrence>& batch, std::map<int64_t, bool> present,
                        OccurrenceFilter* filter, FilterRounds* rounds) {
  const int64_t n = static_cast<int64_t>(batch.size());
  rounds->Clear(n);
  for (int64_t i = 0; i < n; ++i) {
    rounds->Add(i, batch[i].key, HashId(batch[i].key), present[batch[i].key]);
  }
  const uint8_t* const flags = rounds->Ask(
      filter, [](int64_t) { return 1u; }, [&](int64_t i) { return batch[i].erases; });
  std::string dropped;
  for (int64_t i = 0; i < n; ++i) dropped += flags[i] == 0 ? '.' : 'x';
  return dropped;
}

TEST(FilterRoundsTest, AnswersAndCountsAreThoseOfAskingOneByOne) {
  std::mt19937_64 random(5);
  FilterRounds rounds;
  for (int trial = 0; trial < 200; ++trial) {
    const uint32_t threshold = static_cast<uint32_t>(random() % 4);
    std::vector<Occurrence> batch(random() % 60);
    std::map<int64_t, bool> present;
    for (Occurrence& id : batch) {
      id = {static_cast<int64_t>(random() % 8), trial % 2 == 0 && random() % 4 == 0};
    }
    for (int64_t key = 0; key < 8; ++key) present[key] = random() % 3 == 0;
    ExactFilter each(threshold), together(threshold);
    EXPECT_EQ(AskEach(batch, present, &each), AskTogether(batch, present, &together, &rounds));
    EXPECT_EQ(each.counted, together.counted);
  }
}

TEST(FilterRoundsTest, OneCallForIdsThatComeOnce) {
  std::vector<Occurrence> batch;
  for (int64_t key = 0; key < 1000; ++key) batch.push_back({key, false});
  ExactFilter filter(3);
  FilterRounds rounds;
  EXPECT_EQ(AskTogether(batch, {}, &filter, &rounds), std::string(1000, 'x'));
  EXPECT_EQ(filter.calls, 1);
  batch.push_back({5, false});
  AskTogether(batch, {}, &filter, &rounds);
  EXPECT_EQ(filter.calls, 3);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
