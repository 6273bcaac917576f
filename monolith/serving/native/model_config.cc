#include "monolith/serving/native/model_config.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "google/protobuf/text_format.h"
#include "monolith/serving/native/base/tensorflow_versions.h"
#include "monolith/serving/native/model/file_systems.h"
#include "monolith/serving/native/model/version_policy.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kMaxFileBytes = 64 << 20;

class FirstError : public TextErrorListener {
 public:
  const std::string& message() const { return message_; }

 private:
  void OnError(int line, int column, std::string_view text) override {
    if (message_.empty()) {
      message_ = "line " + std::to_string(line + 1) + ", column " + std::to_string(column + 1) +
                 ": " + std::string(text);
    }
  }

  std::string message_;
};

Status ReadFile(const std::string& path, std::string* text) {
  if (NamesFileSystem(path)) return ReadFileOf(path, kMaxFileBytes, text);
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "rb"), &fclose);
  if (file == nullptr) return Status(Code::kInvalidArgument, strerror(errno));
  char buffer[4096];
  size_t size = 0;
  while ((size = fread(buffer, 1, sizeof(buffer), file.get())) > 0) {
    text->append(buffer, size);
    if (static_cast<int64_t>(text->size()) > kMaxFileBytes) {
      return Status(Code::kInvalidArgument, "it has more than 64 MiB");
    }
  }
  if (ferror(file.get())) return Status(Code::kInvalidArgument, strerror(errno));
  return Status();
}

Status ReadTextProto(const std::string& path, google::protobuf::Message* message) {
  std::string text;
  const Status status = ReadFile(path, &text);
  if (!status.ok()) return status;
  FirstError errors;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (parser.ParseFromString(text, message)) return Status();
  return Status(Code::kInvalidArgument, errors.message());
}

std::string AbsolutePath(const std::string& path) {
  if ((!path.empty() && path[0] == '/') || NamesFileSystem(path)) return path;
  char folder[PATH_MAX];
  return getcwd(folder, sizeof(folder)) == nullptr ? path : std::string(folder) + "/" + path;
}

}  // namespace

Status ReadModelConfig(const Flags& flags, api::ModelServerConfig* config) {
  config->Clear();
  Status status;
  if (flags.model_config_file.empty()) {
    api::ModelConfig* model = config->mutable_model_config_list()->add_config();
    model->set_name(flags.model_name);
    model->set_base_path(AbsolutePath(flags.model_base_path));
    status = CheckConfig(*config);
    if (!status.ok()) status.message = "the flags: " + status.message;
    return status;
  }
  status = ReadTextProto(flags.model_config_file, config);
  if (status.ok()) status = CheckConfig(*config);
  if (!status.ok()) {
    status.message =
        "cannot read the model configuration " + flags.model_config_file + ": " + status.message;
  }
  return status;
}

Status ReadSslConfig(const Flags& flags, api::SSLConfig* config) {
  Status status = ReadTextProto(flags.ssl_config_file, config);
  if (!status.ok()) {
    status.message =
        "cannot read the SSLConfig of " + flags.ssl_config_file + ": " + status.message;
  }
  return status;
}

Status ReadBatchingParameters(const Flags& flags, api::BatchingParameters* parameters) {
  if (flags.batching_parameters_file.empty()) return Status();
  Status status = ReadTextProto(flags.batching_parameters_file, parameters);
  if (!status.ok()) {
    status.message = "cannot read the BatchingParameters of " + flags.batching_parameters_file +
                     ": " + status.message;
  }
  return status;
}

}  // namespace serving
}  // namespace monolith
