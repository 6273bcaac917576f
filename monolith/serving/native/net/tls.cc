#include "monolith/serving/native/net/tls.h"

#ifdef MONOLITH_WITH_OPENSSL

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cstring>
#include <vector>

// Every function of OpenSSL that is called here.
#define MONOLITH_OPENSSL_FUNCTIONS(X) \
  X(BIO_ctrl_pending)                 \
  X(BIO_free)                         \
  X(BIO_new)                          \
  X(BIO_new_mem_buf)                  \
  X(BIO_read)                         \
  X(BIO_s_mem)                        \
  X(BIO_write)                        \
  X(ERR_clear_error)                  \
  X(ERR_error_string_n)               \
  X(ERR_peek_error)                   \
  X(EVP_PKEY_free)                    \
  X(PEM_read_bio_PrivateKey)          \
  X(PEM_read_bio_X509)                \
  X(SSL_CTX_add_client_CA)            \
  X(SSL_CTX_check_private_key)        \
  X(SSL_CTX_ctrl)                     \
  X(SSL_CTX_free)                     \
  X(SSL_CTX_get_cert_store)           \
  X(SSL_CTX_new)                      \
  X(SSL_CTX_set_alpn_select_cb)       \
  X(SSL_CTX_set_num_tickets)          \
  X(SSL_CTX_set_options)              \
  X(SSL_CTX_set_verify)               \
  X(SSL_CTX_use_PrivateKey)           \
  X(SSL_CTX_use_certificate)          \
  X(SSL_do_handshake)                 \
  X(SSL_free)                         \
  X(SSL_get_error)                    \
  X(SSL_is_init_finished)             \
  X(SSL_new)                          \
  X(SSL_read)                         \
  X(SSL_set_accept_state)             \
  X(SSL_set_bio)                      \
  X(SSL_shutdown)                     \
  X(SSL_write)                        \
  X(TLS_server_method)                \
  X(X509_STORE_add_cert)              \
  X(X509_free)

#endif

namespace monolith {
namespace serving {

#ifdef MONOLITH_WITH_OPENSSL

namespace {

// Chosen by the version whose headers this was compiled with.
#if OPENSSL_VERSION_NUMBER >= 0x30000000L
constexpr char kLibrary[] = "libssl.so.3";
#else
constexpr char kLibrary[] = "libssl.so.1.1";
#endif
constexpr size_t kChunkBytes = 16 << 10;
// Limits what a handshake, or a change of keys, says at once: certificates are the most of it.
constexpr size_t kMaxReplyBytes = 256 << 10;
// As ALPN writes it: a length and a name.
constexpr unsigned char kHttp2[] = {2, 'h', '2'};

struct OpenSsl {
#define MONOLITH_DECLARE(name) decltype(&::name) name = nullptr;
  MONOLITH_OPENSSL_FUNCTIONS(MONOLITH_DECLARE)
#undef MONOLITH_DECLARE
};

Status Invalid(const std::string& text) { return Status(Code::kInvalidArgument, text); }

// Opens a library that prefers its own functions and those of its libraries to others of the name:
// otherwise OpenSSL would call TensorFlow's BoringSSL.
void* OpenDeep(const char* name) {
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
  // AddressSanitizer's dlopen ends the process that asks for it, as such a library allocates memory
  // past it. OpenSSL frees its memory itself, so libc's own can be called.
  if (dlsym(RTLD_DEFAULT, "__asan_init") != nullptr) {
    void* const libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    void* const own = libc == nullptr ? nullptr : dlsym(libc, "dlopen");
    if (own != nullptr) return reinterpret_cast<void* (*)(const char*, int)>(own)(name, kFlags);
  }
  return dlopen(name, kFlags);
}

Status LoadOpenSsl(OpenSsl* library) {
  void* handle = OpenDeep(kLibrary);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return Invalid(std::string("TLS needs OpenSSL: ") + (reason == nullptr ? kLibrary : reason));
  }
  const char* missing = nullptr;
#define MONOLITH_FIND(name)                                                        \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(handle, #name)); \
  if (library->name == nullptr) missing = #name;
  MONOLITH_OPENSSL_FUNCTIONS(MONOLITH_FIND)
#undef MONOLITH_FIND
  if (missing != nullptr) return Invalid(std::string(kLibrary) + " has no function " + missing);
  return Status();
}

// Takes the protocol that both know; a client that names others only is refused, as it would not
// understand the answers. One that names none may know.
int SelectHttp2(SSL*, const unsigned char** chosen, unsigned char* chosen_size,
                const unsigned char* offered, unsigned int size, void*) {
  for (unsigned int at = 0; at < size; at += 1u + offered[at]) {
    if (size - at >= sizeof(kHttp2) && memcmp(offered + at, kHttp2, sizeof(kHttp2)) == 0) {
      *chosen = offered + at + 1;
      *chosen_size = 2;
      return SSL_TLSEXT_ERR_OK;
    }
  }
  return SSL_TLSEXT_ERR_ALERT_FATAL;
}

class OpenSslCipher : public StreamCipher {
 public:
  OpenSslCipher(const OpenSsl* library, SSL_CTX* context)
      : library_(*library), ssl_(library->SSL_new(context)) {
    if (ssl_ == nullptr) return;
    BIO* input = library_.BIO_new(library_.BIO_s_mem());
    BIO* output = library_.BIO_new(library_.BIO_s_mem());
    if (input == nullptr || output == nullptr) {
      library_.BIO_free(input);
      library_.BIO_free(output);
      library_.SSL_free(ssl_);
      ssl_ = nullptr;
      return;
    }
    // They belong to it from now on.
    library_.SSL_set_bio(ssl_, input, output);
    library_.SSL_set_accept_state(ssl_);
    input_ = input;
    output_ = output;
  }
  ~OpenSslCipher() override {
    if (ssl_ != nullptr) library_.SSL_free(ssl_);
  }
  OpenSslCipher(const OpenSslCipher&) = delete;
  OpenSslCipher& operator=(const OpenSslCipher&) = delete;

