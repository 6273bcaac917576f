#include "monolith/serving/native/rest/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "monolith/native_training/runtime/base/utf8.h"

namespace monolith {
namespace serving {
namespace {

template <typename Float>
std::string ShortestNumber(Float value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  std::string text(buffer, result.ptr);
  // So that a reader takes it for a float, which it is.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

constexpr char kBase64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

int Base64Digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  if (c == '/') return 63;
  return -1;
}

}  // namespace

void AppendJsonString(std::string_view text, std::string* output) {
  *output += '"';
  while (!text.empty()) {
    const size_t length = engine::Utf8Length(text);
    const char c = text[0];
    if (length == 0) {
      *output += "\\ufffd";
    } else if (c == '"' || c == '\\') {
      *output += '\\';
      *output += c;
    } else if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) {
      char escape[8];
      snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      *output += escape;
    } else {
      output->append(text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(1, length));
  }
  *output += '"';
}

std::string JsonNumber(float value) { return ShortestNumber(value); }
std::string JsonNumber(double value) { return ShortestNumber(value); }

bool DecodeBase64(std::string_view text, std::string* bytes) {
  if (text.size() % 4 != 0) return false;
  size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool pad = i >= text.size() - padding;
    const int digit = pad ? 0 : Base64Digit(text[i]);
    if (digit < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if (i % 4 != 3) continue;
    const size_t count = i + 1 == text.size() ? 3 - padding : 3;
    for (size_t k = 0; k < count; ++k) *bytes += static_cast<char>(bits >> (16 - 8 * k) & 0xff);
    bits = 0;
  }
  return true;
}

std::string EncodeBase64(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k) {
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    }
    for (size_t k = 0; k < 4; ++k) {
      text += i + k > bytes.size() ? '=' : kBase64[bits >> (18 - 6 * k) & 0x3f];
    }
  }
  return text;
}

}  // namespace serving
}  // namespace monolith
