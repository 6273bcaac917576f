#include "monolith/serving/native/rest/http_parser.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace monolith {
namespace serving {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kHeaderEnd = "\r\n\r\n";

bool IsToken(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  });
}

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

bool ParseWhole(std::string_view text, int base, int64_t* value) {
  if (text.empty() || text.size() > 15 || text[0] == '-') return false;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *value, base);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

bool DecodePath(std::string_view text, std::string* path) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      *path += text[i];
      continue;
    }
    int64_t code = 0;
    if (i + 2 >= text.size() || !ParseWhole(text.substr(i + 1, 2), 16, &code)) return false;
    *path += static_cast<char>(code);
    i += 2;
  }
  return true;
}

}  // namespace

HttpParser::Result HttpParser::Refuse(int status, const std::string& reason) {
  refusal_ = status;
  reason_ = reason;
  return Result::kRefused;
}

HttpRequest HttpParser::Take() {
  HttpRequest request = std::exchange(request_, HttpRequest());
  state_ = State::kHeader;
  content_length_ = -1;
  chunked_ = false;
  expects_continue_ = false;
  chunk_left_ = 0;
  trailer_bytes_ = 0;
  return request;
}

bool HttpParser::TakeExpectation() {
  return in_body() && state_ != State::kComplete && std::exchange(expects_continue_, false);
}

HttpParser::Result HttpParser::Parse(std::string* input) {
  Result result = Result::kNeedsMore;
  while (Step(input, &result)) {
  }
  if (result == Result::kNeedsMore && state_ == State::kComplete) return Result::kComplete;
  return result;
}

// Returns false when there is no more to do with `input`.
bool HttpParser::Step(std::string* input, Result* result) {
  switch (state_) {
    case State::kHeader: {
      // Empty lines before a request are allowed.
      while (input->compare(0, kLineEnd.size(), kLineEnd) == 0) input->erase(0, kLineEnd.size());
      const size_t end = input->find(kHeaderEnd);
      const int64_t size = static_cast<int64_t>(std::min(end, input->size()));
      if (size > max_header_bytes_) {
        *result =
            Refuse(431, "the header has more than " + std::to_string(max_header_bytes_) + " bytes");
        return false;
      }
      if (end == std::string::npos) return false;
      *result = ParseHeader(std::string_view(*input).substr(0, end));
      if (*result == Result::kRefused) return false;
      input->erase(0, end + kHeaderEnd.size());
      return state_ != State::kComplete;
    }
    case State::kBody:
    case State::kChunk: {
      const int64_t count = std::min(chunk_left_, static_cast<int64_t>(input->size()));
      request_.body.append(*input, 0, static_cast<size_t>(count));
      input->erase(0, static_cast<size_t>(count));
      chunk_left_ -= count;
      if (chunk_left_ > 0) return false;
      state_ = state_ == State::kBody ? State::kComplete : State::kChunkEnd;
      return state_ != State::kComplete;
    }
    case State::kChunkEnd:
      if (input->size() < kLineEnd.size()) return false;
      if (input->compare(0, kLineEnd.size(), kLineEnd) != 0) {
        *result = Refuse(400, "a chunk is longer than it says");
        return false;
      }
      input->erase(0, kLineEnd.size());
      state_ = State::kChunkSize;
      return true;
    case State::kChunkSize: {
      const size_t end = input->find(kLineEnd);
      if (end == std::string::npos) {
        if (input->size() > 1024) *result = Refuse(400, "a chunk has no size");
        return false;
      }
      const std::string_view line = std::string_view(*input).substr(0, end);
      if (!ParseWhole(line.substr(0, line.find(';')), 16, &chunk_left_)) {
        *result = Refuse(400, "a chunk has no size");
        return false;
      }
      input->erase(0, end + kLineEnd.size());
      if (static_cast<int64_t>(request_.body.size()) + chunk_left_ > max_body_bytes_) {
        *result =
            Refuse(413, "the body has more than " + std::to_string(max_body_bytes_) + " bytes");
        return false;
      }
      state_ = chunk_left_ == 0 ? State::kTrailer : State::kChunk;
      return true;
    }
    case State::kTrailer: {
      const size_t end = input->find(kLineEnd);
      trailer_bytes_ += static_cast<int64_t>(std::min(end, input->size()));
      if (trailer_bytes_ > max_header_bytes_) {
        *result = Refuse(431, "the trailer is too long");
        return false;
      }
      if (end == std::string::npos) return false;
      input->erase(0, end + kLineEnd.size());
      if (end == 0) state_ = State::kComplete;
      return state_ != State::kComplete;
    }
    case State::kComplete:
      return false;
  }
  return false;
}

