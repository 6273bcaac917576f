// Sorts the tasks of a write by the kind of their rows: those of one kind go through one launch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KINDS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KINDS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "monolith/native_training/runtime/gpu/table_jobs.h"
#include "monolith/native_training/runtime/gpu/table_write.h"

namespace monolith {
namespace gpu {

#if defined(__CUDACC__)
template <typename T>
struct TypeOf {
  using type = T;
};

inline bool IsPacked(const WriteTask& task) {
  const Batch& batch = task.arguments.batch;
  return SumsGradients(task.plan, task.arguments.stride, task.arguments.source) &&
         (batch.starts == nullptr || batch.sum);
}
#endif

// A number for it, so that tasks alike go into one launch.
inline int KindOf(const WriteTask& task) {
#if defined(__CUDACC__)
  const int dim = task.plan.dim;
  if (IsPacked(task)) {
    const int tile = dim <= 16 ? 0 : dim <= 32 ? 1 : dim <= 64 ? 2 : dim <= 128 ? 3 : 4;
    const bool adagrad = task.plan.segments[0].optimizer == engine::OptimizerKind::kAdagrad;
    const bool sum = task.arguments.batch.starts != nullptr;
    return 4 + tile + (adagrad ? 0 : 5) + (sum ? 10 : 0);
  }
  return dim <= 4 ? 0 : dim <= 8 ? 1 : dim <= 16 ? 2 : 3;
#else
  (void)task;
  return 0;
#endif
}

// Calls launch(Rows()) with the kind of this number.
template <typename Launch>
int WithKind(int kind, const Launch& launch) {
#if defined(__CUDACC__)
  const auto packed = [&](auto sum, auto rule) {
    constexpr bool kSum = decltype(sum)::value;
    using Rule = typename decltype(rule)::type;
    switch ((kind - 4) % 5) {
      case 0:
        return launch(PackedRows<4, false, kSum, Rule>());
      case 1:
        return launch(PackedRows<8, false, kSum, Rule>());
      case 2:
        return launch(PackedRows<16, false, kSum, Rule>());
      case 3:
        return launch(PackedRows<32, false, kSum, Rule>());
      default:
        return launch(PackedRows<32, true, kSum, Rule>());
    }
  };
  if (kind < 4) {
    switch (kind) {
      case 0:
        return launch(AnyRows<4>());
      case 1:
        return launch(AnyRows<8>());
      case 2:
        return launch(AnyRows<16>());
      default:
        return launch(AnyRows<32>());
    }
  }
  const bool sgd = (kind - 4) / 5 % 2 != 0;
  if ((kind - 4) / 10 != 0) {
    return sgd ? packed(std::true_type(), TypeOf<PackedSgd>())
               : packed(std::true_type(), TypeOf<PackedAdagrad>());
  }
  return sgd ? packed(std::false_type(), TypeOf<PackedSgd>())
             : packed(std::false_type(), TypeOf<PackedAdagrad>());
#else
  (void)kind;
  return launch(AnyRows<1>());
#endif
}

// A task on the device, with the part of the plan that its kernels read.
struct DeviceTask {
  WriteArguments a;
  int64_t plan_at;
  PublishedState* host;
  uint64_t sequence;
  int64_t words;
};

// Blocks of an insert of one of `tasks` that are launched together: often none of them has anything
// to do.
inline int64_t InsertBlocks(const WriteTask& task, size_t tasks) {
  const int64_t most = std::max<int64_t>(1, kFewBlocks / static_cast<int64_t>(tasks));
  return std::min(CeilDiv(CeilDiv(task.arguments.batch.n, kWordIds), kLanes / kWarpLanes), most);
}

// Uploads tasks, all of one kind, unless they are there.
template <typename Rows>
int UploadTasks(const std::vector<const WriteTask*>& tasks, WriteUploads* uploads,
                const WriteUploads::Kind** result) {
  const int kind = KindOf(*tasks[0]);
  *result = uploads->Find(kind);
  if (*result != nullptr) return MONO_GPU_OK;
  WriteUploads::Kind* const made = uploads->Add(kind);
  std::vector<DeviceTask> device;
  std::vector<int64_t> words, blocks;
  std::vector<char> plans;
  for (const WriteTask* const task : tasks) {
    device.push_back({task->arguments, static_cast<int64_t>(plans.size()), task->host,
                      task->sequence, CeilDiv(task->arguments.batch.n, kWordIds)});
    words.push_back(made->words);
    made->words += device.back().words;
    blocks.push_back(made->blocks);
    made->blocks += InsertBlocks(*task, tasks.size());
    const typename Rows::Plan& plan = Rows::PlanOf(task->plan);
    const size_t at = plans.size();
    const int64_t bytes = Rows::PlanBytes(task->plan);
    plans.resize(at + CeilDiv(bytes, 8) * 8);
    std::memcpy(plans.data() + at, &plan, static_cast<size_t>(bytes));
  }
  Workspace workspace;
  const auto tasks_slot = workspace.Put(device);
  const auto words_slot = workspace.Put(words);
  const auto blocks_slot = workspace.Put(blocks);
  const auto plans_slot = workspace.Put(plans);
  MONO_GPU_TRY(made->jobs.Upload(&workspace));
  made->by_word = {workspace.At(tasks_slot), workspace.At(words_slot),
                   static_cast<int>(tasks.size()), workspace.At(plans_slot)};
  made->by_block = made->by_word;
  made->by_block.begins = workspace.At(blocks_slot);
  *result = made;
  return MONO_GPU_OK;
}

// Calls launch(Rows(), tasks of that kind) for every kind that comes.
template <typename Launch>
int ForKinds(const std::vector<WriteTask>& tasks, const Launch& launch) {
  uint64_t done = 0;
  for (const WriteTask& task : tasks) {
    const int kind = KindOf(task);
    if (done >> kind & 1) continue;
    done |= uint64_t{1} << kind;
    std::vector<const WriteTask*> alike;
    for (const WriteTask& other : tasks) {
      if (KindOf(other) == kind) alike.push_back(&other);
    }
    MONO_GPU_TRY(WithKind(kind, [&](auto rows) { return launch(rows, alike); }));
  }
  return MONO_GPU_OK;
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_KINDS_H_
