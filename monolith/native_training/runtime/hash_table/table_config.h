// Plain configuration structs. The op layer fills them from the protos; defaults are those of the
// protos.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_CONFIG_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace engine {

// kAbsent: the sub-message is missing. kUnset: it is there, but its oneof is not set.
enum class OptimizerKind : uint8_t {
  kAbsent,
  kUnset,
  kSgd,
  kAdagrad,
  kAdadelta,
  kAdam,
  kAmsgrad,
  kMomentum,
  kMovingAverage,
  kFtrl,
  kGroupFtrl,
  kGroupAdagrad,
  kRmsprop,
  kRmspropV2,
  kBatchSoftmax,
  kDynamicWdAdagrad,
  kDc,
};

enum class InitializerKind : uint8_t { kAbsent, kUnset, kZeros, kOnes, kConstants, kRandomUniform };

enum class CompressorKind : uint8_t { kAbsent, kUnset, kFp32, kFp16, kFixedR8, kOneBit };

enum class EntryType : uint8_t { kUnknown, kTraining, kServing };

// Only the fields of `kind` are read. Fields that the per-row optimizers ignore (learning rate,
// warm-up, hessian compression, beta1 warm-up) are not here: the learning rate comes with every
// batch.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAbsent;
  float initial_accumulator_value = 0.1f;
  float weight_decay = 0.0f;
  float beta = 0.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float averaging_ratio = 0.9f;
  float epsilon = 0.01f;
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float momentum = 0.9f;
  bool use_nesterov = false;
  bool decay_by_step = false;
  bool decouple_weight_decay = false;
  bool enable_dynamic_wd = false;
  bool stochastic_rounding_float16 = false;
};

struct InitializerConfig {
  InitializerKind kind = InitializerKind::kAbsent;
  float constant = 0.0f;
  float minval = -0.05f;
  float maxval = 0.05f;
};

struct CompressorConfig {
  CompressorKind kind = CompressorKind::kAbsent;
  float range = 1.0f;       // fixed_r8
  int64_t step_size = 200;  // one_bit, and the four below
  float init_scale = 1.0f;
  float max_scale = 10000.0f;
  float amplitude = 0.1f;
};

struct SegmentConfig {
  int64_t dim_size = 0;
  OptimizerConfig optimizer;
  InitializerConfig initializer;
  CompressorConfig compressor;
};

struct EntryConfig {
  EntryType type = EntryType::kTraining;
  std::vector<SegmentConfig> segments;
};

struct SlotExpireTime {
  uint32_t slot = 0;
  uint32_t days = 0;
};

struct ExpiryConfig {
  uint32_t default_days = 36500;
  std::vector<SlotExpireTime> slots;
};

struct TableConfig {
  EntryConfig entry;
  ExpiryConfig expiry;
  int64_t initial_capacity = 1;
  bool skip_zero_embedding = false;
  // Seed of the random initializers. 0: MONOLITH_TABLE_SEED from the environment, else random per
  // table.
  uint64_t seed = 0;
  // Appended to creation errors; the op layer puts the text of the proto here.
  std::string description;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_TABLE_CONFIG_H_
