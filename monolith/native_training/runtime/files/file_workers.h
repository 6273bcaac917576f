// The threads that read and write files: one pool per process, however many tables are saved at
// once. File work does not belong on the threads that compute.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_

#include <cstdint>
#include <functional>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace engine {

// The most threads there are; they start when there is work.
constexpr int kMaxFileThreads = 8;

// Runs `work`, which throws nothing, on one of the threads after `delay_ms` (0 to a day). Waiting
// takes no thread. Throws std::bad_alloc, and std::system_error if not even one thread can be
// started; the work never runs then.
void RunOnFileThread(int64_t delay_ms, std::function<void()> work);

// Runs work(0) to work(n - 1) on the calling thread and on idle ones. Returns the first error and
// skips what has not begun by then. Throws what `work` throws.
Status ForEachFile(int64_t n, const std::function<Status(int64_t)>& work);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_
