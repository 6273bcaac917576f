// Longer than 600 lines: the pipeline and what it inlines are one stretch of code, which the
// compiler has to see whole.
#include "monolith/native_training/runtime/hash_table/batch/write_stages.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "monolith/native_training/runtime/hash_table/batch/filter_rounds.h"
#include "monolith/native_training/runtime/hash_table/batch/shard_locks.h"
#include "monolith/native_training/runtime/hash_table/compressor/compressors.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"
#include "monolith/native_training/runtime/hash_table/initializer/initializers.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"
#include "monolith/native_training/runtime/hash_table/rows/row_kernels.h"

namespace monolith {
namespace engine {
namespace {

// Reused by all writes of a thread.
std::vector<int64_t>* ThreadTouchedIds() {
  thread_local std::vector<int64_t> ids;
  return &ids;
}

// Rows that are written while their shards are locked: half a millisecond of others waiting.
constexpr int64_t kLockedBytes = int64_t{512} << 10;
constexpr int64_t kMinLockedIds = 64;

std::vector<float>* ThreadVector(int64_t dim) {
  thread_local std::vector<float> vector;
  if (static_cast<int64_t>(vector.size()) < dim) vector.resize(dim);
  return &vector;
}

// Values and accumulators are all there is in a row.
bool IsPlainAdagrad(const Segment& segment, const RowLayout& layout) {
  return segment.optimizer.kind == OptimizerKind::kAdagrad && segment.dim == layout.dim &&
         segment.state_offset == 4 * layout.dim && layout.row_bytes == 8 * layout.dim &&
         !segment.optimizer.stochastic_rounding_float16 &&
         segment.retriever != RetrieverKind::kHashNet;
}

// The ids that the stages take: neighbours in the tile, or some.
struct TileIds {
  static constexpr bool kInOrder = true;
  const int64_t* ids;
  int64_t first;
  int64_t key(int64_t i) const { return ids[first + i]; }
  int64_t position(int64_t i) const { return first + i; }
  void Skip(int64_t n) { first += n; }
};

struct PickedIds {
  static constexpr bool kInOrder = false;
  const int64_t* ids;
  const uint32_t* positions;
  int64_t key(int64_t i) const { return ids[positions[i]]; }
  int64_t position(int64_t i) const { return positions[i]; }
  void Skip(int64_t n) { positions += n; }
};

}  // namespace

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
      checks_values_(job->mode == WriteMode::kOptimize ||
                     (job->non_finite != NonFinite::kWrite &&
                      (job->mode == WriteMode::kAssign || job->mode == WriteMode::kAssignAdd))),
      skip_zero_(job->mode == WriteMode::kAssign && job->table->config().skip_zero_embedding),
      report_touched_(TableInternals::Touched(*job->table) != nullptr &&
                      (job->mode == WriteMode::kOptimize || job->mode == WriteMode::kReinitialize)),
      plain_adagrad_(job->mode == WriteMode::kOptimize && job->segments.size() == 1 &&
                     IsPlainAdagrad(*job->segments[0].segment, layout_)),
      plain_copy_(job->mode == WriteMode::kAssign && !skip_zero_ && CopiesRows(layout_)) {
  ThreadVector(layout_.dim);
}

WriteStages::~WriteStages() {
  TableInternals::Counters* counters = TableInternals::CountersOf(job_->table);
  if (filtered_ > 0) counters->filtered.fetch_add(filtered_, std::memory_order_relaxed);
  if (nonfinite_ > 0) counters->nonfinite.fetch_add(nonfinite_, std::memory_order_relaxed);
  if (job_->keep_digest) {
    job_->digest_sum.fetch_add(digest_.sum, std::memory_order_relaxed);
    job_->digest_rows.fetch_add(digest_.rows, std::memory_order_relaxed);
  }
  if (!report_touched_) return;
  std::vector<int64_t>* touched = ThreadTouchedIds();
  if (!touched->empty()) {
    try {
      TableInternals::Touched (*job_->table)(touched->data(),
                                             static_cast<int64_t>(touched->size()));
    } catch (const std::bad_alloc&) {
      OutOfMemory();
    }
  }
  touched->clear();
}

int64_t WriteStages::LockedIds() const {
  return std::max(kMinLockedIds, kLockedBytes / layout_.stride);
}

template <typename Ids>
uint64_t WriteStages::ShardsOf(const Ids& ids, int64_t n, int begin, int end) const {
  const bool exact = job_->mode == WriteMode::kLoad || job_->keep_digest;
  if (!exact && n >= 4 * (end - begin)) return ShardRange(begin, end);
  return ShardsOfIds(n, [&ids](int64_t i) { return ids.key(i); });
}

void WriteStages::Run(const uint32_t* positions, int64_t n, int shard_begin, int shard_end) {
  RunInSteps(PickedIds{tile_.ids, positions}, n, shard_begin, shard_end);
}

void WriteStages::RunAll(int shard_begin, int shard_end) {
  RunInSteps(TileIds{tile_.ids, 0}, tile_.n, shard_begin, shard_end);
}

template <typename Ids>
void WriteStages::RunInSteps(Ids ids, int64_t n, int shard_begin, int shard_end) {
  const int64_t step = LockedIds();
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t count = std::min(step, n - begin);
    if (!checks_values_ || AreFinite(ids, count)) {
      RunStep(ids, count, shard_begin, shard_end);
    } else {
      RunStepWithBadIds(ids, count, shard_begin, shard_end);
    }
    ids.Skip(count);
  }
}

template <typename Ids>
void WriteStages::RunStep(const Ids& ids, int64_t n, int shard_begin, int shard_end) {
  const uint64_t shards = ShardsOf(ids, n, shard_begin, shard_end);
  // Threads that load the files of a checkpoint, each a shard of its own, do not wait for each
  // other.
  TableInternals::DeepenIndexIfWanted(job_->table, job_->mode != WriteMode::kLoad);
  if (job_->filter != nullptr) Admit(ids, n, shards);
  const ShardLocks locks(shards_, shards);
  RunLocked(ids, n);
}

// A pass of its own, before any lock: the values of a step stay in the cache until they are used,
// and an id that is refused gets no row, is not counted by the filter and costs the pipeline
// nothing.
template <typename Ids>
bool WriteStages::AreFinite(const Ids& ids, int64_t n) const {
  if (Ids::kInOrder) return AllFinite(Values(ids.position(0)), n * layout_.dim);
  for (int64_t i = 0; i < n; ++i) {
    if (HasNonFinite(Values(ids.position(i)), layout_.dim)) return false;
  }
  return true;
}

template <typename Ids>
__attribute__((noinline)) void WriteStages::RunStepWithBadIds(const Ids& ids, int64_t n,
                                                              int shard_begin, int shard_end) {
  std::vector<uint32_t> good;
  good.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    if (HasNonFinite(Values(ids.position(i)), layout_.dim)) {
      job_->bad_ids.Add(ids.key(i));
    } else {
      good.push_back(static_cast<uint32_t>(ids.position(i)));
    }
  }
  nonfinite_ += n - static_cast<int64_t>(good.size());
  if (job_->non_finite == NonFinite::kWrite) {
    RunStep(ids, n, shard_begin, shard_end);
  } else if (!good.empty()) {
    RunStep(PickedIds{tile_.ids, good.data()}, static_cast<int64_t>(good.size()), shard_begin,
            shard_end);
  }
}

