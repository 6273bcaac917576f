#include "monolith/native_training/runtime/base/install_line.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <string>

namespace monolith {
namespace engine {
namespace {

TEST(InstallLine, NamesTheCheckoutOrTheDistribution) {
  std::string root = ::testing::TempDir() + "install_line_XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  const std::string package = root + "/monolith";
  EXPECT_EQ(InstallLineFor(package + "/native_training", "kafka"),
            "pip install 'monolith-recsys[kafka]'");

  FILE* const file = fopen((root + "/pyproject.toml").c_str(), "w");
  ASSERT_NE(file, nullptr);
  fclose(file);

  EXPECT_EQ(InstallLineFor(package + "/native_training", "kafka"), "pip install '.[kafka]'");
  EXPECT_EQ(InstallLineFor(package, "kafka"), "pip install '.[kafka]'");
  EXPECT_EQ(InstallLineFor(root, "kafka"), "pip install 'monolith-recsys[kafka]'");
  EXPECT_EQ(InstallLineFor("", "kafka"), "pip install 'monolith-recsys[kafka]'");
}

}  // namespace
}  // namespace engine
}  // namespace monolith
