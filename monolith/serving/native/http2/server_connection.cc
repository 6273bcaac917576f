#include "monolith/serving/native/http2/server_connection.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "monolith/serving/native/http2/callback_guard.h"
#include "monolith/serving/native/http2/header.h"

namespace monolith {
namespace serving {
namespace {

constexpr std::string_view kGrpc = "application/grpc";
// Headers up to this size are not counted: every call takes as much.
constexpr int64_t kFreeHeaderBytes = 1 << 10;

}  // namespace

// Called by nghttp2. Exceptions must not pass through it: they end the connection.
struct ServerCallbacks {
  using Stream = Http2ServerConnection::Stream;

  static Http2ServerConnection* Self(void* data) {
    return static_cast<Http2ServerConnection*>(data);
  }

  static int BeginHeaders(nghttp2_session*, const nghttp2_frame* frame, void* data) {
    if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    return GuardCallback([&] {
      Stream& stream = Self(data)->streams_[frame->hd.stream_id];
      stream.start = stream.last_data = Clock::now();
      stream.lease = MemoryLease(Self(data)->budget_);
    });
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
    return GuardCallback([&] { Self(data)->OnRequestData(id, bytes, size); });
  }

  static int Frame(nghttp2_session*, const nghttp2_frame* frame, void* data) {
    if (frame->hd.type == NGHTTP2_SETTINGS) Self(data)->settings_came_ = true;
    if (frame->hd.type != NGHTTP2_HEADERS && frame->hd.type != NGHTTP2_DATA) return 0;
    return GuardCallback([&] {
      const int32_t id = frame->hd.stream_id;
      if (frame->hd.type == NGHTTP2_HEADERS) Self(data)->OnRequestHeaders(id);
      if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM) Self(data)->OnRequestEnd(id);
    });
  }

  static int FrameSent(nghttp2_session* session, const nghttp2_frame* frame, void* data) {
    if (frame->hd.type != NGHTTP2_HEADERS || !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM)) return 0;
    // A request that was refused early is reset instead of read to its end. This waits until the
    // answer is sent, which a reset would overtake.
    const auto* stream = Self(data)->Find(frame->hd.stream_id);
    if (stream == nullptr || stream->complete) return 0;
    return nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                     NGHTTP2_NO_ERROR);
  }

  static int StreamClose(nghttp2_session*, int32_t id, uint32_t error_code, void* data) {
    return GuardCallback([&] { Self(data)->OnStreamClose(id, error_code); });
  }

  static ssize_t Read(nghttp2_session*, int32_t id, uint8_t* buffer, size_t size, uint32_t* flags,
                      nghttp2_data_source*, void* data) {
    return Self(data)->ReadReply(id, buffer, size, flags);
  }
};

Http2ServerConnection::Http2ServerConnection(EventLoop* loop, FileDescriptor socket,
                                             const RpcLimits& limits, RpcService service,
                                             const RpcStreamMethods* streams,
                                             std::shared_ptr<MemoryBudget> budget)
    : Connection(loop, std::move(socket)),
      limits_(limits),
      service_(std::move(service)),
      stream_methods_(streams),
      budget_(std::move(budget)) {
  nghttp2_session_callbacks* callbacks = nullptr;
  if (nghttp2_session_callbacks_new(&callbacks) != 0) return;
  nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, ServerCallbacks::BeginHeaders);
  nghttp2_session_callbacks_set_on_header_callback(callbacks, ServerCallbacks::Header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, ServerCallbacks::Data);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, ServerCallbacks::Frame);
  nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, ServerCallbacks::FrameSent);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, ServerCallbacks::StreamClose);
  const int error = nghttp2_session_server_new(&session_, callbacks, this);
  nghttp2_session_callbacks_del(callbacks);
  if (error != 0) {
    session_ = nullptr;
    return;
  }
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, static_cast<uint32_t>(limits_.max_streams)},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, static_cast<uint32_t>(limits_.max_header_bytes)}};
  nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings, 3);
  nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
}

Http2ServerConnection::~Http2ServerConnection() {
  // The server may end before the connection: waiting calls no longer run.
  OnClosed();
  nghttp2_session_del(session_);
}

Connection::Next Http2ServerConnection::Consume(const char* data, size_t size) {
  if (session_ == nullptr) return Next::kCloseNow;
  const ssize_t taken =
      nghttp2_session_mem_recv(session_, reinterpret_cast<const uint8_t*>(data), size);
  // After a protocol error nghttp2 has a GOAWAY to send; this error is more serious.
  if (taken < 0) return Next::kCloseNow;
  return flooded_ ? Next::kCloseNow : Next::kGoOn;
}

