// The second half of a write: numbers the absent ids, makes their rows and puts them into the
// index.
#include <algorithm>

#include "monolith/native_training/runtime/gpu/table_kinds.h"

namespace monolith {
namespace gpu {
namespace {

// Number of the row for the absent id of this rank: rows that were freed first, then new ones.
MONO_DEVICE uint32_t NewRow(const WriteArguments& a, uint64_t rank) {
  const TableState& state = *a.index.state;
  if (rank < state.free_before) return a.free_stack[state.free_before - 1 - rank];
  return static_cast<uint32_t>(state.next_before + rank - state.free_before);
}

MONO_DEVICE int BitCount(uint32_t bits) {
#if defined(__CUDACC__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Counts what the lanes of a block insert: they would fight for 64 counters of the whole table.
struct InsertCounts {
  uint32_t live[kTableShards];
  uint32_t reused[kTableShards];  // slots that were erased
};

MONO_DEVICE void AddOne(uint32_t* counter) {
#if defined(__CUDACC__)
  atomicAdd(counter, 1u);
#else
  ++*counter;
#endif
}

MONO_DEVICE void InsertOrSpill(const IndexView& index, int64_t id, uint32_t row, uint32_t ts,
                               InsertCounts* counts) {
  const uint64_t hash = index.hash(id);
  const int shard = ShardOfHash(hash);
  bool took_erased = false;
  if (InsertSlot(index.shards[shard], hash, id, row, ts, &took_erased)) {
    if (took_erased) AddOne(counts->reused + shard);
  } else {
    SpillSlot(index.spill, index.spill_capacity, index.state, {id, row, ts});
  }
  AddOne(counts->live + shard);
}

// The absent ids of one word: rows, places in the index, first steps.
template <typename Rows>
MONO_DEVICE void InsertWord(const WriteArguments& a, const typename Rows::Plan& plan, int64_t word,
                            int lane, InsertCounts* counts) {
  constexpr int kTile = Rows::kTile;
  const uint32_t bits = a.absent[word];
  if (bits == 0) return;
  PerId<int64_t> ids;
  PerId<bool> wanted;
  LoadBatch(a.batch, word, lane, &ids, &wanted);
  PerId<uint32_t> rows;
  const uint64_t base = a.prefix[word];
  for (int k = 0; k < kIdsPerLane; ++k) {
    const int j = OwnId(lane, k);
    rows.own[k] = 0;
    if ((bits >> j & 1) == 0) continue;
    rows.own[k] = NewRow(a, base + BitCount(bits & ((1u << j) - 1)));
    InsertOrSpill(a.index, ids.own[k], rows.own[k], TimeOf(a, word * kWordIds + j), counts);
  }
#if defined(__CUDACC__)
  __syncwarp();
#endif
  for (int j = lane / kTile; j < kWordIds; j += kWarpLanes / kTile) {
    const uint32_t row = rows.Get(j);
    const int64_t id = ids.Get(j);
    if (row == 0) continue;
    Rows::Fill(a, plan, word * kWordIds + j, id, lane,
               reinterpret_cast<float*>(a.rows + row * a.stride));
  }
}

#if defined(__CUDACC__)

// The blocks [0, blocks) of one task; the last to end hands the state to the host.
template <typename Rows>
__device__ __forceinline__ void InsertBlock(const WriteArguments& a,
                                            const typename Rows::Plan& plan, int64_t words,
                                            unsigned block, unsigned blocks, PublishedState* host,
                                            uint64_t sequence) {
  __shared__ InsertCounts counts;
  __shared__ bool last;
  TableState* const state = a.index.state;
  if (state->any_absent != 0) {
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(counts) / 4); i += kLanes) {
      reinterpret_cast<uint32_t*>(&counts)[i] = 0;
    }
    __syncthreads();
    const int64_t warps = static_cast<int64_t>(blocks) * (kLanes / kWarpLanes);
    for (int64_t word =
             static_cast<int64_t>(block) * (kLanes / kWarpLanes) + threadIdx.x / kWarpLanes;
         word < words; word += warps) {
      InsertWord<Rows>(a, plan, word, threadIdx.x % kWarpLanes, &counts);
    }
    __syncthreads();
    if (threadIdx.x < kTableShards) {
      const int s = threadIdx.x;
      if (counts.live[s] != 0) AtomicAdd(&state->live[s], static_cast<int64_t>(counts.live[s]));
      if (counts.reused[s] != 0) {
        AtomicAdd(&state->erased[s], -static_cast<int64_t>(counts.reused[s]));
      }
      __threadfence();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&state->blocks_done, 1u) == blocks - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) {
    state->any_absent = 0;
    state->blocks_done = 0;
  }
  __syncthreads();
  const auto from = reinterpret_cast<const unsigned long long*>(state);
  const auto to = reinterpret_cast<unsigned long long*>(&host->state);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(TableState) / 8); i += kLanes) {
    to[i] = __ldcg(from + i);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    *static_cast<volatile unsigned long long*>(
        reinterpret_cast<unsigned long long*>(&host->sequence)) = sequence;
  }
}

