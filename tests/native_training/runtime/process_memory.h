// Measures and limits the memory of a test's process.
#ifndef TESTS_NATIVE_TRAINING_RUNTIME_PROCESS_MEMORY_H_
#define TESTS_NATIVE_TRAINING_RUNTIME_PROCESS_MEMORY_H_

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace monolith {
namespace engine {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Reads field `field` of /proc/self/statm in bytes: 0 is address space, 1 resident memory.
inline int64_t MemoryField(int field) {
  long fields[2] = {};
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return 0;
  const int found = std::fscanf(file, "%ld %ld", &fields[0], &fields[1]);
  std::fclose(file);
  return found == 2 ? int64_t{fields[field]} * sysconf(_SC_PAGESIZE) : 0;
}

inline int64_t AddressSpace() { return MemoryField(0); }
inline int64_t ResidentMemory() { return MemoryField(1); }

// Reads the number of that name in /proc/self/status, such as Threads.
inline int64_t StatusNumber(const char* name) {
  char line[256];
  int64_t value = -1;
  std::FILE* file = std::fopen("/proc/self/status", "r");
  if (file == nullptr) return value;
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    const size_t length = std::strlen(name);
    if (std::strncmp(line, name, length) == 0 && line[length] == ':') {
      value = std::atoll(line + length + 1);
    }
  }
  std::fclose(file);
  return value;
}

// Limits this process to `room` bytes more than it uses, by RLIMIT_AS or RLIMIT_DATA. Returns the
// old limit.
template <typename Resource>
rlimit LimitMemory(Resource resource, int64_t room) {
  rlimit old;
  getrlimit(resource, &old);
  const int64_t used = resource == RLIMIT_AS ? AddressSpace() : StatusNumber("VmData") * 1024;
  const rlimit limit = {static_cast<rlim_t>(used + room), old.rlim_max};
  setrlimit(resource, &limit);
  return old;
}

// Returns what `function` returns in a child process, or -1 if the child dies.
template <typename Function>
int RunInChild(Function function) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(function());
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace engine
}  // namespace monolith

#endif  // TESTS_NATIVE_TRAINING_RUNTIME_PROCESS_MEMORY_H_
