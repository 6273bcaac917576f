// Joins several requests into one run of a session.
//
// The first request of a batch leads it. It waits until the batch is full or its time is up, then
// for a place among the runs; it runs the batch and wakes the others. Only threads of requests are
// used.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_BATCHER_H_
#define MONOLITH_SERVING_NATIVE_MODEL_BATCHER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/serving_api.pb.h"

namespace monolith {
namespace serving {

struct BatchingSettings {
  // Most rows in a batch; a larger request runs alone.
  int64_t max_batch_size = 1000;
  std::chrono::microseconds timeout{0};
  // More batches are refused with UNAVAILABLE.
  int64_t max_enqueued_batches = 10;
  // How many batches run at a time.
  int64_t num_threads = 4;
  // If given, batches are filled up to the next of these.
  std::vector<int64_t> allowed_sizes;
};

// Checks the settings.
Status MakeBatchingSettings(const api::BatchingParameters& parameters, BatchingSettings* settings);

// Thread-safe.
class Batcher {
 public:
  explicit Batcher(const BatchingSettings& settings) : settings_(settings) {}

  // Like Servable::Run, but together with other requests if all inputs have the same number of rows
  // and the signature has outputs of any number of rows.
  Status Run(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
             const std::vector<std::string>& output_filter, Servable::Tensors* outputs);

 private:
  struct Batch {
    std::vector<const Servable::Tensors*> requests;
    std::vector<int64_t> sizes;
    int64_t rows = 0;
    bool closed = false;
    bool done = false;
    // One result for each request; empty if the batch could not be run or divided.
    std::vector<Servable::Tensors> answers;
  };

  Status Lead(const std::string& key, const std::shared_ptr<Batch>& batch, Servable* servable,
              const Signature& signature, const std::vector<std::string>& output_filter);
  Status RunBatch(Servable* servable, const Signature& signature,
                  const std::vector<std::string>& output_filter, Batch* batch) const;

  const BatchingSettings settings_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Batch>> open_;
  int64_t waiting_ = 0;
  int64_t running_ = 0;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_BATCHER_H_
