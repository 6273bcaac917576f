// Open connections to other servers, by address.
#ifndef MONOLITH_SERVING_NATIVE_REMOTE_CHANNELS_H_
#define MONOLITH_SERVING_NATIVE_REMOTE_CHANNELS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "monolith/serving/native/base/worker_pool.h"
#include "monolith/serving/native/http2/client_connection.h"
#include "monolith/serving/native/http2/rpc.h"

namespace monolith {
namespace serving {

// Has a thread for sockets of its own, so that a busy server does not delay the answers it waits
// for. A connection is made at the first call and kept; one that broke is made again.
class Channels {
 public:
  Channels() = default;
  ~Channels();

  Status Open();

  // Sends a call. `done` runs once, in a thread of a pool: it may compute. Thread-safe.
  void Call(const std::string& address, const std::string& path, std::string message,
            Clock::time_point deadline, RpcDone done);

 private:
  struct Waiting {
    std::string path;
    std::string message;
    Clock::time_point deadline;
    RpcDone done;
  };
  struct Channel {
    std::shared_ptr<Http2ClientConnection> connection;
    // While a name is looked up.
    bool connecting = false;
    std::vector<Waiting> waiting;
  };

  // Both in the loop's thread.
  void Send(const std::string& address, Waiting call);
  void Connected(const std::string& address, const Status& status,
                 const std::shared_ptr<FileDescriptor>& socket);

  EventLoop loop_;
  std::thread thread_;
  std::unique_ptr<WorkerPool> workers_;
  std::map<std::string, Channel> channels_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REMOTE_CHANNELS_H_
