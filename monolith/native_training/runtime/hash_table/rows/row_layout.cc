#include "monolith/native_training/runtime/hash_table/rows/row_layout.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;

std::string Where(int64_t index) { return "segment " + std::to_string(index) + ": "; }

struct NamedValue {
  const char* name;
  float value;
};

Status CheckFinite(int64_t index, std::initializer_list<NamedValue> fields) {
  for (const NamedValue& field : fields) {
    if (!std::isfinite(field.value)) {
      return Status::InvalidArgument(Where(index) + field.name + " is " +
                                     std::to_string(field.value) + ", want a finite number");
    }
  }
  return Status::Ok();
}

Status CheckDecay(int64_t index, std::initializer_list<NamedValue> fields) {
  for (const NamedValue& field : fields) {
    if (!(field.value >= 0.0f && field.value < 1.0f)) {
      return Status::InvalidArgument(Where(index) + field.name + " is " +
                                     std::to_string(field.value) + ", want [0, 1)");
    }
  }
  return Status::Ok();
}

Status CheckOptimizer(int64_t index, int64_t dim, const OptimizerConfig& o,
                      const std::string& description) {
  switch (o.kind) {
    case OptimizerKind::kAbsent:
    case OptimizerKind::kUnset:
      return Status::InvalidArgument(Where(index) +
                                     "OptimizerConfig must be set type: " + description);
    case OptimizerKind::kDc:
      return Status::InvalidArgument("optimizer is not implemented yet. " + Where(index) + "dc " +
                                     description);
    case OptimizerKind::kDynamicWdAdagrad:
      if (o.enable_dynamic_wd) {
        return Status::InvalidArgument("optimizer is not implemented yet. " + Where(index) +
                                       "dynamic_wd_adagrad with enable_dynamic_wd " + description);
      }
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAmsgrad: {
      Status status = CheckDecay(index, {{"beta1", o.beta1}, {"beta2", o.beta2}});
      if (!status.ok()) return status;
      break;
    }
    case OptimizerKind::kBatchSoftmax:
      if (dim != 1) {
        return Status::InvalidArgument(Where(index) + "batch_softmax has dim_size " +
                                       std::to_string(dim) + ", want 1");
      }
      break;
    default:
      break;
  }
  Status status = CheckFinite(index, {{"initial_accumulator_value", o.initial_accumulator_value},
                                      {"weight_decay_factor", o.weight_decay},
                                      {"beta", o.beta},
                                      {"l1_regularization_strength", o.l1},
                                      {"l2_regularization_strength", o.l2},
                                      {"averaging_ratio", o.averaging_ratio},
                                      {"epsilon", o.epsilon},
                                      {"momentum", o.momentum}});
  if (!status.ok()) return status;
  if (o.initial_accumulator_value < 0.0f) {
    return Status::InvalidArgument(Where(index) + "initial_accumulator_value is " +
                                   std::to_string(o.initial_accumulator_value) + ", want >= 0");
  }
  return Status::Ok();
}

Status CheckInitializer(int64_t index, const InitializerConfig& init,
                        const std::string& description) {
  if (init.kind == InitializerKind::kAbsent || init.kind == InitializerKind::kUnset) {
    return Status::InvalidArgument(Where(index) +
                                   "InitializerConfig must be set type: " + description);
  }
  return CheckFinite(
      index, {{"constant", init.constant}, {"minval", init.minval}, {"maxval", init.maxval}});
}

Status CheckCompressor(int64_t index, const CompressorConfig& comp, bool required,
                       const std::string& description) {
  if (comp.kind == CompressorKind::kAbsent || comp.kind == CompressorKind::kUnset) {
    if (!required) return Status::Ok();
    return Status::InvalidArgument(Where(index) +
                                   "FloatCompressorConfig must be set type: " + description);
  }
  Status status = CheckFinite(index, {{"r", comp.range},
                                      {"init_scale", comp.init_scale},
                                      {"max_scale", comp.max_scale},
                                      {"amplitude", comp.amplitude}});
  if (!status.ok()) return status;
  if (comp.kind == CompressorKind::kFixedR8 && !(comp.range > 0.0f)) {
    return Status::InvalidArgument(Where(index) + "r is " + std::to_string(comp.range) +
                                   ", want > 0");
  }
  if (comp.kind == CompressorKind::kOneBit && comp.step_size <= 0) {
    return Status::InvalidArgument(Where(index) + "step_size is " + std::to_string(comp.step_size) +
                                   ", want > 0");
  }
  return Status::Ok();
}

