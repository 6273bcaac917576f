// Reading ids in batch order. The caller is in the read rooms of their tables, or holds the locks
// of their shards.
//
//   ids of one table after another   . . . . . . . . . . . . . . . . . . . . .
//                                        ^           ^           ^
//                                      Finish      Probe       Fetch      12 ids apart
//
//   Fetch    prefetch the home line of the index
//   Probe    look into it, prefetch the row; an id that is not there goes into the queue
//   Finish   copy the row
//   Round    every 128 ids: looks into one more line for each id of the queue
//
// The three advance together, one id at a time: as long as few prefetches are under way none of
// them blocks, so all other work is done while memory is busy. They do not stop between tables,
// where start and end, a cache miss for each stage, would cost a table with a hundred ids a tenth
// of its time.
//
// An id that is not in its home line is first read as absent, by copying row 0. A round that finds
// it copies its row again. So no branch depends on data, and no id waits for memory: an eighth of
// the ids overflow their line, a third of these by more than one, and both to mispredict that and
// to wait for the lines behind took a third of a lookup.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_READ_PIPELINE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_READ_PIPELINE_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "monolith/native_training/runtime/base/feature_id.h"
#include "monolith/native_training/runtime/concurrency/prefetch.h"
#include "monolith/native_training/runtime/hash_table/index/flat_index.h"
#include "monolith/native_training/runtime/hash_table/rows/row_slab.h"

namespace monolith {
namespace engine {

// `Stages` prefetches in PrefetchRow(row) what it will need, and writes the result of an id in
// FinishRow(position, row), or in FinishAbsent(position) unless kCopiesRowZero: then FinishRow of
// row 0, which is all zeros, is the same.
template <typename Stages>
class ReadPipeline {
 public:
  // The ids of one table, 1 to 2^32 of them. The arena has a row 0.
  struct Tile {
    FlatIndex::View index;
    RowArena::View rows;
    const int64_t* ids;
    int64_t n;
    Stages stages;
  };

  static void Run(const std::vector<Tile>& tiles) {
    if (tiles.empty()) return;
    ReadPipeline(tiles).RunStages();
  }

 private:
  static constexpr int64_t kProbeLag = 12;
  static constexpr int64_t kFinishLag = 24;
  static constexpr int64_t kRing = 32;
  // The next round copies the rows that this one finds, when Finish is long past it.
  static constexpr int64_t kRoundIds = 128;

  // Where a stage is: at ids [position, n) of a tile.
  struct Cursor {
    const Tile* tile;
    int64_t position = 0;

    int64_t left() const { return tile->n - position; }
    void Advance(int64_t steps) {
      position += steps;
      if (position < tile->n) return;
      ++tile;
      position = 0;
    }
  };

  // Number of the tile in the upper half, position in the lower.
  using Place = uint64_t;
  // To look for in `line`.
  struct Waiting {
    const FlatIndex::Line* line;
    Place place;
  };
  struct Found {
    const char* row;
    Place place;
  };
  // Memory that is reused from call to call.
  struct Queue {
    std::vector<Waiting> waiting;
    std::vector<Found> found;
  };

  // Loops copy what they can into registers: their stores might change the tile, for all the
  // compiler knows.
  using LocalStages =
      std::conditional_t<std::is_trivially_copyable_v<Stages>, const Stages, const Stages&>;

  explicit ReadPipeline(const std::vector<Tile>& tiles)
      : tiles_(tiles.data()), fetch_{tiles_}, probe_{tiles_}, finish_{tiles_} {
    for (const Tile& tile : tiles) ids_ += tile.n;
    thread_local Queue thread_queue;
    queue_ = &thread_queue;
    // One more: entries are written before it is known whether they count. `found` grows last, so
    // its size says that both have.
    if (static_cast<int64_t>(queue_->found.size()) <= ids_) {
      queue_->waiting.resize(ids_ + 1);
      queue_->found.resize(ids_ + 1);
    }
  }

  __attribute__((noinline)) void RunStages() {
    int64_t round = kRoundIds;
    for (int64_t step = 0; step < ids_ + kFinishLag;) {
      // Up to the end of a tile, the next round, or a step where a stage begins or ends.
      int64_t steps = round - step;
      const auto runs = [&](int64_t lag, const Cursor& cursor) {
        if (step < lag) {
          steps = std::min(steps, lag - step);
          return false;
        }
        if (step - lag >= ids_) return false;
        steps = std::min(steps, cursor.left());
        return true;
      };
      const bool fetch = runs(0, fetch_);
      const bool probe = runs(kProbeLag, probe_);
      const bool finish = runs(kFinishLag, finish_);
      if (fetch && probe && finish) {
        Advance<true, true, true>(step, steps);
      } else {
        if (fetch) Advance<true, false, false>(step, steps);
        if (probe) Advance<false, true, false>(step, steps);
        if (finish) Advance<false, false, true>(step, steps);
      }
      step += steps;
      if (step == round) {
        Round();
        round += kRoundIds;
      }
    }
    while (num_waiting_ > 0 || num_found_ > 0) Round();
  }

