#include "monolith/native_training/runtime/arrow/parquet_reader.h"

#include <arrow/api.h>
#include <arrow/io/interfaces.h>
#include <arrow/util/float16.h>
#include <parquet/arrow/reader.h>
#include <parquet/arrow/schema.h>
#include <parquet/file_reader.h>
#include <parquet/metadata.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using arrow::Array;
using arrow::Result;
using arrow::Status;
using arrow::Type;

// Rows that Arrow decodes at once.
constexpr int64_t kDecodeRows = 8192;

// Lets Arrow read from a MonolithParquetInput.
class InputFile final : public arrow::io::RandomAccessFile {
 public:
  explicit InputFile(const MonolithParquetInput& input) : input_(input) {}

  Status Close() override {
    is_closed_ = true;
    return Status::OK();
  }
  bool closed() const override { return is_closed_; }
  Result<int64_t> Tell() const override { return position_; }
  Status Seek(int64_t position) override {
    position_ = position;
    return Status::OK();
  }
  Result<int64_t> GetSize() override { return input_.size; }

  Result<int64_t> ReadAt(int64_t position, int64_t size, void* out) override {
    if (position < 0 || size < 0 || position > input_.size) {
      return Status::Invalid("cannot read ", size, " bytes at ", position, " of a file of ",
                             input_.size);
    }
    size = std::min(size, input_.size - position);
    const int64_t read = input_.read(input_.context, position, size, out);
    if (read < 0) return Status::IOError("reading ", size, " bytes at ", position, " failed");
    return read;
  }

  Result<std::shared_ptr<arrow::Buffer>> ReadAt(int64_t position, int64_t size) override {
    if (position < 0 || size < 0 || position > input_.size) {
      return Status::Invalid("cannot read ", size, " bytes at ", position, " of a file of ",
                             input_.size);
    }
    size = std::min(size, input_.size - position);
    ARROW_ASSIGN_OR_RAISE(auto buffer, arrow::AllocateResizableBuffer(size));
    ARROW_ASSIGN_OR_RAISE(const int64_t read, ReadAt(position, size, buffer->mutable_data()));
    ARROW_RETURN_NOT_OK(buffer->Resize(read));
    return std::shared_ptr<arrow::Buffer>(std::move(buffer));
  }

  Result<int64_t> Read(int64_t size, void* out) override {
    ARROW_ASSIGN_OR_RAISE(const int64_t read, ReadAt(position_, size, out));
    position_ += read;
    return read;
  }

  Result<std::shared_ptr<arrow::Buffer>> Read(int64_t size) override {
    ARROW_ASSIGN_OR_RAISE(auto buffer, ReadAt(position_, size));
    position_ += buffer->size();
    return buffer;
  }

 private:
  const MonolithParquetInput input_;
  int64_t position_ = 0;
  bool is_closed_ = false;
};

// Returns the kind of values a type has; OTHER for types that cannot be read.
MonolithParquetKind KindOf(const arrow::DataType& type) {
  switch (type.id()) {
    case Type::INT8:
    case Type::INT16:
    case Type::INT32:
    case Type::INT64:
    case Type::UINT8:
    case Type::UINT16:
    case Type::UINT32:
    case Type::UINT64:
      return MONOLITH_PARQUET_INTEGER;
    case Type::HALF_FLOAT:
    case Type::FLOAT:
    case Type::DOUBLE:
      return MONOLITH_PARQUET_FLOAT;
    case Type::BINARY:
    case Type::STRING:
    case Type::LARGE_BINARY:
    case Type::LARGE_STRING:
      return MONOLITH_PARQUET_BYTES;
    default:
      return MONOLITH_PARQUET_OTHER;
  }
}

bool IsList(const arrow::DataType& type) {
  return type.id() == Type::LIST || type.id() == Type::LARGE_LIST;
}

const arrow::DataType& WithoutDictionary(const arrow::DataType& type) {
  if (type.id() != Type::DICTIONARY) return type;
  return *static_cast<const arrow::DictionaryType&>(type).value_type();
}

// Collects the values of one column.
class Column {
 public:
  explicit Column(std::string name) : name_(std::move(name)) {}

