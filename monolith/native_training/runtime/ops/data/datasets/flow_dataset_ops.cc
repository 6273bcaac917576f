// SplitFlowDataset and MergeFlowDataset: the samples of one data source, and several datasets read
// at the same time.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "monolith/native_training/runtime/data/record_framing.h"
#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/data/datasets/flow_group.h"
#include "monolith/native_training/runtime/ops/data/samples/sample.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("SplitFlowDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("data_flow: list(string)")
    .Attr("index: int")
    .Attr("max_queue_size: int")
    .Attr("variant_type: string")
    .Attr("shared_name: string = ''")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The samples of one data source. One thread reads the input for all sources.

data_flow: names of the data sources.
index: of the source in data_flow; the iterator over index 0 reads the input.
max_queue_size: samples of a source that may wait; then reading waits.
variant_type: instance or example.
shared_name: what flows of the same input have in common.
)doc");

REGISTER_OP("MergeFlowDataset")
    .Input("input_datasets: N * variant")
    .Output("handle: variant")
    .Attr("data_flow: list(string)")
    .Attr("max_queue_size: int")
    .Attr("variant_type: string")
    .Attr("N: int >= 1")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Samples of several datasets, taken in turns from those that have one ready.

data_flow: a name per input.
max_queue_size: samples of an input that may wait.
variant_type: instance or example.
)doc");

struct FlowOptions {
  std::vector<std::string> data_flow;
  int64_t max_queue_size;
  SampleType type;

  Status Init(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("data_flow", &data_flow));
    TF_RETURN_IF_ERROR(ctx->GetAttr("max_queue_size", &max_queue_size));
    TF_RETURN_IF_ERROR(GetRowType(ctx, &type));
    if (max_queue_size < 1) {
      return errors::InvalidArgument("max_queue_size is ", max_queue_size, ", want at least 1");
    }
    return OkStatus();
  }
};

Status NotSaved(const char* op) {
  return errors::Unimplemented("the position of ", op,
                               " cannot be saved: samples of its flows are under way in threads");
}

// The data sources of an input by their key.
class FlowTable {
 public:
  Status Init(const std::vector<std::string>& data_flow) {
    std::vector<std::string> known;
    for (size_t i = 0; i < data_flow.size(); ++i) {
      const uint32_t key = ::monolith::data::DataSourceKey(data_flow[i]);
      const auto [it, is_new] = flows_.emplace(key, i);
      if (!is_new) {
        return errors::InvalidArgument("data_flow has '", data_flow[it->second], "' and '",
                                       data_flow[i], "', which both have data_source_key ", key);
      }
      known.push_back(absl::StrCat(data_flow[i], " (", key, ")"));
    }
    known_ = absl::StrJoin(known, ", ");
    return OkStatus();
  }

  template <typename Proto>
  Status Find(const Tensor& tensor, size_t* flow) const {
    const Proto* sample;
    TF_RETURN_IF_ERROR(GetSample<Proto>(tensor.scalar<Variant>()(), &sample));
    const auto it = flows_.find(sample->data_source_key());
    if (it == flows_.end()) {
      return errors::InvalidArgument("a sample has data_source_key ", sample->data_source_key(),
                                     ", want that of one of data_flow: ", known_);
    }
    *flow = it->second;
    return OkStatus();
  }

 private:
  absl::flat_hash_map<uint32_t, size_t> flows_;
  std::string known_;
};

class SplitFlowDatasetOp : public data::UnaryDatasetOpKernel {
 public:
  class Dataset;

