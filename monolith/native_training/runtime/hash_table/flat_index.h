// The index of one shard: id -> row number and time of the last write.
//
//   lines, contiguous, on huge pages (run_pool.h)
//   +--------+--------+--------+--------+--- ... ---+--------+
//   | line 0 | line 1 | line 2 |        |           |        |
//   +--------+--------+--------+--------+--- ... ---+--------+
//
//   line: four slots, one 64-byte cache line
//   +-----------------+-----------------+-----------------+-----------------+
//   | key   row   ts  | key   row   ts  | key   row   ts  | key   row   ts  |
//   +-----------------+-----------------+-----------------+-----------------+
//     8 B   4 B   4 B     row 0: empty, row 0xffffffff: erased (tombstone)
//
// Empty and erased are values of `row`, so every int64 is a usable key. The key of such a slot is a
// filler that belongs to another shard, so a probe need only compare keys: 0 in all shards but the
// one that owns key 0 (hence fresh zero pages are an empty index there), 1 in that one.
//
// Home line = (low 32 hash bits * number of lines) >> 32: any number of lines works, and the map
// keeps the order of hashes, so rebuilding for growth walks both arrays front to back.
//
// Invariants
//   - Probing goes line by line from the home line (wrapping) and stops at a line with an empty
//     slot: a key is never behind such a line. Erasing leaves a tombstone unless its line has an
//     empty slot already.
//   - live + tombstones <= 0.82 * slots after every insert. (At 0.9 a sixth of the keys overflow
//     their line, with runs of many lines, and that cost a third of the lookup; here it is an
//     eighth, mostly one line away.)
//   - The number of lines of shard s follows 1.25^(k + s/64): small steps keep the average load at
//     0.73, 21.9 bytes per key, and a key is moved four times while the table grows. The 64 shards
//     fill alike; the fraction s/64 spreads their growth evenly over time, so no batch pays for
//     more than a few rebuilds.
//
// Not thread-safe: the shard's lock guards it. Find and insert: one cache miss plus 0.1 (overflowed
// lines).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "monolith/native_training/runtime/allocator/run_pool.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/hash_table/feature_id.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace monolith {
namespace engine {

constexpr int kShardBits = 6;
constexpr int kNumShards = 1 << kShardBits;

inline int ShardOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kShardBits)); }

class FlatIndex {
 public:
  static constexpr uint32_t kEmpty = 0;
  static constexpr uint32_t kTombstone = 0xffffffffu;
  static constexpr int kSlotsPerLine = 4;

  struct Slot {
    int64_t key;
    uint32_t row;
    uint32_t ts;
    bool live() const { return row - 1u < kTombstone - 1u; }
  };
  struct alignas(64) Line {
    Slot slots[kSlotsPerLine];
  };

  // Where the lines are, for batches that touch many shards. It always has a line to look at, which
  // has no key of the shard where the index is empty.
  struct View {
    Line* lines;
    uint64_t num_lines;

    Line* HomeLine(uint64_t hash) const {
      return lines + (((hash & 0xffffffffu) * num_lines) >> 32);
    }
    Line* NextLine(const Line* line) const {
      const int64_t next = line + 1 - lines;
      return lines + (next == static_cast<int64_t>(num_lines) ? 0 : next);
    }
    // The slot of `key`, or null.
    Slot* Find(uint64_t hash, int64_t key) const {
      for (Line* line = HomeLine(hash);; line = NextLine(line)) {
        Slot* const slot = SlotInLine(line, key);
        if (slot != nullptr || HasEmpty(line)) return slot;
      }
    }
  };

  // `view` is kept up to date; it outlives the index.
  FlatIndex(int shard, RunPool* pool, View* view) : shard_(shard), pool_(pool), view_(view) {
    Publish();
  }
  ~FlatIndex() { Release(lines_, num_lines_); }
  FlatIndex(const FlatIndex&) = delete;
  FlatIndex& operator=(const FlatIndex&) = delete;

  int64_t live() const { return live_; }
  int64_t num_lines() const { return num_lines_; }
  int64_t num_slots() const { return num_lines_ * kSlotsPerLine; }
  int64_t tombstones() const { return tombstones_; }

  int64_t HomeLine(uint32_t hash) const {
    return static_cast<int64_t>((uint64_t{hash} * static_cast<uint64_t>(num_lines_)) >> 32);
  }
  int64_t NextLine(int64_t line) const { return line + 1 == num_lines_ ? 0 : line + 1; }
  Line* LineAt(int64_t line) const { return lines_ + line; }

