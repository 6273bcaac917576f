// Finds gradients that are not finite before they damage rows permanently.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/logging.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;

REGISTER_OP("MonolithCheckGradients")
    .Input("grads: num_grads * float")
    .Output("checked: num_grads * float")
    .Attr("num_grads: int >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("skip: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    })
    .Doc(R"doc(
Passes gradients on if all of them are finite.

grads: Any shapes; the last dimension is a row.
names: What each gradient belongs to, for the message.
skip: Replaces rows that are not finite by zeros and logs the name, instead of failing.
)doc");

class CheckGradientsOp : public OpKernel {
 public:
  explicit CheckGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("skip", &skip_));
    OP_REQUIRES(ctx, static_cast<int>(names_.size()) == ctx->num_inputs(),
                errors::InvalidArgument("names has ", names_.size(), " elements, want ",
                                        ctx->num_inputs(), ", one per gradient"));
  }

  void Compute(OpKernelContext* ctx) override {
    const int n = ctx->num_inputs();
    int64_t total = 0;
    for (int i = 0; i < n; ++i) total += ctx->input(i).NumElements();
    std::vector<char> is_good(n, 0);
    const auto check = [&](int64_t i) {
      is_good[i] = ::monolith::engine::AllFinite(ctx->input(i).flat<float>().data(),
                                                 ctx->input(i).NumElements());
    };
    const DeviceRunner parallel(ctx);
    if (parallel.TasksFor(total) == 1) {
      for (int i = 0; i < n; ++i) check(i);
    } else {
      parallel.RunTasks(n, check);
    }
    for (int i = 0; i < n; ++i) {
      if (is_good[i]) {
        ctx->set_output(i, ctx->input(i));
        continue;
      }
      OP_REQUIRES(ctx, skip_,
                  errors::InvalidArgument("The gradient of ", names_[i], " is not finite: it has ",
                                          Describe(ctx->input(i)), "."));
      LOG(WARNING) << "Skipped a gradient of " << names_[i] << " that is not finite: it has "
                   << Describe(ctx->input(i)) << ".";
      OP_REQUIRES_OK(ctx, SetWithoutBadRows(ctx, i));
    }
  }

 private:
  // Describes a gradient's faults, like "3 NaN and 0 infinite values in 2 of 10 rows".
  static std::string Describe(const Tensor& grad) {
    const auto values = grad.flat<float>();
    const int64_t dim = RowSize(grad);
    int64_t nan = 0, inf = 0, bad_rows = 0;
    for (int64_t begin = 0; begin < values.size(); begin += dim) {
      const int64_t before = nan + inf;
      for (int64_t i = begin; i < begin + dim; ++i) {
        nan += std::isnan(values(i));
        inf += std::isinf(values(i));
      }
      bad_rows += nan + inf > before;
    }
    return strings::StrCat(nan, " NaN and ", inf, " infinite values in ", bad_rows, " of ",
                           values.size() / dim, " rows");
  }

  static int64_t RowSize(const Tensor& grad) {
    return grad.dims() == 0 ? 1 : std::max<int64_t>(1, grad.dim_size(grad.dims() - 1));
  }

  static Status SetWithoutBadRows(OpKernelContext* ctx, int i) {
    const Tensor& grad = ctx->input(i);
    Tensor* out = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(i, grad.shape(), &out));
    const int64_t dim = RowSize(grad);
    const float* from = grad.flat<float>().data();
    float* to = out->flat<float>().data();
    for (int64_t at = 0; at < grad.NumElements(); at += dim) {
      if (::monolith::engine::AllFinite(from + at, dim)) {
        std::copy(from + at, from + at + dim, to + at);
      } else {
        std::fill(to + at, to + at + dim, 0.0f);
      }
    }
    return OkStatus();
  }

  std::vector<std::string> names_;
  bool skip_ = false;
};

REGISTER_GUARDED_KERNEL(Name("MonolithCheckGradients").Device(DEVICE_CPU), CheckGradientsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
