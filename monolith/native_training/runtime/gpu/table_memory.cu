#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "monolith/native_training/runtime/gpu/table_memory.h"

#if defined(__CUDACC__)
#include <cuda.h>
#else
#include <sys/mman.h>
#endif

namespace monolith {
namespace gpu {
namespace {

std::atomic<int64_t>& UsedBytes() {
  static std::atomic<int64_t> used{0};
  return used;
}

std::atomic<int64_t>& BudgetOverride() {
  static std::atomic<int64_t> budget{0};
  return budget;
}

int64_t BudgetFromEnvironment() {
  const char* const text = std::getenv("MONOLITH_GPU_TABLE_BYTES");
  if (text == nullptr || text[0] == '\0') return 0;
  char* end = nullptr;
  const long long value = std::strtoll(text, &end, 10);
  return *end == '\0' && value > 0 ? static_cast<int64_t>(value) : -1;
}

// Counts `bytes` more, or says why they cannot be had.
int Take(int64_t bytes, const char* what) {
  int64_t budget = 0;
  MONO_GPU_TRY(TableBudget(&budget));
  const int64_t before = UsedBytes().fetch_add(bytes, std::memory_order_relaxed);
  if (before + bytes <= budget) return MONO_GPU_OK;
  UsedBytes().fetch_sub(bytes, std::memory_order_relaxed);
  return Fail(MONO_GPU_OUT_OF_MEMORY, std::to_string(bytes) + " bytes more for " + what +
                                          ": GPU tables have " + std::to_string(before) +
                                          " bytes of " + std::to_string(budget) +
                                          " (MONOLITH_GPU_TABLE_BYTES)");
}

void Return(int64_t bytes) { UsedBytes().fetch_sub(bytes, std::memory_order_relaxed); }

int64_t RoundUp(int64_t value, int64_t grain) { return CeilDiv(value, grain) * grain; }

#if defined(__CUDACC__)

// The functions of the driver, which is not linked: a machine without one must load this library.
struct Driver {
  decltype(&cuMemAddressReserve) address_reserve = nullptr;
  decltype(&cuMemAddressFree) address_free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  bool complete = false;
};

template <typename Function>
bool FindFunction(const char* name, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
  *function = reinterpret_cast<Function>(found);
  return found != nullptr;
}

const Driver& GetDriver() {
  static const Driver driver = [] {
    Driver d;
    d.complete = FindFunction("cuMemAddressReserve", &d.address_reserve) &&
                 FindFunction("cuMemAddressFree", &d.address_free) &&
                 FindFunction("cuMemCreate", &d.create) &&
                 FindFunction("cuMemRelease", &d.release) && FindFunction("cuMemMap", &d.map) &&
                 FindFunction("cuMemUnmap", &d.unmap) &&
                 FindFunction("cuMemSetAccess", &d.set_access) &&
                 FindFunction("cuMemGetAllocationGranularity", &d.granularity);
    return d;
  }();
  return driver;
}

int CheckDriver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return MONO_GPU_OK;
  return Fail(result == CUDA_ERROR_OUT_OF_MEMORY ? MONO_GPU_OUT_OF_MEMORY : MONO_GPU_CUDA_ERROR,
              std::string(what) + ": error " + std::to_string(static_cast<int>(result)) +
                  " of the CUDA driver");
}

CUmemAllocationProp Properties() {
  CUmemAllocationProp properties = {};
  int device = 0;
  cudaGetDevice(&device);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// Keeps freed memory for the next allocation, where plain pools hand it back at every wait.
cudaMemPool_t Pool() {
  int device = 0;
  cudaMemPool_t pool = nullptr;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetDefaultMemPool(&pool, device) != cudaSuccess) {
    return nullptr;
  }
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((prepared.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) {
    uint64_t threshold = uint64_t{1} << 30;
    cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold);
  }
  return pool;
}

// Finds how much of the current card tables may have. Asking takes longer than two launches, and
// every buffer of a write asks.
int CardBudget(int64_t* bytes) {
  constexpr int kMostCards = 64;
  static std::atomic<int64_t> known[kMostCards];
  int device = 0;
  MONO_GPU_TRY(CheckCuda(cudaGetDevice(&device), "current device"));
  std::atomic<int64_t>& budget = known[device % kMostCards];
  *bytes = device < kMostCards ? budget.load(std::memory_order_relaxed) : 0;
  if (*bytes > 0) return MONO_GPU_OK;
  size_t free = 0, total = 0;
  MONO_GPU_TRY(CheckCuda(cudaMemGetInfo(&free, &total), "size of the GPU's memory"));
  *bytes = static_cast<int64_t>(total / 10 * 7);
  budget.store(*bytes, std::memory_order_relaxed);
  return MONO_GPU_OK;
}

#endif

}  // namespace

int64_t TableBytes() { return UsedBytes().load(std::memory_order_relaxed); }

void SetTableBudget(int64_t bytes) { BudgetOverride().store(bytes, std::memory_order_relaxed); }

int TableBudget(int64_t* bytes) {
  *bytes = BudgetOverride().load(std::memory_order_relaxed);
  if (*bytes > 0) return MONO_GPU_OK;
  static const int64_t from_environment = BudgetFromEnvironment();
  if (from_environment < 0) {
    return Fail(MONO_GPU_INVALID_ARGUMENT, std::string("MONOLITH_GPU_TABLE_BYTES is '") +
                                               std::getenv("MONOLITH_GPU_TABLE_BYTES") +
                                               "', want a number of bytes");
  }
  *bytes = from_environment;
  if (*bytes > 0) return MONO_GPU_OK;
#if defined(__CUDACC__)
  return CardBudget(bytes);
#else
  *bytes = int64_t{8} << 30;
  return MONO_GPU_OK;
#endif
}

DeviceBuffer::~DeviceBuffer() { Free(nullptr); }

int DeviceBuffer::Allocate(Stream stream, int64_t bytes, const char* what) {
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), 512);
  MONO_GPU_TRY(Take(size, what));
