#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"

#include "tensorflow/core/platform/errors.h"

namespace tensorflow {
namespace monolith_tf {

DatasetAttrs AttrsOf(const NodeDef& def) {
  DatasetAttrs attrs;
  for (const auto& [name, value] : def.attr()) {
    if (name[0] != '_') attrs.emplace_back(name, value);
  }
  return attrs;
}

std::vector<std::pair<StringPiece, AttrValue>> GraphAttrs(const DatasetAttrs& attrs) {
  return {attrs.begin(), attrs.end()};
}

Status CheckSampleDataset(const std::string& op, const data::DatasetBase& input) {
  if (input.output_dtypes() == DataTypeVector{DT_VARIANT} &&
      input.output_shapes()[0].IsCompatibleWith(PartialTensorShape({}))) {
    return OkStatus();
  }
  return errors::InvalidArgument("the input of ", op, " has elements of type ",
                                 DataTypeVectorString(input.output_dtypes()),
                                 ", want one scalar variant: a sample");
}

UnaryDataset::UnaryDataset(OpKernelContext* ctx, std::string name, const data::DatasetBase* input,
                           DatasetAttrs attrs, std::vector<Tensor> extra)
    : DatasetBase(data::DatasetContext(ctx)),
      name_(std::move(name)),
      input_(input),
      attrs_(std::move(attrs)),
      extra_(std::move(extra)) {
  input_->Ref();
}

Status UnaryDataset::AsGraphDefInternal(data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                        Node** output) const {
  Node* node = nullptr;
  TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, input_, &node));
  std::vector<Node*> nodes = {node};
  for (const Tensor& tensor : extra_) {
    TF_RETURN_IF_ERROR(b->AddDatasetOrTensor(ctx, tensor, &node));
    nodes.push_back(node);
  }
  return b->AddDataset(this, nodes, GraphAttrs(attrs_), output);
}

SourceDataset::SourceDataset(OpKernelContext* ctx, std::string name, DataTypeVector dtypes,
                             std::vector<PartialTensorShape> shapes)
    : DatasetBase(data::DatasetContext(ctx)),
      name_(std::move(name)),
      dtypes_(std::move(dtypes)),
      shapes_(std::move(shapes)),
      attrs_(AttrsOf(ctx->op_kernel().def())) {
  for (int i = 0; i < ctx->num_inputs(); ++i) inputs_.push_back(ctx->input(i));
}

Status SourceDataset::AsGraphDefInternal(data::SerializationContext*, DatasetGraphDefBuilder* b,
                                         Node** output) const {
  std::vector<Node*> nodes(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    TF_RETURN_IF_ERROR(b->AddTensor(inputs_[i], &nodes[i]));
  }
  return b->AddDataset(this, nodes, GraphAttrs(attrs_), output);
}

Status IteratorCancellation::Watch(data::IteratorContext* ctx) {
  CancellationManager* const manager = ctx->cancellation_manager();
  if (manager == nullptr) return OkStatus();
  token_ = manager->get_cancellation_token();
  if (!manager->RegisterCallback(token_, [this] { is_cancelled_ = true; })) {
    return errors::Cancelled("the iterator was cancelled before it began");
  }
  manager_ = manager;
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow
