// The client's side of an HTTP/2 connection that carries unary gRPC calls.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_CLIENT_CONNECTION_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_CLIENT_CONNECTION_H_

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "monolith/serving/native/http2/rpc.h"
#include "monolith/serving/native/net/connection.h"

namespace monolith {
namespace serving {

class Http2ClientConnection : public Connection {
 public:
  // `socket` may still be connecting.
  Http2ClientConnection(EventLoop* loop, FileDescriptor socket, std::string address);
  ~Http2ClientConnection() override;

  // Sends a call. `done` runs once, in the loop's thread: with the answer, with DEADLINE_EXCEEDED,
  // or with UNAVAILABLE if the connection breaks.
  void Call(const std::string& path, const std::string& message, Clock::time_point deadline,
            RpcDone done);

  // Whether a new call may succeed.
  bool usable() const { return !closed() && session_ != nullptr && !going_away_; }

  void OnTick(Clock::time_point) override {}
  void Shutdown() override { Close(); }

 protected:
  Next Consume(const char* data, size_t size) override;
  Next Produce(std::string* output, size_t room) override;
  // Flow control and the number of calls bound the waiting output.
  bool ReadsWhileWriting() const override { return true; }
  void OnClosed() override;

 private:
  struct Stream {
    std::string request;
    size_t sent = 0;
    std::string http_status;
    // -1 until the header has come.
    int grpc_status = -1;
    std::string grpc_message;
    std::string body;
    EventLoop::Timer timer;
    RpcDone done;
  };

  friend struct ClientCallbacks;

  void OnHeader(int32_t id, std::string_view name, std::string_view value);
  void OnData(int32_t id, const uint8_t* data, size_t size);
  void OnStreamClose(int32_t id, uint32_t error_code);
  ssize_t ReadRequest(int32_t id, uint8_t* buffer, size_t size, uint32_t* flags);
  void Finish(int32_t id, RpcReply reply);

  const std::string address_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, Stream> streams_;
  bool going_away_ = false;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_CLIENT_CONNECTION_H_
