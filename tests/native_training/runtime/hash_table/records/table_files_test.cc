// A table to files and back without TensorFlow, whatever happens meanwhile.
#include "monolith/native_training/runtime/hash_table/records/table_files.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "monolith/native_training/runtime/base/log.h"
#include "tests/native_training/runtime/files/faulty_file_system.h"
#include "tests/native_training/runtime/hash_table/table_test_util.h"

namespace monolith {
namespace engine {
namespace {

constexpr int64_t kNow = 1700000000;
constexpr int64_t kKilledRows = 3000;

std::mutex log_mutex;
std::vector<std::pair<LogLevel, std::string>> logged;

// Collects what the engine says.
class LogCapture {
 public:
  LogCapture() {
    logged.clear();
    SetLogSink([](LogLevel level, const std::string& message) {
      std::lock_guard<std::mutex> lock(log_mutex);
      logged.emplace_back(level, message);
    });
  }
  ~LogCapture() { SetLogSink(nullptr); }
};

Ids Range(int64_t n) {
  Ids ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 1);
  return ids;
}

void Fill(EmbeddingTable* table, int64_t n, float value, int64_t time = kNow) {
  WriteOptions options;
  options.req_time = time;
  Assign(table, Range(n), Floats(static_cast<size_t>(n * table->dim()), value), options);
}

std::map<float, int64_t> CountValues(const EmbeddingTable& table) {
  std::map<float, int64_t> counts;
  table.VisitRows([&](const RowView& row) {
    ++counts[row.values[0]];
    return true;
  });
  return counts;
}

class TableFilesTest : public testing::Test {
 protected:
  TestFolder folder_;
  UnsyncedFileSystem disk_;
  const std::string base_ = folder_ / "table";
};

TEST_F(TableFilesTest, RowsSurviveInAnyNumberOfFiles) {
  const auto table = SgdTable(3);
  Fill(table.get(), 1000, 2.5f);
  for (const int64_t num_files : {-1, 1, 3, 64, 100}) {
    SaveStats saved;
    ASSERT_TRUE(SaveTable(&disk_, *table, base_, num_files, nullptr, &saved).ok());
    EXPECT_EQ(saved.saved, 1000);
    EXPECT_EQ(folder_.Names().size(), static_cast<size_t>(num_files == -1 ? 2 : num_files + 1));
    const auto other = SgdTable(3);
    Fill(other.get(), 10, -1.0f);
    LoadStats loaded;
    const Status status = LoadTable(&disk_, base_, other.get(), &loaded);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(loaded.loaded, 1000);
    EXPECT_EQ(CountValues(*other), (std::map<float, int64_t>{{2.5f, 1000}}));
    EXPECT_EQ(other->MaxUpdateTs(), kNow);
  }
}

TEST_F(TableFilesTest, BadNumbersOfFilesAreRefused) {
  const auto table = SgdTable(1);
  for (const int64_t num_files : {0, -2, 100000}) {
    EXPECT_EQ(SaveTable(&disk_, *table, base_, num_files, nullptr).code,
              StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(folder_.Names().empty());
}

TEST_F(TableFilesTest, AnyErrorOrKillLeavesOneWholeSave) {
  const auto old_rows = SgdTable(1), new_rows = SgdTable(1);
  Fill(old_rows.get(), 300, 1.0f);
  Fill(new_rows.get(), 500, 2.0f);
  for (const Fault fault : {Fault::kErrorsOn, Fault::kKill}) {
    std::map<float, int64_t> seen;
    for (int64_t at = 1;; ++at) {
      ASSERT_TRUE(SaveTable(&disk_, *old_rows, base_, 3, nullptr).ok());
      FaultyFileSystem faulty(at, fault);
      if (fault == Fault::kKill) {
        if (!RunAndSeeWhetherKilled(
                [&] { (void)SaveTable(&faulty, *new_rows, base_, 2, nullptr); })) {
          break;
        }
      } else {
        (void)SaveTable(&faulty, *new_rows, base_, 2, nullptr);
        if (faulty.calls() < at) break;
      }
      const auto table = SgdTable(1);
      const Status status = LoadTable(&disk_, base_, table.get());
      ASSERT_TRUE(status.ok()) << "call " << at << ": " << status.message;
      const auto counts = CountValues(*table);
      ASSERT_EQ(counts.size(), 1u) << "a mix of two saves";
      EXPECT_EQ(counts.begin()->second, counts.begin()->first == 1.0f ? 300 : 500);
      ++seen[counts.begin()->first];
    }
    EXPECT_GT(seen[1.0f], 5);
    EXPECT_GT(seen[2.0f], 2);
  }
}

// Writes one number after another to all rows and saves, until it is killed, while another thread
// fills the table with rows that have expired and evicts them. Tells `report` what was saved.
void SaveAndEvictUntilKilled(FileSystem* files, const std::string& base, int32_t first,
                             int report) {
  TableConfig config = MakeConfig({MakeSegment(2, OptimizerKind::kSgd)});
  config.expiry.default_days = 1;
  const auto table = MakeTable(config);
  Fill(table.get(), kKilledRows, static_cast<float>(first));
  std::thread([&table] {
    Ids old(kKilledRows / 2);
    std::iota(old.begin(), old.end(), kKilledRows + 1);
    WriteOptions options;
    options.req_time = kNow - 10 * 86400;
    for (;;) {
      Assign(table.get(), old, Floats(2 * old.size(), -1.0f), options);
      table->Evict(table->expiry());
    }
  }).detach();
  for (int32_t number = first;; ++number) {
    Fill(table.get(), kKilledRows, static_cast<float>(number));
    if (!SaveTable(files, *table, base, 3, &table->expiry()).ok()) _exit(1);
    if (write(report, &number, sizeof(number)) != sizeof(number)) _exit(1);
  }
}

// MONOLITH_SOAK=1 kills 200 times.
TEST_F(TableFilesTest, KillsWhileSavingAndEvictingLoseNothing) {
  const char* const soak = std::getenv("MONOLITH_SOAK");
  const int kills = soak != nullptr && std::string(soak) == "1" ? 200 : 20;
  std::mt19937 random(1);
  int32_t newest = 0;  // the last number that was reported to be saved
  for (int kill_number = 0; kill_number < kills; ++kill_number) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(ends[0]);  // so that it ends with its parent
      SaveAndEvictUntilKilled(&disk_, base_, newest + 1, ends[1]);
    }
    close(ends[1]);
    // From its first save on, at any moment of those that follow.
    const auto next_report = [&] {
      return read(ends[0], &newest, sizeof(newest)) == static_cast<ssize_t>(sizeof(newest));
    };
    ASSERT_TRUE(next_report());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    while (next_report()) {
    }
    close(ends[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));

    const auto table = SgdTable(2);
    const Status loaded = LoadTable(&disk_, base_, table.get());
    ASSERT_TRUE(loaded.ok()) << loaded.message;
    const auto counts = CountValues(*table);
    ASSERT_EQ(counts.size(), 1u) << "a mix of two saves, or rows that have expired";
    EXPECT_EQ(counts.begin()->second, kKilledRows);
    // The save under way may have been published, but not reported.
    EXPECT_GE(counts.begin()->first, static_cast<float>(newest));
    EXPECT_LE(counts.begin()->first, static_cast<float>(newest + 1));
    newest = static_cast<int32_t>(counts.begin()->first);
  }
}

TEST_F(TableFilesTest, DamageIsAnErrorAndKeepsTheContent) {
  const auto table = SgdTable(1);
  Fill(table.get(), 1000, 1.0f);
  const std::string path = base_ + "-00000-of-00001";
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 1, nullptr).ok());
  const std::string good = ReadFile(path);
  Fill(table.get(), 1000, 2.0f);
  // Behind record 300, where nothing in the file itself tells; emptied; another table's file.
  int64_t cut = 0;
  for (int i = 0; i < 300; ++i) {
    uint64_t size;
    std::memcpy(&size, good.data() + cut, 8);
    cut += kRecordHeaderBytes + static_cast<int64_t>(size) + kRecordFooterBytes;
  }
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  for (const std::string& bad :
       {good.substr(0, static_cast<size_t>(cut)), std::string(), good + good, flipped}) {
    WriteFile(path, bad);
    const Status status = LoadTable(&disk_, base_, table.get());
    EXPECT_EQ(status.code, StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message.find("Unable to parse data. Data might be corrupted"),
              std::string::npos);
    EXPECT_NE(status.message.find(path + " has " + std::to_string(bad.size()) + " bytes"),
              std::string::npos)
        << status.message;
    EXPECT_EQ(CountValues(*table), (std::map<float, int64_t>{{2.0f, 1000}}));
  }
  WriteFile(path, good);
  ASSERT_TRUE(LoadTable(&disk_, base_, table.get()).ok());
}

