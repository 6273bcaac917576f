// JSON text of flat objects: always valid JSON, whatever bytes and floats are put in. Standard
// library only.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_JSON_WRITER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_JSON_WRITER_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace monolith {
namespace metrics {

// `text` as a quoted JSON string. A byte that is not part of valid UTF-8 becomes U+FFFD.
std::string JsonString(std::string_view text);

// The shortest decimal that reads back as the same float; null for NaN and infinities, which JSON
// does not know.
std::string JsonNumber(float value);

// Writes the members of one object in the order of the calls:
//
//   JsonObject object;
//   object.AddInt("uid", 1);
//   object.Finish();  // {"uid": 1}
class JsonObject {
 public:
  void AddString(std::string_view key, std::string_view value) { Add(key, JsonString(value)); }
  void AddInt(std::string_view key, int64_t value) { Add(key, std::to_string(value)); }
  void AddFloat(std::string_view key, float value) { Add(key, JsonNumber(value)); }

  // `json` is the text of a value.
  void Add(std::string_view key, std::string_view json);

  // The text of the whole object. Call it once, last.
  std::string Finish();

 private:
  std::string text_ = "{";
};

}  // namespace metrics
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_METRICS_JSON_WRITER_H_
