// Items seen in positive samples, by channel, to draw negatives from.
//
//   channel -> | oldest item | ... | newest item |     at most `capacity` distinct items
//
// Thread-safe. Channel 0 means "no channel": it is never cached and never drawn from.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ITEM_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ITEM_POOL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

namespace monolith {
namespace data {

template <typename Item>
class ItemPool {
 public:
  struct Entry {
    uint64_t item_id = 0;
    Item item;
    int64_t seen = 0;
    int64_t sampled = 0;
  };

  struct Draw {
    Entry entry;      // `sampled` counts this draw
    double time = 0;  // (position + 1) / size: 1 for the newest item
  };

  // A channel is drawn from once it has more than `start_num` items.
  ItemPool(int64_t start_num, int64_t capacity) : start_num_(start_num), capacity_(capacity) {}

  // A known item keeps its place; a new one pushes out the oldest of a full channel.
  void Add(int64_t channel, uint64_t item_id, Item item) {
    Put(channel, {item_id, std::move(item), 1, 0});
  }

  // Adds an item with its counts.
  void Put(int64_t channel, Entry entry) {
    if (channel == 0 || capacity_ <= 0) return;
    std::lock_guard<std::mutex> lock(mu_);
    Channel& queue = channels_[channel];
    const auto known = queue.entries.find(entry.item_id);
    if (known != queue.entries.end()) {
      known->second.item = std::move(entry.item);
      known->second.seen += entry.seen;
      known->second.sampled += entry.sampled;
      return;
    }
    if (static_cast<int64_t>(queue.order.size()) >= capacity_) {
      queue.entries.erase(queue.order.front());
      queue.order.pop_front();
    }
    queue.order.push_back(entry.item_id);
    queue.entries.emplace(entry.item_id, std::move(entry));
  }

  // Draws an item of the channel; false while it has too few.
  bool Sample(int64_t channel, std::mt19937_64* random, Draw* draw) {
    std::lock_guard<std::mutex> lock(mu_);
    return SampleLocked(channel, random, draw);
  }

  // Draws from a channel that is chosen with a probability proportional to its size.
  bool SampleAnyChannel(std::mt19937_64* random, Draw* draw) {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<std::pair<int64_t, int64_t>> ready;  // channel, items up to and with it
    int64_t total = 0;
    for (const auto& [channel, queue] : channels_) {
      const int64_t size = static_cast<int64_t>(queue.order.size());
      if (size <= start_num_) continue;
      total += size;
      ready.emplace_back(channel, total);
    }
    if (total == 0) return false;
    const int64_t at = std::uniform_int_distribution<int64_t>(0, total - 1)(*random);
    for (const auto& [channel, end] : ready) {
      if (at < end) return SampleLocked(channel, random, draw);
    }
    return false;
  }

  // Everything, channel by channel, oldest item first.
  std::map<int64_t, std::vector<Entry>> Snapshot() const {
    std::lock_guard<std::mutex> lock(mu_);
    std::map<int64_t, std::vector<Entry>> result;
    for (const auto& [channel, queue] : channels_) {
      std::vector<Entry>& entries = result[channel];
      for (uint64_t item_id : queue.order) entries.push_back(queue.entries.at(item_id));
    }
    return result;
  }

  int64_t size(int64_t channel) const {
    std::lock_guard<std::mutex> lock(mu_);
    const auto it = channels_.find(channel);
    return it == channels_.end() ? 0 : static_cast<int64_t>(it->second.order.size());
  }

  int64_t start_num() const { return start_num_; }
  int64_t capacity() const { return capacity_; }

 private:
  struct Channel {
    std::deque<uint64_t> order;
    std::unordered_map<uint64_t, Entry> entries;
  };

  bool SampleLocked(int64_t channel, std::mt19937_64* random, Draw* draw) {
    const auto it = channels_.find(channel);
    if (channel == 0 || it == channels_.end()) return false;
    Channel& queue = it->second;
    const int64_t size = static_cast<int64_t>(queue.order.size());
    if (size <= start_num_) return false;
    const int64_t at = std::uniform_int_distribution<int64_t>(0, size - 1)(*random);
    Entry& entry = queue.entries.at(queue.order[static_cast<size_t>(at)]);
    ++entry.sampled;
    draw->entry = entry;
    draw->time = static_cast<double>(at + 1) / static_cast<double>(size);
    return true;
  }

  const int64_t start_num_;
  const int64_t capacity_;
  mutable std::mutex mu_;
  std::map<int64_t, Channel> channels_;
};

}  // namespace data
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_DATA_ITEM_POOL_H_
