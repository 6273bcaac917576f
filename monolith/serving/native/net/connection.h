// A socket with buffered output; subclasses implement protocols.
//
// Lives in the thread of one event loop.
#ifndef MONOLITH_SERVING_NATIVE_NET_CONNECTION_H_
#define MONOLITH_SERVING_NATIVE_NET_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "monolith/serving/native/net/event_loop.h"
#include "monolith/serving/native/net/file_descriptor.h"
#include "monolith/serving/native/net/read_pace.h"
#include "monolith/serving/native/net/stream_cipher.h"

namespace monolith {
namespace serving {

class Connection : public EventHandler, public std::enable_shared_from_this<Connection> {
 public:
  Connection(EventLoop* loop, FileDescriptor socket);
  ~Connection() override;

  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Everything passes through `cipher`, which may be null. Before Start.
  void SetCipher(std::unique_ptr<StreamCipher> cipher) { cipher_ = std::move(cipher); }

  // Begins to wait for events. `on_close` runs once, later, in the loop's thread, and releases the
  // connection. Returns false if the kernel refuses.
  bool Start(std::function<void()> on_close);

  void OnEvents(uint32_t events) override;

  // Called about once a second; closes connections that take too long.
  virtual void OnTick(Clock::time_point now) = 0;
  // Called when watched answers may have changed.
  virtual void OnChange() {}
  // Finishes the requests under way, accepts no new ones, and closes.
  virtual void Shutdown() = 0;

 protected:
  enum class Next { kGoOn, kCloseWhenWritten, kCloseNow };

  // Takes input. `size` is at least 1.
  virtual Next Consume(const char* data, size_t size) = 0;
  // Appends the next output, if there is any, at most about `room` bytes.
  virtual Next Produce(std::string* output, size_t room) = 0;
  // The peer sends nothing more, but may still read. Returns whether there is an answer to come;
  // the connection is closed otherwise.
  virtual bool OnEndOfInput() { return false; }
  // Whether input is read while output waits. A protocol that does so must bound the output that
  // input causes; two of one kind that do not would wait for each other.
  virtual bool ReadsWhileWriting() const { return false; }
  // Whether input is accepted. What the peer sends meanwhile waits in the kernel.
  virtual bool TakesInput() const { return true; }
  // The socket was closed by either side.
  virtual void OnClosed() {}

  // Writes the output of Produce until there is none or the socket is full.
  void Flush();
  void Close();

  bool closed() const { return closed_; }
  EventLoop* loop() const { return loop_; }
  int socket() const { return socket_.get(); }
  // Whether output waits for the peer, and since when nothing could be written.
  bool output_waits() const { return written_ < output_.size(); }
  Clock::time_point last_write() const { return last_write_; }
  // Whether the peer takes output, but too slowly.
  bool reads_too_slowly(Clock::time_point now) const { return pace_.IsTooSlow(now); }

 private:
  void Read();
  Next Take(const char* data, size_t size);
  // Asks for the next output.
  void Fill();
  void UpdateEvents();
  void Handle(Next next);

  EventLoop* const loop_;
  FileDescriptor socket_;
  std::unique_ptr<StreamCipher> cipher_;
  uint64_t key_ = 0;
  uint32_t events_ = 0;
  std::function<void()> on_close_;
  std::string output_;
  size_t written_ = 0;
  bool closed_ = false;
  bool close_when_written_ = false;
  bool input_ended_ = false;
  Clock::time_point last_write_ = Clock::now();
  ReadPace pace_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_NET_CONNECTION_H_
