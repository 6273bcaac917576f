// Keeps exceptions out of nghttp2, which calls back from C.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_CALLBACK_GUARD_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_CALLBACK_GUARD_H_

#include <nghttp2/nghttp2.h>

#include <exception>
#include <string>

#include "monolith/serving/native/base/log.h"

namespace monolith {
namespace serving {

// Calls `function`; returns what a callback of nghttp2 returns, an error that ends the connection
// if it threw.
template <typename Function>
int GuardCallback(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    LogError(std::string("An HTTP/2 connection is closed: ") + error.what());
    return NGHTTP2_ERR_CALLBACK_FAILURE;
  }
}

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_CALLBACK_GUARD_H_
