// A served model that catches up with training and then follows it.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_REPLICA_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_REPLICA_H_

#include <chrono>
#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"

namespace monolith {
namespace serving {

// Attaches a follower, not started, to a model loaded from `path` with `follows_logs`; none if its
// export names no log. Once it has caught up, changes may wait for `interval`.
Status SetReplica(const std::string& path, const std::string& servers,
                  std::chrono::duration<double> interval, Servable* servable);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_REPLICA_H_
