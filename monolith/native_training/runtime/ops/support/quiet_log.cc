// Leaves out one warning of TensorFlow. When a run on servers ends, each of them says of every call
// of the last step that it was cancelled: dozens of lines at the end of a good run. A run that
// fails names its reason elsewhere. MONOLITH_VERBOSE=1 lets the lines through.
//
// TensorFlow 2.20 and later log through Abseil, whose lines cannot be held back one by one.
#include "monolith/native_training/runtime/ops/support/tensorflow_deprecations.h"
#include "monolith/native_training/runtime/ops/support/tensorflow_versions.h"

#ifdef MONOLITH_TENSORFLOW_HAS_LOG_SINKS
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace monolith {
namespace {

constexpr absl::string_view kLeftOut = "RecvTensor cancelled for ";

class QuietLog final : public tsl::TFLogSink {
 public:
  explicit QuietLog(tsl::TFLogSink* next) : next_(next) {}

  void Send(const tsl::TFLogEntry& entry) override {
    if (!absl::StartsWith(entry.text_message(), kLeftOut)) next_->Send(entry);
  }

  void WaitTillSent() override { next_->WaitTillSent(); }

 private:
  tsl::TFLogSink* const next_;
};

bool Install() {
  const char* const verbose = std::getenv("MONOLITH_VERBOSE");
  if (verbose != nullptr && verbose[0] != '\0' && verbose[0] != '0') return false;
  const std::vector<tsl::TFLogSink*> sinks = tsl::TFGetLogSinks();
  // A program with sinks of its own has chosen what is seen.
  if (sinks.size() != 1) return false;
  // Lives until the process ends: threads may log until then.
  tsl::TFLogSink* const quiet = std::make_unique<QuietLog>(sinks[0]).release();
  tsl::TFRemoveLogSink(sinks[0]);
  tsl::TFAddLogSink(quiet);
  return true;
}

[[maybe_unused]] const bool installed = Install();

}  // namespace
}  // namespace monolith
#endif
