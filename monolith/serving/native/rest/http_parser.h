// A strict reader of HTTP/1.1 requests.
#ifndef MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_
#define MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace monolith {
namespace serving {

struct HttpRequest {
  std::string method;
  // Without a query, %XX decoded.
  std::string path;
  std::string body;
  bool keep_alive = true;
};

// Reads one request after the other. Lines end with CR LF, a header has one line, a body has either
// a length or chunks: what proxies understand in different ways is refused.
class HttpParser {
 public:
  HttpParser(int64_t max_header_bytes, int64_t max_body_bytes)
      : max_header_bytes_(max_header_bytes), max_body_bytes_(max_body_bytes) {}

  enum class Result { kNeedsMore, kComplete, kRefused };

  // Takes what it understands from the front of `input`.
  Result Parse(std::string* input);

  // After kComplete: gives the request, and is ready for the next one.
  HttpRequest Take();

  // After kRefused: the HTTP status and the reason.
  int refusal() const { return refusal_; }
  const std::string& reason() const { return reason_; }

  // Whether the header was read and the body is waited for.
  bool in_body() const { return state_ != State::kHeader; }
  // Returns true once for a client that waits for "100 Continue".
  bool TakeExpectation();

 private:
  enum class State { kHeader, kBody, kChunkSize, kChunk, kChunkEnd, kTrailer, kComplete };

  Result Refuse(int status, const std::string& reason);
  Result ParseHeader(std::string_view header);
  Result ParseRequestLine(std::string_view line);
  Result ParseField(std::string_view line);
  bool Step(std::string* input, Result* result);

  const int64_t max_header_bytes_;
  const int64_t max_body_bytes_;
  State state_ = State::kHeader;
  HttpRequest request_;
  int64_t content_length_ = -1;
  bool chunked_ = false;
  bool expects_continue_ = false;
  int64_t chunk_left_ = 0;
  int64_t trailer_bytes_ = 0;
  int refusal_ = 0;
  std::string reason_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_HTTP_PARSER_H_
