// The threads of this process that read and write checkpoint files: few, however many tables there
// are, because what they wait for is one disk.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_POOL_H_

#include "monolith/native_training/runtime/concurrency/task_pool.h"

namespace tensorflow {
namespace monolith_tf {

// Never destroyed: a save may still run when the process ends. A forked child has its own.
::monolith::engine::TaskPool* FilePool();

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_FILE_POOL_H_
