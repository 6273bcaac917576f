#include "monolith/serving/native/rest/http_parser.h"

#include <algorithm>
#include <charconv>
#include <exception>
#include <utility>

namespace monolith {
namespace serving {
namespace {

// Empty lines before a request are allowed, up to a limit.
constexpr int64_t kMaxEmptyBytes = 16;
// Chunk sizes, extensions and trailers may take this much more than the body.
constexpr int64_t kMaxFramingBytes = 64 << 10;
constexpr int64_t kChunkFramingBytes = 5;

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

bool DecodePath(std::string_view text, std::string* path) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      *path += text[i];
      continue;
    }
    const std::string_view digits = text.substr(i + 1, 2);
    unsigned code = 0;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 2 || parsed.ec != std::errc() || parsed.ptr != digits.data() + 2) {
      return false;
    }
    *path += static_cast<char>(code);
    i += 2;
  }
  return true;
}

}  // namespace

// Called by llhttp. Exceptions must not pass through it.
struct HttpCallbacks {
  static HttpParser* Self(llhttp_t* parser) { return static_cast<HttpParser*>(parser->data); }

  template <typename Function>
  static int Guard(llhttp_t* parser, Function function) {
    try {
      return function(Self(parser));
    } catch (const std::exception&) {
      return Self(parser)->Refuse(429, "out of memory");
    }
  }

  static int Url(llhttp_t* parser, const char* data, size_t size) {
    return Guard(parser, [&](HttpParser* self) {
      self->url_.append(data, size);
      return self->CountHeader(size);
    });
  }
  static int Field(llhttp_t* parser, const char* data, size_t size) {
    return Guard(parser, [&](HttpParser* self) {
      if (self->in_body()) return self->CountFraming(size);
      self->field_.append(data, size);
      return self->CountHeader(size);
    });
  }
  static int Value(llhttp_t* parser, const char* data, size_t size) {
    return Guard(parser, [&](HttpParser* self) {
      if (self->in_body()) return self->CountFraming(size);
      self->value_.append(data, size);
      return self->CountHeader(size);
    });
  }
  static int Extension(llhttp_t* parser, const char*, size_t size) {
    return Guard(parser, [&](HttpParser* self) { return self->CountFraming(size); });
  }
  static int ValueEnd(llhttp_t* parser) {
    return Guard(parser, [](HttpParser* self) { return self->EndField(); });
  }
  static int HeaderEnd(llhttp_t* parser) {
    return Guard(parser, [](HttpParser* self) { return self->EndHeader(); });
  }
  static int Chunk(llhttp_t* parser) {
    return Guard(parser, [](HttpParser* self) { return self->BeginChunk(); });
  }
  static int Body(llhttp_t* parser, const char* data, size_t size) {
    return Guard(parser, [&](HttpParser* self) { return self->TakeBody(data, size); });
  }
  static int End(llhttp_t* parser) {
    Self(parser)->state_ = HttpParser::State::kComplete;
    return HPE_PAUSED;
  }
};

HttpParser::HttpParser(int64_t max_header_bytes, int64_t max_body_bytes)
    : max_header_bytes_(max_header_bytes), max_body_bytes_(max_body_bytes) {
  llhttp_settings_init(&settings_);
  settings_.on_url = HttpCallbacks::Url;
  settings_.on_header_field = HttpCallbacks::Field;
  settings_.on_header_value = HttpCallbacks::Value;
  settings_.on_header_value_complete = HttpCallbacks::ValueEnd;
  settings_.on_headers_complete = HttpCallbacks::HeaderEnd;
  settings_.on_chunk_header = HttpCallbacks::Chunk;
  settings_.on_chunk_extension_name = HttpCallbacks::Extension;
  settings_.on_chunk_extension_value = HttpCallbacks::Extension;
  settings_.on_body = HttpCallbacks::Body;
  settings_.on_message_complete = HttpCallbacks::End;
  llhttp_init(&parser_, HTTP_REQUEST, &settings_);
  parser_.data = this;
}

int HttpParser::Refuse(int status, const std::string& reason) {
  if (refusal_ == 0) {
    refusal_ = status;
    reason_ = reason;
  }
  return HPE_USER;
}

HttpRequest HttpParser::Take() {
  HttpRequest request = std::exchange(request_, HttpRequest());
  state_ = State::kIdle;
  url_.clear();
  num_hosts_ = 0;
  expects_continue_ = false;
  empty_bytes_ = 0;
  header_bytes_ = 0;
  raw_header_bytes_ = 0;
  framing_bytes_ = 0;
  llhttp_resume(&parser_);
  return request;
}

bool HttpParser::TakeExpectation() { return in_body() && std::exchange(expects_continue_, false); }