// Files of that size are loaded by several threads, however few files there are.
TEST_F(TableFilesTest, ManyThreadsLoadEveryRowOfALargeFileOnce) {
  const auto table = SgdTable(256);
  const Ids ids = Range(30000);
  Floats values(ids.size() * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000003);
  Assign(table.get(), ids, values);
  const std::string path = base_ + "-00000-of-00001";
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 1, nullptr).ok());
  const std::string good = ReadFile(path);
  ASSERT_GT(good.size(), size_t{32} << 20);
  const auto other = SgdTable(256);
  LoadStats stats;
  ASSERT_TRUE(LoadTable(&disk_, base_, other.get(), &stats).ok());
  EXPECT_EQ(stats.loaded, 30000);
  EXPECT_EQ(other->Size(), 30000);
  EXPECT_EQ(Lookup(*other, ids), values);

  // In the first, a middle, the last piece: of a payload, of a length.
  for (const size_t at : {size_t{100}, size_t{0}, good.size() / 2, good.size() - 100}) {
    std::string bad = good;
    bad[at] ^= 1;
    WriteFile(path, bad);
    const Status status = LoadTable(&disk_, base_, other.get());
    EXPECT_EQ(status.code, StatusCode::kFailedPrecondition) << status.message;
    EXPECT_NE(status.message.find(path), std::string::npos) << status.message;
    EXPECT_EQ(Lookup(*other, {1, 30000}), Lookup(*table, {1, 30000}));
  }
}