template <typename Ids>
void WriteStages::Admit(const Ids& ids, int64_t n, uint64_t shards) {
  thread_local FilterRounds rounds;
  rounds.Clear(n);
  {
    constexpr int64_t kAhead = 12;
    const IdHash hash_of = TableHash();
    const SharedShardLocks locks(shards_, shards);
    const FlatIndex::View index = TableInternals::Directory(*job_->table).view();
    const auto prefetch = [&](int64_t i) {
      const uint64_t hash = hash_of(ids.key(i));
      PrefetchForRead(index.HomeLine(hash));
    };
    for (int64_t i = 0; i < std::min(kAhead, n); ++i) prefetch(i);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(i + kAhead);
      const int64_t key = ids.key(i);
      const uint64_t hash = hash_of(key);
      const bool present = index.Find(hash, key) != nullptr;
      // With skip_zero_embedding an id of the batch may erase its row.
      if (!present || skip_zero_) rounds.Add(i, key, hash, present);
    }
  }
  dropped_ = rounds.Ask(
      job_->filter,
      [&](int64_t i) { return tile_.counts == nullptr ? 1 : tile_.counts[ids.position(i)]; },
      [&](int64_t i) { return skip_zero_ && IsZeroVector(Values(ids.position(i)), layout_.dim); });
}

