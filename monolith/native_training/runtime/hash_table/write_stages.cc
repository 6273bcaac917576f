#include "monolith/native_training/runtime/hash_table/write_stages.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "monolith/native_training/runtime/hash_table/compressors.h"
#include "monolith/native_training/runtime/hash_table/initializers.h"
#include "monolith/native_training/runtime/hash_table/optimizers.h"
#include "monolith/native_training/runtime/hash_table/retrievers.h"

namespace monolith {
namespace engine {
namespace {

// Reused by all writes of a thread.
std::vector<int64_t>* ThreadTouchedIds() {
  thread_local std::vector<int64_t> ids;
  return &ids;
}

std::vector<float>* ThreadVector(int64_t dim) {
  thread_local std::vector<float> vector;
  if (static_cast<int64_t>(vector.size()) < dim) vector.resize(dim);
  return &vector;
}

}  // namespace

bool IsZeroVector(const float* values, int64_t dim) {
  float sum = 0.0f;
  for (int64_t i = 0; i < dim; ++i) sum += values[i] * values[i];
  return sum < std::numeric_limits<float>::min();
}

WriteStages::WriteStages(WriteJob* job, const WriteTile& tile)
    : job_(job),
      tile_(tile),
      layout_(job->table->layout()),
      shards_(TableInternals::Shards(*job->table)),
      value_bytes_(job->mode == WriteMode::kReinitialize ? 0
                   : job->mode == WriteMode::kLoad       ? job->table->layout().stride
                                                         : 4 * job->table->dim()),
      values_begin_(job->mode == WriteMode::kLoad ? tile.load_rows
                                                  : reinterpret_cast<const char*>(tile.values)),
      skip_zero_(job->mode == WriteMode::kAssign && job->table->config().skip_zero_embedding),
      report_touched_(
          TableInternals::Touched(*job->table) != nullptr &&
          (job->mode == WriteMode::kOptimize || job->mode == WriteMode::kReinitialize)) {}

WriteStages::~WriteStages() {
  TableInternals::Counters* counters = TableInternals::CountersOf(job_->table);
  if (filtered_ > 0) counters->filtered.fetch_add(filtered_, std::memory_order_relaxed);
  if (nonfinite_ > 0) counters->nonfinite.fetch_add(nonfinite_, std::memory_order_relaxed);
  if (!report_touched_) return;
  std::vector<int64_t>* touched = ThreadTouchedIds();
  if (!touched->empty()) {
    TableInternals::Touched (*job_->table)(touched->data(), static_cast<int64_t>(touched->size()));
  }
  touched->clear();
}

void WriteStages::Fetch(Window* window) {
  Shard& shard = *shards_[window->shard];
  if (window->first) shard.mutex.lock();
  if (shard.index.num_lines() == 0) return;
  for (int j = 0; j < window->count; ++j) {
    concurrency::PrefetchForRead(
        shard.index.LineAt(shard.index.HomeLine(window->entries[j].hash)));
  }
}

// With skip_zero_embedding every id waits for Resolve: there an earlier id of the batch may erase
// its row.
void WriteStages::Probe(Window* window) {
  const Shard& shard = *shards_[window->shard];
  const FlatIndex& index = shard.index;
  const RowArena::View rows = shard.rows.view();
  const bool skip = skip_zero_ || index.num_lines() == 0;
  int num_pending = 0;
  for (int j = 0; j < window->count; ++j) {
    const BatchEntry& entry = window->entries[j];
    window->rows[j] = nullptr;
    window->fresh[j] = 0;
    if (value_bytes_ > 0) PrefetchBytes<0>(ValueBytes(entry), value_bytes_);
    FlatIndex::Line* line = skip ? nullptr : index.LineAt(index.HomeLine(entry.hash));
    FlatIndex::Slot* slot = skip ? nullptr : FlatIndex::SlotInLine(line, entry.key);
    if (slot != nullptr) {
      SetRow(rows, slot, window, j);
      continue;
    }
    window->pending[num_pending++] = j;
    if (!skip && !FlatIndex::HasEmpty(line)) PrefetchOverflow<4>(line);
  }
  window->num_pending = num_pending;
}

void WriteStages::Resolve(Window* window) {
  Shard* shard = shards_[window->shard].get();
  int absent[kWindow];
  int num_absent = 0;
  for (int k = 0; k < window->num_pending; ++k) {
    const int j = window->pending[k];
    const BatchEntry& entry = window->entries[j];
    if (skip_zero_ && EraseIfZero(shard, entry)) continue;
    if (job_->filter == nullptr) {
      FindOrInsert(shard, window, j);
      continue;
    }
    FlatIndex::Slot* slot = shard->index.Find(entry.hash, entry.key);
    if (slot != nullptr) {
      SetRow(shard->rows.view(), slot, window, j);
    } else if (skip_zero_) {
      InsertFiltered(shard, window, &j, 1);  // at once: the next id may erase it
    } else {
      absent[num_absent++] = j;
    }
  }
  if (num_absent > 0) InsertFiltered(shard, window, absent, num_absent);
}

void WriteStages::SetRow(const RowArena::View& rows, FlatIndex::Slot* slot, Window* window, int j) {
  const uint32_t ts =
      job_->mode == WriteMode::kLoad ? tile_.load_ts[window->entries[j].position] : job_->ts;
  if (slot->ts != ts) slot->ts = ts;  // do not dirty the line for nothing
  window->rows[j] = rows.Address(slot->row);
  PrefetchBytes<1>(window->rows[j], layout_.row_bytes);
}

void WriteStages::FindOrInsert(Shard* shard, Window* window, int j) {
  const BatchEntry& entry = window->entries[j];
  if (!shard->index.MakeRoom()) {
    OutOfMemory();
    return;
  }
  FlatIndex::Slot* slot = shard->index.FindOrFree(entry.hash, entry.key);
  if (!slot->live()) {
    const uint32_t row = shard->rows.Allocate();
    if (row == 0) {
      OutOfMemory();
      return;
    }
    shard->index.Fill(slot, entry.key, row, 0);
    window->fresh[j] = 1;
  }
  SetRow(shard->rows.view(), slot, window, j);
}

// Absent ids are shown to the filter together; those it lets pass are inserted.
void WriteStages::InsertFiltered(Shard* shard, Window* window, const int* absent, int count) {
  uint8_t dropped[kWindow];
  int64_t ids[kWindow];
  uint32_t counts[kWindow];
  for (int k = 0; k < count; ++k) {
    const BatchEntry& entry = window->entries[absent[k]];
    ids[k] = entry.key;
    counts[k] = tile_.counts == nullptr ? 1 : tile_.counts[entry.position];
  }
  job_->filter->Filter(ids, counts, count, true, dropped);
  for (int k = 0; k < count; ++k) {
    const BatchEntry& entry = window->entries[absent[k]];
    // An earlier occurrence in this very window may have inserted the id.
    if (dropped[k] && (k == 0 || shard->index.Find(entry.hash, entry.key) == nullptr)) {
      ++filtered_;
      continue;
    }
    FindOrInsert(shard, window, absent[k]);
  }
}

bool WriteStages::EraseIfZero(Shard* shard, const BatchEntry& entry) {
  if (!IsZeroVector(Values(entry), layout_.dim)) return false;
  FlatIndex::Slot* slot = shard->index.Find(entry.hash, entry.key);
  if (slot != nullptr) {
    shard->rows.Free(slot->row);
    shard->index.Erase(slot);
  }
  return true;
}

void WriteStages::Finish(Window* window) {
  if (job_->mode == WriteMode::kOptimize) {
    FinishOptimize(window);
  } else {
    for (int j = 0; j < window->count; ++j) {
      const BatchEntry& entry = window->entries[j];
      char* row = window->rows[j];
      if (row == nullptr) continue;
      switch (job_->mode) {
        case WriteMode::kAssign:
          FinishAssign(entry, window->fresh[j], row);
          break;
        case WriteMode::kAssignAdd:
          FinishAssignAdd(entry, window->fresh[j], row);
          break;
        case WriteMode::kReinitialize:
          InitializeRow(entry.key, row);
          tile_.existed[entry.position] = window->fresh[j] ? 0 : 1;
          break;
        default:
          std::memcpy(row, tile_.load_rows + entry.position * layout_.stride, layout_.row_bytes);
      }
    }
  }
  if (report_touched_) {
    std::vector<int64_t>* touched = ThreadTouchedIds();
    for (int j = 0; j < window->count; ++j) {
      if (window->rows[j] != nullptr) touched->push_back(window->entries[j].key);
    }
  }
  if (window->last) {
    Shard& shard = *shards_[window->shard];
    shard.size.store(shard.index.live(), std::memory_order_relaxed);
    shard.mutex.unlock();
  }
}

void WriteStages::InitializeRow(int64_t id, char* row) {
  if (layout_.serving()) {
    std::memset(row, 0, layout_.stride);
    return;
  }
  const uint64_t seed = TableInternals::Seed(*job_->table);
  for (const Segment& segment : layout_.segments) {
    InitializeValues(segment, seed, id, reinterpret_cast<float*>(row));
    InitializeState(segment, row);
  }
}

void WriteStages::FinishAssign(const BatchEntry& entry, bool fresh, char* row) {
  if (layout_.serving()) {
    for (const Segment& segment : layout_.segments) EncodeSegment(segment, Values(entry), row);
    return;
  }
  if (fresh) {
    for (const Segment& segment : layout_.segments) InitializeState(segment, row);
  }
  std::memcpy(row, Values(entry), 4 * layout_.dim);
}

void WriteStages::FinishAssignAdd(const BatchEntry& entry, bool fresh, char* row) {
  const float* __restrict add = Values(entry);
  float* __restrict sum;
  if (layout_.serving()) {
    sum = ThreadVector(layout_.dim)->data();
    if (fresh) {
      std::fill(sum, sum + layout_.dim, 0.0f);
    } else {
      for (const Segment& segment : layout_.segments) DecodeSegment(segment, row, sum);
    }
  } else {
    if (fresh) InitializeRow(entry.key, row);
    sum = reinterpret_cast<float*>(row);
  }
  for (int64_t i = 0; i < layout_.dim; ++i) sum[i] += add[i];
  if (layout_.serving()) {
    for (const Segment& segment : layout_.segments) EncodeSegment(segment, sum, row);
  }
}

void WriteStages::FinishOptimize(Window* window) {
  char* rows[kWindow];
  const float* grads[kWindow];
  int count = 0;
  for (int j = 0; j < window->count; ++j) {
    char* row = window->rows[j];
    if (row == nullptr) continue;
    if (window->fresh[j]) InitializeRow(window->entries[j].key, row);
    rows[count] = row;
    grads[count++] = Values(window->entries[j]);
  }
  uint8_t bad[kWindow];
  const int num_bad = FindNonFinite(grads, count, layout_.dim, bad);
  if (num_bad > 0) {
    nonfinite_ += num_bad;
    if (job_->skip_nonfinite) {
      int kept = 0;
      for (int j = 0; j < count; ++j) {
        if (bad[j]) continue;
        rows[kept] = rows[j];
        grads[kept++] = grads[j];
      }
      count = kept;
    }
  }
  for (const RunSegment& run : job_->segments) {
    if (run.segment->retriever == RetrieverKind::kHashNet) {
      HashNetStep(run, rows, grads, count);
    } else {
      RunOptimizer(*run.segment, {rows, grads, false, count}, run.learning_rate, job_->global_step);
    }
  }
}

// Row by row: the backward pass of a row that comes twice needs the value after its first step.
void WriteStages::HashNetStep(const RunSegment& run, char* const* rows, const float* const* grads,
                              int count) {
  float* slice = ThreadVector(run.segment->dim)->data();
  for (int j = 0; j < count; ++j) {
    HashNetBackward(*run.segment, reinterpret_cast<const float*>(rows[j]), grads[j],
                    run.hash_net_scale, slice);
    const float* slices[] = {slice};
    RunOptimizer(*run.segment, {rows + j, slices, true, 1}, run.learning_rate, job_->global_step);
  }
}

}  // namespace engine
}  // namespace monolith
