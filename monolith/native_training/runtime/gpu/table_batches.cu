// Writes of GPU tables, from the call to the launches.
#include <limits>

#include "monolith/native_training/runtime/gpu/table_batches.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"

namespace monolith {
namespace gpu {
namespace {

constexpr int64_t kMaxBatch = int64_t{1} << 30;

uint32_t ClampTime(int64_t seconds) {
  return static_cast<uint32_t>(
      std::min<int64_t>(std::max<int64_t>(seconds, 0), std::numeric_limits<uint32_t>::max()));
}

int CheckCount(int64_t n) {
  if (n >= 0 && n <= kMaxBatch) return MONO_GPU_OK;
  return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(n) +
                                             ", want 0 to " + std::to_string(kMaxBatch));
}

int CheckGradients(const FloatRows& gradients, int64_t dim) {
  if (gradients.type < FloatType::kFloat32 || gradients.type > FloatType::kBfloat16) {
    return Fail(
        MONO_GPU_INVALID_ARGUMENT,
        "gradient_type is " + std::to_string(static_cast<int>(gradients.type)) + ", want 0 to 2");
  }
  if (gradients.stride >= dim && gradients.stride <= std::numeric_limits<int32_t>::max()) {
    return MONO_GPU_OK;
  }
  return Fail(MONO_GPU_INVALID_ARGUMENT, "gradient_stride is " + std::to_string(gradients.stride) +
                                             ", want 0 or at least the dim, " +
                                             std::to_string(dim));
}

struct IdSpan {
  const int64_t* ids;
  int64_t n;
  FloatRows source;
  int64_t to;  // position of its first id in the batch
};

// Puts the ids and the gradients of one or several places into one, without gaps and in 32 bits.
struct JoinWords {
  const IdSpan* spans;
  const int64_t* begins;
  int count;
  int dim;
  int64_t* ids;
  float* source;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const int job = JobAt(begins, count, word);
    const IdSpan& span = spans[job];
    const int64_t first = (word - begins[job]) * kWordIds;
    const int64_t n = span.n - first < kWordIds ? span.n - first : kWordIds;
    for (int64_t i = lane; i < n; i += kWarpLanes) ids[span.to + first + i] = span.ids[first + i];
    float* const to = source + (span.to + first) * dim;
    for (int64_t i = lane; i < n * dim; i += kWarpLanes) {
      const int64_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(dim);
      to[i] = span.source.At(first + row, i - row * dim);
    }
  }
};

}  // namespace

int GpuTable::JoinSpans(Stream stream, Job* job) {
  const int dim = static_cast<int>(layout_.dim);
  const int64_t ids_bytes = CeilDiv(job->n * 8, 256) * 256;
  const int64_t bytes = ids_bytes + job->n * dim * 4;
  if (joined_.bytes() < bytes) {
    joined_.Free(stream);
    MONO_GPU_TRY(joined_.Allocate(stream, bytes, "the ids and gradients of a batch"));
  }
  std::vector<IdSpan> spans;
  std::vector<int64_t> begins;
  int64_t words = 0, to = 0;
  for (const GpuOptimizeJob* const span : job->spans) {
    spans.push_back({span->ids, span->n, span->gradients, to});
    begins.push_back(words);
    words += CeilDiv(span->n, kWordIds);
    to += span->n;
  }
  Workspace workspace;
  const auto spans_slot = workspace.Put(spans);
  const auto begins_slot = workspace.Put(begins);
  UploadedJobs uploaded(stream);
  MONO_GPU_TRY(uploaded.Upload(&workspace));
  const auto ids = joined_.As<int64_t>();
  const auto source = reinterpret_cast<float*>(joined_.As<char>() + ids_bytes);
  job->ids = ids;
  job->source = {source, dim, FloatType::kFloat32};
  return ForWarps(stream, words, kAllBlocks,
                  JoinWords{workspace.At(spans_slot), workspace.At(begins_slot),
                            static_cast<int>(spans.size()), dim, ids, source});
}

