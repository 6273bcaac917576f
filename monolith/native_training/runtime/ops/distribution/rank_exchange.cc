#include "monolith/native_training/runtime/ops/distribution/rank_exchange.h"

#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

// A session of the engine that waits for a request.
struct Taker : ExchangeWaiter {
  std::function<Status(const ExchangeRequest&)> on_request;
};

struct Channel {
  std::deque<ExchangeRequestPtr> waiting;
  std::shared_ptr<Taker> taker;
  ExchangeRequestPtr current;
};

struct Exchanges {
  std::mutex mutex;
  ExchangePlace place;
  // Requests are told this where there is no engine.
  std::string why_closed =
      "the ranks have not met in this process: call hvd_lib.init() before the session runs";
  std::unordered_map<std::string, Channel> channels;
};

// Never destroyed: threads of sessions may outlive the end of main.
Exchanges& TheExchanges() {
  static Exchanges* const exchanges = std::make_unique<Exchanges>().release();
  return *exchanges;
}

bool Claim(ExchangeWaiter* waiter) {
  if (waiter == nullptr || waiter->is_claimed) return false;
  waiter->is_claimed = true;
  return true;
}

// Called by the claimant alone; not by callbacks of cancellation, for which this waits, nor under
// the mutex, which they take.
void End(ExchangeWaiter* waiter, const Status& status) {
  if (waiter->token != CancellationManager::kInvalidToken) {
    waiter->ctx->cancellation_manager()->DeregisterCallback(waiter->token);
  }
  if (!status.ok()) waiter->ctx->SetStatus(status);
  waiter->done();
}

// The holder of the waiter drops it later: claimed ones are passed over.
void Cancel(const std::weak_ptr<ExchangeWaiter>& weak) {
  const std::shared_ptr<ExchangeWaiter> waiter = weak.lock();
  {
    const std::lock_guard<std::mutex> lock(TheExchanges().mutex);
    if (!Claim(waiter.get())) return;
  }
  waiter->ctx->SetStatus(errors::Cancelled("The step that waited for other ranks was cancelled"));
  waiter->done();
}

// Has the waiter end when its step is cancelled, or ends it now if it is; false then.
bool EndWhenCancelled(const std::shared_ptr<ExchangeWaiter>& waiter) {
  CancellationManager* const manager = waiter->ctx->cancellation_manager();
  if (manager == nullptr) return true;
  const std::weak_ptr<ExchangeWaiter> weak = waiter;
  const CancellationToken token = manager->get_cancellation_token();
  waiter->token = token;
  if (manager->RegisterCallback(token, [weak] { Cancel(weak); })) return true;
  Cancel(weak);
  return false;
}

// A request and who takes it, to be ended outside the mutex.
struct Match {
  std::shared_ptr<Taker> taker;
  ExchangeRequestPtr request;
  // The request that was current before and never finished.
  ExchangeRequestPtr dropped;
};

// Makes the first request that waits the current one, if somebody takes it.
Match FindMatch(Channel* channel) {
  while (!channel->waiting.empty() && channel->waiting.front()->is_claimed) {
    channel->waiting.pop_front();
  }
  if (channel->waiting.empty() || !Claim(channel->taker.get())) return {};
  Match match;
  match.taker = std::exchange(channel->taker, nullptr);
  match.request = std::move(channel->waiting.front());
  channel->waiting.pop_front();
  if (Claim(channel->current.get())) match.dropped = channel->current;
  channel->current = match.request;
  return match;
}

void HandOver(const Match& match) {
  if (match.dropped != nullptr) {
    End(match.dropped.get(), errors::Internal("the engine has dropped an exchange"));
  }
  if (match.taker != nullptr) {
    End(match.taker.get(), match.taker->on_request(*match.request));
  }
}

Status ClosedError(const Exchanges& exchanges, const std::string& exchange) {
  return errors::Unavailable("Exchange '", exchange, "': ", exchanges.why_closed);
}

void Open(int rank, int ranks) {
  Exchanges& exchanges = TheExchanges();
  const std::lock_guard<std::mutex> lock(exchanges.mutex);
  exchanges.place = {rank, ranks};
}

