// Large zeroed mappings, on huge pages where the system has them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_

#include <cstdint>

namespace monolith {
namespace engine {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// False when MONOLITH_DISABLE_HUGE_PAGES is set to anything but "" or "0".
bool HugePagesEnabled();

// Maps `bytes` (rounded up to 2 MiB) of zeros, aligned to 2 MiB. The first `small_page_bytes`
// (rounded up to 2 MiB) stay on small pages, which are committed 4 KiB at a time; the rest is
// advised to use huge pages. Null: no memory.
char* MapPages(int64_t bytes, int64_t small_page_bytes);

// Moves memory that MapPages left on small pages to huge ones; the content stays, and other threads
// may go on using it. Where the kernel cannot do so at once, it may later.
void PromotePages(char* pages, int64_t bytes);

void UnmapPages(char* pages, int64_t bytes);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_
