// In-batch AUC loss: log-likelihood that every positive scores above every negative.
//
// Visits all pairs, O(|P| * |Q|), in vectorised blocks; pair terms are float, sums are double.
// Every sum belongs to one sample and is made by one thread in one order, so that results do not
// depend on scheduling.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "Eigen/Core"
#include "monolith/native_training/runtime/ops/support/kernel_registration.h"
#include "monolith/native_training/runtime/ops/support/op_checks.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tensorflow {
namespace monolith_tf {
namespace {

using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

constexpr float kIgnoreLabel = -10000.0f;
constexpr int64_t kBlock = 256;
constexpr int64_t kCostPerPair = 20;

using ArrayMap = Eigen::Map<const Eigen::ArrayXf>;
using Buffer = Eigen::Array<float, Eigen::Dynamic, 1, 0, kBlock, 1>;

// Positions and logits of the samples in one class.
struct Side {
  std::vector<int64_t> index;
  std::vector<float> logit;

  int64_t size() const { return static_cast<int64_t>(index.size()); }
  void Add(int64_t i, float z) {
    index.push_back(i);
    logit.push_back(z);
  }
};

void Partition(const Tensor& label, const Tensor& logit, Side* positives, Side* negatives) {
  const auto labels = label.flat<float>();
  const auto logits = logit.flat<float>();
  for (int64_t i = 0; i < labels.size(); ++i) {
    if (labels(i) > 0) {
      positives->Add(i, logits(i));
    } else if (labels(i) > kIgnoreLabel && labels(i) <= 0) {
      negatives->Add(i, logits(i));
    }
  }
}

// Calls fn(logits of a block, terms) for consecutive blocks and adds up the terms it sets.
template <typename Fn>
double SumBlocks(const std::vector<float>& logits, Fn fn) {
  const int64_t n = static_cast<int64_t>(logits.size());
  Buffer terms;
  double sum = 0;
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t size = std::min(kBlock, n - at);
    terms.resize(size);
    fn(ArrayMap(logits.data() + at, size), &terms);
    for (int64_t i = 0; i < size; ++i) sum += terms[i];
  }
  return sum;
}

// Sums log(sigmoid(positive - negative)) over the negatives.
double LogLikelihood(float positive, const std::vector<float>& negatives) {
  return SumBlocks(negatives, [positive](const ArrayMap& negative, Buffer* out) {
    const auto d = positive - negative;
    *out = d.min<Eigen::PropagateNaN>(0.0f) - (-d.abs()).exp().log1p();
  });
}

// Sums 1 - sigmoid(d), d = sign * (mine - other), over `others`: sign is 1 for a positive sample
// against the negatives, -1 for a negative one against the positives.
double SumOfSlopes(float mine, float sign, const std::vector<float>& others) {
  return SumBlocks(others, [mine, sign](const ArrayMap& other, Buffer* out) {
    *out = 1.0f / (1.0f + ((mine - other) * sign).exp());
  });
}

template <typename Fn>
void ForEach(OpKernelContext* ctx, const Side& side, const Side& other, Fn fn) {
  const auto& workers = *ctx->device()->tensorflow_cpu_worker_threads();
  Shard(workers.num_threads, workers.workers, side.size(), 1 + kCostPerPair * other.size(),
        [&fn](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) fn(i);
        });
}

class InbatchAucBase : public OpKernel {
 public:
  explicit InbatchAucBase(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("neg_weight", &neg_weight_));
    OP_REQUIRES(
        ctx, neg_weight_ > 0 && neg_weight_ <= 1,
        errors::InvalidArgument("neg_weight is ", neg_weight_, ", want a number in (0, 1]"));
  }

 protected:
  static Status Check(const Tensor& label, const Tensor& logit) {
    if (label.NumElements() == logit.NumElements()) return OkStatus();
    return errors::InvalidArgument("the label and logit not match: label has ", label.NumElements(),
                                   " elements, logit has ", logit.NumElements());
  }

  float neg_weight_ = 1;
};

