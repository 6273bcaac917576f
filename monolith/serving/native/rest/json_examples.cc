#include "monolith/serving/native/rest/json_examples.h"

#include <cmath>
#include <set>
#include <utility>

#include "monolith/serving/native/rest/json.h"
#include "monolith/serving/native/rest/json_reader.h"
#include "tensorflow/core/example/example.pb.h"
#include "tensorflow/core/example/feature.pb.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::string_view kSignatureField = "signature_name";
constexpr std::string_view kContextField = "context";
constexpr std::string_view kExamplesField = "examples";
constexpr std::string_view kBase64Field = "b64";
constexpr size_t kMaxExamples = 100'000;
// The most that a feature and a text take as messages, beside their bytes.
constexpr int64_t kFeatureBytes = 200;
constexpr int64_t kTextBytes = 48;
// The budget is asked again when this much more is needed.
constexpr int64_t kLeaseStepBytes = 1 << 20;

class ExamplesVisitor : public JsonVisitor {
 public:
  ExamplesVisitor(int64_t max_bytes, MemoryLease* lease, JsonExamples* result)
      : max_bytes_(max_bytes), lease_(lease), result_(result) {}

  bool Null() override { return Refuse("null"); }
  bool Boolean(bool value) override { return Refuse(value ? "true" : "false"); }

  bool Number(std::string_view text) override {
    JsonNumberValue number;
    if (place_ != Place::kValue && place_ != Place::kList) return Refuse("a number");
    // An integer of more than 64 bits is read as a fraction.
    const bool is_integer = text.find_first_of(".eE") == std::string_view::npos;
    if (!ReadJsonNumber(text, &number) ||
        (is_integer && number.kind != JsonNumberValue::Kind::kInteger)) {
      return Fail("feature '" + name_ + "' has a number that does not fit its type");
    }
    return TakeNumber(number) && EndLeaf();
  }

  bool String(std::string_view text) override {
    if (place_ == Place::kBody && key_ == kSignatureField) {
      result_->signature_name = text;
      return true;
    }
    if (place_ == Place::kBase64) {
      std::string bytes;
      if (!has_base64_key_ || !DecodeBase64(text, &bytes)) {
        return Fail("feature '" + name_ + "' has b64 that is not base64");
      }
      has_base64_key_ = false;
      base64_is_complete_ = true;
      return TakeText(bytes);
    }
    if (place_ != Place::kValue && place_ != Place::kList) return Refuse("a string");
    return TakeText(text) && EndLeaf();
  }