  // Takes the given stages `steps` ids further, all of which lie in the tiles they are at.
  template <bool kFetch, bool kProbe, bool kFinish>
  void Advance(int64_t step, int64_t steps) {
    // A stage that does not run may be past the last tile.
    const Cursor fetch = kFetch ? fetch_ : Cursor{tiles_};
    const Cursor probe = kProbe ? probe_ : Cursor{tiles_};
    const Cursor finish = kFinish ? finish_ : Cursor{tiles_};

    const IdHash hash_of = TableHash();
    const FlatIndex::View index = fetch.tile->index;
    const int64_t* const fetch_ids = fetch.tile->ids + fetch.position;

    const RowArena::View rows = probe.tile->rows;
    LocalStages probe_stages = probe.tile->stages;
    const int64_t* const probe_ids = probe.tile->ids + probe.position;
    const Place place = static_cast<Place>(probe.tile - tiles_) << 32 | probe.position;
    Waiting* __restrict waiting = queue_->waiting.data() + num_waiting_;

    const char* const row_zero = finish.tile->rows.Address(0);
    LocalStages finish_stages = finish.tile->stages;
    const int64_t finish_position = finish.position;

    for (int64_t i = 0; i < steps; ++i) {
      if (kFetch) {
        const uint64_t hash = hash_of(fetch_ids[i]);
        const FlatIndex::Line* const line = index.HomeLine(hash);
        lines_[(step + i) % kRing] = line;
        PrefetchForRead(line);
      }
      if (kProbe) {
        const int64_t slot = (step + i - kProbeLag) % kRing;
        const FlatIndex::Line* const line = lines_[slot];
        const uint32_t row = FlatIndex::RowInLine(line, probe_ids[i]);
        const char* const address = rows.Address(row);
        rows_[slot] = address;
        probe_stages.PrefetchRow(address);
        *waiting = {line, place + i};
        waiting += row == 0;
      }
      if (kFinish) {
        const char* const row = rows_[(step + i - kFinishLag) % kRing];
        if (!Stages::kCopiesRowZero && row == row_zero) {
          finish_stages.FinishAbsent(finish_position + i);
        } else {
          finish_stages.FinishRow(finish_position + i, row);
        }
      }
    }
    num_waiting_ = waiting - queue_->waiting.data();
    if (kFetch) fetch_.Advance(steps);
    if (kProbe) probe_.Advance(steps);
    if (kFinish) finish_.Advance(steps);
  }

  // An id whose line has an empty slot is absent, and has been read as such.
  __attribute__((noinline)) void Round() {
    for (int64_t k = 0; k < num_found_; ++k) {
      const Found& found = queue_->found[k];
      TileOf(found.place).stages.FinishRow(PositionOf(found.place), found.row);
    }
    const Waiting* const end = queue_->waiting.data() + num_waiting_;
    Waiting* again = queue_->waiting.data();
    Found* found = queue_->found.data();
    for (const Waiting* at = again; at < end; ++at) {
      const Waiting waiting = *at;
      const Tile& tile = TileOf(waiting.place);
      const int64_t id = tile.ids[PositionOf(waiting.place)];
      const uint32_t row = FlatIndex::RowInLine(waiting.line, id);
      const char* const address = tile.rows.Address(row);
      tile.stages.PrefetchRow(address);
      *found = {address, waiting.place};
      found += row != 0;
      const bool goes_on = (row == 0) & !FlatIndex::HasEmpty(waiting.line);
      const FlatIndex::Line* const next = waiting.line + 1;
      PrefetchForRead(goes_on ? next : waiting.line);
      *again = {next, waiting.place};
      again += goes_on;
    }
    num_found_ = found - queue_->found.data();
    num_waiting_ = again - queue_->waiting.data();
  }

  const Tile& TileOf(Place place) const { return tiles_[place >> 32]; }
  static int64_t PositionOf(Place place) { return static_cast<int64_t>(place & 0xffffffffu); }

  const Tile* const tiles_;
  int64_t ids_ = 0;
  Cursor fetch_, probe_, finish_;
  Queue* queue_;
  int64_t num_waiting_ = 0;
  int64_t num_found_ = 0;
  const FlatIndex::Line* lines_[kRing];
  const char* rows_[kRing];
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_READ_PIPELINE_H_
