// The first half of a write: finds the ids of a batch and steps the rows that are there.
#include "monolith/native_training/runtime/gpu/table_write.h"

namespace monolith {
namespace gpu {
namespace {

template <typename Rows>
MONO_DEVICE void UpdateWord(const WriteArguments& a, const typename Rows::Plan& plan, int64_t word,
                            int lane) {
  PerId<int64_t> ids;
  PerId<uint32_t> rows;
  if (std::is_same<typename Rows::Plan, RowPlan>::value) {
    FindBatch(a, word, lane, SetTime{a, word * kWordIds}, &ids, &rows);
  } else {
    FindBatch(a, word, lane, SetSameTime{a.ts}, &ids, &rows);
  }
  Rows::Step(a, plan, word, lane, ids, rows);
}

template <typename Rows>
struct UpdateOne {
  WriteArguments a;
  typename Rows::Plan plan;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    UpdateWord<Rows>(a, plan, word, lane);
  }
};

template <typename Rows>
struct UpdateMany {
  DeviceTasks jobs;

  MONO_DEVICE void operator()(int64_t word, int lane) const {
    const int job = JobAt(jobs.begins, jobs.count, word);
    const DeviceTask& task = jobs.tasks[job];
    const auto plan = reinterpret_cast<const typename Rows::Plan*>(jobs.plans + task.plan_at);
    UpdateWord<Rows>(task.a, *plan, word - jobs.begins[job], lane);
  }
};

}  // namespace

bool SumsGradients(const RowPlan& plan, int64_t stride, const float* source) {
#if defined(__CUDACC__)
  const SegmentPlan& segment = plan.segments[0];
  return plan.mode == RowMode::kOptimize && plan.num_segments == 1 && plan.dim % 4 == 0 &&
         stride % 16 == 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0 &&
         (segment.flags & (SegmentPlan::kRounded | SegmentPlan::kDecoupled)) == 0 &&
         segment.retriever != engine::RetrieverKind::kHashNet &&
         (segment.optimizer == engine::OptimizerKind::kAdagrad ||
          segment.optimizer == engine::OptimizerKind::kSgd);
#else
  (void)plan, (void)stride, (void)source;
  return false;
#endif
}

int LaunchUpdates(Stream stream, const std::vector<WriteTask>& tasks) {
  return ForKinds(tasks, [&](auto kind, const std::vector<const WriteTask*>& alike) {
    using Rows = decltype(kind);
    const auto words_of = [](const WriteTask* task) {
      return CeilDiv(task->arguments.batch.n, kWordIds);
    };
    if (alike.size() == 1) {
      return ForWarps<Rows::kMinBlocks>(
          stream, words_of(alike[0]), kAllBlocks,
          UpdateOne<Rows>{alike[0]->arguments, Rows::PlanOf(alike[0]->plan)});
    }
    std::vector<int64_t> words;
    for (const WriteTask* const task : alike) words.push_back(words_of(task));
    UploadedJobs uploaded(stream);
    DeviceTasks device;
    int64_t all = 0;
    MONO_GPU_TRY(UploadTasks<Rows>(alike, words, &uploaded, &device, &all));
    return ForWarps<Rows::kMinBlocks>(stream, all, kAllBlocks, UpdateMany<Rows>{device});
  });
}

}  // namespace gpu
}  // namespace monolith