Connection::Next Http2ServerConnection::Produce(std::string* output, size_t room) {
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
  if (over || (shutting_down_ && streams_.empty() && output->empty())) {
    return Next::kCloseWhenWritten;
  }
  return Next::kGoOn;
}

void Http2ServerConnection::OnClosed() {
  for (auto& [id, stream] : streams_) {
    ReleaseRequest(&stream);
    if (stream.cancelled != nullptr) stream.cancelled->store(true);
    if (stream.deadline.has_value()) loop()->Cancel(*stream.deadline);
  }
  streams_.clear();
}

void Http2ServerConnection::OnTick(Clock::time_point now) {
  if (closed()) return;
  resets_in_second_ = 0;
  if (!settings_came_ && now - opened_ > limits_.header_timeout) return Close();
  if (reads_too_slowly(now)) return Close();
  if (output_waits() && now - last_write() > limits_.stall_timeout) return Close();
  std::vector<int32_t> stalled;
  for (const auto& [id, stream] : streams_) {
    // In the middle of a header the connection can deliver nothing else.
    if (!stream.has_header && now - stream.start > limits_.header_timeout) return Close();
    // While the connection has output, the peer may be slow to read it.
    const bool unread = (stream.answered || stream.sent < stream.reply.size()) && !output_waits() &&
                        now - stream.last_sent > 2 * limits_.stall_timeout;
    const bool slow = stream.pace.IsTooSlow(now) && (!output_waits() || stream.pace.IsTooLong(now));
    const bool unsent = !stream.complete && now - stream.last_data > limits_.stall_timeout;
    const bool late = !stream.complete && stream.stream_method == nullptr &&
                      now - stream.start > limits_.request_timeout;
    if (unread || slow || unsent || late) stalled.push_back(id);
  }
  for (const int32_t id : stalled) {
    nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
  }
  if (!stalled.empty()) Flush();
}

void Http2ServerConnection::Shutdown() {
  if (closed() || session_ == nullptr || shutting_down_) return;
  shutting_down_ = true;
  nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_), NGHTTP2_NO_ERROR,
                        nullptr, 0);
  // Watches would wait for answers that never come.
  for (auto& [id, stream] : streams_) {
    if (stream.watched) Refuse(id, Code::kUnavailable, "the server ends");
  }
  Flush();
}

Http2ServerConnection::Stream* Http2ServerConnection::Find(int32_t id) {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : &found->second;
}

void Http2ServerConnection::OnHeader(int32_t id, std::string_view name, std::string_view value) {
  Stream* stream = Find(id);
  // Trailers are ignored.
  if (stream == nullptr || stream->answered || stream->has_header) return;
  // As HTTP/2 counts it for SETTINGS_MAX_HEADER_LIST_SIZE.
  stream->header_bytes += static_cast<int64_t>(name.size() + value.size() + 32);
  if (stream->header_bytes > limits_.max_header_bytes) return;
  if (name == ":method") stream->method = value;
  if (name == ":path") stream->path = value;
  if (name == "content-type") stream->content_type = value;
  if (name == "grpc-encoding") stream->encoding = value;
  if (name == "grpc-timeout") stream->timeout = value;
}

void Http2ServerConnection::OnRequestData(int32_t id, const uint8_t* data, size_t size) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->answered) return;
  stream->last_data = Clock::now();
  const size_t needed = stream->body.size() + size;
  if (stream->stream_method == nullptr && needed > stream->body.capacity() &&
      stream->body.size() >= kGrpcPrefixBytes) {
    // Reserved as the body arrives, not when it is announced.
    const size_t whole = kGrpcPrefixBytes + static_cast<size_t>(GrpcMessageBytes(stream->body));
    stream->body.reserve(std::max(needed, std::min(whole, 2 * needed)));
  }
  stream->body.append(reinterpret_cast<const char*>(data), size);
  if (!Count(stream)) {
    return Refuse(id, Code::kResourceExhausted, "too many requests are being received");
  }
  if (stream->stream_method != nullptr) return DispatchMessages(id, stream);
  const int64_t body_bytes = static_cast<int64_t>(stream->body.size());
  if (body_bytes >= kGrpcPrefixBytes) {
    const int64_t message_bytes = GrpcMessageBytes(stream->body);
    if (message_bytes > limits_.max_message_bytes) {
      return Refuse(id, Code::kResourceExhausted,
                    "the request has " + std::to_string(message_bytes) +
                        " bytes, the server takes at most " +
                        std::to_string(limits_.max_message_bytes));
    }
    if (body_bytes > kGrpcPrefixBytes + message_bytes) {
      return Refuse(id, Code::kUnimplemented, "the call has more than one message");
    }
  }
}

