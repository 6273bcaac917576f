#include "monolith/serving/native/http2/client_connection.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>
#include <vector>

#include "monolith/serving/native/http2/callback_guard.h"
#include "monolith/serving/native/http2/header.h"

namespace monolith {
namespace serving {
namespace {

constexpr int64_t kMaxReplyBytes = 512 << 20;

}  // namespace

// Called by nghttp2. Exceptions must not pass through it: they end the connection.
struct ClientCallbacks {
  static Http2ClientConnection* Self(void* data) {
    return static_cast<Http2ClientConnection*>(data);
  }

  static int Header(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                    size_t name_size, const uint8_t* value, size_t value_size, uint8_t,
                    void* data) {
    return GuardCallback([&] {
      Self(data)->OnHeader(frame->hd.stream_id, {reinterpret_cast<const char*>(name), name_size},
                           {reinterpret_cast<const char*>(value), value_size});
    });
  }

  static int Data(nghttp2_session*, uint8_t, int32_t id, const uint8_t* bytes, size_t size,
                  void* data) {
    return GuardCallback([&] { Self(data)->OnData(id, bytes, size); });
  }

  static int Frame(nghttp2_session*, const nghttp2_frame* frame, void* data) {
    if (frame->hd.type == NGHTTP2_GOAWAY) Self(data)->going_away_ = true;
    return 0;
  }

  static int StreamClose(nghttp2_session*, int32_t id, uint32_t error_code, void* data) {
    return GuardCallback([&] { Self(data)->OnStreamClose(id, error_code); });
  }

  static ssize_t Read(nghttp2_session*, int32_t id, uint8_t* buffer, size_t size, uint32_t* flags,
                      nghttp2_data_source*, void* data) {
    return Self(data)->ReadRequest(id, buffer, size, flags);
  }
};

Http2ClientConnection::Http2ClientConnection(EventLoop* loop, FileDescriptor socket,
                                             std::string address)
    : Connection(loop, std::move(socket)), address_(std::move(address)) {
  nghttp2_session_callbacks* callbacks = nullptr;
  if (nghttp2_session_callbacks_new(&callbacks) != 0) return;
  nghttp2_session_callbacks_set_on_header_callback(callbacks, ClientCallbacks::Header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, ClientCallbacks::Data);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, ClientCallbacks::Frame);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, ClientCallbacks::StreamClose);
  const int error = nghttp2_session_client_new(&session_, callbacks, this);
  nghttp2_session_callbacks_del(callbacks);
  if (error != 0) {
    session_ = nullptr;
    return;
  }
  const nghttp2_settings_entry settings[] = {{NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
                                             {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow}};
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings, 2);
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
}

Http2ClientConnection::~Http2ClientConnection() { nghttp2_session_del(session_); }

void Http2ClientConnection::Call(const std::string& path, const std::string& message,
                                 Clock::time_point deadline, RpcDone done) {
  if (!usable()) {
    return done(RpcReply{Status(Code::kUnavailable, address_ + ": the connection is closed"), ""});
  }
  const Clock::time_point now = Clock::now();
  const std::string timeout = FormatGrpcTimeout(deadline - now);
  const nghttp2_nv headers[] = {
      MakeHeader(":method", "POST"),       MakeHeader(":scheme", "http"),
      MakeHeader(":path", path),           MakeHeader(":authority", address_),
      MakeHeader("te", "trailers"),        MakeHeader("content-type", "application/grpc"),
      MakeHeader("grpc-timeout", timeout), MakeHeader("user-agent", "monolith-model-server")};
  nghttp2_data_provider provider{};
  provider.read_callback = ClientCallbacks::Read;
  const int32_t id = nghttp2_submit_request(session_, nullptr, headers, 8, &provider, nullptr);
  if (id < 0) {
    // Stream numbers run out after a billion calls: the next connection starts anew.
    going_away_ = true;
    return done(RpcReply{Status(Code::kUnavailable, address_ + ": " + nghttp2_strerror(id)), ""});
  }
  Stream& stream = streams_[id];
  stream.request = GrpcPrefix(static_cast<int64_t>(message.size())) + message;
  stream.done = std::move(done);
  stream.timer = loop()->RunAt(deadline, [this, id] {
    nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
    Finish(id, RpcReply{Status(Code::kDeadlineExceeded, address_ + ": no answer in time"), ""});
    Flush();
  });
  Flush();
}