  explicit SplitFlowDatasetOp(OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, options_.Init(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("index", &index_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    const auto flows = static_cast<int64_t>(options_.data_flow.size());
    OP_REQUIRES(
        ctx, index_ >= 0 && index_ < flows,
        errors::InvalidArgument("index is ", index_, ", but data_flow has ", flows, " names"));
    auto table = std::make_shared<FlowTable>();
    OP_REQUIRES_OK(ctx, table->Init(options_.data_flow));
    route_ = [table, type = options_.type](const Tensor& sample, size_t* flow) {
      return VisitRowType(
          type, [&](auto tag) { return table->Find<ProtoOf<decltype(tag)>>(sample, flow); });
    };
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase* input,
                   data::DatasetBase** output) override;

 private:
  FlowOptions options_;
  int64_t index_;
  std::string shared_name_;
  FlowRoute route_;
};

class SplitFlowDatasetOp::Dataset final : public UnaryDataset {
 public:
  Dataset(OpKernelContext* ctx, const data::DatasetBase* input, const SplitFlowDatasetOp& op)
      : UnaryDataset(ctx, "SplitFlowDataset", input, AttrsOf(op.def())),
        name_({op.shared_name_, op.options_.data_flow}),
        index_(static_cast<size_t>(op.index_)),
        max_queue_size_(op.options_.max_queue_size),
        route_(op.route_) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::SplitFlow"});
  }

  const FlowName& name() const { return name_; }

 private:
  class Iterator final : public UnaryIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : UnaryIterator<Dataset>(params) {}

    ~Iterator() override {
      if (deregister_) deregister_();
      reader_.reset();
      if (group_ != nullptr) FlowGroup::Leave(group_, index());
    }

    Status Initialize(data::IteratorContext* ctx) override {
      group_ = FlowGroup::Join(dataset()->name_, index(), ctx->flr(), dataset()->max_queue_size_);
      TF_RETURN_IF_ERROR(RegisterCancellationCallback(
          ctx->cancellation_manager(), [this] { group_->queues()->Cancel(index()); },
          &deregister_));
      if (index() != 0) return OkStatus();
      auto reader = std::make_unique<FlowReader>(group_, dataset()->route_);
      if (FlowHome* home = FlowHome::Current(); home != nullptr) {
        TF_RETURN_IF_ERROR(reader->Open(home->ctx(), home->parent(), dataset()->input(), prefix()));
        home->Keep(std::move(reader));
        return OkStatus();
      }
      own_ctx_ = std::make_unique<data::IteratorContext>(*ctx);
      reader_ = std::move(reader);
      return reader_->Open(own_ctx_.get(), this, dataset()->input(), prefix());
    }

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      FlowItem item;
      RecordStop(ctx);
      const Popped popped = FlowGroup::Pop(group_, index(), &item);
      RecordStart(ctx);
      *end_of_sequence = popped == Popped::kEnd;
      if (*end_of_sequence) return OkStatus();
      if (popped == Popped::kCancelled) {
        return errors::Cancelled("reading flow '", dataset()->name_.data_flow[index()],
                                 "' was cancelled");
      }
      if (item.status.ok()) out_tensors->push_back(std::move(item.sample));
      return item.status;
    }

   protected:
    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter*) override {
      return NotSaved("SplitFlowDataset");
    }
    Status RestoreInternal(data::IteratorContext*, data::IteratorStateReader*) override {
      return NotSaved("SplitFlowDataset");
    }

   private:
    size_t index() const { return dataset()->index_; }

    std::shared_ptr<FlowGroup> group_;
    std::function<void()> deregister_;
    // Set for index 0 without a merger above.
    std::unique_ptr<data::IteratorContext> own_ctx_;
    std::unique_ptr<FlowReader> reader_;
  };

  const FlowName name_;
  const size_t index_;
  const int64_t max_queue_size_;
  const FlowRoute route_;
};

// The name of the flows that `dataset` is made from, or null.
const FlowName* FlowNameOf(const data::DatasetBase* dataset) {
  while (dataset->type_string() != "SplitFlowDataset") {
    std::vector<const data::DatasetBase*> inputs;
    if (!dataset->InputDatasets(&inputs).ok() || inputs.size() != 1) return nullptr;
    dataset = inputs[0];
  }
  return &static_cast<const SplitFlowDatasetOp::Dataset*>(dataset)->name();
}

void SplitFlowDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase* input,
                                     data::DatasetBase** output) {
  OP_REQUIRES_OK(ctx, CheckSampleDataset("SplitFlowDataset", *input));
  *output = new Dataset(ctx, input, *this);
}