  // Finds the column in the file and appends the positions of its parts to `leaves`.
  void Describe(const parquet::arrow::SchemaManifest& manifest, std::vector<int>* leaves) {
    for (const parquet::arrow::SchemaField& field : manifest.schema_fields) {
      if (field.field->name() != name_) continue;
      if (++count_ > 1) continue;
      AddLeaves(field, leaves);
      const arrow::DataType& type = *field.field->type();
      type_name_ = type.ToString();
      is_list_ = IsList(type);
      const arrow::DataType& value_type = WithoutDictionary(
          is_list_ ? *static_cast<const arrow::BaseListType&>(type).value_type() : type);
      kind_ = KindOf(value_type);
      is_unsigned_ = arrow::is_unsigned_integer(value_type.id());
    }
  }

  void Clear() {
    row_splits_.assign(1, 0);
    integers_.clear();
    floats_.clear();
    bytes_.clear();
    byte_splits_.assign(1, 0);
    first_null_ = -1;
  }

  Status Append(const Array& array) {
    switch (array.type_id()) {
      case Type::LIST:
        return AppendLists(static_cast<const arrow::ListArray&>(array));
      case Type::LARGE_LIST:
        return AppendLists(static_cast<const arrow::LargeListArray&>(array));
      default: {
        const int64_t first_row = num_rows();
        for (int64_t i = 0; i < array.length(); ++i) row_splits_.push_back(row_splits_.back() + 1);
        if (array.null_count() > 0) {
          for (int64_t i = 0; i < array.length(); ++i) {
            if (array.IsNull(i)) NoteNull(first_row + i);
          }
        }
        return AppendValues(array);
      }
    }
  }

  const std::string& name() const { return name_; }
  bool IsReadable() const { return count_ == 1 && kind_ != MONOLITH_PARQUET_OTHER; }

  void Describe(MonolithParquetColumn* column) const {
    *column = {count_, kind_, is_list_, is_unsigned_, type_name_.c_str()};
  }

  void GetValues(MonolithParquetValues* values) const {
    *values = {row_splits_.data(), integers_.data(),    floats_.data(),
               bytes_.data(),      byte_splits_.data(), first_null_};
  }

 private:
  static void AddLeaves(const parquet::arrow::SchemaField& field, std::vector<int>* leaves) {
    if (field.is_leaf()) leaves->push_back(field.column_index);
    for (const parquet::arrow::SchemaField& child : field.children) AddLeaves(child, leaves);
  }

  int64_t num_rows() const { return static_cast<int64_t>(row_splits_.size()) - 1; }

  void NoteNull(int64_t row) {
    if (first_null_ < 0 || row < first_null_) first_null_ = row;
  }

  template <typename ListArray>
  Status AppendLists(const ListArray& lists) {
    for (int64_t i = 0; i < lists.length(); ++i) {
      const int64_t row = num_rows();
      if (lists.IsNull(i)) {
        NoteNull(row);
        row_splits_.push_back(row_splits_.back());
        continue;
      }
      const int64_t length = lists.value_length(i);
      row_splits_.push_back(row_splits_.back() + length);
      if (length == 0) continue;
      const std::shared_ptr<Array> values = lists.values()->Slice(lists.value_offset(i), length);
      if (values->null_count() > 0) NoteNull(row);
      ARROW_RETURN_NOT_OK(AppendValues(*values));
    }
    return Status::OK();
  }

