#include "monolith/native_training/runtime/files/manifest.h"

#include <gtest/gtest.h>

#include <random>

#include "monolith/native_training/runtime/base/crc32c.h"

namespace monolith {
namespace engine {
namespace {

Manifest Example() {
  Manifest manifest;
  manifest.token = 18446744073709551615u;
  manifest.files = {{"-00000-of-00002", 41000, 1000, 0x0badcafe}, {"-00001-of-00002", 0, 0, 0}};
  manifest.replaced = {"-00000-of-00001"};
  return manifest;
}

std::string WithEnd(const std::string& text) {
  char crc[16];
  std::snprintf(crc, sizeof(crc), "%08x", Crc32c(text.data(), static_cast<int64_t>(text.size())));
  return text + "end " + crc + "\n";
}

TEST(ManifestTest, TextIsWhatTheHeaderShows) {
  EXPECT_EQ(EncodeManifest(Example()), WithEnd("monolith file set 1\n"
                                               "token 18446744073709551615\n"
                                               "file -00000-of-00002 41000 1000 0badcafe\n"
                                               "file -00001-of-00002 0 0 00000000\n"
                                               "replaced -00000-of-00001\n"));
}

TEST(ManifestTest, DecodesWhatItEncodes) {
  Manifest read;
  ASSERT_TRUE(DecodeManifest(EncodeManifest(Example()), &read).ok());
  EXPECT_EQ(EncodeManifest(read), EncodeManifest(Example()));
}

TEST(ManifestTest, EveryCutAndEveryFlippedBitIsFound) {
  const std::string good = EncodeManifest(Example());
  Manifest read;
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(DecodeManifest(good.substr(0, size), &read).code, StatusCode::kDataLoss) << size;
  }
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      // Upper and lower case of the checksum's letters are the same number.
      EXPECT_TRUE(!DecodeManifest(bad, &read).ok() || (at + 9 >= good.size() && bit == 5)) << at;
    }
  }
  EXPECT_FALSE(DecodeManifest(good + "x", &read).ok());
}

TEST(ManifestTest, RefusesWhatLeadsElsewhereOrMakesNoSense) {
  const std::string head = "monolith file set 1\ntoken 1\n";
  Manifest read;
  ASSERT_TRUE(DecodeManifest(WithEnd(head + "file -a 1 1 0\n"), &read).ok());
  for (const char* line :
       {"file /../a 1 1 0\n", "file  1 1 0\n", "file -a -1 1 0\n", "file -a 1 -1 0\n",
        "file -a 1 1\n", "file -a 1 1 0 0\n", "file -a 1 1 0\nfile -a 1 1 0\n",
        "file -a 99999999999999999999 1 0\n", "replaced ../a\n", "other 1\n", "\n"}) {
    EXPECT_EQ(DecodeManifest(WithEnd(head + line), &read).code, StatusCode::kDataLoss) << line;
  }
  EXPECT_NE(DecodeManifest(WithEnd("monolith file set 2\n"), &read).message.find("format 2"),
            std::string::npos);
}

TEST(ManifestTest, RandomBytesAreRefused) {
  std::mt19937 random(1);
  Manifest read;
  for (int i = 0; i < 10000; ++i) {
    std::string text = i % 2 == 0 ? "monolith file set 1\n" : "";
    for (int n = static_cast<int>(random() % 100); n > 0; --n) {
      text.push_back(static_cast<char>(random() % 4 == 0 ? '\n' : random()));
    }
    EXPECT_FALSE(DecodeManifest(text, &read).ok());
  }
}

}  // namespace
}  // namespace engine
}  // namespace monolith
