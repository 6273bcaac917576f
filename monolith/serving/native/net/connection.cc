#include "monolith/serving/native/net/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/memory_budget.h"

namespace monolith {
namespace serving {
namespace {

constexpr size_t kReadBytes = 256 << 10;
// So that one busy peer does not keep the others waiting.
constexpr int kMaxReadsPerEvent = 8;
constexpr size_t kOutputBytes = 256 << 10;
// A connection keeps this much memory for output, and less when it has none.
constexpr size_t kKeptBytes = 1 << 20;
constexpr size_t kIdleBytes = 16 << 10;

}  // namespace

Connection::Connection(EventLoop* loop, FileDescriptor socket)
    : loop_(loop), socket_(std::move(socket)) {}

Connection::~Connection() {
  if (!closed_ && key_ != 0) loop_->Remove(key_, socket_.get());
}

bool Connection::Start(std::function<void()> on_close) {
  on_close_ = std::move(on_close);
  events_ = EPOLLIN;
  key_ = loop_->Add(socket_.get(), events_, this);
  if (key_ == 0) return false;
  Flush();
  return true;
}

void Connection::OnEvents(uint32_t events) {
  const std::shared_ptr<Connection> keep = shared_from_this();
  if (events & EPOLLOUT) Flush();
  if (closed_ || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  // The kernel would report this forever, and no peer is left to answer.
  if (!TakesInput() && (events & (EPOLLHUP | EPOLLERR)) != 0) return Close();
  Read();
}

void Connection::Read() {
  static thread_local std::vector<char> buffer(kReadBytes);
  for (int i = 0; i < kMaxReadsPerEvent && !closed_ && TakesInput(); ++i) {
    const ssize_t size = recv(socket_.get(), buffer.data(), buffer.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (size == 0 && !input_ended_) {
      input_ended_ = true;
      Flush();
      if (closed_ || OnEndOfInput()) break;
    }
    if (size <= 0) return Close();
    if (!close_when_written_) Handle(Take(buffer.data(), static_cast<size_t>(size)));
    if (static_cast<size_t>(size) < buffer.size()) break;
  }
  if (!closed_) Flush();
}

Connection::Next Connection::Take(const char* data, size_t size) {
  if (cipher_ == nullptr) return Consume(data, size);
  std::string plain;
  const bool more = cipher_->Receive(data, size, &plain);
  const Next next = plain.empty() ? Next::kGoOn : Consume(plain.data(), plain.size());
  return more || next == Next::kCloseNow ? next : Next::kCloseWhenWritten;
}

void Connection::Fill() {
  if (cipher_ == nullptr) {
    if (!close_when_written_) Handle(Produce(&output_, kOutputBytes));
    return;
  }
  if (!close_when_written_ && cipher_->ready()) {
    std::string plain;
    Handle(Produce(&plain, kOutputBytes));
    if (closed_) return;
    if (!plain.empty() && !cipher_->Send(plain)) return Close();
  }
  if (close_when_written_) cipher_->End();
  cipher_->TakeOutput(&output_);
}

void Connection::Flush() {
  while (!closed_) {
    if (written_ == output_.size()) {
      output_.clear();
      written_ = 0;
      if (output_.capacity() > kKeptBytes) FreeText(&output_);
      Fill();
      if (closed_) return;
      if (output_.empty()) {
        if (close_when_written_) return Close();
        if (output_.capacity() > kIdleBytes) FreeText(&output_);
        pace_.End();
        break;
      }
    }
    const ssize_t size =
        send(socket_.get(), output_.data() + written_, output_.size() - written_, MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      pace_.Begin(Clock::now());
      break;
    }
    if (size < 0) return Close();
    pace_.Take(size);
    written_ += static_cast<size_t>(size);
    last_write_ = Clock::now();
  }
  UpdateEvents();
}

void Connection::UpdateEvents() {
  if (closed_ || key_ == 0) return;
  uint32_t wanted = 0;
  if (output_waits()) wanted |= EPOLLOUT;
  if (!input_ended_ && TakesInput() && (!output_waits() || ReadsWhileWriting())) wanted |= EPOLLIN;
  if (wanted == events_) return;
  events_ = wanted;
  loop_->Modify(key_, socket_.get(), events_);
}

void Connection::Handle(Next next) {
  if (next == Next::kCloseNow) Close();
  if (next == Next::kCloseWhenWritten) close_when_written_ = true;
}

void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  if (key_ != 0) loop_->Remove(key_, socket_.get());
  socket_.Close();
  OnClosed();
  // Not now: a method of this object is running.
  if (on_close_) loop_->Post(std::move(on_close_));
}

}  // namespace serving
}  // namespace monolith
