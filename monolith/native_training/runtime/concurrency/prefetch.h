// Prefetch that works on every CPU we build for.
//
// On Arm Neoverse N1 a PRFM whose address is [base, index, lsl #3] does not bring the line in and
// costs time: 10 million random inserts into a 128 MiB array of 8-byte slots took 53 ns each with
// it, 43 ns without any prefetch and 25 ns with PRFM [address]. The compiler picks the first form
// for
// __builtin_prefetch(&array[i]), so the address is pinned to one register before the prefetch.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PREFETCH_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PREFETCH_H_

namespace monolith {
namespace engine {

// Any address is fine, also one past or outside of an object: a prefetch never faults.
__attribute__((always_inline)) inline void PrefetchForRead(const void* address) {
  __asm__("" : "+r"(address));
  __builtin_prefetch(address, 0);
}

__attribute__((always_inline)) inline void PrefetchForWrite(const void* address) {
  __asm__("" : "+r"(address));
  __builtin_prefetch(address, 1);
}

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_CONCURRENCY_PREFETCH_H_
