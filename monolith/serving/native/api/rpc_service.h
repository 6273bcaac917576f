// Where calls run: a call that is short runs in the thread that serves the sockets, others in
// threads of their own.
//
// A hand-over to another thread and back costs as much as a small model. Calls that came together
// are shared out if there are cores for them: all but the last go to the workers.
#ifndef MONOLITH_SERVING_NATIVE_API_RPC_SERVICE_H_
#define MONOLITH_SERVING_NATIVE_API_RPC_SERVICE_H_

#include <cstdint>

#include "monolith/serving/native/api/serving_api.h"
#include "monolith/serving/native/base/worker_pool.h"
#include "monolith/serving/native/http2/rpc.h"
#include "monolith/serving/native/net/event_loop.h"

namespace monolith {
namespace serving {

struct RpcPlaces {
  // Null if all calls run in workers, as they must where they wait for each other.
  EventLoop* loop = nullptr;
  // How many cores this process may use.
  int64_t num_cores = 1;
};

// Returns a service that runs calls in threads of `workers`, or in that of the loop. A call whose
// client has gone while it was queued is not run. Nothing is owned.
RpcService MakeRpcService(ServingApi* serving, WorkerPool* workers, const RpcPlaces& places);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_API_RPC_SERVICE_H_
