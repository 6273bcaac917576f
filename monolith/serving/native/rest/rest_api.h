// The HTTP API of TensorFlow Serving.
//
//   POST /v1/models/<m>[/versions/<v>|/labels/<l>]:predict     and :classify, :regress
//   GET  /v1/models/<m>[/versions/<v>|/labels/<l>]             states
//   GET  /v1/models/<m>[/versions/<v>|/labels/<l>]/metadata    signatures
//   GET  /monitoring/prometheus/metrics
#ifndef MONOLITH_SERVING_NATIVE_REST_REST_API_H_
#define MONOLITH_SERVING_NATIVE_REST_REST_API_H_

#include <string>

#include "monolith/serving/native/api/serving_api.h"
#include "monolith/serving/native/base/worker_pool.h"
#include "monolith/serving/native/rest/http_connection.h"

namespace monolith {
namespace serving {

// Where a path leads.
struct RestTarget {
  api::ModelSpec spec;
  // "predict", "classify", "regress", "metadata", or "" for the states.
  std::string verb;
};

// Returns false for a path that is none of the above. Names may have colons, as those of parameter
// servers do: the last one begins the verb of a POST.
bool ParseRestPath(const std::string& method, const std::string& path, RestTarget* target);

// Returns the HTTP status for a gRPC code.
int HttpStatus(Code code);

// Answers in the calling thread.
HttpReply HandleRest(ServingApi* serving, const HttpRequest& request);

// Returns a service that answers in threads of `workers`.
HttpService MakeHttpService(ServingApi* serving, WorkerPool* workers);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_REST_API_H_
