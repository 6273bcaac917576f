#include "monolith/serving/native/row_log/dense_follower.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "monolith/native_training/runtime/base/crc32c.h"
#include "monolith/realtime/row_log.pb.h"
#include "monolith/serving/native/base/log.h"
#include "monolith/serving/native/model/followed_graph.h"
#include "monolith/serving/native/model/run_gate.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"

namespace monolith {
namespace serving {
namespace {

// The most names that an error quotes.
constexpr size_t kMaxNamed = 16;

Status Poisoned(const std::string& why) { return Status(Code::kInvalidArgument, why); }

Status ParseChunk(std::string_view value, realtime::DenseSet* chunk) {
  const std::string size = std::to_string(value.size()) + " bytes are no set of variables: ";
  if (value.size() < kCrcBytes) return Poisoned(size + "they have no checksum");
  uint32_t crc = 0;
  std::memcpy(&crc, value.data(), kCrcBytes);
  value.remove_prefix(kCrcBytes);
  if (crc != engine::MaskCrc(engine::Crc32c(value.data(), static_cast<int64_t>(value.size())))) {
    return Poisoned(size + "their checksum is another one");
  }
  if (!chunk->ParseFromArray(value.data(), static_cast<int>(value.size()))) {
    return Poisoned(size + "they cannot be parsed");
  }
  if (chunk->chunk() < 0 || chunk->chunk() >= chunk->num_chunks()) {
    return Poisoned("it is chunk " + std::to_string(chunk->chunk()) + " of " +
                    std::to_string(chunk->num_chunks()));
  }
  return Status();
}

// Compares before it makes the tensor: a few bytes can name any shape.
Status ReadTensor(const DenseVariable& variable, const std::string& bytes,
                  tensorflow::Tensor* tensor) {
  tensorflow::TensorProto proto;
  if (!proto.ParseFromString(bytes)) {
    return Poisoned("tensor '" + variable.name + "' cannot be read");
  }
  tensorflow::TensorShape shape;
  if (!tensorflow::TensorShape::BuildTensorShape(proto.tensor_shape(), &shape).ok() ||
      shape != variable.shape || proto.dtype() != variable.dtype) {
    return Poisoned("'" + variable.name + "' is " + tensorflow::DataTypeString(proto.dtype()) +
                    tensorflow::TensorShape::DebugString(proto.tensor_shape()) + ", want " +
                    tensorflow::DataTypeString(variable.dtype) + variable.shape.DebugString());
  }
  if (!tensor->FromProto(proto)) return Poisoned("tensor '" + variable.name + "' cannot be read");
  return Status();
}

}  // namespace

DenseFollower::DenseFollower(std::string servers, const SyncState& state,
                             std::chrono::duration<double> interval)
    : name_(state.Describe()),
      epoch_(state.epoch),
      log_(std::move(servers), state, interval, this) {}

Status DenseFollower::Open(Servable* servable) {
  nodes_ = servable->dense_nodes();
  std::vector<std::string> feeds;
  for (const DenseVariable& variable : nodes_->variables) feeds.push_back(variable.feed);
  Status status = servable->MakeCall(feeds, {}, {nodes_->assign}, &assign_);
  if (!status.ok()) return status;
  if (!nodes_->step.empty()) {
    std::unique_ptr<SessionCall> read;
    std::vector<tensorflow::Tensor> step;
    status = servable->MakeCall({}, {nodes_->step}, {}, &read);
    if (status.ok()) status = read->Run({}, &step);
    if (!status.ok()) return status;
    if (step[0].dtype() == tensorflow::DT_INT64 && step[0].NumElements() == 1) {
      version_ = step[0].flat<int64_t>()(0);
    } else if (step[0].dtype() == tensorflow::DT_INT32 && step[0].NumElements() == 1) {
      version_ = step[0].flat<int32_t>()(0);
    }
  }
  gate_ = servable->MakeGate();
  return Status();
}

Status DenseFollower::Handle(bool, std::string_view value) {
  realtime::DenseSet chunk;
  Status status = ParseChunk(value, &chunk);
  if (!status.ok()) return status;
  // An export made before the first set has no epoch, only its own step.
  const std::pair<int64_t, int64_t> newest(epoch_, version_);
  if (std::pair<int64_t, int64_t>(epoch_ > 0 ? chunk.epoch() : 0, chunk.version()) <= newest) {
    return Status();
  }
  const std::tuple<int64_t, int64_t, int32_t> number(chunk.epoch(), chunk.version(),
                                                     chunk.num_chunks());
  if (number != number_) {
    if (number < number_) return Status();
    number_ = number;
    chunks_.clear();
  }
  auto& tensors = chunks_[chunk.chunk()];
  tensors.clear();
  for (auto& tensor : *chunk.mutable_tensors()) {
    tensors.emplace_back(std::move(*tensor.mutable_name()), std::move(*tensor.mutable_tensor()));
  }
  if (static_cast<int64_t>(chunks_.size()) < chunk.num_chunks()) return Status();
  std::map<std::string, std::string> joined;
  for (auto& [index, pieces] : chunks_) {
    for (auto& [name, piece] : pieces) joined[name] += piece;
  }
  number_ = {0, 0, 0};
  chunks_.clear();
  status = Assign(joined);
  if (!status.ok()) return status;
  epoch_ = chunk.epoch();
  version_ = chunk.version();
  ++sets_;
  LogInfo("Dense variables of " + name_ + " are those of step " + std::to_string(chunk.version()));
  return Status();
}

Status DenseFollower::Assign(const std::map<std::string, std::string>& tensors) {
  std::vector<tensorflow::Tensor> values;
  // Partitions of one variable share its tensor.
  std::map<std::string, tensorflow::Tensor> read;
  for (const DenseVariable& variable : nodes_->variables) {
    const auto found = tensors.find(variable.name);
    if (found == tensors.end()) {
      std::string names;
      size_t count = 0;
      for (const auto& [name, bytes] : tensors) {
        if (count++ < kMaxNamed) names += (names.empty() ? "'" : ", '") + name + "'";
      }
      return Poisoned("the set lacks '" + variable.name + "' and has [" + names + "]");
    }
    auto known = read.find(variable.name);
    if (known == read.end()) {
      tensorflow::Tensor tensor;
      const Status status = ReadTensor(variable, found->second, &tensor);
      if (!status.ok()) return status;
      known = read.emplace(variable.name, std::move(tensor)).first;
    }
    values.push_back(known->second);
  }
  std::vector<tensorflow::Tensor> nothing;
  const std::lock_guard<RunGate> closed(*gate_);
  return assign_->Run(values, &nothing);
}

void DenseFollower::AddSamples(std::vector<FollowerSample>* samples) const {
  const auto add = [&](const char* name, const char* meaning, int64_t value, bool is_counter) {
    samples->push_back(
        {std::string("monolith_sync_") + name, meaning, 0, static_cast<double>(value), is_counter});
  };
  add("dense_version", "Step of the dense variables.", version_, false);
  add("dense_sets", "Sets of dense variables assigned.", sets_, true);
  add("dense_skipped_messages",
      "Messages with dense variables that could not be read, and were left out.", log_.skipped(),
      true);
}

}  // namespace serving
}  // namespace monolith