#if defined(__CUDACC__)
  Pool();
  const int code = CheckCuda(
      cudaMallocAsync(&memory_, static_cast<size_t>(size), static_cast<cudaStream_t>(stream)),
      what);
  if (code != MONO_GPU_OK) cudaGetLastError();
#else
  (void)stream;
  memory_ = std::aligned_alloc(512, static_cast<size_t>(size));
  const int code = memory_ != nullptr ? MONO_GPU_OK : Fail(MONO_GPU_OUT_OF_MEMORY, what);
#endif
  if (code != MONO_GPU_OK) {
    memory_ = nullptr;
    Return(size);
    return code;
  }
  bytes_ = size;
  return MONO_GPU_OK;
}

void DeviceBuffer::Free(Stream stream) {
  if (memory_ == nullptr) return;
#if defined(__CUDACC__)
  cudaFreeAsync(memory_, static_cast<cudaStream_t>(stream));
#else
  (void)stream;
  std::free(memory_);
#endif
  Return(bytes_);
  memory_ = nullptr;
  bytes_ = 0;
}

PinnedBuffer::~PinnedBuffer() {
#if defined(__CUDACC__)
  if (memory_ != nullptr) cudaFreeHost(memory_);
#else
  std::free(memory_);
#endif
}

int PinnedBuffer::Allocate(int64_t bytes) {
#if defined(__CUDACC__)
  MONO_GPU_TRY(CheckCuda(cudaHostAlloc(&memory_, static_cast<size_t>(bytes), cudaHostAllocDefault),
                         "page-locked memory"));
  std::memset(memory_, 0, static_cast<size_t>(bytes));
  return MONO_GPU_OK;
#else
  memory_ = std::calloc(1, static_cast<size_t>(bytes));
  return memory_ != nullptr ? MONO_GPU_OK : Fail(MONO_GPU_OUT_OF_MEMORY, "page-locked memory");
#endif
}

DeviceArena::~DeviceArena() {
  Release();
  if (base_ == nullptr) return;
#if defined(__CUDACC__)
  GetDriver().address_free(reinterpret_cast<CUdeviceptr>(base_), static_cast<size_t>(max_bytes_));
#else
  munmap(base_, static_cast<size_t>(max_bytes_));
#endif
}

