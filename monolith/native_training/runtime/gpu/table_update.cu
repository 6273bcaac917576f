// The first half of a write: finds the ids of a batch and steps the rows that are there.
#include "monolith/native_training/runtime/gpu/table_kinds.h"

namespace monolith {
namespace gpu {
namespace {

template <typename Rows, Walk kWalk>
MONO_DEVICE void UpdateWord(const WriteArguments& a, const typename Rows::Plan& plan, int64_t word,
                            int lane) {
  PerId<int64_t> ids;
  PerId<uint32_t> rows;
  if (std::is_same<typename Rows::Plan, RowPlan>::value) {
    FindBatch<kWalk>(a, word, lane, SetTime{a, word * kWordIds}, &ids, &rows);
  } else {
    FindBatch<kWalk>(a, word, lane, SetSameTime{a, word * kWordIds}, &ids, &rows);
  }
  Rows::Step(a, plan, word, lane, ids, rows);
}

template <typename Rows, Walk kWalk>
struct UpdateOne {
  WriteArguments a;
  typename Rows::Plan plan;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    UpdateWord<Rows, kWalk>(a, plan, word, lane);
  }
};

template <typename Rows, Walk kWalk>
struct UpdateMany {
  DeviceTasks jobs;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const int job = JobAt(jobs.begins, jobs.count, word);
    const DeviceTask& task = jobs.tasks[job];
    const auto plan = reinterpret_cast<const typename Rows::Plan*>(jobs.plans + task.plan_at);
    UpdateWord<Rows, kWalk>(task.a, *plan, word - jobs.begins[job], lane);
  }
};

#if defined(__CUDACC__)

template <int kTile>
int UpdateTask(Stream stream, const WriteTask& task, AnyRows<kTile>) {
  return ForWarps<AnyRows<kTile>::kMinBlocks>(
      stream, CeilDiv(task.arguments.batch.n, kWordIds), kAllBlocks,
      UpdateOne<AnyRows<kTile>, Walk::kLines>{task.arguments, task.plan});
}

template <int kTile, bool kInParts, bool kSum, typename Rule>
int UpdateTask(Stream stream, const WriteTask& task, PackedRows<kTile, kInParts, kSum, Rule>) {
  using Rows = PackedRows<kTile, kInParts, kSum, Rule>;
  const int64_t n = task.arguments.batch.n, words = CeilDiv(n, kWordIds);
  if (n < Tuning().update_far_below) {
    return ForWarps<2>(stream, words, kAllBlocks,
                       UpdateOne<Rows, Walk::kFar>{task.arguments, Rows::PlanOf(task.plan)});
  }
  return ForWarps<Rows::kMinBlocks>(
      stream, words, kAllBlocks,
      UpdateOne<Rows, Walk::kLines>{task.arguments, Rows::PlanOf(task.plan)});
}

#else

int UpdateTask(Stream stream, const WriteTask& task, AnyRows<1>) {
  return ForWarps(stream, CeilDiv(task.arguments.batch.n, kWordIds), kAllBlocks,
                  UpdateOne<AnyRows<1>, Walk::kLines>{task.arguments, task.plan});
}

#endif

}  // namespace

TableTuning& Tuning() {
  static TableTuning tuning;
  return tuning;
}

bool SumsGradients(const RowPlan& plan, int64_t stride, const FloatRows& source) {
#if defined(__CUDACC__)
  const SegmentPlan& segment = plan.segments[0];
  return plan.mode == RowMode::kOptimize && plan.num_segments == 1 && plan.dim % 4 == 0 &&
         stride % 16 == 0 && source.InFours() &&
         (segment.flags & (SegmentPlan::kRounded | SegmentPlan::kDecoupled)) == 0 &&
         segment.retriever != engine::RetrieverKind::kHashNet &&
         (segment.optimizer == engine::OptimizerKind::kAdagrad ||
          segment.optimizer == engine::OptimizerKind::kSgd);
#else
  (void)plan, (void)stride, (void)source;
  return false;
#endif
}

int LaunchUpdates(Stream stream, const std::vector<WriteTask>& tasks, WriteUploads* uploads) {
  return ForKinds(tasks, [&](auto kind, const std::vector<const WriteTask*>& alike) {
    using Rows = decltype(kind);
    if (alike.size() == 1) return UpdateTask(stream, *alike[0], kind);
    const WriteUploads::Kind* uploaded = nullptr;
    MONO_GPU_TRY(UploadTasks<Rows>(alike, uploads, &uploaded));
    if constexpr (!std::is_same<typename Rows::Plan, RowPlan>::value) {
      if (uploaded->words * kWordIds < Tuning().update_far_below) {
        return ForWarps<2>(stream, uploaded->words, kAllBlocks,
                           UpdateMany<Rows, Walk::kFar>{uploaded->by_word});
      }
    }
    return ForWarps<Rows::kMinBlocks>(stream, uploaded->words, kAllBlocks,
                                      UpdateMany<Rows, Walk::kLines>{uploaded->by_word});
  });
}

}  // namespace gpu
}  // namespace monolith
