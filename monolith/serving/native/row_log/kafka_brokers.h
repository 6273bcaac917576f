// How old Kafka brokers are.
//
// librdkafka asks a broker for its version and hangs where the broker is too old to know the
// question. So we ask first, on a socket of our own, and tell librdkafka what to assume. The
// question is not harmless to a broker before 0.10: requests of other clients that arrive in the
// same moment get no answer. MONOLITH_KAFKA_VERSIONS, a comma-joined list of `host:port=version`,
// says what need not be asked.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_KAFKA_BROKERS_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_KAFKA_BROKERS_H_

#include <map>
#include <string>

#include "monolith/serving/native/base/status.h"

namespace monolith {
namespace serving {

// Gives the settings of librdkafka that every client of these brokers needs. They are asked once
// for each list of brokers, comma-separated `host:port`. Unavailable: none answers.
Status MakeKafkaSettings(const std::string& servers, std::map<std::string, std::string>* settings);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_KAFKA_BROKERS_H_
