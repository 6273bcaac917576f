#include "monolith/native_training/runtime/ops/data/kafka/kafka_readers.h"

#include <map>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/kafka/rdkafka_api.h"
#include "monolith/native_training/runtime/ops/support/library_folders.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
namespace monolith_tf {

using ::monolith::kafka::KafkaError;
using ::monolith::kafka::KafkaErrorCode;
using ::monolith::kafka::KafkaFetch;
using ::monolith::kafka::KafkaReader;
using ::monolith::kafka::KafkaSource;
using ::monolith::kafka::RdKafkaApi;

namespace {

// How often a fetch that waits looks whether it is cancelled.
constexpr int64_t kMaxWaitMs = 200;

void Log(bool is_warning, const std::string& text) {
  if (is_warning) {
    LOG(WARNING) << text;
  } else {
    LOG(INFO) << text;
  }
}

// Never destroyed: threads may still read when the process ends.
struct SharedReaders {
  mutex mu;
  std::map<std::pair<std::string, std::string>, std::weak_ptr<KafkaReader>> by_name
      TF_GUARDED_BY(mu);
};

SharedReaders& GetSharedReaders() {
  static SharedReaders* const readers = std::make_unique<SharedReaders>().release();
  return *readers;
}

}  // namespace

Status ToStatus(const KafkaError& error) {
  switch (error.code) {
    case KafkaErrorCode::kNone:
      return OkStatus();
    case KafkaErrorCode::kBadArgument:
      return errors::InvalidArgument(error.text);
    case KafkaErrorCode::kLostMessages:
      return errors::DataLoss(error.text);
    case KafkaErrorCode::kUnreadable:
      break;
  }
  // Not Unavailable: sessions of Estimators take it for a lost server and begin again, forever.
  return errors::Unknown(error.text);
}

Status GetKafkaReader(const KafkaSource& source, const std::string& container,
                      const std::string& shared_name, std::shared_ptr<KafkaReader>* reader) {
  std::string error;
  const RdKafkaApi* const api = RdKafkaApi::Get(PackageFolders(), &error);
  if (api == nullptr) return errors::FailedPrecondition(error);
  if (shared_name.empty()) {
    *reader = std::make_shared<KafkaReader>(api, source, &Log);
    return OkStatus();
  }
  SharedReaders& shared = GetSharedReaders();
  mutex_lock lock(shared.mu);
  std::weak_ptr<KafkaReader>& named = shared.by_name[{container, shared_name}];
  *reader = named.lock();
  if (*reader == nullptr) {
    *reader = std::make_shared<KafkaReader>(api, source, &Log);
    named = *reader;
  } else if (!((*reader)->source() == source)) {
    reader->reset();
    return errors::InvalidArgument("shared_name '", shared_name,
                                   "' is a reader of other topics or settings");
  }
  return OkStatus();
}

Status ReadFetch(KafkaReader* reader, int64_t message_poll_timeout, int64_t stream_timeout,
                 const std::function<bool()>& is_cancelled, KafkaFetch* fetch) {
  bool is_complete = false;
  while (!is_complete) {
    if (is_cancelled()) return errors::Cancelled("reading Kafka was cancelled");
    TF_RETURN_IF_ERROR(ToStatus(
        reader->Fetch(message_poll_timeout, stream_timeout, kMaxWaitMs, fetch, &is_complete)));
  }
  if (!fetch->messages.empty() || fetch->continue_fetch) return OkStatus();
  return ToStatus(reader->Check(message_poll_timeout));
}

Tensor ToTensor(std::vector<std::string> column) {
  Tensor tensor(DT_STRING, TensorShape({static_cast<int64_t>(column.size())}));
  auto flat = tensor.flat<tstring>();
  for (size_t i = 0; i < column.size(); ++i) flat(i) = std::move(column[i]);
  return tensor;
}

}  // namespace monolith_tf
}  // namespace tensorflow
