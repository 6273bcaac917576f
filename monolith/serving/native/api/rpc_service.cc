#include "monolith/serving/native/api/rpc_service.h"

#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "monolith/serving/native/http2/gzip.h"

namespace monolith {
namespace serving {
namespace {

// Reading and running longer messages would keep others waiting.
constexpr size_t kMaxInlineBytes = 64 << 10;
// With one core, calls that arrived together run in turn; more are queued.
constexpr size_t kMaxInlineCalls = 16;

// Belongs to the loop's thread.
class Dispatcher {
 public:
  Dispatcher(ServingApi* serving, WorkerPool* workers, const RpcPlaces& places)
      : serving_(serving), workers_(workers), places_(places) {}

  void Take(RpcCall call, RpcDone done) {
    Pending pending{std::make_shared<RpcCall>(std::move(call)), std::move(done)};
    if (places_.loop == nullptr || pending.call->path != kPredictPath ||
        pending.call->is_compressed || pending.call->message.size() > kMaxInlineBytes) {
      return Queue(std::move(pending));
    }
    // Later: more calls may have come with this one.
    if (held_.empty()) places_.loop->Post([this] { RunHeld(); });
    held_.push_back(std::move(pending));
  }

 private:
  struct Pending {
    // std::function needs a copyable callable, but the message should not be copied.
    std::shared_ptr<RpcCall> call;
    RpcDone done;
  };

  void RunHeld() {
    std::vector<Pending> held;
    held.swap(held_);
    const size_t num_inline = places_.num_cores > 1 ? 1 : kMaxInlineCalls;
    for (size_t i = 0; i < held.size(); ++i) {
      if (i + num_inline < held.size()) {
        Queue(std::move(held[i]));
      } else {
        RunInline(std::move(held[i]));
      }
    }
  }

  void RunInline(Pending pending) {
    if (pending.call->cancelled->load(std::memory_order_relaxed)) return;
    RpcReply reply;
    bool done = true;
    Guard(&reply, [&] { done = serving_->PredictIfShort(pending.call->message, &reply); });
    if (!done) return Queue(std::move(pending));
    pending.done(std::move(reply));
  }

  void Queue(Pending pending) {
    ServingApi* const serving = serving_;
    const bool queued = workers_->Schedule([serving, call = pending.call, done = pending.done] {
      if (call->cancelled->load(std::memory_order_relaxed)) return;
      RpcReply reply;
      Guard(&reply, [&] {
        if (call->is_compressed) {
          reply.status = Decompress(call->max_message_bytes, &call->lease, &call->message);
        }
        if (reply.status.ok()) reply = serving->Handle(*call);
      });
      done(std::move(reply));
    });
    if (!queued) {
      pending.done(RpcReply{Status(Code::kResourceExhausted, "too many requests are waiting"), ""});
    }
  }

  template <typename Function>
  static void Guard(RpcReply* reply, Function function) {
    try {
      function();
    } catch (const std::bad_alloc&) {
      *reply = RpcReply{Status(Code::kResourceExhausted, "out of memory"), ""};
    } catch (const std::exception& error) {
      *reply = RpcReply{Status(Code::kInternal, error.what()), ""};
    }
  }

  ServingApi* const serving_;
  WorkerPool* const workers_;
  const RpcPlaces places_;
  std::vector<Pending> held_;
};

}  // namespace

RpcService MakeRpcService(ServingApi* serving, WorkerPool* workers, const RpcPlaces& places) {
  const auto dispatcher = std::make_shared<Dispatcher>(serving, workers, places);
  return [dispatcher](RpcCall call, RpcDone done) {
    dispatcher->Take(std::move(call), std::move(done));
  };
}

}  // namespace serving
}  // namespace monolith
