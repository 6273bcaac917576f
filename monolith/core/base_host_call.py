"""`BaseHostCall`: brings tensors from the cores of a TPU to the host, to be written as summaries.

What a core sends is concatenated per dtype, because every tensor sent costs a transfer:

    recorded  global_step [1] i64, a [2] f32, b [] i64, c [] f32
    sent      [[global_step, b]] i64   [[a0, a1, c]] f32
    host      (cores, 2) i64           (cores, 3) f32

Differences from ByteDance's Monolith: with one core a column of width one stays a vector; a tensor
of unknown size is refused where it is recorded.
"""

import os
from collections.abc import Sequence
from typing import Any, Callable, Optional

import tensorflow as tf

GLOBAL_STEP = "global_step"
HostCallHook = Optional[tuple[Callable[..., Any], list[tf.Tensor]]]

_FLUSH_MILLIS = 10000
_MAX_QUEUE = 5000


class BaseHostCall:
  """Records tensors, packs them on the core and unpacks them on the host."""

  def __init__(self, output_dir: str, enable_host_call: bool):
    """Args:
      output_dir: summaries go to its folder `host_call`.
      enable_host_call: whether anything is recorded.

    Raises:
      ValueError: the graph has no global step.
    """
    self._output_dir = output_dir
    self._enable_host_call = enable_host_call
    global_step = tf.compat.v1.train.get_global_step()
    if global_step is None:
      raise ValueError("A host call needs a global step: tf.train.get_or_create_global_step()")
    self._tensor_names = [GLOBAL_STEP]
    self._tensors = [tf.reshape(global_step, [1])]
    self._lists_tensor_sizes: list[list[int]] = []

  def record_summary_tensor(self, name: str, tensor: Any) -> None:
    """Records a tensor of shape `[k]` or `[]`; does nothing when host calls are disabled.

    Raises:
      AssertionError: the name is taken, or the rank is higher.
      ValueError: k is not known statically.
    """
    if self._enable_host_call:
      self._record(name, tensor)

  def _record(self, name: str, tensor: Any) -> None:
    assert name not in self._tensor_names, f"Tensor {name} has been recorded already"
    tensor = tf.convert_to_tensor(tensor)
    assert tensor.shape.rank in (
      0,
      1,
    ), f"Now we only support tensor with shape (k, ) or (), but {name} has shape {tensor.shape}"
    if tensor.shape.num_elements() is None:
      raise ValueError(f"Tensor {name} has shape {tensor.shape}, want a static shape")
    self._tensor_names.append(name)
    self._tensors.append(tf.reshape(tensor, [-1]))

  def compress_tensors(self) -> list[tf.Tensor]:
    """Concatenates what was recorded, per dtype in first-seen order.

    The recorded names are put into the order of the result, and the sizes kept for
    `decompress_tensors`.

    Returns:
      One tensor `(1, sum of sizes)` per dtype.
    """
    groups: dict[tf.DType, list[tuple[str, tf.Tensor]]] = {}
    for name, tensor in zip(self._tensor_names, self._tensors):
      groups.setdefault(tensor.dtype, []).append((name, tensor))
    self._tensor_names = [name for group in groups.values() for name, _ in group]
    self._lists_tensor_sizes = [
      [tf.compat.dimension_value(tensor.shape[0]) for _, tensor in group]
      for group in groups.values()
    ]
    self._tensors = [
      tf.expand_dims(tf.concat([tensor for _, tensor in group], axis=0), 0)
      for group in groups.values()
    ]
    return self._tensors

  def decompress_tensors(self, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Undoes `compress_tensors` on the host.

    Args:
      tensors: one `(cores, sum of sizes)` per dtype.

    Returns:
      The global step, a scalar, and for each recorded name (the global step is the first) its
      values: `(cores, k)`, or `(cores,)` for k = 1.
    """
    columns = []
    for tensor, sizes in zip(tensors, self._lists_tensor_sizes):
      for size, column in zip(sizes, tf.split(tensor, sizes, axis=1)):
        columns.append(tf.squeeze(column, axis=1) if size == 1 else column)
    return columns[0][0], columns

  def generate_host_call_hook(self) -> HostCallHook:
    """Returns `(function, tensors)` for the host call of a `TPUEstimatorSpec`, or None."""
    return None

  def _create_file_writer(self) -> Any:
    return tf.compat.v2.summary.create_file_writer(
      os.path.join(self._output_dir, "host_call"),
      max_queue=_MAX_QUEUE,
      flush_millis=_FLUSH_MILLIS,
    )


def reduce_scalar(name: str, tensor: tf.Tensor) -> tf.Tensor:
  """Reduces the values of all cores to a scalar, as the name says: `_avg`, `_max`, `_sum`.

  Any other name gives the first element.
  """
  if "_avg" in name:
    return tf.reduce_mean(tensor)
  if "_max" in name:
    return tf.reduce_max(tensor)
  if "_sum" in name:
    return tf.reduce_sum(tensor)
  return tf.reshape(tensor, [-1])[0]