  // Appends an arbitrary value for a null: first_null reports the row.
  Status AppendValues(const Array& array) {
    switch (array.type_id()) {
      case Type::INT8:
        return AppendNumbers<arrow::Int8Array>(array, &integers_);
      case Type::INT16:
        return AppendNumbers<arrow::Int16Array>(array, &integers_);
      case Type::INT32:
        return AppendNumbers<arrow::Int32Array>(array, &integers_);
      case Type::INT64:
        return AppendNumbers<arrow::Int64Array>(array, &integers_);
      case Type::UINT8:
        return AppendNumbers<arrow::UInt8Array>(array, &integers_);
      case Type::UINT16:
        return AppendNumbers<arrow::UInt16Array>(array, &integers_);
      case Type::UINT32:
        return AppendNumbers<arrow::UInt32Array>(array, &integers_);
      case Type::UINT64:
        return AppendNumbers<arrow::UInt64Array>(array, &integers_);
      case Type::FLOAT:
        return AppendNumbers<arrow::FloatArray>(array, &floats_);
      case Type::DOUBLE:
        return AppendNumbers<arrow::DoubleArray>(array, &floats_);
      case Type::HALF_FLOAT: {
        const auto& halves = static_cast<const arrow::HalfFloatArray&>(array);
        for (int64_t i = 0; i < halves.length(); ++i) {
          floats_.push_back(arrow::util::Float16::FromBits(halves.Value(i)).ToDouble());
        }
        return Status::OK();
      }
      case Type::BINARY:
      case Type::STRING:
        return AppendBytes(static_cast<const arrow::BinaryArray&>(array));
      case Type::LARGE_BINARY:
      case Type::LARGE_STRING:
        return AppendBytes(static_cast<const arrow::LargeBinaryArray&>(array));
      case Type::DICTIONARY:
        return AppendEntries(static_cast<const arrow::DictionaryArray&>(array));
      default:
        return Status::Invalid("column '", name_, "' is ", array.type()->ToString());
    }
  }

  template <typename NumberArray, typename Number>
  static Status AppendNumbers(const Array& array, std::vector<Number>* out) {
    const auto* const values = static_cast<const NumberArray&>(array).raw_values();
    for (int64_t i = 0; i < array.length(); ++i) out->push_back(static_cast<Number>(values[i]));
    return Status::OK();
  }

  template <typename BytesArray>
  Status AppendBytes(const BytesArray& array) {
    for (int64_t i = 0; i < array.length(); ++i) {
      if (array.IsValid(i)) {
        const auto view = array.GetView(i);
        bytes_.append(view.data(), view.size());
      }
      byte_splits_.push_back(static_cast<int64_t>(bytes_.size()));
    }
    return Status::OK();
  }

  Status AppendEntries(const arrow::DictionaryArray& array) {
    const std::shared_ptr<Array> dictionary = array.dictionary();
    for (int64_t i = 0; i < array.length(); ++i) {
      int64_t entry = 0;
      if (array.IsValid(i)) {
        entry = array.GetValueIndex(i);
        if (entry < 0 || entry >= dictionary->length() || dictionary->IsNull(entry)) {
          return Status::Invalid("column '", name_, "' has entry ", entry, " of a dictionary of ",
                                 dictionary->length());
        }
      } else if (dictionary->length() == 0) {
        ARROW_RETURN_NOT_OK(AppendPlaceholder());
        continue;
      }
      ARROW_RETURN_NOT_OK(AppendValues(*dictionary->Slice(entry, 1)));
    }
    return Status::OK();
  }

  Status AppendPlaceholder() {
    if (kind_ == MONOLITH_PARQUET_INTEGER) integers_.push_back(0);
    if (kind_ == MONOLITH_PARQUET_FLOAT) floats_.push_back(0);
    if (kind_ == MONOLITH_PARQUET_BYTES) byte_splits_.push_back(byte_splits_.back());
    return Status::OK();
  }

  const std::string name_;
  int64_t count_ = 0;
  MonolithParquetKind kind_ = MONOLITH_PARQUET_OTHER;
  bool is_list_ = false;
  bool is_unsigned_ = false;
  std::string type_name_;
  std::vector<int64_t> row_splits_ = {0};
  std::vector<int64_t> integers_;
  std::vector<double> floats_;
  std::string bytes_;
  std::vector<int64_t> byte_splits_ = {0};
  int64_t first_null_ = -1;
};

void SetError(const std::string& text, char* error, int64_t error_size) {
  if (error_size <= 0) return;
  const size_t size = std::min<size_t>(text.size(), static_cast<size_t>(error_size) - 1);
  std::memcpy(error, text.data(), size);
  error[size] = '\0';
}

// Runs `function`, which returns a Status. Keeps what Arrow throws inside the library.
template <typename Function>
bool Run(char* error, int64_t error_size, const Function& function) {
  try {
    const Status status = function();
    if (status.ok()) return true;
    SetError(status.ToString(), error, error_size);
  } catch (const std::exception& exception) {
    SetError(exception.what(), error, error_size);
  } catch (...) {
    SetError("unknown exception", error, error_size);
  }
  return false;
}

}  // namespace

