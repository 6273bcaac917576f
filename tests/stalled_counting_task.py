"""A counting model whose second server waits forever in one step, before it writes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith.native_training import utils
from monolith.native_training.data import stream_positions
from tests import counting_task

STALLED_STEP = 5


class StalledTask(counting_task.CountingTask):
  """Lets all servers but the second one write in step `STALLED_STEP`.

  What waits is an op of the server itself, at the very place where it would begin to write.
  """

  def create_model_fn(self) -> Any:
    model_fn = super().create_model_fn()
    find = stream_positions.StreamPositions.lacks

    def find_and_wait(positions: Any, batch: Any) -> list[tf.Tensor]:
      lacks = find(positions, batch)
      step = tf.compat.v1.train.get_or_create_global_step().read_value()
      with tf.device(utils.ps_device(1)):
        nothing = tf.queue.FIFOQueue(1, [tf.bool], [[]])
        waited = tf.cond(
          tf.equal(tf.identity(step), STALLED_STEP), nothing.dequeue, lambda: tf.constant(True)
        )
        lacks[1] = tf.logical_and(waited, lacks[1])
      return lacks

    def stalled_model_fn(*args: Any, **kwargs: Any) -> tf.estimator.EstimatorSpec:
      stream_positions.StreamPositions.lacks = find_and_wait
      return model_fn(*args, **kwargs)

    return stalled_model_fn
