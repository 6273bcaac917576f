// Deep insight makes one JSON message per example: what a model predicted and what was true. There
// is no network transport: messages go to the caller (return_msgs) and to a file (filename).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/metrics/json_writer.h"
#include "monolith/native_training/runtime/metrics/metric_sink.h"
#include "monolith/native_training/runtime/ops/files/file_metric_writer.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/support/resource_handle_input.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/env.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using ::monolith::metrics::EmitMetric;
using ::monolith::metrics::JsonObject;
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

constexpr char kUid[] = "uid";

class DeepInsightClient : public ResourceBase {
 public:
  // Dumps no messages if `writer` is null.
  DeepInsightClient(bool enable_metrics_counter, std::unique_ptr<FileMetricWriter> writer)
      : enable_metrics_counter_(enable_metrics_counter), writer_(std::move(writer)) {}

  std::string DebugString() const override { return "DeepInsightClient"; }

  bool dumps() const { return writer_ != nullptr; }

  Status Write(const std::string& model_name, const std::vector<std::string>& messages) const {
    if (writer_ != nullptr) TF_RETURN_IF_ERROR(writer_->Write(messages));
    if (enable_metrics_counter_) {
      EmitMetric("deep_insight.messages", static_cast<float>(messages.size()),
                 "model_name=" + model_name);
    }
    return OkStatus();
  }

 private:
  const bool enable_metrics_counter_;
  const std::unique_ptr<FileMetricWriter> writer_;
};

class CreateDeepInsightClientOp : public ResourceOpKernel<DeepInsightClient> {
 public:
  explicit CreateDeepInsightClientOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("enable_metrics_counter", &enable_metrics_counter_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("filename", &filename_));
  }

 private:
  Status CreateResource(DeepInsightClient** client) override {
    *client = nullptr;
    std::unique_ptr<FileMetricWriter> writer;
    if (!filename_.empty()) {
      TF_RETURN_IF_ERROR(FileMetricWriter::Open(Env::Default(), filename_, &writer));
    }
    *client =
        std::make_unique<DeepInsightClient>(enable_metrics_counter_, std::move(writer)).release();
    return OkStatus();
  }

  bool enable_metrics_counter_ = false;
  std::string filename_;
};

// A named column of the batch; every message has its row's value.
struct ExtraField {
  std::string key;
  const Tensor* values;
};

// The content of one batch's messages; sizes have been checked.
struct Batch {
  std::string model_name;
  std::vector<std::string> targets;
  const int64_t* uids;
  const int64_t* req_times;
  // [targets, size] each
  const float* labels;
  const float* preds;
  const float* sample_rates;
  std::vector<ExtraField> extra_fields;
  int64_t size;
};

std::string TargetMap(const Batch& batch, const float* values, int64_t row) {
  JsonObject map;
  for (size_t t = 0; t < batch.targets.size(); ++t) {
    map.AddFloat(batch.targets[t], values[static_cast<int64_t>(t) * batch.size + row]);
  }
  return map.Finish();
}

std::string Message(const Batch& batch, int64_t row) {
  JsonObject message;
  message.AddString("model_name", batch.model_name);
  message.AddInt("req_time", batch.req_times[row]);
  message.AddInt(kUid, batch.uids[row]);
  message.Add("predict", TargetMap(batch, batch.preds, row));
  message.Add("label", TargetMap(batch, batch.labels, row));
  message.Add("sample_rate", TargetMap(batch, batch.sample_rates, row));
  for (const ExtraField& field : batch.extra_fields) {
    switch (field.values->dtype()) {
      case DT_FLOAT:
        message.AddFloat(field.key, field.values->vec<float>()(row));
        break;
      case DT_INT64:
        message.AddInt(field.key, field.values->vec<int64_t>()(row));
        break;
      case DT_STRING:
        message.AddString(field.key, field.values->vec<tstring>()(row));
        break;
      default:
        break;
    }
  }
  return message.Finish();
}

class WriteDeepInsightBase : public OpKernel {
 public:
  explicit WriteDeepInsightBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    float sample_ratio;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("model_name", &model_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("return_msgs", &return_msgs_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("sample_ratio", &sample_ratio));
    OP_REQUIRES(ctx, sample_ratio >= 0,
                errors::InvalidArgument("sample_ratio is ", sample_ratio, ", want at least 0"));
  }

