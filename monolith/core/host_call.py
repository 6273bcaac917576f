"""`HostCall`: the older, simpler host call. Prefer `BaseEmbeddingHostCall`.

Differences from ByteDance's Monolith: the write function writes; there it calls summary functions
that do not exist.
"""

from typing import Any

import tensorflow as tf

from monolith.core import base_host_call


class HostCall(base_host_call.BaseHostCall):
  """Writes every recorded tensor, reduced over the cores, to `<output_dir>/host_call`."""

  def __init__(self, output_dir: str, enable_host_call: bool, enable_deepinsight: bool):
    """Args:
    output_dir: summaries go to its folder `host_call`.
    enable_host_call: whether there is a host call; tensors are recorded in any case.
    enable_deepinsight: whether the complete tensors are written too, serialized, as text.
    """
    super().__init__(output_dir, enable_host_call)
    self._enable_deepinsight = enable_deepinsight

  def record_summary_tensor(self, name: str, tensor: Any) -> None:
    self._record(name, tensor)

  def generate_host_call_hook(self) -> base_host_call.HostCallHook:
    if not self._enable_host_call:
      return None
    return self._write_summary_ops, self.compress_tensors()

  def _write_summary_ops(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
    summary = tf.compat.v2.summary
    global_step, columns = self.decompress_tensors(tensors)
    ops = []
    with self._create_file_writer().as_default():
      for name, column in zip(self._tensor_names, columns):
        if name == base_host_call.GLOBAL_STEP:
          continue
        value = base_host_call.reduce_scalar(name, column)
        ops.append(summary.scalar(name, value, step=global_step))
        if self._enable_deepinsight:
          text = tf.io.serialize_tensor(column)
          ops.append(summary.text(f"di_{name}", text, step=global_step))
    return ops
