// The memory of a table's rows, in blocks.
//
//   region 0        region 1        region 2                        region k
//   [0, R)          [R, 2R)         [2R, 4R)              ...       [R 2^(k-1), R 2^k)
//   +--+--+- -+--+  +--+--+- -+--+  +--+--+- - - -+--+--+
//   |b0|b1|   |  |  |  |  |   |  |  |  |  |       |  |  |
//   +--+--+- -+--+  +--+--+- -+--+  +--+--+- - - -+--+--+
//   small pages     huge pages, 2 MiB aligned
//
//   block: rows of one shard, about 32 KiB; number of a block = row / rows of a block
//   row: values, then state of every segment (row_layout.h)
//
// Row numbers are unique in the table. address = bases[leading zeros of the row number, at most
// those of R - 1] + row * stride, where a base is that of its region less the bytes of all rows
// before it. So a table of any size has one cost, without a branch: the list of 32 bases stays in
// the first-level cache. (A list of chunks cost 13 ns per id, more than the cache miss itself.)
//
// Region 0 has a block for every shard, about 2 MiB, so that thousands of small tables fit into the
// address space; from then on every region doubles it. Regions are address space, made usable in
// steps as rows are handed out, so that strict overcommit counts what is used. Where not even
// address space is left (ulimit -v) a region has fewer rows, and the numbers of the others are
// lost.
//
// Shards take blocks in the order in which they grow: huge pages fill up front to back, so a table
// of any size wastes a partly used huge page and the few that are committed ahead of their use
// (page_populator.h), and page faults spread evenly over batches. A region is mapped, with its
// first page, while the one before it still has rows. The first block of every shard
// lies on small pages, so that a table with a handful of rows costs kilobytes, until the first of
// them is full. So does the end of a region that fills no huge page.
//
// Blocks that come back are handed out again first, to any shard. A huge page all of whose blocks
// are back goes back to the system; region 0, which has row 0, stays.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_ARENA_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_ARENA_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace monolith {
namespace engine {

// AllocateBlock, FreeBlock and the numbers are thread-safe. Address and BlockAt need no lock: the
// caller holds the lock of the shard that owns the row, and its region was entered before the row
// was handed out.
class RowArena {
 public:
  static constexpr uint32_t kNoBlock = 0xffffffffu;

  // A block's owner as it is known: the shard, or the arena where it is free.
  struct Block {
    uint32_t previous;  // in a list of its owner
    uint32_t next;
    uint32_t free_row;   // the first of its free rows, which are linked; 0: none
    uint32_t free_rows;  // how many
  };

  // Throws std::bad_alloc when the system has no address space left for region 0. `last_region` is
  // for tests: the leading zeros of the highest row number, of which there are 2^32 otherwise.
  RowArena(int64_t stride, int num_shards, int last_region = 0);
  ~RowArena();
  RowArena(const RowArena&) = delete;
  RowArena& operator=(const RowArena&) = delete;

  // The fields that Address reads. Loops copy it into registers: their stores might change the
  // arena, for all the compiler knows.
  struct View {
    const uintptr_t* bases;
    char* base;  // row 0
    uint64_t stride;
    uint32_t first_rows_mask;
    char* Address(uint32_t row) const {
      return reinterpret_cast<char*>(bases[__builtin_clz(row | first_rows_mask)] + row * stride);
    }
  };
  View view() const { return {bases_, base_, static_cast<uint64_t>(stride_), first_rows_mask_}; }

  char* Address(uint32_t row) const { return view().Address(row); }

  int64_t stride() const { return stride_; }
  int64_t block_rows() const { return int64_t{1} << block_shift_; }
  bool InFirstRegion(uint32_t row) const { return row <= first_rows_mask_; }
  uint32_t BlockOf(uint32_t row) const { return row >> block_shift_; }
  Block* BlockAt(uint32_t block) const;

