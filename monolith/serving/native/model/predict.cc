#include "monolith/serving/native/model/predict.h"

#include <algorithm>
#include <vector>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/protobuf.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {

namespace {

using tensorflow::protobuf::internal::WireFormatLite;
using tensorflow::protobuf::io::CodedInputStream;

// The memory of a protobuf string of a repeated field, beside its bytes.
constexpr int64_t kRepeatedStringBytes = 48;
// The memory that protobuf takes for an unknown field of bytes, beside its bytes.
constexpr int64_t kUnknownFieldBytes = 64;
constexpr int64_t kMaxShapeBytes = 64 << 10;
constexpr int64_t kInlineStringBytes = 22;
constexpr int64_t kHuge = int64_t{1} << 60;
// A number as text, with the spare capacity of a growing string.
constexpr int64_t kJsonNumberBytes = 32;

Status Refuse(const std::string& alias, const std::string& what) {
  return Status(Code::kInvalidArgument, "input '" + alias + "' " + what);
}

// The sizes that a TensorProto claims, read without making one.
struct Claim {
  int type = 0;
  tensorflow::TensorShapeProto shape;
  // The sum over all shapes, which are merged.
  int64_t shape_bytes = 0;
  // The number of given elements; of strings, their size and that of the last one.
  int64_t num_strings = 0;
  int64_t string_bytes = 0;
  int64_t last_string_bytes = 0;
  // The most memory that the parsed message takes.
  int64_t message_bytes = 0;
};

// Returns how much larger a packed field may be in memory.
int64_t Spread(int field) {
  switch (field) {
    case tensorflow::TensorProto::kIntValFieldNumber:
    case tensorflow::TensorProto::kHalfValFieldNumber:
    case tensorflow::TensorProto::kUint32ValFieldNumber:
      return 4;
    case tensorflow::TensorProto::kInt64ValFieldNumber:
    case tensorflow::TensorProto::kUint64ValFieldNumber:
      return 8;
    default:
      return 1;
  }
}

bool ReadField(CodedInputStream* stream, uint32_t tag, Claim* claim) {
  const int field = WireFormatLite::GetTagFieldNumber(tag);
  const auto type = WireFormatLite::GetTagWireType(tag);
  uint32_t size = 0;
  if (field == tensorflow::TensorProto::kDtypeFieldNumber &&
      type == WireFormatLite::WIRETYPE_VARINT) {
    uint64_t value = 0;
    if (!stream->ReadVarint64(&value)) return false;
    claim->type = static_cast<int>(value);
    return true;
  }
  if (type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
    const int begin = stream->CurrentPosition();
    if (!WireFormatLite::SkipField(stream, tag)) return false;
    // A group may hold further fields of two bytes.
    const bool is_group = type == WireFormatLite::WIRETYPE_START_GROUP;
    claim->message_bytes +=
        kRepeatedStringBytes * (is_group ? stream->CurrentPosition() - begin : 1);
    return true;
  }
  if (!stream->ReadVarint32(&size)) return false;
  // None of these can be sent, and protobuf reads past the end of a truncated one.
  if (field == tensorflow::TensorProto::kResourceHandleValFieldNumber ||
      field == tensorflow::TensorProto::kVariantValFieldNumber) {
    return false;
  }
  if (field == tensorflow::TensorProto::kTensorShapeFieldNumber) {
    std::string text;
    // Several are merged, as protobuf does it.
    claim->shape_bytes += size;
    return claim->shape_bytes <= kMaxShapeBytes &&
           stream->ReadString(&text, static_cast<int>(size)) &&
           claim->shape.MergeFromString(text) && claim->shape.dim_size() <= 254;
  }
  if (field == tensorflow::TensorProto::kStringValFieldNumber) {
    ++claim->num_strings;
    claim->last_string_bytes = StringElementBytes(size);
    claim->string_bytes += claim->last_string_bytes;
    claim->message_bytes += kRepeatedStringBytes;
  } else {
    claim->message_bytes += kUnknownFieldBytes;
  }
  claim->message_bytes += size * Spread(field);
  return stream->Skip(static_cast<int>(size));
}

bool ReadClaim(const std::string& serialized, Claim* claim) {
  CodedInputStream stream(reinterpret_cast<const uint8_t*>(serialized.data()),
                          static_cast<int>(serialized.size()));
  while (const uint32_t tag = stream.ReadTag()) {
    if (!ReadField(&stream, tag, claim)) return false;
  }
  return stream.ConsumedEntireMessage();
}

// Returns how many elements a shape has, if a size of 0 is one of 1: a model may give a row for
// each row of a shape without elements.
int64_t CountElements(const tensorflow::TensorShape& shape) {
  int64_t count = 1;
  for (int i = 0; i < shape.dims(); ++i) {
    const int64_t size = std::max<int64_t>(1, shape.dim_size(i));
    count = size > kHuge / count ? kHuge : count * size;
  }
  return count;
}

// Computes the size of the tensor. Refuses a malformed one, or one of more than `max_bytes`.
Status MeasureTensor(const std::string& alias, const std::string& serialized, int64_t max_bytes,
                     int64_t* bytes, int64_t* message_bytes) {
  Claim claim;
  if (!ReadClaim(serialized, &claim)) return Refuse(alias, "is not a TensorProto");
  const auto type = static_cast<tensorflow::DataType>(claim.type);
  const int64_t element = tensorflow::DataTypeSize(type);
  // Without a fixed size: only strings are values that can be sent.
  if (element == 0 && type != tensorflow::DT_STRING) {
    return Refuse(alias,
                  "has type " + std::to_string(claim.type) + ", which cannot be sent to a model");
  }
  tensorflow::TensorShape shape;
  if (claim.shape.unknown_rank() ||
      !tensorflow::TensorShape::BuildTensorShape(claim.shape, &shape).ok()) {
    return Refuse(alias, "has no valid shape");
  }
  const int64_t count = CountElements(shape);
  // The last value stands for those that are left out.
  const int64_t each = element > 0             ? element
                       : claim.num_strings > 0 ? claim.last_string_bytes
                                               : StringElementBytes(0);
  const int64_t given = element > 0 ? 0 : std::min(claim.num_strings, count);
  const int64_t more = count - given;
  *bytes = more > kHuge / each ? kHuge : more * each + (element > 0 ? 0 : claim.string_bytes);
  if (*bytes > max_bytes || claim.message_bytes > max_bytes) {
    return Refuse(alias, "has shape " + shape.DebugString() + " and takes more than " +
                             std::to_string(max_bytes) + " bytes, with the inputs before it");
  }
  *message_bytes = std::max(*message_bytes, claim.message_bytes);
  return Status();
}

Status ParseTensor(const std::string& alias, const std::string& serialized,
                   tensorflow::Tensor* tensor) {
  tensorflow::TensorProto proto;
  if (!proto.ParseFromString(serialized)) return Refuse(alias, "is not a TensorProto");
  if (!tensor->FromProto(proto)) {
    return Refuse(alias, "has values that do not fit its type and shape " +
                             tensorflow::TensorShape(proto.tensor_shape()).DebugString());
  }
  return Status();
}

// Returns the size of outputs, once as tensors and once as messages or JSON.
int64_t OutputBytes(const Servable::Tensors& outputs, AnswerKind kind) {
  int64_t bytes = 0;
  for (const auto& [alias, tensor] : outputs) {
    const auto size = static_cast<int64_t>(tensor.TotalBytes());
    if (tensor.dtype() == tensorflow::DT_STRING) {
      bytes += 2 * size + kRepeatedStringBytes * tensor.NumElements();
    } else if (kind == AnswerKind::kJson) {
      bytes += size + kJsonNumberBytes * tensor.NumElements();
    } else {
      bytes += 2 * size;
    }
  }
  return bytes;
}

// Returns the memory to reserve for a run: the expected size, but limited for a new size, as after
// one large answer all others would look too large to run.
int64_t ReservedBytes(Servable* servable, const Signature& signature, const MemoryLease& lease) {
  const int64_t held = lease.bytes();
  const int64_t expected = servable->output_sizes()->Expect(signature.name(), held);
  const int64_t most = std::max(lease.limit_bytes() / 4 * 3 - held, 2 * held);
  return std::min(expected, most);
}

Status OutOfMemory() {
  return Status(Code::kResourceExhausted, "the tensors of all requests take too much memory");
}

}  // namespace