HttpParser::Result HttpParser::ParseHeader(std::string_view header) {
  bool first = true;
  while (true) {
    const size_t end = std::min(header.find(kLineEnd), header.size());
    const std::string_view line = header.substr(0, end);
    const Result result = first ? ParseRequestLine(line) : ParseField(line);
    if (result == Result::kRefused) return result;
    first = false;
    if (end == header.size()) break;
    header.remove_prefix(end + kLineEnd.size());
  }
  if (chunked_ && content_length_ >= 0) {
    return Refuse(400, "the request has Content-Length and Transfer-Encoding");
  }
  if (content_length_ > max_body_bytes_) {
    return Refuse(413, "the body has more than " + std::to_string(max_body_bytes_) + " bytes");
  }
  chunk_left_ = std::max<int64_t>(0, content_length_);
  state_ = chunked_ ? State::kChunkSize : chunk_left_ > 0 ? State::kBody : State::kComplete;
  return Result::kNeedsMore;
}

HttpParser::Result HttpParser::ParseRequestLine(std::string_view line) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || last == first) return Refuse(400, "no request line");
  const std::string_view method = line.substr(0, first);
  std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!IsToken(method)) return Refuse(400, "the method is no word");
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    return Refuse(version.substr(0, 5) == "HTTP/" ? 505 : 400, "want HTTP/1.1");
  }
  const bool printable =
      std::all_of(target.begin(), target.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (target.empty() || target[0] != '/' || !printable) return Refuse(400, "want a path");
  target = target.substr(0, target.find('?'));
  if (!DecodePath(target, &request_.path)) return Refuse(400, "the path has a wrong %XX");
  request_.method = method;
  request_.keep_alive = version == "HTTP/1.1";
  return Result::kNeedsMore;
}

HttpParser::Result HttpParser::ParseField(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !IsToken(line.substr(0, colon))) {
    return Refuse(400, "a header has no name");
  }
  const std::string name = Lower(line.substr(0, colon));
  const std::string_view value = Trim(line.substr(colon + 1));
  const bool clean = std::all_of(value.begin(), value.end(), [](char c) {
    return static_cast<unsigned char>(c) >= ' ' || c == '\t';
  });
  if (!clean) return Refuse(400, "a header has a control character");
  if (name == "content-length") {
    int64_t length = 0;
    if (content_length_ >= 0 || !ParseWhole(value, 10, &length)) {
      return Refuse(400, "Content-Length is not one number");
    }
    content_length_ = length;
  } else if (name == "transfer-encoding") {
    if (chunked_ || Lower(value) != "chunked")
      return Refuse(501, "want Transfer-Encoding: chunked");
    chunked_ = true;
  } else if (name == "content-encoding") {
    if (Lower(value) != "identity") return Refuse(415, "the body is compressed");
  } else if (name == "connection") {
    const std::string connection = Lower(value);
    if (connection.find("close") != std::string::npos) request_.keep_alive = false;
  } else if (name == "expect") {
    if (Lower(value) != "100-continue") return Refuse(417, "want Expect: 100-continue");
    expects_continue_ = true;
  }
  return Result::kNeedsMore;
}

}  // namespace serving
}  // namespace monolith
