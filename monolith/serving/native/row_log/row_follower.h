// Keeps the tables of a served model equal to those of a parameter server.
//
// Messages are applied in the order of the log; repeated, torn and older ones change nothing. Where
// the writer gives the digests of its tables after a batch, those of the replica are compared.
#ifndef MONOLITH_SERVING_NATIVE_ROW_LOG_ROW_FOLLOWER_H_
#define MONOLITH_SERVING_NATIVE_ROW_LOG_ROW_FOLLOWER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/serving/native/model/follower.h"
#include "monolith/serving/native/model/servable.h"
#include "monolith/serving/native/row_log/log_follower.h"
#include "monolith/serving/native/row_log/sync_state.h"

namespace monolith {
namespace serving {

class RowFollower : public LogHandler {
 public:
  // The state that the tables hold.
  struct Applied {
    // The newest batch.
    int64_t epoch = 0;
    int64_t seq = 0;
    int64_t newest_event_time = 0;
    int64_t batches = 0;
    // Rows set or deleted.
    int64_t rows = 0;
    // Batches whose predecessor was not applied.
    int64_t gaps = 0;
    int64_t unknown_tables = 0;
    // The batch after which tables were last compared with the writer's, and the result; -1: none.
    int64_t digest_seq = 0;
    int64_t digest_ok = -1;
  };

  RowFollower(std::string servers, const SyncState& state, std::chrono::duration<double> interval);

  // Binds it to the tables of a model with row_log_nodes, which must outlive it. Reads all rows.
  Status Open(Servable* servable);

  LogFollower* log() { return &log_; }
  const LogFollower* log() const { return &log_; }
  void AddSamples(std::vector<FollowerSample>* samples) const;

  Status Handle(bool is_new, std::string_view value) override;
  bool GoesOnAfterGap(bool is_caught_up) const override { return is_caught_up; }

 private:
  Status Apply(std::string_view value, Applied* applied);
  void LogDifference(std::string_view value);

  const SyncState state_;
  std::unique_ptr<SessionCall> apply_;
  std::unique_ptr<SessionCall> digests_;
  // The number of batches applied when the log's end at the start was reached.
  std::optional<int64_t> batches_at_start_;
  mutable std::mutex mutex_;
  Applied applied_;
  // Whether the tables equal the writer's; -1 before the first comparison.
  int64_t digest_ok_ = -1;
  // Last: its thread uses the others.
  LogFollower log_;
};

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_ROW_LOG_ROW_FOLLOWER_H_
