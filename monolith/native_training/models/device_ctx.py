"""Places the parts of a model in synchronous training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith.native_training import device_utils, distribution_utils
from monolith.native_training.graph import export_context


class DeviceCtxType:
  """Names the parts that are built in a `MonolithDeviceCtx`."""

  INPUT_FN = "input_fn"
  MODEL_FN = "model_fn"
  INPUT_RECEIVER_FN = "input_receiver_fn"
  OTHERS = "others"
  all_types = frozenset([INPUT_FN, MODEL_FN, INPUT_RECEIVER_FN, OTHERS])


class MonolithDeviceCtx:
  """Places ops of synchronous training; does nothing elsewhere, nor for an export.

  Args:
    ctx_type: a `DeviceCtxType`.

  Raises:
    AssertionError: `ctx_type` is something else.
  """

  def __init__(self, ctx_type: str):
    assert (
      ctx_type in DeviceCtxType.all_types
    ), f"ctx_type is {ctx_type!r}, want one of {sorted(DeviceCtxType.all_types)}"
    self._ctx_type = ctx_type
    self._scope: Any = None

  def __enter__(self) -> MonolithDeviceCtx:
    if not distribution_utils.enable_sync_training() or export_context.is_exporting():
      return self
    device_fn = {
      DeviceCtxType.INPUT_FN: device_utils.input_device_fn,
      DeviceCtxType.MODEL_FN: device_utils.model_device_fn,
      DeviceCtxType.INPUT_RECEIVER_FN: device_utils.serving_input_device_fn,
    }.get(self._ctx_type)
    if device_fn is not None:
      self._scope = tf.compat.v1.device(device_fn)
      self._scope.__enter__()
    return self

  def __exit__(self, *exception: Any) -> None:
    if self._scope is None:
      return
    self._scope.__exit__(*exception)
    self._scope = None
    if self._ctx_type == DeviceCtxType.MODEL_FN:
      # The step belongs to where the driver wants it, not to the model.
      graph = tf.compat.v1.get_default_graph()
      for op in graph.get_operations():
        if op.name.startswith("global_step"):
          graph._apply_device_functions(op)
