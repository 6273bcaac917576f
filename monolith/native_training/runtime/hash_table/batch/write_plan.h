// Runs write jobs: every thread takes groups of shards, and the ids of a tile that belong to them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_PLAN_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_PLAN_H_

#include <cstdint>
#include <vector>

#include "monolith/native_training/runtime/concurrency/parallel_runner.h"
#include "monolith/native_training/runtime/hash_table/batch/write_stages.h"

namespace monolith {
namespace engine {

// A job and its tiles, in the order in which occurrences of one id are applied.
struct PlannedWrite {
  WriteJob* job = nullptr;
  std::vector<WriteTile> tiles;
  bool dedup = false;
  bool count_once = false;  // with dedup

  // Cuts n ids with their values into tiles. `stride` is that of a WriteSpan.
  void AddSpan(const int64_t* ids, int64_t n, const float* values, int threads, int64_t stride = 0);
  int64_t NumIds() const;
};

// Applies all writes. With a runner the units of work are (write, group), so no row is touched by
// two threads and the result does not depend on their number.
void RunWrites(const std::vector<PlannedWrite>& writes, ParallelRunner* runner);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_BATCH_WRITE_PLAN_H_
