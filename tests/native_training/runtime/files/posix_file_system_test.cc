#include "monolith/native_training/runtime/files/posix_file_system.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/native_training/runtime/files/faulty_file_system.h"

namespace monolith {
namespace engine {
namespace {

TEST(PosixFileSystemTest, WritesReadsRenamesListsAndRemoves) {
  TestFolder folder;
  PosixFileSystem files;
  WriteFile(folder / "a", "hello");
  EXPECT_EQ(ReadFile(folder / "a"), "hello");
  ASSERT_TRUE(files.Rename(folder / "a", folder / "b").ok());
  EXPECT_EQ(folder.Names(), (std::vector<std::string>{"b"}));
  ASSERT_TRUE(files.Sync(folder / "b").ok());
  ASSERT_TRUE(files.Sync(folder.path()).ok());
  ASSERT_TRUE(files.Remove(folder / "b").ok());
  EXPECT_TRUE(folder.Names().empty());
}

TEST(PosixFileSystemTest, WhatIsMissingIsNotFoundAndNamed) {
  TestFolder folder;
  PosixFileSystem files;
  const std::string path = folder / "no/such";
  std::unique_ptr<InputFile> input;
  std::unique_ptr<OutputFile> output;
  std::vector<std::string> names;
  int64_t bytes;
  bool is_folder;
  for (const Status& status :
       {files.Open(path, &input), files.Create(path, &output), files.GetSize(path, &bytes),
        files.IsFolder(path, &is_folder), files.Rename(path, folder / "x"), files.Remove(path),
        files.List(path, &names), files.Sync(path)}) {
    EXPECT_EQ(status.code, StatusCode::kNotFound) << status.message;
    EXPECT_NE(status.message.find(path), std::string::npos) << status.message;
  }
}

TEST(PosixFileSystemTest, ReadsInPiecesUpToTheEnd) {
  TestFolder folder;
  WriteFile(folder / "a", "hello");
  PosixFileSystem files;
  std::unique_ptr<InputFile> input;
  ASSERT_TRUE(files.Open(folder / "a", &input).ok());
  char bytes[4];
  int64_t read = 0;
  ASSERT_TRUE(input->Read(4, bytes, &read).ok());
  EXPECT_EQ(read, 4);
  ASSERT_TRUE(input->Read(4, bytes, &read).ok());
  EXPECT_EQ(read, 1);
  ASSERT_TRUE(input->Read(4, bytes, &read).ok());
  EXPECT_EQ(read, 0);
}

TEST(PosixFileSystemTest, MakesFoldersAndRefusesFilesInTheWay) {
  TestFolder folder;
  PosixFileSystem files;
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(files.MakeFolders(folder / "a/b/c").ok());
  bool is_folder = false;
  ASSERT_TRUE(files.IsFolder(folder / "a/b/c", &is_folder).ok());
  EXPECT_TRUE(is_folder);
  WriteFile(folder / "file", "");
  const Status status = files.MakeFolders(folder / "file/x");
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message.find(folder / "file"), std::string::npos) << status.message;
}

TEST(PosixFileSystemTest, ReadingAFolderIsAnError) {
  TestFolder folder;
  PosixFileSystem files;
  std::unique_ptr<InputFile> input;
  ASSERT_TRUE(files.Open(folder.path(), &input).ok());
  char byte;
  int64_t read = 0;
  EXPECT_EQ(input->Read(1, &byte, &read).code, StatusCode::kFailedPrecondition);
}

TEST(PosixFileSystemTest, PathsAreTakenApart) {
  EXPECT_EQ(FolderOf("a/b"), "a");
  EXPECT_EQ(FolderOf("/b"), "/");
  EXPECT_EQ(FolderOf("b"), ".");
  EXPECT_EQ(FolderOf("hdfs://host/a/b"), "hdfs://host/a");
  EXPECT_EQ(NameOf("a/b"), "b");
  EXPECT_EQ(NameOf("b"), "b");
  EXPECT_EQ(SiblingOf("a/b", ".c"), "a/.c");
  EXPECT_EQ(SiblingOf("b", ".c"), ".c");
}

}  // namespace
}  // namespace engine
}  // namespace monolith
