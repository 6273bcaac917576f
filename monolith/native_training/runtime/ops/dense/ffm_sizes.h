// The sizes of an FFM op, checked.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_FFM_SIZES_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_FFM_SIZES_H_

#include <cstdint>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/util/overflow.h"

namespace tensorflow {
namespace monolith_tf {

// B examples with L left and R right features of D floats, and the width of one output row.
struct FfmSizes {
  int64_t batch = 0;
  int64_t num_left = 0;
  int64_t num_right = 0;
  int64_t dim = 0;
  int64_t out_width = 0;
};

inline Status GetFfmSizes(const Tensor& left, const Tensor& right, int64_t dim_size, bool dot,
                          FfmSizes* sizes) {
  if (left.dims() != 2) {
    return errors::InvalidArgument("the left input tensor of ffm is not 2D: left has shape ",
                                   left.shape().DebugString());
  }
  if (right.dims() != 2) {
    return errors::InvalidArgument("the right input tensor of ffm is not 2D: right has shape ",
                                   right.shape().DebugString());
  }
  if (left.dim_size(0) != right.dim_size(0)) {
    return errors::InvalidArgument("the batch size of left and right tensor are not match: ",
                                   left.dim_size(0), " and ", right.dim_size(0));
  }
  if (left.dim_size(1) % dim_size != 0) {
    return errors::InvalidArgument("the width of left is ", left.dim_size(1),
                                   ", want a multiple of dim_size = ", dim_size);
  }
  if (right.dim_size(1) % dim_size != 0) {
    return errors::InvalidArgument("the width of right is ", right.dim_size(1),
                                   ", want a multiple of dim_size = ", dim_size);
  }
  sizes->batch = left.dim_size(0);
  sizes->num_left = left.dim_size(1) / dim_size;
  sizes->num_right = right.dim_size(1) / dim_size;
  sizes->dim = dim_size;
  sizes->out_width = MultiplyWithoutOverflow(sizes->num_left, sizes->num_right);
  if (!dot && sizes->out_width >= 0) {
    sizes->out_width = MultiplyWithoutOverflow(sizes->out_width, dim_size);
  }
  if (sizes->out_width < 0) {
    return errors::InvalidArgument("left of width ", left.dim_size(1), " and right of width ",
                                   right.dim_size(1), " make an output row that is too wide");
  }
  return OkStatus();
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_DENSE_FFM_SIZES_H_
