// Tells peers that read too slowly from others, on a clock of the test's own.
#include "monolith/serving/native/net/read_pace.h"

#include <gtest/gtest.h>

namespace monolith {
namespace serving {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

TEST(ReadPaceTest, APeerThatTakesALittleNowAndThenIsTooSlow) {
  const ReadPace::TimePoint start{};
  ReadPace pace;
  EXPECT_FALSE(pace.IsTooSlow(start + minutes(100)));

  pace.Begin(start);
  for (int i = 1; i <= 6; ++i) {
    EXPECT_FALSE(pace.IsTooSlow(start + seconds(10 * i)));
    pace.Take(4096);
    pace.Begin(start + seconds(10 * i));  // it still waits
  }

  EXPECT_TRUE(pace.IsTooSlow(start + seconds(61)));
  EXPECT_FALSE(pace.IsTooLong(start + seconds(61)));
}

TEST(ReadPaceTest, APeerThatReadsOnHasItsTime) {
  const ReadPace::TimePoint start{};
  ReadPace pace;
  pace.Begin(start);
  pace.Take(300 << 20);  // 1,200 s of reading, and a minute

  EXPECT_FALSE(pace.IsTooSlow(start + minutes(20)));
  EXPECT_TRUE(pace.IsTooLong(start + minutes(20)));
  EXPECT_TRUE(pace.IsTooSlow(start + minutes(22)));
}

TEST(ReadPaceTest, OutputThatWasTakenBeginsAnew) {
  const ReadPace::TimePoint start{};
  ReadPace pace;
  pace.Begin(start);
  pace.End();

  EXPECT_FALSE(pace.IsTooSlow(start + minutes(100)));
  pace.Begin(start + minutes(100));
  EXPECT_FALSE(pace.IsTooSlow(start + minutes(101)));
  EXPECT_TRUE(pace.IsTooSlow(start + minutes(102)));
}

}  // namespace
}  // namespace serving
}  // namespace monolith
