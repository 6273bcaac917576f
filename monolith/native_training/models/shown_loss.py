"""Computes the loss that users see: the mean per example, whatever the model minimises."""

from __future__ import annotations

import tensorflow as tf

# Scalar ops whose result is still a sum over the batch if their input is one.
_LINEAR_OPS = frozenset(
  ("Identity", "Add", "AddV2", "AddN", "Sub", "Neg", "Mul", "Reshape", "Squeeze", "Cast")
)


def per_example(loss: tf.Tensor, batch_size: tf.Tensor | int | None) -> tf.Tensor:
  """Returns the loss divided by the batch size if it is a sum over the batch, else as it is.

  A sum is recognised by its ops: going back from the loss through additions and products, there is
  a `reduce_sum`, and no division or mean before it. A sum over something of known size, such as the
  weights of a layer, is not a sum over the batch.

  Args:
    loss: a scalar.
    batch_size: scalar; if `None`, the loss is returned as it is.
  """
  if batch_size is None or not _is_sum(loss):
    return loss
  return loss / tf.cast(tf.maximum(batch_size, 1), loss.dtype)


def _is_sum(tensor: tf.Tensor) -> bool:
  pending, seen = [tensor], set()
  while pending:
    op = pending.pop().op
    if op.name in seen:
      continue
    seen.add(op.name)
    if op.type == "Sum":
      shape = op.inputs[0].shape
      if shape.rank is None or not shape.is_fully_defined():
        return True
      # With a fixed batch the losses of the examples are a vector; weights are a matrix, mostly.
      if shape.rank == 1 and op.inputs[0].op.type not in _VARIABLE_READS:
        return True
    elif op.type in _LINEAR_OPS:
      pending += [value for value in op.inputs if value.dtype.is_floating]
  return False


_VARIABLE_READS = frozenset(("ReadVariableOp", "Const", "VariableV2", "Square", "Abs"))
