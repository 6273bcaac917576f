#include "monolith/serving/native/row_log/kafka_brokers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "monolith/serving/native/net/file_descriptor.h"
#include "monolith/serving/native/net/socket.h"

namespace monolith {
namespace serving {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int16_t kApiVersions = 18;
constexpr int16_t kMetadata = 3;
constexpr std::chrono::seconds kAnswerTime(2);
constexpr uint32_t kMaxAnswerBytes = 100'000'000;
constexpr char kVersions[] = "MONOLITH_KAFKA_VERSIONS";

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const size_t first = text.find_first_not_of(" \t", start);
    if (first < end) {
      parts.push_back(text.substr(first, text.find_last_not_of(" \t", end - 1) - first + 1));
    }
    start = end + 1;
  }
  return parts;
}

bool IsKnownToBeOld(const std::string& server) {
  const char* versions = getenv(kVersions);
  for (const std::string& entry : SplitList(versions == nullptr ? "" : versions)) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || entry.substr(0, equals) != server) continue;
    const std::string version = entry.substr(equals + 1, 3);
    return version == "0.8" || version == "0.9";
  }
  return false;
}

// Appends a number in the order of the network.
template <typename Number>
void Append(Number value, std::string* out) {
  for (int shift = 8 * (sizeof(Number) - 1); shift >= 0; shift -= 8) {
    *out += static_cast<char>(static_cast<uint64_t>(value) >> shift & 0xff);
  }
}

uint32_t ReadNumber(const std::string& bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// One connection to one broker, with a limit for everything that is done with it.
class Conversation {
 public:
  Status Connect(const std::string& server) {
    server_ = server;
    Status status = StartConnect(server, &socket_);
    if (status.ok()) status = Wait(POLLOUT);
    if (status.ok()) status = ConnectResult(socket_.get());
    return status;
  }

  // Sends a request of version 0. Gives the answer without its header.
  Status Ask(int16_t key, const std::string& body, std::string* answer) {
    std::string request;
    Append(key, &request);
    Append(int16_t{0}, &request);
    Append(int32_t{1}, &request);
    Append(int16_t{8}, &request);
    request += "monolith" + body;
    std::string framed;
    Append(static_cast<int32_t>(request.size()), &framed);
    framed += request;
    for (size_t sent = 0; sent < framed.size();) {
      Status status = Wait(POLLOUT);
      if (!status.ok()) return status;
      const ssize_t n =
          send(socket_.get(), framed.data() + sent, framed.size() - sent, MSG_NOSIGNAL);
      if (n < 0 && errno != EAGAIN && errno != EINTR) return Broken(strerror(errno));
      if (n > 0) sent += static_cast<size_t>(n);
    }
    std::string header;
    Status status = Receive(4, &header);
    if (!status.ok()) return status;
    const uint32_t size = ReadNumber(header);
    if (size < 4 || size > kMaxAnswerBytes) {
      return Broken("it is no Kafka broker: an answer of " + std::to_string(size) + " bytes");
    }
    status = Receive(size, answer);
    if (status.ok()) answer->erase(0, 4);
    return status;
  }

 private:
  Status Broken(const std::string& why) const {
    return Status(Code::kUnavailable, server_ + ": " + why);
  }

  Status Wait(int16_t events) {
    while (true) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
      if (left <= 0) return Broken("no answer");
      pollfd entry{socket_.get(), events, 0};
      const int ready = poll(&entry, 1, static_cast<int>(left));
      if (ready > 0) return Status();
      if (ready < 0 && errno != EINTR) return Broken(strerror(errno));
    }
  }

  Status Receive(uint32_t size, std::string* bytes) {
    bytes->clear();
    char buffer[4096];
    while (bytes->size() < size) {
      const Status status = Wait(POLLIN);
      if (!status.ok()) return status;
      const size_t wanted = std::min<size_t>(sizeof(buffer), size - bytes->size());
      const ssize_t n = recv(socket_.get(), buffer, wanted, 0);
      if (n == 0) return Broken("the connection was closed before the answer");
      if (n < 0 && errno != EAGAIN && errno != EINTR) return Broken(strerror(errno));
      if (n > 0) bytes->append(buffer, static_cast<size_t>(n));
    }
    return Status();
  }

  std::string server_;
  FileDescriptor socket_;
  const Clock::time_point deadline_ = Clock::now() + kAnswerTime;
};

// A broker before 0.10 closes the connection or says nothing; that it is a living broker shows when
// it answers a request for metadata.
Status AskAge(const std::string& server, bool* is_old) {
  std::string answer;
  {
    Conversation conversation;
    Status status = conversation.Connect(server);
    if (!status.ok()) return status;
    *is_old = !conversation.Ask(kApiVersions, "", &answer).ok();
    if (!*is_old) return Status();
  }
  // Version 0 with an empty list asks for all topics, so we ask for one that cannot exist.
  std::string topics;
  Append(int32_t{1}, &topics);
  Append(int16_t{1}, &topics);
  topics += "/";
  Conversation conversation;
  const Status status = conversation.Connect(server);
  return status.ok() ? conversation.Ask(kMetadata, topics, &answer) : status;
}

Status FindAge(const std::string& servers, bool* is_old) {
  const std::vector<std::string> list = SplitList(servers);
  if (std::any_of(list.begin(), list.end(), IsKnownToBeOld)) {
    *is_old = true;
    return Status();
  }
  static std::mutex* const mutex = std::make_unique<std::mutex>().release();
  static auto* const known = std::make_unique<std::map<std::string, bool>>().release();
  // Held while brokers are asked: one question is enough.
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = known->find(servers);
  if (found != known->end()) {
    *is_old = found->second;
    return Status();
  }
  Status status(Code::kUnavailable, "no broker is named");
  for (const std::string& server : list) {
    status = AskAge(server, is_old);
    if (status.ok()) {
      (*known)[servers] = *is_old;
      return status;
    }
  }
  status.message = "no Kafka broker answers at " + servers + ": " + status.message;
  return status;
}

}  // namespace

Status MakeKafkaSettings(const std::string& servers, std::map<std::string, std::string>* settings) {
  bool is_old = false;
  const Status status = FindAge(servers, &is_old);
  if (!status.ok()) return status;
  (*settings)["bootstrap.servers"] = servers;
  if (is_old) {
    (*settings)["api.version.request"] = "false";
    (*settings)["broker.version.fallback"] = "0.9.0.1";
    // One of those requests that get no answer costs so much, instead of a minute.
    (*settings)["socket.timeout.ms"] = "10000";
    // Every client warns that a later librdkafka will not know such brokers.
    (*settings)["log_level"] = "3";
    // Brokers of that age refuse longer sessions.
    (*settings)["session.timeout.ms"] = "30000";
  }
  // A broker that was away is found again within a second instead of ten.
  (*settings)["reconnect.backoff.ms"] = "50";
  (*settings)["reconnect.backoff.max.ms"] = "1000";
  (*settings)["log.connection.close"] = "false";
  return Status();
}

}  // namespace serving
}  // namespace monolith