// The ids and their source, as they came.
int GpuTable::PrepareBatch(Stream stream, Job* job, Batch* batch) {
  MONO_GPU_TRY(EnsureScratch(stream, job->n));
  // Kernels that take a step for each of equal ids read 32 bits.
  const bool is_read =
      job->source.type == FloatType::kFloat32 ||
      (job->duplicates != Duplicates::kSteps && SumsGradients(job->plan, stride_, job->source));
  if (job->spans.size() > 1 || !is_read) MONO_GPU_TRY(JoinSpans(stream, job));
  batch->ids = job->ids;
  batch->n = job->n;
  return MONO_GPU_OK;
}

int GpuTable::PrepareWrite(Stream stream, const Job& job, const Batch& batch, WriteTask* task) {
  MONO_GPU_TRY(MakeRoom(stream, batch));
  task->arguments = {View(),
                     arena_.base(),
                     stride_,
                     batch,
                     job.source,
                     job.source_floats,
                     job.ts,
                     job.load_ts,
                     job.existed,
                     absent_.As<uint32_t>(),
                     prefix_.As<uint32_t>(),
                     free_stack_.As<uint32_t>(),
                     times_.As<uint32_t>(),
                     job.not_finite != NotFinite::kWrite};
  task->plan = job.plan;
  return MONO_GPU_OK;
}

// Where the write puts the state of the table.
int GpuTable::NumberWrite(WriteTask* task) {
  MONO_GPU_TRY(Poll(kPublishedRing - 1));
  task->sequence = ++sequence_;
  task->host = published_.As<PublishedState>() + task->sequence % kPublishedRing;
  return MONO_GPU_OK;
}

// jobs[i] is one of tables[i], which are distinct and locked.
int GpuTable::RunWrites(Stream stream, const std::vector<GpuTable*>& tables, Job* jobs) {
  // First everything that can fail for want of memory; no row changes.
  std::vector<WriteTask> tasks(tables.size());
  std::vector<Batch> batches(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    MONO_GPU_TRY(tables[i]->PrepareBatch(stream, jobs + i, &batches[i]));
  }
  MONO_GPU_TRY(FindDuplicates(stream, tables, jobs, batches.data()));
  for (size_t i = 0; i < tables.size(); ++i) {
    MONO_GPU_TRY(tables[i]->PrepareWrite(stream, jobs[i], batches[i], &tasks[i]));
  }
  for (size_t i = 0; i < tables.size(); ++i) MONO_GPU_TRY(tables[i]->NumberWrite(&tasks[i]));
  WriteUploads uploads(stream);
  MONO_GPU_TRY(LaunchUpdates(stream, tasks, &uploads));
  for (size_t i = 0; i < tables.size(); ++i) {
    if (jobs[i].chance != nullptr) {
      MONO_GPU_TRY(tables[i]->DrawAbsent(stream, *jobs[i].chance, &tasks[i]));
    } else if (jobs[i].filter != nullptr) {
      MONO_GPU_TRY(tables[i]->AskFilter(stream, jobs[i], &tasks[i].arguments.batch));
    } else {
      continue;
    }
    uploads.Clear();
  }
  MONO_GPU_TRY(LaunchInserts(stream, tasks, &uploads));
  for (size_t i = 0; i < tables.size(); ++i) {
    tables[i]->in_flight_.push_back({jobs[i].n, tasks[i].sequence, jobs[i].not_finite});
    tables[i]->in_flight_ids_ += jobs[i].n;
  }
  return MONO_GPU_OK;
}

