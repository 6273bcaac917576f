#include "monolith/native_training/runtime/concurrency/room_lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace monolith {
namespace engine {
namespace {

TEST(RoomLockTest, AWaitingWriterClosesTheReadRoom) {
  RoomLock lock;
  ASSERT_TRUE(lock.TryEnterRead());
  ASSERT_TRUE(lock.TryEnterRead());
  std::atomic<bool> inside{false};
  std::thread writer([&] {
    const WriteRoom room(&lock);
    inside = true;
  });
  // The writer is waiting as soon as readers are turned away.
  while (lock.TryEnterRead()) {
    lock.LeaveRead();
    std::this_thread::yield();
  }
  EXPECT_FALSE(inside);
  lock.LeaveRead();
  EXPECT_FALSE(inside);
  lock.LeaveRead();
  writer.join();
  EXPECT_TRUE(inside);
  EXPECT_TRUE(ReadRooms(1).TryEnter(&lock));
}

TEST(RoomLockTest, WritersShareTheirRoom) {
  RoomLock lock;
  const WriteRoom one(&lock);
  const WriteRoom two(&lock);
  EXPECT_FALSE(ReadRooms(1).TryEnter(&lock));
}

// A thread that arrives while a writer waits leaves the cores to the readers being waited for.
TEST(RoomLockTest, AClosedRoomIsDecidedWhenItsReadersAreGone) {
  RoomLock lock;
  lock.AwaitDecision();  // open
  ASSERT_TRUE(lock.TryEnterRead());
  lock.AwaitDecision();  // still open
  std::thread writer([&] { lock.EnterWrite(); });
  while (lock.TryEnterRead()) {
    lock.LeaveRead();
    std::this_thread::yield();
  }
  std::atomic<bool> left{false};
  bool left_before = false;
  std::thread reader([&] {
    lock.AwaitDecision();
    left_before = left;
  });
  left = true;
  lock.LeaveRead();
  reader.join();
  EXPECT_TRUE(left_before);
  writer.join();
  lock.AwaitDecision();  // the writer is in
  EXPECT_FALSE(lock.TryEnterRead());
  lock.LeaveWrite();
}

TEST(RoomLockTest, WritersKnowOfEachOther) {
  RoomLock lock;
  const WriteRoom one(&lock);
  EXPECT_FALSE(lock.HasOtherWriters());
  {
    const WriteRoom two(&lock);
    EXPECT_TRUE(lock.HasOtherWriters());
  }
  EXPECT_FALSE(lock.HasOtherWriters());
}

TEST(RoomLockTest, ReadersAndWritersNeverMeet) {
  RoomLock lock;
  std::atomic<int> readers{0}, writers{0}, meetings{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        if (t < 2) {
          ReadRooms rooms(1);
          if (!rooms.TryEnter(&lock)) continue;
          ++readers;
          meetings += writers != 0;
          --readers;
        } else {
          const WriteRoom room(&lock);
          ++writers;
          meetings += readers != 0;
          --writers;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(meetings, 0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