// Any write, through Finish.
class WriteStages::BlockFinisher {
 public:
  static constexpr int64_t kIds = kBlock;
  static constexpr bool kAnyWrite = true;
  static constexpr int64_t kRowBytes = 0;  // any
  static constexpr int64_t kValueBytes = 0;

  explicit BlockFinisher(WriteStages* stages) : stages_(stages) {}
  template <typename Ids>
  void End(const Ids&, int64_t) const {}

  template <typename Ids>
  void operator()(const Ids& ids, int64_t first, int64_t n, char* const* rows,
                  uint8_t* fresh) const {
    Item items[kIds];
    for (int64_t j = 0; j < n; ++j) {
      items[j] = {ids.key(first + j), ids.position(first + j), rows[j], fresh[j] != 0};
      fresh[j] = 0;
    }
    stages_->Finish(items, static_cast<int>(n));
  }

 private:
  WriteStages* const stages_;
};

// Rows of values and as many accumulators, each at once: while one is updated others are fetched.
// kDim > 0: a dimension known to the compiler.
template <int kDim>
class WriteStages::AdagradFinisher {
 public:
  static constexpr int64_t kIds = 1;
  static constexpr bool kAnyWrite = false;
  static constexpr int64_t kRowBytes = 8 * kDim;
  static constexpr int64_t kValueBytes = 4 * kDim;

  explicit AdagradFinisher(WriteStages* stages)
      : stages_(stages),
        dim_(stages->layout_.dim),
        values_(stages->tile_.values),
        lr_(stages->job_->segments[0].learning_rate),
        weight_decay_(stages->job_->segments[0].segment->optimizer.weight_decay),
        report_touched_(stages->report_touched_) {}

  template <typename Ids>
  void operator()(const Ids& ids, int64_t i, int64_t, char* const* rows, uint8_t* fresh) {
    char* const row = *rows;
    if (row == nullptr) return;
    if (*fresh != 0) {
      *fresh = 0;
      stages_->InitializeRow(ids.key(i), row);
    }
    const float* const gradient = values_ + ids.position(i) * dim();
    float* const values = reinterpret_cast<float*>(row);
    AdagradRow(values, values + dim(), gradient, dim(), lr_, weight_decay_);
    if (report_touched_) ThreadTouchedIds()->push_back(ids.key(i));
  }

  template <typename Ids>
  void End(const Ids&, int64_t) const {}

 private:
  int64_t dim() const { return kDim > 0 ? kDim : dim_; }

  WriteStages* const stages_;
  const int64_t dim_;
  const float* const values_;
  const float lr_;
  const float weight_decay_;
  const bool report_touched_;
};

// Assigns rows whose values are floats as they come, each at once, and hashes them in the same go:
// that is done while others are fetched. kDim > 0: a dimension known to the compiler.
template <int kDim, bool kDigest>
class WriteStages::CopyFinisher {
 public:
  static constexpr int64_t kIds = 1;
  static constexpr bool kAnyWrite = false;
  static constexpr int64_t kRowBytes = 4 * kDim;
  static constexpr int64_t kValueBytes = 4 * kDim;

  explicit CopyFinisher(WriteStages* stages)
      : stages_(stages), dim_(stages->layout_.dim), values_(stages->tile_.values) {}

  template <typename Ids>
  void operator()(const Ids& ids, int64_t i, int64_t, char* const* rows, uint8_t* fresh) {
    char* const row = *rows;
    if (row == nullptr) return;
    const float* const values = values_ + ids.position(i) * dim();
    if (*fresh != 0) {
      *fresh = 0;
      InitializeState(stages_->layout_, row);
    } else if (kDigest) {
      digest_.Remove(RowHash(ids.key(i), reinterpret_cast<const float*>(row), dim()));
    }
    std::memcpy(row, values, 4 * dim());
    if (kDigest) digest_.Add(RowHash(ids.key(i), values, dim()));
  }

