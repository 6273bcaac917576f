// Promise: a set of files appears as a whole or not at all, and is read as a whole or not at all.
#include "monolith/native_training/runtime/files/file_set.h"

#include <gtest/gtest.h>

#include <thread>

#include "monolith/native_training/runtime/files/set_names.h"
#include "tests/native_training/runtime/files/faulty_file_system.h"

namespace monolith {
namespace engine {
namespace {

using Strings = std::vector<std::string>;

const Strings kKinds = {"", ".meta"};

// Writes a set in which every file holds `content` and its own name.
Status Save(FileSystem* files, const std::string& base, int64_t num_files,
            const std::string& content) {
  FileSetWriter set(files, ShardedSetName(base, kKinds));
  for (const std::string& kind : kKinds) {
    for (int64_t i = 0; i < num_files; ++i) {
      std::unique_ptr<SetOutputFile> file;
      Status status = set.Create(ShardSuffix(kind, i, num_files), &file);
      if (!status.ok()) return status;
      const std::string text = content + kind + std::to_string(i);
      status = file->Append(text.data(), static_cast<int64_t>(text.size()));
      if (!status.ok()) return status;
      file->AddRecords(1);
      status = file->Close();
      if (!status.ok()) return status;
    }
  }
  return set.Publish();
}

// Reads the content that all files share; fails if they differ.
Status Load(FileSystem* files, const std::string& base, int64_t* num_files, std::string* content) {
  return ReadShardedSet(files, base, kKinds, [&](const FileSetReader& reader, int64_t n) {
    *num_files = n;
    content->clear();
    for (const std::string& kind : kKinds) {
      for (int64_t i = 0; i < n; ++i) {
        const FileSetReader::File* entry = reader.Find(ShardSuffix(kind, i, n));
        std::unique_ptr<InputFile> file;
        Status status = reader.Open(*entry, &file);
        if (!status.ok()) return status;
        std::string text(1000, '\0');
        int64_t read = 0;
        status = file->Read(1000, &text[0], &read);
        if (!status.ok()) return status;
        text.resize(static_cast<size_t>(read));
        const std::string end = kind + std::to_string(i);
        if (text.size() < end.size() || text.substr(text.size() - end.size()) != end) {
          return Status::DataLoss(entry->path + " says " + text);
        }
        text.resize(text.size() - end.size());
        if (!content->empty() && *content != text) {
          return Status::DataLoss("a mix of " + *content + " and " + text);
        }
        *content = text;
      }
    }
    return Status::Ok();
  });
}

class FileSetTest : public testing::Test {
 protected:
  void ExpectSet(const std::string& content, int64_t num_files) {
    std::string found;
    int64_t n = 0;
    const Status status = Load(&disk_, base_, &n, &found);
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(found, content);
    EXPECT_EQ(n, num_files);
  }
  Status LoadError() {
    std::string found;
    int64_t n = 0;
    return Load(&disk_, base_, &n, &found);
  }

