"""Many reshapes in one op, to shapes known when the graph is built. With a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as reshape_ops

Shape = Union[tf.TensorShape, Sequence[Optional[int]]]


def static_reshape(
  inputs: Sequence[tf.Tensor], shapes: Sequence[Shape], enable_parallelism: bool = True
) -> NamedTuple:
  """Reshapes `inputs[i]` to `shapes[i]` without copying.

  Args:
    inputs: tensors of any dtypes; at least one.
    shapes: ints, with at most one `None` each, which is inferred.
    enable_parallelism: has no effect: a reshape costs nothing.

  Returns:
    `(outputs, sizes)`: the reshaped tensors, and int64 `[len(inputs)]`, their element counts.

  Raises:
    tf.errors.InvalidArgumentError: when it runs; an input does not fit its shape, a shape has two
      unknown dimensions or unknown rank, or there is not one shape per input.
  """
  return reshape_ops.monolith_static_reshape_n(
    inputs, shapes=shapes, enable_parallelism=enable_parallelism
  )


class StaticReshapeNBuilder:
  """Collects tensors and their new shapes for one `static_reshape`.

  builder = StaticReshapeNBuilder()
  index = builder.add(tensor, (None, 4))
  outputs, sizes = builder.build()
  reshaped = outputs[index]
  """

  def __init__(self, enable_parallelism: bool = True):
    self.inputs: list[tf.Tensor] = []
    self.shapes: list[Shape] = []
    self.enable_parallelism = enable_parallelism

  def add(self, input: tf.Tensor, shape: Shape) -> int:
    """Returns the index of the reshaped tensor in the outputs."""
    self.inputs.append(input)
    self.shapes.append(shape)
    return len(self.inputs) - 1

  def build(self) -> NamedTuple:
    """Returns what `static_reshape` returns for everything added so far."""
    return static_reshape(self.inputs, self.shapes, self.enable_parallelism)


@tf.RegisterGradient("MonolithStaticReshapeN")
def _static_reshape_n_grad(op: tf.Operation, *grads: tf.Tensor | None) -> list[tf.Tensor | None]:
  # One gradient per output; the last is that of `sizes`.
  return [
    None if grad is None else tf.reshape(grad, tf.shape(tensor))
    for tensor, grad in zip(op.inputs, grads[:-1])
  ]
