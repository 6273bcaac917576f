// Lookups of GPU tables.
#include <algorithm>
#include <type_traits>

#include "monolith/native_training/runtime/gpu/device_math.h"
#include "monolith/native_training/runtime/gpu/table_batches.h"
#include "monolith/native_training/runtime/gpu/table_jobs.h"

namespace monolith {
namespace gpu {
namespace {

struct IgnoreHit {
  MONO_DEVICE void operator()(TableSlot*, const TableSlot&, int) const {}
};

// Values that are read once leave no trace in the caches.
template <int kSize>
MONO_DEVICE Pack<kSize> LoadOnce(const float* from) {
#if defined(__CUDACC__)
  Pack<kSize> pack;
  if constexpr (kSize == 4) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(from));
    pack.values[0] = v.x, pack.values[1] = v.y, pack.values[2] = v.z, pack.values[3] = v.w;
  } else if constexpr (kSize == 2) {
    const float2 v = __ldcs(reinterpret_cast<const float2*>(from));
    pack.values[0] = v.x, pack.values[1] = v.y;
  } else {
    pack.values[0] = __ldcs(from);
  }
  return pack;
#else
  return *reinterpret_cast<const Pack<kSize>*>(from);
#endif
}

template <int kSize>
MONO_DEVICE void StoreOnce(const Pack<kSize>& pack, float* to) {
#if defined(__CUDACC__)
  if constexpr (kSize == 4) {
    __stcs(reinterpret_cast<float4*>(to),
           make_float4(pack.values[0], pack.values[1], pack.values[2], pack.values[3]));
  } else if constexpr (kSize == 2) {
    __stcs(reinterpret_cast<float2*>(to), make_float2(pack.values[0], pack.values[1]));
  } else {
    __stcs(to, pack.values[0]);
  }
#else
  *reinterpret_cast<Pack<kSize>*>(to) = pack;
#endif
}

// Finds the ids of a word of 32.
template <Walk kWalk>
MONO_DEVICE PerId<uint32_t> FindTask(const LookupTask& task, int64_t word, int lane) {
  PerId<int64_t> ids;
  PerId<bool> wanted;
  PerId<uint32_t> rows;
  for (int k = 0; k < kIdsPerLane; ++k) {
    const int64_t i = word * kWordIds + OwnId(lane, k);
    wanted.own[k] = i < task.n;
    ids.own[k] = i < task.n ? task.ids[i] : 0;
  }
  FindRows<kWalk>(task.index, lane, ids, wanted, IgnoreHit(), &rows);
  if (task.found != nullptr) {
    for (int k = 0; k < kIdsPerLane; ++k) {
      if (wanted.own[k]) task.found[word * kWordIds + OwnId(lane, k)] = rows.own[k] != 0;
    }
  }
  return rows;
}

// Copies rows as they are: kTile lanes take a row, kSize floats at a time.
template <int kTile, int kSize>
MONO_DEVICE void CopyFound(const LookupTask& task, int64_t word, int lane,
                           const PerId<uint32_t>& rows) {
  constexpr int kTiles = kWarpLanes / kTile;
  constexpr int kAtOnce = kWarpLanes == 1 ? 1 : 4;
  const int tile = lane / kTile;
  const int column = lane % kTile * kSize;
  for (int begin = 0; begin < kWordIds; begin += kTiles * kAtOnce) {
    uint32_t numbers[kAtOnce];
    MONO_UNROLL
    for (int u = 0; u < kAtOnce; ++u) numbers[u] = rows.Get(begin + u * kTiles + tile);
    for (int c = column; c < task.dim; c += kTile * kSize) {
      Pack<kSize> packs[kAtOnce];
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        packs[u] = LoadOnce<kSize>(
            reinterpret_cast<const float*>(task.rows + numbers[u] * task.stride) + c);
      }
      MONO_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t i = word * kWordIds + begin + u * kTiles + tile;
        if (i < task.n) StoreOnce<kSize>(packs[u], task.out + i * task.out_stride + c);
      }
    }
  }
}

// Through the retrievers, an element at a time.
template <int kTile>
MONO_DEVICE void RetrieveFound(const LookupTask& task, const RowPlan& plan, int64_t word, int lane,
                               const PerId<uint32_t>& rows) {
  for (int j = lane / kTile; j < kWordIds; j += kWarpLanes / kTile) {
    const uint32_t number = rows.Get(j);
    const int64_t i = word * kWordIds + j;
    if (i >= task.n) continue;
    const float* const from = reinterpret_cast<const float*>(task.rows + number * task.stride);
    float* const to = task.out + i * task.out_stride;
    for (int s = 0; s < plan.num_segments; ++s) {
      const SegmentPlan& segment = plan.segments[s];
      for (int e = lane % kTile; e < segment.dim; e += kTile) {
        const int at = segment.value_begin + e;
        to[at] = number == 0 ? 0.0f : Retrieved(segment, from[at]);
      }
    }
  }
}

#if defined(__CUDACC__)
constexpr int kRetrieveTile = 16;
#else
constexpr int kRetrieveTile = 1;
#endif

