// A gRPC call as the transport delivers it: unary calls whole, streams message by message.
#ifndef MONOLITH_SERVING_NATIVE_HTTP2_RPC_H_
#define MONOLITH_SERVING_NATIVE_HTTP2_RPC_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "monolith/serving/native/base/memory_budget.h"
#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/net/event_loop.h"

namespace monolith {
namespace serving {

struct RpcCall {
  // "/package.Service/Method"
  std::string path;
  std::string message;
  // Clock::time_point::max() if the client gave none.
  Clock::time_point deadline = Clock::time_point::max();
  // True once the client no longer waits for the answer.
  std::shared_ptr<std::atomic<bool>> cancelled;
  // Counts the message until the call is answered.
  MemoryLease lease;
  // Whether the message is compressed by gzip, and how long it may be uncompressed.
  bool is_compressed = false;
  int64_t max_message_bytes = 0;
};

struct RpcReply {
  Status status;
  std::string message;
  // Counts the message until it is sent; may be null.
  std::shared_ptr<MemoryLease> lease = nullptr;
};

// Called once, from any thread.
using RpcDone = std::function<void(RpcReply)>;
// Runs in the thread that serves all sockets, so it must not block.
using RpcService = std::function<void(RpcCall call, RpcDone done)>;

struct RpcStreamMethod {
  // Answers one message of a stream. Runs in the thread that serves all sockets, so it must be
  // quick. An error ends the stream.
  std::function<RpcReply(const std::string& message)> answer;
  // Whether the client sends one message and gets a new answer whenever the answer changes.
  bool is_watch = false;
};
// By path. Calls of other paths are unary.
using RpcStreamMethods = std::map<std::string, RpcStreamMethod, std::less<>>;

// Returns how long the header `grpc-timeout` allows, or nothing if it is malformed.
std::optional<std::chrono::nanoseconds> ParseGrpcTimeout(std::string_view text);

// Returns the header `grpc-timeout` for `timeout`, at least a millisecond.
std::string FormatGrpcTimeout(std::chrono::nanoseconds timeout);

// The header `grpc-message`: bytes other than printable ASCII become %XX, and very long texts are
// truncated.
std::string EncodeGrpcMessage(std::string_view text);
std::string DecodeGrpcMessage(std::string_view text);

// Five bytes go before a message: a flag for compression and the length, big-endian.
constexpr int64_t kGrpcPrefixBytes = 5;
std::string GrpcPrefix(int64_t message_bytes);
int64_t GrpcMessageBytes(const std::string& prefix);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_HTTP2_RPC_H_