  template <typename Ids>
  void End(const Ids&, int64_t) const {
    stages_->digest_ += digest_;
  }

 private:
  int64_t dim() const { return kDim > 0 ? kDim : dim_; }

  WriteStages* const stages_;
  const int64_t dim_;
  const float* const values_;
  TableDigest digest_;
};

template <typename Ids>
void WriteStages::RunLocked(const Ids& ids, int64_t n) {
  // Steps that may fail come first: a row that was inserted has to be finished.
  if (report_touched_) {
    std::vector<int64_t>* const touched = ThreadTouchedIds();
    const size_t wanted = touched->size() + static_cast<size_t>(n);
    if (touched->capacity() < wanted) touched->reserve(2 * wanted);
  }
  // To know the most frequent dimension saves a tenth.
  const bool is_16 = layout_.dim == 16 && layout_.stride % 64 == 0;
  if (plain_adagrad_) {
    return is_16 ? RunPipeline(ids, n, AdagradFinisher<16>(this))
                 : RunPipeline(ids, n, AdagradFinisher<0>(this));
  }
  if (plain_copy_ && job_->keep_digest) {
    return is_16 ? RunPipeline(ids, n, CopyFinisher<16, true>(this))
                 : RunPipeline(ids, n, CopyFinisher<0, true>(this));
  }
  if (plain_copy_) {
    return is_16 ? RunPipeline(ids, n, CopyFinisher<16, false>(this))
                 : RunPipeline(ids, n, CopyFinisher<0, false>(this));
  }
  RunPipeline(ids, n, BlockFinisher(this));
}

