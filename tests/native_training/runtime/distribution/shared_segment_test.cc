#include "monolith/native_training/runtime/distribution/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace monolith {
namespace distribution {
namespace {

using ::monolith::engine::StatusCode;

StatusCode CodeOfOpening(const SegmentTicket& ticket) {
  std::unique_ptr<SegmentView> view;
  return OpenSegment(ticket, &view).code;
}

// Maps of this process whose line has `text`.
int CountMaps(const std::string& text) {
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(fopen("/proc/self/maps", "r"), fclose);
  char line[4096];
  int count = 0;
  while (fgets(line, sizeof(line), maps.get()) != nullptr) {
    count += std::strstr(line, text.c_str()) != nullptr;
  }
  return count;
}

TEST(SharedSegmentTest, IsFreeAgainWhenTheReaderIsDone) {
  const std::unique_ptr<Segment> segment = Segment::Create(100);
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(segment->capacity(), 100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->data()) % 64, 0u);
  for (const char* const text : {"one", "another"}) {
    EXPECT_TRUE(segment->IsFree());
    std::strcpy(segment->data(), text);
    const SegmentTicket ticket = segment->Send(10);
    EXPECT_FALSE(segment->IsFree());
    std::unique_ptr<SegmentView> view;
    ASSERT_TRUE(OpenSegment(ticket, &view).ok());
    EXPECT_EQ(view->size(), 10);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view->data()) % 64, 0u);
    EXPECT_STREQ(view->data(), text);
    EXPECT_FALSE(segment->IsFree());
  }
  EXPECT_TRUE(segment->IsFree());
}

TEST(SharedSegmentTest, AnotherProcessReadsIt) {
  const std::unique_ptr<Segment> segment = Segment::Create(1 << 20);
  ASSERT_NE(segment, nullptr);
  std::memset(segment->data(), 7, 1 << 20);
  const SegmentTicket ticket = segment->Send(1 << 20);
  const pid_t child = fork();
  if (child == 0) {
    // The file itself, not the copy that a fork inherits.
    close(static_cast<int>(ticket.fd));
    std::unique_ptr<SegmentView> view;
    const bool is_read = OpenSegment(ticket, &view).ok() && view->data()[(1 << 20) - 1] == 7;
    view.reset();
    _exit(is_read ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(segment->IsFree());
}

TEST(SharedSegmentTest, ATicketIsGoodForOnce) {
  const std::unique_ptr<Segment> segment = Segment::Create(10);
  ASSERT_NE(segment, nullptr);
  const SegmentTicket first = segment->Send(10);
  EXPECT_EQ(CodeOfOpening(first), StatusCode::kOk);
  EXPECT_EQ(CodeOfOpening(first), StatusCode::kInvalidArgument);
  const SegmentTicket second = segment->Send(10);
  EXPECT_EQ(CodeOfOpening(first), StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOfOpening(second), StatusCode::kOk);
}

TEST(SharedSegmentTest, RefusesWhatIsNoTicket) {
  const std::unique_ptr<Segment> segment = Segment::Create(10);
  ASSERT_NE(segment, nullptr);
  const SegmentTicket good = segment->Send(10);
  for (int i = 0; i < 5; ++i) {
    SegmentTicket bad = good;
    (i == 0 ? bad.pid : i == 1 ? bad.fd : i == 2 ? bad.turn : bad.size) = i == 3 ? 11 : -1;
    EXPECT_EQ(CodeOfOpening(bad), StatusCode::kInvalidArgument) << i;
  }
  EXPECT_EQ(CodeOfOpening({}), StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOfOpening(good), StatusCode::kOk);
}

TEST(SharedSegmentTest, RefusesOtherFiles) {
  SegmentTicket ticket{getpid(), 1 << 20, 1, 1, 0};  // none at all
  EXPECT_EQ(CodeOfOpening(ticket), StatusCode::kUnavailable);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ticket.fd = ends[0];
  EXPECT_EQ(CodeOfOpening(ticket), StatusCode::kUnavailable);
  close(ends[0]);
  close(ends[1]);
  // This one has the right name, but it may be cut, which would kill a reader.
  ticket.fd = memfd_create("monolith_parcel", 0);
  ASSERT_GE(ticket.fd, 0);
  ASSERT_EQ(ftruncate(static_cast<int>(ticket.fd), 4096), 0);
  EXPECT_EQ(CodeOfOpening(ticket), StatusCode::kUnavailable);
  close(static_cast<int>(ticket.fd));

  const std::unique_ptr<Segment> segment = Segment::Create(10);
  ASSERT_NE(segment, nullptr);
  ticket = segment->Send(10);
  ticket.nonce ^= 1;  // of a segment that was there before
  EXPECT_EQ(CodeOfOpening(ticket), StatusCode::kUnavailable);
}

TEST(SharedSegmentTest, AViewOutlivesItsSegment) {
  std::unique_ptr<Segment> segment = Segment::Create(10);
  ASSERT_NE(segment, nullptr);
  std::strcpy(segment->data(), "here");
  std::unique_ptr<SegmentView> view;
  ASSERT_TRUE(OpenSegment(segment->Send(10), &view).ok());
  segment.reset();
  EXPECT_STREQ(view->data(), "here");
}

TEST(SharedSegmentTest, SegmentsThatAreGivenUpAreUnmapped) {
  for (int i = 0; i < 20; ++i) {
    const std::unique_ptr<Segment> segment = Segment::Create(10);
    ASSERT_NE(segment, nullptr);
    ASSERT_EQ(CodeOfOpening(segment->Send(10)), StatusCode::kOk);
  }
  EXPECT_LE(CountMaps("monolith_parcel"), 1);
}

TEST(SharedSegmentTest, RefusesImpossibleSizes) {
  EXPECT_EQ(Segment::Create(-1), nullptr);
  EXPECT_EQ(Segment::Create(INT64_MAX), nullptr);
  EXPECT_NE(Segment::Create(0), nullptr);
}

}  // namespace
}  // namespace distribution
}  // namespace monolith
