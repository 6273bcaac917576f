#include "monolith/native_training/runtime/hash_table/records/entry_codec.h"

#include <algorithm>
#include <cstring>

#include "monolith/native_training/runtime/base/wire_format.h"
#include "monolith/native_training/runtime/hash_table/expiry.h"
#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"

namespace monolith {
namespace engine {
namespace {

// Fields of EntryDump and OptimizerDump.
constexpr int kIdField = 1;
constexpr int kNumField = 2;
constexpr int kOptField = 3;
constexpr int kTsField = 4;
constexpr int kDumpField = 1;
constexpr int64_t kIdBytes = 9;

Status Corrupt() {
  return Status::FailedPrecondition("Unable to parse data. Data might be corrupted");
}

int64_t LoadInt64(const char* from) {
  int64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

char* WriteFloats(int field, const char* floats, int64_t count, char* out) {
  for (int64_t i = 0; i < count; ++i) {
    out = WriteTag(field, kFixed32, out);
    std::memcpy(out, floats + 4 * i, 4);
    out += 4;
  }
  return out;
}

}  // namespace

EntryCodec::EntryCodec(const RowLayout& layout) : layout_(layout) {
  if (layout_.serving()) return;
  for (size_t i = 0; i < layout_.segments.size(); ++i) {
    if (layout_.segments[i].dump_number != 0) dumped_segments_.push_back(i);
    for (const StateField& field : layout_.segments[i].state) fixed_size_ &= !field.is_int64;
  }
  max_record_bytes_ = kIdBytes + 5 * layout_.dim + 2 * kMaxVarintBytes + 2;
  for (const Segment& segment : layout_.segments) {
    max_record_bytes_ += 2 * (1 + kMaxVarintBytes);
    for (const StateField& field : segment.state) {
      max_record_bytes_ += field.count * (field.is_int64 ? 1 + kMaxVarintBytes : 5);
    }
  }
  if (fixed_size_) BuildTemplate();
}

// The record of an all-zero row, without its timestamp; then note where the floats went.
void EntryCodec::BuildTemplate() {
  const std::string row(layout_.stride, '\0');
  template_.resize(max_record_bytes_);
  const int64_t size = EncodeGeneral(0, row.data(), 0, true, &template_[0]);
  template_.resize(size - 1);  // the last byte is the timestamp
  int64_t at = kIdBytes + 1;
  patches_.push_back({at, 0, layout_.dim});
  at += 5 * layout_.dim - 1;  // behind the last value
  int64_t opt_bytes = 0;
  for (const size_t index : dumped_segments_) {
    const int64_t body = DumpBytes(layout_.segments[index], row.data());
    opt_bytes += 2 + VarintBytes(body) + VarintBytes(1 + VarintBytes(body) + body) + body;
  }
  at += 1 + VarintBytes(opt_bytes);
  for (const size_t index : dumped_segments_) {
    const Segment& segment = layout_.segments[index];
    const int64_t body = DumpBytes(segment, row.data());
    at += 2 + VarintBytes(body) + VarintBytes(1 + VarintBytes(body) + body);
    for (const StateField& field : segment.state) {
      patches_.push_back({at + 1, field.offset, field.count});
      at += 5 * field.count;
    }
  }
}

int64_t EntryCodec::DumpBytes(const Segment& segment, const char* row) const {
  int64_t bytes = 0;
  for (const StateField& field : segment.state) {
    bytes += field.is_int64 ? 1 + VarintBytes(static_cast<uint64_t>(LoadInt64(row + field.offset)))
                            : 5 * field.count;
  }
  return bytes;
}

int64_t EntryCodec::Encode(int64_t id, const char* row, uint32_t ts, bool with_id,
                           char* out) const {
  if (!fixed_size_) return EncodeGeneral(id, row, ts, with_id, out);
  const int64_t skipped = with_id ? 0 : kIdBytes;
  const int64_t size = static_cast<int64_t>(template_.size()) - skipped;
  std::memcpy(out, template_.data() + skipped, size);
  if (with_id) std::memcpy(out + 1, &id, sizeof(id));
  for (const Patch& patch : patches_) {
    char* to = out + patch.record_offset - skipped;
    const char* from = row + patch.row_offset;
    for (int64_t i = 0; i < patch.count; ++i) std::memcpy(to + 5 * i, from + 4 * i, 4);
  }
  return WriteVarint(ts, out + size) - out;
}

int64_t EntryCodec::EncodeGeneral(int64_t id, const char* row, uint32_t ts, bool with_id,
                                  char* out) const {
  char* at = out;
  if (with_id) {
    at = WriteTag(kIdField, kFixed64, at);
    std::memcpy(at, &id, sizeof(id));
    at += sizeof(id);
  }
  at = WriteFloats(kNumField, row, layout_.dim, at);
  int64_t opt_bytes = 0;
  for (const size_t index : dumped_segments_) {
    const int64_t body = DumpBytes(layout_.segments[index], row);
    opt_bytes += 2 + VarintBytes(body) + VarintBytes(1 + VarintBytes(body) + body) + body;
  }
  at = WriteTag(kOptField, kLengthDelimited, at);
  at = WriteVarint(opt_bytes, at);
  for (const size_t index : dumped_segments_) {
    const Segment& segment = layout_.segments[index];
    const int64_t body = DumpBytes(segment, row);
    at = WriteTag(kDumpField, kLengthDelimited, at);
    at = WriteVarint(1 + VarintBytes(body) + body, at);
    at = WriteTag(segment.dump_number, kLengthDelimited, at);
    at = WriteVarint(body, at);
    for (const StateField& field : segment.state) {
      if (field.is_int64) {
        at = WriteTag(field.dump_field, kVarint, at);
        at = WriteVarint(static_cast<uint64_t>(LoadInt64(row + field.offset)), at);
      } else {
        at = WriteFloats(field.dump_field, row + field.offset, field.count, at);
      }
    }
  }
  at = WriteTag(kTsField, kVarint, at);
  return WriteVarint(ts, at) - out;
}

bool EntryCodec::ParseState(const Segment& segment, const char* data, int64_t size, char* row,
                            bool* matches) const {
  // Field numbers are at most 5.
  int64_t counts[8] = {};
  WireReader reader(data, size);
  while (!reader.done()) {
    int number;
    WireType type;
    if (!reader.ReadTag(&number, &type)) return false;
    const auto field =
        std::find_if(segment.state.begin(), segment.state.end(),
                     [number](const StateField& f) { return f.dump_field == number; });
    // The last one counts of a scalar that comes twice, as in any parser.
    if (field != segment.state.end() && field->is_scalar) counts[number] = 0;
    if (field == segment.state.end()) {
      if (!reader.Skip(type)) return false;
    } else if (field->is_int64) {
      uint64_t value;
      if (type != kVarint || !reader.ReadVarint(&value)) return false;
      std::memcpy(row + field->offset, &value, sizeof(value));
      counts[number] = 1;
    } else if (!reader.ReadFloats(type, row + field->offset, field->count, &counts[number])) {
      return false;
    }
  }
  *matches = true;
  for (const StateField& field : segment.state) {
    // An absent varint is 0, as it was when the record was written by a parser that leaves out
    // defaults.
    const int64_t wanted = field.is_int64 ? counts[field.dump_field] : field.count;
    *matches &= counts[field.dump_field] == wanted;
  }
  return true;
}

bool EntryCodec::ParseOptimizers(const char* data, int64_t size, size_t* next_segment, char* row,
                                 std::vector<uint8_t>* restored) const {
  WireReader reader(data, size);
  while (!reader.done()) {
    int number;
    WireType type;
    if (!reader.ReadTag(&number, &type)) return false;
    if (number != kDumpField || type != kLengthDelimited) {
      if (!reader.Skip(type)) return false;
      continue;
    }
    const char* dump;
    int64_t dump_size;
    if (!reader.ReadMessage(&dump, &dump_size)) return false;
    const size_t position = (*next_segment)++;
    WireReader single(dump, dump_size);
    while (!single.done()) {
      int member;
      if (!single.ReadTag(&member, &type)) return false;
      const char* state = nullptr;
      int64_t state_size = 0;
      if (type != kLengthDelimited) {
        if (!single.Skip(type)) return false;
        continue;
      }
      if (!single.ReadMessage(&state, &state_size)) return false;
      if (position >= dumped_segments_.size()) continue;
      const Segment& segment = layout_.segments[dumped_segments_[position]];
      if (member != segment.dump_number) continue;
      bool matches;
      if (!ParseState(segment, state, state_size, row, &matches)) return false;
      if (matches) {
        (*restored)[position] = 1;
      } else {
        InitializeState(layout_, segment, row);
      }
    }
  }
  return true;
}

// Reads a record that this very layout wrote: its bytes are the template's but for the id, the
// floats and the timestamp. False: the record is another, or damaged; `row` may be changed.
bool EntryCodec::ParseAsWritten(const char* data, int64_t size, char* row,
                                ParsedEntry* entry) const {
  const int64_t fixed = static_cast<int64_t>(template_.size());
  if (size <= fixed || data[0] != template_[0]) return false;
  int64_t at = kIdBytes;  // behind what was compared or copied
  for (const Patch& patch : patches_) {
    const int64_t begin = patch.record_offset;
    if (std::memcmp(data + at, template_.data() + at, begin - at) != 0) return false;
    const char tag = template_[begin - 1];
    char* __restrict to = row + patch.row_offset;
    char other_tags = 0;
    for (int64_t i = 0; i < patch.count; ++i) {
      other_tags |= static_cast<char>(data[begin + 5 * i - 1] ^ tag);
      std::memcpy(to + 4 * i, data + begin + 5 * i, 4);
    }
    if (other_tags != 0) return false;
    at = begin + 5 * patch.count - 1;
  }
  if (std::memcmp(data + at, template_.data() + at, fixed - at) != 0) return false;
  std::memcpy(&entry->id, data + 1, sizeof(entry->id));
  WireReader reader(data + fixed, size - fixed);
  uint64_t ts;
  if (!reader.ReadVarint(&ts) || !reader.done()) return false;
  entry->ts = ClampTimestamp(static_cast<int64_t>(ts));
  return true;
}

Status EntryCodec::Parse(const char* data, int64_t size, float* values, char* row,
                         ParsedEntry* entry) const {
  *entry = ParsedEntry();
  const bool training = !layout_.serving();
  if (training) {
    InitializeState(layout_, row);
    if (fixed_size_ && ParseAsWritten(data, size, row, entry)) {
      std::memcpy(values, row, 4 * layout_.dim);
      return Status::Ok();
    }
    *entry = ParsedEntry();
    InitializeState(layout_, row);
  }
  static thread_local std::vector<uint8_t> restored;
  restored.assign(dumped_segments_.size(), 0);
  int64_t num_values = 0;
  size_t next_segment = 0;
  WireReader reader(data, size);
  while (!reader.done()) {
    int number;
    WireType type;
    if (!reader.ReadTag(&number, &type)) return Corrupt();
    bool good = true;
    if (number == kIdField && type == kFixed64) {
      good = reader.ReadBytes(&entry->id, sizeof(entry->id));
    } else if (number == kNumField && (type == kFixed32 || type == kLengthDelimited)) {
      good = reader.ReadFloats(type, reinterpret_cast<char*>(values), layout_.dim, &num_values);
    } else if (number == kOptField && type == kLengthDelimited) {
      const char* opt;
      int64_t opt_size;
      good = reader.ReadMessage(&opt, &opt_size) &&
             (!training || ParseOptimizers(opt, opt_size, &next_segment, row, &restored));
    } else if (number == kTsField && type == kVarint) {
      uint64_t ts;
      good = reader.ReadVarint(&ts);
      if (good) entry->ts = ClampTimestamp(static_cast<int64_t>(ts));
    } else {
      good = reader.Skip(type);
    }
    if (!good) return Corrupt();
  }
  if (num_values != layout_.dim) {
    return Status::InvalidArgument(
        "id " + std::to_string(entry->id) + " has " + std::to_string(num_values) +
        " values in the checkpoint, but the table has dim " + std::to_string(layout_.dim));
  }
  if (!training) return Status::Ok();
  std::memcpy(row, values, 4 * layout_.dim);
  for (size_t i = 0; i < dumped_segments_.size(); ++i) {
    if (!restored[i] && layout_.segments[dumped_segments_[i]].state_bytes > 0) ++entry->state_reset;
  }
  return Status::Ok();
}

}  // namespace engine
}  // namespace monolith
