"""A counting model whose second server waits forever in one step, before it writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from monolith.native_training import graph_estimator, utils
from monolith.native_training.data import stream_positions
from tests import counting_task

STALLED_BATCH = 6
BATCHES = "stalled_task/batches"
_lacks = stream_positions.StreamPositions.lacks


class StalledTask(counting_task.CountingTask):
  """Lets all servers but the second one write batch number `STALLED_BATCH`.

  What waits is an op of the server itself, at the very place where it would begin to write. The
  server counts the batches in `BATCHES`: when a step reads the global step, it may have moved it.
  """

  def create_model_fn(self) -> Any:
    model_fn = super().create_model_fn()

    def wait() -> tf.Tensor:
      with tf.control_dependencies(None):
        batches = tf.compat.v1.get_variable(BATCHES, initializer=np.int64(0), trainable=False)
      nothing = tf.queue.FIFOQueue(1, [tf.bool], [[]])
      return tf.cond(
        tf.equal(batches.assign_add(1, read_value=True), STALLED_BATCH),
        nothing.dequeue,
        lambda: tf.constant(True),
      )

    def find_and_wait(positions: Any, batch: Any) -> list[tf.Tensor]:
      lacks = _lacks(positions, batch)
      with tf.device(utils.ps_device(1)):
        lacks[1] = tf.logical_and(wait(), lacks[1])
      return lacks

    def stalled_model_fn(*args: Any, **kwargs: Any) -> graph_estimator.EstimatorSpec:
      stream_positions.StreamPositions.lacks = find_and_wait
      return model_fn(*args, **kwargs)

    return stalled_model_fn