// As RunWrites, in the order of streams; some jobs may be empty.
int GpuTable::Write(Stream stream, const std::vector<GpuTable*>& tables, std::vector<Job> jobs) {
  for (const Job& job : jobs) MONO_GPU_TRY(CheckCount(job.n));
  std::vector<GpuTable*> busy;
  std::vector<Job> work;
  busy.reserve(tables.size());
  work.reserve(tables.size());
  for (size_t i = 0; i < tables.size(); ++i) {
    if (jobs[i].n == 0) continue;
    busy.push_back(tables[i]);
    work.push_back(jobs[i]);
  }
  int code = MONO_GPU_OK;
  size_t begun = 0;
  while (code == MONO_GPU_OK && begun < busy.size()) {
    code = busy[begun]->streams_.BeginWrite(stream);
    if (code == MONO_GPU_OK) ++begun;
  }
  if (code == MONO_GPU_OK && !busy.empty()) code = RunWrites(stream, busy, work.data());
  for (size_t i = 0; i < begun; ++i) {
    const int ended = busy[i]->streams_.EndWrite(stream);
    if (code == MONO_GPU_OK) code = ended;
  }
  MONO_GPU_TRY(code);
  for (size_t i = 0; i < tables.size(); ++i) {
    GpuTable* const table = tables[i];
    table->max_update_ts_ = std::max<int64_t>(table->max_update_ts_, jobs[i].ts);
    if (jobs[i].global_step >= 0) table->last_global_step_ = jobs[i].global_step;
  }
  return MONO_GPU_OK;
}

int GpuTable::WriteOne(Stream stream, const Job& job) { return Write(stream, {this}, {job}); }

// Reports the refusals of earlier writes if the device has told of them by now: nothing waits for
// it.
int GpuTable::BeginCall() {
  MONO_GPU_TRY(Poll(kPublishedRing));
  return TellRefused();
}

int GpuTable::AssignOrAdd(RowMode mode, Stream stream, const int64_t* ids, int64_t n,
                          const float* values, const GpuWriteOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(BeginCall());
  Job job;
  job.plan = PlanFor(mode, last_global_step_);
  job.ids = ids;
  job.n = n;
  job.source = FloatRows::Packed(values, layout_.dim);
  job.source_floats = layout_.dim;
  job.ts = ClampTime(options.req_time);
  // Every one counts: the last one stays of those that are assigned.
  job.duplicates = options.duplicates == Duplicates::kNone ? Duplicates::kNone : Duplicates::kSteps;
  job.not_finite = options.not_finite;
  job.filter = options.filter;
  job.chance = options.chance;
  return WriteOne(stream, job);
}

int GpuTable::Assign(Stream stream, const int64_t* ids, int64_t n, const float* values,
                     const GpuWriteOptions& options) {
  return AssignOrAdd(RowMode::kAssign, stream, ids, n, values, options);
}

int GpuTable::AssignAdd(Stream stream, const int64_t* ids, int64_t n, const float* values,
                        const GpuWriteOptions& options) {
  return AssignOrAdd(RowMode::kAssignAdd, stream, ids, n, values, options);
}

int GpuTable::CheckOptimize(const GpuOptimizeOptions& options) const {
  if (options.num_learning_rates < layout_.num_segments()) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "learning_rate has " + std::to_string(options.num_learning_rates) +
                    " elements, the table has " + std::to_string(layout_.num_segments()) +
                    " segments");
  }
  if (layout_.uses_global_step && options.global_step < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT,
                "global_step is " + std::to_string(options.global_step) + ", want >= 0");
  }
  return MONO_GPU_OK;
}

GpuTable::Job GpuTable::OptimizeJob(const GpuOptimizeOptions& options) const {
  Job job;
  job.plan = PlanFor(RowMode::kOptimize, options.global_step);
  for (int s = 0; s < job.plan.num_segments; ++s) {
    job.plan.segments[s].lr = options.learning_rates[s];
  }
  job.source_floats = layout_.dim;
  job.ts = ClampTime(options.write.req_time);
  job.global_step = options.global_step;
  job.duplicates = options.write.duplicates;
  job.not_finite = options.write.not_finite;
  job.filter = options.write.filter;
  job.chance = options.write.chance;
  return job;
}

int GpuTable::Optimize(Stream stream, const int64_t* ids, int64_t n, const float* gradients,
                       const GpuOptimizeOptions& options) {
  MONO_GPU_TRY(CheckOptimize(options));
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(BeginCall());
  Job job = OptimizeJob(options);
  job.ids = ids;
  job.n = n;
  job.source = FloatRows::Packed(gradients, layout_.dim);
  return WriteOne(stream, job);
}