// Other programs may write an id twice, far apart.
TEST_F(TableFilesTest, TheLastOfEqualIdsCountsInASetWithoutManifest) {
  const auto table = SgdTable(256);
  std::string file;
  for (const float value : {1.0f, 2.0f, 3.0f}) {
    Fill(table.get(), 12000, value);
    SaveStats stats;
    ASSERT_TRUE(WriteTableRecords(
                    *AsRecordTable(table.get()), nullptr, 0, 1,
                    [&file](std::string_view bytes) {
                      file.append(bytes);
                      return Status::Ok();
                    },
                    &stats)
                    .ok());
  }
  WriteFile(base_ + "-00000-of-00001", file);
  const auto other = SgdTable(256);
  ASSERT_TRUE(LoadTable(&disk_, base_, other.get()).ok());
  EXPECT_EQ(CountValues(*other), (std::map<float, int64_t>{{3.0f, 12000}}));
}

TEST_F(TableFilesTest, OldSetsWithoutManifestAreRead) {
  const auto table = SgdTable(2);
  Fill(table.get(), 100, 1.0f);
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 4, nullptr).ok());
  ASSERT_TRUE(disk_.Remove(folder_ / ".table.manifest").ok());
  const auto other = SgdTable(2);
  ASSERT_TRUE(LoadTable(&disk_, base_, other.get()).ok());
  EXPECT_EQ(other->Size(), 100);
}

TEST_F(TableFilesTest, ASaveThatLeavesOutMostRowsSaysSo) {
  const auto table = SgdTable(1);
  Fill(table.get(), 10, 1.0f, kNow - 10 * 86400);
  ExpiryPolicy week;
  ASSERT_TRUE(ExpiryPolicy::Create({7, {}}, &week).ok());
  WriteOptions options;
  options.req_time = kNow;
  Assign(table.get(), {100, 101, 102, 103, 104, 105, 106, 107, 108, 109}, Floats(10, 1.0f),
         options);
  LogCapture log;
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 2, &week).ok());
  EXPECT_TRUE(logged.empty()) << "half of the rows are kept";

  const int64_t id = 109;
  table->Erase(&id, 1);
  SaveStats stats;
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 2, &week, &stats).ok());
  EXPECT_EQ(stats.expired, 10);
  ASSERT_EQ(logged.size(), 1u);
  EXPECT_EQ(logged[0].first, LogLevel::kError);
  for (const std::string& part : {base_, std::string("10 of 19 rows"), std::to_string(kNow)}) {
    EXPECT_NE(logged[0].second.find(part), std::string::npos) << logged[0].second;
  }
}

TEST_F(TableFilesTest, ATimeInMillisecondsLosesNoRowsAndIsSaidOnce) {
  LogCapture log;
  const auto table = SgdTable(1);
  Fill(table.get(), 1000, 1.0f);
  Fill(table.get(), 7, 1.0f, kNow * 1000);
  Fill(table.get(), 7, 1.0f, kNow * 1000 + 1);
  ASSERT_EQ(logged.size(), 1u);
  EXPECT_NE(logged[0].second.find("1700000000000"), std::string::npos);
  EXPECT_NE(logged[0].second.find("probably in milliseconds"), std::string::npos);
  EXPECT_EQ(table->MaxUpdateTs(), 4294967295);
  SaveStats stats;
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 1, &table->expiry(), &stats).ok());
  EXPECT_EQ(stats.saved, 1000);
  EXPECT_EQ(table->Evict(table->expiry()), 0);
}

