#include "monolith/serving/native/row_log/replica.h"

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/followed_graph.h"
#include "monolith/serving/native/model/follower.h"
#include "monolith/serving/native/row_log/dense_follower.h"
#include "monolith/serving/native/row_log/row_follower.h"
#include "monolith/serving/native/row_log/sync_state.h"

namespace monolith {
namespace serving {
namespace {

// The logs that one model follows; one of the two may be missing.
class Replica : public Follower {
 public:
  Replica(std::unique_ptr<RowFollower> rows, std::unique_ptr<DenseFollower> dense)
      : rows_(std::move(rows)), dense_(std::move(dense)) {
    if (rows_ != nullptr) logs_.push_back(rows_->log());
    if (dense_ != nullptr) logs_.push_back(dense_->log());
  }
  ~Replica() override { Close(); }

  void Start(std::function<void()> on_change) override {
    for (LogFollower* log : logs_) log->Start(on_change);
  }

  bool is_caught_up() const override {
    for (const LogFollower* log : logs_) {
      if (!log->is_caught_up()) return false;
    }
    return true;
  }

  std::string reason() const override {
    std::string reasons;
    for (const LogFollower* log : logs_) {
      const std::string reason = log->reason();
      if (!reason.empty()) reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    return reasons;
  }

  std::vector<FollowerSample> Samples() const override {
    std::vector<FollowerSample> samples;
    if (rows_ != nullptr) rows_->AddSamples(&samples);
    if (dense_ != nullptr) dense_->AddSamples(&samples);
    return samples;
  }

  void Close() override {
    for (LogFollower* log : logs_) log->Close();
  }

 private:
  const std::unique_ptr<RowFollower> rows_;
  const std::unique_ptr<DenseFollower> dense_;
  std::vector<LogFollower*> logs_;
};

}  // namespace

Status SetReplica(const std::string& path, const std::string& servers,
                  std::chrono::duration<double> interval, Servable* servable) {
  std::optional<SyncState> row_state;
  std::optional<SyncState> dense_state;
  Status status = ReadSyncState(path, kRowState, &row_state);
  if (status.ok()) status = ReadSyncState(path, kDenseState, &dense_state);
  if (!status.ok()) return status;
  std::unique_ptr<RowFollower> rows;
  std::unique_ptr<DenseFollower> dense;
  if (row_state) {
    if (servable->row_log_nodes() == nullptr || !servable->row_log_nodes()->has_tables) {
      return Status(Code::kDataLoss,
                    path + " follows " + row_state->Describe() + ", but has no tables");
    }
    rows = std::make_unique<RowFollower>(servers, *row_state, interval);
    status = rows->Open(servable);
    if (!status.ok()) return status;
  }
  if (dense_state && servable->dense_nodes() != nullptr &&
      !servable->dense_nodes()->variables.empty()) {
    dense = std::make_unique<DenseFollower>(servers, *dense_state, interval);
    status = dense->Open(servable);
    if (!status.ok()) return status;
  }
  if (rows == nullptr && dense == nullptr) {
    LogInfo(path + " names no log: it stays as it was exported");
    return Status();
  }
  servable->SetFollower(std::make_unique<Replica>(std::move(rows), std::move(dense)));
  return Status();
}

}  // namespace serving
}  // namespace monolith
