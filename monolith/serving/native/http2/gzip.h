// Decompresses messages of clients.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_

#include <cstdint>
#include <string>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Decompresses a message in place. Refuses one that becomes longer than `max_bytes`, or for which
// `lease` has no room: a few bytes can become any number.
Status Decompress(int64_t max_bytes, MemoryLease* lease, std::string* message);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_GZIP_H_
