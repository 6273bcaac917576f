#include "monolith/native_training/runtime/data/city_hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "monolith/native_training/runtime/data/fid_hash.h"

namespace monolith {
namespace data {
namespace {

// Byte i of the text of size n is (7 i + n) mod 256; the hashes are those of the published library.
TEST(CityHashTest, HashesTextOfAllSizes) {
  const std::pair<int, uint64_t> hashes[] = {
      {0, 11160318154034397263u},    {1, 5161771770385946686u},    {2, 17348493801328108482u},
      {3, 4662423180930907492u},     {4, 13909349088106176104u},   {7, 17233423938440663304u},
      {8, 12627020141284786728u},    {9, 15889908196168497750u},   {15, 3575310498258597009u},
      {16, 9887023220782602712u},    {17, 16960068419638019727u},  {24, 6496452274876097831u},
      {31, 12025085129596068594u},   {32, 3992320350721670009u},   {33, 12482478972972687260u},
      {48, 10446493350514660431u},   {63, 549729227645870547u},    {64, 15681028830762353462u},
      {65, 9151540674994615000u},    {100, 478520425015519308u},   {127, 5027900085347398389u},
      {128, 54597262119586629u},     {129, 13671648063540323012u}, {192, 10193231639893960120u},
      {1000, 12688828476422871537u},
  };
  for (const auto& [size, hash] : hashes) {
    std::string text;
    for (int i = 0; i < size; ++i) text.push_back(static_cast<char>((7 * i + size) % 256));
    EXPECT_EQ(CityHash64(text), hash) << size;
  }
}

TEST(CityHashTest, HashesNumbersAsTheirBytes) {
  for (const uint64_t number : {uint64_t{0}, uint64_t{185}, ~uint64_t{0} - 12345}) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
    EXPECT_EQ(CityHash64(bytes), HashNumber(number));
  }
}

}  // namespace
}  // namespace data
}  // namespace monolith
