#include "monolith/native_training/runtime/kafka/rdkafka_api.h"

#include <cstdlib>
#include <memory>
#include <mutex>

#include "monolith/native_training/runtime/base/dynamic_library.h"
#include "monolith/native_training/runtime/base/install_line.h"

namespace monolith {
namespace kafka {
namespace {

using ::monolith::engine::DynamicLibrary;
using ::monolith::engine::MatchingPaths;

constexpr char kVariable[] = "MONOLITH_LIBRDKAFKA";

std::vector<std::string> Candidates(const std::vector<std::string>& package_folders) {
  const char* const given = std::getenv(kVariable);
  if (given != nullptr && given[0] != '\0') return {given};
  std::vector<std::string> candidates;
  for (const std::string& folder : package_folders) {
    const auto found = MatchingPaths(folder + "/confluent_kafka.libs/librdkafka*.so*");
    candidates.insert(candidates.end(), found.begin(), found.end());
  }
  candidates.push_back("librdkafka.so.1");
  return candidates;
}

std::unique_ptr<RdKafkaApi> Load(const std::vector<std::string>& package_folders,
                                 std::string* error) {
  DynamicLibrary library;
  auto api = std::make_unique<RdKafkaApi>();
  if (!library.Open(Candidates(package_folders), error)) {
    *error = "reading Kafka needs librdkafka: " + engine::InstallLine("kafka") +
             ", install the system's librdkafka, or let " + kVariable + " name it (" + *error + ")";
    return nullptr;
  }
#define MONOLITH_RDKAFKA_FIND(result, name, arguments)          \
  if (!library.Find("rd_kafka_" #name, &api->name##_, error)) { \
    *error += ": reading Kafka needs librdkafka 1.6 or later";  \
    return nullptr;                                             \
  }
  MONOLITH_RDKAFKA_FUNCTIONS(MONOLITH_RDKAFKA_FIND)
#undef MONOLITH_RDKAFKA_FIND
  return api;
}

}  // namespace

const RdKafkaApi* RdKafkaApi::Get(const std::vector<std::string>& package_folders,
                                  std::string* error) {
  static std::mutex* const mutex = std::make_unique<std::mutex>().release();
  static const RdKafkaApi* loaded = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  // A failure is not kept: the library may be installed meanwhile.
  if (loaded == nullptr) loaded = Load(package_folders, error).release();
  return loaded;
}

}  // namespace kafka
}  // namespace monolith
