// The server's side of an HTTP/1.1 connection.
#ifndef MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_
#define MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/net/connection.h"
#include "monolith/serving/native/rest/http_parser.h"

namespace monolith {
namespace serving {

struct HttpReply {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  // Counts the body until it is sent; may be null.
  std::shared_ptr<MemoryLease> lease = nullptr;
};

// Called once, from any thread.
using HttpDone = std::function<void(HttpReply)>;
// Must not block: it runs in the thread that serves all sockets.
using HttpService = std::function<void(HttpRequest request, HttpDone done)>;

struct HttpLimits {
  int64_t max_header_bytes = 16 << 10;
  int64_t max_body_bytes = 64 << 20;
  // Limits the time of an answer.
  std::chrono::milliseconds answer_timeout{30'000};
  std::chrono::seconds header_timeout{10};
  // From the first byte of a request to its last.
  std::chrono::seconds request_timeout{60};
  // A body that stops coming, or an answer that is not read.
  std::chrono::seconds stall_timeout{30};
  std::chrono::seconds idle_timeout{120};
};

// Answers requests one after the other. After a request that is refused the connection is closed:
// where the next one would begin is not certain.
class HttpConnection : public Connection {
 public:
  // `budget` bounds the requests of all connections until they are answered.
  HttpConnection(EventLoop* loop, FileDescriptor socket, const HttpLimits& limits,
                 HttpService service, std::shared_ptr<MemoryBudget> budget);
  ~HttpConnection() override;

  void OnTick(Clock::time_point now) override;
  void Shutdown() override;

 protected:
  Next Consume(const char* data, size_t size) override;
  Next Produce(std::string* output, size_t room) override;
  bool OnEndOfInput() override;
  bool TakesInput() const override;
  void OnClosed() override;

 private:
  // Reads `input` up to the end of a request; returns how much that was.
  size_t Parse(std::string_view input);
  // Reads the next request of those that came while others were answered.
  void ParseAhead();
  size_t num_ahead() const { return ahead_.size() - ahead_start_; }
  void Refuse(int status, const std::string& reason);
  void Dispatch(HttpRequest request);
  // Nobody waits for an answer any more, or it has come.
  void Cancel();
  void Answer(int64_t number, const HttpReply& reply);
  // Returns whether what waits here may take the memory that it takes.
  bool CountAhead();
  void Write(const HttpReply& reply, bool keep_alive);

  const HttpLimits limits_;
  const HttpService service_;
  const std::shared_ptr<MemoryBudget> budget_;
  HttpParser parser_;
  // Counts the body of a request that is not complete.
  MemoryLease body_lease_;
  // Bytes that came while a request was being answered, or its answer was not read, from
  // `ahead_start_` on.
  std::string ahead_;
  size_t ahead_start_ = 0;
  MemoryLease ahead_lease_;
  std::string answer_;
  std::shared_ptr<MemoryLease> answer_lease_;
  bool busy_ = false;
  bool keep_alive_ = true;
  bool ends_ = false;
  // A refused request goes on coming: a client that is cut off while it sends never reads why.
  bool discards_ = false;
  int64_t discarded_ = 0;
  // Counts the requests: answers to earlier ones come too late.
  int64_t number_ = 0;
  std::optional<EventLoop::Timer> timer_;
  // Belongs to the request that is being answered.
  std::shared_ptr<std::atomic<bool>> cancelled_;
  Clock::time_point last_read_ = Clock::now();
  Clock::time_point request_start_ = Clock::now();
};

// Returns the body of an error: {"error": "..."}.
std::string HttpErrorBody(const std::string& message);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_HTTP_CONNECTION_H_
