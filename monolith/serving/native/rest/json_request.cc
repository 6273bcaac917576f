#include "monolith/serving/native/rest/json_request.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "monolith/serving/native/rest/json.h"
#include "monolith/serving/native/rest/json_reader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

// TensorFlow's own limit is 254; numpy's, which clients use, 32.
constexpr int kMaxDimensions = 32;
constexpr size_t kMaxSurplus = 16;
constexpr std::string_view kSignatureName = "signature_name";
constexpr std::string_view kInstances = "instances";
constexpr std::string_view kInputs = "inputs";
constexpr std::string_view kBase64Key = "b64";

Status Invalid(const std::string& text) { return Status(Code::kInvalidArgument, text); }

// A value other than a list.
struct Leaf {
  enum class Kind { kNull, kBoolean, kNumber, kString, kBase64 };

  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string_view text;
};

bool ConvertString(const Leaf& leaf, tensorflow::tstring* value) {
  if (leaf.kind == Leaf::Kind::kString) {
    value->assign(leaf.text.data(), leaf.text.size());
    return true;
  }
  std::string bytes;
  if (leaf.kind != Leaf::Kind::kBase64 || !DecodeBase64(leaf.text, &bytes)) return false;
  *value = bytes;
  return true;
}

template <typename T>
bool ConvertInteger(const JsonNumberValue& number, T* value) {
  if (number.kind == JsonNumberValue::Kind::kUnsigned) {
    *value = static_cast<T>(number.unsigned_integer);
    return std::is_same_v<T, uint64_t> || std::is_same_v<T, tensorflow::uint64>;
  }
  if (number.kind != JsonNumberValue::Kind::kInteger) return false;
  *value = static_cast<T>(number.integer);
  if constexpr (std::is_unsigned_v<T>) {
    return number.integer >= 0 &&
           static_cast<uint64_t>(number.integer) <= std::numeric_limits<T>::max();
  } else {
    return number.integer >= std::numeric_limits<T>::min() &&
           number.integer <= std::numeric_limits<T>::max();
  }
}

// Returns false for a value of another type, or one that does not fit.
template <typename T>
bool Convert(const Leaf& leaf, T* value) {
  if constexpr (std::is_same_v<T, bool>) {
    *value = leaf.boolean;
    return leaf.kind == Leaf::Kind::kBoolean;
  } else if constexpr (std::is_same_v<T, tensorflow::tstring>) {
    return ConvertString(leaf, value);
  } else {
    JsonNumberValue number;
    if (leaf.kind != Leaf::Kind::kNumber || !ReadJsonNumber(leaf.text, &number)) return false;
    if constexpr (std::is_integral_v<T>) {
      return ConvertInteger(number, value);
    } else {
      *value = static_cast<T>(number.number);
      // A number that becomes infinite does not fit.
      return std::isfinite(static_cast<double>(*value));
    }
  }
}

// Puts a value at `index` of a tensor.
bool Store(const Leaf& leaf, tensorflow::DataType type, void* data, int64_t index) {
  switch (type) {
#define MONOLITH_CASE(TYPE)                     \
  case tensorflow::DataTypeToEnum<TYPE>::value: \
    return Convert(leaf, static_cast<TYPE*>(data) + index);
    MONOLITH_CASE(float)
    MONOLITH_CASE(double)
    MONOLITH_CASE(Eigen::half)
    MONOLITH_CASE(tensorflow::bfloat16)
    MONOLITH_CASE(tensorflow::int8)
    MONOLITH_CASE(tensorflow::int16)
    MONOLITH_CASE(tensorflow::int32)
    MONOLITH_CASE(int64_t)
    MONOLITH_CASE(tensorflow::uint8)
    MONOLITH_CASE(tensorflow::uint16)
    MONOLITH_CASE(tensorflow::uint32)
    MONOLITH_CASE(tensorflow::uint64)
    MONOLITH_CASE(bool)
    MONOLITH_CASE(tensorflow::tstring)
#undef MONOLITH_CASE
    default:
      return false;
  }
}

bool JsonHolds(tensorflow::DataType type) {
  return type == tensorflow::DT_STRING ||
         (tensorflow::DataTypeSize(type) > 0 && !tensorflow::DataTypeIsComplex(type) &&
          !tensorflow::DataTypeIsQuantized(type));
}

// A visitor that can fail.
class FallibleVisitor : public JsonVisitor {
 public:
  Status error() const override { return error_; }

 protected:
  bool Fail(const std::string& text) {
    error_ = Invalid(text);
    return false;
  }

 private:
  Status error_;
};