template <typename Ids, typename Finisher>
__attribute__((noinline)) void WriteStages::RunPipeline(const Ids& all_ids, int64_t n,
                                                        Finisher finish) {
  constexpr int64_t kStep = Finisher::kIds;
  constexpr bool kAnyWrite = Finisher::kAnyWrite;
  constexpr bool kAny = Finisher::kRowBytes == 0;  // row size
  const Ids ids = all_ids;
  const IdHash hash_of = TableHash();
  const FlatIndex::View index = TableInternals::Directory(*job_->table).view();
  const RowArena::View arena = TableInternals::Arena(*job_->table).view();
  const int64_t row_bytes = kAny ? std::min<int64_t>(layout_.row_bytes, 512) : Finisher::kRowBytes;
  // Aligned rows end with their last line; others may reach into one more.
  const int64_t last_byte = !kAny || layout_.stride % 64 == 0 ? 0 : row_bytes - 1;
  // Those of ids in order are read front to back, which the hardware notices where one row is
  // finished at a time; between blocks it loses track.
  const int64_t value_bytes = kAny            ? std::min<int64_t>(value_bytes_, 512)
                              : Ids::kInOrder ? 0
                                              : Finisher::kValueBytes;
  const int64_t value_stride = kAny ? value_bytes_ : Finisher::kValueBytes;
  const char* const values = values_begin_;
  const uint32_t* const load_ts = kAnyWrite ? tile_.load_ts : nullptr;
  const uint32_t job_ts = job_->ts;
  // With skip_zero_embedding every id waits for Resolve: there an earlier id of the batch may erase
  // its row.
  const bool skip = kAnyWrite && skip_zero_;
  // Before the first ids are fetched, too, only of shards that are locked: Resolve may ask for the
  // lines of all.
  int64_t keys[kRing];
  std::fill_n(keys, kRing, ids.key(0));
  FlatIndex::Line* lines[kRing];
  char* rows[kRing] = {};
  uint8_t fresh[kRing] = {};
  bool inserting = false;  // the last id that was not in its home line was new
  int64_t finished = 0;    // the ids before it are

  const auto fetch = [&](int64_t i) {
    const int64_t key = ids.key(i);
    FlatIndex::Line* const line = index.HomeLine(hash_of(key));
    keys[i % kRing] = key;
    lines[i % kRing] = line;
    PrefetchForWrite(line);
    // Into the second-level cache: the first has too few slots left.
    const char* const value = values + ids.position(i) * value_stride;
    for (int64_t at = 0; at < value_bytes; at += 64) __builtin_prefetch(value + at, 0, 2);
  };
  const auto take = [&](int64_t i, FlatIndex::Slot* slot) {
    const uint32_t ts = load_ts == nullptr ? job_ts : load_ts[ids.position(i)];
    if (slot->ts != ts) slot->ts = ts;  // do not dirty the line for nothing
    char* const row = arena.Address(slot->row);
    rows[i % kRing] = row;
    for (int64_t at = 0; at < row_bytes; at += 64) PrefetchForWrite(row + at);
    if (last_byte > 0) PrefetchForWrite(row + last_byte);
  };
  const auto probe = [&](int64_t i) {
    FlatIndex::Line* const line = lines[i % kRing];
    FlatIndex::Slot* const slot = skip ? nullptr : FlatIndex::SlotInLine(line, keys[i % kRing]);
    if (slot != nullptr) return take(i, slot);
    rows[i % kRing] = nullptr;
    if (!FlatIndex::HasEmpty(line)) PrefetchOverflow(line, inserting);
  };
  // Inlined by force: a call for each id costs a tenth of an assign.
  const auto resolve = [&](int64_t i) __attribute__((always_inline)) {
    if (rows[i % kRing] != nullptr) return;
    const int64_t key = keys[i % kRing];
    FlatIndex::Line* const home = lines[i % kRing];
    const FlatIndex::Search search =
        skip ? FlatIndex::Search() : FlatIndex::SearchBehind(home, key);
    inserting = search.slot == nullptr;
    if (!inserting) return take(i, search.slot);
    if (skip && EraseIfZero(ids, i, finished, keys, rows, fresh)) return;
    const bool dropped = dropped_ != nullptr && dropped_[i] != 0;
    rows[i % kRing] =
        Resolve(key, hash_of(key), home, search.line, ids.position(i), dropped, &fresh[i % kRing]);
    if (index_changed_) {
      for (int64_t j = 0; j < kRing; ++j) lines[j] = index.HomeLine(hash_of(keys[j]));
      index_changed_ = false;
    }
  };

  for (int64_t step = 0; step < n + kFinishLag; step += kStep) {
    if (step >= kResolveLag && step + kStep <= n) {
      for (int64_t i = step; i < step + kStep; ++i) {
        fetch(i);
        probe(i - kProbeLag);
        resolve(i - kResolveLag);
      }
    } else {
      for (int64_t i = step; i < step + kStep; ++i) {
        if (i < n) fetch(i);
        if (i >= kProbeLag && i - kProbeLag < n) probe(i - kProbeLag);
        if (i >= kResolveLag && i - kResolveLag < n) resolve(i - kResolveLag);
      }
    }
    const int64_t first = step - kFinishLag;
    if (first < 0) continue;
    finish(ids, first, std::min(kStep, n - first), rows + first % kRing, fresh + first % kRing);
    finished = first + kStep;
  }
  finish.End(ids, n);
}

// Finds or makes the row of an id. Null: there shall be none.
char* WriteStages::Resolve(int64_t key, uint64_t hash, FlatIndex::Line* home, FlatIndex::Line* end,
                           int64_t position, bool dropped, uint8_t* fresh) {
  Shard* const shard = shards_[ShardOf(hash)].get();
  if (dropped && shard->index.Find(hash, key) == nullptr) {
    ++filtered_;
    return nullptr;
  }
  const int64_t changes = shard->index.changes();
  // Without skip_zero_embedding the caller has looked behind the home line, up to `end`. The home
  // line itself may have got the id since it was probed, from an earlier place in the batch.
  FlatIndex::Slot* const slot = skip_zero_ ? shard->index.FindOrFree(hash, key)
                                           : shard->index.FindInHomeOrFree(home, end, hash, key);
  index_changed_ = shard->index.changes() != changes;
  if (slot == nullptr) {
    OutOfMemory();
    return nullptr;
  }
  uint32_t row = slot->row;
  if (slot->live()) {
    slot->ts = Timestamp(position);
  } else {
    row = shard->rows.Allocate();
    if (row == 0) {
      OutOfMemory();
      return nullptr;
    }
    shard->index.Fill(hash, slot, key, row, Timestamp(position));
    *fresh = 1;
  }
  char* const address = shard->rows.Address(row);
  PrefetchBytes<1>(address, layout_.row_bytes);
  return address;
}

