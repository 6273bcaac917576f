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
MONOLITH_CRC_TARGET uint32_t Hardware(const char* data, int64_t size, uint32_t before) {
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; size > 0; --size, ++data) crc = __crc32cb(crc, static_cast<uint8_t>(*data));
  return ~crc;
}
bool HaveHardware() {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}
#elif defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t Hardware(const char* data, int64_t size,
                                                    uint32_t before) {
  uint64_t crc = ~before;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  uint32_t tail = static_cast<uint32_t>(crc);
  for (; size > 0; --size, ++data) tail = _mm_crc32_u8(tail, static_cast<uint8_t>(*data));
  return ~tail;
}
bool HaveHardware() { return __builtin_cpu_supports("sse4.2"); }
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
