"""Where a model's dense variables live, and who initialises them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resources

from monolith.native_training import variables
from monolith.native_training.driver.config import CpuTrainingConfig
from monolith.native_training.model_export import export_context

_MAX_SHARD_BYTES = 1 << 17


@contextlib.contextmanager
def variable_scopes(config: CpuTrainingConfig) -> Iterator[None]:
  """Lets variables be cached on the worker, and be spread over servers, as the options say."""
  with contextlib.ExitStack() as stack:
    if config.enable_variable_prefetch and not config.enable_sync_training:
      stack.enter_context(tf.variable_creator_scope(variables.cached_variable_creator))
    # With one server there is nothing to spread, and `max_shards=0` would mean any number.
    if config.enable_variable_partition and config.num_ps > 1 and not export_context.is_exporting():
      partitioner = tf.compat.v1.variable_axis_size_partitioner(
        max_shard_bytes=_MAX_SHARD_BYTES, max_shards=config.num_ps
      )
      stack.enter_context(
        tf.compat.v1.variable_scope("", partitioner=partitioner, custom_getter=_get_constant_whole)
      )
    yield


def _get_constant_whole(getter: Callable[..., Any], name: str, **kwargs: Any) -> Any:
  """Makes a variable that begins with a given value in one piece.

  TensorFlow learns the shape of such a variable from its value, but wants to know it beforehand
  where variables are partitioned, even of `get_variable("bias", initializer=0.0)`.
  """
  initializer = kwargs.get("initializer")
  if kwargs.get("shape") is None and initializer is not None and not callable(initializer):
    kwargs["partitioner"] = None
  return getter(name, **kwargs)


def create_own_variables_scaffold() -> tf.compat.v1.train.Scaffold:
  """Returns a scaffold for a worker whose dense variables are its own, which it initialises."""
  keys = tf.compat.v1.GraphKeys

  def default_init_op() -> tf.Operation:
    return tf.group(
      tf.compat.v1.global_variables_initializer(),
      resources.initialize_resources(resources.shared_resources()),
    )

  get = tf.compat.v1.train.Scaffold.get_or_default
  init_op = get("init_op", keys.INIT_OP, default_init_op)
  local_init_op = get(
    "local_init_op", keys.LOCAL_INIT_OP, tf.compat.v1.train.Scaffold.default_local_init_op
  )
  return tf.compat.v1.train.Scaffold(
    local_init_op=tf.group(init_op, local_init_op), ready_for_local_init_op=tf.no_op()
  )
