"""Files that workers take from a common queue while they train, so that fast ones read more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from monolith.native_training import native_task_context, utils
from monolith.native_training.distribute import str_queue
from monolith.native_training.graph import session_hooks


def create_dynamic_sharding_dataset(
  glob_patterns: Sequence[str], name: str = "dynamic_sharding_dataset"
) -> tf.data.Dataset:
  """Returns a dataset of file names, each of which one worker gets.

  The queues are variables, on parameter server 0 if there is one: a restored checkpoint goes on
  with the files that no worker had taken when it was written. A dataset that is iterated must
  find the session of its graph with `session_hooks.get_current_session`.

  Args:
    glob_patterns: patterns of file names, in the order in which they are read. A pattern is
      expanded when the files before it are used up.
    name: name scope of the queues, the same on all workers.
  """
  glob_patterns = [glob_patterns] if isinstance(glob_patterns, str) else list(glob_patterns)
  device = utils.ps_device(0) if native_task_context.get().num_ps > 0 else "/device:CPU:0"
  with tf.name_scope(name), tf.device(device):
    patterns = str_queue.StrQueue(glob_patterns, name="patterns_queue")

    def expand_next_pattern() -> tuple[tf.Tensor, tf.Tensor]:
      pattern, out_of_range = patterns.dequeue()
      files = tf.cond(
        out_of_range,
        lambda: tf.zeros([0], tf.string),
        lambda: tf.io.matching_files(pattern),
      )
      return files, out_of_range

    files = str_queue.StrQueue(
      critical_section=patterns.critical_section,
      auto_enqueue_fn=expand_next_pattern,
      name="filenames_queue",
    )
    next_file = files.dequeue()

  def take_file(_: np.ndarray) -> tuple[bytes, bool]:
    session = session_hooks.get_current_session()
    if session is None:
      raise RuntimeError(
        "a dataset with dynamic sharding needs the session that trains: add "
        "session_hooks.SetCurrentSessionHook to its hooks"
      )
    file_name, out_of_range = session.run(next_file)
    return file_name, bool(out_of_range)

  def take_file_op(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    file_name, out_of_range = tf.numpy_function(take_file, [index], [tf.string, tf.bool])
    return tf.ensure_shape(file_name, []), tf.ensure_shape(out_of_range, [])

  return (
    tf.data.Dataset.from_tensors(0)
    .repeat()
    .map(take_file_op)
    .take_while(lambda file_name, out_of_range: tf.logical_not(out_of_range))
    .map(lambda file_name, out_of_range: file_name)
  )