// Out of line: few tables need it, and it would cost the pipeline registers.
template <typename Ids>
__attribute__((noinline)) bool WriteStages::EraseIfZero(Ids ids, int64_t i, int64_t finished,
                                                        const int64_t* keys, char** rows,
                                                        uint8_t* fresh) {
  const int64_t position = ids.position(i);
  if (!IsZeroVector(Values(position), layout_.dim)) return false;
  const int64_t key = ids.key(i);
  for (int64_t j = finished; j < i; ++j) {
    if (rows[j % kRing] == nullptr || keys[j % kRing] != key) continue;
    BlockFinisher(this)(ids, j, 1, rows + j % kRing, fresh + j % kRing);
    rows[j % kRing] = nullptr;
  }
  const uint64_t hash = HashId(key);
  Shard* const shard = shards_[ShardOf(hash)].get();
  FlatIndex::Slot* const slot = shard->index.Find(hash, key);
  if (slot != nullptr) {
    if (job_->keep_digest) digest_.Remove(HashOf(key, shard->rows.Address(slot->row)));
    shard->rows.Free(slot->row);
    shard->index.Erase(slot);
  }
  return true;
}

uint64_t WriteStages::HashOf(int64_t id, const char* row) const {
  float* const values = ThreadVector(layout_.dim)->data();
  ReadRow(layout_, row, TableInternals::LastGlobalStep(*job_->table), values);
  return RowHash(id, values, layout_.dim);
}

void WriteStages::Finish(const Item* items, int count) {
  if (job_->mode == WriteMode::kOptimize) {
    FinishOptimize(items, count);
  } else {
    for (int j = 0; j < count; ++j) {
      const Item& item = items[j];
      if (item.row == nullptr) continue;
      switch (job_->mode) {
        case WriteMode::kAssign:
          FinishAssign(item);
          break;
        case WriteMode::kAssignAdd:
          FinishAssignAdd(item);
          break;
        case WriteMode::kReinitialize:
          InitializeRow(item.key, item.row);
          tile_.existed[item.position] = item.fresh ? 0 : 1;
          break;
        default:
          std::memcpy(item.row, tile_.load_rows + item.position * layout_.stride,
                      layout_.row_bytes);
      }
    }
  }
  if (report_touched_) {
    std::vector<int64_t>* touched = ThreadTouchedIds();
    for (int j = 0; j < count; ++j) {
      if (items[j].row != nullptr) touched->push_back(items[j].key);
    }
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
  }
  InitializeState(layout_, row);
}

void WriteStages::FinishAssign(const Item& item) {
  if (job_->keep_digest && !item.fresh) digest_.Remove(HashOf(item.key, item.row));
  if (layout_.serving()) {
    for (const Segment& segment : layout_.segments)
      EncodeSegment(segment, Values(item.position), item.row);
  } else {
    if (item.fresh) InitializeState(layout_, item.row);
    std::memcpy(item.row, Values(item.position), 4 * layout_.dim);
  }
  if (job_->keep_digest) digest_.Add(HashOf(item.key, item.row));
}

void WriteStages::FinishAssignAdd(const Item& item) {
  const float* __restrict add = Values(item.position);
  float* __restrict sum;
  if (layout_.serving()) {
    sum = ThreadVector(layout_.dim)->data();
    if (item.fresh) {
      std::fill(sum, sum + layout_.dim, 0.0f);
    } else {
      for (const Segment& segment : layout_.segments) DecodeSegment(segment, item.row, sum);
    }
  } else {
    if (item.fresh) InitializeRow(item.key, item.row);
    sum = reinterpret_cast<float*>(item.row);
  }
  for (int64_t i = 0; i < layout_.dim; ++i) sum[i] += add[i];
  if (layout_.serving()) {
    for (const Segment& segment : layout_.segments) EncodeSegment(segment, sum, item.row);
  }
}

void WriteStages::FinishOptimize(const Item* items, int item_count) {
  char* rows[kBlock];
  const float* grads[kBlock];
  int count = 0;
  for (int j = 0; j < item_count; ++j) {
    if (items[j].row == nullptr) continue;
    if (items[j].fresh) InitializeRow(items[j].key, items[j].row);
    rows[count] = items[j].row;
    grads[count++] = Values(items[j].position);
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
