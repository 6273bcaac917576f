#include "monolith/native_training/runtime/data/quantized_floats.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace monolith {
namespace data {
namespace {

std::string Half(float value) {
  const uint16_t bits = engine::FloatToHalf(value);
  return std::string(reinterpret_cast<const char*>(&bits), 2);
}

TEST(QuantizedFloatsTest, FewFloatsAreHalves) {
  const std::string bytes = "UE_QTZ" + Half(1.5f) + Half(-2.0f);
  std::vector<float> out(2);
  ASSERT_TRUE(Dequantize(bytes, 2, out.data()));
  EXPECT_EQ(out, (std::vector<float>{1.5f, -2.0f}));
}

TEST(QuantizedFloatsTest, ManyFloatsAreSteps) {
  const std::string bytes =
      "UE_QTZ" + Half(-1.0f) + Half(1.0f) + std::string("\x00\xff\x33\x66\x99", 5);
  std::vector<float> out(5);
  ASSERT_TRUE(Dequantize(bytes, 5, out.data()));
  const std::vector<float> expected = {-1.0f, 1.0f, -0.6f, -0.2f, 0.2f};
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(out[i], expected[i], 1e-6f);
}

TEST(QuantizedFloatsTest, RejectsOtherSizesAndTags) {
  float out[8];
  EXPECT_FALSE(Dequantize("UE_QTZ", 1, out));
  EXPECT_FALSE(Dequantize("UE_QT", 1, out));
  EXPECT_FALSE(Dequantize("UE_XYZab", 1, out));
  EXPECT_FALSE(Dequantize("UE_QTZabc", 1, out));
  EXPECT_FALSE(Dequantize("UE_QTZ" + std::string(8, 'a'), 5, out));
  EXPECT_FALSE(Dequantize("UE_QTZ", 0, out));
}

}  // namespace
}  // namespace data
}  // namespace monolith
