// Learns the sizes of a model's outputs from its runs, so that memory can be reserved before a run.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_OUTPUT_SIZES_H_
#define MONOLITH_SERVING_NATIVE_MODEL_OUTPUT_SIZES_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace monolith {
namespace serving {

// Keeps, for every signature, the largest outputs of inputs of about one size: sizes are told apart
// by powers of two. Thread-safe.
class OutputSizes {
 public:
  // Returns the expected size of the outputs for inputs of this size. For a new size it is that of
  // the inputs, once as tensors and once as messages.
  int64_t Expect(const std::string& signature, int64_t input_bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(signature);
    const int64_t known = found == sizes_.end() ? 0 : found->second[ClassOf(input_bytes)];
    return known > 0 ? known : 2 * input_bytes;
  }

  // Records the result of a run. The signature is one of the model's: there are not many.
  void Learn(const std::string& signature, int64_t input_bytes, int64_t output_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t& known = sizes_[signature][ClassOf(input_bytes)];
    // An unusually large one is forgotten after some dozens of runs.
    known = std::max(output_bytes, known - known / 16);
  }

 private:
  static size_t ClassOf(int64_t bytes) {
    size_t number = 0;
    for (; bytes > 1; bytes /= 2) ++number;
    return number;
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::array<int64_t, 64>> sizes_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_OUTPUT_SIZES_H_