void Http2ServerConnection::OnRequestEnd(int32_t id) {
  Stream* stream = Find(id);
  if (stream == nullptr) return;
  stream->complete = true;
  if (stream->answered) return;
  if (stream->stream_method == nullptr) return Dispatch(id, stream);
  if (!stream->body.empty() || (stream->stream_method->is_watch && !stream->watched)) {
    return Refuse(id, Code::kInternal, "the call ended in the middle of a message");
  }
  // Goes on until the client, its deadline or the server ends it.
  if (stream->watched) return;
  Answer(id, RpcReply());
}

void Http2ServerConnection::OnRequestHeaders(int32_t id) {
  Stream* stream = Find(id);
  if (stream != nullptr) stream->has_header = true;
  // Headers after the body are trailers.
  if (stream == nullptr || stream->answered || stream->stream_method != nullptr) return;
  if (stream->header_bytes > kFreeHeaderBytes && !Count(stream)) {
    return Refuse(id, Code::kResourceExhausted, "too many requests are being received");
  }
  const auto found = stream_methods_->find(stream->path);
  // A request that is not a gRPC call is refused at its end, like a unary one.
  if (found == stream_methods_->end() || stream->method != "POST" ||
      stream->content_type.compare(0, kGrpc.size(), kGrpc) != 0 ||
      stream->header_bytes > limits_.max_header_bytes) {
    return;
  }
  stream->stream_method = &found->second;
  Clock::time_point deadline;
  if (!SetDeadline(id, stream, &deadline)) return;
  ReleaseHeader(stream);
  Count(stream);
}

void Http2ServerConnection::DispatchMessages(int32_t id, Stream* stream) {
  const int64_t most =
      stream->stream_method->is_watch ? limits_.max_watch_bytes : limits_.max_stream_message_bytes;
  size_t start = 0;
  while (static_cast<int64_t>(stream->body.size() - start) >= kGrpcPrefixBytes) {
    const int64_t size = GrpcMessageBytes(stream->body.substr(start, kGrpcPrefixBytes));
    if (size > most) {
      return Refuse(id, Code::kResourceExhausted,
                    "the message has " + std::to_string(size) +
                        " bytes, the server takes at most " + std::to_string(most));
    }
    if (stream->body[start] != 0) {
      return Refuse(id, Code::kUnimplemented, "messages of streams must not be compressed");
    }
    const size_t end = start + static_cast<size_t>(kGrpcPrefixBytes + size);
    if (stream->body.size() < end) break;
    if (stream->watched) {
      return Refuse(id, Code::kUnimplemented, "the call has more than one message");
    }
    std::string message = stream->body.substr(start + kGrpcPrefixBytes, size);
    RpcReply reply = stream->stream_method->answer(message);
    if (!reply.status.ok()) return Answer(id, std::move(reply));
    if (!Send(id, stream, reply.message)) return;
    if (stream->stream_method->is_watch) {
      stream->watched = std::move(message);
      stream->told = std::move(reply.message);
    }
    start = end;
  }
  if (start == 0) return;
  stream->body.erase(0, start);
  if (stream->body.empty()) FreeText(&stream->body);
  Count(stream);
  Respond(id, stream);
}

bool Http2ServerConnection::Send(int32_t id, Stream* stream, const std::string& message) {
  const int64_t more = kGrpcPrefixBytes + static_cast<int64_t>(message.size());
  if (unread_bytes_ + more > limits_.max_unread_bytes) {
    Refuse(id, Code::kResourceExhausted, "the answers are not read");
    return false;
  }
  if (stream->sent == stream->reply.size()) {
    stream->last_sent = Clock::now();
    stream->pace.Begin(stream->last_sent);
  }
  stream->reply.erase(0, std::exchange(stream->sent, 0));
  stream->reply += GrpcPrefix(static_cast<int64_t>(message.size())) + message;
  unread_bytes_ += more;
  if (Count(stream)) return true;
  Refuse(id, Code::kResourceExhausted, "the answers of all streams take too much memory");
  return false;
}

