// Calls other servers for the TfServingRemotePredict ops of the models in this process.
#ifndef MONOLITH_SERVING_NATIVE_REMOTE_REMOTE_PREDICTOR_H_
#define MONOLITH_SERVING_NATIVE_REMOTE_REMOTE_PREDICTOR_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "monolith/serving/native/http2/rpc.h"
#include "monolith/serving/native/remote/address_book.h"
#include "monolith/serving/native/remote/channels.h"

namespace monolith {
namespace serving {

class RemotePredictor {
 public:
  // Neither is owned. A `timeout` that is not 0 replaces that of each call.
  RemotePredictor(Channels* channels, AddressBook* addresses, std::chrono::milliseconds timeout)
      : channels_(channels), addresses_(addresses), timeout_(timeout) {}

  // Lets the ops of the library call this object until the process ends.
  Status Install(void* op_library);

  // Sends a serialized PredictRequest to a replica of the model. If that one fails, another one is
  // asked inside the deadline, then one that was there a moment ago, and then the agent for others.
  // A replica that failed is asked again after a second, or when there is no other. `done` runs
  // once, in another thread. Thread-safe.
  void Predict(const std::string& request, const std::string& old_name,
               std::chrono::milliseconds timeout, RpcDone done);

 private:
  struct Attempt;

  // Finds replicas and asks the first one.
  void Start(const std::shared_ptr<Attempt>& attempt);
  void Send(const std::shared_ptr<Attempt>& attempt);
  // Asks the agent for other replicas, once, or gives `reply` up to the caller.
  void StartAgain(const std::shared_ptr<Attempt>& attempt, RpcReply reply);
  // Gives the replica whose turn it is, another one for the case that it fails, and a former one.
  std::vector<std::string> Choose(const ServedModel& model);
  void MarkFailed(const std::string& address);

  Channels* const channels_;
  AddressBook* const addresses_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> next_{0};
  std::mutex mutex_;
  std::map<std::string, Clock::time_point> failed_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REMOTE_REMOTE_PREDICTOR_H_