int64_t StringElementBytes(int64_t size) {
  const int64_t inline_bytes = static_cast<int64_t>(sizeof(tensorflow::tstring));
  return size <= kInlineStringBytes ? inline_bytes : inline_bytes + (size + 32) / 16 * 16;
}

Status MeasureInputs(const api::PredictRequest& request, const PredictLimits& limits,
                     int64_t* tensor_bytes, int64_t* message_bytes) {
  *tensor_bytes = *message_bytes = 0;
  for (const auto& [alias, serialized] : request.inputs()) {
    int64_t bytes = 0;
    const Status status = MeasureTensor(alias, serialized, limits.max_tensor_bytes - *tensor_bytes,
                                        &bytes, message_bytes);
    if (!status.ok()) return status;
    *tensor_bytes += bytes;
  }
  return Status();
}

Status RunCounted(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                  const std::vector<std::string>& output_filter, const Runner& runner,
                  AnswerKind kind, MemoryLease* lease, Servable::Tensors* outputs) {
  const int64_t input_bytes = lease->bytes();
  if (!lease->Resize(input_bytes + ReservedBytes(servable, signature, *lease))) {
    return OutOfMemory();
  }
  const Status status = runner(servable, signature, inputs, output_filter, outputs);
  if (!status.ok()) return status;
  const int64_t output_bytes = OutputBytes(*outputs, kind);
  servable->output_sizes()->Learn(signature.name(), input_bytes, output_bytes);
  return lease->Resize(input_bytes + output_bytes) ? Status() : OutOfMemory();
}