template <typename Rows>
struct InsertParameters {
  WriteArguments a;
  typename Rows::Plan plan;
  int64_t words;
  PublishedState* host;
  uint64_t sequence;
};

template <typename Rows>
__global__ void __launch_bounds__(kLanes, 2)
    InsertKernel(__grid_constant__ const InsertParameters<Rows> p) {
  InsertBlock<Rows>(p.a, p.plan, p.words, blockIdx.x, gridDim.x, p.host, p.sequence);
}

template <typename Rows>
__global__ void __launch_bounds__(kLanes, 2)
    InsertManyKernel(__grid_constant__ const DeviceTasks jobs, int64_t all) {
  const int job = JobAt(jobs.begins, jobs.count, blockIdx.x);
  const DeviceTask& task = jobs.tasks[job];
  const int64_t begin = jobs.begins[job];
  const int64_t end = job + 1 < jobs.count ? jobs.begins[job + 1] : all;
  const auto plan = reinterpret_cast<const typename Rows::Plan*>(jobs.plans + task.plan_at);
  InsertBlock<Rows>(task.a, *plan, task.words, static_cast<unsigned>(blockIdx.x - begin),
                    static_cast<unsigned>(end - begin), task.host, task.sequence);
}

// All tasks have rows of one kind.
template <typename Rows>
int InsertAlike(Stream stream, const std::vector<const WriteTask*>& tasks, WriteUploads* uploads) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (tasks.size() == 1) {
    const WriteTask& task = *tasks[0];
    InsertKernel<Rows><<<static_cast<unsigned>(InsertBlocks(task, 1)), kLanes, 0, on>>>(
        {task.arguments, Rows::PlanOf(task.plan), CeilDiv(task.arguments.batch.n, kWordIds),
         task.host, task.sequence});
    return CheckCuda(cudaGetLastError(), "launch of a kernel");
  }
  const WriteUploads::Kind* uploaded = nullptr;
  MONO_GPU_TRY(UploadTasks<Rows>(tasks, uploads, &uploaded));
  InsertManyKernel<Rows><<<static_cast<unsigned>(uploaded->blocks), kLanes, 0, on>>>(
      uploaded->by_block, uploaded->blocks);
  return CheckCuda(cudaGetLastError(), "launch of a kernel");
}

#else

template <typename Rows>
int InsertAlike(Stream, const std::vector<const WriteTask*>& tasks, WriteUploads*) {
  for (const WriteTask* const task : tasks) {
    const WriteArguments& a = task->arguments;
    InsertCounts counts = {};
    TableState* const state = a.index.state;
    for (int64_t word = 0; word < CeilDiv(a.batch.n, kWordIds); ++word) {
      InsertWord<Rows>(a, task->plan, word, 0, &counts);
    }
    for (int s = 0; s < kTableShards; ++s) {
      state->live[s] += counts.live[s];
      state->erased[s] -= counts.reused[s];
    }
    state->any_absent = 0;
    *task->host = {*state, task->sequence};
  }
  return MONO_GPU_OK;
}

#endif

// Numbers the bits of words, and the rows of those ids if there is a state.
struct ScanTask {
  const uint32_t* words;
  int64_t num_words;
  uint32_t* prefix;
  uint32_t* total;    // or null
  TableState* state;  // or null
};

MONO_DEVICE void TakeRows(uint32_t count, TableState* state) {
  const uint64_t from_free = count < state->free_rows ? count : state->free_rows;
  state->new_ids = count;
  state->free_before = state->free_rows;
  state->next_before = state->next_row;
  state->free_rows -= from_free;
  state->next_row += count - from_free;
}

#if defined(__CUDACC__)

constexpr int kScanThreads = 1024;
constexpr int kScanWords = 32;  // of a thread

