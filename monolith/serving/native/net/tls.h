// TLS for the connections of a server, by OpenSSL.
//
// TensorFlow's library exports the functions of the BoringSSL that is inside, by the same names. So
// libssl is not linked: it is loaded when it is wanted, and finds its own functions first.
#ifndef MONOLITH_SERVING_NATIVE_NET_TLS_H_
#define MONOLITH_SERVING_NATIVE_NET_TLS_H_

#include <memory>
#include <string>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/net/stream_cipher.h"

namespace monolith {
namespace serving {

// All in PEM.
struct TlsSettings {
  std::string server_key;
  // The server's own certificate comes first; those that vouch for it may follow.
  std::string server_cert;
  // Whose clients are believed.
  std::string custom_ca;
  // A client without a certificate of theirs is refused.
  bool client_verify = false;
};

class TlsContext {
 public:
  virtual ~TlsContext() = default;
  // Returns null if memory is short. The context must outlive the result.
  virtual std::unique_ptr<StreamCipher> NewServerCipher() = 0;
};

// TLS 1.2 and later, for HTTP/2. The error says what of the settings is wrong, or how to get a
// server that has TLS.
Status MakeTlsContext(const TlsSettings& settings, std::unique_ptr<TlsContext>* context);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_TLS_H_