// Reads the signature and the kind of a body; skips everything else.
class OutlineVisitor : public FallibleVisitor {
 public:
  bool Null() override { return Value(); }
  bool Boolean(bool) override { return Value(); }
  bool Number(std::string_view) override { return Value(); }
  bool String(std::string_view text) override {
    if (depth_ == 1 && key_ == kSignatureName) {
      signature_name_ = text;
      return true;
    }
    return Value();
  }
  bool StartObject() override { return (depth_ == 0 || Value()) && ++depth_ > 0; }
  bool StartArray() override { return Value() && ++depth_ > 0; }
  bool EndObject() override { return --depth_ >= 0; }
  bool EndArray() override { return --depth_ >= 0; }

  bool Key(std::string_view text) override {
    if (depth_ != 1) return true;
    if (text != kSignatureName && text != kInstances && text != kInputs) {
      return Fail("unknown key '" + std::string(text.substr(0, 100)) +
                  "', want some of ['inputs', 'instances', 'signature_name']");
    }
    if (!keys_.insert(std::string(text)).second) {
      return Fail("the key '" + std::string(text) + "' is there twice");
    }
    key_ = text;
    return true;
  }

  const std::string& signature_name() const { return signature_name_; }
  bool Has(std::string_view key) const { return keys_.count(std::string(key)) > 0; }

 private:
  bool Value() {
    if (depth_ == 0) return Fail("the body is not a JSON object");
    if (depth_ == 1 && key_ == kSignatureName) return Fail("signature_name is not a string");
    return true;
  }

  int depth_ = 0;
  std::string key_;
  std::set<std::string> keys_;
  std::string signature_name_;
};

// One input of a request.
struct Column {
  Column() { std::fill_n(sizes, kMaxDimensions, -1); }

  tensorflow::DataType type = tensorflow::DT_STRING;
  // How many values were begun: an instance each, or the one of `inputs`.
  int64_t rows = 0;
  // Rank and sizes of a value, known since its first leaf or empty list; -1 before a size's list
  // ends.
  int rank = -1;
  int64_t sizes[kMaxDimensions];
  int64_t num_leaves = 0;
  int64_t bytes = 0;
  tensorflow::Tensor tensor;
  void* data = nullptr;
};

// Reads instances or inputs into columns, twice: first to measure them, then to fill the tensors.
class ColumnVisitor : public FallibleVisitor {
 public:
  ColumnVisitor(const tensorflow::SignatureDef& signature, bool stacked) : stacked_(stacked) {
    for (const auto& [name, info] : signature.inputs()) columns_[name].type = info.dtype();
    several_ = columns_.size() > 1 && columns_.find(kBase64Key) != columns_.end();
  }

  // Begins the second reading.
  void StartFilling() {
    fills_ = true;
    section_ = Section::kBody;
    num_rows_ = 0;
    for (auto& [name, column] : columns_) {
      column.rows = column.num_leaves = 0;
      column.data = column.tensor.data();
    }
  }

  std::map<std::string, Column, std::less<>>* columns() { return &columns_; }
  int64_t num_rows() const { return num_rows_; }
  // Unknown names of inputs, as many as an error quotes.
  const std::set<std::string>& surplus() const { return surplus_; }

  bool Null() override { return TakeLeaf(Leaf()); }
  bool Boolean(bool value) override { return TakeLeaf(Leaf{Leaf::Kind::kBoolean, value, ""}); }
  bool Number(std::string_view text) override {
    return TakeLeaf(Leaf{Leaf::Kind::kNumber, false, text});
  }
  bool String(std::string_view text) override {
    return TakeLeaf(Leaf{Leaf::Kind::kString, false, text});
  }

  bool StartObject() override {
    if (section_ == Section::kBody) {
      section_ = Section::kKeys;
      return true;
    }
    if (column_ != nullptr) return StartBytes();
    // The first key tells whether these are inputs by name or the bytes of one.
    undecided_ = true;
    return section_ == Section::kInputs || section_ == Section::kInstances ||
           Fail("instances is not a list with elements");
  }

  bool Key(std::string_view text) override {
    if (section_ == Section::kKeys) {
      if (text != kSignatureName) section_ = stacked_ ? Section::kList : Section::kInputs;
      return true;
    }
    if (undecided_) {
      undecided_ = false;
      if (text == kBase64Key && !several_) return BeginOnly() && StartBytes() && Key(text);
      named_ = true;
      num_named_ = 0;
    }
    if (column_ == nullptr) return BeginNamed(text);
    if (bytes_ != Bytes::kWantsKey || text != kBase64Key) return WrongType();
    bytes_ = Bytes::kWantsText;
    return true;
  }

