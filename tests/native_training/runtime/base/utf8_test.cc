#include "monolith/native_training/runtime/base/utf8.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace monolith {
namespace engine {
namespace {

TEST(Utf8, TellsTextFromBytes) {
  for (const std::string_view text : {"", "plain", "\xC3\xA9", "\xE2\x82\xAC uro",
                                      "\xF0\x9F\x99\x82", "\xED\x9F\xBF", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
  }
  EXPECT_TRUE(IsUtf8(std::string_view("a\0b", 3)));
  for (const std::string_view bytes :
       {"\x80", "\xC3", "\xC0\xAF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "good until \xE2\x82", "\xC3(rest)"}) {
    EXPECT_FALSE(IsUtf8(bytes)) << std::string(bytes);
  }
}

TEST(Utf8, MeasuresTheFirstCharacter) {
  EXPECT_EQ(Utf8Length("ab"), 1u);
  EXPECT_EQ(Utf8Length("\xC3\xA9rest"), 2u);
  EXPECT_EQ(Utf8Length("\xE2\x82\xAC"), 3u);
  EXPECT_EQ(Utf8Length("\xF0\x9F\x99\x82"), 4u);
  EXPECT_EQ(Utf8Length("\xE2\x82"), 0u);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
