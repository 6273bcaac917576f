#include "monolith/native_training/runtime/base/dynamic_library.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace monolith {
namespace engine {
namespace {

TEST(DynamicLibrary, OpensTheFirstThatIsThere) {
  DynamicLibrary library;
  std::string error;
  ASSERT_TRUE(library.Open({"/no/such/library.so", "libc.so.6"}, &error)) << error;
  EXPECT_EQ(library.path(), "libc.so.6");
  int (*absolute)(int) = nullptr;
  ASSERT_TRUE(library.Find("abs", &absolute, &error)) << error;
  EXPECT_EQ(absolute(-3), 3);
  EXPECT_FALSE(library.Find("no_such_function", &absolute, &error));
  EXPECT_EQ(error, "libc.so.6 has no function no_such_function");
}

TEST(DynamicLibrary, SaysWhyEachCannotBeOpened) {
  DynamicLibrary library;
  std::string error;
  EXPECT_FALSE(library.Open({"/no/a.so", "/no/b.so"}, &error));
  EXPECT_NE(error.find("/no/a.so"), std::string::npos) << error;
  EXPECT_NE(error.find("/no/b.so"), std::string::npos) << error;
  void (*function)() = nullptr;
  EXPECT_FALSE(library.Find("abs", &function, &error));
}

TEST(DynamicLibrary, FindsFolders) {
  static const int here = 0;
  const std::string folder = FolderOfCode(&here);
  ASSERT_FALSE(folder.empty());
  EXPECT_EQ(folder[0], '/');
  const std::vector<std::string> files = MatchingPaths(folder + "/dynamic_library_t*");
  // Builds leave other files beside the program.
  EXPECT_EQ(std::count(files.begin(), files.end(), folder + "/dynamic_library_test"), 1);
  EXPECT_TRUE(MatchingPaths(folder + "/no_such_*").empty());
}

}  // namespace
}  // namespace engine
}  // namespace monolith
