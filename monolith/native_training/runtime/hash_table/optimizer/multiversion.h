// One source, several instruction sets: on x86-64 the compiler builds the marked function for
// baseline, AVX2 and AVX-512 machines and the loader picks one. ARM64 needs nothing, NEON is its
// baseline. Builds for x86-64 do not fuse multiplications and additions (-ffp-contract=off), so all
// versions round alike, and like code that is inlined elsewhere. Sanitizer builds take the baseline
// only: loader-time selection runs before their run-time library is up.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(MONOLITH_NO_MULTIVERSION)
#define MONOLITH_MULTIVERSION \
  __attribute__((target_clones("default", "arch=haswell", "arch=x86-64-v4")))
#else
#define MONOLITH_MULTIVERSION
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_
