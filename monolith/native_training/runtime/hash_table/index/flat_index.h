// The index of one shard: id -> row number and time of the last write.
//
//   directory of the table, by the top bits of the hash: 6 for the shard, then `depth` more
//   +------+------+------+------+---
//   | home | home | home | home | ...   2^depth entries for each shard; a piece has one, or 2^k
//   +--+---+--+---+--+---+--+---+---    neighbours
//      |      |      |      |
//      v      v      +--+---+
//   piece 0  piece 1   piece 2
//
//   piece: lines, contiguous, on huge pages (run_pool.h), at most kMaxPieceLines and some spare
//   ones
//   +--------+--------+--------+--------+--- ... ---+--------+-------+-------+
//   | line 0 | line 1 | line 2 |        |           | line n | spare | empty |
//   +--------+--------+--------+--------+--- ... ---+--------+-------+-------+
//
//   line: four slots, one 64-byte cache line
//   +-----------------+-----------------+-----------------+-----------------+
//   | key   row   ts  | key   row   ts  | key   row   ts  | key   row   ts  |
//   +-----------------+-----------------+-----------------+-----------------+
//     8 B   4 B   4 B     row 0: empty, row 0xffffffff: erased (tombstone)
//
// Empty and erased are values of `row`, so every int64 is a usable key. The key of such a slot is a
// filler that belongs to another shard, so a probe need only compare keys: 0 in all shards but the
// one that owns key 0 (hence fresh zero pages are an empty index there).
//
// Home line in a shard = (place * number of lines) >> 32, where the place is the 32 bits of the
// hash behind those of the shard, and a piece that has 1/2^k of the places and n lines counts as
// part of n * 2^k lines: any number of lines works, and the map keeps the order of hashes, so
// rebuilding for growth walks both arrays front to back.
//
// Invariants
//   - Probing goes line by line from the home line and stops at a line with an empty slot: a key is
//     never behind such a line. Erasing leaves a tombstone unless its line has an empty slot
//     already. The last line of a piece is always empty, so nothing wraps.
//   - live + tombstones <= 0.825 * slots of a piece after every insert. (At 0.9 a sixth of the keys
//     overflow their line, with runs of many lines, and that cost a third of the lookup; here it is
//     an eighth, mostly one line away.)
//   - The number of lines of a piece follows 1.33^(k + phase), and is up to an eighth more where
//     that fills a hole in memory: the average load is 0.70, 23 bytes per key and 2 in holes, and a
//     key is moved three times while the table grows. A piece that would become too large is split
//     in two, so a rebuild takes the same fraction of a millisecond in a table of any size. Pieces
//     fill alike; phases are spread evenly over those of all shards, and with them rebuilds and
//     splits over time, so no batch pays for more than a few. Each shard has its own size that is
//     too large: when all split at the same, there were no small pieces to take the holes that
//     pieces leave as they grow, a sixth of all memory.
//
// Not thread-safe: the shard's lock guards its index and its entries of the directory, the locks of
// all shards together guard the directory's size. Find and insert: one cache miss plus 0.1
// (overflowed lines).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_FLAT_INDEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_FLAT_INDEX_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/allocator/run_pool.h"
#include "monolith/native_training/runtime/base/feature_id.h"

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
  // Shards let their pieces grow to different sizes.
  static constexpr int64_t kMaxPieceLines = 16384;
  static constexpr int64_t kMinMaxPieceLines = kMaxPieceLines / 8;
  // The end of the range of places inside a shard.
  static constexpr uint64_t kHashEnd = uint64_t{1} << 32;

  // Where a hash lies inside its shard.
  static uint64_t PlaceOf(uint64_t hash) { return (hash >> (32 - kShardBits)) & 0xffffffffu; }

  struct Slot {
    int64_t key;
    uint32_t row;
    uint32_t ts;
    bool live() const { return row - 1u < kTombstone - 1u; }
  };
  struct alignas(64) Line {
    Slot slots[kSlotsPerLine];
  };

  // Where the lines of a piece are.
  struct Home {
    uintptr_t base;   // of the piece, less the lines that the shard would have before it
    uint32_t lines;   // that the shard would have if all its pieces were as large
    uint32_t number;  // of the piece in its shard
  };

  // Where the lines of all shards are. A hash always has a line to look at, which has no key of its
  // shard where the index is empty. Loops keep a copy, in registers.
  struct View {
    const Home* homes;
    int shift;

    Line* HomeLine(uint64_t hash) const {
      const Home& home = homes[hash >> shift];
      return reinterpret_cast<Line*>(home.base +
                                     ((PlaceOf(hash) * home.lines) >> 32) * sizeof(Line));
    }
    // The slot of `key`, or null.
    Slot* Find(uint64_t hash, int64_t key) const {
      Line* const home = HomeLine(hash);
      Slot* const slot = SlotInLine(home, key);
      return slot != nullptr ? slot : SearchBehind(home, key).slot;
    }
  };

  // The directory of the indexes of all shards of a table.
  class Directory {
   public:
    Directory() = default;
    Directory(const Directory&) = delete;
    Directory& operator=(const Directory&) = delete;

    // Valid as long as the caller keeps some shard from changing: Deepen needs all of them.
    View view() const { return {homes_, shift()}; }

    int depth() const { return depth_; }
    // Whether a shard would like to split further than the directory tells apart. Needs no lock.
    bool wants_depth() const { return wants_depth_.load(std::memory_order_relaxed); }
    // Doubles the number of entries. The caller holds the locks of all shards. False: out of
    // memory, nothing changed.
    bool Deepen();
    // Exchanges the content. The caller holds the locks of all shards of both tables.
    void Swap(Directory* other);

    // Returns where a small table's lookups read first.
    const void* first_entries() const { return first_homes_; }
    int64_t Bytes() const;

   private:
    friend class FlatIndex;

    int shift() const { return 64 - kShardBits - depth_; }

    int depth_ = 0;
    Home* homes_ = first_homes_;
    std::vector<Home> more_homes_;  // homes_ of depth 1 and more
    std::atomic<bool> wants_depth_{false};
    alignas(64) Home first_homes_[kNumShards] = {};
  };

  // Pool and directory outlive the index.
  FlatIndex(int shard, RunPool* pool, Directory* directory);
  ~FlatIndex();
  FlatIndex(const FlatIndex&) = delete;
  FlatIndex& operator=(const FlatIndex&) = delete;

  int64_t live() const { return live_; }
  int64_t num_slots() const { return num_lines_ * kSlotsPerLine; }
  int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }
  // How often lines have moved: pointers to them hold as long as this stays.
  int64_t changes() const { return changes_; }
  // Keys that were moved for growth so far.
  int64_t moved() const { return moved_; }
  int64_t Bytes() const;

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
  // The first slot of this line without a row, erased or empty, or null.
  static Slot* FreeInLine(Line* line) {
    Slot* s = line->slots;
    const unsigned free =
        static_cast<unsigned>(!s[0].live()) | static_cast<unsigned>(!s[1].live()) << 1 |
        static_cast<unsigned>(!s[2].live()) << 2 | static_cast<unsigned>(!s[3].live()) << 3;
    return free == 0 ? nullptr : s + __builtin_ctz(free);
  }
  // The first empty slot of this line, which has one.
  static Slot* EmptyInLine(Line* line) {
    Slot* s = line->slots;
    const unsigned empty = static_cast<unsigned>(s[0].row == kEmpty) |
                           static_cast<unsigned>(s[1].row == kEmpty) << 1 |
                           static_cast<unsigned>(s[2].row == kEmpty) << 2 | 1u << 3;
    return s + __builtin_ctz(empty);
  }
  // A search ends at such a line.
  static bool HasEmpty(const Line* line) {
    const Slot* s = line->slots;
    return (s[0].row == kEmpty) | (s[1].row == kEmpty) | (s[2].row == kEmpty) |
           (s[3].row == kEmpty);
  }

  // Where a search ended.
  struct Search {
    Slot* slot;  // of the key, or null
    Line* line;  // without a slot: the first one, from the home line on, that has an empty slot
  };
  // Searches for a key that is not in its home line.
  static Search SearchBehind(Line* home, int64_t key) {
    Search search = {nullptr, home};
    while (search.slot == nullptr && !HasEmpty(search.line)) {
      search.slot = SlotInLine(++search.line, key);
    }
    return search;
  }

  Slot* Find(uint64_t hash, int64_t key) const { return directory_->view().Find(hash, key); }

  // The slot of `key`, or, not live, the one for Fill() to put it in, growing if needed. Null: out
  // of memory, nothing changed.
  Slot* FindOrFree(uint64_t hash, int64_t key) {
    Line* const home = directory_->view().HomeLine(hash);
    const Search search = SearchBehind(home, key);
    return search.slot != nullptr ? search.slot : FindInHomeOrFree(home, search.line, hash, key);
  }
  // The same for a key that is not behind its home line: a search for it ended at `end`.
  __attribute__((always_inline)) Slot* FindInHomeOrFree(Line* home, Line* end, uint64_t hash,
                                                        int64_t key) {
    Slot* const slot = SlotInLine(home, key);
    if (slot != nullptr) return slot;
    const uint32_t number = NumberOf(hash);
    Slot* const free = pieces_[number].tombstones == 0 ? EmptyInLine(end) : FirstFree(home);
    // The last line is empty: no slot of it but its first is ever the one that is found.
    const bool fits =
        rooms_[number] > 0 && (!IsFirstOfLine(free) || free < LastLine(pieces_[number])->slots);
    return fits ? free : FreeAfterGrowth(hash, key, free);
  }
  void Fill(uint64_t hash, Slot* slot, int64_t key, uint32_t row, uint32_t ts) {
    const uint32_t number = NumberOf(hash);
    if (slot->row == kTombstone) {
      --pieces_[number].tombstones;
    } else {
      --rooms_[number];
    }
    *slot = {key, row, ts};
    ++live_;
  }

  // `slot` is live.
  void Erase(Slot* slot);

  // Room for `keys` keys without further growth, in a directory of DepthFor(keys). False: out of
  // memory, no key is lost.
  bool Reserve(int64_t keys);
  static int DepthFor(int64_t keys);

  // Gives tombstones, and lines that are not needed any more, back after many erasures. Where there
  // is no memory for that, things stay as they are.
  void Compact();

  // Exchanges everything but the directories: the caller swaps those too.
  void Swap(FlatIndex* other);

  // Calls visit(line) for every line.
  template <typename Visitor>
  void ForEachLine(Visitor visit) {
    for (const Piece& piece : pieces_) {
      for (int64_t i = 0; i < piece.num_lines + piece.spare_lines; ++i) visit(piece.lines + i);
    }
  }

  // Calls visit(slot, place) once for every key whose place is in [begin, end). Keys lie at or
  // behind their home line, in the same run of full lines; home lines ascend with the place. So the
  // walk starts at the home of `begin` and ends at the first line with an empty slot at or behind
  // the home of `end` - 1, in each piece.
  template <typename Visitor>
  void VisitHashRange(uint64_t begin, uint64_t end, Visitor visit) const {
    const IdHash hash_of = TableHash();
    const View view = directory_->view();
    while (begin < end) {
      const Piece& piece = pieces_[NumberOf(HashAt(begin))];
      const uint64_t piece_end = (piece.prefix + 1) << (32 - piece.depth);
      const uint64_t stop = piece_end < end ? piece_end : end;
      const Line* const last_home = view.HomeLine(HashAt(stop - 1));
      for (const Line* line = view.HomeLine(HashAt(begin));; ++line) {
        for (const Slot& slot : line->slots) {
          if (!slot.live()) continue;
          const uint64_t place = PlaceOf(hash_of(slot.key));
          if (place >= begin && place < stop) visit(slot, static_cast<uint32_t>(place));
        }
        if (line >= last_home && HasEmpty(line)) break;
      }
      begin = stop;
    }
  }

 private:
  // The keys whose places begin with the `depth` bits of `prefix`.
  struct Piece {
    Line* lines = nullptr;
    int64_t num_lines = 0;    // 0: none, spare ones neither
    int64_t spare_lines = 0;  // behind them; the last one stays empty
    int64_t tombstones = 0;
    uint64_t prefix = 0;
    int depth = 0;
  };

  static Line* LastLine(const Piece& piece) {
    return piece.lines + piece.num_lines + piece.spare_lines - 1;
  }
  static bool IsFirstOfLine(const Slot* slot) {
    return reinterpret_cast<uintptr_t>(slot) % alignof(Line) == 0;
  }
  // Keys and tombstones that `lines` lines may have.
  static int64_t FullSlots(int64_t lines) { return lines * kSlotsPerLine * 33 / 40; }
  // The number of the piece of a hash.
  uint32_t NumberOf(uint64_t hash) const {
    return directory_->homes_[hash >> directory_->shift()].number;
  }
  // A hash of this shard.
  uint64_t HashAt(uint64_t place) const {
    return static_cast<uint64_t>(shard_) << (64 - kShardBits) | place << (32 - kShardBits);
  }
  int64_t LiveOf(uint32_t number) const {
    const Piece& piece = pieces_[number];
    return FullSlots(piece.num_lines) - rooms_[number] - piece.tombstones;
  }

  // The first slot without a row from the home line on.
  static Slot* FirstFree(Line* home) {
    Slot* free = FreeInLine(home);
    for (Line* line = home; free == nullptr;) free = FreeInLine(++line);
    return free;
  }

  bool Grow(uint32_t number);
  // FindOrFree of an absent key whose piece is full, or has too few spare lines.
  Slot* FreeAfterGrowth(uint64_t hash, int64_t key, Slot* free);
  int64_t ScheduledLines(const Piece& piece, int64_t lines) const;
  // Replaces the lines of a piece. False: out of memory, nothing changed.
  bool Rebuild(uint32_t number, int64_t num_lines, int64_t spare_lines);
  // Makes two of a piece, which keeps its number for the lower half.
  bool Split(uint32_t number);
  // Whether a piece that would have this many lines is to be split, and can be.
  bool ShallSplit(const Piece& piece, int64_t lines);

  // Gives `to` its lines, spare ones as many as it takes, and those keys of `from` that are its
  // own. Returns how many, or -1: out of memory, `to` has no lines.
  int64_t Build(const Piece& from, Piece* to);
  int64_t Move(const Piece& from, const Piece& to, uint8_t* filled) const;
  // Gives a piece memory of unspecified content for its lines, and more lines where memory would
  // lie idle behind them. False: there is none.
  bool Acquire(Piece* piece);
  void Release(const Piece& piece);
  Home HomeOf(uint32_t number) const;
  // Enters a piece into the directory.
  void Publish(uint32_t number);

  int shard_;
  int64_t max_lines_;  // of a piece
  RunPool* pool_;
  Directory* directory_;
  std::vector<Piece> pieces_;
  std::vector<int32_t> rooms_;  // how many keys each may still take: what every insert looks at
  int64_t num_lines_ = 0;
  int64_t live_ = 0;
  int64_t moved_ = 0;
  int64_t changes_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_INDEX_FLAT_INDEX_H_