int GpuTable::OptimizeMany(Stream stream, const GpuOptimizeJob* jobs, int64_t num_jobs) {
  std::vector<GpuTable*> tables;
  for (int64_t i = 0; i < num_jobs; ++i) {
    MONO_GPU_TRY(CheckCount(jobs[i].n));
    MONO_GPU_TRY(CheckGradients(jobs[i].gradients, jobs[i].table->dim()));
    MONO_GPU_TRY(jobs[i].table->CheckOptimize(*jobs[i].options));
    tables.push_back(jobs[i].table);
  }
  if (tables.empty()) return MONO_GPU_OK;
  const TableLocks locks(std::move(tables));
  MONO_GPU_TRY(locks.CheckDevice());
  for (GpuTable* const table : locks.tables()) MONO_GPU_TRY(table->BeginCall());
  std::vector<Job> all(locks.tables().size());
  std::vector<const GpuOptimizeOptions*> options(all.size(), nullptr);
  for (int64_t i = 0; i < num_jobs; ++i) {
    const size_t t = std::lower_bound(locks.tables().begin(), locks.tables().end(), jobs[i].table,
                                      std::less<GpuTable*>()) -
                     locks.tables().begin();
    Job& job = all[t];
    if (options[t] == nullptr) {
      options[t] = jobs[i].options;
      job = jobs[i].table->OptimizeJob(*jobs[i].options);
    }
    if (options[t] != jobs[i].options) {
      return Fail(MONO_GPU_INVALID_ARGUMENT,
                  "job " + std::to_string(i) +
                      " has other options than the one before it of the same table");
    }
    if (jobs[i].n == 0) continue;
    job.ids = jobs[i].ids;
    job.source = jobs[i].gradients;
    job.n += jobs[i].n;
    job.spans.push_back(jobs + i);
  }
  return Write(stream, locks.tables(), std::move(all));
}

int GpuTable::Reinitialize(Stream stream, const int64_t* ids, int64_t n, int64_t now,
                           int32_t* existed) {
  std::lock_guard<std::mutex> lock(mutex_);
  Job job;
  job.plan = PlanFor(RowMode::kReinitialize, last_global_step_);
  job.ids = ids;
  job.n = n;
  job.ts = ClampTime(max_update_ts_ > 0 ? max_update_ts_ : now);
  job.existed = existed;
  job.duplicates = Duplicates::kSteps;
  return WriteOne(stream, job);
}

int GpuTable::ImportRows(Stream stream, const int64_t* ids, const uint32_t* ts, const char* rows,
                         int64_t n) {
  if (n <= 0) return MONO_GPU_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(UseDevice(streams_.device()));
  const int64_t row_bytes = n * layout_.row_bytes;
  DeviceBuffer staging;
  MONO_GPU_TRY(staging.Allocate(stream, n * 12 + row_bytes, "loading a table"));
  int64_t* const device_ids = staging.As<int64_t>();
  const auto device_ts = reinterpret_cast<uint32_t*>(device_ids + n);
  const auto device_rows = reinterpret_cast<float*>(device_ts + n);
  MONO_GPU_TRY(CopyToDevice(stream, ids, device_ids, n * 8));
  MONO_GPU_TRY(CopyToDevice(stream, ts, device_ts, n * 4));
  MONO_GPU_TRY(CopyToDevice(stream, rows, device_rows, row_bytes));
  Job job;
  job.plan = PlanFor(RowMode::kLoad, last_global_step_);
  job.ids = device_ids;
  job.n = n;
  job.source = FloatRows::Packed(device_rows, layout_.row_bytes / 4);
  job.source_floats = layout_.row_bytes / 4;
  job.load_ts = device_ts;
  job.duplicates = Duplicates::kSteps;
  const int code = WriteOne(stream, job);
  staging.Free(stream);
  MONO_GPU_TRY(code);
  max_update_ts_ = std::max<int64_t>(max_update_ts_, *std::max_element(ts, ts + n));
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith
