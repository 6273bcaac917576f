// Included before anything else by every source that includes TensorFlow. What newer versions of it
// and of Abseil call deprecated, older ones have alone. What is deprecated of ours is still said.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_DEPRECATIONS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_DEPRECATIONS_H_

#include "absl/base/attributes.h"
#include "absl/base/macros.h"

#undef ABSL_DEPRECATED
#define ABSL_DEPRECATED(message)
#undef ABSL_DEPRECATE_AND_INLINE
#define ABSL_DEPRECATE_AND_INLINE()

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_TENSORFLOW_DEPRECATIONS_H_
