// Where ops of a training step wait for other ranks, and the sessions that carry the exchange out
// find them.
//
//   a step's op ---> Submit           Take <--- a session of the engine, one per exchange
//                          \         /          TensorFlow's collectives
//              done() <--- Finish (results or an error)
//
// TensorFlow's collectives want a session on a server, steps with the same number on all ranks and
// one shape per instance. Steps of training promise none of these, so the engine
// (ranks/tensorflow_engine.py) runs them in sessions of its own, and this is the place between.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_RANK_EXCHANGE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_RANK_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tensorflow {
namespace monolith_tf {

enum class ExchangeKind { kAllToAll, kAllGather, kBroadcast, kAllReduce };

// An op that waits. The thread that sets `is_claimed`, under the mutex of the exchanges, may use
// `ctx` and calls `done`.
struct ExchangeWaiter {
  OpKernelContext* ctx = nullptr;
  AsyncOpKernel::DoneCallback done;
  CancellationToken token = CancellationManager::kInvalidToken;
  bool is_claimed = false;
};

// One op's wish to exchange.
struct ExchangeRequest : ExchangeWaiter {
  ExchangeKind kind = ExchangeKind::kAllToAll;
  // Describes for people what has to be the same on all ranks.
  std::string description;
  std::vector<Tensor> inputs;
  // Rows for each rank, of an all-to-all.
  std::vector<int64_t> splits;
};

using ExchangeRequestPtr = std::shared_ptr<ExchangeRequest>;

// This process among the ranks; `ranks` is 0 where there is no engine.
struct ExchangePlace {
  int rank = 0;
  int ranks = 0;
};

// The place of this process.
ExchangePlace GetExchangePlace();

// Lets `request` wait under `exchange` until it is taken; calls its `done` at once where nobody
// takes, or the step is cancelled already. Requests of one name are taken one after the other.
void SubmitExchange(const std::string& exchange, const ExchangeRequestPtr& request);

// Calls `on_request`, and then `done`, when there is a request under `exchange`. It is then the
// current one.
void TakeExchange(const std::string& exchange, OpKernelContext* ctx,
                  AsyncOpKernel::DoneCallback done,
                  std::function<Status(const ExchangeRequest&)> on_request);

// The current request.
Status GetCurrentExchange(const std::string& exchange, ExchangeRequestPtr* request);

// Ends the current request with an error, or with what `set_outputs` leaves in its context. It may
// have been cancelled meanwhile; then nothing is called.
void FinishExchange(const std::string& exchange, const Status& error,
                    const std::function<Status(OpKernelContext*)>& set_outputs);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DISTRIBUTION_RANK_EXCHANGE_H_