int DeviceArena::Reserve(int64_t max_bytes) {
#if defined(__CUDACC__)
  const Driver& driver = GetDriver();
  if (!driver.complete) {
    return Fail(MONO_GPU_CUDA_ERROR,
                "GPU tables need a CUDA driver with virtual memory management (11.2 or later)");
  }
  const CUmemAllocationProp properties = Properties();
  size_t grain = 0;
  MONO_GPU_TRY(
      CheckDriver(driver.granularity(&grain, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                  "granularity of memory"));
  grain_ = RoundUp(int64_t{2} << 20, static_cast<int64_t>(grain));
  max_bytes_ = RoundUp(max_bytes, grain_);
  CUdeviceptr base = 0;
  MONO_GPU_TRY(CheckDriver(driver.address_reserve(&base, static_cast<size_t>(max_bytes_), 0, 0, 0),
                           "addresses for the rows of a table"));
  base_ = reinterpret_cast<char*>(base);
#else
  grain_ = int64_t{2} << 20;
  max_bytes_ = RoundUp(max_bytes, grain_);
  void* const base = mmap(nullptr, static_cast<size_t>(max_bytes_), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return Fail(MONO_GPU_OUT_OF_MEMORY, "addresses for the rows of a table");
  }
  base_ = static_cast<char*>(base);
#endif
  return MONO_GPU_OK;
}

int DeviceArena::Grow(int64_t bytes) {
  if (bytes <= bytes_) return MONO_GPU_OK;
  if (bytes > max_bytes_) {
    return Fail(MONO_GPU_OUT_OF_MEMORY, "rows of " + std::to_string(bytes) +
                                            " bytes, and the card has " +
                                            std::to_string(max_bytes_));
  }
  // A little more than there is, so that the number of pieces stays small; where that is not to be
  // had, what is needed.
  const int64_t needed = RoundUp(bytes - bytes_, grain_);
  const int64_t ahead =
      std::min(RoundUp(std::min(bytes_ / 64, int64_t{256} << 20), grain_), max_bytes_ - bytes_);
  if (ahead > needed && Map(ahead) == MONO_GPU_OK) return MONO_GPU_OK;
  return Map(needed);
}

int DeviceArena::Map(int64_t bytes) {
  MONO_GPU_TRY(Take(bytes, "the rows of a table"));
  Piece piece = {bytes_, bytes, 0};
#if defined(__CUDACC__)
  const Driver& driver = GetDriver();
  const CUmemAllocationProp properties = Properties();
  CUmemGenericAllocationHandle handle = 0;
  int code = CheckDriver(driver.create(&handle, static_cast<size_t>(bytes), &properties, 0),
                         "memory for the rows of a table");
  if (code == MONO_GPU_OK) {
    const CUdeviceptr at = reinterpret_cast<CUdeviceptr>(base_) + static_cast<size_t>(bytes_);
    code = CheckDriver(driver.map(at, static_cast<size_t>(bytes), 0, handle, 0),
                       "mapping the rows of a table");
    if (code == MONO_GPU_OK) {
      CUmemAccessDesc access = {};
      access.location = properties.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      code = CheckDriver(driver.set_access(at, static_cast<size_t>(bytes), &access, 1),
                         "access to the rows of a table");
      if (code != MONO_GPU_OK) driver.unmap(at, static_cast<size_t>(bytes));
    }
    if (code != MONO_GPU_OK) driver.release(handle);
  }
  if (code != MONO_GPU_OK) {
    Return(bytes);
    return code;
  }
  piece.handle = handle;
#endif
  pieces_.push_back(piece);
  bytes_ += bytes;
  return MONO_GPU_OK;
}

void DeviceArena::Release() {
#if defined(__CUDACC__)
  const Driver& driver = GetDriver();
  for (const Piece& piece : pieces_) {
    driver.unmap(reinterpret_cast<CUdeviceptr>(base_ + piece.offset),
                 static_cast<size_t>(piece.bytes));
    driver.release(piece.handle);
  }
#else
  if (bytes_ > 0) madvise(base_, static_cast<size_t>(bytes_), MADV_DONTNEED);
#endif
  Return(bytes_);
  pieces_.clear();
  bytes_ = 0;
}

}  // namespace gpu
}  // namespace monolith
