// TfServingRemotePredict calls a signature of another TensorFlow Serving model.
//
// A predictor that the program has set makes the call (remote_predictor.h), else this process's
// Python (host_call.h). Without either, or where Python was not told which addresses serve the
// models, the op fails with Unimplemented.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/ops/serving/remote_predictor.h"
#include "monolith/native_training/runtime/ops/support/exception_status.h"
#include "monolith/native_training/runtime/ops/support/host_call.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/parameter_sync/prediction_service.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

struct Predictor {
  MonolithPredictFunction function = nullptr;
  void* self = nullptr;
};

std::mutex predictor_mutex;
Predictor predictor;

Predictor GetPredictor() {
  std::lock_guard<std::mutex> lock(predictor_mutex);
  return predictor;
}

// Requires `aliases` to be a vector with one name for each of the list's `count` tensors.
Status CheckAliases(InferenceContext* c, const char* aliases, const char* list, size_t count) {
  std::vector<ShapeHandle> shapes;
  TF_RETURN_IF_ERROR(c->input(aliases, &shapes));
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(c->WithRank(shapes[0], 1, &shape));
  const auto size = c->Dim(shape, 0);
  if (c->ValueKnown(size) && c->Value(size) != static_cast<int64_t>(count)) {
    return errors::InvalidArgument(aliases, " has ", c->Value(size),
                                   " elements, want one for each of the ", count, " ", list);
  }
  return OkStatus();
}

Status RemotePredictShape(InferenceContext* c) {
  std::vector<ShapeHandle> inputs;
  TF_RETURN_IF_ERROR(c->input("input_tensors", &inputs));
  DataTypeVector output_types;
  TF_RETURN_IF_ERROR(c->GetAttr("output_types", &output_types));
  TF_RETURN_IF_ERROR(CheckAliases(c, "input_tensor_aliases", "input_tensors", inputs.size()));
  TF_RETURN_IF_ERROR(CheckAliases(c, "output_tensor_aliases", "output_types", output_types.size()));
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  for (int i = 2; i < c->num_outputs(); ++i) c->set_output(i, c->UnknownShape());
  return OkStatus();
}

