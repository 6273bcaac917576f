// Stands between a socket and the protocol on it: TLS.
#ifndef MONOLITH_SERVING_NATIVE_NET_STREAM_CIPHER_H_
#define MONOLITH_SERVING_NATIVE_NET_STREAM_CIPHER_H_

#include <cstddef>
#include <string>

namespace monolith {
namespace serving {

// Belongs to one connection and its thread.
class StreamCipher {
 public:
  virtual ~StreamCipher() = default;

  // Takes what came from the peer and appends what it says. Returns false if nothing more can come:
  // the peer has said so, or does not keep to the rules.
  virtual bool Receive(const char* data, size_t size, std::string* plain) = 0;

  // Whether Send may be called: the handshake is over.
  virtual bool ready() const = 0;
  virtual bool Send(const std::string& plain) = 0;
  // Nothing will be sent any more. Calls after the first do nothing.
  virtual void End() = 0;

  // Appends the bytes for the peer.
  virtual void TakeOutput(std::string* output) = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_STREAM_CIPHER_H_
