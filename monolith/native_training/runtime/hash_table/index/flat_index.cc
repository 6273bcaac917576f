#include "monolith/native_training/runtime/hash_table/index/flat_index.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "monolith/native_training/runtime/concurrency/prefetch.h"

namespace monolith {
namespace engine {
namespace {

// Smaller pieces come from malloc.
constexpr int64_t kMinPooledBytes = 4096;
constexpr double kGrowth = 1.33;
// So much more of what it asks for does a piece take where a hole in memory has it.
constexpr int64_t kMoreLinesFraction = 8;
constexpr double kGoldenRatio = 0.6180339887498949;
constexpr int64_t kRebuildAhead = 16;
constexpr int64_t kRebuildLines = 16;
constexpr int64_t kClearLines = 64;
// Enough for 2^32 keys. Only keys that share a hash could need more: their piece grows instead.
constexpr int kMaxDepth = 16;
// Lines of a shard: what 32 bits can count, with room for what holes in memory add. A shard of a
// table of 2^32 keys needs a sixteenth of that.
constexpr int64_t kMaxLines = int64_t{1} << 29;

// Lines behind the last home: an overflow of more happens to one in ten thousand full pieces.
int64_t SpareLines(int64_t lines) { return 2 + std::min<int64_t>(6, lines / 8); }

// Lines that `keys` keys fill at most to 0.825.
int64_t FullLines(int64_t keys) { return (keys * 10 + 32) / 33; }

// The most lines of a shard's pieces: between kMinMaxPieceLines and kMaxPieceLines.
int64_t MaxLines(int shard) {
  double whole;
  const double phase = std::modf(kGoldenRatio * shard, &whole);
  const double range = std::log2(FlatIndex::kMaxPieceLines / FlatIndex::kMinMaxPieceLines);
  return static_cast<int64_t>(FlatIndex::kMaxPieceLines * std::exp2(-range * phase));
}

// Keys that are never looked for in some shards.
struct Fillers {
  int shard_of_zero;
  int64_t other;  // of another shard than 0
  // Serves indexes without lines. Nothing is ever found there, hence nothing written.
  FlatIndex::Line no_keys[2];

