#include "monolith/serving/native/model/followed_graph.h"

#include <set>
#include <unordered_map>
#include <utility>

#include "monolith/native_training/hash_table_ops.pb.h"
#include "monolith/native_training/multi_hash_table_ops.pb.h"
#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/variable.pb.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

using tensorflow::DataType;
using tensorflow::MetaGraphDef;
using tensorflow::NodeDef;

// Collections of graphs, as training names them.
constexpr char kTableGroups[] = "monolith_multi_hash_tables";
constexpr char kTables[] = "monolith_hash_tables";
constexpr char kVariables[] = "variables";
constexpr char kGlobalStep[] = "global_step";
constexpr char kPrefix[] = "monolith_follower/";
constexpr char kCpu[] = "/device:CPU:0";

Status Damaged(const std::string& what) { return Status(Code::kDataLoss, what); }

// "a:0" is the tensor of node "a".
std::string NodeOf(const std::string& tensor) { return tensor.substr(0, tensor.find(':')); }

// Adds nodes with unique names.
class Builder {
 public:
  explicit Builder(MetaGraphDef* meta_graph) : graph_(*meta_graph->mutable_graph_def()) {
    for (const NodeDef& node : graph_.node()) nodes_.emplace(node.name(), &node);
  }

  const NodeDef* Find(const std::string& name) const {
    const auto found = nodes_.find(name);
    return found == nodes_.end() ? nullptr : found->second;
  }

  // Nodes of a repeated field of messages stay where they are when it grows.
  NodeDef* Add(const std::string& op, const std::string& device,
               const std::vector<std::string>& inputs) {
    std::string name;
    do {
      name = kPrefix + op + "_" + std::to_string(count_++);
    } while (nodes_.count(name) > 0);
    NodeDef* node = graph_.add_node();
    node->set_name(name);
    node->set_op(op);
    node->set_device(device);
    for (const std::string& input : inputs) node->add_input(input);
    nodes_.emplace(name, node);
    return node;
  }

  NodeDef* AddPlaceholder(DataType dtype, const std::string& device) {
    NodeDef* node = Add("Placeholder", device, {});
    SetType("dtype", dtype, node);
    (*node->mutable_attr())["shape"].mutable_shape()->set_unknown_rank(true);
    return node;
  }

  NodeDef* AddVector(const std::vector<int64_t>& values, const std::string& device) {
    NodeDef* node = Add("Const", device, {});
    SetType("dtype", tensorflow::DT_INT64, node);
    tensorflow::TensorProto* tensor = (*node->mutable_attr())["value"].mutable_tensor();
    tensor->set_dtype(tensorflow::DT_INT64);
    tensor->mutable_tensor_shape()->add_dim()->set_size(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) tensor->add_int64_val(value);
    return node;
  }

  static void SetType(const char* attr, DataType dtype, NodeDef* node) {
    (*node->mutable_attr())[attr].set_type(dtype);
  }

 private:
  tensorflow::GraphDef& graph_;
  std::unordered_map<std::string, const NodeDef*> nodes_;
  int64_t count_ = 0;
};

// Calls `take` with each message of a collection of serialized messages.
template <typename Message, typename Take>
Status ForEach(const MetaGraphDef& meta_graph, const char* collection, const Take& take) {
  const auto found = meta_graph.collection_def().find(collection);
  if (found == meta_graph.collection_def().end()) return Status();
  for (const std::string& bytes : found->second.bytes_list().value()) {
    Message message;
    if (!message.ParseFromString(bytes)) {
      return Damaged(std::string("the graph's collection ") + collection + " cannot be read");
    }
    const Status status = take(message);
    if (!status.ok()) return status;
  }
  return Status();
}

Status FindTables(const MetaGraphDef& meta_graph, const Builder& builder,
                  std::vector<std::string>* handles) {
  const auto add = [&](const std::string& tensor) {
    if (builder.Find(NodeOf(tensor)) == nullptr) {
      return Damaged("the graph has no table '" + tensor + "', which its collection names");
    }
    handles->push_back(tensor);
    return Status();
  };
  Status status = ForEach<MultiHashTableProto>(
      meta_graph, kTableGroups,
      [&](const MultiHashTableProto& group) { return add(group.handle_tensor()); });
  if (!status.ok()) return status;
  return ForEach<HashTableProto>(
      meta_graph, kTables, [&](const HashTableProto& table) { return add(table.table_tensor()); });
}

// Gives type and shape of a variable's node.
Status ReadVariable(const NodeDef& node, DenseVariable* variable) {
  const auto dtype = node.attr().find("dtype");
  const auto shape = node.attr().find("shape");
  if (dtype == node.attr().end() || shape == node.attr().end() ||
      !tensorflow::TensorShape::BuildTensorShape(shape->second.shape(), &variable->shape).ok()) {
    return Damaged("variable '" + node.name() + "' has no type or no known shape");
  }
  variable->dtype = dtype->second.type();
  return Status();
}

