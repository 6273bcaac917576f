// Messages that clients compress.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_

#include <cstdint>
#include <string>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Replaces a message that gzip has compressed by what it was. One that is longer than `max_bytes`
// is refused, as is one that `lease` has no room for: a few bytes can become any number.
Status Decompress(int64_t max_bytes, MemoryLease* lease, std::string* message);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_
