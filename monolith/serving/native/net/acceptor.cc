#include "monolith/serving/native/net/acceptor.h"

#include <sys/epoll.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/net/socket.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::chrono::seconds kTick(1);
constexpr int kMaxAcceptsPerEvent = 64;

}  // namespace

Acceptor::Acceptor(EventLoop* loop, int64_t max_connections, Factory factory)
    : loop_(loop), max_connections_(max_connections), factory_(std::move(factory)) {}

Acceptor::~Acceptor() {
  if (key_ != 0) loop_->Remove(key_, listener_.get());
}

Status Acceptor::Open(const std::string& host, int port) {
  Status status = Listen(host, port, &listener_, &port_);
  if (!status.ok()) return status;
  key_ = loop_->Add(listener_.get(), EPOLLIN, this);
  if (key_ == 0) return Status(Code::kInternal, "the kernel refuses to watch the listening socket");
  Tick();
  return Status();
}

void Acceptor::OnEvents(uint32_t) {
  for (int i = 0; i < kMaxAcceptsPerEvent; ++i) {
    FileDescriptor socket = Accept(listener_.get());
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE) {
        // A waiting connection keeps the listener readable: stop watching it until a connection
        // closes.
        LogWarning("Out of file descriptors: new connections wait");
        loop_->Modify(key_, listener_.get(), 0);
      }
      return;
    }
    if (num_connections() >= max_connections_) continue;
    const uint64_t id = next_id_++;
    std::shared_ptr<Connection> connection = factory_(std::move(socket));
    if (connection == nullptr) continue;
    connections_[id] = connection;
    if (!connection->Start([this, id] { connections_.erase(id); })) connections_.erase(id);
  }
}

void Acceptor::NoteChange() {
  for (const auto& [id, connection] : connections_) connection->OnChange();
}

void Acceptor::Shutdown() {
  if (key_ != 0) loop_->Remove(key_, listener_.get());
  key_ = 0;
  listener_.Close();
  for (const auto& [id, connection] : connections_) connection->Shutdown();
}

void Acceptor::Tick() {
  const Clock::time_point now = Clock::now();
  if (key_ != 0) loop_->Modify(key_, listener_.get(), EPOLLIN);
  for (const auto& [id, connection] : connections_) connection->OnTick(now);
  loop_->RunAt(now + kTick, [this] { Tick(); });
}

}  // namespace serving
}  // namespace monolith
