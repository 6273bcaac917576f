// Gradients of 16 bits, and such with gaps between them, step a GPU table as the same numbers do in
// 32 bits without gaps. Needs no test library.
#ifndef MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_GRADIENTS_H_
#define MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_GRADIENTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/base/half_float.h"
#include "tests/native_training/runtime/gpu/table_properties.h"

namespace monolith {
namespace gpu {

// Gradients as a job may have them, and the same as plain floats.
struct TypedGradients {
  std::unique_ptr<Array<char>> stored;
  std::vector<float> floats;

  TypedGradients(int64_t n, int64_t dim, int64_t stride, int32_t type, bool with_bad,
                 std::mt19937* random) {
    const int64_t size = type == MONO_GPU_FLOAT32 ? 4 : 2;
    std::vector<char> bytes(static_cast<size_t>(std::max<int64_t>(n * stride * size, 1)), 0x7f);
    for (int64_t i = 0; i < n * dim; ++i) {
      float value = static_cast<float>((*random)() % 1000) / 1000 - 0.5f;
      if (with_bad && i == 3 * dim) value = std::numeric_limits<float>::infinity();
      uint32_t bits = engine::FloatBits(value);
      if (type == MONO_GPU_FLOAT16) {
        // That conversion has no infinity.
        bits = with_bad && i == 3 * dim ? 0x7c00u : engine::FloatToHalf(value);
        value = engine::HalfToFloat(static_cast<uint16_t>(bits));
      } else if (type == MONO_GPU_BFLOAT16) {
        bits >>= 16;
        value = engine::BitsFloat(bits << 16);
      }
      floats.push_back(value);
      // The first bytes of a little-endian number.
      std::memcpy(bytes.data() + (i / dim * stride + i % dim) * size, &bits, size);
    }
    stored = std::make_unique<Array<char>>(bytes);
  }
};

inline std::string GradientsOfAnyTypeStepAlike(engine::OptimizerKind kind, int64_t dim) {
  using engine::OptimizerKind;
  std::mt19937 random(static_cast<uint32_t>(dim) * 31 + static_cast<uint32_t>(kind));
  // Two tables, so that they go through launches of many, and one after them.
  constexpr int kTables = 3;
  TablePointer typed[kTables], plain[kTables];
  for (int t = 0; t < kTables; ++t) {
    MONO_DIFF_CALL(CreateTable(OneSegment(dim, kind), &typed[t]));
    MONO_DIFF_CALL(CreateTable(OneSegment(dim, kind), &plain[t]));
  }
  const float rate = 0.1f;
  int step = 0;
  for (const int32_t type : {MONO_GPU_FLOAT32, MONO_GPU_FLOAT16, MONO_GPU_BFLOAT16}) {
    for (const int64_t gap : {0, 4, 3}) {
      // Packed gradients and others: `plain` has no gaps.
      if (IsSanitized() && (type == MONO_GPU_FLOAT32   ? gap == 0
                            : type == MONO_GPU_FLOAT16 ? gap != 0
                                                       : gap != 4)) {
        continue;
      }
      for (const int32_t duplicates :
           {MONO_GPU_SUM_GRADIENTS, MONO_GPU_STEP_FOR_EACH, MONO_GPU_IDS_ARE_DISTINCT}) {
        MonoGpuWriteOptions options = {};
        options.learning_rates = &rate;
        options.num_learning_rates = 1;
        options.global_step = step++;
        options.duplicates = duplicates;
        const bool with_bad = step % 4 == 0;
        std::vector<std::unique_ptr<Array<int64_t>>> ids;
        std::vector<TypedGradients> gradients;
        std::vector<MonoGpuOptimizeJob> jobs;
        for (int t = 0; t < kTables; ++t) {
          const int64_t n = 100 + 60 * t;
          std::vector<int64_t> some(n);
          for (int64_t i = 0; i < n; ++i) {
            // One comes often, many once or a few times.
            some[i] = duplicates == MONO_GPU_IDS_ARE_DISTINCT ? i
                      : i % 2 == 0                            ? 7
                                                              : static_cast<int64_t>(random() % 60);
          }
          ids.push_back(std::make_unique<Array<int64_t>>(some));
          gradients.emplace_back(n, dim, dim + gap, type, with_bad, &random);
          jobs.push_back({typed[t].get(), ids[t]->data(), n, gradients[t].stored->data(), &options,
                          gap == 0 ? 0 : dim + gap, type, 0});
        }
        MONO_DIFF_CALL(mono_gpu_table_optimize_many(nullptr, jobs.data(), kTables - 1));
        MONO_DIFF_CALL(mono_gpu_table_optimize_many(nullptr, jobs.data() + kTables - 1, 1));
        for (int t = 0; t < kTables; ++t) {
          Array<float> floats(gradients[t].floats);
          MONO_DIFF_CALL(mono_gpu_table_optimize(plain[t].get(), nullptr, ids[t]->data(), jobs[t].n,
                                                 floats.data(), &options));
          const int told = with_bad ? MONO_GPU_REFUSED : MONO_GPU_OK;
          for (MonoGpuTable* const table : {typed[t].get(), plain[t].get()}) {
            MONO_DIFF_CHECK(mono_gpu_table_check(table) == told, "what is not finite is told");
          }
          if (IsSanitized() && duplicates != MONO_GPU_IDS_ARE_DISTINCT) continue;
          std::vector<int64_t> looked;
          for (int64_t i = 0; i < 300; ++i) looked.push_back(i);
          std::vector<std::string> first, second;
          std::vector<uint32_t> first_rows, second_rows;
          std::string error = Dump(typed[t].get(), looked, &first, &first_rows);
          if (error.empty()) error = Dump(plain[t].get(), looked, &second, &second_rows);
          if (!error.empty()) return error;
          MONO_DIFF_CHECK(first == second && first_rows == second_rows,
                          "optimizer " + std::to_string(static_cast<int>(kind)) + ", dim " +
                              std::to_string(dim) + ", type " + std::to_string(type) + ", gap " +
                              std::to_string(gap) + ", duplicates " + std::to_string(duplicates) +
                              ", table " + std::to_string(t));
        }
      }
    }
  }
  return "";
}

struct NamedOptimizer {
  const char* name;
  engine::OptimizerKind kind;
};

// Sanitized: the two that have kernels of their own, which take turns with those of any optimizer.
inline std::vector<NamedOptimizer> OptimizersWithGradients() {
  using engine::OptimizerKind;
  const std::vector<NamedOptimizer> first = {{"sgd", OptimizerKind::kSgd},
                                             {"adagrad", OptimizerKind::kAdagrad}};
  std::vector<NamedOptimizer> all = first;
  const NamedOptimizer others[] = {
      {"adadelta", OptimizerKind::kAdadelta}, {"adam", OptimizerKind::kAdam},
      {"amsgrad", OptimizerKind::kAmsgrad},   {"momentum", OptimizerKind::kMomentum},
      {"ftrl", OptimizerKind::kFtrl},         {"group_adagrad", OptimizerKind::kGroupAdagrad},
      {"rmsprop", OptimizerKind::kRmsprop}};
  all.insert(all.end(), std::begin(others), std::end(others));
  return Sized(all, first);
}

// In each number of lanes of a row.
inline std::string GradientsOfAnyTypeStepAlike(engine::OptimizerKind kind) {
  for (const int64_t dim :
       Sized(std::vector<int64_t>{1, 6, 16, 64, 132}, {4, 8, 16, 32, 64, 128, 132})) {
    const std::string error = GradientsOfAnyTypeStepAlike(kind, dim);
    if (!error.empty()) return error;
  }
  return "";
}

inline std::string RefusesOtherGradients() {
  using engine::OptimizerKind;
  TablePointer table;
  MONO_DIFF_CALL(CreateTable(OneSegment(4, OptimizerKind::kSgd), &table));
  const float rate = 0.1f;
  MonoGpuWriteOptions options = {};
  options.learning_rates = &rate;
  options.num_learning_rates = 1;
  Array<int64_t> ids(std::vector<int64_t>{1});
  Array<float> gradients(std::vector<float>(4));
  MonoGpuOptimizeJob job = {table.get(), ids.data(), 1, gradients.data(), &options, 3, 0, 0};
  MONO_DIFF_CHECK(mono_gpu_table_optimize_many(nullptr, &job, 1) == MONO_GPU_INVALID_ARGUMENT,
                  "a stride below the dim");
  job.gradient_stride = 4;
  job.gradient_type = 3;
  MONO_DIFF_CHECK(mono_gpu_table_optimize_many(nullptr, &job, 1) == MONO_GPU_INVALID_ARGUMENT,
                  "a type that is none");
  return "";
}

}  // namespace gpu
}  // namespace monolith

#endif  // MONOLITH_TESTS_NATIVE_TRAINING_RUNTIME_GPU_TABLE_GRADIENTS_H_