// Ends everything that waits.
void Close(const std::string& why) {
  std::vector<std::pair<std::string, ExchangeRequestPtr>> requests;
  std::vector<std::shared_ptr<Taker>> takers;
  Exchanges& exchanges = TheExchanges();
  {
    const std::lock_guard<std::mutex> lock(exchanges.mutex);
    exchanges.place = {};
    exchanges.why_closed = why;
    for (auto& [exchange, channel] : exchanges.channels) {
      if (Claim(channel.taker.get())) takers.push_back(channel.taker);
      if (Claim(channel.current.get())) requests.emplace_back(exchange, channel.current);
      for (const ExchangeRequestPtr& request : channel.waiting) {
        if (Claim(request.get())) requests.emplace_back(exchange, request);
      }
    }
    exchanges.channels.clear();
  }
  for (const auto& [exchange, request] : requests) {
    End(request.get(), errors::Unavailable("Exchange '", exchange, "': ", why));
  }
  for (const std::shared_ptr<Taker>& taker : takers) {
    End(taker.get(), errors::Cancelled(why));
  }
}

}  // namespace

ExchangePlace GetExchangePlace() {
  Exchanges& exchanges = TheExchanges();
  const std::lock_guard<std::mutex> lock(exchanges.mutex);
  return exchanges.place;
}

void SubmitExchange(const std::string& exchange, const ExchangeRequestPtr& request) {
  if (!EndWhenCancelled(request)) return;
  Match match;
  Status error;
  {
    Exchanges& exchanges = TheExchanges();
    const std::lock_guard<std::mutex> lock(exchanges.mutex);
    if (request->is_claimed) return;
    if (exchanges.place.ranks == 0) {
      request->is_claimed = true;
      error = ClosedError(exchanges, exchange);
    } else {
      Channel& channel = exchanges.channels[exchange];
      channel.waiting.push_back(request);
      match = FindMatch(&channel);
    }
  }
  if (!error.ok()) {
    End(request.get(), error);
  } else {
    HandOver(match);
  }
}

void TakeExchange(const std::string& exchange, OpKernelContext* ctx,
                  AsyncOpKernel::DoneCallback done,
                  std::function<Status(const ExchangeRequest&)> on_request) {
  const auto taker = std::make_shared<Taker>();
  taker->ctx = ctx;
  taker->done = std::move(done);
  taker->on_request = std::move(on_request);
  if (!EndWhenCancelled(taker)) return;
  Match match;
  Status error;
  {
    Exchanges& exchanges = TheExchanges();
    const std::lock_guard<std::mutex> lock(exchanges.mutex);
    if (taker->is_claimed) return;
    Channel* const channel = exchanges.place.ranks == 0 ? nullptr : &exchanges.channels[exchange];
    if (channel == nullptr) {
      error = ClosedError(exchanges, exchange);
    } else if (channel->taker != nullptr && !channel->taker->is_claimed) {
      error = errors::FailedPrecondition("Exchange '", exchange, "' is taken by another session");
    } else {
      channel->taker = taker;
      match = FindMatch(channel);
    }
    if (!error.ok()) taker->is_claimed = true;
  }
  if (!error.ok()) {
    End(taker.get(), error);
  } else {
    HandOver(match);
  }
}

Status GetCurrentExchange(const std::string& exchange, ExchangeRequestPtr* request) {
  Exchanges& exchanges = TheExchanges();
  const std::lock_guard<std::mutex> lock(exchanges.mutex);
  const auto channel = exchanges.channels.find(exchange);
  if (channel == exchanges.channels.end() || channel->second.current == nullptr) {
    return errors::FailedPrecondition("Exchange '", exchange, "' has no request");
  }
  *request = channel->second.current;
  return OkStatus();
}

void FinishExchange(const std::string& exchange, const Status& error,
                    const std::function<Status(OpKernelContext*)>& set_outputs) {
  ExchangeRequestPtr request;
  {
    Exchanges& exchanges = TheExchanges();
    const std::lock_guard<std::mutex> lock(exchanges.mutex);
    const auto channel = exchanges.channels.find(exchange);
    if (channel == exchanges.channels.end()) return;
    request = std::move(channel->second.current);
    channel->second.current = nullptr;
    if (!Claim(request.get())) return;
  }
  End(request.get(), error.ok() ? set_outputs(request->ctx) : error);
}

}  // namespace monolith_tf
}  // namespace tensorflow

extern "C" {

// The engine's switches, which Python calls: a graph that somebody loads can open nothing.
__attribute__((visibility("default"))) void MonolithOpenRankExchanges(int32_t rank, int32_t ranks) {
  tensorflow::monolith_tf::Open(rank, ranks);
}

__attribute__((visibility("default"))) void MonolithCloseRankExchanges(const char* why) {
  tensorflow::monolith_tf::Close(why);
}

// Ends the current request of an exchange whose session has failed.
__attribute__((visibility("default"))) void MonolithFailRankExchange(const char* exchange,
                                                                     const char* why) {
  tensorflow::monolith_tf::FinishExchange(exchange, tensorflow::errors::Unavailable(why), nullptr);
}

}  // extern "C"