  bool valid() const { return ssl_ != nullptr; }

  bool Receive(const char* data, size_t size, std::string* plain) override {
    if (failed_) return false;
    library_.ERR_clear_error();
    failed_ = library_.BIO_write(input_, data, static_cast<int>(size)) != static_cast<int>(size) ||
              !ReadAll(plain);
    // A client may ask for new keys as often as it likes, and not read that it has them.
    failed_ = failed_ || library_.BIO_ctrl_pending(output_) > kMaxReplyBytes;
    return !failed_;
  }

  bool ready() const override { return !failed_ && library_.SSL_is_init_finished(ssl_) == 1; }

  bool Send(const std::string& plain) override {
    library_.ERR_clear_error();
    const int size = static_cast<int>(plain.size());
    return library_.SSL_write(ssl_, plain.data(), size) == size;
  }

  void End() override {
    if (ended_ || !ready()) return;
    ended_ = true;
    library_.ERR_clear_error();
    library_.SSL_shutdown(ssl_);
  }

  void TakeOutput(std::string* output) override {
    const size_t size = library_.BIO_ctrl_pending(output_);
    if (size == 0) return;
    const size_t start = output->size();
    output->resize(start + size);
    const int taken = library_.BIO_read(output_, output->data() + start, static_cast<int>(size));
    output->resize(start + static_cast<size_t>(std::max(taken, 0)));
  }

 private:
  bool ReadAll(std::string* plain) {
    if (library_.SSL_is_init_finished(ssl_) == 0) {
      const int done = library_.SSL_do_handshake(ssl_);
      if (done != 1) return library_.SSL_get_error(ssl_, done) == SSL_ERROR_WANT_READ;
    }
    while (true) {
      const size_t start = plain->size();
      plain->resize(start + kChunkBytes);
      const int size = library_.SSL_read(ssl_, plain->data() + start, kChunkBytes);
      plain->resize(start + static_cast<size_t>(std::max(size, 0)));
      if (size <= 0) return library_.SSL_get_error(ssl_, size) == SSL_ERROR_WANT_READ;
    }
  }

  const OpenSsl& library_;
  SSL* ssl_;
  // Owned by ssl_.
  BIO* input_ = nullptr;
  BIO* output_ = nullptr;
  bool failed_ = false;
  bool ended_ = false;
};

class OpenSslContext : public TlsContext {
 public:
  ~OpenSslContext() override {
    if (context_ != nullptr) library_.SSL_CTX_free(context_);
  }