  // The row of `key` in this line, 0 if it is not here. Masks, not selects: which slot matches is
  // unpredictable, and compilers make branches of selects between loaded values.
  static uint32_t RowInLine(const Line* line, int64_t key) {
    const Slot* s = line->slots;
#if defined(__aarch64__)
    const auto load = [](const Slot& slot) {
      return vreinterpretq_u64_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(&slot)));
    };
    // Two slots: their row, and the timestamp above it, where the key is the wanted one.
    const auto pick = [wanted = vdupq_n_u64(static_cast<uint64_t>(key))](uint64x2_t a,
                                                                         uint64x2_t b) {
      return vandq_u64(vceqq_u64(vzip1q_u64(a, b), wanted), vzip2q_u64(a, b));
    };
    const uint64x2_t match = vorrq_u64(pick(load(s[0]), load(s[1])), pick(load(s[2]), load(s[3])));
    return static_cast<uint32_t>(vpaddd_u64(match));
#else
    const auto pick = [key](const Slot& slot) {
      return slot.row & (0u - static_cast<uint32_t>(slot.key == key));
    };
    return (pick(s[0]) | pick(s[1])) | (pick(s[2]) | pick(s[3]));
#endif
  }
  // The slot of `key` in this line, or null.
  static Slot* SlotInLine(Line* line, int64_t key) {
    Slot* s = line->slots;
    const int64_t k0 = s[0].key, k1 = s[1].key, k2 = s[2].key, k3 = s[3].key;
    const unsigned match =
        static_cast<unsigned>(k0 == key) | static_cast<unsigned>(k1 == key) << 1 |
        static_cast<unsigned>(k2 == key) << 2 | static_cast<unsigned>(k3 == key) << 3;
    return match == 0 ? nullptr : s + __builtin_ctz(match);
  }
  // The first slot of this line without a row, or null.
  static Slot* FreeInLine(Line* line) {
    Slot* s = line->slots;
    const unsigned free =
        static_cast<unsigned>(!s[0].live()) | static_cast<unsigned>(!s[1].live()) << 1 |
        static_cast<unsigned>(!s[2].live()) << 2 | static_cast<unsigned>(!s[3].live()) << 3;
    return free == 0 ? nullptr : s + __builtin_ctz(free);
  }
  // A search ends at such a line.
  static bool HasEmpty(const Line* line) {
    const Slot* s = line->slots;
    return (s[0].row == kEmpty) | (s[1].row == kEmpty) | (s[2].row == kEmpty) |
           (s[3].row == kEmpty);
  }

  // Continues a search at `line`; returns null when the key is absent. Needs num_lines() > 0.
  Slot* FindFrom(int64_t line, int64_t key) const {
    for (int64_t visited = 0; visited < num_lines_; ++visited) {
      Slot* slot = SlotInLine(LineAt(line), key);
      if (slot != nullptr || HasEmpty(LineAt(line))) return slot;
      line = NextLine(line);
    }
    return nullptr;
  }
  Slot* Find(uint32_t hash, int64_t key) const {
    return num_lines_ == 0 ? nullptr : FindFrom(HomeLine(hash), key);
  }

  // Makes room for one more key, growing if needed. False: out of memory, nothing changed.
  bool MakeRoom() {
    if ((live_ + tombstones_ + 1) * 50 <= num_slots() * 41) return true;
    // Many tombstones: the same size is enough once they are gone.
    if ((live_ + 1) * 3 <= num_slots() * 2) return Rebuild(num_lines_);
    const int64_t target = num_lines_ < 64 ? 2 * num_lines_ : num_lines_ + num_lines_ / 8;
    return Rebuild(ScheduledLines(std::max<int64_t>(target, 1)));
  }

  // The slot of `key`, or, not live, the one for Fill() to put it in: one probe answers both. After
  // MakeRoom().
  Slot* FindOrFree(uint32_t hash, int64_t key) {
    Slot* free = nullptr;
    for (int64_t line = HomeLine(hash);; line = NextLine(line)) {
      Line* const at = LineAt(line);
      Slot* const slot = SlotInLine(at, key);
      if (slot != nullptr) return slot;
      if (free == nullptr) free = FreeInLine(at);
      if (HasEmpty(at)) return free;
    }
  }
  void Fill(Slot* slot, int64_t key, uint32_t row, uint32_t ts) {
    if (slot->row == kTombstone) --tombstones_;
    *slot = {key, row, ts};
    ++live_;
  }

  // `slot` is live and inside line `line`.
  void Erase(Line* line, Slot* slot) {
    const bool has_empty = HasEmpty(line);
    slot->key = Filler();
    slot->row = has_empty ? kEmpty : kTombstone;
    if (!has_empty) ++tombstones_;
    --live_;
  }
  void Erase(Slot* slot) {
    // Lines are 64-byte aligned.
    const uintptr_t line = reinterpret_cast<uintptr_t>(slot) & ~uintptr_t{63};
    Erase(reinterpret_cast<Line*>(line), slot);
  }

  // Room for `keys` keys without further growth. False: out of memory, nothing changed.
  bool Reserve(int64_t keys) {
    const int64_t lines = (keys * 25 + 81) / 82;
    return lines <= num_lines_ || Rebuild(ScheduledLines(lines));
  }

  // Gives tombstones back after many erasures.
  void Compact() {
    if (tombstones_ * 8 > num_slots()) Rebuild(num_lines_);
  }

  void Swap(FlatIndex* other) {
    std::swap(pool_, other->pool_);
    std::swap(lines_, other->lines_);
    std::swap(num_lines_, other->num_lines_);
    std::swap(live_, other->live_);
    std::swap(tombstones_, other->tombstones_);
    Publish();
    other->Publish();
  }

  int64_t Bytes() const { return num_lines_ * static_cast<int64_t>(sizeof(Line)); }

 private:
  // Smaller indexes come from malloc.
  static constexpr int64_t kMinPooledBytes = 4096;
  static constexpr double kGrowth = 1.25;
  static constexpr int64_t kRebuildAhead = 16;
  static constexpr int64_t kClearLines = 64;

  // The smallest number of lines of this shard's schedule that is >= lines.
  int64_t ScheduledLines(int64_t lines) const {
    const double phase = static_cast<double>(shard_) / kNumShards;
    const double k = std::ceil(std::log(static_cast<double>(lines)) / std::log(kGrowth) - phase);
    const double scheduled = std::pow(kGrowth, std::max(k, 0.0) + phase);
    return std::max(lines, static_cast<int64_t>(std::ceil(scheduled)));
  }

  // The key of slots without a row: one of another shard.
  int64_t Filler() const { return shard_ == ShardOf(MixId(0)) ? 1 : 0; }

  // Memory of unspecified content, or null.
  Line* Acquire(int64_t lines) {
    const int64_t bytes = lines * static_cast<int64_t>(sizeof(Line));
    return reinterpret_cast<Line*>(bytes >= kMinPooledBytes
                                       ? pool_->Allocate(bytes)
                                       : static_cast<char*>(std::aligned_alloc(64, bytes)));
  }

  void Clear(int64_t begin, int64_t end) {
    std::memset(static_cast<void*>(lines_ + begin), 0, (end - begin) * sizeof(Line));
    const int64_t filler = Filler();
    if (filler == 0) return;
    for (int64_t i = begin; i < end; ++i) {
      for (Slot& slot : lines_[i].slots) slot.key = filler;
    }
  }

  void Release(Line* memory, int64_t lines) {
    const int64_t bytes = lines * static_cast<int64_t>(sizeof(Line));
    if (bytes >= kMinPooledBytes) {
      pool_->Free(reinterpret_cast<char*>(memory), bytes);
    } else {
      std::free(memory);
    }
  }

  // Home lines keep the order of hashes, so both arrays are walked front to back. The new one is
  // cleared a page ahead of the keys: it passes through the cache once, and fresh pages are written
  // before they are read, which saves a page fault each.
  __attribute__((noinline)) bool Rebuild(int64_t new_lines) {
    // An index that has no keys yet is only made room for: memory comes as they do.
    const int64_t bytes = new_lines * static_cast<int64_t>(sizeof(Line));
    const bool zeros = live_ == 0 && Filler() == 0 && bytes >= kMinPooledBytes;
    Line* fresh = zeros ? reinterpret_cast<Line*>(pool_->AllocateZeros(bytes)) : Acquire(new_lines);
    if (fresh == nullptr) return false;
    Line* const old = std::exchange(lines_, fresh);
    const int64_t old_lines = std::exchange(num_lines_, new_lines);
    live_ = tombstones_ = 0;
    int64_t cleared = zeros ? new_lines : 0;
    const auto clear_from = [&](int64_t line) {
      const int64_t end = std::min(new_lines, line + kClearLines);
      Clear(std::exchange(cleared, end), end);
    };
    for (int64_t i = 0; i < old_lines; ++i) {
      concurrency::PrefetchForRead(old + i + kRebuildAhead);
      for (const Slot& slot : old[i].slots) {
        if (!slot.live()) continue;
        Slot* to = nullptr;
        for (int64_t line = HomeLine(static_cast<uint32_t>(MixId(slot.key)));;
             line = NextLine(line)) {
          if (line >= cleared) clear_from(line);
          to = FreeInLine(lines_ + line);
          if (to != nullptr) break;
        }
        *to = slot;
        ++live_;
      }
    }
    if (cleared < new_lines) clear_from(new_lines);
    Publish();
    Release(old, old_lines);
    return true;
  }

  void Publish() {
    const int64_t filler = Filler();
    // Nothing is ever found there, hence nothing written.
    static Line no_keys[2] = {{}, {{{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}}}};
    *view_ = num_lines_ == 0 ? View{&no_keys[filler], 1}
                             : View{lines_, static_cast<uint64_t>(num_lines_)};
  }

  int shard_;
  RunPool* pool_;
  View* view_;
  Line* lines_ = nullptr;
  int64_t num_lines_ = 0;
  int64_t live_ = 0;
  int64_t tombstones_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_
