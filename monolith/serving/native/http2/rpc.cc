#include "monolith/serving/native/http2/rpc.h"

#include <algorithm>
#include <charconv>

namespace monolith {
namespace serving {
namespace {

constexpr size_t kMaxMessageHeader = 2000;
constexpr char kHexDigits[] = "0123456789ABCDEF";

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::optional<std::chrono::nanoseconds> ParseGrpcTimeout(std::string_view text) {
  // At most eight digits and a unit.
  if (text.size() < 2 || text.size() > 9) return std::nullopt;
  int64_t value = 0;
  const char* end = text.data() + text.size() - 1;
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < 0) return std::nullopt;
  switch (text.back()) {
    case 'H':
      return std::min<std::chrono::nanoseconds>(std::chrono::hours(std::min<int64_t>(value, 1000)),
                                                std::chrono::hours(1000));
    case 'M':
      return std::chrono::minutes(std::min<int64_t>(value, 60'000));
    case 'S':
      return std::chrono::seconds(std::min<int64_t>(value, 3'600'000));
    case 'm':
      return std::chrono::milliseconds(value);
    case 'u':
      return std::chrono::microseconds(value);
    case 'n':
      return std::chrono::nanoseconds(value);
    default:
      return std::nullopt;
  }
}

std::string FormatGrpcTimeout(std::chrono::nanoseconds timeout) {
  const int64_t millis = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
  return std::to_string(std::clamp<int64_t>(millis, 1, 99'999'999)) + "m";
}

std::string EncodeGrpcMessage(std::string_view text) {
  std::string encoded;
  for (const char c : text.substr(0, kMaxMessageHeader)) {
    if (c >= ' ' && c <= '~' && c != '%') {
      encoded += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      encoded += '%';
      encoded += kHexDigits[byte >> 4];
      encoded += kHexDigits[byte & 15];
    }
  }
  return encoded;
}

std::string DecodeGrpcMessage(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      const int high = HexDigit(text[i + 1]);
      const int low = HexDigit(text[i + 2]);
      if (high >= 0 && low >= 0) {
        decoded += static_cast<char>(high * 16 + low);
        i += 2;
        continue;
      }
    }
    decoded += text[i];
  }
  return decoded;
}

std::string GrpcPrefix(int64_t message_bytes) {
  std::string prefix(kGrpcPrefixBytes, '\0');
  for (int i = 0; i < 4; ++i) {
    prefix[1 + i] = static_cast<char>(message_bytes >> (24 - 8 * i) & 0xff);
  }
  return prefix;
}

int64_t GrpcMessageBytes(const std::string& prefix) {
  int64_t size = 0;
  for (int i = 1; i < 5; ++i) size = size << 8 | static_cast<unsigned char>(prefix[i]);
  return size;
}

}  // namespace serving
}  // namespace monolith
