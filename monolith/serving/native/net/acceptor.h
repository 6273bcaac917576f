// Listens on a port and owns the accepted connections.
#ifndef MONOLITH_SERVING_NATIVE_NET_ACCEPTOR_H_
#define MONOLITH_SERVING_NATIVE_NET_ACCEPTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "monolith/serving/native/net/connection.h"

namespace monolith {
namespace serving {

class Acceptor : public EventHandler {
 public:
  using Factory = std::function<std::shared_ptr<Connection>(FileDescriptor socket)>;

  // Connections beyond `max_connections` are closed at once.
  Acceptor(EventLoop* loop, int64_t max_connections, Factory factory);
  ~Acceptor() override;

  Status Open(const std::string& host, int port);
  int port() const { return port_; }

  void OnEvents(uint32_t events) override;

  // Tells all connections that watched answers may have changed.
  void NoteChange();

  // Accepts no more connections, and lets open ones finish.
  void Shutdown();
  int64_t num_connections() const { return static_cast<int64_t>(connections_.size()); }

 private:
  void Tick();

  EventLoop* const loop_;
  const int64_t max_connections_;
  const Factory factory_;
  FileDescriptor listener_;
  uint64_t key_ = 0;
  int port_ = 0;
  uint64_t next_id_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<Connection>> connections_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_ACCEPTOR_H_