  bool EndObject() override {
    if (undecided_) {
      undecided_ = false;
      named_ = true;
      num_named_ = 0;
    }
    if (column_ != nullptr) {
      if (bytes_ != Bytes::kComplete) return WrongType();
      bytes_ = Bytes::kNone;
      return counts_.empty() ? EndValue() : true;
    }
    if (!named_) return true;
    named_ = false;
    return stacked_ ? EndInstance() : EndSection();
  }

  bool StartArray() override {
    if (section_ == Section::kList) {
      section_ = Section::kInstances;
      return true;
    }
    if (column_ == nullptr && !BeginOnly()) return false;
    if (bytes_ != Bytes::kNone) return WrongType();
    const int level = static_cast<int>(counts_.size());
    if (column_->rank >= 0 && level >= column_->rank) return Ragged();
    if (level + (stacked_ ? 1 : 0) >= kMaxDimensions) {
      return Fail("input '" + *name_ + "' has more than " + std::to_string(kMaxDimensions) +
                  " dimensions");
    }
    CountElement();
    counts_.push_back(0);
    return true;
  }

  bool EndArray() override {
    if (column_ == nullptr) {
      return num_rows_ > 0 ? EndSection() : Fail("instances is not a list with elements");
    }
    const int64_t count = counts_.back();
    counts_.pop_back();
    const int level = static_cast<int>(counts_.size());
    int64_t& size = column_->sizes[level];
    if (size < 0) size = count;
    if (size != count) return Ragged();
    if (count == 0 && column_->rank < 0) column_->rank = level + 1;
    return counts_.empty() ? EndValue() : true;
  }

 private:
  // Where the reading is: before the body, among its keys, before the list of instances, in it, or
  // in `inputs`.
  enum class Section { kBody, kKeys, kList, kInstances, kInputs };
  enum class Bytes { kNone, kWantsKey, kWantsText, kComplete };

  bool Ragged() { return Fail("input '" + *name_ + "' is ragged"); }
  bool WrongType() {
    return Fail("input '" + *name_ + "' has a value that is no " +
                tensorflow::DataTypeString(column_->type));
  }
  bool UnlikeFirst() {
    return Fail("instance " + std::to_string(num_rows_) +
                " is not an object with the keys of the first");
  }

  bool Begin(std::map<std::string, Column, std::less<>>::iterator found) {
    name_ = &found->first;
    column_ = &found->second;
    ++column_->rows;
    return true;
  }

  // A value without a name belongs to the only input.
  bool BeginOnly() {
    if (section_ == Section::kList) return Fail("instances is not a list with elements");
    if (columns_.size() != 1) {
      std::string names;
      for (const auto& [name, column] : columns_) {
        names += (names.empty() ? "'" : ", '") + name + "'";
      }
      return Fail("the signature takes [" + names + "]: name them, as keys of an object");
    }
    return columns_.begin()->second.rows == num_rows_ ? Begin(columns_.begin()) : UnlikeFirst();
  }

  bool BeginNamed(std::string_view name) {
    const auto found = columns_.find(name);
    if (found == columns_.end()) {
      if (surplus_.size() < kMaxSurplus) surplus_.insert(std::string(name));
      skipped_ = Column();
      ++num_named_;
      name_ = &skipped_name_;
      column_ = &skipped_;
      return true;
    }
    if (found->second.rows > num_rows_) {
      return Fail("the key '" + found->first + "' is there twice");
    }
    if (found->second.rows < num_rows_) return UnlikeFirst();
    ++num_named_;
    return Begin(found);
  }

  bool EndValue() {
    column_ = nullptr;
    if (named_) return true;
    ++num_rows_;
    return stacked_ ? true : EndSection();
  }

  bool EndInstance() {
    if (num_rows_ == 0) num_first_ = num_named_;
    if (num_named_ != num_first_) return UnlikeFirst();
    ++num_rows_;
    return true;
  }

  bool EndSection() {
    section_ = Section::kKeys;
    return true;
  }

  bool StartBytes() {
    if (bytes_ != Bytes::kNone) return WrongType();
    bytes_ = Bytes::kWantsKey;
    return true;
  }

  void CountElement() {
    if (!counts_.empty()) ++counts_.back();
  }

