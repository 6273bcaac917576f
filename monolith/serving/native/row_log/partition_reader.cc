#include "monolith/serving/native/row_log/partition_reader.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "monolith/serving/native/base/log.h"
#include "tensorflow/core/platform/env.h"

namespace monolith {
namespace serving {
namespace {

using kafka::RdKafkaApi;

// How long to wait for an answer, and how often: a server that ends does not wait for all of it.
constexpr int kAnswerMs = 2000;
constexpr int kMaxQuestions = 5;
constexpr size_t kErrorTextSize = 512;
// librdkafka logs without end while a broker is away.
constexpr std::chrono::seconds kLogInterval(60);

// Comma-joined `host:port=version` of brokers.
constexpr char kVersions[] = "MONOLITH_KAFKA_VERSIONS";

std::string WithoutBlanks(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c != ' ' && c != '\t') result += c;
  }
  return result;
}

// Whether one of the brokers is named with a version before 0.10. Such a broker does not know the
// question with which librdkafka begins: the client hangs, and requests of other clients that
// arrive in the same moment get no answer.
bool AnyIsOld(const std::string& servers) {
  const char* const versions = getenv(kVersions);
  const std::string named = "," + WithoutBlanks(versions == nullptr ? "" : versions);
  const std::string list = WithoutBlanks(servers) + ",";
  for (size_t begin = 0, end = 0; (end = list.find(',', begin)) != list.npos; begin = end + 1) {
    const std::string entry = "," + list.substr(begin, end - begin) + "=0.";
    const size_t at = named.find(entry);
    if (at == named.npos) continue;
    const char minor = named[at + entry.size()];
    if (minor == '8' || minor == '9') return true;
  }
  return false;
}

// Folders of Python packages: that of TensorFlow, and the one that this program may be part of.
std::vector<std::string> PackageFolders() {
  std::vector<std::string> folders;
  const auto add = [&](const void* code, const char* up) {
    const std::string folder = engine::FolderOfCode(code);
    if (!folder.empty()) folders.push_back(folder + up);
  };
  // <packages>/tensorflow/
  add(reinterpret_cast<const void*>(&tensorflow::Env::Default), "/..");
  // <packages>/monolith/serving/native/
  add(reinterpret_cast<const void*>(&FindKafkaClient), "/../../..");
  return folders;
}

void OnLog(const kafka::rd_kafka_t*, int, const char* facility, const char* text) {
  static std::atomic<int64_t> next{0};
  const int64_t now = std::chrono::duration_cast<std::chrono::seconds>(
                          std::chrono::steady_clock::now().time_since_epoch())
                          .count();
  int64_t due = next.load();
  if (now < due || !next.compare_exchange_strong(due, now + kLogInterval.count())) return;
  LogWarning(std::string("Kafka: ") + facility + ": " + text);
}

// Calls that fail report the errors that matter.
void OnError(kafka::rd_kafka_t*, int, const char*, void*) {}

}  // namespace

Status FindKafkaClient(const RdKafkaApi** api) {
  std::string error;
  *api = RdKafkaApi::Get(PackageFolders(), &error);
  return *api == nullptr ? Status(Code::kFailedPrecondition, error) : Status();
}

PartitionReader::PartitionReader(std::string servers, std::string topic, int32_t partition)
    : servers_(std::move(servers)), topic_(std::move(topic)), partition_(partition) {}

PartitionReader::~PartitionReader() {
  if (consumer_ == nullptr) return;
  api_->consumer_close_(consumer_);
  api_->destroy_(consumer_);
}

