// Escapes and numbers for writers of JSON, and base64.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_H_

#include <string>
#include <string_view>

namespace monolith {
namespace serving {

// Appends `text` in quotes. Bytes that are no UTF-8 become U+FFFD.
void AppendJsonString(std::string_view text, std::string* output);

// Returns the shortest text that reads back as the same number. Numbers that JSON does not know are
// written NaN, Infinity and -Infinity, as TensorFlow Serving does.
std::string JsonNumber(float value);
std::string JsonNumber(double value);

// Returns false if `text` is not base64 with padding.
bool DecodeBase64(std::string_view text, std::string* bytes);
std::string EncodeBase64(std::string_view bytes);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_H_
