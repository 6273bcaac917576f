// Describes a write of a GPU table, and holds the locks of several tables.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_BATCHES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_BATCHES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/gpu/table_kernels.h"

namespace monolith {
namespace gpu {

struct GpuTable::Job {
  RowPlan plan;
  // Where the ids and their source are in several places; else empty.
  std::vector<const GpuOptimizeJob*> spans;
  const int64_t* ids = nullptr;
  int64_t n = 0;
  FloatRows source;
  int64_t source_floats = 0;
  uint32_t ts = 0;
  int64_t global_step = -1;  // -1: the table's stays
  const uint32_t* load_ts = nullptr;
  int32_t* existed = nullptr;
  Duplicates duplicates = Duplicates::kNone;
  NotFinite not_finite = NotFinite::kWrite;
  engine::OccurrenceFilter* filter = nullptr;
  const ChanceFilter* chance = nullptr;
};

class GpuTable::TableLocks {
 public:
  // Tables may come more than once.
  explicit TableLocks(std::vector<GpuTable*> tables) : tables_(std::move(tables)) {
    std::sort(tables_.begin(), tables_.end(), std::less<GpuTable*>());
    tables_.erase(std::unique(tables_.begin(), tables_.end()), tables_.end());
    for (GpuTable* const table : tables_) locks_.emplace_back(table->mutex_);
  }

  // Every table once.
  const std::vector<GpuTable*>& tables() const { return tables_; }

  int CheckDevice() const {
    for (const GpuTable* const table : tables_) {
      const int device = table->streams_.device(), first = tables_[0]->streams_.device();
      if (device == first) continue;
      return Fail(MONO_GPU_INVALID_ARGUMENT, "tables of devices " + std::to_string(first) +
                                                 " and " + std::to_string(device) + " in one call");
    }
    return MONO_GPU_OK;
  }

 private:
  std::vector<GpuTable*> tables_;
  std::vector<std::unique_lock<std::mutex>> locks_;
};

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_GPU_TABLE_BATCHES_H_
