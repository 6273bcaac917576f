#include "monolith/serving/native/model/pooling_fusion.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/graph.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/protobuf/meta_graph.pb.h"

namespace monolith {
namespace serving {
namespace {

using tensorflow::NodeDef;

constexpr char kFused[] = "MonolithSumRaggedRows";
constexpr char kMark[] = "_monolith_pools";

// "a", "a:0" and "^a" are of node "a".
std::string NodeOfInput(const std::string& input) {
  const size_t start = !input.empty() && input[0] == '^' ? 1 : 0;
  return input.substr(start, input.find(':', start) - start);
}

bool IsControl(const std::string& input) { return !input.empty() && input[0] == '^'; }

class Fusion {
 public:
  explicit Fusion(tensorflow::MetaGraphDef* meta_graph)
      : meta_graph_(*meta_graph), graph_(*meta_graph->mutable_graph_def()) {}

  int64_t Run() {
    const tensorflow::OpDef* definition = nullptr;
    if (!tensorflow::OpRegistry::Global()->LookUpOpDef(kFused, &definition).ok()) return 0;
    for (NodeDef& node : *graph_.mutable_node()) {
      // Nodes of different branches do not run together, and loops have no levels.
      if (node.op() == "Switch" || node.op() == "RefSwitch" || node.op() == "Enter") return 0;
      nodes_[node.name()] = &node;
    }
    FindMembers();
    if (members_.size() < 2) return 0;
    FindLevels();
    FindSignatures();
    std::map<std::tuple<std::string, int64_t, std::string>, std::vector<Member>> groups;
    for (const Member& member : members_) {
      const std::string& name = member.node->name();
      // A node that no signature needs never runs.
      if (signatures_[name].empty()) continue;
      groups[{member.node->device(), levels_[name], signatures_[name]}].push_back(member);
    }
    int64_t joined = 0;
    for (const auto& [key, members] : groups) {
      if (members.size() < 2) continue;
      Join(members);
      joined += static_cast<int64_t>(members.size());
    }
    RedirectReaders();
    return joined;
  }

 private:
  struct Member {
    NodeDef* node;
    std::string splits;
    std::string values;
  };

  NodeDef* Find(const std::string& input) const {
    const auto found = nodes_.find(NodeOfInput(input));
    return found == nodes_.end() ? nullptr : found->second;
  }

  // Finds the row splits behind the indices of a marked op; empty if it is not as exports make it.
  std::string FindSplits(const NodeDef& scatter) const {
    std::string input = scatter.input(0);
    for (const char* const op : {"Reshape", "Sub", "UpperBound", "ExpandDims"}) {
      const NodeDef* node = Find(input);
      if (node == nullptr || node->op() != op || node->input_size() < 1) return "";
      input = node->input(0);
    }
    return Find(input) == nullptr || IsControl(input) ? "" : input;
  }

  void FindMembers() {
    for (NodeDef& node : *graph_.mutable_node()) {
      const auto type = node.attr().find("T");
      if (node.op() != "ScatterNd" || node.attr().count(kMark) == 0 || node.input_size() < 3 ||
          type == node.attr().end() || type->second.type() != tensorflow::DT_FLOAT) {
        continue;
      }
      const std::string splits = FindSplits(node);
      if (!splits.empty()) members_.push_back({&node, splits, node.input(1)});
    }
    for (const Member& member : members_) is_member_.insert(member.node->name());
  }

  // The level of a node counts members on the longest way to it: one member depends on another only
  // if its level is higher. Without recursion: graphs may be deeper than stacks.
  void FindLevels() {
    std::unordered_set<std::string> entered;
    for (const Member& member : members_) {
      std::vector<std::string> stack = {member.node->name()};
      while (!stack.empty()) {
        const std::string name = stack.back();
        const NodeDef* node = nodes_.at(name);
        if (levels_.count(name) > 0) {
          stack.pop_back();
          continue;
        }
        if (entered.insert(name).second) {
          for (const std::string& input : node->input()) {
            const NodeDef* source = Find(input);
            if (source != nullptr && entered.count(source->name()) == 0) {
              stack.push_back(source->name());
            }
          }
          continue;
        }
        int64_t level = 0;
        for (const std::string& input : node->input()) {
          const auto known = levels_.find(NodeOfInput(input));
          if (known != levels_.end()) level = std::max(level, known->second);
        }
        levels_[name] = level + static_cast<int64_t>(is_member_.count(name));
        stack.pop_back();
      }
    }
  }

