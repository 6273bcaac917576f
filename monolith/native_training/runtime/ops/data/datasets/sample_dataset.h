// Datasets that turn each sample of their input into zero or more samples.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_SAMPLE_DATASET_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_SAMPLE_DATASET_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "tensorflow/core/framework/dataset.h"

namespace tensorflow {
namespace monolith_tf {

// The rule of one iterator, which is all that calls it.
class SampleExpander {
 public:
  virtual ~SampleExpander() = default;

  // Appends the samples that `sample`, a scalar variant, becomes.
  virtual Status Expand(const Tensor &sample, std::deque<Tensor> *out) = 0;
};

using ExpanderFactory = std::function<std::unique_ptr<SampleExpander>()>;
// Holds the arguments of MakeSampleDataset.
struct SampleDatasetOptions {
  std::string name;           // the op's, for messages
  DatasetAttrs attrs;         // the node's, to write the dataset as a graph
  std::vector<Tensor> extra;  // inputs after the dataset
  ExpanderFactory factory;
};

// Returns a dataset with one reference. InvalidArgument: elements are not scalar variants.
Status MakeSampleDataset(OpKernelContext *ctx, const data::DatasetBase *input,
                         SampleDatasetOptions options, data::DatasetBase **dataset);

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_SAMPLE_DATASET_H_
