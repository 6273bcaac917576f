// Contiguous runs of memory of any size, cut from chunks of huge pages.
//
//   chunk (2, 4, ... 32 MiB, or as large as one run needs)
//   +---------+------+-------------+------- - - -+
//   | run     | free | run         | untouched   |
//   +---------+------+-------------+------- - - -+
//   4 KiB granularity; neighbouring free runs are merged
//
// The indexes of all shards of a table live here back to back: every one is contiguous and on huge
// pages, and none wastes the rest of a huge page. Shards grow one after another in a fixed rhythm,
// so what one gives back is soon taken by the next and is kept for it; when more than a small part
// of what is in use lies idle, whole huge pages inside free runs go back to the system. Best fit (a
// first fit leaves 5% more holes); the pool is called once per growth, never per id. Thread-safe;
// throws nothing, and giving back needs no memory.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_RUN_POOL_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_RUN_POOL_H_

#include <cstdint>
#include <mutex>
#include <vector>

namespace monolith {
namespace engine {

class RunPool {
 public:
  RunPool() = default;
  ~RunPool();
  RunPool(const RunPool&) = delete;
  RunPool& operator=(const RunPool&) = delete;

  // Memory aligned to 4 KiB, of unspecified content, or null when the system has none left.
  char* Allocate(int64_t bytes) { return AllocateWithin(bytes, bytes, &bytes); }
  // The same for a caller that can use more: sets *bytes to a multiple of 4 KiB that is >=
  // min_bytes, and not above max_bytes unless min_bytes has to be rounded up. A hole of such a size
  // is taken as a whole, which leaves no small ones: they were a fifth of all memory.
  char* AllocateWithin(int64_t min_bytes, int64_t max_bytes, int64_t* bytes);
  // The same, but the content is zeros, and memory comes only as they are overwritten.
  char* AllocateZeros(int64_t bytes);
  // `run` came from one of these, with as many bytes.
  void Free(char* run, int64_t bytes);

  int64_t bytes_in_use() const;
  // Memory that the system has given for runs that were written to, and that was not given back.
  int64_t bytes_held() const;

 private:
  struct Run {
    char* begin;
    int64_t bytes;
    char* end() const { return begin + bytes; }
  };
  // mutex held, all of them.
  bool MakeRoom();
  char* TakeFree(int64_t min_bytes, int64_t max_bytes, int64_t* bytes);
  char* TakeNew(int64_t bytes);
  void AddFree(char* run, int64_t bytes);
  void ReleaseFree();
  bool AddChunk(int64_t min_bytes);
  // Commits pages for what comes after a run of this many bytes: shards grow in turn, so the next
  // one is about as long, and many short ones follow each other.
  void PopulateAhead(int64_t bytes);

  mutable std::mutex mutex_;
  std::vector<Run> chunks_;
  // By address. Between two free runs lies one in use or the end of a chunk, so its capacity can be
  // had in advance.
  std::vector<Run> free_;
  int64_t runs_in_use_ = 0;
  Run next_chunk_ = {nullptr, 0};  // mapped ahead of its use
  char* next_ = nullptr;           // untouched rest of the newest chunk
  char* end_ = nullptr;
  int64_t populated_ = 0;  // bytes of the newest chunk for which that was asked
  int64_t next_chunk_bytes_ = int64_t{2} << 20;
  int64_t in_use_ = 0;
  int64_t kept_ = 0;  // at most this many bytes of free runs are committed, edges of pages aside
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_ALLOCATOR_RUN_POOL_H_
