#include "monolith/native_training/runtime/concurrency/cpu_placement.h"

#include <gtest/gtest.h>

#include <thread>

namespace monolith {
namespace engine {
namespace {

#if defined(__linux__)

cpu_set_t Allowed() {
  cpu_set_t allowed;
  EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  return allowed;
}

TEST(CpuPlacementTest, RunsWhereItMay) {
  const cpu_set_t allowed = Allowed();
  const int cpu = CurrentCpu();
  ASSERT_GE(cpu, 0);
  EXPECT_TRUE(CPU_ISSET(cpu, &allowed));
}

TEST(CpuPlacementTest, LeavingChangesNothingButThePlace) {
  const cpu_set_t allowed = Allowed();
  for (const int cpu : {CurrentCpu(), -1, 0, CPU_SETSIZE - 1, CPU_SETSIZE, 1 << 30}) {
    LeaveCpu(cpu);
    const cpu_set_t after = Allowed();
    EXPECT_TRUE(CPU_EQUAL(&after, &allowed)) << cpu;
  }
}

TEST(CpuPlacementTest, StaysWhereThereIsNoOther) {
  std::thread([] {
    const int cpu = CurrentCpu();
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    ASSERT_EQ(sched_setaffinity(0, sizeof(only), &only), 0);
    LeaveCpu(cpu);
    EXPECT_EQ(CurrentCpu(), cpu);
    const cpu_set_t after = Allowed();
    EXPECT_TRUE(CPU_EQUAL(&after, &only));
  }).join();
}

#else

TEST(CpuPlacementTest, NothingIsKnownElsewhere) {
  EXPECT_EQ(CurrentCpu(), -1);
  LeaveCpu(0);
}

#endif

}  // namespace
}  // namespace engine
}  // namespace monolith