  Status Open(const TlsSettings& settings) {
    Status status = LoadOpenSsl(&library_);
    if (!status.ok()) return status;
    library_.ERR_clear_error();
    context_ = library_.SSL_CTX_new(library_.TLS_server_method());
    if (context_ == nullptr) return Invalid("OpenSSL does not start: " + LastError());
    library_.SSL_CTX_ctrl(context_, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_2_VERSION, nullptr);
    // Sessions are not resumed: connections live long, and nothing has to be kept for that.
    library_.SSL_CTX_ctrl(context_, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
    library_.SSL_CTX_set_num_tickets(context_, 0);
    library_.SSL_CTX_set_options(context_, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION |
                                               SSL_OP_NO_COMPRESSION |
                                               SSL_OP_CIPHER_SERVER_PREFERENCE);
    library_.SSL_CTX_set_alpn_select_cb(context_, &SelectHttp2, nullptr);
    status = UseCertificate(settings.server_cert);
    if (status.ok()) status = UseKey(settings.server_key);
    if (status.ok()) status = UseAuthorities(settings);
    return status;
  }

  std::unique_ptr<StreamCipher> NewServerCipher() override {
    auto cipher = std::make_unique<OpenSslCipher>(&library_, context_);
    if (!cipher->valid()) return nullptr;
    return cipher;
  }

 private:
  using Bio = std::unique_ptr<BIO, decltype(OpenSsl::BIO_free)>;
  using Certificate = std::unique_ptr<X509, decltype(OpenSsl::X509_free)>;

  Bio Open(const std::string& text) {
    return Bio(library_.BIO_new_mem_buf(text.data(), static_cast<int>(text.size())),
               library_.BIO_free);
  }

  std::string LastError() {
    char text[256] = "";
    library_.ERR_error_string_n(library_.ERR_peek_error(), text, sizeof(text));
    return text;
  }

  // Reads all of a text; the end of it counts as an error to OpenSSL, which is cleared.
  std::vector<Certificate> ReadCertificates(const std::string& text) {
    std::vector<Certificate> found;
    const Bio bio = Open(text);
    while (bio != nullptr) {
      Certificate next(library_.PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr),
                       library_.X509_free);
      if (next == nullptr) break;
      found.push_back(std::move(next));
    }
    if (!found.empty()) library_.ERR_clear_error();
    return found;
  }

  Status UseCertificate(const std::string& text) {
    std::vector<Certificate> chain = ReadCertificates(text);
    if (chain.empty()) return Invalid("server_cert is no certificate in PEM: " + LastError());
    if (library_.SSL_CTX_use_certificate(context_, chain[0].get()) != 1) {
      return Invalid("server_cert cannot be used: " + LastError());
    }
    for (size_t i = 1; i < chain.size(); ++i) {
      if (library_.SSL_CTX_ctrl(context_, SSL_CTRL_EXTRA_CHAIN_CERT, 0, chain[i].get()) != 1) {
        return Invalid("server_cert cannot be used: " + LastError());
      }
      // It belongs to the context now.
      static_cast<void>(chain[i].release());
    }
    return Status();
  }

  Status UseKey(const std::string& text) {
    const Bio bio = Open(text);
    const std::unique_ptr<EVP_PKEY, decltype(OpenSsl::EVP_PKEY_free)> key(
        // A key that is locked with a password is refused: without this OpenSSL asks the terminal.
        library_.PEM_read_bio_PrivateKey(
            bio.get(), nullptr, [](char*, int, int, void*) { return -1; }, nullptr),
        library_.EVP_PKEY_free);
    if (key == nullptr) return Invalid("server_key is no private key in PEM: " + LastError());
    if (library_.SSL_CTX_use_PrivateKey(context_, key.get()) != 1 ||
        library_.SSL_CTX_check_private_key(context_) != 1) {
      return Invalid("server_key does not belong to server_cert: " + LastError());
    }
    return Status();
  }

  Status UseAuthorities(const TlsSettings& settings) {
    if (!settings.custom_ca.empty()) {
      const std::vector<Certificate> authorities = ReadCertificates(settings.custom_ca);
      if (authorities.empty()) {
        return Invalid("custom_ca is no certificate in PEM: " + LastError());
      }
      for (const Certificate& authority : authorities) {
        library_.X509_STORE_add_cert(library_.SSL_CTX_get_cert_store(context_), authority.get());
        library_.SSL_CTX_add_client_CA(context_, authority.get());
      }
      library_.ERR_clear_error();
    } else if (settings.client_verify) {
      return Invalid("client_verify needs custom_ca: whose clients are to be believed?");
    }
    const int mode = SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
    if (settings.client_verify) library_.SSL_CTX_set_verify(context_, mode, nullptr);
    return Status();
  }

  OpenSsl library_;
  SSL_CTX* context_ = nullptr;
};

}  // namespace

Status MakeTlsContext(const TlsSettings& settings, std::unique_ptr<TlsContext>* context) {
  auto made = std::make_unique<OpenSslContext>();
  Status status = made->Open(settings);
  if (status.ok()) *context = std::move(made);
  return status;
}

#else  // MONOLITH_WITH_OPENSSL

Status MakeTlsContext(const TlsSettings&, std::unique_ptr<TlsContext>*) {
  return Status(Code::kUnimplemented,
                "this server was built without TLS: install OpenSSL's headers (Debian and Ubuntu: "
                "apt-get install libssl-dev) and run 'make server' again");
}

#endif

}  // namespace serving
}  // namespace monolith
