// Dense values of the features of an Example or ExampleBatch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_EXAMPLE_COLUMNS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_EXAMPLE_COLUMNS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "monolith/native_training/runtime/ops/data/samples/sample.h"

namespace tensorflow {
namespace monolith_tf {

// Cycles of looking for the features of one example, for the splitting of a batch.
constexpr int64_t kIndexCycles = 2000;

inline Status WrongFeatureType(const std::string& name, const ExampleFeature& feature,
                               const char* want) {
  return errors::InvalidArgument("dense feature '", name, "' holds field ",
                                 static_cast<int>(feature.type_case()), " of Feature, want ", want);
}

template <typename List, typename T>
void CutOrPad(const List& values, int64_t width, T padding, T* out) {
  const int64_t copied = std::min<int64_t>(values.size(), width);
  std::transform(values.begin(), values.begin() + copied, out,
                 [](const auto& value) { return static_cast<T>(value); });
  std::fill(out + copied, out + width, padding);
}

// A float column of one value that is there but empty reads as the smallest normal float, so that a
// model can tell it from a missing one.
inline Status CopyDense(const std::string& name, const ExampleFeature* feature, int64_t width,
                        float* out) {
  const bool missing = feature == nullptr || feature->type_case() == ExampleFeature::TYPE_NOT_SET;
  if (missing) {
    std::fill(out, out + width, 0.0f);
    return OkStatus();
  }
  const float padding = width == 1 ? std::numeric_limits<float>::min() : 0.0f;
  if (feature->has_float_list()) {
    CutOrPad(feature->float_list().value(), width, padding, out);
  } else if (feature->has_double_list()) {
    CutOrPad(feature->double_list().value(), width, padding, out);
  } else {
    return WrongFeatureType(name, *feature, "float_list or double_list");
  }
  return OkStatus();
}

inline Status CopyDense(const std::string& name, const ExampleFeature* feature, int64_t width,
                        int64_t* out) {
  if (feature == nullptr || feature->type_case() == ExampleFeature::TYPE_NOT_SET) {
    std::fill(out, out + width, 0);
    return OkStatus();
  }
  if (!feature->has_int64_list()) return WrongFeatureType(name, *feature, "int64_list");
  if (width == 1 && feature->int64_list().value_size() == 0) {
    return errors::InvalidArgument("int64_list of dense feature '", name, "' is empty");
  }
  CutOrPad(feature->int64_list().value(), width, int64_t{0}, out);
  return OkStatus();
}

inline Status CopyDense(const std::string& name, const ExampleFeature* feature, int64_t width,
                        tstring* out) {
  if (width != 1) {
    return errors::InvalidArgument("shape of string feature '", name, "' is ", width, ", want 1");
  }
  if (feature == nullptr || feature->type_case() == ExampleFeature::TYPE_NOT_SET) {
    out[0] = tstring();
    return OkStatus();
  }
  if (!feature->has_bytes_list()) return WrongFeatureType(name, *feature, "bytes_list");
  if (feature->bytes_list().value_size() == 0) {
    return errors::InvalidArgument("bytes_list of dense feature '", name, "' is empty");
  }
  out[0] = feature->bytes_list().value(0);
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_PARSE_EXAMPLE_COLUMNS_H_
