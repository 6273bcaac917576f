#include "monolith/serving/native/row_log/sync_state.h"

#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include "monolith/serving/native/model/tensorflow_status.h"
#include "monolith/serving/native/rest/json_reader.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/errors.h"

namespace monolith {
namespace serving {
namespace {

// Takes the numbers and texts of an object; what lies deeper is skipped.
class FlatObject : public JsonVisitor {
 public:
  bool Null() override { return !at_start() || Fail(); }
  bool Boolean(bool) override { return !at_start() || Fail(); }
  bool Number(std::string_view text) override {
    if (at_start()) return Fail();
    JsonNumberValue value;
    if (depth_ == 1 && ReadJsonNumber(text, &value) &&
        value.kind == JsonNumberValue::Kind::kInteger) {
      numbers_[key_] = value.integer;
    }
    return true;
  }
  bool String(std::string_view text) override {
    if (at_start()) return Fail();
    if (depth_ == 1) texts_[key_] = text;
    return true;
  }
  bool StartObject() override { return ++depth_ > 0; }
  bool StartArray() override { return at_start() ? Fail() : ++depth_ > 0; }
  bool EndObject() override { return --depth_ >= 0; }
  bool EndArray() override { return --depth_ >= 0; }
  bool Key(std::string_view text) override {
    if (depth_ == 1) key_ = text;
    return true;
  }
  Status error() const override { return Status(Code::kDataLoss, "it is not an object"); }

  // Null if there is no such number, or text.
  const int64_t* FindNumber(const std::string& name) const { return Find(numbers_, name); }
  const std::string* FindText(const std::string& name) const { return Find(texts_, name); }

 private:
  template <typename Value>
  static const Value* Find(const std::map<std::string, Value>& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : &found->second;
  }

  bool at_start() const { return depth_ == 0; }
  static bool Fail() { return false; }

  int depth_ = 0;
  std::string key_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::string, std::string> texts_;
};

Status Parse(const std::string& text, SyncState* state) {
  FlatObject object;
  const Status status = VisitJson(text, &object);
  if (!status.ok()) return status;
  constexpr int64_t kMaxPartition = std::numeric_limits<int32_t>::max();
  const std::pair<const char*, int64_t*> numbers[] = {{"epoch", &state->epoch},
                                                      {"seq", &state->seq},
                                                      {"partition", &state->partition},
                                                      {"next_offset", &state->next_offset}};
  for (const auto& [name, value] : numbers) {
    const int64_t* found = object.FindNumber(name);
    if (found == nullptr || *found < 0) {
      return Status(Code::kDataLoss,
                    std::string(name) + " is missing or not a number that is not negative");
    }
    *value = *found;
  }
  if (state->partition > kMaxPartition) {
    return Status(Code::kDataLoss, "partition is " + std::to_string(state->partition));
  }
  const std::string* topic = object.FindText("topic");
  if (topic == nullptr || topic->empty()) {
    return Status(Code::kDataLoss, "topic is missing or not a name");
  }
  state->topic = *topic;
  return Status();
}

}  // namespace

Status ReadSyncState(const std::string& folder, const char* name, std::optional<SyncState>* state) {
  const std::string path = folder + "/assets.extra/" + name;
  std::string text;
  const tensorflow::Status read =
      tensorflow::ReadFileToString(tensorflow::Env::Default(), path, &text);
  if (tensorflow::errors::IsNotFound(read)) return Status();
  Status status = FromTensorFlow(read);
  SyncState found;
  if (status.ok()) status = Parse(text, &found);
  if (!status.ok()) return Status(Code::kDataLoss, path + ": " + status.message);
  *state = std::move(found);
  return Status();
}

}  // namespace serving
}  // namespace monolith
