#include "monolith/serving/native/remote/address_book.h"

#include <algorithm>
#include <charconv>
#include <future>
#include <memory>
#include <string_view>
#include <utility>

#include "monolith/agent_service/agent_service.pb.h"
#include "monolith/serving/native/base/log.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::chrono::seconds kAskAgain(15);
// It is on this machine, and requests may wait for it.
constexpr std::chrono::seconds kAskDeadline(2);
// While it does not answer.
constexpr std::chrono::seconds kAskSoon(1);
constexpr std::chrono::milliseconds kMinGap(100);
// How long a replica that an answer lacks is worth a try when all others fail.
constexpr std::chrono::seconds kRemember(60);
constexpr char kHeartBeat[] = "/monolith.serving.agent_service.AgentService/HeartBeat";

bool IsAddress(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  int port = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + colon + 1, end, port);
  return parsed.ec == std::errc() && parsed.ptr == end && port > 0 && port < 65536;
}

// An empty part is one, too.
std::vector<std::string> Split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t end = 0;
  while ((end = text.find(separator)) != std::string_view::npos) {
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.emplace_back(text);
  return parts;
}

std::string Strip(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

}  // namespace

Status ParseAddresses(const std::string& text, Addresses* addresses) {
  for (const std::string& part : Split(text, ',')) {
    const std::string item = Strip(part);
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    std::vector<std::string> replicas;
    if (equals != std::string::npos) replicas = Split(item.substr(equals + 1), '|');
    if (name.empty() || replicas.empty() ||
        !std::all_of(replicas.begin(), replicas.end(), IsAddress)) {
      return Status(Code::kInvalidArgument, "--ps_address has '" + item +
                                                "', want name=host:port or "
                                                "name=host:port|host:port");
    }
    if (!addresses->emplace(name, replicas).second) {
      return Status(Code::kInvalidArgument, "--ps_address names '" + name + "' twice");
    }
  }
  return Status();
}

AddressBook::AddressBook(Addresses fixed) : fixed_(std::move(fixed)) {}

AddressBook::AddressBook(Channels* channels, std::string agent)
    : channels_(channels), agent_(std::move(agent)), thread_([this] { FollowAgent(); }) {}

AddressBook::~AddressBook() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status AddressBook::Find(const std::string& name, const std::string& old_name, ServedModel* model) {
  if (channels_ == nullptr) {
    for (const std::string& candidate : {name, old_name}) {
      const auto found = fixed_.find(candidate);
      if (found == fixed_.end()) continue;
      *model = ServedModel{candidate, found->second, {}};
      return Status();
    }
    if (fixed_.empty()) {
      return Status(Code::kUnavailable,
                    "nobody said where '" + name + "' is served: neither --ps_address nor $PORT2");
    }
    return Status(Code::kNotFound,
                  "--ps_address names neither '" + name + "' nor '" + old_name + "'");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  *model = FindServedModel(name, old_name);
  if (!model->addresses.empty() || !model->former_addresses.empty()) return Status();
  return Status(Code::kUnavailable,
                "the agent at " + agent_ +
                    (answered_ ? " knows no replica of '" + name + "'" : " has not answered yet"));
}

// The kind of keys that the agent answers decides: `<model>:ps_<i>`, which is also the name, or
// `ps:<i>` for a model that is called `ps_<i>`, the old name.
ServedModel AddressBook::FindServedModel(const std::string& name,
                                         const std::string& old_name) const {
  const auto is_unified = [](const auto& item) {
    return item.first.find(":ps") != std::string::npos;
  };
  const bool unified = answer_.empty() ? std::any_of(seen_.begin(), seen_.end(), is_unified)
                                       : std::any_of(answer_.begin(), answer_.end(), is_unified);
  ServedModel model;
  std::string key = name;
  model.name = name;
  if (!unified) {
    model.name = old_name;
    const size_t underscore = old_name.rfind('_');
    key = underscore == std::string::npos
              ? old_name
              : old_name.substr(0, underscore) + ":" + old_name.substr(underscore + 1);
  }
  const auto found = answer_.find(key);
  if (found != answer_.end()) model.addresses = found->second;
  const auto seen = seen_.find(key);
  if (seen == seen_.end()) return model;
  const Clock::time_point now = Clock::now();
  for (const auto& [address, when] : seen->second) {
    const bool is_there =
        std::find(model.addresses.begin(), model.addresses.end(), address) != model.addresses.end();
    if (!is_there && now - when < kRemember) model.former_addresses.push_back(address);
  }
  return model;
}

void AddressBook::AskAgain(Clock::time_point since, std::function<void()> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (asked_ <= since && !stopping_) {
      waiting_.push_back(std::move(done));
      ask_now_ = true;
      wake_.notify_all();
      return;
    }
  }
  done();
}

void AddressBook::FollowAgent() {
  std::unique_lock<std::mutex> lock(mutex_);
  bool answered = true;
  while (!stopping_) {
    ask_now_ = false;
    lock.unlock();
    const bool answers = AskAgent();
    lock.lock();
    if (!answers && answered && !stopping_)
      LogWarning("The agent at " + agent_ + " does not answer");
    answered = answers;
    asked_ = Clock::now();
    // Those that came while the question was under way are answered, too.
    const std::vector<std::function<void()>> waiting = std::move(waiting_);
    waiting_.clear();
    lock.unlock();
    for (const std::function<void()>& done : waiting) done();
    lock.lock();
    wake_.wait_for(lock, kMinGap, [this] { return stopping_; });
    wake_.wait_for(lock, answers ? kAskAgain : kAskSoon, [this] { return stopping_ || ask_now_; });
  }
  const std::vector<std::function<void()>> waiting = std::move(waiting_);
  waiting_.clear();
  lock.unlock();
  for (const std::function<void()>& done : waiting) done();
}

void AddressBook::Remember() {
  const Clock::time_point now = Clock::now();
  for (auto key = seen_.begin(); key != seen_.end();) {
    for (auto address = key->second.begin(); address != key->second.end();) {
      address = now - address->second < kRemember ? std::next(address) : key->second.erase(address);
    }
    key = key->second.empty() ? seen_.erase(key) : std::next(key);
  }
  for (const auto& [key, addresses] : answer_) {
    for (const std::string& address : addresses) seen_[key][address] = now;
  }
}

bool AddressBook::AskAgent() {
  Addresses addresses;
  for (const auto type : {agent_service::PS, agent_service::DENSE}) {
    agent_service::HeartBeatRequest request;
    request.set_server_type(type);
    const auto promise = std::make_shared<std::promise<RpcReply>>();
    std::future<RpcReply> future = promise->get_future();
    channels_->Call(agent_, kHeartBeat, request.SerializeAsString(), Clock::now() + kAskDeadline,
                    [promise](RpcReply reply) { promise->set_value(std::move(reply)); });
    const RpcReply reply = future.get();
    agent_service::HeartBeatResponse response;
    if (!reply.status.ok() || !response.ParseFromString(reply.message)) return false;
    for (const auto& [key, list] : response.addresses()) {
      std::vector<std::string>& replicas = addresses[key];
      for (const std::string& address : list.address()) {
        if (IsAddress(address)) replicas.push_back(address);
      }
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  answer_ = std::move(addresses);
  answered_ = true;
  Remember();
  return true;
}

}  // namespace serving
}  // namespace monolith
