#include "monolith/serving/native/row_log/sync_state.h"

#include <limits>
#include <utility>

#include "monolith/serving/native/model/tensorflow_status.h"
#include "monolith/serving/native/rest/json.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/errors.h"

namespace monolith {
namespace serving {
namespace {

Status Parse(const std::string& text, SyncState* state) {
  Json json;
  const Status status = ParseJson(text, &json);
  if (!status.ok()) return status;
  if (!json.is_object()) return Status(Code::kDataLoss, "it is not an object");
  constexpr int64_t kMaxPartition = std::numeric_limits<int32_t>::max();
  const std::pair<const char*, int64_t*> numbers[] = {{"epoch", &state->epoch},
                                                      {"seq", &state->seq},
                                                      {"partition", &state->partition},
                                                      {"next_offset", &state->next_offset}};
  for (const auto& [name, value] : numbers) {
    const Json* found = json.Find(name);
    if (found == nullptr || found->kind != Json::Kind::kInteger || found->integer < 0) {
      return Status(Code::kDataLoss,
                    std::string(name) + " is missing or not a number that is not negative");
    }
    *value = found->integer;
  }
  if (state->partition > kMaxPartition) {
    return Status(Code::kDataLoss, "partition is " + std::to_string(state->partition));
  }
  const Json* topic = json.Find("topic");
  if (topic == nullptr || !topic->is_string() || topic->text.empty()) {
    return Status(Code::kDataLoss, "topic is missing or not a name");
  }
  state->topic = topic->text;
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
