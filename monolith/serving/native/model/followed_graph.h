// Adds the ops that update tables and variables to the graph of a served model.
#ifndef MONOLITH_SERVING_NATIVE_MODEL_FOLLOWED_GRAPH_H_
#define MONOLITH_SERVING_NATIVE_MODEL_FOLLOWED_GRAPH_H_

#include <string>
#include <vector>

#include "monolith/serving/native/base/status.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.pb.h"

namespace tensorflow {
class MetaGraphDef;
}  // namespace tensorflow

namespace monolith {
namespace serving {

// Names of tensors and ops that apply a row log to all tables.
struct RowLogNodes {
  bool has_tables = false;
  // Feeds of `seek`, and of `state`.
  std::string epoch, seq, messages;
  // Targets and fetches.
  std::string seek, state, table_names, digests, num_rows;
};

// Adds them; `name` tells followers in one session apart.
Status AddRowLogNodes(const std::string& name, tensorflow::MetaGraphDef* meta_graph,
                      RowLogNodes* nodes);

// One variable, or one partition of a variable.
struct DenseVariable {
  // Name, type and shape are those of the whole variable; the fed tensor may be larger than the
  // partition.
  std::string name;
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  tensorflow::TensorShape shape;
  std::string feed;
};

// Names of the tensors and ops that set all variables in one run.
struct DenseNodes {
  std::vector<DenseVariable> variables;
  std::string assign;
  // The global step, a tensor; empty if the graph has none.
  std::string step;
};

Status AddDenseNodes(tensorflow::MetaGraphDef* meta_graph, DenseNodes* nodes);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_FOLLOWED_GRAPH_H_
