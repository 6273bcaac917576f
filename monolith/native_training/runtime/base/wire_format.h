// The protobuf wire format, as much of it as EntryDump needs.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_WIRE_FORMAT_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_WIRE_FORMAT_H_

#include <cstdint>
#include <cstring>

namespace monolith {
namespace engine {

enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

constexpr int kMaxVarintBytes = 10;

inline int64_t VarintBytes(uint64_t value) {
  int64_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

inline char* WriteVarint(uint64_t value, char* out) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<char>(value | 0x80);
  *out++ = static_cast<char>(value);
  return out;
}

// Tags of fields 1 to 15 are one byte.
inline char* WriteTag(int field, WireType type, char* out) {
  *out++ = static_cast<char>(field << 3 | type);
  return out;
}

// Walks the fields of one message. Every Read checks bounds; false means malformed.
class WireReader {
 public:
  WireReader(const char* data, int64_t size) : at_(data), end_(data + size) {}

  bool done() const { return at_ == end_; }
  const char* at() const { return at_; }

  bool ReadTag(int* field, WireType* type) {
    uint64_t tag;
    if (!ReadVarint(&tag) || (tag >> 3) == 0 || (tag >> 3) > 0x1fffffff) return false;
    *field = static_cast<int>(tag >> 3);
    *type = static_cast<WireType>(tag & 7);
    return true;
  }

  bool ReadVarint(uint64_t* value) {
    uint64_t result = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ == end_) return false;
      const uint64_t byte = static_cast<unsigned char>(*at_++);
      if (shift < 64) result |= (byte & 0x7f) << shift;
      if (byte < 0x80) {
        *value = result;
        return true;
      }
    }
    return false;
  }

  // Reads `size` raw bytes.
  bool ReadBytes(void* out, int64_t size) {
    if (end_ - at_ < size) return false;
    std::memcpy(out, at_, size);
    at_ += size;
    return true;
  }

  bool ReadMessage(const char** data, int64_t* size) {
    uint64_t length;
    if (!ReadVarint(&length) || length > static_cast<uint64_t>(end_ - at_)) return false;
    *data = at_;
    *size = static_cast<int64_t>(length);
    at_ += length;
    return true;
  }

  bool Skip(WireType type) {
    uint64_t value;
    const char* data;
    int64_t size;
    switch (type) {
      case kVarint:
        return ReadVarint(&value);
      case kFixed64:
        return ReadBytes(&value, 8);
      case kLengthDelimited:
        return ReadMessage(&data, &size);
      case kFixed32:
        return ReadBytes(&value, 4);
      default:  // groups are not used by these messages
        return false;
    }
  }

  // Reads a float field, single or packed, behind its tag. Floats beyond `capacity` are counted,
  // not stored.
  bool ReadFloats(WireType type, char* out, int64_t capacity, int64_t* count) {
    if (type == kFixed32) {
      char bytes[4];
      if (!ReadBytes(bytes, 4)) return false;
      if (*count < capacity) std::memcpy(out + 4 * *count, bytes, 4);
      ++*count;
      return true;
    }
    const char* data;
    int64_t size;
    if (type != kLengthDelimited || !ReadMessage(&data, &size) || size % 4 != 0) return false;
    const int64_t floats = size / 4;
    const int64_t room = capacity > *count ? capacity - *count : 0;
    std::memcpy(out + 4 * (*count < capacity ? *count : 0), data,
                4 * (floats < room ? floats : room));
    *count += floats;
    return true;
  }

 private:
  const char* at_;
  const char* end_;
};

}  // namespace engine
}  // namespace monolith

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_BASE_WIRE_FORMAT_H_
