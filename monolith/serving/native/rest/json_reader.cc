#include "monolith/serving/native/rest/json_reader.h"

#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <new>
#include <string>

namespace monolith {
namespace serving {
namespace {

constexpr int kMaxDepth = 64;
constexpr unsigned kParseFlags =
    rapidjson::kParseValidateEncodingFlag | rapidjson::kParseNumbersAsStringsFlag;

// RapidJSON's own allocator does not check for failure.
class JsonAllocator {
 public:
  static const bool kNeedFree = true;

  void* Malloc(size_t size) { return size == 0 ? nullptr : Checked(malloc(size)); }
  void* Realloc(void* old, size_t, size_t size) {
    if (size > 0) return Checked(realloc(old, size));
    free(old);
    return nullptr;
  }
  static void Free(void* memory) noexcept { free(memory); }
  bool operator==(const JsonAllocator&) const { return true; }
  bool operator!=(const JsonAllocator&) const { return false; }

 private:
  static void* Checked(void* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
};

// Called by RapidJSON; it limits the depth, which the reader's recursion has, too.
class Handler {
 public:
  using Ch = char;

  explicit Handler(JsonVisitor* visitor) : visitor_(visitor) {}

  bool Null() { return visitor_->Null(); }
  bool Bool(bool value) { return visitor_->Boolean(value); }
  bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
    return visitor_->Number({text, size});
  }
  bool String(const char* text, rapidjson::SizeType size, bool) {
    return visitor_->String({text, size});
  }
  bool Key(const char* text, rapidjson::SizeType size, bool) { return visitor_->Key({text, size}); }
  bool StartObject() { return Enter() && visitor_->StartObject(); }
  bool StartArray() { return Enter() && visitor_->StartArray(); }
  bool EndObject(rapidjson::SizeType) {
    --depth_;
    return visitor_->EndObject();
  }
  bool EndArray(rapidjson::SizeType) {
    --depth_;
    return visitor_->EndArray();
  }
  // Numbers arrive as text.
  bool Int(int) { return false; }
  bool Uint(unsigned) { return false; }
  bool Int64(int64_t) { return false; }
  bool Uint64(uint64_t) { return false; }
  bool Double(double) { return false; }

  bool too_deep() const { return depth_ > kMaxDepth; }

 private:
  bool Enter() { return ++depth_ <= kMaxDepth; }

  JsonVisitor* const visitor_;
  int depth_ = 0;
};

Status NotJson(size_t position, const std::string& what) {
  return Status(Code::kInvalidArgument,
                "the body is not JSON: byte " + std::to_string(position) + ": " + what);
}

}  // namespace

Status VisitJson(std::string_view text, JsonVisitor* visitor) {
  rapidjson::MemoryStream stream(text.data(), text.size());
  rapidjson::GenericReader<rapidjson::UTF8<>, rapidjson::UTF8<>, JsonAllocator> reader;
  Handler handler(visitor);
  const rapidjson::ParseResult result = reader.Parse<kParseFlags>(stream, handler);
  if (result.Code() == rapidjson::kParseErrorTermination) {
    return handler.too_deep() ? NotJson(result.Offset(), "values are nested too deeply")
                              : visitor->error();
  }
  if (result.IsError()) return NotJson(result.Offset(), rapidjson::GetParseError_En(result.Code()));
  // A zero byte ends a text for the reader.
  if (stream.Tell() != text.size()) return NotJson(stream.Tell(), "there is more after the value");
  return Status();
}

bool ReadJsonNumber(std::string_view text, JsonNumberValue* value) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const bool whole = text.find_first_of(".eE") == std::string_view::npos;
  if (whole && std::from_chars(begin, end, value->integer).ec == std::errc()) {
    value->kind = JsonNumberValue::Kind::kInteger;
    value->number = static_cast<double>(value->integer);
    return true;
  }
  if (whole && text[0] != '-' &&
      std::from_chars(begin, end, value->unsigned_integer).ec == std::errc()) {
    value->kind = JsonNumberValue::Kind::kUnsigned;
    value->number = static_cast<double>(value->unsigned_integer);
    return true;
  }
  value->kind = JsonNumberValue::Kind::kFloat;
  if (std::from_chars(begin, end, value->number).ec == std::errc::result_out_of_range) {
    // Too small is 0, too large is an error; the result does not say which it was.
    value->number = strtod(std::string(text).c_str(), nullptr);
  }
  return std::isfinite(value->number);
}

}  // namespace serving
}  // namespace monolith
