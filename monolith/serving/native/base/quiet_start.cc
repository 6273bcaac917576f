#include "monolith/serving/native/base/quiet_start.h"

#if defined(__x86_64__) && defined(__linux__)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace monolith {
namespace serving {
namespace {

constexpr const char* kNoise[] = {
    "Unable to register cuDNN factory",
    "Unable to register cuFFT factory",
    "Unable to register cuBLAS factory",
    "TF-TRT Warning: Could not find TensorRT",
    "All log messages before absl::InitializeLog() is called are written to STDERR",
};

int g_screen = -1;
int g_kept = -1;

__attribute__((no_sanitize("address"))) bool HasPrefix(const char* text, const char* prefix) {
  while (*prefix != '\0') {
    if (*text++ != *prefix++) return false;
  }
  return true;
}

// Runs before the constructors of all libraries, so it calls the kernel and nothing else. A machine
// without AVX ends in an abort, whose reason must be seen.
__attribute__((no_sanitize("address"))) void BeginQuietStart(int, char**, char** environment) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx")) return;
  for (; *environment != nullptr; ++environment) {
    if (HasPrefix(*environment, "MONOLITH_VERBOSE=1") ||
        HasPrefix(*environment, "TF_CPP_MIN_LOG_LEVEL=0")) {
      return;
    }
  }
  const long screen = syscall(SYS_dup, STDERR_FILENO);
  if (screen < 0) return;  // closed: nobody reads it
  const long kept = syscall(SYS_memfd_create, "stderr", MFD_CLOEXEC);
  if (kept < 0) {
    syscall(SYS_close, screen);
    return;
  }
  syscall(SYS_dup3, kept, STDERR_FILENO, 0);
  g_screen = static_cast<int>(screen);
  g_kept = static_cast<int>(kept);
}

__attribute__((section(".preinit_array"), used)) void (*const g_begin)(int, char**,
                                                                       char**) = &BeginQuietStart;

// Newer versions of TensorFlow write "I0000 00:00:17950..." while they are loaded, whatever the
// level is.
bool IsInformation(const std::string& line) {
  if (line.size() < 6 || line[0] != 'I' || line[5] != ' ') return false;
  for (int i = 1; i < 5; ++i) {
    if (line[i] < '0' || line[i] > '9') return false;
  }
  return true;
}

bool IsNoise(const std::string& line) {
  if (IsInformation(line)) return true;
  for (const char* const phrase : kNoise) {
    if (line.find(phrase) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

void EndQuietStart() {
  if (g_kept < 0) return;
  fflush(stderr);
  dup2(g_screen, STDERR_FILENO);
  close(g_screen);
  std::string text, others;
  char part[4096];
  lseek(g_kept, 0, SEEK_SET);
  for (ssize_t n; (n = read(g_kept, part, sizeof(part))) > 0;) {
    text.append(part, static_cast<size_t>(n));
  }
  close(g_kept);
  g_kept = g_screen = -1;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const size_t next = end == std::string::npos ? text.size() : end + 1;
    const std::string line = text.substr(begin, next - begin);
    if (!IsNoise(line)) others += line;
    begin = next;
  }
  fputs(others.c_str(), stderr);
}

}  // namespace serving
}  // namespace monolith

#else

namespace monolith {
namespace serving {

void EndQuietStart() {}

}  // namespace serving
}  // namespace monolith

#endif