  Fillers() : shard_of_zero(ShardOf(HashId(0))), other(1), no_keys{} {
    while (ShardOf(HashId(other)) == shard_of_zero) ++other;
    for (FlatIndex::Slot& slot : no_keys[1].slots) slot.key = other;
  }
};

const Fillers& GetFillers() {
  static const Fillers fillers;
  return fillers;
}

// The key of slots without a row.
int64_t FillerOf(int shard) {
  const Fillers& fillers = GetFillers();
  return shard == fillers.shard_of_zero ? fillers.other : 0;
}

}  // namespace

bool FlatIndex::Directory::Deepen() {
  const size_t entries = size_t{2 * kNumShards} << depth_;
  std::vector<Home> homes;
  try {
    homes.reserve(entries);
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (size_t i = 0; i < entries; ++i) homes.push_back(homes_[i / 2]);
  more_homes_.swap(homes);
  homes_ = more_homes_.data();
  ++depth_;
  wants_depth_.store(false, std::memory_order_relaxed);
  return true;
}

void FlatIndex::Directory::Swap(Directory* other) {
  std::swap(depth_, other->depth_);
  more_homes_.swap(other->more_homes_);
  std::swap_ranges(first_homes_, first_homes_ + kNumShards, other->first_homes_);
  for (Directory* directory : {this, other}) {
    directory->homes_ =
        directory->depth_ == 0 ? directory->first_homes_ : directory->more_homes_.data();
  }
  wants_depth_.store(other->wants_depth_.exchange(wants_depth_.load()));
}

int64_t FlatIndex::Directory::Bytes() const {
  return static_cast<int64_t>(sizeof(*this) + more_homes_.capacity() * sizeof(Home));
}

int FlatIndex::DepthFor(int64_t keys) {
  int depth = 0;
  // With what pieces differ by, and a step of the schedule.
  while (depth < kMaxDepth && FullLines(keys >> depth) * 3 / 2 > kMinMaxPieceLines) ++depth;
  return depth;
}

FlatIndex::FlatIndex(int shard, RunPool* pool, Directory* directory)
    : shard_(shard),
      max_lines_(MaxLines(shard)),
      pool_(pool),
      directory_(directory),
      pieces_(1),
      rooms_(1, 0) {
  Publish(0);
}

FlatIndex::~FlatIndex() {
  for (const Piece& piece : pieces_) Release(piece);
}

int64_t FlatIndex::Bytes() const {
  int64_t lines = 0;
  for (const Piece& piece : pieces_) lines += piece.num_lines + piece.spare_lines;
  return lines * static_cast<int64_t>(sizeof(Line)) +
         static_cast<int64_t>(pieces_.capacity() * (sizeof(Piece) + sizeof(int32_t)));
}

void FlatIndex::Erase(Slot* slot) {
  const uint32_t number = NumberOf(HashId(slot->key));
  // Lines are 64-byte aligned.
  const Line* const line =
      reinterpret_cast<const Line*>(reinterpret_cast<uintptr_t>(slot) & ~uintptr_t{63});
  const bool has_empty = HasEmpty(line);
  slot->key = FillerOf(shard_);
  slot->row = has_empty ? kEmpty : kTombstone;
  if (has_empty) {
    ++rooms_[number];
  } else {
    ++pieces_[number].tombstones;
  }
  --live_;
}

// The smallest number of lines of this piece's schedule that is >= lines.
int64_t FlatIndex::ScheduledLines(const Piece& piece, int64_t lines) const {
  double whole;
  const double phase = std::modf(
      static_cast<double>(shard_) / kNumShards + kGoldenRatio * static_cast<double>(piece.prefix),
      &whole);
  const double k = std::ceil(std::log(static_cast<double>(lines)) / std::log(kGrowth) - phase);
  const double scheduled = std::pow(kGrowth, std::max(k, 0.0) + phase);
  return std::max(lines, static_cast<int64_t>(std::ceil(scheduled)));
}

bool FlatIndex::Grow(uint32_t number) {
  const Piece& piece = pieces_[number];
  const int64_t lines = piece.num_lines;
  // Many tombstones: the same size is enough once they are gone.
  if ((LiveOf(number) + 1) * 3 <= lines * kSlotsPerLine * 2) {
    return Rebuild(number, lines, SpareLines(lines));
  }
  const int64_t target = std::max<int64_t>(lines < 64 ? 2 * lines : lines + lines / 8, 1);
  const int64_t scheduled = ScheduledLines(piece, target);
  if (ShallSplit(piece, scheduled)) return Split(number);
  return Rebuild(number, scheduled, SpareLines(scheduled));
}

bool FlatIndex::ShallSplit(const Piece& piece, int64_t lines) {
  if (lines <= max_lines_ || piece.depth >= kMaxDepth) return false;
  if (piece.depth < directory_->depth_) return true;
  // It grows until the directory is deeper, soon.
  directory_->wants_depth_.store(true, std::memory_order_relaxed);
  return false;
}

FlatIndex::Slot* FlatIndex::FreeAfterGrowth(uint64_t hash, int64_t key, Slot* free) {
  const uint32_t number = NumberOf(hash);
  const Piece piece = pieces_[number];
  if (rooms_[number] > 0) {
    if (!Rebuild(number, piece.num_lines, 2 * piece.spare_lines)) return nullptr;
  } else if (free->row == kTombstone && free < LastLine(piece)->slots) {
    return free;  // which makes the piece no fuller
  } else if (!Grow(number)) {
    return nullptr;
  }
  return FindOrFree(hash, key);
}

bool FlatIndex::Rebuild(uint32_t number, int64_t num_lines, int64_t spare_lines) {
  Piece* const piece = &pieces_[number];
  Piece fresh;
  fresh.prefix = piece->prefix;
  fresh.depth = piece->depth;
  fresh.num_lines = num_lines;
  fresh.spare_lines = spare_lines;
  const int64_t keys = Build(*piece, &fresh);
  if (keys < 0) return false;
  num_lines_ += fresh.num_lines - piece->num_lines;
  moved_ += keys;
  rooms_[number] = static_cast<int32_t>(FullSlots(fresh.num_lines) - keys);
  std::swap(*piece, fresh);
  Publish(number);
  Release(fresh);
  return true;
}

bool FlatIndex::Split(uint32_t number) {
  try {
    if (pieces_.size() == pieces_.capacity()) pieces_.reserve(2 * pieces_.size());
    rooms_.reserve(pieces_.capacity());
  } catch (const std::bad_alloc&) {
    return false;
  }
  const Piece whole = pieces_[number];
  const double mean = static_cast<double>(LiveOf(number)) / 2;
  // Halves differ by chance only: four standard deviations.
  int64_t keys[2] = {static_cast<int64_t>(std::ceil(mean + 2.9 * std::sqrt(mean)))};
  keys[1] = keys[0];
  Piece halves[2];
  for (int side = 0; side < 2; ++side) {
    Piece* const half = &halves[side];
    half->prefix = 2 * whole.prefix + static_cast<uint64_t>(side);
    half->depth = whole.depth + 1;
    for (bool fits = false; !fits;) {
      const int64_t full = FullLines(keys[side]);
      half->num_lines = ScheduledLines(*half, full + full / 8 + 1);
      half->spare_lines = SpareLines(half->num_lines);
      keys[side] = Build(whole, half);
      if (keys[side] < 0) {
        if (side == 1) Release(halves[0]);
        return false;
      }
      fits = keys[side] < FullSlots(half->num_lines);
      if (!fits) Release(*half);
    }
  }
  const uint32_t upper = static_cast<uint32_t>(pieces_.size());
  pieces_[number] = halves[0];
  pieces_.push_back(halves[1]);
  rooms_.push_back(0);
  for (int side = 0; side < 2; ++side) {
    rooms_[side == 0 ? number : upper] =
        static_cast<int32_t>(FullSlots(halves[side].num_lines) - keys[side]);
  }
  num_lines_ += halves[0].num_lines + halves[1].num_lines - whole.num_lines;
  moved_ += keys[0] + keys[1];
  Publish(number);
  Publish(upper);
  Release(whole);
  return true;
}

bool FlatIndex::Reserve(int64_t keys) {
  for (uint32_t number = 0; number < pieces_.size();) {
    const Piece& piece = pieces_[number];
    // Pieces fill unevenly: three standard deviations above the mean.
    const double mean = std::ldexp(static_cast<double>(keys), -piece.depth);
    const double share = piece.depth == 0 ? mean : mean + 3.0 * std::sqrt(mean);
    const int64_t lines = FullLines(static_cast<int64_t>(std::ceil(share)));
    if (lines > piece.num_lines) {
      const int64_t scheduled = ScheduledLines(piece, lines);
      if (ShallSplit(piece, scheduled)) {
        if (!Split(number)) return false;
        continue;  // with its lower half; the upper one comes last
      }
      if (!Rebuild(number, scheduled, SpareLines(scheduled))) return false;
    }
    ++number;
  }
  return true;
}

void FlatIndex::Compact() {
  for (uint32_t number = 0; number < pieces_.size(); ++number) {
    Piece* const piece = &pieces_[number];
    const int64_t live = LiveOf(number);
    if (live == 0) {
      num_lines_ -= piece->num_lines;
      Release(*piece);
      piece->lines = nullptr;
      piece->num_lines = piece->spare_lines = piece->tombstones = 0;
      rooms_[number] = 0;
      Publish(number);
      continue;
    }
    const int64_t full = FullLines(live);
    const int64_t wanted = ScheduledLines(*piece, full + full / 8 + 1);
    // Two steps of the schedule: what comes back soon shall find its place.
    const bool shrink = 3 * wanted < 2 * piece->num_lines;
    if (shrink || piece->tombstones * 8 > piece->num_lines * kSlotsPerLine) {
      const int64_t lines = shrink ? wanted : piece->num_lines;
      Rebuild(number, lines, SpareLines(lines));
    }
  }
}

void FlatIndex::Swap(FlatIndex* other) {
  std::swap(pool_, other->pool_);
  std::swap(pieces_, other->pieces_);
  std::swap(rooms_, other->rooms_);
  std::swap(num_lines_, other->num_lines_);
  std::swap(live_, other->live_);
  std::swap(moved_, other->moved_);
}

int64_t FlatIndex::Build(const Piece& from, Piece* to) {
  if (to->num_lines > kMaxLines >> to->depth) return -1;
  const int64_t bytes = (to->num_lines + to->spare_lines) * static_cast<int64_t>(sizeof(Line));
  if (live_ == 0 && FillerOf(shard_) == 0 && bytes >= kMinPooledBytes) {
    // Only made room for: memory comes as keys do.
    to->lines = reinterpret_cast<Line*>(pool_->AllocateZeros(bytes));
    return to->lines == nullptr ? -1 : 0;
  }
  thread_local std::vector<uint8_t> filled;
  for (;; to->spare_lines *= 2) {
    if (!Acquire(to)) return -1;
    int64_t keys;
    try {
      filled.assign(to->num_lines + to->spare_lines, 0);
      keys = Move(from, *to, filled.data());
    } catch (const std::bad_alloc&) {
      Release(*to);
      return -1;
    }
    if (keys >= 0) return keys;
    Release(*to);
  }
}

// Home lines keep the order of hashes, so both arrays are walked front to back. The new one is
// cleared a page ahead of the keys: it passes through the cache once, and fresh pages are written
// before they are read, which saves a page fault each. `filled` is the number of keys in each of
// its lines, 0 at first: asking the line itself would wait for the last key to arrive there.
// Returns the number of keys, or -1: there are too few spare lines.
int64_t FlatIndex::Move(const Piece& from, const Piece& to, uint8_t* filled) const {
  const IdHash hash_of = TableHash();
  const int64_t filler = FillerOf(shard_);
  Line* const lines = to.lines;
  const uint64_t num_lines = static_cast<uint64_t>(to.num_lines);
  const int64_t last = to.num_lines + to.spare_lines - 1;
  const uint64_t prefix = to.prefix;
  const int depth = to.depth;
  int64_t cleared = 0;
  const auto clear_from = [&](int64_t line) {
    const int64_t end = std::min(last + 1, line + kClearLines);
    std::memset(static_cast<void*>(lines + cleared), 0, (end - cleared) * sizeof(Line));
    for (; filler != 0 && cleared < end; ++cleared) {
      for (Slot& slot : lines[cleared].slots) slot.key = filler;
    }
    cleared = end;
  };
  int64_t keys = 0;
  const bool splits = depth > from.depth;
  // Keys of the upper half are at home behind the middle, others do not overflow beyond the first
  // line there that has an empty slot.
  const int64_t middle = from.num_lines / 2;
  int64_t from_end = from.num_lines + from.spare_lines;
  if (splits && prefix % 2 == 0) {
    for (from_end = middle; from_end < from.num_lines && !HasEmpty(from.lines + from_end);) {
      ++from_end;
    }
    from_end = std::min(from_end + 1, from.num_lines + from.spare_lines);
  }
  // Live slots of some lines, collected without branches: which are live cannot be predicted.
  Slot live[kRebuildLines * kSlotsPerLine];
  for (int64_t i = splits && prefix % 2 == 1 ? middle : 0; i < from_end; i += kRebuildLines) {
    int64_t num_live = 0;
    const Line* const block_end = from.lines + std::min(i + kRebuildLines, from_end);
    for (const Line* line = from.lines + i; line < block_end; ++line) {
      PrefetchForRead(line + kRebuildAhead);
      for (const Slot& slot : line->slots) {
        live[num_live] = slot;
        num_live += slot.live();
      }
    }
    for (const Slot* next = live; next < live + num_live; ++next) {
      const Slot& slot = *next;
      const uint64_t place = PlaceOf(hash_of(slot.key));
      if (place >> (32 - depth) != prefix) continue;
      const uint64_t inside = (place << depth) & 0xffffffffu;
      int64_t line = static_cast<int64_t>((inside * num_lines) >> 32);
      while (filled[line] == kSlotsPerLine) ++line;
      if (line == last) return -1;
      if (line >= cleared) clear_from(line);
      lines[line].slots[filled[line]++] = slot;
      ++keys;
    }
  }
  if (cleared <= last) clear_from(last);
  return keys;
}

bool FlatIndex::Acquire(Piece* piece) {
  const int64_t lines = piece->num_lines + piece->spare_lines;
  int64_t bytes = lines * static_cast<int64_t>(sizeof(Line));
  if (bytes < kMinPooledBytes) {
    piece->lines = static_cast<Line*>(std::aligned_alloc(sizeof(Line), bytes));
  } else {
    piece->lines = reinterpret_cast<Line*>(
        pool_->AllocateWithin(bytes, bytes + bytes / kMoreLinesFraction, &bytes));
    piece->num_lines = bytes / static_cast<int64_t>(sizeof(Line)) - piece->spare_lines;
  }
  return piece->lines != nullptr;
}

void FlatIndex::Release(const Piece& piece) {
  const int64_t bytes = (piece.num_lines + piece.spare_lines) * static_cast<int64_t>(sizeof(Line));
  if (bytes >= kMinPooledBytes) {
    pool_->Free(reinterpret_cast<char*>(piece.lines), bytes);
  } else {
    std::free(piece.lines);
  }
}

FlatIndex::Home FlatIndex::HomeOf(uint32_t number) const {
  const Piece& piece = pieces_[number];
  if (piece.num_lines == 0) {
    const int filler = FillerOf(shard_) == 0 ? 0 : 1;
    return {reinterpret_cast<uintptr_t>(&GetFillers().no_keys[filler]), 0, number};
  }
  const uint64_t lines = static_cast<uint64_t>(piece.num_lines);
  return {reinterpret_cast<uintptr_t>(piece.lines) - piece.prefix * lines * sizeof(Line),
          static_cast<uint32_t>(lines << piece.depth), number};
}

void FlatIndex::Publish(uint32_t number) {
  ++changes_;
  const Piece& piece = pieces_[number];
  const int behind = directory_->depth_ - piece.depth;  // bits that it does not care for
  const uint64_t first = ((static_cast<uint64_t>(shard_) << piece.depth) + piece.prefix) << behind;
  const int64_t entries = int64_t{1} << behind;
  std::fill_n(directory_->homes_ + first, entries, HomeOf(number));
}

}  // namespace engine
}  // namespace monolith
