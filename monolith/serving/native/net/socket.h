// TCP sockets that do not block.
#ifndef MONOLITH_SERVING_NATIVE_NET_SOCKET_H_
#define MONOLITH_SERVING_NATIVE_NET_SOCKET_H_

#include <cstdint>
#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/net/file_descriptor.h"

namespace monolith {
namespace serving {

// Listens on `host` (a number or a name) and `port`, 0 for any free one. `bound_port` gets the
// port.
Status Listen(const std::string& host, int port, FileDescriptor* listener, int* bound_port);

// Takes a waiting connection; the result is not valid if there is none.
FileDescriptor Accept(int listener);

// Begins to connect to `host:port` or `[host]:port`; the socket is writable when that is done.
// Looks names up, which may take time: call it where waiting is allowed.
Status StartConnect(const std::string& address, FileDescriptor* socket);

// Returns the error of a connect that has ended.
Status ConnectResult(int socket);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_SOCKET_H_