template <int kTile, int kSize, Walk kWalk>
struct CopyRows {
  LookupTask task;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    CopyFound<kTile, kSize>(task, word, lane, FindTask<kWalk>(task, word, lane));
  }
};

struct RetrieveRows {
  LookupTask task;
  RowPlan plan;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    RetrieveFound<kRetrieveTile>(task, plan, word, lane, FindTask<Walk::kLines>(task, word, lane));
  }
};

// Lanes that take a row of `dim` floats, `pack` at a time.
inline int TileOf(int dim, int pack) {
  int tile = 4;
  while (tile < 32 && tile * pack < dim) tile *= 2;
  return tile;
}

// -- Many tables in one launch.

constexpr int kJobsInline = 28;  // what fits into the parameters of a kernel

struct InlineTasks {
  LookupTask tasks[kJobsInline];
  int64_t begins[kJobsInline];
  int count;

  MONO_DEVICE const LookupTask& Task(int job) const { return tasks[job]; }
  MONO_DEVICE const RowPlan* Plan(int) const { return nullptr; }
};
static_assert(sizeof(InlineTasks) < 4000, "goes to kernels as a parameter");

struct UploadedTasks {
  const LookupTask* tasks;
  const int64_t* begins;
  int count;
  const char* plans;
  const int64_t* plans_at;

  MONO_DEVICE const LookupTask& Task(int job) const { return tasks[job]; }
  MONO_DEVICE const RowPlan* Plan(int job) const {
    return reinterpret_cast<const RowPlan*>(plans + plans_at[job]);
  }
};

template <int kSize>
MONO_DEVICE void CopyByTile(const LookupTask& task, int64_t word, int lane,
                            const PerId<uint32_t>& rows) {
#if defined(__CUDACC__)
  const int packs = task.dim / kSize;
  if (packs <= 4) {
    CopyFound<4, kSize>(task, word, lane, rows);
  } else if (packs <= 8) {
    CopyFound<8, kSize>(task, word, lane, rows);
  } else if (packs <= 16) {
    CopyFound<16, kSize>(task, word, lane, rows);
  } else {
    CopyFound<32, kSize>(task, word, lane, rows);
  }
#else
  CopyFound<1, 1>(task, word, lane, rows);
#endif
}

template <typename Tasks>
struct LookupMany {
  Tasks jobs;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const int job = JobAt(jobs.begins, jobs.count, word);
    const LookupTask& task = jobs.Task(job);
    const int64_t own = word - jobs.begins[job];
    const PerId<uint32_t> rows = FindTask<Walk::kLines>(task, own, lane);
    if (task.pack == 4) {
      CopyByTile<4>(task, own, lane, rows);
    } else if (task.pack == 2) {
      CopyByTile<2>(task, own, lane, rows);
    } else if (task.pack == 1) {
      CopyByTile<1>(task, own, lane, rows);
    } else if (jobs.Plan(job) != nullptr) {
      RetrieveFound<kRetrieveTile>(task, *jobs.Plan(job), own, lane, rows);
    }
  }
};

int CheckLookup(int64_t n) {
  if (n >= 0) return MONO_GPU_OK;
  return Fail(MONO_GPU_INVALID_ARGUMENT, "the number of ids is " + std::to_string(n));
}

int CheckStride(int64_t stride, int64_t dim) {
  if (stride == 0 || stride >= dim) return MONO_GPU_OK;
  return Fail(MONO_GPU_INVALID_ARGUMENT, "out_stride is " + std::to_string(stride) +
                                             ", want 0 or at least the dim, " +
                                             std::to_string(dim));
}

}  // namespace

int LaunchLookup(Stream stream, const LookupTask& task, const RowPlan& plan) {
  const int64_t words = CeilDiv(task.n, kWordIds);
  if (task.pack == 0) {
    return ForWarps<4>(stream, words, kAllBlocks, RetrieveRows{task, plan});
  }
#if defined(__CUDACC__)
  const auto copy = [&](auto tile, auto size) {
    constexpr int kTile = decltype(tile)::value, kSize = decltype(size)::value;
    if constexpr (kSize == 4) {
      if (task.n < Tuning().lookup_far_below) {
        return ForWarps<2>(stream, words, kAllBlocks, CopyRows<kTile, kSize, Walk::kFar>{task});
      }
    }
    return ForWarps < kTile <= 8
               ? 6
               : 4 > (stream, words, kAllBlocks, CopyRows<kTile, kSize, Walk::kLines>{task});
  };
  const auto with_size = [&](auto size) {
    switch (TileOf(task.dim, task.pack)) {
      case 4:
        return copy(std::integral_constant<int, 4>(), size);
      case 8:
        return copy(std::integral_constant<int, 8>(), size);
      case 16:
        return copy(std::integral_constant<int, 16>(), size);
      default:
        return copy(std::integral_constant<int, 32>(), size);
    }
  };
  switch (task.pack) {
    case 4:
      return with_size(std::integral_constant<int, 4>());
    case 2:
      return with_size(std::integral_constant<int, 2>());
    default:
      return with_size(std::integral_constant<int, 1>());
  }
#else
  return ForWarps(stream, words, kAllBlocks, CopyRows<1, 1, Walk::kLines>{task});
#endif
}

