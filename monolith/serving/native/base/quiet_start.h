// Keeps off the screen what TensorFlow's libraries write while they are loaded.
#ifndef MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_
#define MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_

namespace monolith {
namespace serving {

// TensorFlow's wheel for x86-64 registers its GPU libraries twice, and reports errors at every
// start, on every machine, which mean nothing. It does so before main; from then on until this call
// stderr is kept, and the call writes what else was there. MONOLITH_VERBOSE=1 or
// TF_CPP_MIN_LOG_LEVEL=0 lets everything through.
void EndQuietStart();

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_
