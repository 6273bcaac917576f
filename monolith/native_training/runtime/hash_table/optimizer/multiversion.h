// One source, several instruction sets: on x86-64 the compiler builds the marked function for
// baseline, AVX2 and AVX-512 machines and the loader picks one. It goes by what the machine can do:
// "arch=haswell" would be for that very processor. GCC 11 has no versions for levels of x86-64.
// ARM64 needs nothing, NEON is its baseline. Builds for x86-64 do not fuse multiplications and
// additions (-ffp-contract=off), so all versions round alike, and like code that is inlined
// elsewhere. Sanitizer builds take the baseline only: loader-time selection runs before their
// run-time library is up.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(MONOLITH_NO_MULTIVERSION)
#if __GNUC__ >= 12
#define MONOLITH_MULTIVERSION \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MONOLITH_MULTIVERSION __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define MONOLITH_MULTIVERSION
#endif

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_HASH_TABLE_OPTIMIZER_MULTIVERSION_H_
