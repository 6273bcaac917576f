// The index of one shard: id -> row number and time of the last write.
//
//   directory, by the top bits of the low half of the hash
//   +------+------+------+------+
//   | home | home | home | home |       2^depth entries; a piece has one, or 2^k neighbours
//   +--+---+--+---+--+---+--+---+
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
// Home line in a shard = (low 32 hash bits * number of lines) >> 32, where a piece that has 1/2^k
// of the hashes and n lines counts as part of n * 2^k lines: any number of lines works, and the map
// keeps the order of hashes, so rebuilding for growth walks both arrays front to back.
//
// Invariants
//   - Probing goes line by line from the home line and stops at a line with an empty slot: a key is
//     never behind such a line. Erasing leaves a tombstone unless its line has an empty slot
//     already. The last line of a piece is always empty, so nothing wraps.
//   - live + tombstones <= 0.82 * slots of a piece after every insert. (At 0.9 a sixth of the keys
//     overflow their line, with runs of many lines, and that cost a third of the lookup; here it is
//     an eighth, mostly one line away.)
//   - The number of lines of a piece follows 1.25^(k + phase): small steps keep the average load at
//     0.73, 21.9 bytes per key, and a key is moved four times while the table grows. A piece that
//     would become too large is split in two, so a rebuild takes the same fraction of a millisecond
//     in a table of any size. Pieces fill alike; phases are spread evenly over those of all shards,
//     and with them rebuilds and splits over time, so no batch pays for more than a few.
//
// Not thread-safe: the shard's lock guards it. Find and insert: one cache miss plus 0.1 (overflowed
// lines).
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/allocator/run_pool.h"
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
  static constexpr int64_t kMaxPieceLines = 4096;
  // The end of the range of hashes inside a shard.
  static constexpr uint64_t kHashEnd = uint64_t{1} << 32;

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
    uintptr_t base;  // of the piece, less the lines that the shard would have before it
    uint64_t lines;  // that the shard would have if all its pieces were as large
  };

  // Where the lines of a shard are, for batches that touch many shards. It always has a line to
  // look at, which has no key of the shard where the index is empty.
  struct alignas(32) View {
    const Home* homes;
    uint64_t shift;  // of the low half of the hash
    Home only;       // `homes` of an index of one piece: on the same cache line

    Line* HomeLine(uint64_t hash) const {
      const uint64_t low = hash & 0xffffffffu;
      const Home& home = homes[low >> shift];
      return reinterpret_cast<Line*>(home.base + ((low * home.lines) >> 32) * sizeof(Line));
    }
    // The slot of `key`, or null.
    Slot* Find(uint64_t hash, int64_t key) const {
      for (Line* line = HomeLine(hash);; ++line) {
        Slot* const slot = SlotInLine(line, key);
        if (slot != nullptr || HasEmpty(line)) return slot;
      }
    }
  };

  // `view` is kept up to date; it outlives the index.
  FlatIndex(int shard, RunPool* pool, View* view);
  ~FlatIndex();
  FlatIndex(const FlatIndex&) = delete;
  FlatIndex& operator=(const FlatIndex&) = delete;

  int64_t live() const { return live_; }
  int64_t num_slots() const { return num_lines_ * kSlotsPerLine; }
  int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }
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

  Slot* Find(uint64_t hash, int64_t key) const { return view_->Find(hash, key); }

  // Makes room for one more key with this hash, growing if needed. False: out of memory, nothing
  // changed.
  bool MakeRoom(uint64_t hash) {
    const Piece& piece = PieceOf(hash);
    return HasRoom(piece) || Grow(hash);
  }

  // The slot of `key`, or, not live, the one for Fill() to put it in: one probe answers both. After
  // MakeRoom(). Null: out of memory.
  Slot* FindOrFree(uint64_t hash, int64_t key) {
    Slot* free = nullptr;
    for (Line* line = view_->HomeLine(hash);; ++line) {
      Slot* const slot = SlotInLine(line, key);
      if (slot != nullptr) return slot;
      if (free == nullptr) free = FreeInLine(line);
      if (!HasEmpty(line)) continue;
      if (free < LastLine(PieceOf(hash))->slots) return free;
      return AddSpareLines(hash) ? FindOrFree(hash, key) : nullptr;
    }
  }
  void Fill(uint64_t hash, Slot* slot, int64_t key, uint32_t row, uint32_t ts) {
    Piece* const piece = &PieceOf(hash);
    if (slot->row == kTombstone) --piece->tombstones;
    *slot = {key, row, ts};
    ++piece->live;
    ++live_;
  }

  // `slot` is live.
  void Erase(Slot* slot);

  // Room for `keys` keys without further growth. False: out of memory, no key is lost.
  bool Reserve(int64_t keys);

  // Gives tombstones, and lines that are not needed any more, back after many erasures. Where there
  // is no memory for that, things stay as they are.
  void Compact();

  void Swap(FlatIndex* other);

  // Calls visit(line) for every line.
  template <typename Visitor>
  void ForEachLine(Visitor visit) {
    for (const Piece& piece : pieces_) {
      for (int64_t i = 0; i < piece.num_lines + piece.spare_lines; ++i) visit(piece.lines + i);
    }
  }

  // Calls visit(slot, hash) once for every key whose 32-bit hash is in [begin, end). Keys lie at or
  // behind their home line, in the same run of full lines; home lines ascend with the hash. So the
  // walk starts at the home of `begin` and ends at the first line with an empty slot at or behind
  // the home of `end` - 1, in each piece.
  template <typename Visitor>
  void VisitHashRange(uint64_t begin, uint64_t end, Visitor visit) const {
    const IdHash hash_of = TableHash();
    while (begin < end) {
      const Piece& piece = PieceOf(begin);
      const uint64_t piece_end = uint64_t{piece.prefix + 1} << (32 - piece.depth);
      const uint64_t stop = piece_end < end ? piece_end : end;
      const Line* const last_home = view_->HomeLine(stop - 1);
      for (const Line* line = view_->HomeLine(begin);; ++line) {
        for (const Slot& slot : line->slots) {
          if (!slot.live()) continue;
          const uint64_t hash = hash_of(slot.key) & 0xffffffffu;
          if (hash >= begin && hash < stop) visit(slot, static_cast<uint32_t>(hash));
        }
        if (line >= last_home && HasEmpty(line)) break;
      }
      begin = stop;
    }
  }

 private:
  // The keys whose hashes, in their low half, begin with the `depth` bits of `prefix`.
  struct Piece {
    Line* lines = nullptr;
    int64_t num_lines = 0;    // 0: none, spare ones neither
    int64_t spare_lines = 0;  // behind them; the last one stays empty
    int64_t live = 0;
    int64_t tombstones = 0;
    uint64_t prefix = 0;
    int depth = 0;
  };

  static bool HasRoom(const Piece& piece) {
    return (piece.live + piece.tombstones + 1) * 50 <= piece.num_lines * kSlotsPerLine * 41;
  }
  static Line* LastLine(const Piece& piece) {
    return piece.lines + piece.num_lines + piece.spare_lines - 1;
  }
  const Piece& PieceOf(uint64_t hash) const {
    return pieces_[piece_of_[(hash & 0xffffffffu) >> (32 - depth_)]];
  }
  Piece& PieceOf(uint64_t hash) {
    return pieces_[piece_of_[(hash & 0xffffffffu) >> (32 - depth_)]];
  }

  bool Grow(uint64_t hash);
  bool AddSpareLines(uint64_t hash);
  int64_t ScheduledLines(const Piece& piece, int64_t lines) const;
  // Replaces the lines of a piece. False: out of memory, nothing changed.
  bool Rebuild(Piece* piece, int64_t num_lines, int64_t spare_lines);
  // Makes two of a piece, which keeps its number for the lower half.
  bool Split(uint32_t number);
  void DoubleDirectory();

  // Gives `to` its lines, spare ones as many as it takes, and those keys of `from` that are its
  // own. False: out of memory, `to` has no lines.
  bool Build(const Piece& from, Piece* to);
  bool Move(const Piece& from, Piece* to) const;
  Line* Acquire(int64_t lines);
  void Release(const Piece& piece);
  Home HomeOf(const Piece& piece) const;
  // Tells readers where the lines of a piece are, or those of all.
  void Publish(const Piece& piece);
  void PublishAll();

  int shard_;
  RunPool* pool_;
  View* view_;
  int depth_ = 0;
  std::vector<Piece> pieces_;
  std::vector<uint32_t> piece_of_;  // 2^depth numbers of pieces
  std::vector<Home> homes_;         // 2^depth, none for depth 0
  int64_t num_lines_ = 0;
  int64_t live_ = 0;
  int64_t moved_ = 0;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_FLAT_INDEX_H_
