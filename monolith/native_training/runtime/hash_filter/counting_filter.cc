#include "monolith/native_training/runtime/hash_filter/counting_filter.h"

#include <sys/mman.h>

#include <algorithm>

namespace monolith {
namespace engine {

static_assert(sizeof(std::atomic<uint16_t>) == sizeof(uint16_t), "cells are plain 16-bit words");

CountingFilter::CountingFilter(int64_t capacity, double fill_rate, int max_probes)
    : capacity_(capacity),
      fill_rate_(fill_rate),
      max_probes_(max_probes),
      total_size_(std::max<int64_t>(1, static_cast<int64_t>(capacity * fill_rate))) {
  void* memory = mmap(nullptr, num_cells() * sizeof(uint16_t), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  cells_ = memory == MAP_FAILED ? nullptr : static_cast<std::atomic<uint16_t>*>(memory);
}

CountingFilter::~CountingFilter() {
  if (cells_ != nullptr) munmap(static_cast<void*>(cells_), num_cells() * sizeof(uint16_t));
}

std::atomic<uint16_t>* CountingFilter::Find(Key key) const {
  int64_t at = Position(key);
  const int64_t probes = std::min<int64_t>(max_probes_, num_cells());
  for (int64_t i = 0; i < probes; ++i) {
    const uint16_t cell = cells_[at].load(std::memory_order_relaxed);
    if (cell == 0 || (cell & 0xfff0u) == key.signature) return &cells_[at];
    if (++at == num_cells()) at = 0;
  }
  return nullptr;
}

uint32_t CountingFilter::AddAt(std::atomic<uint16_t>* cell, Key key, uint32_t count) {
  count = std::min(count, kMaxCount);
  for (; cell != nullptr; cell = Find(key)) {
    uint16_t old = cell->load(std::memory_order_relaxed);
    // Another id may have taken the empty cell since Find.
    while (old == 0 || (old & 0xfff0u) == key.signature) {
      const uint32_t sum = std::min(kMaxCount, CountOf(old) + count);
      if (cell->compare_exchange_weak(old, static_cast<uint16_t>(key.signature | sum),
                                      std::memory_order_relaxed)) {
        if (old == 0) CountElement();
        return CountOf(old);
      }
    }
  }
  failures_.fetch_add(1, std::memory_order_relaxed);
  return kMaxCount;
}

void CountingFilter::CountElement() {
  int64_t elements = num_elements();
  while (elements < capacity_ &&
         !num_elements_.compare_exchange_weak(elements, elements + 1, std::memory_order_relaxed)) {
  }
}

void CountingFilter::Clear() {
  const int64_t bytes = num_cells() * static_cast<int64_t>(sizeof(uint16_t));
  // Fresh zero pages instead of writing zeros.
  if (madvise(static_cast<void*>(cells_), bytes, MADV_DONTNEED) != 0) {
    for (int64_t i = 0; i < num_cells(); ++i) cells_[i].store(0, std::memory_order_relaxed);
  }
  num_elements_.store(0, std::memory_order_relaxed);
}

void CountingFilter::CopyCells(int64_t begin, int64_t n, uint16_t* out) const {
  for (int64_t i = 0; i < n; ++i) out[i] = cells_[begin + i].load(std::memory_order_relaxed);
}

void CountingFilter::LoadCells(int64_t begin, int64_t n, const uint16_t* cells) {
  for (int64_t i = 0; i < n; ++i) cells_[begin + i].store(cells[i], std::memory_order_relaxed);
}

void CountingFilter::LoadCounters(int64_t num_elements, int64_t failures) {
  num_elements_.store(num_elements, std::memory_order_relaxed);
  failures_.store(failures, std::memory_order_relaxed);
}

}  // namespace engine
}  // namespace monolith
