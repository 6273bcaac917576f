// Gradients of pooled rows that are not finite are found before they reach any row, and named.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "monolith/native_training/runtime/hash_table/optimizer/optimizers.h"
#include "monolith/native_training/runtime/ops/support/device_runner.h"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "monolith/native_training/runtime/ops/tables/pooled_parts.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/strcat.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

REGISTER_OP("MonolithCheckPooledGradients")
    .Input("grads: num_grads * float")
    .Output("checked: num_grads * float")
    .Attr("num_grads: int >= 1")
    .Attr("names: list(string) >= 1")
    .Attr("parts: list(int) >= 5")
    .Attr("skip: bool = false")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return OkStatus();
    })
    .Doc(R"doc(
Passes gradients on if all of them are finite.

grads: [examples, columns].
names: What the columns belong to, for the message.
parts: Five numbers for each piece, as for an update; the first is the place in `names`.
skip: Replaces rows that are not finite by zeros and logs the name, instead of failing.
)doc");

class CheckPooledGradientsOp : public OpKernel {
 public:
  explicit CheckPooledGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("parts", &numbers));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("skip", &skip_));
    OP_REQUIRES_OK(ctx, ReadPooledParts(numbers, static_cast<int64_t>(names_.size()),
                                        ctx->num_inputs(), nullptr, &parts_));
  }

  void Compute(OpKernelContext* ctx) override {
    const DeviceRunner runner(ctx);
    std::vector<Tensor> grads;
    for (int k = 0; k < ctx->num_inputs(); ++k) {
      grads.push_back(ctx->input(k));
      OP_REQUIRES_OK(ctx, CheckMatrix(strings::StrCat("grads[", k, "]"), grads.back()));
    }
    for (size_t i = 0; i < names_.size(); ++i) {
      for (const PooledPart& part : parts_[i]) {
        const Tensor& grad = grads[part.pooled];
        OP_REQUIRES(ctx,
                    grad.dim_size(0) == grads[parts_[i][0].pooled].dim_size(0) &&
                        part.pooled_column + part.width <= grad.dim_size(1),
                    errors::InvalidArgument(
                        "grads[", part.pooled, "] has shape ", grad.shape().DebugString(),
                        ", want as many rows as others of ", names_[i], ", and columns up to ",
                        part.pooled_column + part.width));
      }
    }
    bool all_finite = true;
    for (const Tensor& grad : grads) all_finite = all_finite && IsFinite(runner, grad);
    if (!all_finite) OP_REQUIRES_OK(ctx, HandleBadRows(ctx, &grads));
    for (int k = 0; k < ctx->num_inputs(); ++k) ctx->set_output(k, grads[k]);
  }

 private:
  static bool IsFinite(const ::monolith::engine::ParallelRunner& runner, const Tensor& grad) {
    const float* const values = grad.flat<float>().data();
    std::atomic<bool> is_finite{true};
    runner.For(grad.NumElements(), 1, [&](int64_t begin, int64_t end) {
      if (!::monolith::engine::AllFinite(values + begin, end - begin)) is_finite = false;
    });
    return is_finite;
  }

  // Fails, or replaces `grads` by copies without the rows that are not finite.
  Status HandleBadRows(OpKernelContext* ctx, std::vector<Tensor>* grads) const {
    std::vector<char> is_copied(grads->size(), 0);
    for (size_t i = 0; i < names_.size(); ++i) {
      if (parts_[i].empty()) continue;
      const int64_t rows = (*grads)[parts_[i][0].pooled].dim_size(0);
      int64_t nan = 0, inf = 0;
      std::vector<int64_t> bad_rows;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t before = nan + inf;
        for (const PooledPart& part : parts_[i]) {
          const float* const values = RowOf((*grads)[part.pooled], part, r);
          for (int64_t c = 0; c < part.width; ++c) {
            nan += std::isnan(values[c]);
            inf += std::isinf(values[c]);
          }
        }
        if (nan + inf > before) bad_rows.push_back(r);
      }
      if (bad_rows.empty()) continue;
      const std::string faults =
          strings::StrCat("it has ", nan, " NaN and ", inf, " infinite values in ", bad_rows.size(),
                          " of ", rows, " rows.");
      if (!skip_) {
        return errors::InvalidArgument("The gradient of ", names_[i], " is not finite: ", faults);
      }
      LOG(WARNING) << "Skipped a gradient of " << names_[i] << " that is not finite: " << faults;
      for (const PooledPart& part : parts_[i]) {
        if (!is_copied[part.pooled]) {
          Tensor copy;
          TF_RETURN_IF_ERROR(ctx->allocate_temp(DT_FLOAT, (*grads)[part.pooled].shape(), &copy));
          std::copy_n((*grads)[part.pooled].flat<float>().data(), copy.NumElements(),
                      copy.flat<float>().data());
          (*grads)[part.pooled] = copy;
          is_copied[part.pooled] = 1;
        }
        for (const int64_t r : bad_rows) {
          std::fill_n(RowOf((*grads)[part.pooled], part, r), part.width, 0.0f);
        }
      }
    }
    return OkStatus();
  }

  static float* RowOf(const Tensor& grad, const PooledPart& part, int64_t row) {
    // Written to only where it is a copy.
    return const_cast<float*>(grad.flat<float>().data()) + row * grad.dim_size(1) +
           part.pooled_column;
  }

  std::vector<std::string> names_;
  std::vector<std::vector<PooledPart>> parts_;  // of each name
  bool skip_ = false;
};

REGISTER_GUARDED_KERNEL(Name("MonolithCheckPooledGradients").Device(DEVICE_CPU),
                        CheckPooledGradientsOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
