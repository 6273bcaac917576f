#include "monolith/native_training/runtime/metrics/json_writer.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "monolith/native_training/runtime/base/utf8.h"

namespace monolith {
namespace metrics {

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t length = engine::Utf8Length(text);
    const char c = text.front();
    if (length == 0) {
      out += "\xEF\xBF\xBD";
    } else if (length > 1) {
      out.append(text.data(), length);
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
  return out;
}

std::string JsonNumber(float value) {
  if (!std::isfinite(value)) return "null";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  std::string out(digits, end);
  // A reader should see a float, also when it is a whole number.
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return out;
}

void JsonObject::Add(std::string_view key, std::string_view json) {
  if (text_.size() > 1) text_ += ", ";
  text_ += JsonString(key);
  text_ += ": ";
  text_ += json;
}

std::string JsonObject::Finish() {
  text_ += '}';
  return std::move(text_);
}

}  // namespace metrics
}  // namespace monolith