// One block: there are few words, and what follows needs the total at once.
__device__ __forceinline__ void ScanBlock(const ScanTask& task) {
  __shared__ uint32_t warp_sums[kScanThreads / 32];
  __shared__ uint32_t carry;
  if (task.state != nullptr && task.state->any_absent == 0) {
    if (threadIdx.x == 0) task.state->new_ids = 0;
    return;
  }
  const int64_t num_words = task.num_words;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t begin = 0; begin < num_words; begin += kScanThreads * kScanWords) {
    const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * kScanWords;
    uint32_t sum = 0;
    for (int i = 0; i < kScanWords; ++i) {
      if (first + i < num_words) sum += __popc(task.words[first + i]);
    }
    uint32_t inclusive = sum;
    for (int width = 1; width < 32; width *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, width);
      if (lane >= width) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
      uint32_t value = warp_sums[lane];
      for (int width = 1; width < 32; width *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, value, width);
        if (lane >= width) value += other;
      }
      warp_sums[lane] = value;
    }
    __syncthreads();
    uint32_t before = carry + inclusive - sum + (warp == 0 ? 0 : warp_sums[warp - 1]);
    for (int i = 0; i < kScanWords; ++i) {
      if (first + i >= num_words) break;
      task.prefix[first + i] = before;
      before += __popc(task.words[first + i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) carry += warp_sums[kScanThreads / 32 - 1];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (task.total != nullptr) *task.total = carry;
  if (task.state != nullptr) TakeRows(carry, task.state);
}

constexpr int kScansAtOnce = 64;  // what fits into the parameters of a kernel
struct ScanTasks {
  ScanTask tasks[kScansAtOnce];
};

__global__ void __launch_bounds__(kScanThreads) ScanKernel(__grid_constant__ const ScanTask task) {
  ScanBlock(task);
}

__global__ void __launch_bounds__(kScanThreads)
    ScanManyKernel(__grid_constant__ const ScanTasks tasks) {
  ScanBlock(tasks.tasks[blockIdx.x]);
}

int Scan(Stream stream, const std::vector<ScanTask>& tasks) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (tasks.size() == 1) {
    ScanKernel<<<1, kScanThreads, 0, on>>>(tasks[0]);
    return CheckCuda(cudaGetLastError(), "launch of a scan");
  }
  for (size_t begin = 0; begin < tasks.size(); begin += kScansAtOnce) {
    const size_t count = std::min<size_t>(kScansAtOnce, tasks.size() - begin);
    ScanTasks some = {};
    std::copy(tasks.begin() + begin, tasks.begin() + begin + count, some.tasks);
    ScanManyKernel<<<static_cast<unsigned>(count), kScanThreads, 0, on>>>(some);
    MONO_GPU_TRY(CheckCuda(cudaGetLastError(), "launch of a scan"));
  }
  return MONO_GPU_OK;
}

#else

int Scan(Stream, const std::vector<ScanTask>& tasks) {
  for (const ScanTask& task : tasks) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < task.num_words; ++i) {
      task.prefix[i] = sum;
      sum += BitCount(task.words[i]);
    }
    if (task.total != nullptr) *task.total = sum;
    if (task.state != nullptr) TakeRows(sum, task.state);
  }
  return MONO_GPU_OK;
}

#endif

struct CountAbsent {
  IndexView index;
  Batch batch;
  uint64_t* counts;

  MONO_DEVICE void operator()(int64_t i) const {
    if (i >= CountOf(batch) || FindSlot(index, batch.ids[i]) != nullptr) return;
    AtomicAdd(counts + ShardOfHash(index.hash(batch.ids[i])), uint64_t{1});
  }
};

}  // namespace

int ScanBits(Stream stream, const uint32_t* words, int64_t num_words, uint32_t* prefix,
             uint32_t* total) {
  return Scan(stream, {{words, num_words, prefix, total, nullptr}});
}

int LaunchInserts(Stream stream, const std::vector<WriteTask>& tasks, WriteUploads* uploads) {
  std::vector<ScanTask> scans;
  for (const WriteTask& task : tasks) {
    const WriteArguments& a = task.arguments;
    scans.push_back({a.absent, CeilDiv(a.batch.n, kWordIds), a.prefix, nullptr, a.index.state});
  }
  MONO_GPU_TRY(Scan(stream, scans));
  return ForKinds(tasks, [&](auto kind, const std::vector<const WriteTask*>& alike) {
    return InsertAlike<decltype(kind)>(stream, alike, uploads);
  });
}

int LaunchCountAbsent(Stream stream, const IndexView& index, const Batch& batch, uint64_t* counts) {
  MONO_GPU_TRY(FillBytes(stream, counts, 0, kTableShards * static_cast<int64_t>(sizeof(*counts))));
  return ForEach(stream, batch.n, CountAbsent{index, batch, counts});
}

}  // namespace gpu
}  // namespace monolith