struct MonolithParquetReader {
 public:
  Status Open(const MonolithParquetInput& input, const char* const* names, int64_t num_names) {
    for (int64_t i = 0; i < num_names; ++i) columns_.emplace_back(names[i]);
    parquet::arrow::FileReaderBuilder builder;
    parquet::ReaderProperties checked = parquet::default_reader_properties();
    // Pages have checksums where their writer chose so.
    checked.set_page_checksum_verification(true);
    ARROW_RETURN_NOT_OK(builder.Open(std::make_shared<InputFile>(input), checked));
    parquet::ArrowReaderProperties properties(/*use_threads=*/false);
    properties.set_batch_size(kDecodeRows);
    // Otherwise Arrow's threads read a whole row group in advance.
    properties.set_pre_buffer(false);
    builder.properties(properties);
    ARROW_RETURN_NOT_OK(builder.Build(&file_));
    ARROW_RETURN_NOT_OK(CheckGroups());
    std::shared_ptr<arrow::Schema> schema;
    ARROW_RETURN_NOT_OK(file_->GetSchema(&schema));
    for (const std::string& name : schema->field_names()) {
      all_names_ += (all_names_.empty() ? "" : ", ") + name;
    }
    for (Column& column : columns_) column.Describe(file_->manifest(), &leaves_);
    std::sort(leaves_.begin(), leaves_.end());
    leaves_.erase(std::unique(leaves_.begin(), leaves_.end()), leaves_.end());
    return Status::OK();
  }

  Status Seek(int64_t row) {
    if (row < 0 || row > num_rows()) {
      return Status::Invalid("row ", row, " is not one of ", num_rows());
    }
    group_ = 0;
    while (group_ < file_->num_row_groups() && row >= GroupRows(group_)) {
      row -= GroupRows(group_);
      ++group_;
    }
    decoder_.reset();
    batch_.reset();
    skip_ = row;
    return Status::OK();
  }

  Status Read(int64_t rows, int64_t* num_read) {
    for (const Column& column : columns_) {
      if (!column.IsReadable())
        return Status::Invalid("column '", column.name(), "' is unreadable");
    }
    for (Column& column : columns_) column.Clear();
    *num_read = 0;
    while (*num_read < rows) {
      bool is_end;
      ARROW_RETURN_NOT_OK(FillBatch(&is_end));
      if (is_end) return Status::OK();
      const int64_t taken = std::min(rows - *num_read, batch_->num_rows() - next_row_);
      for (Column& column : columns_) {
        const std::shared_ptr<Array> array = batch_->GetColumnByName(column.name());
        if (array == nullptr) return Status::Invalid("column '", column.name(), "' is missing");
        if (array->length() != batch_->num_rows()) {
          return Status::Invalid("row group ", group_ - 1, ": column '", column.name(), "' has ",
                                 array->length(), " of ", batch_->num_rows(), " rows");
        }
        ARROW_RETURN_NOT_OK(column.Append(*array->Slice(next_row_, taken)));
      }
      next_row_ += taken;
      *num_read += taken;
    }
    return Status::OK();
  }

  int64_t num_rows() const { return file_->parquet_reader()->metadata()->num_rows(); }
  const std::string& all_names() const { return all_names_; }
  const Column& column(int64_t index) const { return columns_[static_cast<size_t>(index)]; }

 private:
  int64_t GroupRows(int group) const {
    return file_->parquet_reader()->metadata()->RowGroup(group)->num_rows();
  }

  // Checks that the file has the rows of its groups.
  Status CheckGroups() const {
    int64_t rows = 0;
    for (int group = 0; group < file_->num_row_groups(); ++group) {
      const int64_t group_rows = GroupRows(group);
      if (group_rows < 0 || group_rows > num_rows() - rows) {
        return Status::Invalid("row group ", group, " has ", group_rows, " rows, after ", rows,
                               " in the groups before, of ", num_rows(), " in all");
      }
      rows += group_rows;
    }
    if (rows == num_rows()) return Status::OK();
    return Status::Invalid("the row groups have ", rows, " of ", num_rows(), " rows");
  }