int64_t CodeBytes(CompressorKind kind, int64_t dim) {
  switch (kind) {
    case CompressorKind::kFp16:
      return 2 * dim;
    case CompressorKind::kFixedR8:
      return dim;
    case CompressorKind::kOneBit:
      return (dim + 7) / 8;
    default:
      return 4 * dim;
  }
}

// Memory order of the fields; `dump_number` is the member of SingleOptimizerDump.
struct StateSpec {
  uint8_t dump_field;
  bool per_element;
  bool is_int64;
  float initial;
};

std::vector<StateSpec> StateOf(const OptimizerConfig& o, int* dump_number) {
  const float acc = o.initial_accumulator_value;
  switch (o.kind) {
    case OptimizerKind::kSgd:
      *dump_number = 2;
      return {};
    case OptimizerKind::kAdagrad:
      *dump_number = 1;
      return {{1, true, false, acc}};
    case OptimizerKind::kAdadelta:
      *dump_number = 6;
      return {{1, true, false, 0.0f}, {2, true, false, 0.0f}};
    case OptimizerKind::kAdam:
      *dump_number = 7;
      return {{1, true, false, 0.0f},
              {2, true, false, 0.0f},
              {3, false, false, o.beta1},
              {4, false, false, o.decay_by_step ? 0.0f : o.beta2}};
    case OptimizerKind::kAmsgrad:
      *dump_number = 8;
      return {{1, true, false, 0.0f},
              {2, true, false, 0.0f},
              {3, true, false, 0.0f},
              {4, false, false, o.beta1},
              {5, false, false, o.beta2}};
    case OptimizerKind::kMomentum:
      *dump_number = 9;
      return {{1, true, false, 0.0f}};
    case OptimizerKind::kFtrl:
      *dump_number = 3;
      return {{1, true, false, 0.0f}, {2, true, false, acc}};
    case OptimizerKind::kGroupFtrl:
      *dump_number = 13;
      return {{1, true, false, 0.0f}, {2, true, false, acc}};
    case OptimizerKind::kGroupAdagrad:
      *dump_number = 15;
      return {{1, false, false, acc}};
    case OptimizerKind::kRmsprop:
      *dump_number = 11;
      return {{1, true, false, 0.0f}};
    case OptimizerKind::kRmspropV2:
      *dump_number = 12;
      return {{1, true, false, 0.0f}};
    case OptimizerKind::kBatchSoftmax:
      *dump_number = 14;
      return {{1, false, true, 0.0f}};
    case OptimizerKind::kDynamicWdAdagrad:
      *dump_number = 4;
      return {{1, true, false, acc}, {2, false, true, 0.0f}};
    default:  // moving_average keeps no state and writes no dump
      *dump_number = 0;
      return {};
  }
}

Status CheckSegment(int64_t index, const SegmentConfig& config, const TableConfig& table) {
  if (config.dim_size <= 0 || config.dim_size > kMaxDim) {
    return Status::InvalidArgument(Where(index) + "dim_size is " + std::to_string(config.dim_size) +
                                   ", want 1 to " + std::to_string(kMaxDim));
  }
  const bool serving = table.entry.type == EntryType::kServing;
  Status status = CheckCompressor(index, config.compressor, serving, table.description);
  if (!status.ok() || serving) return status;
  status = CheckInitializer(index, config.initializer, table.description);
  if (!status.ok()) return status;
  return CheckOptimizer(index, config.dim_size, config.optimizer, table.description);
}

Status CheckPresence(const TableConfig& config) {
  const bool serving = config.entry.type == EntryType::kServing;
  for (const SegmentConfig& segment : config.entry.segments) {
    if (serving && segment.compressor.kind == CompressorKind::kAbsent) {
      return Status::InvalidArgument("comp config is missing form entry config: " +
                                     config.description);
    }
    if (!serving && (segment.initializer.kind == InitializerKind::kAbsent ||
                     segment.optimizer.kind == OptimizerKind::kAbsent)) {
      return Status::InvalidArgument("init or opt config is missing from entry config : " +
                                     config.description);
    }
  }
  return Status::Ok();
}