  bool StartObject() override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kBody;
        return true;
      case Place::kBody:
        if (key_ != kContextField) return Refuse("an object");
        return StartFeatures(true);
      case Place::kExamples:
        if (result_->examples.size() == kMaxExamples) {
          return Fail("the request has more than " + std::to_string(kMaxExamples) + " examples");
        }
        return StartFeatures(false);
      case Place::kValue:
      case Place::kList:
        in_list_ = place_ == Place::kList;
        place_ = Place::kBase64;
        has_base64_key_ = base64_is_complete_ = false;
        return true;
      default:
        return Refuse("an object");
    }
  }

  bool Key(std::string_view text) override {
    if (place_ == Place::kBody) {
      if (text != kSignatureField && text != kContextField && text != kExamplesField) {
        return Fail("unknown key '" + std::string(text.substr(0, 100)) +
                    "', want some of ['context', 'examples', 'signature_name']");
      }
      key_ = text;
      return keys_.insert(key_).second || Fail("the key '" + key_ + "' is there twice");
    }
    if (place_ == Place::kBase64) {
      has_base64_key_ = text == kBase64Field && !base64_is_complete_;
      return has_base64_key_ || Refuse("an object without 'b64' alone");
    }
    name_ = text;
    auto* const features = example_.mutable_features()->mutable_feature();
    if (features->count(name_) > 0) return Fail("the feature '" + name_ + "' is there twice");
    feature_ = &(*features)[name_];
    place_ = Place::kValue;
    return Count(kFeatureBytes + static_cast<int64_t>(text.size()));
  }

  bool EndObject() override {
    switch (place_) {
      case Place::kBase64:
        place_ = in_list_ ? Place::kList : Place::kValue;
        return base64_is_complete_ ? EndLeaf() : Refuse("an object without 'b64' alone");
      case Place::kFeatures:
        if (in_context_) {
          result_->context = example_.SerializeAsString();
          place_ = Place::kBody;
        } else {
          result_->examples.push_back(example_.SerializeAsString());
          place_ = Place::kExamples;
        }
        example_.Clear();
        return true;
      default:
        place_ = Place::kEnd;
        return true;
    }
  }

  bool StartArray() override {
    if (place_ == Place::kBody && key_ == kExamplesField) {
      place_ = Place::kExamples;
      return true;
    }
    if (place_ != Place::kValue) return Refuse("a list");
    place_ = Place::kList;
    return true;
  }

  bool EndArray() override {
    if (place_ == Place::kExamples) {
      place_ = Place::kBody;
      return true;
    }
    // One without elements.
    if (feature_->kind_case() == tensorflow::Feature::KIND_NOT_SET) feature_->mutable_float_list();
    place_ = Place::kFeatures;
    return true;
  }

  Status error() const override { return error_; }

 private:
  // The part that is read, or comes next.
  enum class Place { kStart, kBody, kExamples, kFeatures, kValue, kList, kBase64, kEnd };

  bool Fail(const std::string& text) {
    error_ = Status(Code::kInvalidArgument, text);
    return false;
  }

  // Refuses a value by what it is for.
  bool Refuse(const std::string& what) {
    switch (place_) {
      case Place::kStart:
        return Fail("the body is not a JSON object");
      case Place::kBody:
        if (key_ == kSignatureField) return Fail("signature_name is not a string");
        return Fail(key_ == kContextField ? "the context is not an object"
                                          : "examples is not a list with elements");
      case Place::kExamples:
        return Fail("example " + std::to_string(result_->examples.size()) + " is not an object");
      default:
        return Fail("feature '" + name_ + "' has " + what +
                    ", want numbers or strings, alone or in a list");
    }
  }

  bool StartFeatures(bool in_context) {
    in_context_ = in_context;
    place_ = Place::kFeatures;
    return Count(kFeatureBytes);
  }

  // A value that is not in a list is its feature's only one.
  bool EndLeaf() {
    if (place_ == Place::kValue) place_ = Place::kFeatures;
    return true;
  }

  bool TakeNumber(const JsonNumberValue& number) {
    if (feature_->has_bytes_list()) return Mixed();
    if (number.kind == JsonNumberValue::Kind::kInteger && !feature_->has_float_list()) {
      feature_->mutable_int64_list()->add_value(number.integer);
      return Count(sizeof(int64_t));
    }
    const float value = static_cast<float>(number.number);
    if (!std::isfinite(value)) {
      return Fail("feature '" + name_ + "' has a number that does not fit its type");
    }
    // Integers before the first fraction are fractions, too.
    const tensorflow::Int64List integers = feature_->int64_list();
    tensorflow::FloatList* const values = feature_->mutable_float_list();
    for (const int64_t integer : integers.value()) values->add_value(static_cast<float>(integer));
    values->add_value(value);
    return Count(sizeof(float));
  }

  bool TakeText(std::string_view text) {
    if (feature_->kind_case() != tensorflow::Feature::KIND_NOT_SET && !feature_->has_bytes_list()) {
      return Mixed();
    }
    feature_->mutable_bytes_list()->add_value(text.data(), text.size());
    return Count(kTextBytes + static_cast<int64_t>(text.size()));
  }

  bool Mixed() { return Fail("feature '" + name_ + "' has both numbers and strings"); }

  bool Count(int64_t more) {
    bytes_ += more;
    if (bytes_ > max_bytes_) {
      return Fail("the examples take more than " + std::to_string(max_bytes_) + " bytes");
    }
    if (bytes_ <= leased_) return true;
    leased_ = bytes_ + kLeaseStepBytes;
    if (lease_->Resize(leased_)) return true;
    error_ = Status(Code::kResourceExhausted, "the tensors of all requests take too much memory");
    return false;
  }

  const int64_t max_bytes_;
  MemoryLease* const lease_;
  JsonExamples* const result_;
  Place place_ = Place::kStart;
  std::string key_;
  std::set<std::string> keys_;
  bool in_context_ = false;
  bool in_list_ = false;
  bool has_base64_key_ = false;
  bool base64_is_complete_ = false;
  tensorflow::Example example_;
  std::string name_;
  tensorflow::Feature* feature_ = nullptr;
  int64_t bytes_ = 0;
  int64_t leased_ = 0;
  Status error_;
};

}  // namespace

Status ParseJsonExamples(std::string_view body, int64_t max_bytes, MemoryLease* lease,
                         JsonExamples* examples) {
  ExamplesVisitor visitor(max_bytes, lease, examples);
  const Status status = VisitJson(body, &visitor);
  if (!status.ok()) return status;
  if (!examples->examples.empty()) return Status();
  return Status(Code::kInvalidArgument, "examples is not a list with elements");
}

}  // namespace serving
}  // namespace monolith
