// Files of rows may hold anything: nothing is read behind its end.
#include "monolith/native_training/runtime/base/wire_format.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace monolith {
namespace engine {
namespace {

// Bytes on the heap without one to spare, so that a sanitizer sees a read behind their end.
class Bytes {
 public:
  explicit Bytes(const std::string& text)
      : size_(text.size()), data_(std::make_unique<char[]>(text.size())) {
    std::memcpy(data_.get(), text.data(), text.size());
  }

  WireReader reader() const { return WireReader(data_.get(), size_); }

 private:
  int64_t size_;
  std::unique_ptr<char[]> data_;
};

std::string Varint(uint64_t value) {
  char buffer[kMaxVarintBytes];
  return std::string(buffer, WriteVarint(value, buffer));
}

std::string Floats(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size());
}

TEST(WireFormatTest, VarintsComeBack) {
  std::vector<uint64_t> values = {0, std::numeric_limits<uint64_t>::max()};
  for (int bits = 0; bits < 64; ++bits) {
    values.push_back(uint64_t{1} << bits);
    values.push_back((uint64_t{1} << bits) - 1);
  }
  for (const uint64_t value : values) {
    const std::string text = Varint(value);
    EXPECT_EQ(VarintBytes(value), static_cast<int64_t>(text.size()));
    const Bytes bytes(text);
    WireReader reader = bytes.reader();
    uint64_t found = ~value;
    ASSERT_TRUE(reader.ReadVarint(&found)) << value;
    EXPECT_EQ(found, value);
    EXPECT_TRUE(reader.done());
    for (size_t size = 0; size < text.size(); ++size) {
      const Bytes torn(text.substr(0, size));
      EXPECT_FALSE(torn.reader().ReadVarint(&found)) << value << ", " << size << " bytes";
    }
  }
}

TEST(WireFormatTest, AVarintThatDoesNotEndIsMalformed) {
  uint64_t value;
  EXPECT_FALSE(Bytes(std::string(10, '\x80') + '\x01').reader().ReadVarint(&value));
  // Ten bytes are allowed, whatever the last of them says beyond 64 bits.
  EXPECT_TRUE(Bytes(std::string(9, '\xff') + '\x7f').reader().ReadVarint(&value));
  EXPECT_EQ(value, std::numeric_limits<uint64_t>::max());
}

TEST(WireFormatTest, Tags) {
  int field;
  WireType type = {};
  for (int want = 1; want <= 15; ++want) {
    char tag;
    WriteTag(want, kLengthDelimited, &tag);
    ASSERT_TRUE(Bytes(std::string(1, tag)).reader().ReadTag(&field, &type));
    EXPECT_EQ(field, want);
    EXPECT_EQ(type, kLengthDelimited);
  }
  EXPECT_TRUE(Bytes(Varint(uint64_t{0x1fffffff} << 3)).reader().ReadTag(&field, &type));
  EXPECT_EQ(field, 0x1fffffff);
  EXPECT_FALSE(Bytes(Varint(uint64_t{0x20000000} << 3)).reader().ReadTag(&field, &type));
  EXPECT_FALSE(Bytes(std::string(1, '\x02')).reader().ReadTag(&field, &type));  // field 0
  EXPECT_FALSE(Bytes("").reader().ReadTag(&field, &type));
}

TEST(WireFormatTest, AMessageThatClaimsMoreThanThereIsIsMalformed) {
  const char* data;
  int64_t size;
  EXPECT_FALSE(Bytes(Varint(3) + "ab").reader().ReadMessage(&data, &size));
  EXPECT_FALSE(
      Bytes(Varint(std::numeric_limits<uint64_t>::max())).reader().ReadMessage(&data, &size));
  const Bytes bytes(Varint(2) + "abc");
  WireReader reader = bytes.reader();
  ASSERT_TRUE(reader.ReadMessage(&data, &size));
  EXPECT_EQ(std::string(data, size), "ab");
  EXPECT_EQ(*reader.at(), 'c');
}

TEST(WireFormatTest, UnknownFieldsAreSkippedAndGroupsAreNot) {
  const Bytes bytes(Varint(300) + "12345678" + Varint(2) + "ab" + "1234");
  WireReader reader = bytes.reader();
  for (const WireType type : {kVarint, kFixed64, kLengthDelimited, kFixed32}) {
    EXPECT_TRUE(reader.Skip(type)) << type;
  }
  EXPECT_TRUE(reader.done());
  for (int type = 0; type < 8; ++type) {
    EXPECT_FALSE(reader.Skip(static_cast<WireType>(type))) << type;  // nothing is left
  }
  for (const int group : {3, 4, 6, 7}) {
    EXPECT_FALSE(Bytes("12345678").reader().Skip(static_cast<WireType>(group))) << group;
  }
  EXPECT_FALSE(Bytes("1234567").reader().Skip(kFixed64));
  EXPECT_FALSE(Bytes("123").reader().Skip(kFixed32));
}

TEST(WireFormatTest, FloatsBeyondTheRoomAreCountedOnly) {
  const std::vector<float> values = {1, -2, 3.5};
  const std::string packed = Varint(12) + Floats(values);
  for (int64_t capacity = 0; capacity <= 5; ++capacity) {
    const auto out = std::make_unique<char[]>(4 * capacity);
    int64_t count = 0;
    const Bytes bytes(packed + Floats({7}));
    WireReader reader = bytes.reader();
    ASSERT_TRUE(reader.ReadFloats(kLengthDelimited, out.get(), capacity, &count));
    ASSERT_TRUE(reader.ReadFloats(kFixed32, out.get(), capacity, &count));
    EXPECT_EQ(count, 4);
    const std::string want = Floats({1, -2, 3.5, 7}).substr(0, 4 * capacity);
    EXPECT_EQ(std::string(out.get(), want.size()), want);
  }
}

TEST(WireFormatTest, FloatsThatAreNone) {
  char out[16];
  int64_t count = 0;
  EXPECT_FALSE(Bytes(Varint(3) + "abc").reader().ReadFloats(kLengthDelimited, out, 4, &count));
  EXPECT_FALSE(Bytes(Varint(8) + "abcd").reader().ReadFloats(kLengthDelimited, out, 4, &count));
  EXPECT_FALSE(Bytes("abc").reader().ReadFloats(kFixed32, out, 4, &count));
  EXPECT_FALSE(Bytes(Varint(8)).reader().ReadFloats(kVarint, out, 4, &count));
  EXPECT_EQ(count, 0);
  EXPECT_TRUE(Bytes(Varint(0)).reader().ReadFloats(kLengthDelimited, out, 4, &count));
  EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace engine
}  // namespace monolith
