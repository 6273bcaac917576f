// The server's side of an HTTP/2 connection that carries gRPC calls.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_SERVER_CONNECTION_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_SERVER_CONNECTION_H_

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "monolith/serving/native/http2/rpc.h"
#include "monolith/serving/native/net/connection.h"

namespace monolith {
namespace serving {

struct RpcLimits {
  // Limits one request. A longer one is answered RESOURCE_EXHAUSTED.
  int64_t max_message_bytes = 64 << 20;
  int64_t max_header_bytes = 16 << 10;
  int64_t max_streams = 1000;
  // Limits one message of a stream, what a watch names, and the answers to all streams of a client
  // that it has not read.
  int64_t max_stream_message_bytes = 64 << 10;
  int64_t max_watch_bytes = 1 << 10;
  int64_t max_unread_bytes = 4 << 20;
  // A client that resets more calls in a second is disconnected.
  int64_t max_resets_per_second = 1000;
  // For the begin of a connection, and from the first byte of a call's header to its last.
  std::chrono::seconds header_timeout{10};
  // From the header of a unary call to its last byte.
  std::chrono::seconds request_timeout{60};
  // A request whose body stops coming, or an answer that is not read.
  std::chrono::seconds stall_timeout{30};
};

class Http2ServerConnection : public Connection {
 public:
  // `streams` must outlive the connection. `budget` bounds the requests of all connections until
  // they are answered.
  Http2ServerConnection(EventLoop* loop, FileDescriptor socket, const RpcLimits& limits,
                        RpcService service, const RpcStreamMethods* streams,
                        std::shared_ptr<MemoryBudget> budget);
  ~Http2ServerConnection() override;

  void OnTick(Clock::time_point now) override;
  void OnChange() override;
  void Shutdown() override;

 protected:
  Next Consume(const char* data, size_t size) override;
  Next Produce(std::string* output, size_t room) override;
  // Flow control and the number of calls bound what waits.
  bool ReadsWhileWriting() const override { return true; }
  void OnClosed() override;

 private:
  struct Stream {
    std::string method;
    std::string path;
    std::string content_type;
    std::string encoding;
    std::string timeout;
    int64_t header_bytes = 0;
    std::string body;
    // Counts a long header, the body, and what a stream has yet to send.
    MemoryLease lease;
    Clock::time_point start;
    Clock::time_point last_data;
    // When a part of the answer was sent, or began to wait.
    Clock::time_point last_sent;
    // Null for a unary call.
    const RpcStreamMethod* stream_method = nullptr;
    // The request of a watch, once it is known, and the last answer.
    std::optional<std::string> watched;
    std::string told;
    // The client has sent its header, and all.
    bool has_header = false;
    bool complete = false;
    // Whether the answer has begun, and whether its status is known.
    bool responding = false;
    bool answered = false;
    std::shared_ptr<std::atomic<bool>> cancelled;
    std::optional<EventLoop::Timer> deadline;
    Status status;
    // Prefix and message, of a stream those that are not sent yet.
    std::string reply;
    size_t sent = 0;
    std::shared_ptr<MemoryLease> reply_lease;
  };

  friend struct ServerCallbacks;

  void OnHeader(int32_t id, std::string_view name, std::string_view value);
  void OnRequestData(int32_t id, const uint8_t* data, size_t size);
  void OnRequestHeaders(int32_t id);
  void OnRequestEnd(int32_t id);
  void OnStreamClose(int32_t id, uint32_t error_code);
  ssize_t ReadReply(int32_t id, uint8_t* buffer, size_t size, uint32_t* flags);

  void Dispatch(int32_t id, Stream* stream);
  // Answers the messages of a stream that are complete.
  void DispatchMessages(int32_t id, Stream* stream);
  // Appends a message to what a stream sends. Returns false if the stream was refused.
  bool Send(int32_t id, Stream* stream, const std::string& message);
  void Respond(int32_t id, Stream* stream);
  // Sees to it that the call is answered when its time is up. Returns false if it was refused.
  bool SetDeadline(int32_t id, Stream* stream, Clock::time_point* deadline);
  void Answer(int32_t id, RpcReply reply);
  void Refuse(int32_t id, Code code, const std::string& message);
  void RefuseHttp(int32_t id, Stream* stream, const char* http_status);
  // Returns false if memory is short.
  static bool Count(Stream* stream);
  static void ReleaseHeader(Stream* stream);
  static void ReleaseRequest(Stream* stream);
  Stream* Find(int32_t id);

  const RpcLimits limits_;
  const RpcService service_;
  const RpcStreamMethods* const stream_methods_;
  const std::shared_ptr<MemoryBudget> budget_;
  nghttp2_session* session_ = nullptr;
  std::unordered_map<int32_t, Stream> streams_;
  // Bytes that streams, all but unary calls, have yet to send.
  int64_t unread_bytes_ = 0;
  bool settings_came_ = false;
  const Clock::time_point opened_ = Clock::now();
  int64_t resets_in_second_ = 0;
  bool flooded_ = false;
  bool shutting_down_ = false;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_SERVER_CONNECTION_H_
