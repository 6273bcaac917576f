// The part of librdkafka's C interface that reading needs, found at run time.
//
// The Python package confluent-kafka ships the library without its header. Declared here are types
// and functions of that header which have kept their layout since librdkafka 1.6.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RDKAFKA_API_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RDKAFKA_API_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace kafka {

// Opaque.
struct rd_kafka_t;
struct rd_kafka_conf_t;
struct rd_kafka_topic_t;
struct rd_kafka_error_t;

struct rd_kafka_message_t {
  int err;
  rd_kafka_topic_t* rkt;
  int32_t partition;
  void* payload;
  size_t len;
  void* key;
  size_t key_len;
  int64_t offset;
  void* unused;
};

struct rd_kafka_topic_partition_t {
  char* topic;
  int32_t partition;
  int64_t offset;
  void* metadata;
  size_t metadata_size;
  void* opaque;
  int err;
  void* unused;
};

struct rd_kafka_topic_partition_list_t {
  int cnt;
  int size;
  rd_kafka_topic_partition_t* elems;
};

struct rd_kafka_metadata_broker;

struct rd_kafka_metadata_partition {
  int32_t id;
  int err;
  int32_t leader;
  int replica_cnt;
  int32_t* replicas;
  int isr_cnt;
  int32_t* isrs;
};

struct rd_kafka_metadata_topic {
  char* topic;
  int partition_cnt;
  rd_kafka_metadata_partition* partitions;
  int err;
};

struct rd_kafka_metadata {
  int broker_cnt;
  rd_kafka_metadata_broker* brokers;
  int topic_cnt;
  rd_kafka_metadata_topic* topics;
  int32_t orig_broker_id;
  char* orig_broker_name;
};

using rd_kafka_error_cb = void(rd_kafka_t* handle, int error, const char* reason, void* opaque);
using rd_kafka_log_cb = void(const rd_kafka_t* handle, int level, const char* facility,
                             const char* text);
using rd_kafka_rebalance_cb = void(rd_kafka_t* handle, int error,
                                   rd_kafka_topic_partition_list_t* partitions, void* opaque);

constexpr int kConsumerType = 1;
constexpr int kConfOk = 0;

constexpr int kNoError = 0;
constexpr int kErrAllBrokersDown = -187;
constexpr int kErrAssignPartitions = -175;
constexpr int kErrAutoOffsetReset = -140;
constexpr int kErrFatal = -150;
constexpr int kErrGroupAuthorizationFailed = 30;
constexpr int kErrInvalidGroupId = 24;
constexpr int kErrOffsetOutOfRange = 1;
constexpr int kErrPartitionEof = -191;
constexpr int kErrResolve = -193;
constexpr int kErrTimedOut = -185;
constexpr int kErrTopicAuthorizationFailed = 29;
constexpr int kErrTransport = -195;
constexpr int kErrUnknownPartition = -190;
constexpr int kErrUnknownTopic = -188;
constexpr int kErrUnknownTopicOrPartition = 3;

// F(result, name, arguments) for each function used.
#define MONOLITH_RDKAFKA_FUNCTIONS(F)                                                             \
  F(rd_kafka_conf_t*, conf_new, ())                                                               \
  F(void, conf_destroy, (rd_kafka_conf_t*))                                                       \
  F(int, conf_set, (rd_kafka_conf_t*, const char*, const char*, char*, size_t))                   \
  F(void, conf_set_opaque, (rd_kafka_conf_t*, void*))                                             \
  F(void, conf_set_error_cb, (rd_kafka_conf_t*, rd_kafka_error_cb*))                              \
  F(void, conf_set_log_cb, (rd_kafka_conf_t*, rd_kafka_log_cb*))                                  \
  F(void, conf_set_rebalance_cb, (rd_kafka_conf_t*, rd_kafka_rebalance_cb*))                      \
  F(rd_kafka_t*, new, (int, rd_kafka_conf_t*, char*, size_t))                                     \
  F(void, destroy, (rd_kafka_t*))                                                                 \
  F(int, poll_set_consumer, (rd_kafka_t*))                                                        \
  F(int, subscribe, (rd_kafka_t*, const rd_kafka_topic_partition_list_t*))                        \
  F(rd_kafka_message_t*, consumer_poll, (rd_kafka_t*, int))                                       \
  F(void, message_destroy, (rd_kafka_message_t*))                                                 \
  F(const char*, topic_name, (const rd_kafka_topic_t*))                                           \
  F(int, consumer_close, (rd_kafka_t*))                                                           \
  F(int, assign, (rd_kafka_t*, const rd_kafka_topic_partition_list_t*))                           \
  F(rd_kafka_error_t*, incremental_assign, (rd_kafka_t*, const rd_kafka_topic_partition_list_t*)) \
  F(rd_kafka_error_t*, incremental_unassign,                                                      \
    (rd_kafka_t*, const rd_kafka_topic_partition_list_t*))                                        \
  F(const char*, rebalance_protocol, (rd_kafka_t*))                                               \
  F(const char*, error_string, (const rd_kafka_error_t*))                                         \
  F(void, error_destroy, (rd_kafka_error_t*))                                                     \
  F(int, committed, (rd_kafka_t*, rd_kafka_topic_partition_list_t*, int))                         \
  F(int, query_watermark_offsets, (rd_kafka_t*, const char*, int32_t, int64_t*, int64_t*, int))   \
  F(int, get_watermark_offsets, (rd_kafka_t*, const char*, int32_t, int64_t*, int64_t*))          \
  F(rd_kafka_topic_partition_list_t*, topic_partition_list_new, (int))                            \
  F(rd_kafka_topic_partition_t*, topic_partition_list_add,                                        \
    (rd_kafka_topic_partition_list_t*, const char*, int32_t))                                     \
  F(rd_kafka_topic_partition_list_t*, topic_partition_list_copy,                                  \
    (const rd_kafka_topic_partition_list_t*))                                                     \
  F(void, topic_partition_list_destroy, (rd_kafka_topic_partition_list_t*))                       \
  F(int, metadata, (rd_kafka_t*, int, rd_kafka_topic_t*, const rd_kafka_metadata**, int))         \
  F(void, metadata_destroy, (const rd_kafka_metadata*))                                           \
  F(int, fatal_error, (rd_kafka_t*, char*, size_t))                                               \
  F(const char*, err2str, (int))                                                                  \
  F(const char*, err2name, (int))

// Named without the prefix rd_kafka_ and with a trailing underscore.
struct RdKafkaApi {
#define MONOLITH_RDKAFKA_DECLARE(result, name, arguments) result(*name##_) arguments = nullptr;
  MONOLITH_RDKAFKA_FUNCTIONS(MONOLITH_RDKAFKA_DECLARE)
#undef MONOLITH_RDKAFKA_DECLARE

  // Loads the library that the environment variable MONOLITH_LIBRDKAFKA names, else the first that
  // can be found: confluent_kafka.libs/librdkafka* in one of `package_folders`, then the system's.
  // It stays loaded. Null: there is none, and `error` says where it was looked for. Thread-safe.
  static const RdKafkaApi* Get(const std::vector<std::string>& package_folders, std::string* error);
};

}  // namespace kafka
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_KAFKA_RDKAFKA_API_H_
