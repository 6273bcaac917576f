// Shared parts of datasets: how they are written as a graph, what they know of their input,
// and how their iterators hear of cancellation.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_DATASET_BASES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_DATASET_BASES_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {

using DatasetAttrs = std::vector<std::pair<std::string, AttrValue>>;

// Returns the attributes of a node, to write it again.
DatasetAttrs AttrsOf(const NodeDef& def);

// Returns the same for DatasetGraphDefBuilder; valid as long as `attrs`.
std::vector<std::pair<StringPiece, AttrValue>> GraphAttrs(const DatasetAttrs& attrs);

// Checks that the elements of `input` are scalar variants, as samples are. InvalidArgument: they
// are something else; the message names `op`.
Status CheckSampleDataset(const std::string& op, const data::DatasetBase& input);

// A dataset made from another one. Has the elements of that one unless a subclass says otherwise.
class UnaryDataset : public data::DatasetBase {
 public:
  ~UnaryDataset() override { input_->Unref(); }

  const DataTypeVector& output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return input_->output_shapes();
  }
  string DebugString() const override { return name_; }
  Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return OkStatus();
  }
  Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  // `extra` are the inputs of the node after the dataset.
  UnaryDataset(OpKernelContext* ctx, std::string name, const data::DatasetBase* input,
               DatasetAttrs attrs, std::vector<Tensor> extra = {});

  const data::DatasetBase* input() const { return input_; }

  Status AsGraphDefInternal(data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                            Node** output) const override;

 private:
  const std::string name_;
  const data::DatasetBase* const input_;
  const DatasetAttrs attrs_;
  const std::vector<Tensor> extra_;
};

// A dataset that reads something that is no dataset.
class SourceDataset : public data::DatasetBase {
 public:
  const DataTypeVector& output_dtypes() const override { return dtypes_; }
  const std::vector<PartialTensorShape>& output_shapes() const override { return shapes_; }
  string DebugString() const override { return name_; }
  Status InputDatasets(std::vector<const DatasetBase*>*) const override { return OkStatus(); }
  Status CheckExternalState() const override { return OkStatus(); }

 protected:
  SourceDataset(OpKernelContext* ctx, std::string name, DataTypeVector dtypes,
                std::vector<PartialTensorShape> shapes);

  Status AsGraphDefInternal(data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                            Node** output) const override;

 private:
  const std::string name_;
  const DataTypeVector dtypes_;
  const std::vector<PartialTensorShape> shapes_;
  const DatasetAttrs attrs_;
  std::vector<Tensor> inputs_;  // of the node
};

// An iterator that takes any number of elements of its input for one of its own.
template <typename Dataset>
class UnaryIterator : public data::DatasetIterator<Dataset> {
 public:
  using data::DatasetIterator<Dataset>::DatasetIterator;

 protected:
  std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*,
                                                data::model::Node::Args args) const override {
    return data::model::MakeUnknownRatioNode(std::move(args));
  }
};

// An iterator over a SourceDataset.
template <typename Dataset>
class SourceIterator : public data::DatasetIterator<Dataset> {
 public:
  using data::DatasetIterator<Dataset>::DatasetIterator;

 protected:
  std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*,
                                                data::model::Node::Args args) const override {
    return data::model::MakeSourceNode(std::move(args));
  }
};

// Tells an iterator whether it was cancelled.
//
// Threads of a dataset that reads ahead ask for elements with the context of the first request,
// which is never cancelled; the one they made the iterator with is.
class IteratorCancellation {
 public:
  IteratorCancellation() = default;
  IteratorCancellation(const IteratorCancellation&) = delete;
  IteratorCancellation& operator=(const IteratorCancellation&) = delete;
  ~IteratorCancellation() {
    if (manager_ != nullptr) manager_->DeregisterCallback(token_);
  }

  // To be called once, by Initialize.
  Status Watch(data::IteratorContext* ctx);

  // With the context of a request.
  bool IsCancelled(data::IteratorContext* ctx) const {
    return is_cancelled_ ||
           (ctx->cancellation_manager() != nullptr && ctx->cancellation_manager()->IsCancelled());
  }

 private:
  CancellationManager* manager_ = nullptr;
  CancellationToken token_;
  std::atomic<bool> is_cancelled_{false};
};

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DATA_DATASETS_DATASET_BASES_H_
