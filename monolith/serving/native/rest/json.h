// A strict JSON reader and what a writer needs.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

struct Json {
  enum class Kind { kNull, kBool, kInteger, kUnsigned, kFloat, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  // An integer that fits 64 bits keeps all of them: ids have 64.
  int64_t integer = 0;
  uint64_t unsigned_integer = 0;
  double number = 0;
  // UTF-8.
  std::string text;
  std::vector<Json> items;
  // In the order of the text; no key is there twice.
  std::vector<std::pair<std::string, Json>> members;

  bool is_object() const { return kind == Kind::kObject; }
  bool is_array() const { return kind == Kind::kArray; }
  bool is_string() const { return kind == Kind::kString; }

  // Returns null if there is no such key, or this is no object.
  const Json* Find(std::string_view key) const;
};

// Parses one JSON text as RFC 8259 has it. An error says at which byte. Numbers that a double
// cannot hold, texts that are no UTF-8, and values nested deeper than 64 are errors, too.
Status ParseJson(std::string_view text, Json* value);

// Appends `text` in quotes. Bytes that are no UTF-8 become U+FFFD.
void AppendJsonString(std::string_view text, std::string* output);

// Returns the shortest text that reads back as the same number. Numbers that JSON does not know are
// written NaN, Infinity and -Infinity, as TensorFlow Serving does.
std::string JsonNumber(float value);
std::string JsonNumber(double value);

bool IsUtf8(std::string_view text);

// Returns false if `text` is not base64 with padding.
bool DecodeBase64(std::string_view text, std::string* bytes);
std::string EncodeBase64(std::string_view bytes);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_H_