Status PartitionReader::Open() {
  Status status = FindKafkaClient(&api_);
  if (!status.ok()) return status;
  std::map<std::string, std::string> settings = {
      // A group is required although nothing is committed.
      {"group.id", "monolith-reader"},
      {"enable.auto.commit", "false"},
      {"enable.auto.offset.store", "false"},
      // The caller decides about a position that is gone.
      {"auto.offset.reset", "error"},
      {"enable.partition.eof", "true"},
      {"fetch.wait.max.ms", "50"},
      {"fetch.error.backoff.ms", "50"},
      {"bootstrap.servers", servers_},
      // A broker that was away is found again within a second instead of ten.
      {"reconnect.backoff.ms", "50"},
      {"reconnect.backoff.max.ms", "1000"},
      {"log.connection.close", "false"},
  };
  if (AnyIsOld(servers_)) {
    settings["api.version.request"] = "false";
    settings["broker.version.fallback"] = "0.9.0.1";
    // A request that gets no answer costs this much instead of a minute.
    settings["socket.timeout.ms"] = "10000";
    // Every client warns that a later librdkafka will not know such brokers.
    settings["log_level"] = "3";
    // Brokers of that age refuse longer sessions.
    settings["session.timeout.ms"] = "30000";
  }
  char error[kErrorTextSize] = "";
  kafka::rd_kafka_conf_t* conf = api_->conf_new_();
  for (const auto& [key, value] : settings) {
    if (api_->conf_set_(conf, key.c_str(), value.c_str(), error, sizeof(error)) != kafka::kConfOk) {
      api_->conf_destroy_(conf);
      return Status(Code::kInvalidArgument, error);
    }
  }
  api_->conf_set_log_cb_(conf, &OnLog);
  api_->conf_set_error_cb_(conf, &OnError);
  consumer_ = api_->new_(kafka::kConsumerType, conf, error, sizeof(error));
  if (consumer_ == nullptr) {
    api_->conf_destroy_(conf);
    return Status(Code::kUnavailable, error);
  }
  api_->poll_set_consumer_(consumer_);
  return Status();
}

Status PartitionReader::Bounds(const std::atomic<bool>& stopping, int64_t* low, int64_t* high) {
  int code = kafka::kErrTimedOut;
  for (int i = 0; i < kMaxQuestions && code == kafka::kErrTimedOut && !stopping; ++i) {
    code =
        api_->query_watermark_offsets_(consumer_, topic_.c_str(), partition_, low, high, kAnswerMs);
  }
  switch (code) {
    case kafka::kNoError:
      return Status();
    case kafka::kErrUnknownTopicOrPartition:
    case kafka::kErrUnknownPartition:
    case kafka::kErrUnknownTopic:
      return Status(Code::kNotFound,
                    "the broker has no " + topic_ + "[" + std::to_string(partition_) + "]");
    case kafka::kErrTimedOut:
    case kafka::kErrTransport:
    case kafka::kErrAllBrokersDown:
      return Status(Code::kUnavailable, std::string("no broker answers: ") + api_->err2str_(code) +
                                            "; one before 0.11 has to be named in " + kVersions);
    default:
      return Status(Code::kUnavailable, api_->err2str_(code));
  }
}

Status PartitionReader::Seek(int64_t offset) {
  kafka::rd_kafka_topic_partition_list_t* list = api_->topic_partition_list_new_(1);
  api_->topic_partition_list_add_(list, topic_.c_str(), partition_)->offset = offset;
  const int code = api_->assign_(consumer_, list);
  api_->topic_partition_list_destroy_(list);
  return code == kafka::kNoError ? Status() : Status(Code::kUnavailable, api_->err2str_(code));
}

Status PartitionReader::Read(int64_t max_messages, std::chrono::milliseconds wait,
                             const Handle& handle, int64_t* num_read, int64_t* end, bool* is_gone) {
  *num_read = 0;
  *end = -1;
  *is_gone = false;
  int wait_ms = static_cast<int>(wait.count());
  while (*num_read < max_messages) {
    const std::unique_ptr<kafka::rd_kafka_message_t, void (*)(kafka::rd_kafka_message_t*)> message(
        api_->consumer_poll_(consumer_, wait_ms), api_->message_destroy_);
    if (message == nullptr) return Status();
    wait_ms = 0;
    switch (message->err) {
      case kafka::kNoError: {
        const Status status = handle(
            message->offset, std::string_view(static_cast<const char*>(message->payload),
                                              message->payload == nullptr ? 0 : message->len));
        if (!status.ok()) return status;
        ++*num_read;
        break;
      }
      case kafka::kErrPartitionEof:
        *end = message->offset;
        return Status();
      case kafka::kErrAutoOffsetReset:
      case kafka::kErrOffsetOutOfRange:
        *is_gone = true;
        return Status();
      case kafka::kErrAllBrokersDown:
      case kafka::kErrTransport:
        return Status();
      default:
        return Status(Code::kUnavailable, api_->err2str_(message->err));
    }
  }
  return Status();
}

int64_t PartitionReader::KnownEnd() const {
  int64_t low = -1;
  int64_t high = -1;
  const int code = api_->get_watermark_offsets_(consumer_, topic_.c_str(), partition_, &low, &high);
  return code == kafka::kNoError && high > 0 ? high : -1;
}

}  // namespace serving
}  // namespace monolith
