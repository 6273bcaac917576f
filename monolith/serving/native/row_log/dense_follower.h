// Keeps the dense variables of a served model equal to the newest set that training published.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_DENSE_FOLLOWER_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_DENSE_FOLLOWER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "monolith/serving/native/model/follower.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/row_log/log_follower.h"
#include "monolith/serving/native/row_log/sync_state.h"

namespace monolith {
namespace serving {

class DenseFollower : public LogHandler {
 public:
  DenseFollower(std::string servers, const SyncState& state,
                std::chrono::duration<double> interval);

  // Binds it to a model with dense_nodes, which must outlive it. Requests pass a gate from now on.
  Status Open(Servable* servable);

  LogFollower* log() { return &log_; }
  const LogFollower* log() const { return &log_; }
  void AddSamples(std::vector<FollowerSample>* samples) const;

  Status Handle(bool is_new, std::string_view value) override;
  // Every set is complete in itself, so the next one makes up for a lost one.
  bool GoesOnAfterGap(bool) const override { return true; }

 private:
  // Sets every variable between two requests, or none.
  Status Assign(const std::map<std::string, std::string>& tensors);

  const std::string name_;
  const DenseNodes* nodes_ = nullptr;
  std::unique_ptr<SessionCall> assign_;
  RunGate* gate_ = nullptr;
  // Writer of the newest set.
  int64_t epoch_;
  // The incomplete set: epoch, version and number of chunks; tensors by chunk.
  std::tuple<int64_t, int64_t, int32_t> number_{0, 0, 0};
  std::map<int32_t, std::vector<std::pair<std::string, std::string>>> chunks_;
  // Step of the newest set, and how many were assigned.
  std::atomic<int64_t> version_{0};
  std::atomic<int64_t> sets_{0};
  // Last: its thread uses the others.
  LogFollower log_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_DENSE_FOLLOWER_H_