TEST_F(TableFilesTest, ANegativeTimeIsSaidOnceToo) {
  LogCapture log;
  const auto table = SgdTable(1);
  for (int i = 0; i < 3; ++i) Fill(table.get(), 7, 1.0f, -5);
  ASSERT_EQ(logged.size(), 1u);
  EXPECT_NE(logged[0].second.find("-5"), std::string::npos);
  EXPECT_EQ(table->MaxUpdateTs(), 0);
}

TEST_F(TableFilesTest, ReinitializeTakesTheTimeOfTheData) {
  TableConfig config = MakeConfig({MakeSegment(1, OptimizerKind::kSgd)});
  config.expiry.default_days = 7;
  const auto table = MakeTable(config);
  const int64_t id = 1, other = 5000;
  int32_t existed;
  Fill(table.get(), 1000, 1.0f, kNow - 10 * 86400);
  ASSERT_TRUE(table->Reinitialize(&id, 1, kNow, &existed).ok());
  SaveStats stats;
  ASSERT_TRUE(SaveTable(&disk_, *table, base_, 1, &table->expiry(), &stats).ok());
  EXPECT_EQ(stats.saved, 1000);
  EXPECT_EQ(table->Evict(table->expiry()), 0);
  EXPECT_EQ(table->MaxUpdateTs(), kNow - 10 * 86400);
  // Without data there is no other time than now.
  const auto fresh = MakeTable(config);
  ASSERT_TRUE(fresh->Reinitialize(&other, 1, kNow, &existed).ok());
  EXPECT_EQ(fresh->MaxUpdateTs(), kNow);
}

TEST_F(TableFilesTest, ServingTablesCannotBeSaved) {
  const auto table =
      MakeTable(MakeConfig({MakeSegment(1, OptimizerKind::kSgd)}, EntryType::kServing));
  EXPECT_EQ(SaveTable(&disk_, *table, base_, 1, nullptr).code, StatusCode::kUnimplemented);
  EXPECT_TRUE(folder_.Names().empty());
}

TEST(VisitRowsTest, EveryRowOnceWithValuesAndTime) {
  const auto table = SgdTable(2);
  const int64_t n = 100000;
  Floats values;
  for (int64_t id = 1; id <= n; ++id) values.insert(values.end(), {float(id), -float(id)});
  WriteOptions options;
  options.req_time = kNow;
  Assign(table.get(), Range(n), values, options);
  std::vector<bool> seen(static_cast<size_t>(n + 1));
  int64_t visited = 0;
  table->VisitRows([&](const RowView& row) {
    EXPECT_FALSE(seen[static_cast<size_t>(row.id)]);
    seen[static_cast<size_t>(row.id)] = true;
    EXPECT_EQ(row.values[0], static_cast<float>(row.id));
    EXPECT_EQ(row.values[1], -static_cast<float>(row.id));
    EXPECT_EQ(row.last_update, kNow);
    ++visited;
    return true;
  });
  EXPECT_EQ(visited, n);
}

TEST(VisitRowsTest, StopsWhenToldAndMayUseTheTable) {
  const auto table = SgdTable(1);
  Fill(table.get(), 1000, 1.0f);
  int64_t visited = 0;
  table->VisitRows([&](const RowView& row) {
    table->Erase(&row.id, 1);
    return ++visited < 5;
  });
  EXPECT_EQ(visited, 5);
  EXPECT_EQ(table->Size(), 995);
}

TEST(VisitRowsTest, ServingRowsAreDecoded) {
  SegmentConfig segment = MakeSegment(2, OptimizerKind::kSgd);
  segment.compressor.kind = CompressorKind::kFp16;
  const auto table = MakeTable(MakeConfig({segment}, EntryType::kServing));
  Assign(table.get(), {1}, {0.5f, -2.0f});
  int64_t visited = 0;
  table->VisitRows([&](const RowView& row) {
    EXPECT_EQ(row.values[0], 0.5f);
    EXPECT_EQ(row.values[1], -2.0f);
    ++visited;
    return true;
  });
  EXPECT_EQ(visited, 1);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
