#include "monolith/serving/native/remote/channels.h"

#include <algorithm>
#include <utility>

#include "monolith/serving/native/net/socket.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kMaxQueued = 100'000;

}  // namespace

Channels::~Channels() {
  if (!thread_.joinable()) return;
  loop_.Stop();
  thread_.join();
  // Ends before what its closures use.
  workers_.reset();
}

Status Channels::Open() {
  const Status status = loop_.Open();
  if (!status.ok()) return status;
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  workers_ = std::make_unique<WorkerPool>(std::max<int64_t>(4, 2 * cores), kMaxQueued);
  thread_ = std::thread([this] { loop_.Run(); });
  return status;
}

void Channels::Call(const std::string& address, const std::string& path, std::string message,
                    Clock::time_point deadline, RpcDone done) {
  Waiting call{path, std::move(message), deadline, nullptr};
  call.done = [this, done = std::move(done)](RpcReply reply) {
    const auto shared = std::make_shared<RpcReply>(std::move(reply));
    // The rest of a model may run in there: not in the thread that serves the sockets.
    if (!workers_->Schedule([done, shared] { done(std::move(*shared)); })) {
      done(RpcReply{Status(Code::kResourceExhausted, "too many answers are waiting"), ""});
    }
  };
  const auto shared = std::make_shared<Waiting>(std::move(call));
  loop_.Post([this, address, shared] { Send(address, std::move(*shared)); });
}

void Channels::Send(const std::string& address, Waiting call) {
  Channel& channel = channels_[address];
  if (channel.connection != nullptr && channel.connection->usable()) {
    return channel.connection->Call(call.path, call.message, call.deadline, std::move(call.done));
  }
  channel.waiting.push_back(std::move(call));
  if (channel.connecting) return;
  channel.connecting = true;
  const bool queued = workers_->Schedule([this, address] {
    const auto socket = std::make_shared<FileDescriptor>();
    const Status status = StartConnect(address, socket.get());
    loop_.Post([this, address, status, socket] { Connected(address, status, socket); });
  });
  if (!queued) {
    Connected(address, Status(Code::kResourceExhausted, "too many answers are waiting"), nullptr);
  }
}

void Channels::Connected(const std::string& address, const Status& status,
                         const std::shared_ptr<FileDescriptor>& socket) {
  Channel& channel = channels_[address];
  channel.connecting = false;
  std::vector<Waiting> waiting = std::exchange(channel.waiting, {});
  Status error = status;
  if (error.ok()) {
    auto connection = std::make_shared<Http2ClientConnection>(&loop_, std::move(*socket), address);
    const Http2ClientConnection* const key = connection.get();
    const bool started = connection->Start([this, address, key] {
      Channel& closed = channels_[address];
      if (closed.connection.get() == key) closed.connection.reset();
    });
    if (started) {
      channel.connection = std::move(connection);
    } else {
      error = Status(Code::kUnavailable, "cannot connect to " + address);
    }
  }
  for (Waiting& call : waiting) {
    if (error.ok()) {
      channel.connection->Call(call.path, call.message, call.deadline, std::move(call.done));
    } else {
      call.done(RpcReply{error, ""});
    }
  }
}

}  // namespace serving
}  // namespace monolith
