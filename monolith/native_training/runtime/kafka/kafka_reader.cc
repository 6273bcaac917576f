// Longer than 600 lines: one reader, whose threads share the state that this file alone knows.
#include "monolith/native_training/runtime/kafka/kafka_reader.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>

namespace monolith {
namespace kafka {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kBatchKey[] = "batch.num.messages";
constexpr char kTopicPrefix[] = "conf.topic.";
constexpr int64_t kDefaultBatchSize = 1024;

// Longest uninterrupted wait, so that closing a reader takes no longer.
constexpr milliseconds kSlice(100);
// How long joining the group may take before waiting for it counts as silence.
constexpr milliseconds kJoinTime(60000);
constexpr milliseconds kCloseTime(10000);
// How long to ask brokers where partitions stand before they are read.
constexpr milliseconds kLocateTime(10000);
// How often a consumer without a group looks for partitions: until it has some, and then for new
// ones.
constexpr milliseconds kFirstLookInterval(200);
constexpr milliseconds kLookInterval(30000);
constexpr milliseconds kLookTime(2000);
constexpr milliseconds kWarnInterval(60000);
constexpr size_t kErrorTextSize = 512;

KafkaError BadArgument(std::string text) { return {KafkaErrorCode::kBadArgument, std::move(text)}; }

std::string_view Strip(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

// Lets one line of a kind through, and then none for a while.
bool IsDue(const std::string& kind) {
  static std::mutex* const mutex = std::make_unique<std::mutex>().release();
  static auto* const last = std::make_unique<std::map<std::string, Clock::time_point>>().release();
  std::lock_guard<std::mutex> lock(*mutex);
  const Clock::time_point now = Clock::now();
  const auto [it, is_new] = last->try_emplace(kind, now);
  if (!is_new && now - it->second < kWarnInterval) return false;
  it->second = now;
  return true;
}

// The client logs from threads of its own, some of them older and younger than any consumer.
std::atomic<KafkaLog> client_log{nullptr};

void OnClientLog(const rd_kafka_t*, int level, const char* facility, const char* text) {
  const KafkaLog log = client_log;
  constexpr int kSyslogWarning = 4;
  // Says of settings for old brokers that they are deprecated, whenever somebody needs them.
  const bool is_about_settings = std::strcmp(facility, "CONFWARN") == 0;
  // Lines come without end while a broker is away.
  if (log != nullptr && IsDue(facility)) {
    log(level <= kSyslogWarning && !is_about_settings,
        std::string("Kafka: ") + facility + ": " + text);
  }
}

int RemainingMs(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

}  // namespace

std::string KafkaSource::Describe() const {
  std::string text = "topics ";
  for (size_t i = 0; i < topics.size(); ++i) text += (i == 0 ? "" : ",") + topics[i];
  for (const auto& [title, key] :
       {std::pair(", group ", "group.id"), std::pair(", servers ", "bootstrap.servers")}) {
    const auto it = settings.find(key);
    text += title + (it == settings.end() ? std::string("none") : it->second);
  }
  return text;
}

KafkaError ParseSource(const std::vector<std::string>& topics,
                       const std::vector<std::string>& metadata, KafkaSource* source) {
  if (topics.empty()) return BadArgument("topics is empty, want at least one topic");
  source->topics = topics;
  source->batch_size = kDefaultBatchSize;
  // The client tells the end of a partition only when asked to.
  source->settings = {{"enable.partition.eof", "true"}};
  for (const std::string& entry : metadata) {
    const size_t equals = entry.find('=');
    std::string_view key = Strip(std::string_view(entry).substr(0, equals));
    if (equals == std::string::npos || key.empty()) {
      return BadArgument("Kafka metadata has '" + entry + "', want key=value");
    }
    const std::string_view value = Strip(std::string_view(entry).substr(equals + 1));
    // A setting of producers; here it is the size of a fetch.
    if (key == kBatchKey) {
      const char* const end = value.data() + value.size();
      const auto parsed = std::from_chars(value.data(), end, source->batch_size);
      if (parsed.ec != std::errc() || parsed.ptr != end || source->batch_size < 1) {
        return BadArgument(std::string(kBatchKey) + " is " + std::string(value) +
                           ", want at least 1");
      }
      continue;
    }
    if (key.substr(0, sizeof(kTopicPrefix) - 1) == kTopicPrefix) {
      key.remove_prefix(sizeof(kTopicPrefix) - 1);
    }
    source->settings[std::string(key)] = std::string(value);
  }
  return {};
}

KafkaError CheckTimeouts(int64_t message_poll_timeout, int64_t* stream_timeout) {
  constexpr int64_t kMaxTimeout = INT32_MAX;
  if (message_poll_timeout < 1 || message_poll_timeout > kMaxTimeout) {
    return BadArgument("message_poll_timeout is " + std::to_string(message_poll_timeout) +
                       ", want at least 1 and at most " + std::to_string(kMaxTimeout));
  }
  if (*stream_timeout < kEndless) {
    return BadArgument("stream_timeout is " + std::to_string(*stream_timeout) +
                       ", want -1 (endless) or milliseconds of silence");
  }
  if (*stream_timeout != kEndless)
    *stream_timeout = std::max(*stream_timeout, message_poll_timeout);
  return {};
}

// The client's handle and what its callbacks know. The client calls them while it is polled or
// closed, and only there, so its user's lock guards everything.
class KafkaReader::Consumer {
 public:
  Consumer(const RdKafkaApi* api, const KafkaSource& source, KafkaLog log, Positions resume)
      : api_(*api), source_(source), log_(log), resume_(std::move(resume)) {}

  KafkaError Open();
  // Leaves the group. The client waits for brokers that are gone, up to the session's timeout.
  void Close();

  // Waits for messages, a slice of time at most.
  KafkaError Step(int64_t message_poll_timeout, int64_t max_messages, bool* is_complete);
  bool has_pending() const { return !pending_.empty(); }
  void Take(int64_t message_poll_timeout, int64_t stream_timeout, KafkaFetch* fetch);
  KafkaError Check(int64_t timeout);
  Positions positions() const {
    Positions all = resume_;
    for (const auto& [partition, offset] : positions_) all[partition] = offset;
    return all;
  }

 private:
  struct Complaint {
    int code = kNoError;
    std::string text;
  };

  static void OnError(rd_kafka_t*, int code, const char* reason, void* opaque) {
    static_cast<Consumer*>(opaque)->Complain(code, reason == nullptr ? "" : reason);
  }
  static void OnRebalance(rd_kafka_t*, int code, rd_kafka_topic_partition_list_t* partitions,
                          void* opaque) {
    static_cast<Consumer*>(opaque)->Rebalance(code == kErrAssignPartitions, partitions);
  }

  void Complain(int code, const std::string& text);
  void Rebalance(bool is_assignment, rd_kafka_topic_partition_list_t* partitions);
  void Locate(rd_kafka_topic_partition_list_t* partitions);
  void AssignOwn();
  std::vector<Partition> FindOwn();
  bool LocateOwn(rd_kafka_topic_partition_list_t* partitions);
  void ResumeAt(const Partition& partition, int64_t offset, Clock::time_point deadline);
  KafkaError LostMessages(const Partition& partition, int64_t offset, int64_t low,
                          int64_t high) const;
  std::optional<int64_t> StartWithoutCommit(const Partition& partition, Clock::time_point deadline);
  int64_t FirstPending(const Partition& partition, int64_t offset) const;
  // Takes the message over. `is_end`: it says that a partition has no more.
  KafkaError Add(rd_kafka_message_t* message, bool* is_end);
  KafkaError ReadError(const Complaint& complaint) const;
  Partition PartitionOf(const rd_kafka_message_t& message) const {
    return {message.rkt == nullptr ? "" : api_.topic_name_(message.rkt), message.partition};
  }

  const RdKafkaApi& api_;
  const KafkaSource source_;
  const KafkaLog log_;
  rd_kafka_t* handle_ = nullptr;
  Clock::time_point opened_at_;
  bool joined_ = false;
  std::vector<rd_kafka_message_t*> pending_;
  std::optional<Clock::time_point> deadline_;  // when the current poll times out
  int64_t timeouts_ = 0;                       // since the last message
  std::set<Partition> assigned_;
  std::set<Partition> at_end_;
  Positions resume_;     // of partitions that were not assigned yet
  Positions positions_;  // of those that are
  Positions history_end_;
  Clock::time_point next_look_;
  // The client's newest complaint since it last heard from a broker, and whether that was the
  // connection.
  Complaint complaint_;
  bool is_down_ = false;
  std::string connection_error_;
  KafkaError resume_error_;
};

KafkaError KafkaReader::Consumer::Open() {
  if (log_ != nullptr) log_(false, "Reading Kafka: " + source_.Describe() + ".");
  client_log = log_;
  char text[kErrorTextSize] = "";
  rd_kafka_conf_t* const conf = api_.conf_new_();
  for (const auto& [key, value] : source_.settings) {
    if (api_.conf_set_(conf, key.c_str(), value.c_str(), text, sizeof(text)) != kConfOk) {
      api_.conf_destroy_(conf);
      return BadArgument("Kafka setting " + key + "=" + value + ": " + text);
    }
  }
  api_.conf_set_opaque_(conf, this);
  api_.conf_set_error_cb_(conf, &OnError);
  api_.conf_set_log_cb_(conf, &OnClientLog);
  api_.conf_set_rebalance_cb_(conf, &OnRebalance);
  handle_ = api_.new_(kConsumerType, conf, text, sizeof(text));
  if (handle_ == nullptr) {
    api_.conf_destroy_(conf);
    return BadArgument(std::string("Kafka settings: ") + text);
  }
  api_.poll_set_consumer_(handle_);
  opened_at_ = Clock::now();
  next_look_ = opened_at_;
  if (source_.num_workers > 0) return {};
  rd_kafka_topic_partition_list_t* const topics =
      api_.topic_partition_list_new_(static_cast<int>(source_.topics.size()));
  constexpr int32_t kAnyPartition = -1;
  for (const std::string& topic : source_.topics) {
    api_.topic_partition_list_add_(topics, topic.c_str(), kAnyPartition);
  }
  const int code = api_.subscribe_(handle_, topics);
  api_.topic_partition_list_destroy_(topics);
  return code == kNoError ? KafkaError() : ReadError({code, api_.err2str_(code)});
}

void KafkaReader::Consumer::Close() {
  for (rd_kafka_message_t* message : pending_) api_.message_destroy_(message);
  pending_.clear();
  if (handle_ == nullptr) return;
  api_.consumer_close_(handle_);
  api_.destroy_(handle_);
  handle_ = nullptr;
}

KafkaError KafkaReader::Consumer::Step(int64_t message_poll_timeout, int64_t max_messages,
                                       bool* is_complete) {
  *is_complete = false;
  if (source_.num_workers > 0 && Clock::now() >= next_look_) AssignOwn();
  const Clock::time_point now = Clock::now();
  if (!deadline_) deadline_ = now + milliseconds(message_poll_timeout);
  const Clock::time_point slice_end = std::min(*deadline_, now + kSlice);
  rd_kafka_message_t* message = api_.consumer_poll_(handle_, RemainingMs(slice_end));
  if (resume_error_) {
    if (message != nullptr) api_.message_destroy_(message);
    return resume_error_;
  }
  if (message == nullptr) {
    // Joining the group starts the clock anew.
    if (!deadline_ || Clock::now() < *deadline_) return {};
    deadline_.reset();
    if (joined_ || complaint_.code != kNoError || now - opened_at_ > kJoinTime) ++timeouts_;
    *is_complete = true;
    return {};
  }
  bool is_end = false;
  while (message != nullptr) {
    if (KafkaError error = Add(message, &is_end)) return error;
    const bool is_full = static_cast<int64_t>(pending_.size()) >= max_messages;
    message = is_full ? nullptr : api_.consumer_poll_(handle_, 0);
  }
  *is_complete = static_cast<int64_t>(pending_.size()) >= max_messages ||
                 (is_end && !assigned_.empty() && at_end_ == assigned_);
  return {};
}

KafkaError KafkaReader::Consumer::Add(rd_kafka_message_t* message, bool* is_end) {
  const Partition partition = PartitionOf(*message);
  const bool is_ours = assigned_.count(partition) != 0;
  if (message->err == kNoError) {
    pending_.push_back(message);
    at_end_.erase(partition);
    if (is_ours) positions_.try_emplace(partition, message->offset);
    timeouts_ = 0;
    deadline_.reset();
    complaint_ = {};
    return {};
  }
  const int code = message->err;
  std::string text = api_.err2str_(code);
  if (message->payload != nullptr) {
    text.assign(static_cast<const char*>(message->payload), message->len);
  }
  const int64_t offset = message->offset;
  api_.message_destroy_(message);
  if (code == kErrPartitionEof) {
    if (is_ours) {
      at_end_.insert(partition);
      positions_.try_emplace(partition, offset);
    }
    complaint_ = {};
    *is_end = true;
    return {};
  }
  Complain(code, text);
  char fatal_text[kErrorTextSize] = "";
  const int fatal = api_.fatal_error_(handle_, fatal_text, sizeof(fatal_text));
  if (fatal != kNoError) return ReadError({fatal, fatal_text});
  switch (code) {
    // No waiting mends these.
    case kErrFatal:
    case kErrAutoOffsetReset:
    case kErrTopicAuthorizationFailed:
    case kErrGroupAuthorizationFailed:
    case kErrInvalidGroupId:
      return ReadError({code, text});
    default:
      return {};
  }
}

std::string KafkaFetch::Origin(size_t i) const {
  const auto& [topic, partition] = partitions[i];
  return "Kafka topic " + topic + ", partition " + std::to_string(partition) + ", offset " +
         std::to_string(offsets[i]);
}

void KafkaReader::Consumer::Take(int64_t message_poll_timeout, int64_t stream_timeout,
                                 KafkaFetch* fetch) {
  const auto bytes = [](const void* data, size_t size) {
    return data == nullptr ? std::string() : std::string(static_cast<const char*>(data), size);
  };
  // Messages of a partition come in runs: what is known of it is looked up once for each.
  std::optional<std::pair<const void*, int32_t>> run;
  Partition partition;
  int64_t history_end = 0;
  auto position = positions_.end();
  for (rd_kafka_message_t* message : pending_) {
    const std::pair<const void*, int32_t> handle(message->rkt, message->partition);
    if (run != handle) {
      run = handle;
      partition = PartitionOf(*message);
      const auto found = history_end_.find(partition);
      history_end = found == history_end_.end() ? 0 : found->second;
      position = positions_.find(partition);
    }
    const bool is_history = message->offset < history_end;
    // Messages of a partition that went to another member are still handed out.
    if (position != positions_.end() && !is_history) position->second = message->offset + 1;
    fetch->messages.push_back(bytes(message->payload, message->len));
    fetch->keys.push_back(bytes(message->key, message->key_len));
    fetch->is_history.push_back(is_history);
    fetch->partitions.push_back(partition);
    fetch->offsets.push_back(message->offset);
    api_.message_destroy_(message);
  }
  pending_.clear();
  fetch->continue_fetch =
      stream_timeout == kEndless || timeouts_ * message_poll_timeout < stream_timeout;
}

KafkaError KafkaReader::Consumer::Check(int64_t timeout) {
  if (complaint_.code == kNoError) return {};
  if (is_down_) {
    // The client does not tell when a broker is back.
    const rd_kafka_metadata* metadata = nullptr;
    const int timeout_ms = static_cast<int>(std::clamp<int64_t>(timeout, 1000, 10000));
    if (api_.metadata_(handle_, 0, nullptr, &metadata, timeout_ms) == kNoError) {
      api_.metadata_destroy_(metadata);
      return {};
    }
  }
  return ReadError(complaint_);
}

void KafkaReader::Consumer::Complain(int code, const std::string& text) {
  if (code == kErrTransport) {
    // One connection of several; the client tells when all are lost.
    connection_error_ = text;
    return;
  }
  complaint_ = {code, text};
  is_down_ = code == kErrAllBrokersDown || code == kErrResolve;
  const std::string line = "Kafka: " + text + " (" + source_.Describe() + ")";
  if (log_ != nullptr && IsDue(line)) log_(true, line);
}

KafkaError KafkaReader::Consumer::ReadError(const Complaint& complaint) const {
  std::string text = "cannot read " + source_.Describe() + ": " + api_.err2name_(complaint.code) +
                     ": " + complaint.text;
  if (is_down_ && !connection_error_.empty()) text += "; " + connection_error_;
  return {KafkaErrorCode::kUnreadable, std::move(text)};
}

void KafkaReader::Consumer::Rebalance(bool is_assignment,
                                      rd_kafka_topic_partition_list_t* partitions) {
  const char* const protocol = api_.rebalance_protocol_(handle_);
  const bool is_cooperative = protocol != nullptr && std::strcmp(protocol, "COOPERATIVE") == 0;
  if (is_assignment) Locate(partitions);
  rd_kafka_error_t* error = nullptr;
  int code = kNoError;
  if (is_cooperative) {
    error = is_assignment ? api_.incremental_assign_(handle_, partitions)
                          : api_.incremental_unassign_(handle_, partitions);
  } else {
    code = api_.assign_(handle_, is_assignment ? partitions : nullptr);
  }
  if (error != nullptr) {
    Complain(kErrFatal, api_.error_string_(error));
    api_.error_destroy_(error);
  } else if (code != kNoError) {
    Complain(code, api_.err2str_(code));
  }
  for (int i = 0; i < partitions->cnt; ++i) {
    const Partition partition(partitions->elems[i].topic, partitions->elems[i].partition);
    if (is_assignment) {
      assigned_.insert(partition);
    } else {
      assigned_.erase(partition);
      positions_.erase(partition);
    }
    at_end_.erase(partition);
  }
  if (is_assignment) {
    joined_ = true;
    deadline_.reset();
    if (partitions->cnt > 0 && error == nullptr && code == kNoError) complaint_ = {};
  }
}

// Tells the client where to begin, so that every partition has a position as soon as it is ours: a
// position that is saved before the first message of a partition must not be lost.
void KafkaReader::Consumer::Locate(rd_kafka_topic_partition_list_t* partitions) {
  if (partitions->cnt == 0) return;
  const Clock::time_point deadline = Clock::now() + kLocateTime;
  rd_kafka_topic_partition_list_t* const committed = api_.topic_partition_list_copy_(partitions);
  const int code = api_.committed_(handle_, committed, RemainingMs(deadline));
  for (int i = 0; i < partitions->cnt; ++i) {
    rd_kafka_topic_partition_t* const wanted = &partitions->elems[i];
    const Partition partition(wanted->topic, wanted->partition);
    const auto resume = resume_.find(partition);
    std::optional<int64_t> offset;
    if (resume != resume_.end()) {
      offset = resume->second;
      resume_.erase(resume);
      ResumeAt(partition, *offset, deadline);
    } else if (code == kNoError && committed->elems[i].err == kNoError) {
      if (committed->elems[i].offset >= 0) {
        offset = committed->elems[i].offset;
      } else {
        offset = StartWithoutCommit(partition, deadline);
      }
    }
    // Otherwise the client finds out, and the first message tells.
    if (!offset) continue;
    wanted->offset = *offset;
    positions_[partition] = FirstPending(partition, *offset);
  }
  api_.topic_partition_list_destroy_(committed);
}

void KafkaReader::Consumer::ResumeAt(const Partition& partition, int64_t offset,
                                     Clock::time_point deadline) {
  int64_t low, high;
  const int code = api_.query_watermark_offsets_(handle_, partition.first.c_str(), partition.second,
                                                 &low, &high, RemainingMs(deadline));
  if (code != kNoError || (low <= offset && offset <= high)) return;
  resume_error_ = LostMessages(partition, offset, low, high);
}

KafkaError KafkaReader::Consumer::LostMessages(const Partition& partition, int64_t offset,
                                               int64_t low, int64_t high) const {
  return {KafkaErrorCode::kLostMessages, "cannot resume topic " + partition.first + ", partition " +
                                             std::to_string(partition.second) + " at offset " +
                                             std::to_string(offset) + ": the broker has " +
                                             std::to_string(low) + " to " + std::to_string(high) +
                                             " (" + source_.Describe() + ")"};
}

// Takes the partitions that are this worker's and that it does not read yet. What a broker does not
// tell now is asked again later.
void KafkaReader::Consumer::AssignOwn() {
  const std::vector<Partition> own = FindOwn();
  next_look_ = Clock::now() + (joined_ ? kLookInterval : kFirstLookInterval);
  if (own.empty()) return;
  rd_kafka_topic_partition_list_t* const partitions =
      api_.topic_partition_list_new_(static_cast<int>(own.size()));
  for (const Partition& partition : own) {
    api_.topic_partition_list_add_(partitions, partition.first.c_str(), partition.second);
  }
  if (LocateOwn(partitions)) {
    if (assigned_.empty()) {
      const int code = api_.assign_(handle_, partitions);
      if (code != kNoError) Complain(kErrFatal, api_.err2str_(code));
    } else if (rd_kafka_error_t* error = api_.incremental_assign_(handle_, partitions)) {
      Complain(kErrFatal, api_.error_string_(error));
      api_.error_destroy_(error);
    }
    assigned_.insert(own.begin(), own.end());
    for (const Partition& partition : own) resume_.erase(partition);
    joined_ = true;
    deadline_.reset();
    next_look_ = Clock::now() + kLookInterval;
  } else {
    next_look_ = Clock::now() + kFirstLookInterval;
  }
  api_.topic_partition_list_destroy_(partitions);
}

std::vector<Partition> KafkaReader::Consumer::FindOwn() {
  const rd_kafka_metadata* metadata = nullptr;
  constexpr int kAllTopics = 1;  // the client knows none before it reads
  const int code =
      api_.metadata_(handle_, kAllTopics, nullptr, &metadata, static_cast<int>(kLookTime.count()));
  if (code != kNoError) {
    Complain(code, "partitions: " + std::string(api_.err2str_(code)));
    return {};
  }
  std::vector<Partition> own;
  size_t found = 0;
  for (int i = 0; i < metadata->topic_cnt; ++i) {
    const rd_kafka_metadata_topic& topic = metadata->topics[i];
    if (std::find(source_.topics.begin(), source_.topics.end(), topic.topic) ==
        source_.topics.end()) {
      continue;
    }
    found += topic.partition_cnt > 0;
    for (int j = 0; j < topic.partition_cnt; ++j) {
      const Partition partition(topic.topic, topic.partitions[j].id);
      if (partition.second % source_.num_workers == source_.worker_index &&
          assigned_.count(partition) == 0) {
        own.push_back(partition);
      }
    }
  }
  api_.metadata_destroy_(metadata);
  if (found < source_.topics.size() && log_ != nullptr && IsDue("no topic " + source_.Describe())) {
    log_(true, "Kafka: waiting for topics to be created (" + source_.Describe() + ")");
  }
  return own;
}

// Says where each partition begins: at the position to resume at, else where the group stands, else
// where auto.offset.reset says; one that is new in a topic that is being read begins at its first
// message. False: brokers did not answer.
bool KafkaReader::Consumer::LocateOwn(rd_kafka_topic_partition_list_t* partitions) {
  const Clock::time_point deadline = Clock::now() + kLocateTime;
  rd_kafka_topic_partition_list_t* const committed = api_.topic_partition_list_copy_(partitions);
  bool is_located = true;
  bool needs_group = false;
  for (int i = 0; i < partitions->cnt; ++i) {
    const Partition partition(partitions->elems[i].topic, partitions->elems[i].partition);
    needs_group |= resume_.count(partition) == 0;
  }
  if (needs_group) {
    const int code = api_.committed_(handle_, committed, RemainingMs(deadline));
    if (code != kNoError) {
      Complain(code, "positions of the group: " + std::string(api_.err2str_(code)));
      is_located = false;
    }
  }
  for (int i = 0; is_located && i < partitions->cnt; ++i) {
    rd_kafka_topic_partition_t* const wanted = &partitions->elems[i];
    const Partition partition(wanted->topic, wanted->partition);
    int64_t low, high;
    const int code = api_.query_watermark_offsets_(handle_, wanted->topic, wanted->partition, &low,
                                                   &high, RemainingMs(deadline));
    if (code != kNoError) {
      Complain(code, "offsets of topic " + partition.first + ", partition " +
                         std::to_string(partition.second) + ": " + api_.err2str_(code));
      is_located = false;
      break;
    }
    const auto resume = resume_.find(partition);
    int64_t offset;
    if (resume != resume_.end()) {
      offset = resume->second;
      if (offset < low || offset > high) {
        resume_error_ = LostMessages(partition, offset, low, high);
        is_located = false;
        break;
      }
    } else if (committed->elems[i].err == kNoError && committed->elems[i].offset >= 0) {
      offset = std::clamp(committed->elems[i].offset, low, high);
    } else if (joined_) {
      offset = low;
    } else {
      const std::optional<int64_t> start = StartWithoutCommit(partition, deadline);
      if (!start) continue;  // the client says what is wrong with the setting
      offset = *start;
    }
    positions_[partition] = offset;
    history_end_[partition] = offset;
    wanted->offset = std::max(low, offset - source_.history);
  }
  api_.topic_partition_list_destroy_(committed);
  return is_located;
}

std::optional<int64_t> KafkaReader::Consumer::StartWithoutCommit(const Partition& partition,
                                                                 Clock::time_point deadline) {
  const auto it = source_.settings.find("auto.offset.reset");
  const std::string policy = it == source_.settings.end() ? "latest" : it->second;
  const bool from_first = policy == "earliest" || policy == "smallest" || policy == "beginning";
  const bool from_last = policy == "latest" || policy == "largest" || policy == "end";
  int64_t low, high;
  if ((!from_first && !from_last) ||
      api_.query_watermark_offsets_(handle_, partition.first.c_str(), partition.second, &low, &high,
                                    RemainingMs(deadline)) != kNoError) {
    return std::nullopt;
  }
  return from_first ? low : high;
}

// The client counts messages as read that wait here.
int64_t KafkaReader::Consumer::FirstPending(const Partition& partition, int64_t offset) const {
  for (const rd_kafka_message_t* message : pending_) {
    if (PartitionOf(*message) == partition) offset = std::min(offset, message->offset);
  }
  return offset;
}

KafkaReader::KafkaReader(const RdKafkaApi* api, KafkaSource source, KafkaLog log)
    : api_(api), source_(std::move(source)), log_(log) {}

KafkaReader::~KafkaReader() {
  if (consumer_ == nullptr) return;
  auto closed = std::make_shared<std::promise<void>>();
  std::future<void> is_closed = closed->get_future();
  const auto close = [consumer = std::move(consumer_), closed] {
    consumer->Close();
    closed->set_value();
  };
  std::thread thread;
  try {
    thread = std::thread(close);
  } catch (const std::system_error&) {
    close();
    return;
  }
  if (is_closed.wait_for(kCloseTime) == std::future_status::ready) {
    thread.join();
    return;
  }
  if (log_ != nullptr) log_(true, "The Kafka consumer of " + source_.Describe() + " still closes.");
  thread.detach();
}

KafkaError KafkaReader::Fetch(int64_t message_poll_timeout, int64_t stream_timeout,
                              int64_t max_wait, KafkaFetch* fetch, bool* is_complete) {
  const Clock::time_point give_up = Clock::now() + milliseconds(max_wait);
  *is_complete = false;
  do {
    std::lock_guard<std::mutex> lock(mutex_);
    if (KafkaError error = EnsureOpen()) return error;
    if (KafkaError error = consumer_->Step(message_poll_timeout, source_.batch_size, is_complete)) {
      return error;
    }
    if (*is_complete) {
      consumer_->Take(message_poll_timeout, stream_timeout, fetch);
      return {};
    }
  } while (Clock::now() < give_up);
  return {};
}

KafkaError KafkaReader::EnsureOpen() {
  if (consumer_ != nullptr) return {};
  auto consumer = std::make_shared<Consumer>(api_, source_, log_, resume_);
  if (KafkaError error = consumer->Open()) {
    consumer->Close();
    return error;
  }
  consumer_ = std::move(consumer);
  return {};
}

KafkaError KafkaReader::Collect(int64_t max_messages, int64_t max_wait, KafkaFetch* fetch) {
  const Clock::time_point give_up = Clock::now() + milliseconds(max_wait);
  std::lock_guard<std::mutex> lock(mutex_);
  if (KafkaError error = EnsureOpen()) return error;
  bool is_complete = false;
  do {
    const int64_t left = std::max(1, RemainingMs(give_up));
    if (KafkaError error = consumer_->Step(left, max_messages, &is_complete)) return error;
  } while (!(is_complete && consumer_->has_pending()) && Clock::now() < give_up);
  consumer_->Take(max_wait, kEndless, fetch);
  return {};
}

KafkaError KafkaReader::Check(int64_t timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  return consumer_ == nullptr ? KafkaError() : consumer_->Check(timeout);
}

Positions KafkaReader::positions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return consumer_ == nullptr ? resume_ : consumer_->positions();
}

void KafkaReader::Resume(const Positions& positions) {
  std::lock_guard<std::mutex> lock(mutex_);
  resume_ = positions;
}

}  // namespace kafka
}  // namespace monolith
