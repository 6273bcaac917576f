#include "monolith/native_training/runtime/allocator/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace monolith {
namespace engine {
namespace {

int64_t RoundUp(int64_t bytes) {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

bool HugePagesEnabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("MONOLITH_DISABLE_HUGE_PAGES");
    return value == nullptr || value[0] == '\0' || std::strcmp(value, "0") == 0;
  }();
  return enabled;
}

char* MapPages(int64_t bytes, int64_t small_page_bytes) {
  bytes = RoundUp(bytes);
  const size_t total = static_cast<size_t>(bytes + kHugePageBytes);
  void* raw = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
  const int64_t small = std::min(bytes, RoundUp(small_page_bytes));
  if (small > 0) madvise(pages, small, MADV_NOHUGEPAGE);
  if (small < bytes && HugePagesEnabled()) madvise(pages + small, bytes - small, MADV_HUGEPAGE);
  return pages;
}

void PromotePages(char* pages, int64_t bytes) {
  if (!HugePagesEnabled()) return;
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse = 25;  // Linux 6.1; older headers do not name it, older kernels refuse it
#endif
  madvise(pages, RoundUp(bytes), MADV_HUGEPAGE);
  madvise(pages, RoundUp(bytes), kCollapse);
}

void UnmapPages(char* pages, int64_t bytes) { munmap(pages, RoundUp(bytes)); }

}  // namespace engine
}  // namespace monolith
