#include "monolith/native_training/runtime/data/row_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/native_training/runtime/base/crc32c.h"

namespace monolith {
namespace data {
namespace {

// Gives some bytes, then fails.
class BrokenSource final : public ByteSource {
 public:
  explicit BrokenSource(std::string_view bytes) : rest_(bytes) {}

  bool Read(int64_t size, std::string* out) override {
    const size_t taken = std::min(rest_.size(), static_cast<size_t>(size));
    out->assign(rest_.data(), taken);
    rest_.remove_prefix(taken);
    return static_cast<int64_t>(taken) == size;
  }

  std::string error() const override { return "the device is broken"; }

 private:
  std::string_view rest_;
};

struct Found {
  std::vector<std::string> rows;
  ReadResult result;
  std::string problem;
};

Found ReadAll(ByteSource* source, RowFormat format) {
  RowReader reader(source, format, 0, 0);
  Found found;
  std::string_view row;
  while ((found.result = reader.Next(&row)) == ReadResult::kRecord) found.rows.emplace_back(row);
  EXPECT_EQ(reader.row(), static_cast<int64_t>(found.rows.size()));
  EXPECT_EQ(reader.Next(&row), found.result) << "the answer stays";
  found.problem = reader.Explain(found.result);
  return found;
}

Found ReadAll(const std::string& bytes, RowFormat format) {
  MemorySource source(bytes);
  return ReadAll(&source, format);
}

std::string Records(const std::vector<std::string>& payloads) {
  std::string bytes;
  for (const std::string& payload : payloads) {
    engine::AppendRecord(payload.data(), static_cast<int64_t>(payload.size()), &bytes);
  }
  return bytes;
}

TEST(RowReaderTest, CutsLines) {
  const Found found = ReadAll("a\r\n\nb\rc\nlast", RowFormat::kLines);

  EXPECT_EQ(found.rows, (std::vector<std::string>{"a", "", "bc", "last"}));
  EXPECT_EQ(found.result, ReadResult::kEnd);
  EXPECT_TRUE(ReadAll("", RowFormat::kLines).rows.empty());
  EXPECT_EQ(ReadAll("\n", RowFormat::kLines).rows, std::vector<std::string>{""});
}

TEST(RowReaderTest, ReadsRowsLongerThanItsBuffer) {
  const std::vector<std::string> rows = {std::string(300'000, 'a'), "", std::string(1'000'000, 'b'),
                                         "c"};
  std::string lines;
  for (const std::string& row : rows) lines += row + "\n";

  EXPECT_EQ(ReadAll(lines, RowFormat::kLines).rows, rows);
  EXPECT_EQ(ReadAll(Records(rows), RowFormat::kTfRecords).rows, rows);
}

TEST(RowReaderTest, GoesOnWhereAnotherReaderWas) {
  const std::string bytes = Records({"one", "two", "three"});
  MemorySource source(bytes);
  RowReader first(&source, RowFormat::kTfRecords, 0, 0);
  std::string_view row;
  ASSERT_EQ(first.Next(&row), ReadResult::kRecord);

  MemorySource rest(std::string_view(bytes).substr(static_cast<size_t>(first.offset())));
  RowReader second(&rest, RowFormat::kTfRecords, first.offset(), first.row());

  ASSERT_EQ(second.Next(&row), ReadResult::kRecord);
  EXPECT_EQ(row, "two");
  EXPECT_EQ(second.row(), 2);
}

TEST(RowReaderTest, EveryCutInsideOfARecordIsTold) {
  const std::string bytes = Records({"one", "", "three"});
  const std::vector<size_t> ends = {0, 19, 35, bytes.size()};
  for (size_t size = 0; size <= bytes.size(); ++size) {
    const Found found = ReadAll(bytes.substr(0, size), RowFormat::kTfRecords);

    const bool is_between = std::count(ends.begin(), ends.end(), size) > 0;
    EXPECT_EQ(found.result, is_between ? ReadResult::kEnd : ReadResult::kTruncated) << size;
  }
  const Found found = ReadAll(bytes.substr(0, 25), RowFormat::kTfRecords);
  EXPECT_EQ(found.problem, "the file ends inside of the record at offset 19");
}

TEST(RowReaderTest, EveryFlippedBitOfARecordIsTold) {
  const std::string bytes = Records({"one", "two"});
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));

    const Found found = ReadAll(flipped, RowFormat::kTfRecords);

    EXPECT_EQ(found.result, ReadResult::kBadChecksum) << bit;
    EXPECT_EQ(found.rows.size(), bit / 8 < 19 ? 0u : 1u);
  }
}

TEST(RowReaderTest, GivesTheRowsBeforeAPlaceThatCannotBeRead) {
  BrokenSource lines("one\ntwo\nthr");
  const Found found = ReadAll(&lines, RowFormat::kLines);

  EXPECT_EQ(found.rows, (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(found.result, ReadResult::kIoError);
  EXPECT_EQ(found.problem, "the device is broken, in the line at offset 8");

  const std::string bytes = Records({"one", "two"});
  BrokenSource records(std::string_view(bytes).substr(0, 19));
  EXPECT_EQ(ReadAll(&records, RowFormat::kTfRecords).result, ReadResult::kIoError);
}

}  // namespace
}  // namespace data
}  // namespace monolith