 protected:
  // Makes messages only if they are returned or dumped.
  void WriteBatch(OpKernelContext* ctx, const DeepInsightClient& client, const Batch& batch,
                  const TensorShape& shape) const {
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &out));
    if (!return_msgs_ && !client.dumps()) return;
    std::vector<std::string> messages;
    messages.reserve(batch.size);
    for (int64_t i = 0; i < batch.size; ++i) messages.push_back(Message(batch, i));
    OP_REQUIRES_OK(ctx, client.Write(model_name_, messages));
    if (!return_msgs_) return;
    auto msgs = out->flat<tstring>();
    for (int64_t i = 0; i < batch.size; ++i) msgs(i) = messages[i];
  }

  std::string model_name_;
  bool return_msgs_ = false;
};

class WriteDeepInsightOp : public WriteDeepInsightBase {
 public:
  explicit WriteDeepInsightOp(OpKernelConstruction* ctx) : WriteDeepInsightBase(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("target", &target_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeepInsightClient> client;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "deep_insight_client_handle", &client));
    const Tensor& uids = ctx->input(1);
    const Tensor& req_times = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckVector("uids", uids));
    OP_REQUIRES_OK(ctx, CheckVector("req_times", req_times));
    // Compares sizes, not ranks: labels and predictions often come as [B, 1].
    constexpr const char* kSizeNames[] = {"size of req_times", "size of labels", "size of preds",
                                          "size of sample_rates"};
    const int64_t size = uids.NumElements();
    for (int i = 0; i < 4; ++i) {
      OP_REQUIRES_OK(
          ctx, CheckEqual(kSizeNames[i], ctx->input(i + 2).NumElements(), "size of uids", size));
    }
    Batch batch;
    batch.model_name = model_name_;
    batch.targets = {target_};
    batch.uids = uids.flat<int64_t>().data();
    batch.req_times = req_times.flat<int64_t>().data();
    batch.labels = ctx->input(3).flat<float>().data();
    batch.preds = ctx->input(4).flat<float>().data();
    batch.sample_rates = ctx->input(5).flat<float>().data();
    batch.size = size;
    WriteBatch(ctx, *client, batch, uids.shape());
  }

 private:
  std::string target_;
};

class WriteDeepInsightV2Op : public WriteDeepInsightBase {
 public:
  explicit WriteDeepInsightV2Op(OpKernelConstruction* ctx) : WriteDeepInsightBase(ctx) {
    DataTypeVector types;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("extra_fields_keys", &keys_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("Tfields", &types));
    OP_REQUIRES_OK(ctx, CheckEqual("length of extra_fields_keys", keys_.size(),
                                   "number of extra_fields_values", types.size()));
    const auto uid = std::find(keys_.begin(), keys_.end(), kUid);
    OP_REQUIRES(ctx, uid != keys_.end(),
                errors::InvalidArgument("extra_fields_keys has no '", kUid, "'"));
    uid_ = static_cast<int>(uid - keys_.begin());
    OP_REQUIRES(ctx, types[uid_] == DT_INT64,
                errors::InvalidArgument("the extra field '", kUid, "' is ",
                                        DataTypeString(types[uid_]), ", want int64"));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<DeepInsightClient> client;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "deep_insight_client_handle", &client));
    const Tensor& req_times = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckVector("req_times", req_times));
    Batch batch;
    batch.size = req_times.NumElements();
    constexpr const char* kNames[] = {"labels", "preds", "sample_rates"};
    for (int i = 0; i < 3; ++i) {
      const Tensor& values = ctx->input(i + 2);
      OP_REQUIRES(ctx,
                  values.dims() == 2 &&
                      values.dim_size(0) == static_cast<int64_t>(targets_.size()) &&
                      values.dim_size(1) == batch.size,
                  errors::InvalidArgument(kNames[i], " has shape ", values.shape().DebugString(),
                                          ", want [targets, size of req_times] = [",
                                          targets_.size(), ",", batch.size, "]"));
    }
    // Drops extra fields whose name a fixed or an earlier extra field has already.
    std::set<std::string> taken = {"model_name", "req_time", kUid,
                                   "predict",    "label",    "sample_rate"};
    for (size_t i = 0; i < keys_.size(); ++i) {
      const Tensor& values = ctx->input(kFirstField + static_cast<int>(i));
      OP_REQUIRES(ctx, values.dims() == 1 && values.NumElements() == batch.size,
                  errors::InvalidArgument("the extra field '", keys_[i], "' has shape ",
                                          values.shape().DebugString(),
                                          ", want that of req_times: [", batch.size, "]"));
      if (taken.insert(keys_[i]).second) batch.extra_fields.push_back({keys_[i], &values});
    }
    batch.model_name = model_name_;
    batch.targets = targets_;
    batch.uids = ctx->input(kFirstField + uid_).flat<int64_t>().data();
    batch.req_times = req_times.flat<int64_t>().data();
    batch.labels = ctx->input(2).flat<float>().data();
    batch.preds = ctx->input(3).flat<float>().data();
    batch.sample_rates = ctx->input(4).flat<float>().data();
    WriteBatch(ctx, *client, batch, req_times.shape());
  }

 private:
  static constexpr int kFirstField = 5;

  std::vector<std::string> targets_;
  std::vector<std::string> keys_;
  int uid_ = 0;
};