void Http2ServerConnection::OnChange() {
  if (closed() || shutting_down_) return;
  bool told = false;
  for (auto& [id, stream] : streams_) {
    if (!stream.watched || stream.answered) continue;
    RpcReply reply = stream.stream_method->answer(*stream.watched);
    if (reply.message == stream.told) continue;
    stream.told = std::move(reply.message);
    told = true;
    if (Send(id, &stream, stream.told)) Respond(id, &stream);
  }
  if (told) Flush();
}

void Http2ServerConnection::Respond(int32_t id, Stream* stream) {
  if (stream->responding) {
    // Fails if the data is not deferred at the moment, which is fine.
    nghttp2_session_resume_data(session_, id);
    return;
  }
  stream->responding = true;
  const nghttp2_nv headers[] = {MakeHeader(":status", "200"), MakeHeader("content-type", kGrpc)};
  nghttp2_data_provider provider{};
  provider.read_callback = ServerCallbacks::Read;
  nghttp2_submit_response(session_, id, headers, 2, &provider);
}

bool Http2ServerConnection::SetDeadline(int32_t id, Stream* stream, Clock::time_point* deadline) {
  if (stream->timeout.empty()) return true;
  const auto timeout = ParseGrpcTimeout(stream->timeout);
  if (!timeout.has_value()) {
    Refuse(id, Code::kInternal, "grpc-timeout is '" + stream->timeout + "'");
    return false;
  }
  *deadline = Clock::now() + *timeout;
  // The timer is cancelled before the connection is destroyed.
  stream->deadline = loop()->RunAt(*deadline, [this, id] {
    Refuse(id, Code::kDeadlineExceeded, "the deadline passed");
    Flush();
  });
  return true;
}

void Http2ServerConnection::Dispatch(int32_t id, Stream* stream) {
  if (stream->header_bytes > limits_.max_header_bytes) return RefuseHttp(id, stream, "431");
  if (stream->method != "POST") return RefuseHttp(id, stream, "405");
  if (stream->content_type.compare(0, kGrpc.size(), kGrpc) != 0) {
    return RefuseHttp(id, stream, "415");
  }
  const int64_t body_bytes = static_cast<int64_t>(stream->body.size());
  if (body_bytes < kGrpcPrefixBytes ||
      body_bytes != kGrpcPrefixBytes + GrpcMessageBytes(stream->body)) {
    return Refuse(id, Code::kInternal, "the call ended in the middle of its message");
  }
  if (stream->body[0] != 0 && (stream->encoding.empty() || stream->encoding == "identity")) {
    return Refuse(id, Code::kInternal, "the message is compressed, the header says it is not");
  }
  const bool is_compressed = stream->body[0] != 0;
  if (is_compressed && stream->encoding != "gzip") {
    return Refuse(id, Code::kUnimplemented,
                  "compression '" + stream->encoding + "' is not supported");
  }
  RpcCall call;
  if (!SetDeadline(id, stream, &call.deadline)) return;
  call.is_compressed = is_compressed;
  call.max_message_bytes = limits_.max_message_bytes;
  call.lease = std::move(stream->lease);
  call.path = std::move(stream->path);
  call.message = std::move(stream->body);
  call.message.erase(0, kGrpcPrefixBytes);
  stream->body.clear();
  stream->cancelled = std::make_shared<std::atomic<bool>>(false);
  call.cancelled = stream->cancelled;
  const std::weak_ptr<Connection> weak = weak_from_this();
  EventLoop* const event_loop = loop();
  const auto answer = [weak, id](RpcReply reply) {
    const std::shared_ptr<Connection> connection = weak.lock();
    if (connection == nullptr) return;
    auto* self = static_cast<Http2ServerConnection*>(connection.get());
    if (self->closed()) return;
    self->Answer(id, std::move(reply));
    self->Flush();
  };
  service_(std::move(call), [event_loop, answer](RpcReply reply) {
    event_loop->Post([answer, reply = std::move(reply)]() mutable { answer(std::move(reply)); });
  });
}