HttpParser::Result HttpParser::Parse(std::string_view input, size_t* taken) {
  *taken = 0;
  if (refusal_ != 0) return Result::kRefused;
  if (state_ == State::kIdle) {
    while (*taken < input.size() && (input[*taken] == '\r' || input[*taken] == '\n')) ++*taken;
    empty_bytes_ += static_cast<int64_t>(*taken);
    if (empty_bytes_ > kMaxEmptyBytes) {
      Refuse(400, "there are empty lines instead of a request");
      return Result::kRefused;
    }
    if (*taken == input.size()) return Result::kNeedsMore;
    state_ = State::kHeader;
  }
  const char* const start = input.data() + *taken;
  const size_t size = input.size() - *taken;
  const llhttp_errno_t error = llhttp_execute(&parser_, start, size);
  if (error == HPE_PAUSED && state_ == State::kComplete) {
    *taken += static_cast<size_t>(llhttp_get_error_pos(&parser_) - start);
    return Result::kComplete;
  }
  *taken = input.size();
  if (error != HPE_OK) return RefuseAsRead(error);
  if (state_ != State::kHeader) return Result::kNeedsMore;
  // Spaces before a value are not counted elsewhere.
  raw_header_bytes_ += static_cast<int64_t>(size);
  if (raw_header_bytes_ <= 2 * max_header_bytes_) return Result::kNeedsMore;
  CountHeader(static_cast<size_t>(raw_header_bytes_));
  return Result::kRefused;
}

HttpParser::Result HttpParser::RefuseAsRead(llhttp_errno_t error) {
  const char* const why = llhttp_get_error_reason(&parser_);
  const std::string reason = why == nullptr || *why == '\0' ? llhttp_errno_name(error) : why;
  if (error == HPE_INVALID_VERSION || error == HPE_PAUSED_H2_UPGRADE) {
    Refuse(505, "want HTTP/1.1");
  } else {
    Refuse(400, "the request is not HTTP/1.1: " + reason);
  }
  return Result::kRefused;
}

int HttpParser::CountHeader(size_t size) {
  header_bytes_ += static_cast<int64_t>(size);
  if (header_bytes_ <= max_header_bytes_) return 0;
  return Refuse(431, "the header has more than " + std::to_string(max_header_bytes_) + " bytes");
}

int HttpParser::CountFraming(size_t size) {
  framing_bytes_ += static_cast<int64_t>(size);
  if (framing_bytes_ <= kMaxFramingBytes + static_cast<int64_t>(request_.body.size())) return 0;
  return Refuse(400, "the chunks are too small for what they bring");
}

int HttpParser::EndField() {
  if (in_body()) return CountFraming(4);
  const std::string name = Lower(field_);
  const std::string value = Lower(Trim(value_));
  field_.clear();
  value_.clear();
  if (name == "host") {
    ++num_hosts_;
  } else if (name == "transfer-encoding") {
    if (value != "chunked") return Refuse(501, "want Transfer-Encoding: chunked");
  } else if (name == "content-encoding") {
    if (value != "identity") return Refuse(415, "the body is compressed");
  } else if (name == "expect") {
    if (value != "100-continue") return Refuse(417, "want Expect: 100-continue");
    expects_continue_ = true;
  }
  return CountHeader(4);
}

int HttpParser::EndHeader() {
  if (parser_.http_major != 1) {
    return Refuse(parser_.http_major > 1 ? 505 : 400, "want HTTP/1.1");
  }
  const bool is_1_0 = parser_.http_minor == 0;
  if (num_hosts_ > 1 || (num_hosts_ == 0 && !is_1_0)) {
    return Refuse(400, "want one Host header");
  }
  const bool printable =
      std::all_of(url_.begin(), url_.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (url_.empty() || url_[0] != '/' || !printable) return Refuse(400, "want a path");
  if (!DecodePath(std::string_view(url_).substr(0, url_.find('?')), &request_.path)) {
    return Refuse(400, "the path has a wrong %XX");
  }
  const bool chunked = (parser_.flags & F_CHUNKED) != 0;
  if (!chunked && parser_.content_length > static_cast<uint64_t>(max_body_bytes_)) {
    return Refuse(413, "the body has more than " + std::to_string(max_body_bytes_) + " bytes");
  }
  request_.method = llhttp_method_name(static_cast<llhttp_method_t>(parser_.method));
  request_.keep_alive = !is_1_0 && llhttp_should_keep_alive(&parser_) != 0;
  // Only HTTP/1.1 is spoken here, whatever a client offers.
  parser_.upgrade = 0;
  state_ = State::kBody;
  return 0;
}

int HttpParser::BeginChunk() {
  if (parser_.content_length > static_cast<uint64_t>(max_body_bytes_) - request_.body.size()) {
    return Refuse(413, "the body has more than " + std::to_string(max_body_bytes_) + " bytes");
  }
  return CountFraming(kChunkFramingBytes);
}

int HttpParser::TakeBody(const char* data, size_t size) {
  std::string& body = request_.body;
  if (body.size() + size > body.capacity() && (parser_.flags & F_CHUNKED) == 0) {
    // Reserved as the body arrives, not when it is announced: `content_length` is the rest of it.
    const size_t left = static_cast<size_t>(parser_.content_length);
    body.reserve(std::min(body.size() + size + left, 2 * (body.size() + size)));
  }
  body.append(data, size);
  return 0;
}

}  // namespace serving
}  // namespace monolith
