#include "monolith/native_training/runtime/ops/tables/table_config_proto.h"

#include <limits>

#include "monolith/native_training/runtime/ops/support/engine_bridge.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

namespace pb = ::monolith::hash_table;

engine::OptimizerConfig OptimizerFromProto(const pb::OptimizerConfig& proto) {
  using engine::OptimizerKind;
  engine::OptimizerConfig config;
  config.stochastic_rounding_float16 = proto.stochastic_rounding_float16();
  switch (proto.type_case()) {
    case pb::OptimizerConfig::kSgd:
      config.kind = OptimizerKind::kSgd;
      break;
    case pb::OptimizerConfig::kAdagrad:
      config.kind = OptimizerKind::kAdagrad;
      config.initial_accumulator_value = proto.adagrad().initial_accumulator_value();
      config.weight_decay = proto.adagrad().weight_decay_factor();
      break;
    case pb::OptimizerConfig::kDynamicWdAdagrad:
      config.kind = OptimizerKind::kDynamicWdAdagrad;
      config.initial_accumulator_value = proto.dynamic_wd_adagrad().initial_accumulator_value();
      config.weight_decay = proto.dynamic_wd_adagrad().weight_decay_factor();
      config.decouple_weight_decay = proto.dynamic_wd_adagrad().decouple_weight_decay();
      config.enable_dynamic_wd = proto.dynamic_wd_adagrad().enable_dynamic_wd();
      break;
    case pb::OptimizerConfig::kFtrl:
      config.kind = OptimizerKind::kFtrl;
      config.initial_accumulator_value = proto.ftrl().initial_accumulator_value();
      config.beta = proto.ftrl().beta();
      config.l1 = proto.ftrl().l1_regularization_strength();
      config.l2 = proto.ftrl().l2_regularization_strength();
      break;
    case pb::OptimizerConfig::kGroupFtrl:
      config.kind = OptimizerKind::kGroupFtrl;
      config.initial_accumulator_value = proto.group_ftrl().initial_accumulator_value();
      config.beta = proto.group_ftrl().beta();
      config.l1 = proto.group_ftrl().l1_regularization_strength();
      config.l2 = proto.group_ftrl().l2_regularization_strength();
      break;
    case pb::OptimizerConfig::kGroupAdagrad:
      config.kind = OptimizerKind::kGroupAdagrad;
      config.initial_accumulator_value = proto.group_adagrad().initial_accumulator_value();
      config.beta = proto.group_adagrad().beta();
      config.l2 = proto.group_adagrad().l2_regularization_strength();
      config.weight_decay = proto.group_adagrad().weight_decay_factor();
      break;
    case pb::OptimizerConfig::kAdadelta:
      config.kind = OptimizerKind::kAdadelta;
      config.weight_decay = proto.adadelta().weight_decay_factor();
      config.averaging_ratio = proto.adadelta().averaging_ratio();
      config.epsilon = proto.adadelta().epsilon();
      break;
    case pb::OptimizerConfig::kAdam:
      config.kind = OptimizerKind::kAdam;
      config.beta1 = proto.adam().beta1();
      config.beta2 = proto.adam().beta2();
      config.weight_decay = proto.adam().weight_decay_factor();
      config.use_nesterov = proto.adam().use_nesterov();
      config.epsilon = proto.adam().epsilon();
      config.decay_by_step = proto.adam().decay_by_step();
      break;
    case pb::OptimizerConfig::kAmsgrad:
      config.kind = OptimizerKind::kAmsgrad;
      config.beta1 = proto.amsgrad().beta1();
      config.beta2 = proto.amsgrad().beta2();
      config.weight_decay = proto.amsgrad().weight_decay_factor();
      config.use_nesterov = proto.amsgrad().use_nesterov();
      config.epsilon = proto.amsgrad().epsilon();
      break;
    case pb::OptimizerConfig::kMomentum:
      config.kind = OptimizerKind::kMomentum;
      config.weight_decay = proto.momentum().weight_decay_factor();
      config.use_nesterov = proto.momentum().use_nesterov();
      config.momentum = proto.momentum().momentum();
      break;
    case pb::OptimizerConfig::kMovingAverage:
      config.kind = OptimizerKind::kMovingAverage;
      config.momentum = proto.moving_average().momentum();
      break;
    case pb::OptimizerConfig::kRmsprop:
      config.kind = OptimizerKind::kRmsprop;
      config.weight_decay = proto.rmsprop().weight_decay_factor();
      config.momentum = proto.rmsprop().momentum();
      break;
    case pb::OptimizerConfig::kRmspropv2:
      config.kind = OptimizerKind::kRmspropV2;
      config.weight_decay = proto.rmspropv2().weight_decay_factor();
      config.momentum = proto.rmspropv2().momentum();
      break;
    case pb::OptimizerConfig::kBatchSoftmax:
      config.kind = OptimizerKind::kBatchSoftmax;
      break;
    case pb::OptimizerConfig::kDc:
      config.kind = OptimizerKind::kDc;
      break;
    case pb::OptimizerConfig::TYPE_NOT_SET:
      config.kind = OptimizerKind::kUnset;
      break;
  }
  return config;
}