// Asynchronous: the call waits for another machine and must not occupy one of the step's threads.
class TfServingRemotePredictOp : public AsyncOpKernel {
 public:
  explicit TfServingRemotePredictOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    int64_t task = -1;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("model_name", &model_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("signature_name", &signature_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("model_version", &model_version_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("fail_op_on_rpc_error", &fail_op_on_rpc_error_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &output_types_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_rpc_deadline_millis", &deadline_millis_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("task", &task));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("old_model_name", &old_model_name_));
    call_ = strings::StrCat(task, "\n", deadline_millis_, "\n", old_model_name_);
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    std::string request;
    OP_REQUIRES_OK_ASYNC(ctx, CatchExceptions([&] { return MakeRequest(ctx, &request); }), done);
    const Predictor set = GetPredictor();
    if (set.function != nullptr) {
      auto call = std::make_unique<Call>(Call{this, ctx, std::move(done)});
      set.function(set.self, request.data(), static_cast<int64_t>(request.size()),
                   old_model_name_.data(), static_cast<int64_t>(old_model_name_.size()),
                   deadline_millis_, &TakeAnswer, call.release());
      return;
    }
    OP_REQUIRES_OK_ASYNC(ctx, CatchExceptions([&] {
                           Env::Default()->SchedClosure([this, ctx, request, done] {
                             OP_REQUIRES_OK_ASYNC(
                                 ctx, CatchExceptions([&] { return Predict(ctx, request); }), done);
                             done();
                           });
                           return OkStatus();
                         }),
                         done);
  }

 private:
  // Holds what a predictor hands back with its answer.
  struct Call {
    const TfServingRemotePredictOp* op;
    OpKernelContext* ctx;
    DoneCallback done;
  };

  static void TakeAnswer(void* context, int32_t code, const char* data, int64_t size) {
    const std::unique_ptr<Call> call(static_cast<Call*>(context));
    const Status status = CatchExceptions([&] {
      std::string answer(data, static_cast<size_t>(size));
      if (code == 0) return call->op->Finish(call->ctx, OkStatus(), answer);
      return call->op->Finish(call->ctx, Status(static_cast<absl::StatusCode>(code), answer), "");
    });
    OP_REQUIRES_OK_ASYNC(call->ctx, status, call->done);
    call->done();
  }

  Status Predict(OpKernelContext* ctx, const std::string& request) const {
    std::string response;
    const Status status = CallHost("predict", request, call_, &response);
    return Finish(ctx, status, response);
  }

  // Turns an answer, or the error of a call, into the op's outputs or its error.
  Status Finish(OpKernelContext* ctx, Status status, const std::string& response) const {
    if (status.ok()) status = SetOutputs(ctx, response);
    if (!status.ok()) {
      status = Status(status.code(),
                      strings::StrCat("TfServingRemotePredict of model '", model_name_,
                                      "', signature '", signature_name_, "': ", status.message()));
    }
    if (!status.ok() && fail_op_on_rpc_error_) return status;
    return SetStatusOutputs(ctx, status);
  }

  Status MakeRequest(OpKernelContext* ctx, std::string* serialized) const {
    const Tensor& aliases = ctx->input(0);
    const Tensor& output_aliases = ctx->input(ctx->num_inputs() - 1);
    TF_RETURN_IF_ERROR(CheckVector("input_tensor_aliases", aliases));
    TF_RETURN_IF_ERROR(CheckVector("output_tensor_aliases", output_aliases));
    TF_RETURN_IF_ERROR(CheckEqual("size of input_tensor_aliases", aliases.NumElements(),
                                  "number of input_tensors", ctx->num_inputs() - 2));
    TF_RETURN_IF_ERROR(CheckEqual("size of output_tensor_aliases", output_aliases.NumElements(),
                                  "number of output_types",
                                  static_cast<int64_t>(output_types_.size())));
    ::monolith::parameter_sync::PredictRequest request;
    request.mutable_model_spec()->set_name(model_name_);
    request.mutable_model_spec()->set_signature_name(signature_name_);
    if (model_version_ >= 0) {
      request.mutable_model_spec()->mutable_version()->set_value(model_version_);
    }
    for (int64_t i = 0; i < aliases.NumElements(); ++i) {
      TensorProto proto;
      // Only C++ can read strings that are packed into tensor_content.
      const Tensor& tensor = ctx->input(1 + static_cast<int>(i));
      if (tensor.dtype() == DT_STRING) {
        tensor.AsProtoField(&proto);
      } else {
        tensor.AsProtoTensorContent(&proto);
      }
      (*request.mutable_inputs())[aliases.vec<tstring>()(i)] = proto.SerializeAsString();
    }
    for (int64_t i = 0; i < output_aliases.NumElements(); ++i) {
      request.add_output_filter(std::string(output_aliases.vec<tstring>()(i)));
    }
    *serialized = request.SerializeAsString();
    return OkStatus();
  }

  Status SetOutputs(OpKernelContext* ctx, const std::string& serialized) const {
    ::monolith::parameter_sync::PredictResponse response;
    if (!response.ParseFromString(serialized)) {
      return errors::DataLoss("the answer of ", serialized.size(),
                              " bytes is not a PredictResponse");
    }
    const auto aliases = ctx->input(ctx->num_inputs() - 1).vec<tstring>();
    std::vector<Tensor> tensors(output_types_.size());
    for (size_t i = 0; i < output_types_.size(); ++i) {
      const std::string alias = aliases(i);
      const auto found = response.outputs().find(alias);
      if (found == response.outputs().end()) {
        return errors::NotFound("the answer has no output '", alias, "'");
      }
      TensorProto proto;
      Tensor& tensor = tensors[i];
      if (!proto.ParseFromString(found->second) || !tensor.FromProto(proto)) {
        return errors::DataLoss("output '", alias, "' of the answer is not a tensor");
      }
      if (tensor.dtype() != output_types_[i]) {
        return errors::InvalidArgument("output '", alias, "' is ", DataTypeString(tensor.dtype()),
                                       ", want ", DataTypeString(output_types_[i]));
      }
    }
    for (size_t i = 0; i < tensors.size(); ++i)
      ctx->set_output(2 + static_cast<int>(i), tensors[i]);
    return OkStatus();
  }

  // Sets missing outputs to empty vectors after an error of the call that does not fail the op.
  Status SetStatusOutputs(OpKernelContext* ctx, const Status& status) const {
    Tensor* code = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &code));
    code->scalar<int32>()() = static_cast<int32>(status.code());
    Tensor* message = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({}), &message));
    message->scalar<tstring>()() = std::string(status.message());
    if (status.ok()) return OkStatus();
    for (int i = 2; i < ctx->num_outputs(); ++i) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(AllocateOutput(ctx, i, {0}, &output));
    }
    return OkStatus();
  }

  std::string model_name_;
  std::string signature_name_;
  int64_t model_version_ = -1;
  bool fail_op_on_rpc_error_ = true;
  int64_t deadline_millis_ = 0;
  std::string old_model_name_;
  DataTypeVector output_types_;
  // The host's arguments besides the request: task, deadline and old name, one per line.
  std::string call_;
};

REGISTER_OP("TfServingRemotePredict")
    .Input("input_tensor_aliases: string")
    .Input("input_tensors: T")
    .Input("output_tensor_aliases: string")
    .Output("status_code: int32")
    .Output("status_error_message: string")
    .Output("output_tensors: output_types")
    .Attr("T: list(type)")
    .Attr("model_name: string = ''")
    .Attr("model_version: int = -1")
    .Attr("fail_op_on_rpc_error: bool = true")
    .Attr("max_rpc_deadline_millis: int = 30")
    .Attr("signature_name: string = 'serving_default'")
    .Attr("old_model_name: string = ''")
    .Attr("task: int = -1")
    .Attr("output_types: list(type)")
    .SetIsStateful()
    // Or the executor would call a server that cannot be reached an internal error.
    .SetIsDistributedCommunication()
    .SetShapeFn(RemotePredictShape)
    .Doc(R"doc(
Calls a signature of another model.

input_tensor_aliases: [k], names of the inputs in the signature.
input_tensors: k tensors.
output_tensor_aliases: [m], names of the outputs in the signature.
status_code: 0, or the code of the error if fail_op_on_rpc_error is false.
status_error_message: Empty, or the text of that error.
output_tensors: m tensors.
model_name: Which model.
model_version: -1 for the newest.
fail_op_on_rpc_error: Whether an error of the call is an error of the op.
max_rpc_deadline_millis: How long the call may take.
signature_name: Which signature.
old_model_name: Name of the model in exports of earlier versions.
task: Index of the parameter server, -1 if the model is not one.
output_types: m types.
)doc");

REGISTER_GUARDED_KERNEL(Name("TfServingRemotePredict").Device(DEVICE_CPU),
                        TfServingRemotePredictOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow

extern "C" void MonolithSetRemotePredictor(MonolithPredictFunction function, void* self) {
  std::lock_guard<std::mutex> lock(tensorflow::monolith_tf::predictor_mutex);
  tensorflow::monolith_tf::predictor = {function, self};
}
