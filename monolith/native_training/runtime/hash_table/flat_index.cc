#include "monolith/native_training/runtime/hash_table/flat_index.h"

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
constexpr double kGrowth = 1.25;
constexpr double kGoldenRatio = 0.6180339887498949;
constexpr int64_t kRebuildAhead = 16;
constexpr int64_t kClearLines = 64;
// Enough for 2^32 keys. Only keys that share a hash could need more: their piece grows instead.
constexpr int kMaxDepth = 16;

// Lines behind the last home: an overflow of more happens to one in ten thousand full pieces.
int64_t SpareLines(int64_t lines) { return 2 + std::min<int64_t>(6, lines / 8); }

// Lines that `keys` keys fill at most to 0.82.
int64_t FullLines(int64_t keys) { return (keys * 25 + 81) / 82; }

// Keys that nobody looks for in some shards.
struct Fillers {
  int shard_of_zero;
  int64_t other;  // of another shard than 0
  // Of indexes without lines. Nothing is ever found there, hence nothing written.
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

FlatIndex::FlatIndex(int shard, RunPool* pool, View* view)
    : shard_(shard), pool_(pool), view_(view), pieces_(1), piece_of_(1, 0) {
  PublishAll();
}

FlatIndex::~FlatIndex() {
  for (const Piece& piece : pieces_) Release(piece);
}

int64_t FlatIndex::Bytes() const {
  int64_t lines = 0;
  for (const Piece& piece : pieces_) lines += piece.num_lines + piece.spare_lines;
  return lines * static_cast<int64_t>(sizeof(Line)) +
         static_cast<int64_t>(pieces_.capacity() * sizeof(Piece) +
                              piece_of_.capacity() * sizeof(uint32_t) +
                              homes_.capacity() * sizeof(Home));
}

void FlatIndex::Erase(Slot* slot) {
  Piece* const piece = &PieceOf(HashId(slot->key));
  // Lines are 64-byte aligned.
  const Line* const line =
      reinterpret_cast<const Line*>(reinterpret_cast<uintptr_t>(slot) & ~uintptr_t{63});
  const bool has_empty = HasEmpty(line);
  slot->key = FillerOf(shard_);
  slot->row = has_empty ? kEmpty : kTombstone;
  if (!has_empty) ++piece->tombstones;
  --piece->live;
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

bool FlatIndex::Grow(uint64_t hash) {
  Piece* const piece = &PieceOf(hash);
  const int64_t lines = piece->num_lines;
  // Many tombstones: the same size is enough once they are gone.
  if ((piece->live + 1) * 3 <= lines * kSlotsPerLine * 2) {
    return Rebuild(piece, lines, SpareLines(lines));
  }
  const int64_t target = std::max<int64_t>(lines < 64 ? 2 * lines : lines + lines / 8, 1);
  const int64_t scheduled = ScheduledLines(*piece, target);
  if (scheduled > kMaxPieceLines && piece->depth < kMaxDepth) {
    return Split(static_cast<uint32_t>(piece - pieces_.data()));
  }
  return Rebuild(piece, scheduled, SpareLines(scheduled));
}

bool FlatIndex::AddSpareLines(uint64_t hash) {
  Piece* const piece = &PieceOf(hash);
  return Rebuild(piece, piece->num_lines, 2 * piece->spare_lines);
}

bool FlatIndex::Rebuild(Piece* piece, int64_t num_lines, int64_t spare_lines) {
  Piece fresh;
  fresh.prefix = piece->prefix;
  fresh.depth = piece->depth;
  fresh.num_lines = num_lines;
  fresh.spare_lines = spare_lines;
  if (!Build(*piece, &fresh)) return false;
  num_lines_ += fresh.num_lines - piece->num_lines;
  moved_ += fresh.live;
  std::swap(*piece, fresh);
  Publish(*piece);
  Release(fresh);
  return true;
}

bool FlatIndex::Split(uint32_t number) {
  try {
    if (pieces_[number].depth == depth_) DoubleDirectory();
    if (pieces_.size() == pieces_.capacity()) pieces_.reserve(2 * pieces_.size());
  } catch (const std::bad_alloc&) {
    return false;
  }
  const Piece whole = pieces_[number];
  Piece halves[2];
  const IdHash hash_of = TableHash();
  for (int64_t i = 0; i < whole.num_lines + whole.spare_lines; ++i) {
    for (const Slot& slot : whole.lines[i].slots) {
      if (slot.live()) ++halves[(hash_of(slot.key) >> (31 - whole.depth)) & 1].live;
    }
  }
  for (int side = 0; side < 2; ++side) {
    Piece* const half = &halves[side];
    half->prefix = 2 * whole.prefix + static_cast<uint64_t>(side);
    half->depth = whole.depth + 1;
    const int64_t full = FullLines(half->live);
    half->num_lines = half->live == 0 ? 0 : ScheduledLines(*half, full + full / 8 + 1);
    half->spare_lines = half->live == 0 ? 0 : SpareLines(half->num_lines);
    half->live = 0;
    if (Build(whole, half)) continue;
    for (int built = 0; built < side; ++built) Release(halves[built]);
    return false;
  }
  const uint32_t upper = static_cast<uint32_t>(pieces_.size());
  pieces_[number] = halves[0];
  pieces_.push_back(halves[1]);
  const int behind = depth_ - halves[1].depth;  // bits of the directory that it does not care for
  std::fill_n(piece_of_.begin() + static_cast<int64_t>(halves[1].prefix << behind),
              int64_t{1} << behind, upper);
  num_lines_ += halves[0].num_lines + halves[1].num_lines - whole.num_lines;
  moved_ += whole.live;
  for (const Piece& half : halves) Publish(half);
  Release(whole);
  return true;
}

void FlatIndex::DoubleDirectory() {
  const size_t entries = 2 * piece_of_.size();
  std::vector<uint32_t> piece_of(entries);
  std::vector<Home> homes(entries);
  for (size_t i = 0; i < entries; ++i) piece_of[i] = piece_of_[i / 2];
  piece_of_.swap(piece_of);
  homes_.swap(homes);
  ++depth_;
  PublishAll();
}

bool FlatIndex::Reserve(int64_t keys) {
  for (uint32_t number = 0; number < pieces_.size();) {
    Piece* const piece = &pieces_[number];
    // Pieces fill unevenly: three standard deviations above the mean.
    const double mean = std::ldexp(static_cast<double>(keys), -piece->depth);
    const double share = piece->depth == 0 ? mean : mean + 3.0 * std::sqrt(mean);
    const int64_t lines = FullLines(static_cast<int64_t>(std::ceil(share)));
    if (lines > piece->num_lines) {
      const int64_t scheduled = ScheduledLines(*piece, lines);
      if (scheduled > kMaxPieceLines && piece->depth < kMaxDepth) {
        if (!Split(number)) return false;
        continue;  // with its lower half; the upper one comes last
      }
      if (!Rebuild(piece, scheduled, SpareLines(scheduled))) return false;
    }
    ++number;
  }
  return true;
}

void FlatIndex::Compact() {
  for (Piece& piece : pieces_) {
    if (piece.live == 0) {
      num_lines_ -= piece.num_lines;
      Release(piece);
      piece.lines = nullptr;
      piece.num_lines = piece.spare_lines = piece.tombstones = 0;
      Publish(piece);
      continue;
    }
    const int64_t full = FullLines(piece.live);
    const int64_t wanted = ScheduledLines(piece, full + full / 8 + 1);
    // Two steps of the schedule: what comes back soon shall find its place.
    const bool shrink = 3 * wanted < 2 * piece.num_lines;
    if (shrink || piece.tombstones * 8 > piece.num_lines * kSlotsPerLine) {
      const int64_t lines = shrink ? wanted : piece.num_lines;
      Rebuild(&piece, lines, SpareLines(lines));
    }
  }
}

void FlatIndex::Swap(FlatIndex* other) {
  std::swap(pool_, other->pool_);
  std::swap(depth_, other->depth_);
  std::swap(pieces_, other->pieces_);
  std::swap(piece_of_, other->piece_of_);
  std::swap(homes_, other->homes_);
  std::swap(num_lines_, other->num_lines_);
  std::swap(live_, other->live_);
  std::swap(moved_, other->moved_);
  PublishAll();
  other->PublishAll();
}

bool FlatIndex::Build(const Piece& from, Piece* to) {
  if (to->num_lines == 0) return true;
  const int64_t bytes = (to->num_lines + to->spare_lines) * static_cast<int64_t>(sizeof(Line));
  if (from.live == 0 && FillerOf(shard_) == 0 && bytes >= kMinPooledBytes) {
    // Only made room for: memory comes as keys do.
    to->lines = reinterpret_cast<Line*>(pool_->AllocateZeros(bytes));
    to->live = 0;
    return to->lines != nullptr;
  }
  for (;; to->spare_lines *= 2) {
    to->lines = Acquire(to->num_lines + to->spare_lines);
    if (to->lines == nullptr) return false;
    if (Move(from, to)) return true;
    Release(*to);
  }
}

// Home lines keep the order of hashes, so both arrays are walked front to back. The new one is
// cleared a page ahead of the keys: it passes through the cache once, and fresh pages are written
// before they are read, which saves a page fault each. False: there are too few spare lines.
bool FlatIndex::Move(const Piece& from, Piece* to) const {
  const IdHash hash_of = TableHash();
  const int64_t filler = FillerOf(shard_);
  const int64_t last = to->num_lines + to->spare_lines - 1;
  int64_t cleared = 0;
  const auto clear_from = [&](int64_t line) {
    const int64_t end = std::min(last + 1, line + kClearLines);
    std::memset(static_cast<void*>(to->lines + cleared), 0, (end - cleared) * sizeof(Line));
    for (; filler != 0 && cleared < end; ++cleared) {
      for (Slot& slot : to->lines[cleared].slots) slot.key = filler;
    }
    cleared = end;
  };
  to->live = 0;
  for (int64_t i = 0; i < from.num_lines + from.spare_lines; ++i) {
    concurrency::PrefetchForRead(from.lines + i + kRebuildAhead);
    for (const Slot& slot : from.lines[i].slots) {
      if (!slot.live()) continue;
      const uint64_t low = hash_of(slot.key) & 0xffffffffu;
      if (low >> (32 - to->depth) != to->prefix) continue;
      const uint64_t inside = (low << to->depth) & 0xffffffffu;
      int64_t line = static_cast<int64_t>((inside * static_cast<uint64_t>(to->num_lines)) >> 32);
      Slot* free;
      for (;; ++line) {
        if (line >= cleared) clear_from(line);
        free = FreeInLine(to->lines + line);
        if (free != nullptr) break;
      }
      if (line == last) return false;
      *free = slot;
      ++to->live;
    }
  }
  if (cleared <= last) clear_from(last);
  return true;
}

// Memory of unspecified content, or null.
FlatIndex::Line* FlatIndex::Acquire(int64_t lines) {
  const int64_t bytes = lines * static_cast<int64_t>(sizeof(Line));
  return reinterpret_cast<Line*>(bytes >= kMinPooledBytes
                                     ? pool_->Allocate(bytes)
                                     : static_cast<char*>(std::aligned_alloc(64, bytes)));
}

void FlatIndex::Release(const Piece& piece) {
  const int64_t bytes = (piece.num_lines + piece.spare_lines) * static_cast<int64_t>(sizeof(Line));
  if (bytes >= kMinPooledBytes) {
    pool_->Free(reinterpret_cast<char*>(piece.lines), bytes);
  } else {
    std::free(piece.lines);
  }
}

FlatIndex::Home FlatIndex::HomeOf(const Piece& piece) const {
  if (piece.num_lines == 0) {
    return {reinterpret_cast<uintptr_t>(&GetFillers().no_keys[FillerOf(shard_) == 0 ? 0 : 1]), 0};
  }
  const uint64_t lines = static_cast<uint64_t>(piece.num_lines);
  return {reinterpret_cast<uintptr_t>(piece.lines) - piece.prefix * lines * sizeof(Line),
          lines << piece.depth};
}

void FlatIndex::Publish(const Piece& piece) {
  const int behind = depth_ - piece.depth;
  Home* const homes = depth_ == 0 ? &view_->only : homes_.data();
  std::fill_n(homes + (piece.prefix << behind), int64_t{1} << behind, HomeOf(piece));
}

void FlatIndex::PublishAll() {
  view_->homes = depth_ == 0 ? &view_->only : homes_.data();
  view_->shift = static_cast<uint64_t>(32 - depth_);
  for (const Piece& piece : pieces_) Publish(piece);
}

}  // namespace engine
}  // namespace monolith