// The state of a new row. Integers begin at 0.
std::vector<char> InitialState(const RowLayout& layout) {
  const int64_t begin = 4 * layout.dim;
  std::vector<char> state(layout.row_bytes - begin, 0);
  for (const Segment& segment : layout.segments) {
    for (const StateField& field : segment.state) {
      for (int64_t i = 0; i < field.count && !field.is_int64; ++i) {
        std::memcpy(state.data() + field.offset - begin + 4 * i, &field.initial, 4);
      }
    }
  }
  return state;
}

}  // namespace

bool CopiesRows(const RowLayout& layout) {
  if (layout.all_raw || !layout.serving()) return layout.all_raw;
  return std::all_of(layout.segments.begin(), layout.segments.end(), [](const Segment& segment) {
    return segment.retriever == RetrieverKind::kRaw && segment.code_bytes == 4 * segment.dim;
  });
}

Status CompileRowLayout(const TableConfig& config, RowLayout* layout) {
  if (config.entry.type == EntryType::kUnknown) {
    return Status::InvalidArgument("Unknown entry type: " + config.description);
  }
  if (config.entry.segments.empty()) {
    return Status::InvalidArgument("entry config has no segments: " + config.description);
  }
  Status status = CheckPresence(config);
  if (!status.ok()) return status;

  RowLayout result;
  result.type = config.entry.type;
  if (config.skip_zero_embedding && !result.serving()) {
    return Status::InvalidArgument(
        "Only EntryConfig_EntryType_SERVING supports skip_zero_embedding!");
  }
  for (const SegmentConfig& source : config.entry.segments) {
    const int64_t index = result.num_segments();
    status = CheckSegment(index, source, config);
    if (!status.ok()) return status;
    Segment segment;
    segment.dim = source.dim_size;
    segment.value_begin = result.dim;
    segment.optimizer = source.optimizer;
    segment.initializer = source.initializer;
    segment.compressor = source.compressor;
    segment.code_bytes = CodeBytes(source.compressor.kind, source.dim_size);
    if (source.compressor.kind == CompressorKind::kFixedR8) {
      segment.retriever = RetrieverKind::kFakeQuant;
    } else if (source.compressor.kind == CompressorKind::kOneBit) {
      segment.retriever = RetrieverKind::kHashNet;
      result.uses_global_step = true;
    }
    if (segment.retriever != RetrieverKind::kRaw) result.all_raw = false;
    if (source.optimizer.kind == OptimizerKind::kBatchSoftmax ||
        (source.optimizer.kind == OptimizerKind::kAdam && source.optimizer.decay_by_step)) {
      result.uses_global_step = true;
    }
    result.dim += source.dim_size;
    if (result.dim > kMaxDim) {
      return Status::InvalidArgument("the segments have " + std::to_string(result.dim) +
                                     " elements, want at most " + std::to_string(kMaxDim));
    }
    result.segments.push_back(std::move(segment));
  }

  if (result.serving()) {
    result.all_raw = false;
    for (Segment& segment : result.segments) {
      segment.code_offset = result.row_bytes;
      result.row_bytes += segment.code_bytes;
    }
  } else {
    result.row_bytes = 4 * result.dim;
    for (Segment& segment : result.segments) {
      segment.state_offset = result.row_bytes;
      for (const StateSpec& spec : StateOf(segment.optimizer, &segment.dump_number)) {
        const int64_t count = spec.per_element ? segment.dim : 1;
        segment.state.push_back({spec.dump_field, spec.is_int64, count, result.row_bytes,
                                 spec.initial, !spec.per_element});
        result.row_bytes += count * (spec.is_int64 ? 8 : 4);
      }
      segment.state_bytes = result.row_bytes - segment.state_offset;
    }
  }
  if (!result.serving()) result.initial_state = InitialState(result);
  const int64_t grain = result.row_bytes <= 32 ? 4 : 16;
  result.stride = (result.row_bytes + grain - 1) / grain * grain;
  *layout = std::move(result);
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
