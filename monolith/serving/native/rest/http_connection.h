// The server's side of an HTTP/1.1 connection.
#ifndef MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_
#define MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "monolith/serving/native/net/connection.h"
#include "monolith/serving/native/rest/http_parser.h"

namespace monolith {
namespace serving {

struct HttpReply {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
};

// Called once, from any thread.
using HttpDone = std::function<void(HttpReply)>;
// Must not block: it runs in the thread that serves all sockets.
using HttpService = std::function<void(HttpRequest request, HttpDone done)>;

struct HttpLimits {
  int64_t max_header_bytes = 16 << 10;
  int64_t max_body_bytes = 64 << 20;
  // Of an answer.
  std::chrono::milliseconds answer_timeout{30'000};
  std::chrono::seconds header_timeout{10};
  // A body that stops coming, or an answer that is not read.
  std::chrono::seconds stall_timeout{30};
  std::chrono::seconds idle_timeout{120};
};

// Answers requests one after the other. After a request that is refused the connection is closed:
// where the next one would begin is not certain.
class HttpConnection : public Connection {
 public:
  HttpConnection(EventLoop* loop, FileDescriptor socket, const HttpLimits& limits,
                 HttpService service);

  void OnTick(Clock::time_point now) override;
  void Shutdown() override;

 protected:
  Next Consume(const char* data, size_t size) override;
  Next Produce(std::string* output, size_t room) override;
  bool OnEndOfInput() override;
  void OnClosed() override;

 private:
  void ParseNext();
  void Dispatch(HttpRequest request);
  void Answer(int64_t number, const HttpReply& reply);
  void Write(const HttpReply& reply, bool keep_alive);

  const HttpLimits limits_;
  const HttpService service_;
  HttpParser parser_;
  std::string input_;
  std::string answer_;
  bool busy_ = false;
  bool keep_alive_ = true;
  bool ends_ = false;
  // A refused request goes on coming: a client that is cut off while it sends never reads why.
  bool discards_ = false;
  int64_t discarded_ = 0;
  // Which request is being answered: answers to earlier ones come too late.
  int64_t number_ = 0;
  std::optional<EventLoop::Timer> timer_;
  Clock::time_point last_read_ = Clock::now();
  Clock::time_point request_start_ = Clock::now();
};

// Returns the body of an error: {"error": "..."}.
std::string HttpErrorBody(const std::string& message);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_
