// Reads HTTP/1.1 requests, strictly: llhttp with rules of our own on top.
#ifndef MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_
#define MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_

#include <llhttp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "monolith/serving/native/base/memory_budget.h"

namespace monolith {
namespace serving {

struct HttpRequest {
  std::string method;
  // Without a query, %XX decoded.
  std::string path;
  std::string body;
  bool keep_alive = true;
  // True once the client no longer waits for the answer.
  std::shared_ptr<std::atomic<bool>> cancelled;
  // Counts the body until the request is answered.
  MemoryLease lease;
};

// Reads one request after the other, in time that is linear in the bytes. llhttp refuses what
// proxies understand in different ways: bare line feeds, folded headers, two lengths. This class
// refuses what costs too much: long headers, bodies and trailers, and bodies of tiny chunks.
class HttpParser {
 public:
  HttpParser(int64_t max_header_bytes, int64_t max_body_bytes);
  HttpParser(const HttpParser&) = delete;
  HttpParser& operator=(const HttpParser&) = delete;

  enum class Result { kNeedsMore, kComplete, kRefused };

  // Reads from the front of `input` and says how many bytes it took: all, unless a request is
  // complete or refused. After kComplete comes Take; after kRefused nothing.
  Result Parse(std::string_view input, size_t* taken);

  // After kComplete: gives the request, and is ready for the next one.
  HttpRequest Take();

  // After kRefused: the HTTP status and the reason.
  int refusal() const { return refusal_; }
  const std::string& reason() const { return reason_; }

  // Whether a request has begun, and whether only its body is missing.
  bool in_request() const { return state_ != State::kIdle; }
  bool in_body() const { return state_ == State::kBody; }
  // Returns the memory that the request takes so far.
  int64_t body_bytes() const { return static_cast<int64_t>(request_.body.capacity()); }
  // Drops a request that is not read to its end.
  void Drop() { FreeText(&request_.body); }
  // Returns true once for a client that waits for "100 Continue".
  bool TakeExpectation();

 private:
  enum class State { kIdle, kHeader, kBody, kComplete };
  friend struct HttpCallbacks;

  // All return what llhttp wants of a callback: 0, or an error that ends the parse.
  int Refuse(int status, const std::string& reason);
  int CountHeader(size_t size);
  int CountFraming(size_t size);
  int EndField();
  int EndHeader();
  int BeginChunk();
  int TakeBody(const char* data, size_t size);
  Result RefuseAsRead(llhttp_errno_t error);

  const int64_t max_header_bytes_;
  const int64_t max_body_bytes_;
  llhttp_settings_t settings_;
  llhttp_t parser_;
  State state_ = State::kIdle;
  HttpRequest request_;
  std::string url_;
  std::string field_;
  std::string value_;
  int num_hosts_ = 0;
  bool expects_continue_ = false;
  int64_t empty_bytes_ = 0;
  int64_t header_bytes_ = 0;
  int64_t raw_header_bytes_ = 0;
  int64_t framing_bytes_ = 0;
  int refusal_ = 0;
  std::string reason_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_
