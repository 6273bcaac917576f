#include "monolith/serving/native/rest/http_connection.h"

#include <utility>

#include "monolith/serving/native/rest/json.h"

namespace monolith {
namespace serving {
namespace {

// When a client has sent so much ahead, no more is read before its request is answered.
constexpr size_t kMaxAhead = 64 << 10;
constexpr int64_t kMaxDiscarded = 512 << 20;

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 412:
      return "Precondition Failed";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return "Error";
  }
}

}  // namespace

std::string HttpErrorBody(const std::string& message) {
  std::string body = "{\"error\": ";
  AppendJsonString(message, &body);
  return body + "}";
}

HttpConnection::HttpConnection(EventLoop* loop, FileDescriptor socket, const HttpLimits& limits,
                               HttpService service, std::shared_ptr<MemoryBudget> budget)
    : Connection(loop, std::move(socket)),
      limits_(limits),
      service_(std::move(service)),
      budget_(std::move(budget)),
      parser_(limits.max_header_bytes, limits.max_body_bytes),
      body_lease_(budget_),
      ahead_lease_(budget_) {}

HttpConnection::~HttpConnection() { Cancel(); }

bool HttpConnection::TakesInput() const { return num_ahead() < kMaxAhead; }

Connection::Next HttpConnection::Consume(const char* data, size_t size) {
  if (discards_) {
    discarded_ += static_cast<int64_t>(size);
    return discarded_ > kMaxDiscarded ? Next::kCloseNow : Next::kGoOn;
  }
  last_read_ = Clock::now();
  if (!parser_.in_request()) request_start_ = last_read_;
  std::string_view input(data, size);
  if (!busy_ && num_ahead() == 0 && !output_waits()) input.remove_prefix(Parse(input));
  if (input.empty() || discards_) return Next::kGoOn;
  ahead_.erase(0, std::exchange(ahead_start_, 0));
  ahead_.append(input);
  return CountAhead() ? Next::kGoOn : Next::kCloseNow;
}

Connection::Next HttpConnection::Produce(std::string* output, size_t) {
  // When there is nothing new, what was taken before is sent, and the next request has its turn:
  // answers to a client that does not read them must not add up.
  if (answer_.empty()) {
    answer_lease_.reset();
    if (!busy_ && !ends_ && num_ahead() > 0) ParseAhead();
  }
  // A large answer is there once, and not kept afterwards.
  if (output->empty()) {
    output->swap(answer_);
  } else {
    output->append(answer_);
  }
  FreeText(&answer_);
  return ends_ ? Next::kCloseWhenWritten : Next::kGoOn;
}

bool HttpConnection::OnEndOfInput() {
  keep_alive_ = false;
  return busy_;
}

void HttpConnection::OnClosed() { Cancel(); }

void HttpConnection::Cancel() {
  if (timer_.has_value()) loop()->Cancel(*timer_);
  timer_.reset();
  if (cancelled_ != nullptr) cancelled_->store(true);
}

void HttpConnection::OnTick(Clock::time_point now) {
  if (closed() || busy_) return;
  if (discards_) {
    if (now - request_start_ > limits_.header_timeout) Close();
    return;
  }
  const bool began = parser_.in_request();
  const bool header_late =
      began && !parser_.in_body() && now - request_start_ > limits_.header_timeout;
  const bool body_late = parser_.in_body() && (now - last_read_ > limits_.stall_timeout ||
                                               now - request_start_ > limits_.request_timeout);
  const bool unread =
      reads_too_slowly(now) || (output_waits() && now - last_write() > limits_.stall_timeout);
  const bool idle = !began && now - last_read_ > limits_.idle_timeout;
  if (header_late || body_late || unread || idle) Close();
}

void HttpConnection::Shutdown() {
  if (closed()) return;
  keep_alive_ = false;
  if (!busy_ || discards_) ends_ = true;
  Flush();
}

size_t HttpConnection::Parse(std::string_view input) {
  size_t taken = 0;
  const HttpParser::Result result = parser_.Parse(input, &taken);
  if (result == HttpParser::Result::kRefused) {
    Refuse(parser_.refusal(), parser_.reason());
  } else if (!body_lease_.Resize(parser_.body_bytes())) {
    Refuse(429, "too many requests are being received");
  } else if (result == HttpParser::Result::kComplete) {
    HttpRequest request = parser_.Take();
    request.lease = std::exchange(body_lease_, MemoryLease(budget_));
    Dispatch(std::move(request));
  } else if (parser_.TakeExpectation()) {
    answer_ += "HTTP/1.1 100 Continue\r\n\r\n";
  }
  return taken;
}

void HttpConnection::ParseAhead() {
  if (!parser_.in_request()) request_start_ = Clock::now();
  ahead_start_ += Parse(std::string_view(ahead_).substr(ahead_start_));
  if (ahead_start_ < ahead_.size() && !discards_) return;
  FreeText(&ahead_);
  ahead_start_ = 0;
  CountAhead();
}

bool HttpConnection::CountAhead() {
  return ahead_lease_.Resize(static_cast<int64_t>(ahead_.capacity()));
}

void HttpConnection::Refuse(int status, const std::string& reason) {
  Write(HttpReply{status, HttpErrorBody(reason)}, false);
  discards_ = true;
  parser_.Drop();
  body_lease_.Release();
  request_start_ = Clock::now();
}

void HttpConnection::Dispatch(HttpRequest request) {
  busy_ = true;
  keep_alive_ = keep_alive_ && request.keep_alive;
  const int64_t number = ++number_;
  cancelled_ = request.cancelled = std::make_shared<std::atomic<bool>>(false);
  const std::weak_ptr<Connection> weak = weak_from_this();
  EventLoop* const event_loop = loop();
  const auto answer = [weak, number](const HttpReply& reply) {
    const std::shared_ptr<Connection> connection = weak.lock();
    if (connection == nullptr) return;
    auto* self = static_cast<HttpConnection*>(connection.get());
    if (self->closed()) return;
    self->Answer(number, reply);
  };
  const auto timeout = limits_.answer_timeout;
  timer_ = event_loop->RunAt(Clock::now() + timeout, [answer, timeout] {
    answer(HttpReply{504,
                     HttpErrorBody("no answer after " + std::to_string(timeout.count()) + " ms")});
  });
  service_(std::move(request), [event_loop, answer](HttpReply reply) {
    event_loop->Post([answer, reply = std::move(reply)] { answer(reply); });
  });
}

void HttpConnection::Answer(int64_t number, const HttpReply& reply) {
  if (!busy_ || number != number_) return;
  busy_ = false;
  Cancel();
  Write(reply, keep_alive_);
  if (!keep_alive_) ends_ = true;
  request_start_ = last_read_ = Clock::now();
  Flush();
}

void HttpConnection::Write(const HttpReply& reply, bool keep_alive) {
  answer_ += "HTTP/1.1 " + std::to_string(reply.status) + " " + ReasonPhrase(reply.status) +
             "\r\nContent-Type: " + reply.content_type +
             "\r\nContent-Length: " + std::to_string(reply.body.size()) +
             (keep_alive ? "\r\n\r\n" : "\r\nConnection: close\r\n\r\n");
  answer_ += reply.body;
  answer_lease_ = reply.lease;
}

}  // namespace serving
}  // namespace monolith
