// Shapes of outputs whose sizes attributes or constants give.
#ifndef MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_SHAPE_H_
#define MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_SHAPE_H_

#include <cstdint>

#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {
namespace monolith_tf {

// Sets the shape of an output, but leaves it unknown where its elements are more than an int64
// counts: TensorFlow's graph optimizer multiplies sizes, with 1 for an unknown one, and ends the
// process when they overflow. The kernel says what is wrong with them.
inline void SetOutputShape(shape_inference::InferenceContext* c, int64_t output,
                           shape_inference::ShapeHandle shape) {
  int64_t elements = 1;
  for (int d = 0; c->RankKnown(shape) && d < c->Rank(shape); ++d) {
    const shape_inference::DimensionHandle size = c->Dim(shape, d);
    if (c->ValueKnown(size) && __builtin_mul_overflow(elements, c->Value(size), &elements)) {
      shape = c->UnknownShape();
    }
  }
  c->set_output(static_cast<int>(output), shape);
}

}  // namespace monolith_tf
}  // namespace tensorflow

#endif  // MONOLITH_NATIVE_TRAINING_RUNTIME_OPS_SUPPORT_OUTPUT_SHAPE_H_
