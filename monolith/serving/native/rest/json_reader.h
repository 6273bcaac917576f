// Reads JSON piece by piece, by RapidJSON: a long text takes no memory beside its longest string.
#ifndef MONOLITH_SERVING_NATIVE_REST_JSON_READER_H_
#define MONOLITH_SERVING_NATIVE_REST_JSON_READER_H_

#include <cstdint>
#include <string_view>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Receives every piece of a text in order. A method that returns false ends the reading; error()
// then has the reason.
class JsonVisitor {
 public:
  virtual ~JsonVisitor() = default;

  virtual bool Null() = 0;
  virtual bool Boolean(bool value) = 0;
  // As it is written; ReadJsonNumber reads it.
  virtual bool Number(std::string_view text) = 0;
  // UTF-8, valid until the method returns, as keys are.
  virtual bool String(std::string_view text) = 0;
  virtual bool StartObject() = 0;
  virtual bool Key(std::string_view text) = 0;
  virtual bool EndObject() = 0;
  virtual bool StartArray() = 0;
  virtual bool EndArray() = 0;

  virtual Status error() const = 0;
};

// Reads one JSON text as RFC 8259 has it. An error says at which byte. Numbers that a double cannot
// hold, texts that are not UTF-8, and values nested deeper than 64 are errors, too. Repeated keys
// are left to the visitor.
Status VisitJson(std::string_view text, JsonVisitor* visitor);

struct JsonNumberValue {
  enum class Kind { kInteger, kUnsigned, kFloat };

  Kind kind = Kind::kInteger;
  // An integer of 64 bits keeps all of them, as ids need.
  int64_t integer = 0;
  uint64_t unsigned_integer = 0;
  // Set for all kinds.
  double number = 0;
};

// Returns false if the number is too large for a double.
bool ReadJsonNumber(std::string_view text, JsonNumberValue* value);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_REST_JSON_READER_H_
