// Keeps the messages that TensorFlow's libraries write while they are loaded off the screen.
#ifndef MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_
#define MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_

namespace monolith {
namespace serving {

// TensorFlow's wheel for x86-64 registers its GPU libraries twice and reports meaningless errors at
// every start, before main. stderr is captured from then until this call, which writes all other
// lines. MONOLITH_VERBOSE=1 or TF_CPP_MIN_LOG_LEVEL=0 lets everything through.
void EndQuietStart();

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_BASE_QUIET_START_H_
