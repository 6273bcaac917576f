// The threads that read and write files, one set per process however many tables are saved at once.
// File work does not belong on the threads that compute.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_

#include <cstdint>
#include <functional>

#include "monolith/native_training/runtime/base/status.h"

namespace monolith {
namespace engine {

// At most so many threads exist; they start when there is work.
constexpr int kMaxFileThreads = 8;

// Runs `work`, which throws nothing, on one of the threads, after `delay_ms` (0 to a day) have
// passed. Waiting takes no thread. Throws std::bad_alloc, and std::system_error where not even one
// thread can be started; the work then never runs.
void RunOnFileThread(int64_t delay_ms, std::function<void()> work);

// Runs work(0) to work(n - 1) on the calling thread and on those that have nothing else to do.
// Returns the first error; what has not begun then is left out. Throws what `work` has thrown.
Status ForEachFile(int64_t n, const std::function<Status(int64_t)>& work);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_FILES_FILE_WORKERS_H_