void Http2ServerConnection::Answer(int32_t id, RpcReply reply) {
  Stream* stream = Find(id);
  if (stream == nullptr || stream->answered) return;
  ReleaseRequest(stream);
  stream->answered = true;
  stream->last_data = stream->last_sent = Clock::now();
  stream->pace.Begin(stream->last_sent);
  if (stream->cancelled != nullptr) stream->cancelled->store(true);
  if (stream->deadline.has_value()) loop()->Cancel(*stream->deadline);
  stream->deadline.reset();
  stream->status = std::move(reply.status);
  if (!stream->status.ok() && !stream->responding && stream->reply.empty()) {
    const std::string code = std::to_string(static_cast<int>(stream->status.code));
    const std::string message = EncodeGrpcMessage(stream->status.message);
    const nghttp2_nv headers[] = {MakeHeader(":status", "200"), MakeHeader("content-type", kGrpc),
                                  MakeHeader("grpc-accept-encoding", "identity,gzip"),
                                  MakeHeader("grpc-status", code),
                                  MakeHeader("grpc-message", message)};
    nghttp2_submit_response(session_, id, headers, 5, nullptr);
    return;
  }
  stream->reply_lease = std::move(reply.lease);
  if (stream->stream_method == nullptr) {
    stream->reply = GrpcPrefix(static_cast<int64_t>(reply.message.size())) + reply.message;
  }
  Respond(id, stream);
}

void Http2ServerConnection::Refuse(int32_t id, Code code, const std::string& message) {
  Answer(id, RpcReply{Status(code, message), ""});
}

void Http2ServerConnection::RefuseHttp(int32_t id, Stream* stream, const char* http_status) {
  ReleaseRequest(stream);
  stream->answered = true;
  stream->last_sent = Clock::now();
  const nghttp2_nv headers[] = {MakeHeader(":status", http_status)};
  nghttp2_submit_response(session_, id, headers, 1, nullptr);
}

void Http2ServerConnection::ReleaseHeader(Stream* stream) {
  for (std::string* text :
       {&stream->path, &stream->content_type, &stream->encoding, &stream->timeout}) {
    FreeText(text);
  }
  stream->header_bytes = 0;
}

void Http2ServerConnection::ReleaseRequest(Stream* stream) {
  ReleaseHeader(stream);
  FreeText(&stream->body);
  if (stream->stream_method != nullptr) {
    Count(stream);
  } else {
    stream->lease.Release();
  }
}

bool Http2ServerConnection::Count(Stream* stream) {
  auto bytes = static_cast<int64_t>(stream->body.capacity());
  if (stream->header_bytes > kFreeHeaderBytes) bytes += stream->header_bytes;
  // The answer of a unary call has a lease of its own.
  if (stream->stream_method != nullptr) bytes += static_cast<int64_t>(stream->reply.capacity());
  return stream->lease.Resize(bytes);
}

ssize_t Http2ServerConnection::ReadReply(int32_t id, uint8_t* buffer, size_t size,
                                         uint32_t* flags) {
  Stream* stream = Find(id);
  if (stream == nullptr) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
  const size_t count = std::min(size, stream->reply.size() - stream->sent);
  memcpy(buffer, stream->reply.data() + stream->sent, count);
  stream->sent += count;
  if (count > 0) stream->last_sent = Clock::now();
  stream->pace.Take(static_cast<int64_t>(count));
  if (stream->stream_method != nullptr) unread_bytes_ -= static_cast<int64_t>(count);
  if (stream->sent < stream->reply.size()) return static_cast<ssize_t>(count);
  if (stream->stream_method != nullptr) {
    FreeText(&stream->reply);
    stream->sent = 0;
    Count(stream);
  }
  if (!stream->answered) {
    // More may come.
    stream->pace.End();
    return count == 0 ? static_cast<ssize_t>(NGHTTP2_ERR_DEFERRED) : static_cast<ssize_t>(count);
  }
  *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
  const std::string code = std::to_string(static_cast<int>(stream->status.code));
  const std::string message = EncodeGrpcMessage(stream->status.message);
  const nghttp2_nv trailers[] = {MakeHeader("grpc-status", code),
                                 MakeHeader("grpc-message", message)};
  nghttp2_submit_trailer(session_, id, trailers, stream->status.ok() ? 1 : 2);
  return static_cast<ssize_t>(count);
}

void Http2ServerConnection::OnStreamClose(int32_t id, uint32_t error_code) {
  Stream* stream = Find(id);
  if (stream == nullptr) return;
  if (stream->stream_method != nullptr) {
    unread_bytes_ -= static_cast<int64_t>(stream->reply.size() - stream->sent);
  }
  if (stream->cancelled != nullptr) stream->cancelled->store(true);
  if (stream->deadline.has_value()) loop()->Cancel(*stream->deadline);
  if (error_code != NGHTTP2_NO_ERROR && ++resets_in_second_ > limits_.max_resets_per_second) {
    flooded_ = true;
  }
  streams_.erase(id);
}

}  // namespace serving
}  // namespace monolith
