"""A feed hook that ends TPU training, with a final checkpoint, when the data ends.

`BaseEmbeddingTask` appends endless empty batches to its finite data; every batch carries the
feature `_user_provided_signal_name`, which is True in those batches. The model sends it to the
host, and this hook, in place of TensorFlow's own, ends training after the loop in which it arrived.

TPUEstimator exists up to TensorFlow 2.15: take that version to train on TPU.
"""

from typing import Any, Optional

import tensorflow as tf

from monolith import _tensorflow

tpu_estimator: Any = _tensorflow.import_tpu_estimator()
PeriodicLogger = tpu_estimator.PeriodicLogger
_SIGNAL = tpu_estimator._SIGNAL
_OpQueueContext = tpu_estimator._OpQueueContext
_OpSignalOnceQueueContext = tpu_estimator._OpSignalOnceQueueContext

_USER_PROVIDED_SIGNAL_NAME = "_user_provided_signal_name"
_STOPPING = "stopping"
_LOG_EVERY_SECONDS = 60


class TPUInfeedOutfeedSessionWithEndOfStreamHandlingHook(tpu_estimator.TPUInfeedOutfeedSessionHook):
  """TensorFlow's infeed and outfeed hook, plus the end of the stream.

  Everything but the outfeed thread and `before_run` is inherited.
  """

  def __init__(
    self,
    ctx: Any,
    enqueue_ops: Any,
    dequeue_ops: Any,
    tpu_compile_op: Any,
    run_infeed_loop_on_coordinator: bool = True,
    rendezvous: Any = None,
    master: Optional[str] = None,
    session_config: Optional[tf.compat.v1.ConfigProto] = None,
    tpu_init_ops: Any = None,
    outfeed_every_n_steps: int = 1,
  ):
    super().__init__(
      ctx,
      enqueue_ops,
      dequeue_ops,
      tpu_compile_op,
      run_infeed_loop_on_coordinator=run_infeed_loop_on_coordinator,
      rendezvous=rendezvous,
      master=master,
      session_config=session_config,
      tpu_init_ops=tpu_init_ops,
      outfeed_every_n_steps=outfeed_every_n_steps,
    )
    # Written by the outfeed thread, read by the main thread.
    self.stopping_signal = False

  @staticmethod
  def get_stopping_signals_and_name(
    features: dict[str, tf.Tensor],
  ) -> tuple[Optional[dict[str, tf.Tensor]], str]:
    """Returns what a core sends to the host, None without the signal feature, and its name.

    One core that has seen the end stops all.
    """
    signals = None
    if _USER_PROVIDED_SIGNAL_NAME in features:
      signal = tf.cast(features[_USER_PROVIDED_SIGNAL_NAME], tf.int32)
      signals = {_STOPPING: tf.compat.v1.tpu.cross_replica_sum(signal) > 0}
    return signals, _USER_PROVIDED_SIGNAL_NAME

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> None:
    """Starts the next loop.

    Raises:
      tf.errors.OutOfRangeError: the data has ended; to a monitored session this is a normal end.
    """
    if self.stopping_signal:
      raise tf.errors.OutOfRangeError(None, None, "Stopped by stopping signal.")
    super().before_run(run_context)

  def _run_outfeed(self, queue_ctx: Any, session: tf.compat.v1.Session) -> None:
    tf.compat.v1.logging.info("Starting outfeed thread controller.")
    status_logger = PeriodicLogger(seconds=_LOG_EVERY_SECONDS)
    with self._rendezvous.catch_errors(source="outfeed", session=session):
      for count, steps in enumerate(queue_ctx.read_iteration_counts()):
        should_stop = False
        for i in range(steps):
          if i % self._outfeed_every_n_steps == 0:
            outputs = session.run(self._dequeue_ops)
            should_stop = should_stop or _is_stopping(outputs)
          status_logger.log("Outfeed finished for iteration (%d, %d)", count, i)
        # Not before the end of the loop: all its batches have been enqueued and must be dequeued.
        if should_stop:
          self.stopping_signal = True
      tf.compat.v1.logging.info("Outfeed thread finished, shutting down.")


def _is_stopping(outputs: Any) -> bool:
  """Tells whether what was dequeued carries a stopping signal that is set."""
  if not isinstance(outputs, dict) or _USER_PROVIDED_SIGNAL_NAME not in outputs:
    return False
  signals = outputs[_USER_PROVIDED_SIGNAL_NAME]
  if _STOPPING not in signals:
    raise RuntimeError(
      f"The outfeed {_USER_PROVIDED_SIGNAL_NAME} has the keys {sorted(signals)}, want {_STOPPING}"
    )
  return bool(signals[_STOPPING][0])