Status RunDirectly(Servable* servable, const Signature& signature, const Servable::Tensors& inputs,
                   const std::vector<std::string>& output_filter, Servable::Tensors* outputs) {
  return servable->Run(signature, inputs, output_filter, outputs);
}

Status Predict(Servable* servable, const Signature& signature, const api::PredictRequest& request,
               const PredictLimits& limits, const Runner& runner, MemoryLease* lease,
               api::PredictResponse* response) {
  // Names first: a missing input explains more than an error in another one.
  std::vector<std::string> names;
  for (const auto& [alias, serialized] : request.inputs()) names.push_back(alias);
  Status status = signature.CheckInputNames(names);
  if (!status.ok()) return status;
  int64_t input_bytes = 0;
  int64_t message_bytes = 0;
  status = MeasureInputs(request, limits, &input_bytes, &message_bytes);
  if (!status.ok()) return status;
  if (!lease->Resize(input_bytes + message_bytes)) return OutOfMemory();
  Servable::Tensors inputs;
  for (const auto& [alias, serialized] : request.inputs()) {
    status = ParseTensor(alias, serialized, &inputs[alias]);
    if (!status.ok()) return status;
  }
  lease->Resize(input_bytes);
  const std::vector<std::string> filter(request.output_filter().begin(),
                                        request.output_filter().end());
  Servable::Tensors outputs;
  status = RunCounted(servable, signature, inputs, filter, runner, AnswerKind::kMessage, lease,
                      &outputs);
  if (!status.ok()) return status;
  inputs.clear();
  int64_t answer_bytes = 0;
  for (auto it = outputs.begin(); it != outputs.end(); it = outputs.erase(it)) {
    tensorflow::TensorProto proto;
    // As TensorFlow Serving answers: lists of values, which every client can read.
    it->second.AsProtoField(&proto);
    it->second = tensorflow::Tensor();  // what comes next is a copy, too
    std::string& serialized = (*response->mutable_outputs())[it->first];
    serialized = proto.SerializeAsString();
    answer_bytes += static_cast<int64_t>(serialized.size());
  }
  return lease->Resize(2 * answer_bytes) ? Status() : OutOfMemory();
}

}  // namespace serving
}  // namespace monolith