engine::InitializerConfig InitializerFromProto(const pb::InitializerConfig& proto) {
  using engine::InitializerKind;
  engine::InitializerConfig config;
  switch (proto.type_case()) {
    case pb::InitializerConfig::kZeros:
      config.kind = InitializerKind::kZeros;
      break;
    case pb::InitializerConfig::kOnes:
      config.kind = InitializerKind::kOnes;
      break;
    case pb::InitializerConfig::kConstants:
      config.kind = InitializerKind::kConstants;
      config.constant = proto.constants().constant();
      break;
    case pb::InitializerConfig::kRandomUniform:
      config.kind = InitializerKind::kRandomUniform;
      config.minval = proto.random_uniform().minval();
      config.maxval = proto.random_uniform().maxval();
      break;
    case pb::InitializerConfig::TYPE_NOT_SET:
      config.kind = InitializerKind::kUnset;
      break;
  }
  return config;
}

engine::CompressorConfig CompressorFromProto(const pb::FloatCompressorConfig& proto) {
  using engine::CompressorKind;
  engine::CompressorConfig config;
  switch (proto.type_case()) {
    case pb::FloatCompressorConfig::kFp32:
      config.kind = CompressorKind::kFp32;
      break;
    case pb::FloatCompressorConfig::kFp16:
      config.kind = CompressorKind::kFp16;
      break;
    case pb::FloatCompressorConfig::kFixedR8:
      config.kind = CompressorKind::kFixedR8;
      config.range = proto.fixed_r8().r();
      break;
    case pb::FloatCompressorConfig::kOneBit:
      config.kind = CompressorKind::kOneBit;
      config.step_size = proto.one_bit().step_size();
      config.init_scale = proto.one_bit().init_scale();
      config.max_scale = proto.one_bit().max_scale();
      config.amplitude = proto.one_bit().amplitude();
      break;
    case pb::FloatCompressorConfig::TYPE_NOT_SET:
      config.kind = CompressorKind::kUnset;
      break;
  }
  return config;
}

engine::EntryType EntryTypeFromProto(pb::EntryConfig::EntryType type) {
  switch (type) {
    case pb::EntryConfig::TRAINING:
      return engine::EntryType::kTraining;
    case pb::EntryConfig::SERVING:
      return engine::EntryType::kServing;
    default:
      return engine::EntryType::kUnknown;
  }
}

engine::ExpiryConfig ExpiryFromProto(const pb::SlotExpireTimeConfig& proto) {
  engine::ExpiryConfig config;
  config.default_days = proto.default_expire_time();
  for (const auto& slot : proto.slot_expire_times()) {
    config.slots.push_back({slot.slot(), slot.expire_time()});
  }
  return config;
}

}  // namespace

Status TableConfigFromProto(const pb::EmbeddingHashTableConfig& proto,
                            engine::TableConfig* config) {
  if (proto.initial_capacity() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return errors::InvalidArgument("initial_capacity is ", proto.initial_capacity(),
                                   ", want at most ", std::numeric_limits<int64_t>::max());
  }
  config->initial_capacity = static_cast<int64_t>(proto.initial_capacity());
  config->skip_zero_embedding = proto.skip_zero_embedding();
  config->expiry = ExpiryFromProto(proto.slot_expire_time_config());
  config->description = proto.ShortDebugString();
  config->entry.type = EntryTypeFromProto(proto.entry_config().entry_type());
  for (const pb::EntryConfig::Segment& segment : proto.entry_config().segments()) {
    engine::SegmentConfig& out = config->entry.segments.emplace_back();
    out.dim_size = segment.dim_size();
    if (segment.has_opt_config()) out.optimizer = OptimizerFromProto(segment.opt_config());
    if (segment.has_init_config()) out.initializer = InitializerFromProto(segment.init_config());
    if (segment.has_comp_config()) out.compressor = CompressorFromProto(segment.comp_config());
  }
  return OkStatus();
}

Status ExpiryPolicyFromBytes(const std::string& bytes, engine::ExpiryPolicy* policy) {
  pb::SlotExpireTimeConfig proto;
  if (!proto.ParseFromString(bytes)) {
    return errors::InvalidArgument(
        "Unable to parse slot_expire_time_config. Make sure it is serialized version of "
        "SlotExpireTimeConfig.");
  }
  return FromEngine(engine::ExpiryPolicy::Create(ExpiryFromProto(proto), policy));
}

Status ThresholdsFromBytes(const std::string& bytes, engine::OccurrenceThresholdConfig* config) {
  pb::SlotOccurrenceThresholdConfig proto;
  if (!proto.ParseFromString(bytes)) {
    return errors::InvalidArgument(
        "Unable to parse config. Make sure it is serialized version of "
        "SlotOccurrenceThresholdConfig.");
  }
  config->default_threshold = proto.default_occurrence_threshold();
  for (const auto& slot : proto.slot_occurrence_thresholds()) {
    config->slots.push_back({slot.slot(), slot.occurrence_threshold()});
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
