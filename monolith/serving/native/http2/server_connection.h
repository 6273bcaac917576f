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
  // The limit of a request. Longer ones are answered with RESOURCE_EXHAUSTED.
  int64_t max_message_bytes = 64 << 20;
  int64_t max_header_bytes = 16 << 10;
  int64_t max_streams = 1000;
  // The limits of a message of a stream, of a name to watch, and of unread answers to all streams
  // of a client.
  int64_t max_stream_message_bytes = 64 << 10;
  int64_t max_watch_bytes = 1 << 10;
  int64_t max_unread_bytes = 4 << 20;
  // A client that resets more calls in a second is disconnected.
  int64_t max_resets_per_second = 1000;
  // The time for the preface of a connection, and for the header of a call.
  std::chrono::seconds header_timeout{10};
  // The time from the header of a unary call to its last byte.
  std::chrono::seconds request_timeout{60};
  // The time for which a body may stall, or an answer stay unread.
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
  // Flow control and the number of calls bound the waiting output.
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
    // Counts a long header, the body, and the unsent output of a stream.
    MemoryLease lease;
    Clock::time_point start;
    Clock::time_point last_data;
    // When a part of the answer was last sent, or began to wait.
    Clock::time_point last_sent;
    // Null for a unary call.
    const RpcStreamMethod* stream_method = nullptr;
    // The request of a watch, once known, and the last answer.
    std::optional<std::string> watched;
    std::string told;
    // Whether the client has sent its header, and everything.
    bool has_header = false;
    bool complete = false;
    // Whether the answer has begun, and whether its status is known.
    bool responding = false;
    bool answered = false;
    std::shared_ptr<std::atomic<bool>> cancelled;
    std::optional<EventLoop::Timer> deadline;
    Status status;
    // Prefix and message; for a stream, those not sent yet.
    std::string reply;
    size_t sent = 0;
    ReadPace pace;
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
  // Answers the complete messages of a stream.
  void DispatchMessages(int32_t id, Stream* stream);
  // Appends a message to a stream's output. Returns false if the stream was refused.
  bool Send(int32_t id, Stream* stream, const std::string& message);
  void Respond(int32_t id, Stream* stream);
  // Arranges that the call is answered when its time is up. Returns false if it was refused.
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
  // Unsent bytes of streams, which are all calls but unary ones.
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