class InbatchAucLossOp : public InbatchAucBase {
 public:
  using InbatchAucBase::InbatchAucBase;

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, Check(ctx->input(0), ctx->input(1)));
    Side positives, negatives;
    Partition(ctx->input(0), ctx->input(1), &positives, &negatives);
    std::vector<double> terms(positives.size());
    ForEach(ctx, positives, negatives,
            [&](int64_t i) { terms[i] = LogLikelihood(positives.logit[i], negatives.logit); });
    double loss = 0;
    for (double term : terms) loss += term;

    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &out));
    out->scalar<float>()() = static_cast<float>(loss);
  }
};

class InbatchAucLossGradOp : public InbatchAucBase {
 public:
  using InbatchAucBase::InbatchAucBase;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& logit = ctx->input(1);
    OP_REQUIRES_OK(ctx, Check(ctx->input(0), logit));
    OP_REQUIRES_OK(ctx, CheckScalar("grad", ctx->input(2)));
    const double upstream = ctx->input(2).scalar<float>()();
    Side positives, negatives;
    Partition(ctx->input(0), logit, &positives, &negatives);
    Tensor* out = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, logit.shape(), &out));
    auto grad = out->flat<float>();
    grad.setZero();
    ForEach(ctx, positives, negatives, [&](int64_t i) {
      const double slopes = SumOfSlopes(positives.logit[i], 1.0f, negatives.logit);
      grad(positives.index[i]) = static_cast<float>(upstream * slopes);
    });
    ForEach(ctx, negatives, positives, [&](int64_t j) {
      const double slopes = SumOfSlopes(negatives.logit[j], -1.0f, positives.logit);
      grad(negatives.index[j]) = static_cast<float>(-upstream * neg_weight_ * slopes);
    });
  }
};

// Requires equal element counts where both are known.
Status CheckCounts(InferenceContext* c) {
  const auto label = c->NumElements(c->input(0));
  const auto logit = c->NumElements(c->input(1));
  if (c->ValueKnown(label) && c->ValueKnown(logit) && c->Value(label) != c->Value(logit)) {
    return errors::InvalidArgument("the label and logit not match: label has ", c->Value(label),
                                   " elements, logit has ", c->Value(logit));
  }
  return OkStatus();
}

REGISTER_OP("InbatchAucLoss")
    .Input("label: float")
    .Input("logit: float")
    .Output("loss: float")
    .Attr("neg_weight: float")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckCounts(c));
      return shape_inference::ScalarShape(c);
    })
    .Doc(R"doc(
Sums log(sigmoid(logit_i - logit_j)) over pairs of a positive i and a negative j; maximise it.

label: Positive if > 0, negative if in (-10000, 0], otherwise ignored.
logit: As many elements as label.
loss: At most 0.
neg_weight: In (0, 1]; scales the gradient of the negatives, not the loss.
)doc");

REGISTER_OP("InbatchAucLossGrad")
    .Input("label: float")
    .Input("logit: float")
    .Input("grad: float")
    .Output("logit_grad: float")
    .Attr("neg_weight: float")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(CheckCounts(c));
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      c->set_output(0, c->input(1));
      return OkStatus();
    })
    .Doc(R"doc(
Computes the gradient of InbatchAucLoss with respect to logit.

label: InbatchAucLoss's label.
logit: InbatchAucLoss's logit.
grad: Gradient of the loss, a scalar.
logit_grad: Has the shape of logit.
neg_weight: In (0, 1]; scales the gradient of the negatives.
)doc");

REGISTER_GUARDED_KERNEL(Name("InbatchAucLoss").Device(DEVICE_CPU), InbatchAucLossOp);
REGISTER_GUARDED_KERNEL(Name("InbatchAucLossGrad").Device(DEVICE_CPU), InbatchAucLossGradOp);

}  // namespace
}  // namespace monolith_tf
}  // namespace tensorflow
