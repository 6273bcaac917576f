// A lossless, insert-only, sharded set of keys: the ids touched since they were last asked for.
//
//   high bits of hash(key)          low bits of hash(key)
//        |                               |
//        v                               v
//   +---------+    +-----------------------------------------+
//   | shard 0 | -> | key | 0 | key | key | 0 | ...           |  open addressing, linear probing,
//   | shard 1 | -> | 0 | key | ...                           |  8 (or sizeof(Key)) bytes a slot,
//   |   ...   |    +-----------------------------------------+  at most 3/4 full, grows by doubling
//   +---------+
//
// The all-zero key marks an empty slot; whether it is a member is a flag beside the slots.
//
// A batch is grouped by shard first, so that a shard's mutex is taken once per batch and the slots
// of one shard stay in cache; within a group the slots a few keys ahead are prefetched.
//
// Overflow contract. insert(k): if the set holds more than `capacity` keys, all are dropped and
// their number is reported; then k is added unless present. A batch acts like inserting its keys in
// order. So `limit = capacity + 1` keys fit, and a batch of n can only overflow when size + n >
// limit:
//
//   * Batches that cannot overflow run concurrently under the shared side of `access_`. Each first
//     reserves n places in `reserved_` and gives back those that duplicates did not need;
//     `reserved_` is therefore never below the true size, and equals it while no thread inserts.
//   * A batch that might overflow takes the exclusive side and proceeds in runs that cannot,
//     dropping everything between runs when the set is full.
//   * Steal takes the exclusive side only to detach the shards' slots: each batch is wholly before
//     or wholly after it.
//
// `gate_` is held while waiting for either side, so a writer is not starved by a stream of readers.
//
// Thread-safe throughout. Cost: about 60 ns of one core per key while a set grows to 10 million
// random keys in batches of 10,000 (Neoverse N1), growth included. Steal is O(shards) under the
// lock and O(slots) outside.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CONCURRENT_KEY_SET_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CONCURRENT_KEY_SET_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace engine {

// An id of one of several tables, which its address stands for.
struct TableKey {
  int64_t id;
  const void* table;

  friend bool operator==(const TableKey& a, const TableKey& b) {
    return a.id == b.id && a.table == b.table;
  }
};

