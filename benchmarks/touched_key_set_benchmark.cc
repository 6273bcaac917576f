// Compares touched-key inserts by two threads: our set and absl::flat_hash_set behind one mutex.
//
// Prints one JSON object with the median seconds of interleaved repeats. Measures two baselines:
// the mutex taken for every id and, kinder to the baseline, once for every batch. Both reserve room
// for all ids beforehand, ours does not. benchmarks/foundation_ops.py runs this program.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "monolith/native_training/runtime/concurrency/concurrent_key_set.h"

namespace {

using KeySet = monolith::engine::ConcurrentKeySet<int64_t>;

constexpr int kThreads = 2;

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Pins the calling thread to the i-th core this process may use. With both threads of a run on one
// core of a busy machine, the benchmark would measure the scheduler.
void StayOnCore(int i) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  i %= CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || i-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
    return;
  }
}

// Calls insert(first, count) for every batch, the batches divided among the threads.
double InsertAll(const std::vector<int64_t>& ids, int64_t batch,
                 const std::function<void(const int64_t*, int64_t)>& insert) {
  const int64_t share = static_cast<int64_t>(ids.size()) / kThreads;
  return Seconds([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        StayOnCore(t);
        for (int64_t i = 0; i < share; i += batch) {
          insert(ids.data() + t * share + i, std::min(batch, share - i));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void RequireSize(const char* what, int64_t size, int64_t want) {
  if (size == want) return;
  std::fprintf(stderr, "%s holds %lld keys, want %lld\n", what, static_cast<long long>(size),
               static_cast<long long>(want));
  std::exit(1);
}

}  // namespace

// Usage: touched_key_set_benchmark [ids] [batch] [repeats]
int main(int argc, char** argv) {
  const int64_t num_ids = argc > 1 ? std::atoll(argv[1]) : 10'000'000;
  const int64_t batch = argc > 2 ? std::atoll(argv[2]) : 10'000;
  const int repeats = argc > 3 ? std::atoi(argv[3]) : 5;
  std::vector<int64_t> ids(num_ids);
  std::mt19937_64 random(7);
  for (int64_t& id : ids) id = static_cast<int64_t>(random());
  const int64_t distinct =
      static_cast<int64_t>(absl::flat_hash_set<int64_t>(ids.begin(), ids.end()).size());

  std::vector<double> per_id, per_batch, ours;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (const bool lock_per_id : {true, false}) {
      std::mutex mutex;
      absl::flat_hash_set<int64_t> set;
      set.reserve(num_ids);
      (lock_per_id ? per_id : per_batch)
          .push_back(InsertAll(ids, batch, [&](const int64_t* first, int64_t n) {
            if (lock_per_id) {
              for (int64_t i = 0; i < n; ++i) {
                std::lock_guard lock(mutex);
                set.insert(first[i]);
              }
            } else {
              std::lock_guard lock(mutex);
              set.insert(first, first + n);
            }
          }));
      RequireSize("absl::flat_hash_set", static_cast<int64_t>(set.size()), distinct);
    }
    KeySet set(num_ids, 1024);
    ours.push_back(
        InsertAll(ids, batch, [&](const int64_t* first, int64_t n) { set.Insert(first, n); }));
    RequireSize("ConcurrentKeySet", set.size(), distinct);
  }
  std::printf(
      "{\"ids\": %lld, \"batch\": %lld, \"mutex_per_id_s\": %.6f, \"mutex_per_batch_s\": %.6f, "
      "\"ours_s\": %.6f}\n",
      static_cast<long long>(num_ids), static_cast<long long>(batch), Median(per_id),
      Median(per_batch), Median(ours));
  return 0;
}
