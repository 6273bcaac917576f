"""For tests: a simple table configuration, parameter servers in this process, a profiler."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from monolith.native_training import entry, utils
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2


def generate_test_hash_table_config(
  dim: int = 2, use_float16: bool = False, learning_rate: entry.LearningRate = 1.0
) -> entry.HashTableConfigInstance:
  """Returns a cuckoo table of one segment: SGD, zeros, full precision.

  Args:
    dim: length of a row.
    use_float16: round rows to float16 at random.
    learning_rate: a number, or a callable that returns a scalar tensor.
  """
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  table_config.cuckoo.SetInParent()
  segment = table_config.entry_config.segments.add()
  segment.dim_size = dim
  segment.opt_config.sgd.SetInParent()
  segment.opt_config.stochastic_rounding_float16 = use_float16
  segment.init_config.zeros.SetInParent()
  segment.comp_config.fp32.SetInParent()
  return entry.HashTableConfigInstance(table_config, [learning_rate])


def create_test_ps_cluster(
  num_ps: int,
) -> tuple[list[tf.distribute.Server], tf.compat.v1.ConfigProto]:
  """Starts parameter servers in this process.

  Returns:
    The servers, and what a session on the first one needs to reach all of them.
  """
  servers = [tf.distribute.Server.create_local_server() for _ in range(num_ps)]
  cluster_def = tf.train.ClusterDef()
  job = cluster_def.job.add()
  job.name = utils.PS_JOB_NAME
  for i, server in enumerate(servers):
    job.tasks[i] = server.target[len("grpc://") :]
  return servers, tf.compat.v1.ConfigProto(cluster_def=cluster_def)


def profile_it(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Decorates a function: profiles each call into `tests_profile`, for TensorBoard."""

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    options = tf.profiler.experimental.ProfilerOptions(
      host_tracer_level=3, python_tracer_level=1, device_tracer_level=1
    )
    log_dir = os.path.join(os.environ.get("TEST_TMPDIR", tempfile.gettempdir()), "tests_profile")
    tf.profiler.experimental.start(log_dir, options=options)
    try:
      return fn(*args, **kwargs)
    finally:
      # Waits until everything is written.
      tf.profiler.experimental.stop()

  return wrapped