  // Records the signatures that need each member: others may leave inputs of some unfed.
  void FindSignatures() {
    std::map<std::string, const tensorflow::SignatureDef*> sorted;
    for (const auto& [name, signature] : meta_graph_.signature_def()) sorted[name] = &signature;
    for (const auto& [name, signature] : sorted) {
      std::unordered_set<std::string> seen;
      std::vector<const NodeDef*> stack;
      const auto visit = [&](const std::string& input) {
        const NodeDef* node = Find(input);
        if (node != nullptr && seen.insert(node->name()).second) stack.push_back(node);
      };
      for (const auto& [alias, info] : signature->outputs()) visit(info.name());
      while (!stack.empty()) {
        const NodeDef* node = stack.back();
        stack.pop_back();
        if (is_member_.count(node->name()) > 0) signatures_[node->name()] += name + '\0';
        for (const std::string& input : node->input()) visit(input);
      }
    }
  }

  void Join(const std::vector<Member>& members) {
    std::string name = "monolith_sum_ragged_rows";
    for (int64_t i = 1; nodes_.count(name) > 0; ++i) {
      name = "monolith_sum_ragged_rows_" + std::to_string(i);
    }
    // Nodes of a repeated field of messages stay where they are when it grows.
    NodeDef* fused = graph_.add_node();
    nodes_[name] = fused;
    fused->set_name(name);
    fused->set_op(kFused);
    fused->set_device(members[0].node->device());
    (*fused->mutable_attr())["N"].set_i(static_cast<int64_t>(members.size()));
    for (const Member& member : members) fused->add_input(member.splits);
    for (const Member& member : members) fused->add_input(member.values);
    std::unordered_set<std::string> controls;
    for (size_t i = 0; i < members.size(); ++i) {
      NodeDef* node = members[i].node;
      for (const std::string& input : node->input()) {
        if (IsControl(input) && controls.insert(input).second) fused->add_input(input);
      }
      const std::string output = i == 0 ? name : name + ":" + std::to_string(i);
      outputs_[node->name()] = output;
      // A request for the tensor by its name still finds it.
      node->set_op("Identity");
      node->clear_input();
      node->add_input(output);
      const tensorflow::AttrValue type = node->attr().at("T");
      node->clear_attr();
      (*node->mutable_attr())["T"] = type;
    }
  }

  void RedirectReaders() {
    if (outputs_.empty()) return;
    for (NodeDef& node : *graph_.mutable_node()) {
      if (outputs_.count(node.name()) > 0) continue;
      for (std::string& input : *node.mutable_input()) {
        if (IsControl(input)) continue;
        const auto found = outputs_.find(NodeOfInput(input));
        if (found != outputs_.end()) input = found->second;
      }
    }
  }

  const tensorflow::MetaGraphDef& meta_graph_;
  tensorflow::GraphDef& graph_;
  std::unordered_map<std::string, NodeDef*> nodes_;
  std::vector<Member> members_;
  std::unordered_set<std::string> is_member_;
  std::unordered_map<std::string, int64_t> levels_;
  std::unordered_map<std::string, std::string> signatures_;
  // Name of a member -> the output that has its tensor now.
  std::unordered_map<std::string, std::string> outputs_;
};

}  // namespace

int64_t FusePooling(tensorflow::MetaGraphDef* meta_graph) { return Fusion(meta_graph).Run(); }

}  // namespace serving
}  // namespace monolith