  TestFolder folder_;
  UnsyncedFileSystem disk_;
  const std::string base_ = folder_ / "set";
};

TEST_F(FileSetTest, FilesHaveTheSpecifiedNamesAndTheManifestIsHidden) {
  ASSERT_TRUE(Save(&disk_, base_, 2, "a").ok());
  EXPECT_EQ(folder_.Names(), (Strings{".set.manifest", "set-00000-of-00002", "set-00001-of-00002",
                                      "set.meta-00000-of-00002", "set.meta-00001-of-00002"}));
  EXPECT_EQ(ReadFile(base_ + "-00001-of-00002"), "a1");
  ExpectSet("a", 2);
}

// Records which names were flushed and given.
class Recorder final : public UnsyncedFileSystem {
 public:
  Status Rename(const std::string& from, const std::string& to) override {
    calls.push_back("name " + NameOf(to));
    return UnsyncedFileSystem::Rename(from, to);
  }
  Status Sync(const std::string& path) override {
    calls.push_back("flush " + NameOf(std::string(WithoutTemporaryMark(path))));
    return UnsyncedFileSystem::Sync(path);
  }
  Strings calls;
};

TEST_F(FileSetTest, EverythingIsFlushedBeforeTheNextStepNeedsIt) {
  Recorder disk;
  ASSERT_TRUE(Save(&disk, folder_ / "new/set", 1, "a").ok());
  EXPECT_EQ(disk.calls,
            (Strings{"flush " + NameOf(folder_.path()),  // holds the new folder
                     "flush set-00000-of-00001", "flush set.meta-00000-of-00001",
                     "flush .set.manifest", "flush new", "name .set.manifest", "flush new",
                     "name set-00000-of-00001", "name set.meta-00000-of-00001", "flush new"}));
  disk.calls.clear();
  ASSERT_TRUE(Save(&disk, folder_ / "new/set", 1, "b").ok());
  EXPECT_EQ(disk.calls[0], "flush " + NameOf(folder_.path()))
      << "another process may have just created the folder";
}

TEST_F(FileSetTest, ManifestTellsSizesRecordsAndChecksums) {
  ASSERT_TRUE(Save(&disk_, base_, 1, "abc").ok());
  Manifest manifest;
  ASSERT_TRUE(ReadManifest(&disk_, folder_ / ".set.manifest", &manifest).ok());
  ASSERT_EQ(manifest.files.size(), 2u);
  EXPECT_EQ(manifest.files[0].suffix, "-00000-of-00001");
  EXPECT_EQ(manifest.files[0].bytes, 4);
  EXPECT_EQ(manifest.files[0].records, 1);
  EXPECT_NE(manifest.files[0].crc, manifest.files[1].crc);
}

TEST_F(FileSetTest, AnotherNumberOfFilesLeavesNothingOfTheOldSet) {
  ASSERT_TRUE(Save(&disk_, base_, 4, "a").ok());
  ASSERT_TRUE(Save(&disk_, base_, 1, "b").ok());
  EXPECT_EQ(folder_.Names(),
            (Strings{".set.manifest", "set-00000-of-00001", "set.meta-00000-of-00001"}));
  ExpectSet("b", 1);
}

// Makes every call that changes something fail once, in every way, with an old set of the same and
// of another number of files, with and without a manifest.
class FaultTest : public FileSetTest,
                  public testing::WithParamInterface<std::tuple<Fault, int64_t, bool>> {};

TEST_P(FaultTest, LeavesTheOldSetOrTheNewOne) {
  const auto [fault, old_files, old_manifest] = GetParam();
  const std::string manifest = folder_ / ".set.manifest";
  int64_t faults = 0, old_sets = 0, new_sets = 0;
  for (int64_t at = 1;; ++at) {
    ASSERT_TRUE(Save(&disk_, base_, old_files, "old").ok());
    if (!old_manifest) {
      ASSERT_TRUE(disk_.Remove(manifest).ok());
    }
    FaultyFileSystem faulty(at, fault);
    if (fault == Fault::kKill) {
      const bool killed = RunAndSeeWhetherKilled([&] { (void)Save(&faulty, base_, 2, "new one"); });
      if (!killed) break;
    } else {
      const Status status = Save(&faulty, base_, 2, "new one");
      if (faulty.calls() < at) {
        ASSERT_TRUE(status.ok()) << status.message;
        break;
      }
      // Calls that only tidy up may fail without harm.
      EXPECT_TRUE(status.ok() || status.message.find("injected") != std::string::npos);
    }
    ++faults;
    std::string content;
    int64_t n = 0;
    const Status status = Load(&disk_, base_, &n, &content);
    ASSERT_TRUE(status.ok()) << "call " << at << ": " << status.message;
    if (content == "old") {
      ++old_sets;
      EXPECT_EQ(n, old_files);
    } else {
      ++new_sets;
      EXPECT_EQ(content, "new one");
      EXPECT_EQ(n, 2);
    }
    // The next save tidies up.
    ASSERT_TRUE(Save(&disk_, base_, 2, "next").ok());
    ExpectSet("next", 2);
    EXPECT_EQ(folder_.Names().size(), 5u);
  }
  EXPECT_GT(faults, 20);
  EXPECT_GT(old_sets, 10);
  EXPECT_GT(new_sets, 4);
}

INSTANTIATE_TEST_SUITE_P(AllFaults, FaultTest,
                         testing::Combine(testing::Values(Fault::kError, Fault::kErrorDone,
                                                          Fault::kErrorsOn, Fault::kKill),
                                          testing::Values(2, 3), testing::Bool()));

TEST_F(FileSetTest, TheFirstSaveIsThereAsAWholeOrNotAtAll) {
  int64_t whole = 0;
  for (int64_t at = 1;; ++at) {
    const std::string base = base_ + std::to_string(at);
    FaultyFileSystem faulty(at, Fault::kErrorsOn);
    const bool failed = !Save(&faulty, base, 2, "new").ok();
    if (faulty.calls() < at) break;
    std::string content;
    int64_t n = 0;
    const Status status = Load(&disk_, base, &n, &content);
    whole += status.ok();
    if (status.ok()) {
      EXPECT_EQ(content, "new");
    } else {
      EXPECT_TRUE(failed);
      EXPECT_EQ(status.code, StatusCode::kInvalidArgument) << status.message;
    }
  }
  EXPECT_GT(whole, 4);
}

TEST_F(FileSetTest, AFailedSaveRemovesItsFiles) {
  ASSERT_TRUE(Save(&disk_, base_, 2, "old").ok());
  const Strings before = folder_.Names();
  FaultyFileSystem faulty(8);
  EXPECT_FALSE(Save(&faulty, base_, 2, "new").ok());
  EXPECT_EQ(folder_.Names(), before);
}

TEST_F(FileSetTest, AFolderInTheWayIsFoundBeforeAnythingChanges) {
  ASSERT_TRUE(Save(&disk_, base_, 2, "old").ok());
  ASSERT_TRUE(disk_.Remove(base_ + "-00001-of-00002").ok());
  ASSERT_TRUE(disk_.MakeFolders(base_ + "-00001-of-00002").ok());
  const Status status = Save(&disk_, base_, 2, "new");
  EXPECT_NE(status.message.find("-00001-of-00002: a folder has this name"), std::string::npos);
  EXPECT_EQ(ReadFile(base_ + "-00000-of-00002"), "old0");
}

TEST_F(FileSetTest, DamageNamesFileAndSizes) {
  const auto expect = [&](StatusCode code, const Strings& parts) {
    const Status status = LoadError();
    EXPECT_EQ(status.code, code) << status.message;
    for (const std::string& part : parts) {
      EXPECT_NE(status.message.find(part), std::string::npos) << status.message;
    }
    ASSERT_TRUE(Save(&disk_, base_, 2, "good").ok());
  };
  ASSERT_TRUE(Save(&disk_, base_, 2, "good").ok());
  const std::string path = base_ + "-00001-of-00002", manifest = folder_ / ".set.manifest";

  WriteFile(path, "go");
  expect(StatusCode::kDataLoss, {path + " has 2 bytes", manifest + " says 5"});
  WriteFile(path, "");
  expect(StatusCode::kDataLoss, {path + " has 0 bytes", manifest + " says 5"});
  WriteFile(path, "good1 and more");
  expect(StatusCode::kDataLoss, {path + " has 14 bytes", manifest + " says 5"});
  WriteFile(path, "bad 1");
  expect(StatusCode::kDataLoss, {path + " has 5 bytes", "checksum"});
  ASSERT_TRUE(disk_.Rename(base_ + "-00000-of-00002", path).ok());
  WriteFile(base_ + "-00000-of-00002", "good1");
  expect(StatusCode::kDataLoss, {"-of-00002 has 5 bytes", "checksum"});
  ASSERT_TRUE(disk_.Remove(path).ok());
  expect(StatusCode::kInvalidArgument,
         {"Shard 1 doesn't show up for " + base_, path + " is missing", manifest, "5 bytes"});
  ASSERT_TRUE(disk_.Remove(base_ + ".meta-00001-of-00002").ok());
  expect(StatusCode::kInvalidArgument, {"Shard 1 doesn't show up for " + base_ + ".meta"});
  WriteFile(base_ + "-00002-of-00003", "foreign");
  expect(StatusCode::kInvalidArgument, {"-00002-of-00003 doesn't belong to", "7 bytes"});
  WriteFile(manifest, "monolith file set 1\n");
  expect(StatusCode::kDataLoss, {manifest, "remove it"});
}

TEST_F(FileSetTest, ACompleteSetWithoutManifestIsRead) {
  ASSERT_TRUE(Save(&disk_, base_, 3, "a").ok());
  ASSERT_TRUE(disk_.Remove(folder_ / ".set.manifest").ok());
  ExpectSet("a", 3);
  ASSERT_TRUE(disk_.Remove(base_ + "-00002-of-00003").ok());
  EXPECT_EQ(LoadError().message, "Shard 2 doesn't show up for " + base_);
  WriteFile(base_ + "-00000-of-00004", "");
  EXPECT_NE(LoadError().message.find("doesn't match nshards. "), std::string::npos);
}

TEST_F(FileSetTest, ASetCanBeMovedUnderAnotherName) {
  ASSERT_TRUE(Save(&disk_, base_, 2, "a").ok());
  for (const std::string& name : folder_.Names()) {
    std::string moved = name;
    moved.replace(moved.find("set"), 3, "moved");
    ASSERT_TRUE(disk_.Rename(folder_ / name, folder_ / moved).ok());
  }
  std::string content;
  int64_t n = 0;
  ASSERT_TRUE(Load(&disk_, folder_ / "moved", &n, &content).ok());
  EXPECT_EQ(content, "a");
}

TEST_F(FileSetTest, LeftoversOfAnInterruptedSaveGoAndNothingElse) {
  const Strings foreign = {"set-0000-of-00001", "set-x", "set-x-tmp-1",
                           "other-00000-of-00001-tmp-1", "set-00000-of-00001-tmp-x"};
  for (const std::string& name : foreign) WriteFile(folder_ / name, "foreign");
  WriteFile(folder_ / "set-00000-of-00002-tmp-123", "torn");
  WriteFile(folder_ / ".set.manifest-tmp-123", "torn");
  ASSERT_TRUE(Save(&disk_, base_, 1, "a").ok());
  const Strings names = folder_.Names();
  EXPECT_EQ(names.size(), foreign.size() + 3);
  for (const std::string& name : foreign) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  }
}

TEST_F(FileSetTest, NewFoldersAreMadeAndFilesMustBeClosed) {
  const std::string base = folder_ / "a/b/c/set";
  ASSERT_TRUE(Save(&disk_, base, 1, "x").ok());
  FileSetWriter set(&disk_, ShardedSetName(base, kKinds));
  std::unique_ptr<SetOutputFile> file;
  ASSERT_TRUE(set.Create(ShardSuffix("", 0, 1), &file).ok());
  EXPECT_EQ(set.Create(ShardSuffix("", 0, 1), &file).code, StatusCode::kInvalidArgument);
  EXPECT_EQ(set.Publish().code, StatusCode::kFailedPrecondition);
}

TEST_F(FileSetTest, ReadersBesideAWriterSeeOneSetAtATime) {
  ASSERT_TRUE(Save(&disk_, base_, 2, "first").ok());
  std::atomic<bool> stop{false};
  std::atomic<int64_t> good{0};
  std::thread writer([&] {
    // And on, until the reader has had a core: it may get none for longer than 60 saves take.
    for (int i = 0; i < 60 || (good == 0 && i < 100000); ++i) {
      EXPECT_TRUE(Save(&disk_, base_, 1 + i % 3, std::string(1 + i % 7, 'x')).ok());
    }
    stop = true;
  });
  while (!stop) {
    std::string content;
    int64_t n = 0;
    const Status status = Load(&disk_, base_, &n, &content);
    // Five replaced sets in a row are an error, never a mix.
    if (status.ok()) ++good;
    EXPECT_EQ(status.message.find("a mix"), std::string::npos) << status.message;
  }
  writer.join();
  EXPECT_GT(good, 0);
}

TEST_F(FileSetTest, SavesAtOnceOfOnePlaceDoNotMix) {
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(Save(&disk_, base_, 1 + t % 2, "writer " + std::to_string(t)).ok());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_TRUE(LoadError().ok()) << LoadError().message;
  EXPECT_LE(folder_.Names().size(), 5u);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