Connection::Next Http2ClientConnection::Consume(const char* data, size_t size) {
  if (session_ == nullptr) return Next::kCloseNow;
  const ssize_t taken =
      nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(data), size);
  return taken < 0 ? Next::kCloseNow : Next::kGoOn;
}

Connection::Next Http2ClientConnection::Produce(std::string* output, size_t room) {
  if (session_ == nullptr) return Next::kCloseNow;
  while (output->size() < room) {
    const uint8_t* data = nullptr;
    const ssize_t size = nghttp2_session_mem_send(session_, &data);
    if (size < 0) return Next::kCloseNow;
    if (size == 0) break;
    output->append(reinterpret_cast<const char*>(data), static_cast<size_t>(size));
  }
  const bool over =
      nghttp2_session_want_read(session_) == 0 && nghttp2_session_want_write(session_) == 0;
  return over ? Next::kCloseWhenWritten : Next::kGoOn;
}

void Http2ClientConnection::OnClosed() {
  std::vector<int32_t> open;
  for (const auto& [id, stream] : streams_) open.push_back(id);
  for (const int32_t id : open) {
    Finish(id, RpcReply{Status(Code::kUnavailable, address_ + ": the connection broke"), ""});
  }
}

void Http2ClientConnection::OnHeader(int32_t id, std::string_view name, std::string_view value) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  if (name == ":status") stream.http_status = value;
  if (name == "grpc-message") stream.grpc_message = DecodeGrpcMessage(value);
  if (name == "grpc-status") {
    int code = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), code);
    stream.grpc_status = parsed.ec == std::errc() && code >= 0 ? code : 2;
  }
}

void Http2ClientConnection::OnData(int32_t id, const uint8_t* data, size_t size) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  found->second.body.append(reinterpret_cast<const char*>(data), size);
  if (static_cast<int64_t>(found->second.body.size()) <= kMaxReplyBytes) return;
  nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
  Finish(id, RpcReply{Status(Code::kResourceExhausted, address_ + ": the answer is too long"), ""});
}

void Http2ClientConnection::OnStreamClose(int32_t id, uint32_t error_code) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  RpcReply reply;
  const int64_t body_bytes = static_cast<int64_t>(stream.body.size());
  if (stream.grpc_status > 0) {
    reply.status = Status(static_cast<Code>(stream.grpc_status <= 16 ? stream.grpc_status : 2),
                          address_ + ": " + stream.grpc_message);
  } else if (stream.grpc_status < 0) {
    const std::string why = stream.http_status.empty() || stream.http_status == "200"
                                ? "the call was reset with error " + std::to_string(error_code)
                                : "HTTP status " + stream.http_status;
    reply.status = Status(Code::kUnavailable, address_ + ": " + why);
  } else if (body_bytes < kGrpcPrefixBytes || stream.body[0] != 0 ||
             body_bytes != kGrpcPrefixBytes + GrpcMessageBytes(stream.body)) {
    reply.status = Status(Code::kInternal, address_ + ": the answer is not one plain message");
  } else {
    reply.message = stream.body.substr(kGrpcPrefixBytes);
  }
  Finish(id, std::move(reply));
}

ssize_t Http2ClientConnection::ReadRequest(int32_t id, uint8_t* buffer, size_t size,
                                           uint32_t* flags) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  Stream& stream = found->second;
  const size_t count = std::min(size, stream.request.size() - stream.sent);
  memcpy(buffer, stream.request.data() + stream.sent, count);
  stream.sent += count;
  if (stream.sent == stream.request.size()) *flags |= NGHTTP2_DATA_FLAG_EOF;
  return static_cast<ssize_t>(count);
}

void Http2ClientConnection::Finish(int32_t id, RpcReply reply) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  loop()->Cancel(found->second.timer);
  const RpcDone done = std::move(found->second.done);
  streams_.erase(found);
  done(std::move(reply));
}

}  // namespace serving
}  // namespace monolith
