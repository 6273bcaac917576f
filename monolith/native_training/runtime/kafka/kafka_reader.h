// Messages of Kafka topics in batches, read by one consumer of a group.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_KAFKA_READER_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_KAFKA_READER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/kafka/rdkafka_api.h"

namespace monolith {
namespace kafka {

enum class KafkaErrorCode {
  kNone,
  kBadArgument,  // a setting that the client does not take
  kUnreadable,   // the brokers cannot be read, or do not let us
  kLostMessages  // messages at the position to resume from are gone
};

struct KafkaError {
  KafkaErrorCode code = KafkaErrorCode::kNone;
  std::string text;

  explicit operator bool() const { return code != KafkaErrorCode::kNone; }
};

// A topic and the number of one of its partitions.
using Partition = std::pair<std::string, int32_t>;
// The offset of the next message of each partition.
using Positions = std::map<Partition, int64_t>;

// Says which messages to read, and how.
struct KafkaSource {
  std::vector<std::string> topics;
  std::map<std::string, std::string> settings;  // of the consumer
  int64_t batch_size = 0;
  // Positive: the consumer joins no group, and reads the partitions p of every topic with
  // p % num_workers == worker_index. Otherwise the members of the group share the partitions.
  int64_t num_workers = 0;
  int64_t worker_index = 0;
  // How many messages before the position to resume at are read once more in a partition; without
  // a group only.
  int64_t history = 0;

  bool operator==(const KafkaSource& other) const {
    return topics == other.topics && settings == other.settings && batch_size == other.batch_size &&
           num_workers == other.num_workers && worker_index == other.worker_index &&
           history == other.history;
  }
  // Names topics, group and brokers.
  std::string Describe() const;
};

// Fills `source` from topics and `key=value` entries, of which the last of equal keys counts. A key
// `conf.topic.<k>` is the setting <k> of every topic, `batch.num.messages` the size of a fetch.
KafkaError ParseSource(const std::vector<std::string>& topics,
                       const std::vector<std::string>& metadata, KafkaSource* source);

constexpr int64_t kEndless = -1;

// Checks the two timeouts, in milliseconds, and raises that of the stream to that of a poll.
KafkaError CheckTimeouts(int64_t message_poll_timeout, int64_t* stream_timeout);

// Holds the result of one fetch; all but the last have one element per message.
struct KafkaFetch {
  std::vector<std::string> messages;
  std::vector<std::string> keys;
  std::vector<Partition> partitions;
  std::vector<int64_t> offsets;
  std::vector<bool> is_history;  // read once more, before the position to resume at
  bool continue_fetch = true;

  // Says where message `i` comes from: made when it is asked for, since hardly any is.
  std::string Origin(size_t i) const;
};

// Writes a line for the operator.
using KafkaLog = void (*)(bool is_warning, const std::string& text);

// One consumer; it connects at the first fetch and leaves its group when destroyed. Thread-safe.
//
// The stream is silent while no message comes. The time to join the group does not count as silence
// for a minute. Offsets are committed by the client as the settings say; positions are those of the
// messages that fetches have returned.
class KafkaReader {
 public:
  KafkaReader(const RdKafkaApi* api, KafkaSource source, KafkaLog log);
  ~KafkaReader();

  KafkaReader(const KafkaReader&) = delete;
  KafkaReader& operator=(const KafkaReader&) = delete;

  const KafkaSource& source() const { return source_; }

  // Collects messages until the batch is full, none came for `message_poll_timeout`, or all were
  // read. Timeouts are in milliseconds, as CheckTimeouts leaves them. After `max_wait` returns with
  // `is_complete` false; the next call goes on collecting. `fetch->continue_fetch` is false once no
  // message came for `stream_timeout`.
  KafkaError Fetch(int64_t message_poll_timeout, int64_t stream_timeout, int64_t max_wait,
                   KafkaFetch* fetch, bool* is_complete);

  // Collects at most `max_messages`, for at most `max_wait` milliseconds; returns earlier if there
  // are some and all that the brokers have were read.
  KafkaError Collect(int64_t max_messages, int64_t max_wait, KafkaFetch* fetch);

  // Finds out why the stream is silent. A broker has `timeout` milliseconds to answer, at least a
  // second and at most ten.
  KafkaError Check(int64_t timeout);

  // Where reading stands.
  Positions positions();

  // Starts at these positions, once for each partition when it is first assigned to this consumer;
  // other partitions start where the group stands. Call it before the first fetch.
  void Resume(const Positions& positions);

 private:
  class Consumer;

  KafkaError EnsureOpen();  // needs the lock

  const RdKafkaApi* const api_;
  const KafkaSource source_;
  const KafkaLog log_;
  std::mutex mutex_;  // guards all below
  Positions resume_;
  std::shared_ptr<Consumer> consumer_;
};

}  // namespace kafka
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_KAFKA_READER_H_
