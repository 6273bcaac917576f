// Rows per second into and out of the row log, on one thread, beside plain lookups and assigns.
//
// Touches rows of a large table, makes messages of them and applies them to a serving table. The
// baselines look the same ids up and assign the same rows. Prints one JSON object of medians, in
// millions of rows per second of CPU time. benchmarks/realtime_rows.py runs this program.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/row_log/batch_builder.h"
#include "monolith/native_training/runtime/row_log/batch_follower.h"

namespace {

using namespace monolith::engine;  // NOLINT: a program of one file

double Seconds(const std::function<void()>& work) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(1);
}

std::unique_ptr<EmbeddingTable> MakeTable(int64_t dim, EntryType type) {
  TableConfig config;
  config.entry.type = type;
  config.entry.segments.resize(1);
  SegmentConfig& segment = config.entry.segments[0];
  segment.dim_size = dim;
  segment.optimizer.kind = OptimizerKind::kAdagrad;
  segment.initializer.kind = InitializerKind::kRandomUniform;
  segment.compressor.kind = CompressorKind::kFp32;
  config.seed = 1;
  std::unique_ptr<EmbeddingTable> table;
  Require(EmbeddingTable::Create(config, &table));
  return table;
}

}  // namespace

// Usage: row_log_benchmark [rows in the tables] [touched rows] [dim] [repeats] [digests: 0 or 1]
int main(int argc, char** argv) {
  const int64_t num_rows = argc > 1 ? std::atoll(argv[1]) : 5'000'000;
  const int64_t num_touched = argc > 2 ? std::atoll(argv[2]) : 1'000'000;
  const int64_t dim = argc > 3 ? std::atoll(argv[3]) : 16;
  const int repeats = argc > 4 ? std::atoi(argv[4]) : 5;
  const bool digests = argc <= 5 || std::atoi(argv[5]) != 0;

  std::mt19937_64 random(7);
  std::vector<int64_t> all(static_cast<size_t>(num_rows));
  for (int64_t& id : all) id = static_cast<int64_t>(random());
  std::vector<float> rows(static_cast<size_t>(num_rows * dim));
  for (float& value : rows) value = static_cast<float>(random() % 1000) * 0.001f + 0.001f;
  const auto trained = MakeTable(dim, EntryType::kTraining);
  const auto served = MakeTable(dim, EntryType::kServing);
  Require(trained->Assign({all.data(), num_rows, rows.data()}, {}));
  Require(served->Assign({all.data(), num_rows, rows.data()}, {}));
  BatchBuilder builder(2 * num_touched);
  builder.Attach("t", trained.get());
  BatchFollower follower;
  BatchBuilder::Options options;
  options.keep_hashes = options.digest = digests;

  BatchHeader header;
  header.epoch = 1;
  std::vector<std::string> messages;
  // Takes one message at a time and is done with it before the next, as the op does.
  const auto build = [&] {
    header.prev_seq = header.seq++;
    BatchBuilder::Counts counts;
    double seconds = Seconds([&] { Require(builder.Begin(header, options, &counts)); });
    messages.clear();
    std::vector<std::string> some;
    int64_t taken = 0, deleted = 0;
    do {
      seconds += Seconds([&] { Require(builder.Take(1, &some, &taken, &deleted)); });
      messages.insert(messages.end(), some.begin(), some.end());
    } while (!some.empty());
    return seconds;
  };
  const auto apply = [&] {
    BatchFollower::Outcome outcome;
    for (const std::string& message : messages) {
      Require(follower.Apply({{"t", served.get()}}, message.data(),
                             static_cast<int64_t>(message.size()), &outcome));
    }
    if (outcome == BatchFollower::Outcome::kApplied) return;
    std::fprintf(stderr, "a batch was not applied\n");
    std::exit(1);
  };
  build();  // all rows
  apply();

  std::vector<double> lookup, assign, to_log, from_log;
  std::vector<int64_t> ids(static_cast<size_t>(num_touched));
  std::vector<float> values(static_cast<size_t>(num_touched * dim));
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::shuffle(all.begin(), all.end(), random);
    std::copy(all.begin(), all.begin() + num_touched, ids.begin());
    lookup.push_back(Seconds([&] { trained->Lookup(ids.data(), num_touched, values.data()); }));
    assign.push_back(Seconds([&] {
      Require(served->Assign({ids.data(), num_touched, values.data()}, {}));
    }));
    builder.Touch(trained.get(), ids.data(), num_touched);
    to_log.push_back(build());
    from_log.push_back(Seconds(apply));
  }
  const FollowerState state = follower.GetState();
  if (digests && state.digest_ok != 1) {
    std::fprintf(stderr, "digests differ\n");
    return 1;
  }
  const double millions = 1e-6 * static_cast<double>(num_touched);
  std::printf(
      "{\"rows\": %lld, \"touched\": %lld, \"dim\": %lld, \"lookup\": %.3f, \"assign\": %.3f, "
      "\"to_log\": %.3f, \"from_log\": %.3f}\n",
      static_cast<long long>(num_rows), static_cast<long long>(num_touched),
      static_cast<long long>(dim), millions / Median(lookup), millions / Median(assign),
      millions / Median(to_log), millions / Median(from_log));
  return 0;
}
