// Exceptions as statuses, for the places where C++ meets TensorFlow's threads.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_EXCEPTION_STATUS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_EXCEPTION_STATUS_H_

#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

// Returns what function() returns. ResourceExhausted: it ran out of memory. Internal: it threw
// something else.
template <typename Function>
Status CatchExceptions(const Function& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return errors::ResourceExhausted("Out of memory: the sizes that were asked for do not fit");
  } catch (const std::length_error& error) {
    return errors::ResourceExhausted("Out of memory: no container holds the sizes asked for (",
                                     error.what(), ")");
  } catch (const std::system_error& error) {
    return errors::ResourceExhausted("The system has no room for another thread: ", error.what());
  } catch (const std::exception& error) {
    return errors::Internal("Unexpected exception: ", error.what());
  }
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_EXCEPTION_STATUS_H_
