// Reads one partition of a topic by offsets, without a consumer group.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_PARTITION_READER_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_PARTITION_READER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "monolith/native_training/runtime/kafka/rdkafka_api.h"
#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Loads the client library, which stays loaded; the error lists where it was looked for.
Status FindKafkaClient(const kafka::RdKafkaApi** api);

// A client of one partition, for one thread.
class PartitionReader {
 public:
  PartitionReader(std::string servers, std::string topic, int32_t partition);
  // Closes the connections to the brokers.
  ~PartitionReader();

  PartitionReader(const PartitionReader&) = delete;
  PartitionReader& operator=(const PartitionReader&) = delete;

  Status Open();

  // Gives the oldest offset, and the one that the next message will have. NotFound: there is no
  // such partition. Gives up early when `stopping`.
  Status Bounds(const std::atomic<bool>& stopping, int64_t* low, int64_t* high);

  // Makes Read go on at an offset.
  Status Seek(int64_t offset);

  // Takes a message. An error ends Read.
  using Handle = std::function<Status(int64_t offset, std::string_view value)>;

  // Hands over messages in order, at most `max_messages`, after at most `wait` for the first one.
  // Returns the first error of `handle`, else those of the brokers. `end` gets the end of the
  // partition where that was met, else -1; `is_gone` tells that the log does not hold the position.
  Status Read(int64_t max_messages, std::chrono::milliseconds wait, const Handle& handle,
              int64_t* num_read, int64_t* end, bool* is_gone);

  // Returns the end of the partition in the last answer, -1 if there was none; sends no request.
  int64_t KnownEnd() const;

 private:
  const std::string servers_;
  const std::string topic_;
  const int32_t partition_;
  const kafka::RdKafkaApi* api_ = nullptr;
  kafka::rd_kafka_t* consumer_ = nullptr;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_PARTITION_READER_H_