int LaunchLookups(Stream stream, const std::vector<LookupTask>& tasks,
                  const std::vector<RowPlan>& plans) {
  if (tasks.size() == 1) return LaunchLookup(stream, tasks[0], plans[0]);
  std::vector<int64_t> begins, plans_at;
  std::vector<char> plan_bytes;
  int64_t words = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    begins.push_back(words);
    words += CeilDiv(tasks[i].n, kWordIds);
    plans_at.push_back(static_cast<int64_t>(plan_bytes.size()));
    if (tasks[i].pack == 0) {
      const auto bytes = reinterpret_cast<const char*>(&plans[i]);
      plan_bytes.insert(plan_bytes.end(), bytes, bytes + UsedBytes(plans[i]));
    }
  }
  if (tasks.size() <= kJobsInline && plan_bytes.empty()) {
    LookupMany<InlineTasks> lookup = {};
    std::copy(tasks.begin(), tasks.end(), lookup.jobs.tasks);
    std::copy(begins.begin(), begins.end(), lookup.jobs.begins);
    lookup.jobs.count = static_cast<int>(tasks.size());
    return ForWarps<4>(stream, words, kAllBlocks, lookup);
  }
  Workspace workspace;
  const auto tasks_slot = workspace.Put(tasks);
  const auto begins_slot = workspace.Put(begins);
  const auto plans_slot = workspace.Put(plan_bytes);
  const auto plans_at_slot = workspace.Put(plans_at);
  UploadedJobs uploaded(stream);
  MONO_GPU_TRY(uploaded.Upload(&workspace));
  return ForWarps<4>(
      stream, words, kAllBlocks,
      LookupMany<UploadedTasks>{{workspace.At(tasks_slot), workspace.At(begins_slot),
                                 static_cast<int>(tasks.size()), workspace.At(plans_slot),
                                 workspace.At(plans_at_slot)}});
}

LookupTask GpuTable::TaskFor(const GpuLookupJob& job) const {
  const uintptr_t address = reinterpret_cast<uintptr_t>(job.out);
  const int dim = static_cast<int>(layout_.dim);
  const int64_t out_stride = job.out_stride == 0 ? dim : job.out_stride;
  int pack = 1;
  for (const int floats : {2, 4}) {
    const bool fits = dim % floats == 0 && out_stride % floats == 0 &&
                      stride_ % (4 * floats) == 0 && address % (4 * floats) == 0;
    if (fits) pack = floats;
  }
  return {View(),  arena_.base(), stride_,   job.ids, job.n,
          job.out, out_stride,    job.found, dim,     layout_.all_raw ? pack : 0};
}

// As LookupMany, without its lists: for a small batch the host takes a good part of the time.
int GpuTable::Lookup(Stream stream, const int64_t* ids, int64_t n, float* out, uint8_t* found) {
  MONO_GPU_TRY(CheckLookup(n));
  if (n == 0) return MONO_GPU_OK;
  static const RowPlan kNoPlan = {};
  const std::lock_guard<std::mutex> lock(mutex_);
  MONO_GPU_TRY(streams_.BeginRead(stream));
  const LookupTask task = TaskFor({this, ids, n, out, found, 0});
  const int code = layout_.all_raw
                       ? LaunchLookup(stream, task, kNoPlan)
                       : LaunchLookup(stream, task, PlanFor(RowMode::kOptimize, last_global_step_));
  MONO_GPU_TRY(streams_.EndRead(stream));
  return code;
}

int GpuTable::LookupMany(Stream stream, const GpuLookupJob* jobs, int64_t num_jobs) {
  std::vector<GpuTable*> tables;
  for (int64_t i = 0; i < num_jobs; ++i) {
    MONO_GPU_TRY(CheckLookup(jobs[i].n));
    MONO_GPU_TRY(CheckStride(jobs[i].out_stride, jobs[i].table->dim()));
    if (jobs[i].n > 0) tables.push_back(jobs[i].table);
  }
  if (tables.empty()) return MONO_GPU_OK;
  const TableLocks locks(std::move(tables));
  MONO_GPU_TRY(locks.CheckDevice());
  for (GpuTable* const table : locks.tables()) {
    MONO_GPU_TRY(table->streams_.BeginRead(stream));
  }
  std::vector<LookupTask> tasks;
  std::vector<RowPlan> plans;
  for (int64_t i = 0; i < num_jobs; ++i) {
    if (jobs[i].n == 0) continue;
    const GpuTable& table = *jobs[i].table;
    tasks.push_back(table.TaskFor(jobs[i]));
    plans.push_back(table.layout_.all_raw
                        ? RowPlan()
                        : table.PlanFor(RowMode::kOptimize, table.last_global_step_));
  }
  const int code = LaunchLookups(stream, tasks, plans);
  for (GpuTable* const table : locks.tables()) MONO_GPU_TRY(table->streams_.EndRead(stream));
  return code;
}

}  // namespace gpu
}  // namespace monolith
