#include "monolith/serving/native/rest/http_connection.h"

#include <utility>

#include "monolith/serving/native/rest/json.h"

namespace monolith {
namespace serving {
namespace {

// What a client may send ahead while its request is being answered.
constexpr size_t kMaxAhead = 1 << 20;
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
                               HttpService service)
    : Connection(loop, std::move(socket)),
      limits_(limits),
      service_(std::move(service)),
      parser_(limits.max_header_bytes, limits.max_body_bytes) {}

Connection::Next HttpConnection::Consume(const char* data, size_t size) {
  if (discards_) {
    discarded_ += static_cast<int64_t>(size);
    return discarded_ > kMaxDiscarded ? Next::kCloseNow : Next::kGoOn;
  }
  if (input_.empty() && !parser_.in_body()) request_start_ = Clock::now();
  last_read_ = Clock::now();
  input_.append(data, size);
  if (busy_) return input_.size() > kMaxAhead ? Next::kCloseNow : Next::kGoOn;
  ParseNext();
  return Next::kGoOn;
}

Connection::Next HttpConnection::Produce(std::string* output, size_t) {
  output->append(answer_);
  answer_.clear();
  return ends_ ? Next::kCloseWhenWritten : Next::kGoOn;
}

bool HttpConnection::OnEndOfInput() {
  keep_alive_ = false;
  return busy_;
}

void HttpConnection::OnClosed() {
  if (timer_.has_value()) loop()->Cancel(*timer_);
}

void HttpConnection::OnTick(Clock::time_point now) {
  if (closed() || busy_) return;
  if (discards_) {
    if (now - request_start_ > limits_.header_timeout) Close();
    return;
  }
  const bool began = !input_.empty() || parser_.in_body();
  const bool header_late =
      began && !parser_.in_body() && now - request_start_ > limits_.header_timeout;
  const bool body_late = parser_.in_body() && now - last_read_ > limits_.stall_timeout;
  const bool unread = output_waits() && now - last_write() > limits_.stall_timeout;
  const bool idle = !began && now - last_read_ > limits_.idle_timeout;
  if (header_late || body_late || unread || idle) Close();
}

void HttpConnection::Shutdown() {
  if (closed()) return;
  keep_alive_ = false;
  if (!busy_ || discards_) ends_ = true;
  Flush();
}

void HttpConnection::ParseNext() {
  switch (parser_.Parse(&input_)) {
    case HttpParser::Result::kNeedsMore:
      if (parser_.TakeExpectation()) answer_ += "HTTP/1.1 100 Continue\r\n\r\n";
      return;
    case HttpParser::Result::kRefused:
      Write(HttpReply{parser_.refusal(), HttpErrorBody(parser_.reason())}, false);
      discards_ = true;
      input_.clear();
      request_start_ = Clock::now();
      return;
    case HttpParser::Result::kComplete:
      return Dispatch(parser_.Take());
  }
}

void HttpConnection::Dispatch(HttpRequest request) {
  busy_ = true;
  keep_alive_ = keep_alive_ && request.keep_alive;
  const int64_t number = ++number_;
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
  if (timer_.has_value()) loop()->Cancel(*timer_);
  timer_.reset();
  Write(reply, keep_alive_);
  if (!keep_alive_) ends_ = true;
  request_start_ = last_read_ = Clock::now();
  if (!ends_ && !input_.empty()) ParseNext();
  Flush();
}

void HttpConnection::Write(const HttpReply& reply, bool keep_alive) {
  answer_ += "HTTP/1.1 " + std::to_string(reply.status) + " " + ReasonPhrase(reply.status) +
             "\r\nContent-Type: " + reply.content_type +
             "\r\nContent-Length: " + std::to_string(reply.body.size()) +
             (keep_alive ? "\r\n\r\n" : "\r\nConnection: close\r\n\r\n");
  answer_ += reply.body;
}

}  // namespace serving
}  // namespace monolith