  // Sets *first to the first of block_rows() rows, whose Block has no free rows. False: no memory
  // or no row numbers left; the next call tries again.
  bool AllocateBlock(uint32_t* first);

  // Takes a block back, all of whose rows are free; not one of region 0. Allocates nothing.
  void FreeBlock(uint32_t block);

  // Whether `row` lies on small pages, which take memory only as they are written to.
  bool OnSmallPages(uint32_t row) const;

  // Memory of the pages that lie under blocks and were not given back.
  int64_t HeldBytes() const;
  // Returns the bytes that describe blocks.
  int64_t MetadataBytes() const;
  // Rows of free blocks.
  int64_t FreeRows() const;
  // Whether a block could still be numbered; if so, it is memory that AllocateBlock lacks.
  bool HasRowNumbers() const;

 private:
  static constexpr int kNumRegions = 32;

  struct FreeMemory {
    void operator()(void* memory) const { std::free(memory); }
  };
  template <typename T>
  using Zeroed = std::unique_ptr<T[], FreeMemory>;

  enum class BlockState : uint8_t {
    kTaken,     // or never handed out
    kFree,      // in free_
    kReleased,  // in released_
  };

  struct Region {
    char* base = nullptr;
    int64_t first_row = 0;
    int64_t rows = 0;
    int64_t committed = 0;     // bytes that can be used
    int64_t populated = 0;     // bytes that were asked for ahead of their use
    Zeroed<Block> blocks;      // each belongs to the owner of the block
    Zeroed<BlockState> state;  // of blocks
    Zeroed<uint8_t> held;      // 1: the huge page has memory
  };

  int RegionOf(uint32_t row) const { return __builtin_clz(row | first_rows_mask_); }
  uint32_t FirstRow(uint32_t block) const { return block << block_shift_; }
  int64_t BlockBytes() const { return stride_ << block_shift_; }

  // mutex held, all of them.
  bool AddRegion();
  // False: there is no address space, or no memory for what is to be known of blocks.
  bool MapRegion(int number, int64_t first_row, int64_t rows);
  bool TakeNew(uint32_t* block);
  bool Commit(Region* region, int64_t bytes);
  void PopulateAhead();
  // Asks for the pages of [from, to) of a region; both are multiples of 2 MiB.
  void Populate(Region* region, int64_t from, int64_t to);
  // Maps the region after the newest, and asks for its first page: clearing it was the longest
  // pause of a growing table. Where there is no address space, AddRegion finds out what to do.
  void PrepareNextRegion();
  // The huge pages that hold a part of a block are in use from now on.
  void Hold(uint32_t block);
  // Bytes of rows in a huge page: the last one of a region may be filled in part.
  int64_t PageBytes(const Region& region, int64_t page) const;
  void ReleasePageIfFree(Region* region, int64_t page);
  void Push(BlockState state, uint32_t block);
  void Remove(uint32_t block);
  uint32_t* ListOf(BlockState state) { return state == BlockState::kFree ? &free_ : &released_; }

  const int64_t stride_;
  const int block_shift_;
  const uint32_t first_rows_mask_;
  const int last_region_;
  uintptr_t bases_[kNumRegions] = {};  // entries are set before rows of their region are known
  char* base_ = nullptr;               // constant after construction
  mutable std::mutex mutex_;
  Region regions_[kNumRegions];
  int newest_;  // regions count down: leading zeros of their row numbers
  int64_t next_row_ = 0;
  int64_t end_row_ = 0;
  bool promoted_ = false;   // region 0 lies on huge pages too
  int64_t held_bytes_ = 0;  // without region 0
  int64_t metadata_bytes_ = 0;
  int64_t free_blocks_ = 0;
  // First blocks of lists that the blocks are linked in.
  uint32_t free_ = kNoBlock;
  uint32_t released_ = kNoBlock;  // they lie, in part at least, in pages that were given back
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_ROWS_ROW_ARENA_H_
