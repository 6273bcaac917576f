#include "monolith/serving/native/row_log/row_follower.h"

#include <cinttypes>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "monolith/realtime/row_log.pb.h"
#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/followed_graph.h"
#include "tensorflow/core/framework/tensor.h"

namespace monolith {
namespace serving {
namespace {

// Rows that were saved while a batch was on its way are newer than that batch. One can be under way
// when a replica starts, so from the next one on both tables must be equal.
constexpr int64_t kBatchesUntilEqual = 2;
constexpr int64_t kStateSize = 13;

tensorflow::Tensor Scalar(int64_t value) {
  tensorflow::Tensor tensor(tensorflow::DT_INT64, tensorflow::TensorShape({}));
  tensor.scalar<int64_t>()() = value;
  return tensor;
}

std::string BatchName(int64_t epoch, int64_t seq) {
  return "batch " + std::to_string(seq) + " of epoch " + std::to_string(epoch);
}

std::string DigestText(uint64_t digest, int64_t rows) {
  char text[64];
  snprintf(text, sizeof(text), "%016" PRIx64 " of %" PRId64 " rows", digest, rows);
  return text;
}

}  // namespace

RowFollower::RowFollower(std::string servers, const SyncState& state,
                         std::chrono::duration<double> interval)
    : state_(state), log_(std::move(servers), state, interval, this) {
  applied_.epoch = state.epoch;
  applied_.seq = state.seq;
}

Status RowFollower::Open(Servable* servable) {
  const RowLogNodes& nodes = *servable->row_log_nodes();
  std::unique_ptr<SessionCall> seek;
  Status status = servable->MakeCall({nodes.epoch, nodes.seq}, {}, {nodes.seek}, &seek);
  if (status.ok()) status = servable->MakeCall({nodes.messages}, {nodes.state}, {}, &apply_);
  if (status.ok()) {
    status =
        servable->MakeCall({}, {nodes.table_names, nodes.digests, nodes.num_rows}, {}, &digests_);
  }
  std::vector<tensorflow::Tensor> nothing;
  if (status.ok()) status = seek->Run({Scalar(state_.epoch), Scalar(state_.seq)}, &nothing);
  return status;
}

Status RowFollower::Handle(bool is_new, std::string_view value) {
  Applied before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    before = applied_;
  }
  if (is_new && !batches_at_start_) batches_at_start_ = before.batches;
  Applied after;
  const Status status = Apply(value, &after);
  if (!status.ok()) return status;
  const bool compares = after.batches > before.batches && after.digest_seq == after.seq &&
                        batches_at_start_ &&
                        after.batches - *batches_at_start_ >= kBatchesUntilEqual;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    applied_ = after;
    if (compares) digest_ok_ = after.digest_ok;
  }
  if (after.gaps > before.gaps) {
    LogError("The " + BatchName(after.epoch, after.seq) + " of " + state_.Describe() +
             " does not follow " + BatchName(before.epoch, before.seq) +
             ", the newest one here: rows are missing until they are sent again");
  }
  if (after.unknown_tables > 0 && before.unknown_tables == 0) {
    LogError("The row log has tables that the model does not have: " +
             BatchName(after.epoch, after.seq) + " and others");
  }
  if (compares && after.digest_ok == 0) LogDifference(value);
  return Status();
}

Status RowFollower::Apply(std::string_view value, Applied* applied) {
  tensorflow::Tensor messages(tensorflow::DT_STRING, tensorflow::TensorShape({1}));
  // Borrowed: the call ends before the message does.
  messages.vec<tensorflow::tstring>()(0).assign_as_view(value.data(), value.size());
  std::vector<tensorflow::Tensor> fetches;
  Status status = apply_->Run({messages}, &fetches);
  if (!status.ok()) {
    status.message = status.message.substr(0, status.message.find('\n'));
    return status;
  }
  if (fetches.size() != 1 || fetches[0].NumElements() != kStateSize) {
    return Status(Code::kInternal, "the op library does not tell what was applied");
  }
  const auto state = fetches[0].flat<int64_t>();
  applied->epoch = state(0);
  applied->seq = state(1);
  applied->newest_event_time = state(2);
  applied->batches = state(3);
  applied->rows = state(4) + state(5);
  applied->gaps = state(8);
  applied->unknown_tables = state(9);
  applied->digest_seq = state(11);
  applied->digest_ok = state(12);
  return Status();
}

void RowFollower::LogDifference(std::string_view value) {
  realtime::RowBatch batch;
  std::vector<tensorflow::Tensor> fetches;
  if (!batch.ParseFromArray(value.data() + kCrcBytes, static_cast<int>(value.size() - kCrcBytes)) ||
      !digests_->Run({}, &fetches).ok() || fetches.size() != 3) {
    return;
  }
  std::map<std::string, std::string> found;
  for (int64_t i = 0; i < fetches[0].NumElements(); ++i) {
    found[fetches[0].flat<tensorflow::tstring>()(i)] =
        DigestText(fetches[1].flat<tensorflow::uint64>()(i), fetches[2].flat<int64_t>()(i));
  }
  std::map<std::string, std::string> wanted;
  for (const auto& [table, digest] : batch.digest().tables()) {
    const auto count = batch.digest().row_counts().find(table);
    const bool has_count = count != batch.digest().row_counts().end();
    wanted[table] = DigestText(digest, has_count ? count->second : 0);
  }
  std::set<std::string> tables;
  for (const auto& [table, text] : found) tables.insert(table);
  for (const auto& [table, text] : wanted) tables.insert(table);
  const std::string none = DigestText(0, 0);
  for (const std::string& table : tables) {
    const std::string& have = found.count(table) > 0 ? found[table] : none;
    const std::string& want = wanted.count(table) > 0 ? wanted[table] : none;
    if (have == want) continue;
    LogError("Table " + table + " differs from the writer's of " + state_.Describe() + " after " +
             BatchName(batch.epoch(), batch.seq()) + ": digest " + have + ", want " + want);
  }
}

void RowFollower::AddSamples(std::vector<FollowerSample>* samples) const {
  Applied applied;
  int64_t digest_ok;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    applied = applied_;
    digest_ok = digest_ok_;
  }
  const auto add = [&](const char* name, const char* meaning, int64_t value,
                       bool is_counter = false) {
    samples->push_back({std::string("monolith_sync_") + name, meaning, state_.partition,
                        static_cast<double>(value), is_counter});
  };
  if (digest_ok >= 0) {
    add("digest_ok",
        "1 where all tables equal those of training bit by bit, at the last comparison.",
        digest_ok);
  }
  add("epoch", "Writer of the newest batch of rows that is applied.", applied.epoch);
  add("seq", "Number of the newest batch of rows that is applied.", applied.seq);
  add("newest_event_time_seconds", "Time of the newest event that the rows have learnt from.",
      applied.newest_event_time);
  add("rows", "Rows that were set or deleted.", applied.rows, true);
  add("lag_messages", "Messages of the row log that are not applied yet.", log_.lag());
  add("skipped_messages", "Messages of the row log that could not be read, and were left out.",
      log_.skipped(), true);
  add("gaps", "Times at which batches of rows were missing.", log_.lost() + applied.gaps, true);
}

}  // namespace serving
}  // namespace monolith
