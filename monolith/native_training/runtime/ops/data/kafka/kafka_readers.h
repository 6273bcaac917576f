// Readers of Kafka for kernels: shared by name, errors and log lines as TensorFlow's.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_KAFKA_KAFKA_READERS_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_KAFKA_KAFKA_READERS_H_

#include <functional>
#include <memory>
#include <string>

#include "monolith/native_training/runtime/kafka/kafka_reader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/status.h"

namespace tensorflow {
namespace monolith_tf {

Status ToStatus(const ::monolith::kafka::KafkaError& error);

// Returns a reader, which does not connect yet. Readers with a name are shared by all who give that
// name while one of them holds it; the last one to let go closes it. InvalidArgument: the reader of
// that name reads something else. FailedPrecondition: there is no librdkafka.
Status GetKafkaReader(const ::monolith::kafka::KafkaSource& source, const std::string& container,
                      const std::string& shared_name,
                      std::shared_ptr<::monolith::kafka::KafkaReader>* reader);

// Waits for a fetch, which may be empty. Cancelled: `is_cancelled` said so meanwhile. An error when
// the stream has ended because no broker can be read.
Status ReadFetch(::monolith::kafka::KafkaReader* reader, int64_t message_poll_timeout,
                 int64_t stream_timeout, const std::function<bool()>& is_cancelled,
                 ::monolith::kafka::KafkaFetch* fetch);

// The strings of a column, moved into a vector tensor.
Tensor ToTensor(std::vector<std::string> column);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_KAFKA_KAFKA_READERS_H_
