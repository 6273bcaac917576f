// Filters decide about one sample, whatever its format. They are immutable once built, so
// several threads may use one. Random numbers come from the caller: uniform() is in [0, 1).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_SAMPLE_FILTERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_SAMPLE_FILTERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "monolith/native_training/runtime/base/status.h"
#include "monolith/native_training/runtime/data/actions.h"
#include "monolith/native_training/runtime/distribution/id_index.h"

namespace monolith {
namespace data {

// Keeps samples by their ids, slots, actions and request time. Empty lists ask for nothing.
class FidFilter {
 public:
  struct Config {
    std::vector<int64_t> filter_fids;   // none of them
    std::vector<int64_t> has_fids;      // at least one
    std::vector<int64_t> select_fids;   // all
    std::vector<int64_t> has_actions;   // at least one
    std::vector<int64_t> select_slots;  // all
    int64_t req_time_min = 0;
  };

  explicit FidFilter(const Config& config)
      : filter_fids_(config.filter_fids),
        has_fids_(config.has_fids),
        select_fids_(config.select_fids),
        select_slots_(config.select_slots),
        has_actions_(config.has_actions),
        req_time_min_(config.req_time_min) {}

  // visit_ids(f) calls f(fid, slot) for every id; fid is null for ids of which only the slot
  // counts.
  template <typename VisitIds>
  bool Keeps(int64_t req_time, Actions actions, const VisitIds& visit_ids) const {
    if (req_time < req_time_min_) return false;
    if (!has_actions_.empty() && BestAction(has_actions_, actions) < 0) return false;
    if (filter_fids_.empty() && has_fids_.empty() && select_fids_.empty() &&
        select_slots_.empty()) {
      return true;
    }
    bool filtered = false;
    bool has = has_fids_.empty();
    Selected fids(select_fids_), slots(select_slots_);
    visit_ids([&](const uint64_t* fid, int64_t slot) {
      slots.See(slot);
      if (fid == nullptr) return;
      const int64_t id = static_cast<int64_t>(*fid);
      filtered = filtered || filter_fids_.Find(id) >= 0;
      has = has || has_fids_.Find(id) >= 0;
      fids.See(id);
    });
    return !filtered && has && fids.complete() && slots.complete();
  }

 private:
  // Distinct numbers, by which they are told apart.
  class IdSet {
   public:
    explicit IdSet(const std::vector<int64_t>& ids) : index_(static_cast<int64_t>(ids.size())) {
      for (const int64_t id : ids) {
        index_.FindOrInsert(id, index_.Hash(id), index_.size());
      }
    }
    bool empty() const { return index_.size() == 0; }
    int64_t size() const { return index_.size(); }
    // The number of `id`, or less than 0.
    int64_t Find(int64_t id) const {
      if (empty()) return distribution::IdIndex::kMissing;
      return index_.Find(id, index_.Hash(id));
    }

   private:
    distribution::IdIndex index_;
  };

  // The indices of a set that have been seen.
  class Selected {
   public:
    explicit Selected(const IdSet& wanted)
        : wanted_(wanted), seen_(wanted.size()), missing_(wanted.size()) {}
    void See(int64_t id) {
      const int64_t number = wanted_.Find(id);
      if (number < 0 || seen_[number]) return;
      seen_[number] = true;
      --missing_;
    }
    bool complete() const { return missing_ == 0; }

   private:
    const IdSet& wanted_;
    std::vector<bool> seen_;
    int64_t missing_;
  };

  const IdSet filter_fids_, has_fids_, select_fids_, select_slots_;
  const std::vector<int64_t> has_actions_;
  const int64_t req_time_min_;
};

// True if some label is above its threshold, or equal to it unless `filter_equal`. A sample with
// fewer labels than there are thresholds is not kept.
bool KeepsByLabel(Span<float> labels, const std::vector<float>& thresholds, bool filter_equal);

// Keeps a share of the samples of each strategy; the one that comes first in the priorities counts.
class StrategyFilter {
 public:
  struct Decision {
    bool keeps = false;
    bool has_label = false;  // `label` becomes the first label of the sample
    float label = 0;
  };

  // `conf` is a list of strategy:rate[:label]. InvalidArgument: it is something else.
  engine::Status Build(const std::vector<int64_t>& priority, const std::string& conf,
                       bool keep_empty);

  template <typename Uniform>
  Decision Decide(Actions strategies, const Uniform& uniform) const {
    if (strategies.empty()) return {keep_empty_, false, 0};
    const int64_t best = BestAction(priority_, strategies);
    if (best < 0) return {};
    const auto it = treatments_.find(priority_[best]);
    if (it == treatments_.end()) return {true, false, 0};
    if (uniform() >= it->second.rate) return {};
    return {true, it->second.has_label, it->second.label};
  }

 private:
  struct Treatment {
    float rate = 1;
    bool has_label = false;
    float label = 0;
  };

  std::vector<int64_t> priority_;
  bool keep_empty_ = false;
  std::unordered_map<int64_t, Treatment> treatments_;
};

// Drops a share of the samples whose label is below a threshold, or missing.
class NegativeFilter {
 public:
  struct Config {
    float drop_rate = 0;
    int64_t label_index = 0;
    float threshold = 0;
    std::string action_priority;       // actions
    std::string per_action_drop_rate;  // action:rate, for the best action of a sample
  };

  // Rates of actions count only with priorities. InvalidArgument: a text is no list of numbers, or
  // the index is negative.
  engine::Status Build(const Config& config);

  template <typename Uniform>
  bool Keeps(Span<float> labels, Actions actions, const Uniform& uniform) const {
    if (label_index_ < labels.size && labels.data[label_index_] >= threshold_) return true;
    return uniform() >= DropRate(actions);
  }

 private:
  float DropRate(Actions actions) const;

  float drop_rate_ = 0;
  int64_t label_index_ = 0;
  float threshold_ = 0;
  std::vector<int64_t> priority_;
  std::unordered_map<int64_t, float> rates_;
};

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_SAMPLE_FILTERS_H_
