// Makes one op of the ops that pool the features of an exported graph.
//
// Exports pool with TensorFlow's own ops, about ten for each feature, and a small model spends most
// of its time between ops. The exporter marks each ScatterNd that pools with an attribute. Here
// those that are always run together become one MonolithSumRaggedRows, which gives the same bits:
//
//   splits -> ExpandDims -> UpperBound -> Sub -> Reshape -> ScatterNd     per feature
//   splits, ... , values, ... -> MonolithSumRaggedRows                    for all
#ifndef MONOLITH_SERVING_NATIVE_MODEL_POOLING_FUSION_H_
#define MONOLITH_SERVING_NATIVE_MODEL_POOLING_FUSION_H_

#include <cstdint>

namespace tensorflow {
class MetaGraphDef;
}  // namespace tensorflow

namespace monolith {
namespace serving {

// Rewrites the graph in place; names of tensors stay. Returns how many ops it joined: 0 for a graph
// without marks, with conditions or loops of TensorFlow 1, or where the op is not registered.
int64_t FusePooling(tensorflow::MetaGraphDef* meta_graph);

}  // namespace serving
}  // namespace monolith

#endif  // MONOLITH_SERVING_NATIVE_MODEL_POOLING_FUSION_H_
