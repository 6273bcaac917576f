#include "monolith/native_training/runtime/base/crc32c.h"

#include <array>

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace monolith {
namespace engine {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // reflected

using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables MakeTables() {
  Tables tables;
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
    tables[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (int k = 1; k < 8; ++k) {
      tables[k][i] = (tables[k - 1][i] >> 8) ^ tables[0][tables[k - 1][i] & 0xffu];
    }
  }
  return tables;
}

#if defined(__aarch64__)
#if defined(__clang__)
#define MONOLITH_CRC_TARGET __attribute__((target("crc")))
#else
#define MONOLITH_CRC_TARGET __attribute__((target("+crc")))
#endif
MONOLITH_CRC_TARGET inline uint32_t AddWord(uint32_t crc, uint64_t word) {
  return __crc32cd(crc, word);
}
MONOLITH_CRC_TARGET inline uint32_t AddByte(uint32_t crc, uint8_t byte) {
  return __crc32cb(crc, byte);
}
bool HaveHardware() {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}
#elif defined(__x86_64__)
#define MONOLITH_CRC_TARGET __attribute__((target("sse4.2")))
MONOLITH_CRC_TARGET inline uint32_t AddWord(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
MONOLITH_CRC_TARGET inline uint32_t AddByte(uint32_t crc, uint8_t byte) {
  return _mm_crc32_u8(crc, byte);
}
bool HaveHardware() { return __builtin_cpu_supports("sse4.2"); }
#endif

#if defined(MONOLITH_CRC_TARGET)
// An instruction takes in 8 bytes, and the next one waits for it, two cycles or three, while the
// processor could begin one in each. So long data are read as three streams of this many bytes side
// by side, whose checksums are joined: a checksum is linear, and that of A before B is that of A
// before as many zeros, and that of B after a start of 0.
constexpr int64_t kStreamBytes = 1024;

inline uint64_t LoadWord(const char* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

// Results of kStreamBytes zeros after a checksum, for each of its bytes.
using ZerosTables = std::array<std::array<uint32_t, 256>, 4>;

MONOLITH_CRC_TARGET ZerosTables MakeZerosTables() {
  ZerosTables tables = {};
  for (int k = 0; k < 4; ++k) {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i << (8 * k);
      for (int64_t at = 0; at < kStreamBytes; at += 8) crc = AddWord(crc, 0);
      tables[k][i] = crc;
    }
  }
  return tables;
}

MONOLITH_CRC_TARGET uint32_t Hardware(const char* data, int64_t size, uint32_t before) {
  uint32_t crc = ~before;
  if (size >= 3 * kStreamBytes) {
    static const ZerosTables tables = MakeZerosTables();
    const auto add_zeros = [](uint32_t a) {
      return tables[0][a & 0xffu] ^ tables[1][(a >> 8) & 0xffu] ^ tables[2][(a >> 16) & 0xffu] ^
             tables[3][a >> 24];
    };
    for (; size >= 3 * kStreamBytes; size -= 3 * kStreamBytes, data += 3 * kStreamBytes) {
      uint32_t second = 0, third = 0;
      for (const char* at = data; at < data + kStreamBytes; at += 8) {
        crc = AddWord(crc, LoadWord(at));
        second = AddWord(second, LoadWord(at + kStreamBytes));
        third = AddWord(third, LoadWord(at + 2 * kStreamBytes));
      }
      crc = add_zeros(add_zeros(crc) ^ second) ^ third;
    }
  }
  for (; size >= 8; size -= 8, data += 8) crc = AddWord(crc, LoadWord(data));
  for (; size > 0; --size, ++data) crc = AddByte(crc, static_cast<uint8_t>(*data));
  return ~crc;
}
#else
uint32_t Hardware(const char* data, int64_t size, uint32_t before) {
  return Crc32cPortable(data, size, before);
}
bool HaveHardware() { return false; }
#endif

}  // namespace

uint32_t Crc32cPortable(const void* data, int64_t size, uint32_t before) {
  static const Tables tables = MakeTables();
  const unsigned char* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word = 0;
    for (int k = 0; k < 8; ++k) word |= uint64_t{p[k]} << (8 * k);
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= tables[7 - k][(word >> (8 * k)) & 0xffu];
  }
  for (; size > 0; --size, ++p) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xffu];
  return ~crc;
}

uint32_t Crc32c(const void* data, int64_t size, uint32_t before) {
  static const bool hardware = HaveHardware();
  return hardware ? Hardware(static_cast<const char*>(data), size, before)
                  : Crc32cPortable(data, size, before);
}

}  // namespace engine
}  // namespace monolith