REGISTER_OP("MonolithCreateDeepInsightClient")
    .Output("handle: resource")
    .Attr("enable_metrics_counter: bool = false")
    .Attr("is_fake: bool = false")
    .Attr("filename: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Creates the client that deep insight messages go through.

handle: For MonolithWriteDeepInsight and MonolithWriteDeepInsightV2.
enable_metrics_counter: Whether the number of messages is emitted as a metric.
is_fake: Has no effect: there is no network transport to leave out.
filename: If not empty, one TFRecord per message goes to this file; missing folders are created.
)doc");

REGISTER_OP("MonolithWriteDeepInsight")
    .Input("deep_insight_client_handle: resource")
    .Input("uids: int64")
    .Input("req_times: int64")
    .Input("labels: float")
    .Input("preds: float")
    .Input("sample_rates: float")
    .Output("msgs: string")
    .Attr("model_name: string")
    .Attr("target: string = 'ctr_head'")
    .Attr("sample_ratio: float = 0.01")
    .Attr("return_msgs: bool = false")
    .Attr("use_zero_train_time: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused, uids;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &uids));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &unused));
      c->set_output(0, uids);
      return OkStatus();
    })
    .Doc(R"doc(
Makes one JSON message per example, for one target.

deep_insight_client_handle: From MonolithCreateDeepInsightClient.
uids: [B].
req_times: [B].
labels: B elements.
preds: B elements.
sample_rates: B elements.
msgs: [B], the messages if return_msgs, otherwise empty strings.
model_name: Goes into the messages.
target: Name of the prediction in the messages.
sample_ratio: At least 0. Every example makes a message: samplers read sample_rate.
return_msgs: Whether msgs holds the messages.
use_zero_train_time: Has no effect: messages carry no training time.
)doc");

REGISTER_OP("MonolithWriteDeepInsightV2")
    .Input("deep_insight_client_handle: resource")
    .Input("req_times: int64")
    .Input("labels: float")
    .Input("preds: float")
    .Input("sample_rates: float")
    .Input("extra_fields_values: Tfields")
    .Output("msgs: string")
    .Attr("model_name: string")
    .Attr("extra_fields_keys: list(string)")
    .Attr("Tfields: list(type)")
    .Attr("targets: list(string)")
    .Attr("sample_ratio: float = 0.01")
    .Attr("return_msgs: bool = false")
    .Attr("use_zero_train_time: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused, req_times;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &req_times));
      for (int i = 2; i < 5; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &unused));
      for (int i = 5; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &unused));
      }
      c->set_output(0, req_times);
      return OkStatus();
    })
    .Doc(R"doc(
Makes one JSON message per example, for several targets, with extra fields.

deep_insight_client_handle: From MonolithCreateDeepInsightClient.
req_times: [B].
labels: [targets, B].
preds: [targets, B].
sample_rates: [targets, B].
extra_fields_values: [B] each; float, int64 and string fields go into the messages.
msgs: [B], the messages if return_msgs, otherwise empty strings.
model_name: Goes into the messages.
extra_fields_keys: Names of the extra fields. One of them is `uid`, whose type is int64.
targets: Names of the predictions.
sample_ratio: At least 0. Every example makes a message: samplers read sample_rate.
return_msgs: Whether msgs holds the messages.
use_zero_train_time: Has no effect: messages carry no training time.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithCreateDeepInsightClient").Device(DEVICE_CPU),
                        CreateDeepInsightClientOp);
REGISTER_GUARDED_KERNEL(Name("MonolithWriteDeepInsight").Device(DEVICE_CPU), WriteDeepInsightOp);
REGISTER_GUARDED_KERNEL(Name("MonolithWriteDeepInsightV2").Device(DEVICE_CPU),
                        WriteDeepInsightV2Op);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
