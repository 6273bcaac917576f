#include "monolith/serving/native/net/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace monolith {
namespace serving {
namespace {

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Status LookUp(const std::string& host, const std::string& port, int flags, AddressInfo* result) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return Status(Code::kUnavailable, "cannot look up '" + host + "': " + gai_strerror(error));
  }
  result->reset(found);
  return Status();
}

Status SystemError(const std::string& what) {
  return Status(Code::kUnavailable, what + ": " + strerror(errno));
}

void SetNoDelay(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

}  // namespace

Status Listen(const std::string& host, int port, FileDescriptor* listener, int* bound_port) {
  AddressInfo info(nullptr, &freeaddrinfo);
  Status status = LookUp(host, std::to_string(port), AI_PASSIVE, &info);
  if (!status.ok()) return status;
  const std::string where = "cannot listen on " + host + ":" + std::to_string(port);
  FileDescriptor fd(socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError(where);
  const int one = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (bind(fd.get(), info->ai_addr, info->ai_addrlen) != 0 || listen(fd.get(), 1024) != 0) {
    return SystemError(where);
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return SystemError(where);
  }
  *bound_port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                        : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  *listener = std::move(fd);
  return Status();
}

FileDescriptor Accept(int listener) {
  FileDescriptor fd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd.valid()) SetNoDelay(fd.get());
  return fd;
}

Status StartConnect(const std::string& address, FileDescriptor* result) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    return Status(Code::kInvalidArgument, "address is '" + address + "', want host:port");
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  AddressInfo info(nullptr, &freeaddrinfo);
  Status status = LookUp(host, address.substr(colon + 1), AI_NUMERICSERV, &info);
  if (!status.ok()) return status;
  FileDescriptor fd(socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return SystemError("cannot connect to " + address);
  SetNoDelay(fd.get());
  if (connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS) {
    return SystemError("cannot connect to " + address);
  }
  *result = std::move(fd);
  return Status();
}

Status ConnectResult(int socket) {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0) return Status();
  return Status(Code::kUnavailable, std::string("cannot connect: ") + strerror(error));
}

}  // namespace serving
}  // namespace monolith
