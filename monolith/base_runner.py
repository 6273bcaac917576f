"""`BaseRunner`: what the TPU and GPU runners share."""

from typing import Any

import tensorflow as tf


class BaseRunner:
  """Base of runners."""

  def __init__(self, *args: Any, **kwargs: Any):
    del args, kwargs

  def run(self) -> None:
    raise NotImplementedError

  def write_summary(
    self, logs: dict[str, Any], summary_writer: tf.compat.v1.summary.FileWriter, current_step: int
  ) -> None:
    """Writes one scalar per item.

    Args:
      logs: numbers by tag.
      summary_writer: where to.
      current_step: at which step.
    """
    # A graph of its own: the caller's may be finalized, and the writer asks for the default graph.
    with tf.Graph().as_default():
      summary = tf.compat.v1.Summary(
        value=[
          tf.compat.v1.Summary.Value(tag=tag, simple_value=float(value))
          for tag, value in logs.items()
        ]
      )
      summary_writer.add_summary(summary, current_step)
