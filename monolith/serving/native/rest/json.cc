#include "monolith/serving/native/rest/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <unordered_set>

namespace monolith {
namespace serving {
namespace {

constexpr int kMaxDepth = 64;

// Returns the bytes of the UTF-8 character at the start of `text`, 0 if there is none.
size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  size_t length = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xbf;
  if (first >= 0xc2 && first <= 0xdf) {
    length = 2;
  } else if (first >= 0xe0 && first <= 0xef) {
    length = 3;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;  // halves of surrogate pairs
  } else if (first >= 0xf0 && first <= 0xf4) {
    length = 4;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
  }
  if (length == 0 || text.size() < length || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return length;
}

void AppendUtf8(uint32_t code, std::string* output) {
  if (code < 0x80) {
    *output += static_cast<char>(code);
  } else if (code < 0x800) {
    *output += static_cast<char>(0xc0 | code >> 6);
    *output += static_cast<char>(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    *output += static_cast<char>(0xe0 | code >> 12);
    *output += static_cast<char>(0x80 | (code >> 6 & 0x3f));
    *output += static_cast<char>(0x80 | (code & 0x3f));
  } else {
    *output += static_cast<char>(0xf0 | code >> 18);
    *output += static_cast<char>(0x80 | (code >> 12 & 0x3f));
    *output += static_cast<char>(0x80 | (code >> 6 & 0x3f));
    *output += static_cast<char>(0x80 | (code & 0x3f));
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Status Parse(Json* value) {
    SkipSpace();
    Status status = ParseValue(value, 0);
    if (!status.ok()) return status;
    SkipSpace();
    return position_ == text_.size() ? Status() : Error("there is more after the value");
  }

 private:
  Status Error(const std::string& what) const {
    return Status(Code::kInvalidArgument,
                  "the body is not JSON: byte " + std::to_string(position_) + ": " + what);
  }

  bool AtEnd() const { return position_ >= text_.size(); }
  char Peek() const { return AtEnd() ? '\0' : text_[position_]; }

  void SkipSpace() {
    while (!AtEnd() && (Peek() == ' ' || Peek() == '\t' || Peek() == '\n' || Peek() == '\r')) {
      ++position_;
    }
  }

  bool TakeWord(std::string_view word) {
    if (text_.substr(position_, word.size()) != word) return false;
    position_ += word.size();
    return true;
  }

  bool Take(char c) {
    if (Peek() != c || AtEnd()) return false;
    ++position_;
    return true;
  }

  Status ParseValue(Json* value, int depth) {
    if (depth > kMaxDepth) return Error("values are nested too deeply");
    switch (Peek()) {
      case '{':
        return ParseObject(value, depth);
      case '[':
        return ParseArray(value, depth);
      case '"':
        value->kind = Json::Kind::kString;
        return ParseString(&value->text);
      default:
        break;
    }
    if (TakeWord("null")) return Status();
    if (TakeWord("true") || TakeWord("false")) {
      value->kind = Json::Kind::kBool;
      value->boolean = text_[position_ - 2] == 'u';
      return Status();
    }
    return ParseNumber(value);
  }

  Status ParseObject(Json* value, int depth) {
    value->kind = Json::Kind::kObject;
    ++position_;
    SkipSpace();
    if (Take('}')) return Status();
    std::unordered_set<std::string> keys;
    while (true) {
      SkipSpace();
      if (Peek() != '"') return Error("want a key in quotes");
      std::string key;
      Status status = ParseString(&key);
      if (!status.ok()) return status;
      if (!keys.insert(key).second) return Error("a key is there twice");
      SkipSpace();
      if (!Take(':')) return Error("want ':'");
      SkipSpace();
      value->members.emplace_back(std::move(key), Json());
      status = ParseValue(&value->members.back().second, depth + 1);
      if (!status.ok()) return status;
      SkipSpace();
      if (Take('}')) return Status();
      if (!Take(',')) return Error("want ',' or '}'");
    }
  }

  Status ParseArray(Json* value, int depth) {
    value->kind = Json::Kind::kArray;
    ++position_;
    SkipSpace();
    if (Take(']')) return Status();
    while (true) {
      SkipSpace();
      value->items.emplace_back();
      Status status = ParseValue(&value->items.back(), depth + 1);
      if (!status.ok()) return status;
      SkipSpace();
      if (Take(']')) return Status();
      if (!Take(',')) return Error("want ',' or ']'");
    }
  }

  bool TakeHex(uint32_t* code) {
    if (text_.size() - position_ < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; ++i, ++position_) {
      const char c = text_[position_];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return false;
      *code = *code * 16 + static_cast<uint32_t>(digit);
    }
    return true;
  }

  Status ParseEscape(std::string* output) {
    const char c = Peek();
    ++position_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        *output += c;
        return Status();
      case 'b':
        *output += '\b';
        return Status();
      case 'f':
        *output += '\f';
        return Status();
      case 'n':
        *output += '\n';
        return Status();
      case 'r':
        *output += '\r';
        return Status();
      case 't':
        *output += '\t';
        return Status();
      case 'u':
        break;
      default:
        return Error("unknown escape");
    }
    uint32_t code = 0;
    if (!TakeHex(&code)) return Error("want four hexadecimal digits");
    if (code >= 0xdc00 && code <= 0xdfff) return Error("half of a character");
    if (code >= 0xd800 && code <= 0xdbff) {
      uint32_t low = 0;
      if (!TakeWord("\\u") || !TakeHex(&low) || low < 0xdc00 || low > 0xdfff) {
        return Error("half of a character");
      }
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    AppendUtf8(code, output);
    return Status();
  }

  Status ParseString(std::string* output) {
    ++position_;
    while (true) {
      if (AtEnd()) return Error("a string has no end");
      const char c = Peek();
      if (c == '"') {
        ++position_;
        return Status();
      }
      if (c == '\\') {
        ++position_;
        const Status status = AtEnd() ? Error("a string has no end") : ParseEscape(output);
        if (!status.ok()) return status;
        continue;
      }
      if (static_cast<unsigned char>(c) < ' ') return Error("a control character in a string");
      const size_t length = Utf8Length(text_.substr(position_));
      if (length == 0) return Error("not UTF-8");
      output->append(text_.substr(position_, length));
      position_ += length;
    }
  }

  bool TakeDigits() {
    const size_t start = position_;
    while (Peek() >= '0' && Peek() <= '9') ++position_;
    return position_ > start;
  }

  Status ParseNumber(Json* value) {
    const size_t start = position_;
    Take('-');
    if (Peek() == '0') {
      ++position_;
    } else if (!TakeDigits()) {
      return Error("want a value");
    }
    bool whole = true;
    if (Take('.')) {
      whole = false;
      if (!TakeDigits()) return Error("want digits after '.'");
    }
    if (Take('e') || Take('E')) {
      whole = false;
      if (!Take('+')) Take('-');
      if (!TakeDigits()) return Error("want digits in the exponent");
    }
    const char* begin = text_.data() + start;
    const char* end = text_.data() + position_;
    if (whole && std::from_chars(begin, end, value->integer).ec == std::errc()) {
      value->kind = Json::Kind::kInteger;
      value->number = static_cast<double>(value->integer);
      return Status();
    }
    if (whole && *begin != '-' &&
        std::from_chars(begin, end, value->unsigned_integer).ec == std::errc()) {
      value->kind = Json::Kind::kUnsigned;
      value->number = static_cast<double>(value->unsigned_integer);
      return Status();
    }
    value->kind = Json::Kind::kFloat;
    const auto parsed = std::from_chars(begin, end, value->number);
    if (parsed.ec == std::errc::result_out_of_range) {
      // Too small is 0, too large is an error; the result does not say which it was.
      value->number = strtod(std::string(begin, end).c_str(), nullptr);
    }
    if (!std::isfinite(value->number)) return Error("a number that is too large");
    return Status();
  }

  const std::string_view text_;
  size_t position_ = 0;
};

template <typename Float>
std::string ShortestNumber(Float value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[64];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  std::string text(buffer, result.ptr);
  // So that a reader takes it for a float, as the model has it.
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

const Json* Json::Find(std::string_view key) const {
  for (const auto& [name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

Status ParseJson(std::string_view text, Json* value) { return Parser(text).Parse(value); }

void AppendJsonString(std::string_view text, std::string* output) {
  *output += '"';
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
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

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

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
