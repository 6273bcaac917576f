#include "monolith/serving/native/model/warmup.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/predict.h"
#include "monolith/serving/native/model/tensorflow_status.h"
#include "monolith/serving/native/serving_api.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/lib/io/record_reader.h"
#include "tensorflow/core/platform/env.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kMaxRecords = 1000;

// The model is fine, what it calls is not there yet: it must not wait for a server that waits for
// it.
bool IsElsewhere(Code code) {
  return code == Code::kUnavailable || code == Code::kDeadlineExceeded ||
         code == Code::kUnimplemented;
}

}  // namespace

Status WarmUp(const std::string& path, Servable* servable) {
  const std::string file_name = path + "/assets.extra/tf_serving_warmup_requests";
  tensorflow::Env* const env = tensorflow::Env::Default();
  if (!env->FileExists(file_name).ok()) return Status();
  std::unique_ptr<tensorflow::RandomAccessFile> file;
  Status status = FromTensorFlow(env->NewRandomAccessFile(file_name, &file));
  if (!status.ok()) return status;
  tensorflow::io::RecordReader reader(file.get());
  tensorflow::uint64 offset = 0;
  tensorflow::tstring record;
  for (int64_t i = 0;; ++i) {
    const tensorflow::Status read = reader.ReadRecord(&offset, &record);
    if (tensorflow::errors::IsOutOfRange(read)) return Status();
    const std::string where = "record " + std::to_string(i) + " of " + file_name + ": ";
    status = FromTensorFlow(read);
    if (status.ok() && i >= kMaxRecords) {
      status = Status(Code::kInvalidArgument, "there may be at most 1000 records for warm-up");
    }
    api::PredictionLog log;
    if (status.ok() && !log.ParseFromArray(record.data(), static_cast<int>(record.size()))) {
      status = Status(Code::kDataLoss, "it is not a PredictionLog");
    }
    if (status.ok() && !log.has_predict_log()) {
      status = Status(Code::kUnimplemented, "only predict_log is supported");
    }
    MemoryLease lease;
    api::PredictResponse response;
    const api::PredictRequest& request = log.predict_log().request();
    const Signature* signature = nullptr;
    if (status.ok()) {
      status = servable->FindSignature(request.model_spec().signature_name(), &signature);
    }
    if (status.ok()) {
      status =
          Predict(servable, *signature, request, PredictLimits(), RunDirectly, &lease, &response);
    }
    if (IsElsewhere(status.code) && log.has_predict_log()) {
      LogWarning("The model of " + path + " is not warm: " + where + status.message);
      return Status();
    }
    if (!status.ok()) return Status(status.code, "cannot warm up: " + where + status.message);
  }
}

}  // namespace serving
}  // namespace monolith
