// Leaves out warnings of TensorFlow that tell no error. When a run on servers ends, each of them
// says of every call of the last step that it was cancelled: dozens of lines at the end of a good
// run. A run that fails names its reason elsewhere, and what another reason made stop is kept.
// Where no driver of CUDA is installed, every process says that it could not be called.
// MONOLITH_VERBOSE=1 or TF_CPP_MIN_LOG_LEVEL=0 lets the lines through.
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "monolith/native_training/runtime/ops/support/tensorflow_deprecations.h"
#include "monolith/native_training/runtime/ops/support/tensorflow_versions.h"

namespace monolith {
namespace {

// How messages begin that are left out.
constexpr absl::string_view kLeftOut[] = {
    "RecvTensor cancelled for ",
    "Local rendezvous is aborting with status: CANCELLED: ",
    "Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence",
    "Local rendezvous is aborting with status: ABORTED: Stopping remaining executors.",
    "Local rendezvous is aborting with status: ABORTED: Cleanup ",
};

// Where a number comes in between.
constexpr absl::string_view kAbortedStep =
    "Local rendezvous is aborting with status: ABORTED: Step ";
constexpr absl::string_view kCancelled = " cancelled.  Cancelling rendezvous.";

// Error 303: there is no library of the driver. Any other is about a GPU, and is kept.
constexpr absl::string_view kNoDriver = "failed call to cuInit: ";
constexpr absl::string_view kNoLibrary = "UNKNOWN ERROR (303)";

bool IsAboutMissingDriver(absl::string_view message) {
  return absl::StartsWith(message, kNoDriver) && absl::EndsWith(message, kNoLibrary);
}

bool IsLeftOut(absl::string_view message) {
  for (const absl::string_view beginning : kLeftOut) {
    if (absl::StartsWith(message, beginning)) return true;
  }
  return absl::StartsWith(message, kAbortedStep) && absl::StrContains(message, kCancelled);
}

bool WantsEverything() {
  const char* const verbose = std::getenv("MONOLITH_VERBOSE");
  if (verbose != nullptr && verbose[0] != '\0' && verbose[0] != '0') return true;
  const char* const level = std::getenv("TF_CPP_MIN_LOG_LEVEL");
  return level != nullptr && absl::string_view(level) == "0";
}

#ifdef MONOLITH_TENSORFLOW_HAS_LOG_SINKS

class QuietLog final : public tsl::TFLogSink {
 public:
  explicit QuietLog(tsl::TFLogSink* next) : next_(next) {}

  void Send(const tsl::TFLogEntry& entry) override {
    const absl::string_view message = entry.text_message();
    if (!IsLeftOut(message) && !IsAboutMissingDriver(message)) next_->Send(entry);
  }

  void WaitTillSent() override { next_->WaitTillSent(); }

 private:
  tsl::TFLogSink* const next_;
};

bool Install() {
  if (WantsEverything()) return false;
  const std::vector<tsl::TFLogSink*> sinks = tsl::TFGetLogSinks();
  // A program with sinks of its own has chosen what is seen.
  if (sinks.size() != 1) return false;
  // Lives until the process ends: threads may log until then.
  tsl::TFLogSink* const quiet = std::make_unique<QuietLog>(sinks[0]).release();
  tsl::TFRemoveLogSink(sinks[0]);
  tsl::TFAddLogSink(quiet);
  return true;
}

#else

// Writes what Abseil's own sink for stderr would, while that one writes fatal errors alone: it
// knows about their stack traces.
class QuietLog final : public absl::LogSink {
 public:
  void Send(const absl::LogEntry& entry) override {
    // A program that lowers the threshold later gets those lines from Abseil.
    if (entry.log_severity() >= absl::StderrThreshold()) return;
    const bool is_error = entry.log_severity() > absl::LogSeverity::kWarning;
    if (is_error ? IsAboutMissingDriver(entry.text_message()) : IsLeftOut(entry.text_message())) {
      return;
    }
    absl::log_internal::WriteToStderr(entry.text_message_with_prefix_and_newline(),
                                      entry.log_severity());
  }
};

bool Install() {
  // Until Abseil is set up, all that passes the level of TensorFlow goes to stderr, whatever the
  // threshold is. A program that has set it up has chosen what is seen.
  if (WantsEverything() || absl::log_internal::IsInitialized()) return false;
  // Lives until the process ends: threads may log until then.
  absl::AddLogSink(std::make_unique<QuietLog>().release());
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kFatal);
  // Not absl::InitializeLog: it sets the time zone too, and may be called once in a process.
  absl::log_internal::SetInitialized();
  return true;
}

#endif

[[maybe_unused]] const bool installed = Install();

}  // namespace
}  // namespace monolith