Status AddAssign(const tensorflow::VariableDef& definition, Builder* builder,
                 DenseVariable* variable, std::string* assign) {
  const NodeDef* node = builder->Find(NodeOf(definition.variable_name()));
  if (node == nullptr) {
    return Damaged("the graph has no variable '" + definition.variable_name() + "'");
  }
  Status status = ReadVariable(*node, variable);
  if (!status.ok()) return status;
  const std::string device = node->device();
  variable->name = node->name();
  NodeDef* feed = builder->AddPlaceholder(variable->dtype, device);
  variable->feed = feed->name() + ":0";
  std::string value = feed->name();
  if (definition.has_save_slice_info_def()) {
    const tensorflow::SaveSliceInfoDef& part = definition.save_slice_info_def();
    const std::vector<int64_t> begin(part.var_offset().begin(), part.var_offset().end());
    const std::vector<int64_t> size(part.var_shape().begin(), part.var_shape().end());
    tensorflow::TensorShape full;
    const std::vector<int64_t> full_shape(part.full_shape().begin(), part.full_shape().end());
    if (begin.size() != full_shape.size() || size.size() != full_shape.size() ||
        !tensorflow::TensorShape::BuildTensorShape(full_shape, &full).ok()) {
      return Damaged("partition '" + node->name() + "' says something impossible about its place");
    }
    variable->name = part.full_name();
    variable->shape = full;
    NodeDef* slice = builder->Add("Slice", device,
                                  {value, builder->AddVector(begin, device)->name(),
                                   builder->AddVector(size, device)->name()});
    Builder::SetType("T", variable->dtype, slice);
    Builder::SetType("Index", tensorflow::DT_INT64, slice);
    value = slice->name();
  }
  const bool is_resource = definition.is_resource();
  NodeDef* set =
      builder->Add(is_resource ? "AssignVariableOp" : "Assign", device, {node->name(), value});
  Builder::SetType(is_resource ? "dtype" : "T", variable->dtype, set);
  *assign = set->name();
  return Status();
}

}  // namespace

Status AddRowLogNodes(const std::string& name, MetaGraphDef* meta_graph, RowLogNodes* nodes) {
  Builder builder(meta_graph);
  std::vector<std::string> handles;
  const Status status = FindTables(*meta_graph, builder, &handles);
  if (!status.ok() || handles.empty()) return status;
  const int64_t num_tables = static_cast<int64_t>(handles.size());
  NodeDef* follower = builder.Add("MonolithRowLogFollower", kCpu, {});
  (*follower->mutable_attr())["shared_name"].set_s("MonolithRowLogFollower_" + name);
  const auto add = [&](const char* op, bool has_tables, const std::vector<std::string>& rest) {
    std::vector<std::string> inputs = {follower->name()};
    if (has_tables) inputs.insert(inputs.end(), handles.begin(), handles.end());
    inputs.insert(inputs.end(), rest.begin(), rest.end());
    NodeDef* node = builder.Add(op, kCpu, inputs);
    if (has_tables) (*node->mutable_attr())["num_tables"].set_i(num_tables);
    return node->name();
  };
  const auto feed = [&](DataType dtype) { return builder.AddPlaceholder(dtype, kCpu)->name(); };
  const std::string epoch = feed(tensorflow::DT_INT64);
  const std::string seq = feed(tensorflow::DT_INT64);
  const std::string messages = feed(tensorflow::DT_STRING);
  nodes->has_tables = true;
  nodes->epoch = epoch + ":0";
  nodes->seq = seq + ":0";
  nodes->messages = messages + ":0";
  nodes->seek = add("MonolithRowLogSeek", true, {epoch, seq});
  nodes->state = add("MonolithRowLogApply", true, {messages}) + ":0";
  const std::string digests = add("MonolithRowLogFollowerDigests", false, {});
  nodes->table_names = digests + ":0";
  nodes->digests = digests + ":1";
  nodes->num_rows = digests + ":2";
  return Status();
}

Status AddDenseNodes(MetaGraphDef* meta_graph, DenseNodes* nodes) {
  Builder builder(meta_graph);
  std::vector<std::string> assigns;
  const Status status = ForEach<tensorflow::VariableDef>(
      *meta_graph, kVariables, [&](const tensorflow::VariableDef& definition) {
        DenseVariable variable;
        std::string assign;
        const Status added = AddAssign(definition, &builder, &variable, &assign);
        if (!added.ok()) return added;
        if (variable.name == kGlobalStep) nodes->step = definition.snapshot_name();
        nodes->variables.push_back(std::move(variable));
        assigns.push_back("^" + assign);
        return Status();
      });
  if (!status.ok() || assigns.empty()) return status;
  nodes->assign = builder.Add("NoOp", "", assigns)->name();
  return Status();
}

}  // namespace serving
}  // namespace monolith