  bool TakeLeaf(Leaf leaf) {
    if (section_ == Section::kKeys) return true;  // signature_name
    if (column_ == nullptr && !BeginOnly()) return false;
    if (bytes_ != Bytes::kNone) {
      if (bytes_ != Bytes::kWantsText || leaf.kind != Leaf::Kind::kString) return WrongType();
      bytes_ = Bytes::kComplete;
      leaf.kind = Leaf::Kind::kBase64;
    }
    CountElement();
    const int level = static_cast<int>(counts_.size());
    if (column_->rank < 0) column_->rank = level;
    if (column_->rank != level) return Ragged();
    if (fills_) {
      if (!Store(leaf, column_->type, column_->data, column_->num_leaves)) return WrongType();
    } else {
      column_->bytes += column_->type == tensorflow::DT_STRING
                            ? StringElementBytes(static_cast<int64_t>(leaf.text.size()))
                            : tensorflow::DataTypeSize(column_->type);
    }
    ++column_->num_leaves;
    return counts_.empty() && bytes_ == Bytes::kNone ? EndValue() : true;
  }

  const bool stacked_;
  std::map<std::string, Column, std::less<>> columns_;
  // Whether an object with the key "b64" may be inputs by name.
  bool several_ = false;
  bool fills_ = false;
  Section section_ = Section::kBody;
  // Whether an object has begun that has no key yet, and whether its keys are names of inputs.
  bool undecided_ = false;
  bool named_ = false;
  int64_t num_named_ = 0;
  int64_t num_first_ = 0;
  int64_t num_rows_ = 0;
  // The value that is being read, and the sizes of its lists that are open.
  const std::string* name_ = nullptr;
  Column* column_ = nullptr;
  std::vector<int64_t> counts_;
  Bytes bytes_ = Bytes::kNone;
  // Unknown names, and the place of their values.
  std::set<std::string> surplus_;
  Column skipped_;
  const std::string skipped_name_;
};

// Reserves the tensor of a column that was measured.
Status MakeTensor(const std::string& name, bool stacked, Column* column) {
  tensorflow::TensorShape shape;
  std::vector<int64_t> dimensions;
  if (stacked) dimensions.push_back(column->rows);
  // Lists that are all empty hide the sizes below them.
  for (int i = 0; i < column->rank; ++i) {
    dimensions.push_back(std::max<int64_t>(0, column->sizes[i]));
  }
  if (!tensorflow::TensorShape::BuildTensorShape(dimensions, &shape).ok() ||
      shape.num_elements() != column->num_leaves) {
    return Invalid("input '" + name + "' is ragged");
  }
  column->tensor = tensorflow::Tensor(column->type, shape);
  if (column->num_leaves > 0 && column->tensor.data() == nullptr) {
    return Status(Code::kResourceExhausted, "out of memory");
  }
  return Status();
}

// Measures the inputs, and checks that they are those of the signature.
Status Measure(std::string_view body, const Signature& signature, const PredictLimits& limits,
               ColumnVisitor* visitor, int64_t* bytes) {
  const Status status = VisitJson(body, visitor);
  if (!status.ok()) return status;
  std::vector<std::string> names(visitor->surplus().begin(), visitor->surplus().end());
  for (const auto& [name, column] : *visitor->columns()) {
    if (column.rows > 0) names.push_back(name);
  }
  const Status named = signature.CheckInputNames(names);
  if (!named.ok()) return named;
  *bytes = 0;
  for (const auto& [name, column] : *visitor->columns()) {
    if (!JsonHolds(column.type)) {
      return Invalid("input '" + name + "' is " + tensorflow::DataTypeString(column.type) +
                     ", which JSON cannot hold");
    }
    *bytes += column.bytes;
    if (*bytes > limits.max_tensor_bytes) return Invalid("input '" + name + "' is too large");
  }
  return Status();
}

}  // namespace

Status ParseJsonRequest(std::string_view body, const Servable& servable,
                        const PredictLimits& limits, MemoryLease* lease, JsonRequest* request) {
  OutlineVisitor outline;
  Status status = VisitJson(body, &outline);
  if (!status.ok()) return status;
  const bool stacked = outline.Has(kInstances);
  if (stacked == outline.Has(kInputs)) return Invalid("want either instances or inputs");
  status = servable.FindSignature(outline.signature_name(), &request->signature);
  if (!status.ok()) return status;
  ColumnVisitor visitor(request->signature->definition(), stacked);
  int64_t bytes = 0;
  status = Measure(body, *request->signature, limits, &visitor, &bytes);
  if (!status.ok()) return status;
  if (!lease->Resize(bytes)) {
    return Status(Code::kResourceExhausted, "the tensors of all requests take too much memory");
  }
  for (auto& [name, column] : *visitor.columns()) {
    status = MakeTensor(name, stacked, &column);
    if (!status.ok()) return status;
  }
  if (stacked) request->rows = visitor.num_rows();
  visitor.StartFilling();
  status = VisitJson(body, &visitor);
  if (!status.ok()) return status;
  for (auto& [name, column] : *visitor.columns()) request->inputs[name] = column.tensor;
  return Status();
}

}  // namespace serving
}  // namespace monolith
