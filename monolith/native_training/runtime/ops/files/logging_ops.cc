// Ops that take timestamps, emit metrics and check the machine's health.
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "monolith/native_training/runtime/metrics/metric_sink.h"
#include "monolith/native_training/runtime/metrics/metric_window.h"
#include "monolith/native_training/runtime/ops/logging_ops.pb.h"
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
#include "tensorflow/core/platform/numbers.h"
#include "tensorflow/core/platform/str_util.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

class TensorsTimestampOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const int num_tensors = ctx->num_inputs();
    Tensor* timestamp = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(num_tensors, TensorShape({}), &timestamp));
    for (int i = 0; i < num_tensors; ++i) ctx->set_output(i, ctx->input(i));
    timestamp->scalar<int64_t>()() = static_cast<int64_t>(Env::Default()->NowMicros());
  }
};

// Emits to the metric sink and keeps the metric's window for the log.
class MetricEmitter {
 public:
  Status Init(OpKernelConstruction* ctx) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("key", &key_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("tags", &tags_));
    window_ = ::monolith::metrics::GetMetricWindow(key_);
    return OkStatus();
  }

  Status Emit(const Tensor& value) const {
    TF_RETURN_IF_ERROR(CheckScalar("value", value));
    const float number = value.scalar<float>()();
    ::monolith::metrics::EmitMetric(key_, number, tags_);
    const int64_t now = static_cast<int64_t>(Env::Default()->NowSeconds());
    window_->Add(now, number);
    const std::string report = window_->Report(now);
    for (StringPiece line : str_util::Split(report, '\n', str_util::SkipEmpty())) {
      LOG(INFO) << line;
    }
    return OkStatus();
  }

 private:
  std::string key_;
  std::string tags_;
  std::shared_ptr<::monolith::metrics::MetricWindow> window_;
};

class MetricOp : public OpKernel {
 public:
  explicit MetricOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, emitter_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const int num_tensors = ctx->num_inputs() - 1;
    OP_REQUIRES_OK(ctx, emitter_.Emit(ctx->input(num_tensors)));
    for (int i = 0; i < num_tensors; ++i) ctx->set_output(i, ctx->input(i));
  }

 private:
  MetricEmitter emitter_;
};

class MetricV2Op : public OpKernel {
 public:
  explicit MetricV2Op(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, emitter_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, emitter_.Emit(ctx->input(0))); }

 private:
  MetricEmitter emitter_;
};

class MachineInfo : public ResourceBase {
 public:
  explicit MachineInfo(int64_t mem_limit) : mem_limit_(mem_limit) {}

  std::string DebugString() const override {
    return strings::StrCat("MachineInfo with a memory limit of ", mem_limit_, " bytes");
  }

  int64_t mem_limit() const { return mem_limit_; }

 private:
  const int64_t mem_limit_;
};

class MachineInfoOp : public ResourceOpKernel<MachineInfo> {
 public:
  explicit MachineInfoOp(OpKernelConstruction* ctx) : ResourceOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("mem_limit", &mem_limit_));
  }

 private:
  Status CreateResource(MachineInfo** resource) override {
    *resource = std::make_unique<MachineInfo>(mem_limit_).release();
    return OkStatus();
  }

  int64_t mem_limit_ = 0;
};

// Reads this process's resident set size in bytes.
Status ReadResidentBytes(int64_t* bytes) {
  static constexpr char kFile[] = "/proc/self/statm";
  // The file holds pages: size, resident, shared, ... TensorFlow's ReadFileToString would read
  // nothing, because it asks for the file's size first, which is 0 here.
  std::unique_ptr<RandomAccessFile> file;
  TF_RETURN_IF_ERROR(Env::Default()->NewRandomAccessFile(kFile, &file));
  char buffer[256];
  StringPiece content;
  const Status status = file->Read(0, sizeof(buffer), &content, buffer);
  if (!status.ok() && !errors::IsOutOfRange(status)) return status;
  const std::vector<std::string> words = str_util::Split(content, " \n", str_util::SkipEmpty());
  int64_t pages = 0;
  if (words.size() < 2 || !strings::safe_strto64(words[1], &pages)) {
    return errors::Internal(kFile, " holds '", content, "', want sizes in pages");
  }
  *bytes = pages * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  return OkStatus();
}

class CheckMachineHealthOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<MachineInfo> info;
    OP_REQUIRES_OK(ctx, LookupHandleInput(ctx, 0, "machine_info_handle", &info));
    int64_t resident = 0;
    OP_REQUIRES_OK(ctx, ReadResidentBytes(&resident));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    MachineHealthResult result;
    if (resident >= info->mem_limit()) {
      result.set_status(MachineHealthResult::OUT_OF_MEMORY);
      result.set_message(strings::StrCat("Memory limit exceeded. Current: ", resident,
                                         ", Limit: ", info->mem_limit()));
    }
    out->scalar<tstring>()() = result.SerializeAsString();
  }
};

// Gives outputs 0 to n-1 the shapes of inputs 0 to n-1.
void ForwardShapes(InferenceContext* c, int n) {
  for (int i = 0; i < n; ++i) {
    c->set_output(i, c->input(i));
    if (const auto* handle_data = c->input_handle_shapes_and_types(i)) {
      c->set_output_handle_shapes_and_types(i, *handle_data);
    }
  }
}

// Stateful, because Grappler might otherwise fold it into a constant or merge two of them.
REGISTER_OP("MonolithTensorsTimestamp")
    .Input("tensors_in: T")
    .Output("tensors_out: T")
    .Output("timestamp: int64")
    .Attr("T: list(type)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ForwardShapes(c, c->num_inputs());
      c->set_output(c->num_inputs(), c->Scalar());
      return OkStatus();
    })
    .Doc(R"doc(
Records when all of its inputs had arrived.

tensors_in: Any tensors.
tensors_out: The same tensors.
timestamp: Unix time in microseconds.
)doc");

REGISTER_OP("MonolithMetric")
    .Input("tensors_in: T")
    .Input("value: float")
    .Output("tensors_out: T")
    .Attr("T: list(type)")
    .Attr("key: string")
    .Attr("tags: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInput(c, c->num_inputs() - 1));
      ForwardShapes(c, c->num_inputs() - 1);
      return OkStatus();
    })
    .Doc(R"doc(
Deprecated, use MonolithMetricV2. Emits a metric when the tensors pass.

tensors_in: Any tensors.
value: A scalar.
tensors_out: The same tensors.
key: Name of the metric.
tags: `name=value` joined by `|`.
)doc");

REGISTER_OP("MonolithMetricV2")
    .Input("value: float")
    .Attr("key: string")
    .Attr("tags: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarInput(c, 0); })
    .Doc(R"doc(
Emits a metric to the process's metric sink; its 1, 5 and 15 minute windows are logged every 10
minutes.

value: A scalar.
key: Name of the metric.
tags: `name=value` joined by `|`.
)doc");

REGISTER_OP("MonolithMachineInfo")
    .Output("handle: resource")
    .Attr("mem_limit: int")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape)
    .Doc(R"doc(
Holds the machine's limits. The first op that runs with a shared_name sets them.

handle: For MonolithCheckMachineHealth.
mem_limit: Bytes of resident memory.
)doc");

REGISTER_OP("MonolithCheckMachineHealth")
    .Input("machine_info_handle: resource")
    .Output("serialized_result: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInput(c, 0));
      return shape_inference::ScalarShape(c);
    })
    .Doc(R"doc(
Checks this process against its machine's limits.

machine_info_handle: From MonolithMachineInfo.
serialized_result: A MachineHealthResult; the empty string if all is well.
)doc");

REGISTER_GUARDED_KERNEL(Name("MonolithTensorsTimestamp").Device(DEVICE_CPU), TensorsTimestampOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMetric").Device(DEVICE_CPU), MetricOp);
REGISTER_GUARDED_KERNEL(Name("MonolithMetricV2").Device(DEVICE_CPU), MetricV2Op);
REGISTER_GUARDED_KERNEL(Name("MonolithMachineInfo").Device(DEVICE_CPU), MachineInfoOp);
REGISTER_GUARDED_KERNEL(Name("MonolithCheckMachineHealth").Device(DEVICE_CPU),
                        CheckMachineHealthOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
