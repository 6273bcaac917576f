// Large zeroed mappings, on huge pages where the system has them.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_

#include <cstdint>

namespace monolith {
namespace engine {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// kSmall is committed 4 KiB at a time, kHuge 2 MiB at a time where the system has huge pages.
enum class PageSize { kSmall, kHuge };

// The smallest multiple of `grain` that is not below `bytes`.
constexpr int64_t RoundUp(int64_t bytes, int64_t grain) {
  return (bytes + grain - 1) / grain * grain;
}

// False when MONOLITH_DISABLE_HUGE_PAGES is set to anything but "" or "0".
bool HugePagesEnabled();

// Main memory and swap space of this machine.
int64_t MachineMemoryBytes();

// Maps `bytes` (rounded up to 2 MiB) of zeros, aligned to 2 MiB. Null: no memory.
char* MapPages(int64_t bytes, PageSize size);

// The same without memory behind it: address space only, which neither strict overcommit nor a
// limit on data counts. CommitPages makes it usable.
char* ReservePages(int64_t bytes, PageSize size);

// Makes [begin, begin + bytes) of what ReservePages returned readable and writable; both are
// multiples of 2 MiB. False: the system refuses so much memory, nothing changed.
bool CommitPages(char* begin, int64_t bytes);

// Gives memory back to the system; it reads as zeros from now on. `begin` and `bytes` are multiples
// of 2 MiB.
void ReleasePages(char* begin, int64_t bytes);

// How much of [begin, begin + bytes) has memory, judged by the first page of every 2 MiB. `begin`
// is a multiple of 2 MiB.
int64_t ResidentBytes(char* begin, int64_t bytes);

// Lets [begin, begin + bytes), which was not written to yet, take memory 4 KiB at a time. Both are
// multiples of 2 MiB.
void UseSmallPages(char* begin, int64_t bytes);

// Moves memory that lies on small pages to huge ones; the content stays, and other threads may go
// on using it. Where the kernel cannot do so at once, it may later.
void PromotePages(char* pages, int64_t bytes);

// `pages` came from MapPages(bytes) or ReservePages(bytes).
void UnmapPages(char* pages, int64_t bytes);

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_HUGE_PAGES_H_