// Multiplies to 128 bits and folds: every bit of the result depends on every bit of `value`.
inline uint64_t MixBits(uint64_t value) {
  const __uint128_t product =
      static_cast<__uint128_t>(value ^ 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
  const uint64_t folded = static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
  return folded ^ (folded >> 29);
}

template <typename Key>
struct KeyHash;

template <>
struct KeyHash<int64_t> {
  uint64_t operator()(int64_t id) const { return MixBits(static_cast<uint64_t>(id)); }
};

// Returns a salt that tells the ids of a table from those of another.
inline uint64_t TableSalt(const void* table) { return MixBits(reinterpret_cast<uintptr_t>(table)); }

template <>
struct KeyHash<TableKey> {
  uint64_t operator()(const TableKey& key) const {
    return MixBits(static_cast<uint64_t>(key.id) ^ TableSalt(key.table));
  }
};

template <typename Key, typename Hash = KeyHash<Key>>
class ConcurrentKeySet {
  static_assert(std::is_trivially_copyable_v<Key>, "slots are copied and cleared as plain memory");

  class Table;

 public:
  // Keys taken out of a set, in unspecified order.
  class Stolen {
   public:
    int64_t size() const { return size_; }

    // Calls take(keys, n) for some keys at a time until it had all.
    template <typename Take>
    void TakeAll(const Take& take) const {
      Key keys[kTakenKeys];
      for (const Table& table : tables_) table.TakeAll(keys, take);
    }

    // Writes size() keys.
    void CopyTo(Key* out) const {
      TakeAll([&out](const Key* keys, int64_t n) { out = std::copy(keys, keys + n, out); });
    }

   private:
    friend class ConcurrentKeySet;
    std::vector<Table> tables_;
    int64_t size_ = 0;
  };

  // `capacity` (>= 0) bounds the keys held as described above. `concurrency_level` (>= 1) is how
  // many threads may usefully insert at once. Memory is allocated by inserts only.
  ConcurrentKeySet(int64_t capacity, int64_t concurrency_level)
      : capacity_(capacity),
        limit_(static_cast<uint64_t>(capacity) + 1),
        shard_bits_(ShardBits(capacity, concurrency_level)),
        shards_(size_t{1} << shard_bits_) {}

  ConcurrentKeySet(const ConcurrentKeySet&) = delete;
  ConcurrentKeySet& operator=(const ConcurrentKeySet&) = delete;

  int64_t capacity() const { return capacity_; }

  int64_t num_shards() const { return static_cast<int64_t>(shards_.size()); }

  // Waits for running inserts.
  int64_t size() const {
    std::lock_guard gate(gate_);
    std::unique_lock lock(access_);
    return static_cast<int64_t>(reserved_.load(std::memory_order_relaxed));
  }

  // Returns the number of keys dropped.
  int64_t Insert(const Key& key) { return Insert(&key, 1); }

  // Inserts keys[0..n) in order; returns how many keys were dropped in all.
  int64_t Insert(const Key* keys, int64_t n) {
    if (n <= 0) return 0;
    if (InsertIfItFits(keys, static_cast<uint64_t>(n))) return 0;
    std::lock_guard gate(gate_);
    std::unique_lock lock(access_);
    int64_t dropped = 0;
    while (n > 0) {
      const uint64_t size = reserved_.load(std::memory_order_relaxed);
      if (size >= limit_) {
        dropped += static_cast<int64_t>(size);
        Clear();
        continue;
      }
      const int64_t run = static_cast<int64_t>(std::min<uint64_t>(n, limit_ - size));
      Reservation reservation(&reserved_, run);
      InsertGrouped(keys, run, &reservation.used);
      keys += run;
      n -= run;
    }
    return dropped;
  }

  // Takes all keys out.
  Stolen Steal() {
    Stolen stolen;
    stolen.tables_.resize(shards_.size());
    std::lock_guard gate(gate_);
    std::unique_lock lock(access_);
    for (size_t i = 0; i < shards_.size(); ++i) {
      std::swap(stolen.tables_[i], shards_[i].table);
    }
    stolen.size_ = static_cast<int64_t>(reserved_.exchange(0, std::memory_order_relaxed));
    return stolen;
  }

 private:
  // Below this a batch is not worth grouping; larger ones are grouped in blocks that stay in cache.
  static constexpr int64_t kMinGroupedBatch = 64;
  static constexpr int64_t kBlock = 1 << 18;
  static constexpr int64_t kPrefetchDistance = 12;
  static constexpr int kMaxShardBits = 6;
  static constexpr int64_t kMinKeysPerShard = 64;
  static constexpr uint64_t kTakenKeys = 512;

  // One shard's keys.
  class Table {
   public:
    // Adds the number of keys that were absent to *added.
    void Insert(const Key* keys, int64_t n, uint64_t* added) {
      while (n > 0) {
        // As many as fit whatever they are, so that the loop below need not look after growth.
        const uint64_t room = 3 * (num_slots_ / 4) - used_;
        if (room == 0) {
          Grow();
          continue;
        }
        const int64_t run = static_cast<int64_t>(std::min<uint64_t>(n, room));
        *added += InsertRun(keys, run);
        keys += run;
        n -= run;
      }
    }

    void Clear() {
      if (used_ > 0) std::fill_n(slots_.get(), num_slots_, Key{});
      used_ = 0;
      has_zero_ = false;
    }

    // `keys` is room for kTakenKeys.
    template <typename Take>
    void TakeAll(Key* keys, const Take& take) const {
      uint64_t n = 0;
      if (has_zero_) keys[n++] = Key{};
      for (uint64_t begin = 0; begin < num_slots_;) {
        const uint64_t end = std::min(num_slots_, begin + (kTakenKeys - n));
        // Slots are empty by chance: a branch would be mispredicted every other time.
        for (; begin < end; ++begin) {
          keys[n] = slots_[begin];
          n += !(slots_[begin] == Key{});
        }
        if (n < kTakenKeys / 2 && begin < num_slots_) continue;
        take(keys, static_cast<int64_t>(n));
        n = 0;
      }
      if (n > 0) take(keys, static_cast<int64_t>(n));
    }

   private:
    uint64_t InsertRun(const Key* keys, int64_t n) {
      Key* const slots = slots_.get();
      const uint64_t mask = num_slots_ - 1;
      for (int64_t i = 0; i < std::min(kPrefetchDistance, n); ++i) {
        PrefetchForWrite(&slots[Hash()(keys[i]) & mask]);
      }
      uint64_t placed = 0;
      uint64_t zeros = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (i + kPrefetchDistance < n) {
          PrefetchForWrite(&slots[Hash()(keys[i + kPrefetchDistance]) & mask]);
        }
        if (keys[i] == Key{}) {
          zeros = 1;
        } else {
          placed += Place(keys[i], Hash()(keys[i]) & mask, slots, mask);
        }
      }
      used_ += placed;
      return placed + (zeros > 0 && !std::exchange(has_zero_, true));
    }

    // There is always an empty slot. Returns false if the key is there already.
    static bool Place(const Key& key, uint64_t slot, Key* slots, uint64_t mask) {
      for (;; slot = (slot + 1) & mask) {
        if (slots[slot] == Key{}) {
          slots[slot] = key;
          return true;
        }
        if (slots[slot] == key) return false;
      }
    }

    // Out of line: rare, and it would cost the hot loop registers.
    __attribute__((noinline)) void Grow() {
      const uint64_t num_slots = num_slots_ == 0 ? 16 : 2 * num_slots_;
      auto slots = std::make_unique<Key[]>(num_slots);
      const uint64_t mask = num_slots - 1;
      for (uint64_t i = 0; i < num_slots_; ++i) {
        if (slots_[i] == Key{}) continue;
        Place(slots_[i], Hash()(slots_[i]) & mask, slots.get(), mask);
      }
      slots_ = std::move(slots);
      num_slots_ = num_slots;
    }

    std::unique_ptr<Key[]> slots_;
    uint64_t num_slots_ = 0;  // zero or a power of two
    uint64_t used_ = 0;       // not counting the all-zero key
    bool has_zero_ = false;
  };

  struct alignas(64) Shard {
    std::mutex mutex;
    Table table;
  };

  // Places held in `reserved_` for a batch; those not used go back, also when an insert throws.
  struct Reservation {
    Reservation(std::atomic<uint64_t>* reserved, uint64_t n)
        : reserved(reserved), n(n), before(reserved->fetch_add(n, std::memory_order_relaxed)) {}
    ~Reservation() { reserved->fetch_sub(n - used, std::memory_order_relaxed); }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    std::atomic<uint64_t>* reserved;
    uint64_t n;
    uint64_t before;
    uint64_t used = 0;
  };

  // As many shards as threads, but not shards of a few keys, and not more than leave a batch of
  // thousands has only a few keys for each: a mutex and an unhidden cache miss per key cost more
  // than the waiting they save.
  static int ShardBits(int64_t capacity, int64_t concurrency_level) {
    int bits = 0;
    while (bits < kMaxShardBits && (int64_t{1} << bits) < concurrency_level &&
           (kMinKeysPerShard << bits) <= capacity) {
      ++bits;
    }
    return bits;
  }

  uint64_t ShardOf(uint64_t hash) const {
    return shard_bits_ == 0 ? 0 : hash >> (64 - shard_bits_);
  }

  bool InsertIfItFits(const Key* keys, uint64_t n) {
    std::unique_lock gate(gate_);
    std::shared_lock lock(access_);
    gate.unlock();
    Reservation reservation(&reserved_, n);
    if (reservation.before + n > limit_) return false;
    InsertGrouped(keys, static_cast<int64_t>(n), &reservation.used);
    return true;
  }

  // Adds the number of new keys to *added, shard by shard. The caller made sure that all fit.
  void InsertGrouped(const Key* keys, int64_t n, uint64_t* added) {
    if (shard_bits_ == 0) return InsertRun(&shards_[0], keys, n, added);
    if (n < kMinGroupedBatch) {
      for (int64_t i = 0; i < n; ++i) {
        InsertRun(&shards_[ShardOf(Hash()(keys[i]))], keys + i, 1, added);
      }
      return;
    }
    std::vector<Key> grouped(std::min(n, kBlock));
    std::vector<uint16_t> shard_of(grouped.size());
    std::vector<int64_t> ends(shards_.size());
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t size = std::min(kBlock, n - begin);
      GroupByShard(keys + begin, size, shard_of.data(), ends.data(), grouped.data());
      // Starting anywhere keeps threads from queueing up behind one another, shard after shard.
      const size_t first = ShardOf(Hash()(keys[begin]));
      for (size_t i = 0; i < shards_.size(); ++i) {
        const size_t shard = (first + i) & (shards_.size() - 1);
        const int64_t start = shard == 0 ? 0 : ends[shard - 1];
        InsertRun(&shards_[shard], grouped.data() + start, ends[shard] - start, added);
      }
    }
  }

  // Counting sort by shard: group i ends at ends[i] in `grouped`.
  void GroupByShard(const Key* keys, int64_t n, uint16_t* shard_of, int64_t* ends,
                    Key* grouped) const {
    std::fill_n(ends, shards_.size(), 0);
    for (int64_t i = 0; i < n; ++i) {
      shard_of[i] = static_cast<uint16_t>(ShardOf(Hash()(keys[i])));
      ++ends[shard_of[i]];
    }
    int64_t start = 0;
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      start += std::exchange(ends[shard], start);
    }
    for (int64_t i = 0; i < n; ++i) grouped[ends[shard_of[i]]++] = keys[i];
  }

  static void InsertRun(Shard* shard, const Key* keys, int64_t n, uint64_t* added) {
    if (n == 0) return;
    std::lock_guard lock(shard->mutex);
    shard->table.Insert(keys, n, added);
  }

  // Needs exclusive access. Keeps the memory: the set was full and will be again.
  void Clear() {
    for (Shard& shard : shards_) shard.table.Clear();
    reserved_.store(0, std::memory_order_relaxed);
  }

  const int64_t capacity_;
  const uint64_t limit_;
  const int shard_bits_;
  mutable std::mutex gate_;
  mutable std::shared_mutex access_;
  std::atomic<uint64_t> reserved_{0};
  std::vector<Shard> shards_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_CONCURRENT_KEY_SET_H_
