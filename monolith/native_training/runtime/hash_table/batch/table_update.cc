// Writing batches: Assign, AssignDigested, AssignAdd, Optimize, Reinitialize, Erase.
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/log.h"
#include "monolith/native_training/runtime/hash_table/batch/write_plan.h"
#include "monolith/native_training/runtime/hash_table/compressor/retrievers.h"
#include "monolith/native_training/runtime/hash_table/embedding_table.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"
#include "monolith/native_training/runtime/hash_table/table_internals.h"

namespace monolith {
namespace engine {
namespace {

Status CheckSpan(const WriteSpan& span, bool may_have_stride = false) {
  if (span.n < 0) {
    return Status::InvalidArgument("the number of ids is " + std::to_string(span.n));
  }
  if (span.stride != 0 && !may_have_stride) {
    return Status::InvalidArgument("the stride is " + std::to_string(span.stride) +
                                   ", want 0: only sums of gradients read rows that lie apart");
  }
  return Status::Ok();
}

Status CheckOptimize(const EmbeddingTable& table, const OptimizeOptions& options) {
  if (table.layout().serving()) {
    return Status::Unimplemented("ServingEntryAccessor doesn't support Optimize.");
  }
  if (options.num_learning_rates < table.num_segments()) {
    return Status::InvalidArgument(
        "learning_rate has " + std::to_string(options.num_learning_rates) +
        " elements, the table has " + std::to_string(table.num_segments()) + " segments");
  }
  if (table.layout().uses_global_step && options.global_step < 0) {
    return Status::InvalidArgument("global_step is " + std::to_string(options.global_step) +
                                   ", want >= 0");
  }
  return Status::Ok();
}

OccurrenceFilter* EffectiveFilter(OccurrenceFilter* filter) {
  return filter != nullptr && filter->NeverFilters() ? nullptr : filter;
}

Status OutOfMemory(const WriteJob& job) {
  if (!job.out_of_memory.load(std::memory_order_relaxed)) return Status::Ok();
  return NoRoomForRows(TableInternals::Arena(*job.table), job.table->Size());
}

// "Table 'user': the gradients of 2 ids are not finite and were not written: ids 3 and 7".
std::string DescribeBadIds(const WriteJob& job) {
  std::vector<int64_t> ids = job.bad_ids.named();
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  const int64_t count = job.bad_ids.count();
  const std::string& name = job.table->name();
  std::string text = name.empty() ? "A table" : "Table '" + name + "'";
  text += job.mode == WriteMode::kOptimize ? ": gradients" : ": values";
  text += " with NaN or infinity were not written, those of " + std::to_string(count) +
          (count == 1 ? " row: id " : " rows: ids ");
  for (size_t i = 0; i < ids.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ids[i]);
  }
  if (count > static_cast<int64_t>(ids.size())) text += ", ...";
  return text;
}

// Warns at the first calls that have bad ids, then ever more rarely: a run may go on for days.
bool ShouldWarn(int64_t times) { return times <= 8 || (times & (times - 1)) == 0; }

// Returns the status of a call whose bad ids were left out.
Status CheckBadIds(const WriteJob& job) {
  if (job.non_finite == NonFinite::kWrite || job.bad_ids.count() == 0) return Status::Ok();
  if (job.non_finite == NonFinite::kStop) {
    return Status::InvalidArgument(DescribeBadIds(job) +
                                   ". Rows of other ids may have been written");
  }
  auto* const refused = &TableInternals::CountersOf(job.table)->refused_calls;
  if (ShouldWarn(refused->fetch_add(1, std::memory_order_relaxed) + 1)) {
    Log(LogLevel::kWarning, DescribeBadIds(job));
  }
  return Status::Ok();
}

// Segments in order; neighbours with the same elementwise rule and rate become one.
void PlanSegments(const EmbeddingTable& table, const OptimizeOptions& options, WriteJob* job) {
  const std::vector<Segment>& segments = table.layout().segments;
  job->fused.reserve(segments.size());  // pointers into it must stay
  for (size_t k = 0; k < segments.size(); ++k) {
    const float rate = options.learning_rates[k];
    const Segment* segment = &segments[k];
    size_t end = k + 1;
    while (end < segments.size() && options.learning_rates[end] == rate &&
           CanFuse(segments[end - 1], segments[end])) {
      ++end;
    }
    if (end > k + 1) {
      job->fused.push_back(*segment);
      Segment* fused = &job->fused.back();
      fused->dim = segments[end - 1].value_begin + segments[end - 1].dim - segment->value_begin;
      segment = fused;
      k = end - 1;
    }
    const float scale = segment->retriever == RetrieverKind::kHashNet
                            ? HashNetScale(segment->compressor, options.global_step)
                            : 0.0f;
    job->segments.push_back({segment, rate, scale});
  }
}

Status RunAssign(EmbeddingTable* table, WriteMode mode, const WriteSpan& span,
                 const WriteOptions& options, TableDigest* digest = nullptr) {
  Status status = CheckSpan(span);
  if (!status.ok()) return status;
  WriteJob job;
  job.table = table;
  job.mode = mode;
  job.ts = ClampTimestamp(options.req_time);
  job.filter = EffectiveFilter(options.filter);
  job.non_finite = options.non_finite;
  job.keep_digest = digest != nullptr;
  std::vector<PlannedWrite> writes(1);
  writes[0].job = &job;
  writes[0].AddSpan(span.ids, span.n, span.values,
                    options.runner == nullptr ? 1 : options.runner->NumThreads());
  TableInternals::RaiseMaxUpdateTs(table, options.req_time);
  RunWrites(writes, options.runner);
  if (digest != nullptr) {
    digest->sum += job.digest_sum.load(std::memory_order_relaxed);
    digest->rows += job.digest_rows.load(std::memory_order_relaxed);
  }
  const Status status_of_memory = OutOfMemory(job);
  return status_of_memory.ok() ? CheckBadIds(job) : status_of_memory;
}

}  // namespace

Status EmbeddingTable::Assign(const WriteSpan& span, const WriteOptions& options) {
  return RunAssign(this, WriteMode::kAssign, span, options);
}

Status EmbeddingTable::AssignDigested(const WriteSpan& span, const WriteOptions& options,
                                      TableDigest* digest) {
  return RunAssign(this, WriteMode::kAssign, span, options, digest);
}

Status EmbeddingTable::AssignAdd(const WriteSpan& span, const WriteOptions& options) {
  return RunAssign(this, WriteMode::kAssignAdd, span, options);
}

Status EmbeddingTable::Optimize(const WriteSpan& span, const OptimizeOptions& options) {
  OptimizeRequest request;
  request.table = this;
  request.spans = &span;
  request.num_spans = 1;
  request.options = options;
  return OptimizeMany(&request, 1, options.write.runner);
}

Status EmbeddingTable::OptimizeMany(const OptimizeRequest* requests, int64_t num_requests,
                                    ParallelRunner* runner) {
  for (int64_t r = 0; r < num_requests; ++r) {
    Status status = CheckOptimize(*requests[r].table, requests[r].options);
    for (int64_t i = 0; i < requests[r].num_spans && status.ok(); ++i) {
      status = CheckSpan(requests[r].spans[i], requests[r].options.dedup);
    }
    if (!status.ok()) return status;
  }
  std::vector<WriteJob> jobs(num_requests);
  std::vector<PlannedWrite> writes(num_requests);
  for (int64_t r = 0; r < num_requests; ++r) {
    const OptimizeRequest& request = requests[r];
    WriteJob* job = &jobs[r];
    job->table = request.table;
    job->mode = WriteMode::kOptimize;
    job->ts = ClampTimestamp(request.options.write.req_time);
    job->filter = EffectiveFilter(request.options.write.filter);
    job->non_finite = request.options.write.non_finite;
    job->global_step = request.options.global_step;
    PlanSegments(*request.table, request.options, job);
    writes[r].job = job;
    writes[r].dedup = request.options.dedup;
    writes[r].count_once = request.options.count_once;
    for (int64_t i = 0; i < request.num_spans; ++i) {
      const WriteSpan& span = request.spans[i];
      writes[r].AddSpan(span.ids, span.n, span.values,
                        runner == nullptr || num_requests > 1 ? 1 : runner->NumThreads(),
                        span.stride);
    }
    TableInternals::SetLastGlobalStep(request.table, request.options.global_step);
    TableInternals::RaiseMaxUpdateTs(request.table, request.options.write.req_time);
  }
  RunWrites(writes, runner);
  for (const WriteJob& job : jobs) {
    Status status = OutOfMemory(job);
    if (!status.ok()) return status;
  }
  Status bad = Status::Ok();
  for (const WriteJob& job : jobs) {
    const Status status = CheckBadIds(job);
    if (status.ok()) continue;
    if (bad.ok()) {
      bad = status;
    } else {
      bad.message += ". " + status.message;
    }
  }
  if (!bad.ok()) return bad;
  return Status::Ok();
}

Status EmbeddingTable::Reinitialize(const int64_t* ids, int64_t n, int64_t now, int32_t* existed) {
  const int64_t data_time = MaxUpdateTs();
  const int64_t time = data_time > 0 ? data_time : now;
  WriteJob job;
  job.table = this;
  job.mode = WriteMode::kReinitialize;
  job.ts = ClampTimestamp(time);
  std::vector<PlannedWrite> writes(1);
  writes[0].job = &job;
  writes[0].AddSpan(ids, n, nullptr, 1);
  for (WriteTile& tile : writes[0].tiles) tile.existed = existed + (tile.ids - ids);
  RaiseMaxUpdateTs(time);
  RunWrites(writes, nullptr);
  return OutOfMemory(job);
}

void EmbeddingTable::Erase(const int64_t* ids, int64_t n) {
  std::vector<int64_t> erased;
  if (erased_ != nullptr) erased.reserve(static_cast<size_t>(n));
  const WriteRoom room(&room_);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashId(ids[i]);
    Shard& shard = *shards_[ShardOf(hash)];
    std::unique_lock<FairSharedMutex> lock(shard.mutex);
    FlatIndex::Slot* slot = shard.index.Find(hash, ids[i]);
    if (slot == nullptr) continue;
    if (erased_ != nullptr) erased.push_back(ids[i]);
    shard.rows.Free(slot->row);
    shard.index.Erase(slot);
    shard.size.store(shard.index.live(), std::memory_order_relaxed);
  }
  ReportErased(erased);
}

}  // namespace engine
}  // namespace monolith
