// DynamicMatchingFilesDataset: names of files, looked for when they are asked for.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/data/datasets/dataset_bases.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/platform/env.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("DynamicMatchingFilesDataset")
    .Input("patterns: string")
    .Output("handle: variant")
    .SetDoNotOptimize()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
The names of the files that match any of the patterns when an iterator is first asked, sorted.

patterns: a scalar or a vector.
)doc");

// The files, one after the other. The workers of a data service share one of these.
class FileNames final : public data::SplitProvider {
 public:
  explicit FileNames(std::vector<std::string> patterns) : patterns_(std::move(patterns)) {}

  Status GetNext(Tensor* name, bool* end) override {
    mutex_lock lock(mu_);
    if (!is_matched_) TF_RETURN_IF_ERROR(Match());
    *end = next_ >= static_cast<int64_t>(names_.size());
    if (!*end) *name = Tensor(names_[next_++]);
    return OkStatus();
  }

  Status Reset() override {
    mutex_lock lock(mu_);
    is_matched_ = false;
    return OkStatus();
  }

  // The names, too: other files may match when it goes on.
  Status Save(std::function<std::string(std::string)> full_name,
              data::IteratorStateWriter* writer) override {
    mutex_lock lock(mu_);
    Tensor names(DT_STRING, {static_cast<int64_t>(names_.size())});
    std::copy(names_.begin(), names_.end(), names.vec<tstring>().data());
    TF_RETURN_IF_ERROR(writer->WriteScalar(full_name("is_matched"), int64_t{is_matched_}));
    TF_RETURN_IF_ERROR(writer->WriteScalar(full_name("next"), next_));
    return writer->WriteTensor(full_name("names"), names);
  }

  Status Restore(std::function<std::string(std::string)> full_name,
                 data::IteratorStateReader* reader) override {
    int64_t is_matched, next;
    Tensor names;
    TF_RETURN_IF_ERROR(reader->ReadScalar(full_name("is_matched"), &is_matched));
    TF_RETURN_IF_ERROR(reader->ReadScalar(full_name("next"), &next));
    TF_RETURN_IF_ERROR(reader->ReadTensor(full_name("names"), &names));
    if (names.dtype() != DT_STRING || names.dims() != 1 || next < 0 || next > names.NumElements()) {
      return errors::DataLoss("the saved position ", next, " is none of ", names.DebugString());
    }
    mutex_lock lock(mu_);
    const auto values = names.vec<tstring>();
    names_.assign(values.data(), values.data() + values.size());
    next_ = next;
    is_matched_ = is_matched != 0;
    return OkStatus();
  }

 private:
  Status Match() TF_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<tstring> names;
    for (const std::string& pattern : patterns_) {
      std::vector<string> found;
      TF_RETURN_IF_ERROR(Env::Default()->GetMatchingPaths(pattern, &found));
      names.insert(names.end(), found.begin(), found.end());
    }
    std::sort(names.begin(), names.end());
    names_ = std::move(names);
    next_ = 0;
    is_matched_ = true;
    return OkStatus();
  }

  const std::vector<std::string> patterns_;
  mutex mu_;
  bool is_matched_ TF_GUARDED_BY(mu_) = false;
  std::vector<tstring> names_ TF_GUARDED_BY(mu_);
  int64_t next_ TF_GUARDED_BY(mu_) = 0;
};

class MatchingFilesDataset final : public SourceDataset {
 public:
  MatchingFilesDataset(OpKernelContext* ctx, std::vector<std::string> patterns)
      : SourceDataset(ctx, "DynamicMatchingFilesDatasetOp::Dataset", {DT_STRING},
                      {PartialTensorShape({})}),
        patterns_(std::move(patterns)) {}

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::DynamicMatchingFiles"});
  }

  Status MakeSplitProviders(
      std::vector<std::unique_ptr<data::SplitProvider>>* providers) const override {
    providers->push_back(std::make_unique<FileNames>(patterns_));
    return OkStatus();
  }

 private:
  class Iterator final : public SourceIterator<MatchingFilesDataset> {
   public:
    explicit Iterator(const Params& params) : SourceIterator<MatchingFilesDataset>(params) {}

    Status Initialize(data::IteratorContext* ctx) override {
      const auto shared = ctx->split_providers();
      if (shared.size() > 1) {
        return errors::FailedPrecondition("There are ", shared.size(),
                                          " providers of files, want one");
      }
      names_ = shared.empty() ? std::make_shared<FileNames>(dataset()->patterns_) : shared[0];
      return OkStatus();
    }

    Status GetNextInternal(data::IteratorContext*, std::vector<Tensor>* out_tensors,
                           bool* end_of_sequence) override {
      Tensor name;
      TF_RETURN_IF_ERROR(names_->GetNext(&name, end_of_sequence));
      if (!*end_of_sequence) out_tensors->push_back(std::move(name));
      return OkStatus();
    }

   protected:
    Status SaveInternal(data::SerializationContext*, data::IteratorStateWriter* writer) override {
      return names_->Save([this](const std::string& key) { return full_name(key); }, writer);
    }

    Status RestoreInternal(data::IteratorContext*, data::IteratorStateReader* reader) override {
      return names_->Restore([this](const std::string& key) { return full_name(key); }, reader);
    }

   private:
    std::shared_ptr<data::SplitProvider> names_;
  };

  const std::vector<std::string> patterns_;
};

class MatchingFilesDatasetOp : public data::DatasetOpKernel {
 public:
  using DatasetOpKernel::DatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext* ctx, data::DatasetBase** output) override {
    const Tensor& patterns = ctx->input(0);
    OP_REQUIRES(ctx, patterns.dims() <= 1,
                errors::InvalidArgument("patterns has shape ", patterns.shape().DebugString(),
                                        ", want a scalar or a vector"));
    const auto values = patterns.flat<tstring>();
    *output = new MatchingFilesDataset(
        ctx, std::vector<std::string>(values.data(), values.data() + values.size()));
  }
};

REGISTER_GUARDED_KERNEL(Name("DynamicMatchingFilesDataset").Device(DEVICE_CPU),
                        MatchingFilesDatasetOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