// Writes where a sample comes from into its LineId. A sample that others hold is copied.
template <typename Proto>
Status NameSource(Tensor* tensor) {
  const Proto* sample;
  TF_RETURN_IF_ERROR(GetSample<Proto>(tensor->scalar<Variant>()(), &sample));
  std::string name = absl::StrCat("data_source", sample->data_source_key());
  if (sample->line_id().data_source_name() == name) return OkStatus();
  if (!tensor->RefCountIsOne()) {
    Tensor copy(DT_VARIANT, TensorShape({}));
    copy.scalar<Variant>()() = tensor->scalar<Variant>()();
    *tensor = std::move(copy);
  }
  Proto* own = tensor->scalar<Variant>()().get<SampleVariant<Proto>>()->MutableUnshared();
  own->mutable_line_id()->set_data_source_name(std::move(name));
  return OkStatus();
}

class MergeFlowDatasetOp : public data::DatasetOpKernel {
 public:
  explicit MergeFlowDatasetOp(OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    int64_t inputs;
    OP_REQUIRES_OK(ctx, options_.Init(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("N", &inputs));
    OP_REQUIRES(ctx, static_cast<int64_t>(options_.data_flow.size()) == inputs,
                errors::InvalidArgument("data_flow has ", options_.data_flow.size(), " names for ",
                                        inputs, " inputs"));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override;

 private:
  class Dataset;

  FlowOptions options_;
};

class MergeFlowDatasetOp::Dataset final : public data::DatasetBase {
 public:
  Dataset(OpKernelContext* ctx, std::vector<const data::DatasetBase*> inputs,
          const MergeFlowDatasetOp& op)
      : DatasetBase(data::DatasetContext(ctx)),
        inputs_(std::move(inputs)),
        options_(op.options_),
        attrs_(AttrsOf(op.def())) {
    for (const data::DatasetBase* input : inputs_) input->Ref();
  }

  ~Dataset() override {
    for (const data::DatasetBase* input : inputs_) input->Unref();
  }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::MergeFlow"});
  }

  const DataTypeVector& output_dtypes() const override { return inputs_[0]->output_dtypes(); }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return inputs_[0]->output_shapes();
  }
  string DebugString() const override { return "MergeFlowDataset"; }
  Status MakeSplitProviders(
      std::vector<std::unique_ptr<data::SplitProvider>>* split_providers) const override {
    const FlowName* const name = FlowNameOf(inputs_[0]);
    for (const data::DatasetBase* input : inputs_) {
      const FlowName* const other = FlowNameOf(input);
      if (name == nullptr || other == nullptr || !(*other == *name)) {
        return errors::Unimplemented(
            "the elements of MergeFlowDataset can be shared out among readers only if its inputs "
            "are flows of one dataset");
      }
    }
    // Their source is read once for all of them.
    return inputs_[0]->MakeSplitProviders(split_providers);
  }
  Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->insert(inputs->end(), inputs_.begin(), inputs_.end());
    return OkStatus();
  }
  Status CheckExternalState() const override {
    for (const data::DatasetBase* input : inputs_) {
      TF_RETURN_IF_ERROR(input->CheckExternalState());
    }
    return OkStatus();
  }

 protected:
  Status AsGraphDefInternal(data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                            Node** output) const override {
    std::vector<Node*> nodes(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, inputs_[i], &nodes[i]));
    }
    return b->AddDataset(this, {}, {{0, nodes}}, GraphAttrs(attrs_), output);
  }

 private:
  class Iterator final : public UnaryIterator<Dataset> {
   public:
    explicit Iterator(const Params& params)
        : UnaryIterator<Dataset>(params),
          queues_(params.dataset->inputs_.size(), params.dataset->options_.max_queue_size) {}

    ~Iterator() override {
      if (deregister_) deregister_();
      if (cancellation_ != nullptr) cancellation_->StartCancel();
      queues_.CancelAll();
      threads_.clear();  // waits for them
      inputs_.clear();
      own_home_.reset();
    }

    Status Initialize(data::IteratorContext* ctx) override {
      cancellation_ = std::make_unique<CancellationManager>(ctx->cancellation_manager());
      TF_RETURN_IF_ERROR(RegisterCancellationCallback(
          ctx->cancellation_manager(), [this] { queues_.CancelAll(); }, &deregister_));
      data::IteratorContext::Params params(ctx);
      params.cancellation_manager = cancellation_.get();
      ctx_ = std::make_unique<data::IteratorContext>(std::move(params));
      own_home_ = std::make_unique<FlowHome>(ctx_.get(), this);
      FlowHome::Scope scope(own_home_.get());
      home_ = FlowHome::Current();
      inputs_.resize(queues_.size());
      for (size_t i = 0; i < inputs_.size(); ++i) {
        queues_.Open(i);
        TF_RETURN_IF_ERROR(dataset()->inputs_[i]->MakeIterator(
            ctx_.get(), this, absl::StrCat(prefix(), "[", i, "]"), &inputs_[i]));
      }
      return OkStatus();
    }

    Status GetNextInternal(data::IteratorContext* ctx, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      StartThreads();
      FlowItem item;
      RecordStop(ctx);
      const Popped popped = queues_.PopNext(&item);
      RecordStart(ctx);
      *end_of_sequence = popped == Popped::kEnd;
      if (*end_of_sequence) return OkStatus();
      if (popped == Popped::kCancelled) {
        return errors::Cancelled("merging flows was cancelled");
      }
      if (item.status.ok()) out_tensors->push_back(std::move(item.sample));
      return item.status;
    }

   protected:
    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter*) override {
      return NotSaved("MergeFlowDataset");
    }
    Status RestoreInternal(data::IteratorContext*, data::IteratorStateReader*) override {
      return NotSaved("MergeFlowDataset");
    }

   private:
    void StartThreads() {
      mutex_lock lock(mu_);
      if (!threads_.empty()) return;
      // All are counted before one of them can find itself alone.
      for (size_t i = 0; i < inputs_.size(); ++i) home_->waits()->AddThread();
      for (size_t i = 0; i < inputs_.size(); ++i) {
        threads_.push_back(ctx_->StartThread("merge_flow_" + dataset()->options_.data_flow[i],
                                             [this, i] { Run(i); }));
      }
    }

    void Run(size_t flow) {
      FlowHome::ThreadScope scope(home_);
      // Sub-iterators keep state in their context, so every thread has its own.
      data::IteratorContext ctx(*ctx_);
      while (!WasCancelled(cancellation_.get())) {
        std::vector<Tensor> element;
        bool end = false;
        FlowItem item;
        item.status = inputs_[flow]->GetNext(&ctx, &element, &end);
        if (item.status.ok() && end) {
          queues_.End(flow);
          return;
        }
        if (item.status.ok()) item.status = CheckSampleElement(element);
        if (item.status.ok()) {
          item.status = CatchExceptions([&] {
            return VisitRowType(dataset()->options_.type, [&](auto tag) {
              return NameSource<ProtoOf<decltype(tag)>>(&element[0]);
            });
          });
        }
        if (item.status.ok()) item.sample = std::move(element[0]);
        if (!queues_.Push(flow, std::move(item))) return;
      }
    }

    FlowQueues queues_;
    std::unique_ptr<CancellationManager> cancellation_;
    std::function<void()> deregister_;
    std::unique_ptr<data::IteratorContext> ctx_;
    std::unique_ptr<FlowHome> own_home_;
    FlowHome* home_ = nullptr;  // the own one, or that of the merger above
    std::vector<std::unique_ptr<data::IteratorBase>> inputs_;
    mutex mu_;
    std::vector<std::unique_ptr<Thread>> threads_ TF_GUARDED_BY(mu_);
  };

  const std::vector<const data::DatasetBase*> inputs_;
  const FlowOptions options_;
  const DatasetAttrs attrs_;
};

void MergeFlowDatasetOp::MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) {
  std::vector<const data::DatasetBase*> inputs;
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    data::DatasetBase* input;
    OP_REQUIRES_OK(ctx, data::GetDatasetFromVariantTensor(ctx->input(i), &input));
    OP_REQUIRES_OK(ctx, CheckSampleDataset("MergeFlowDataset", *input));
    inputs.push_back(input);
  }
  *output = new Dataset(ctx, std::move(inputs), *this);
}

REGISTER_GUARDED_KERNEL(Name("SplitFlowDataset").Device(DEVICE_CPU), SplitFlowDatasetOp);
REGISTER_GUARDED_KERNEL(Name("MergeFlowDataset").Device(DEVICE_CPU), MergeFlowDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
