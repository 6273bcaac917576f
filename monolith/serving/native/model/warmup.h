// Replays the requests that an export brings, so that the first real one is not the slow one.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_WARMUP_H_
#define MONOLITH_SERVING_NATIVE_MODEL_WARMUP_H_

#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"

namespace monolith {
namespace serving {

// Runs every record of `path`/assets.extra/tf_serving_warmup_requests, if there is one. A record
// that fails, or a file of more than 1000 records, is an error, as in TensorFlow Serving.
Status WarmUp(const std::string& path, Servable* servable);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_WARMUP_H_