  // Makes batch_ hold the next row.
  Status FillBatch(bool* is_end) {
    *is_end = false;
    while (batch_ == nullptr || next_row_ >= batch_->num_rows()) {
      batch_.reset();
      if (decoder_ == nullptr) {
        *is_end = group_ >= file_->num_row_groups();
        if (*is_end) return Status::OK();
        ++group_;
      }
      const Status status = DecodeBatch();
      if (!status.ok()) {
        return status.WithMessage("row group ", group_ - 1, ": ", status.message());
      }
      if (batch_ == nullptr) {
        decoder_.reset();
        continue;
      }
      next_row_ = std::min(skip_, batch_->num_rows());
      skip_ -= next_row_;
    }
    return Status::OK();
  }

  // Makes batch_ hold the next rows of the row group before group_; null: it has no more.
  Status DecodeBatch() {
    try {
      const int64_t group_rows = GroupRows(group_ - 1);
      if (decoder_ == nullptr) {
        ARROW_ASSIGN_OR_RAISE(decoder_, file_->GetRecordBatchReader({group_ - 1}, leaves_));
        decoded_rows_ = 0;
      }
      ARROW_ASSIGN_OR_RAISE(batch_, decoder_->Next());
      // Arrow takes the end of a column for the end of the group.
      if (batch_ != nullptr) decoded_rows_ += batch_->num_rows();
      if (batch_ == nullptr ? decoded_rows_ < group_rows : decoded_rows_ > group_rows) {
        return Status::Invalid("it has ", group_rows, " rows, but pages of ", decoded_rows_);
      }
      return Status::OK();
    } catch (const std::exception& exception) {
      return Status::IOError(exception.what());
    }
  }

  std::vector<Column> columns_;
  std::unique_ptr<parquet::arrow::FileReader> file_;
  std::string all_names_;
  std::vector<int> leaves_;
  int group_ = 0;  // the row group after decoder_'s
  std::unique_ptr<arrow::RecordBatchReader> decoder_;
  std::shared_ptr<arrow::RecordBatch> batch_;
  int64_t decoded_rows_ = 0;  // by decoder_
  int64_t next_row_ = 0;      // position in batch_
  int64_t skip_ = 0;          // rows to skip before the next
};

#define MONOLITH_EXPORT __attribute__((visibility("default")))

extern "C" {

MONOLITH_EXPORT MonolithParquetReader* MonolithParquetOpen(const MonolithParquetInput* input,
                                                           const char* const* names,
                                                           int64_t num_names, char* error,
                                                           int64_t error_size) {
  std::unique_ptr<MonolithParquetReader> reader;
  const bool ok = Run(error, error_size, [&] {
    reader = std::make_unique<MonolithParquetReader>();
    return reader->Open(*input, names, num_names);
  });
  return ok ? reader.release() : nullptr;
}

MONOLITH_EXPORT void MonolithParquetClose(MonolithParquetReader* reader) {
  const std::unique_ptr<MonolithParquetReader> closed(reader);
}

MONOLITH_EXPORT void MonolithParquetDescribe(const MonolithParquetReader* reader, int64_t index,
                                             MonolithParquetColumn* column) {
  reader->column(index).Describe(column);
}

MONOLITH_EXPORT const char* MonolithParquetAllNames(const MonolithParquetReader* reader) {
  return reader->all_names().c_str();
}

MONOLITH_EXPORT int64_t MonolithParquetNumRows(const MonolithParquetReader* reader) {
  return reader->num_rows();
}

MONOLITH_EXPORT int MonolithParquetSeek(MonolithParquetReader* reader, int64_t row, char* error,
                                        int64_t error_size) {
  return Run(error, error_size, [&] { return reader->Seek(row); }) ? 0 : -1;
}

MONOLITH_EXPORT int64_t MonolithParquetRead(MonolithParquetReader* reader, int64_t rows,
                                            char* error, int64_t error_size) {
  int64_t num_read = 0;
  return Run(error, error_size, [&] { return reader->Read(rows, &num_read); }) ? num_read : -1;
}

MONOLITH_EXPORT void MonolithParquetGetValues(const MonolithParquetReader* reader, int64_t index,
                                              MonolithParquetValues* values) {
  reader->column(index).GetValues(values);
}

}  // extern "C"
