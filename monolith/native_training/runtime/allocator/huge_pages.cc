#include "monolith/native_training/runtime/allocator/huge_pages.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace monolith {
namespace engine {
namespace {

char* Map(int64_t bytes, int protection, PageSize size) {
  bytes = RoundUp(bytes, kHugePageBytes);
  const size_t total = static_cast<size_t>(bytes + kHugePageBytes);
  void* raw = mmap(nullptr, total, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  // Cut the mapping down to an aligned piece.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = begin + total;
  if (aligned > begin) munmap(raw, aligned - begin);
  if (end > aligned + bytes) {
    munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  }
  char* pages = reinterpret_cast<char*>(aligned);
  // Advice only: a kernel without transparent huge pages still gives memory.
  if (size == PageSize::kSmall) {
    UseSmallPages(pages, bytes);
  } else if (HugePagesEnabled()) {
    madvise(pages, bytes, MADV_HUGEPAGE);
  }
  return pages;
}

}  // namespace

bool HugePagesEnabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("MONOLITH_DISABLE_HUGE_PAGES");
    return value == nullptr || value[0] == '\0' || std::strcmp(value, "0") == 0;
  }();
  return enabled;
}

int64_t MachineMemoryBytes() {
  struct sysinfo info = {};
  if (sysinfo(&info) != 0) return std::numeric_limits<int64_t>::max();
  return (static_cast<int64_t>(info.totalram) + static_cast<int64_t>(info.totalswap)) *
         static_cast<int64_t>(info.mem_unit);
}

char* MapPages(int64_t bytes, PageSize size) { return Map(bytes, PROT_READ | PROT_WRITE, size); }

char* ReservePages(int64_t bytes, PageSize size) { return Map(bytes, PROT_NONE, size); }

bool CommitPages(char* begin, int64_t bytes) {
  return mprotect(begin, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) == 0;
}

void ReleasePages(char* begin, int64_t bytes) {
  madvise(begin, static_cast<size_t>(bytes), MADV_DONTNEED);
}

int64_t ResidentBytes(char* begin, int64_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  int64_t resident = 0;
  for (int64_t at = 0; at < bytes; at += kHugePageBytes) {
    unsigned char present = 0;
    if (mincore(begin + at, page, &present) == 0 && (present & 1) != 0) {
      resident += std::min(kHugePageBytes, bytes - at);
    }
  }
  return resident;
}

void UseSmallPages(char* begin, int64_t bytes) {
  madvise(begin, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
}

void PromotePages(char* pages, int64_t bytes) {
  if (!HugePagesEnabled()) return;
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse = 25;  // Linux 6.1; older headers do not name it, older kernels refuse it
#endif
  madvise(pages, RoundUp(bytes, kHugePageBytes), MADV_HUGEPAGE);
  madvise(pages, RoundUp(bytes, kHugePageBytes), kCollapse);
}

void UnmapPages(char* pages, int64_t bytes) { munmap(pages, RoundUp(bytes, kHugePageBytes)); }

}  // namespace engine
}  // namespace monolith
