"""Cached variables: read a parameter server's variable without waiting for the network.

For every variable that lives on another device two local copies are made. One run of the session
reads the copy `async_cached_var`, while the remote value travels into `async_fetched_var`; between
two runs the fetched value becomes the cached one:

  remote var --fetch (during a run)--> async_fetched_var --assign (between runs)--> async_cached_var

A model so computes with values that are one run old. Gradients and assignments go to the remote
variable.
"""

from dataclasses import dataclass, field
from typing import Any, Callable

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from monolith.native_training import graph_meta

# Collection of the original variables that have a cache.
_CACHED_VARIABLES = "monolith_cached_variables"


@dataclass
class CachedVariableAssociates:
  """The local copies of one variable."""

  async_fetched_var: tf.Variable
  async_cached_var: tf.Variable


@dataclass
class CachedVariableMeta:
  """The local copies of a graph, by `id()` of the original, which the graph's collection keeps
  alive."""

  var_id_to_assoc: dict[int, CachedVariableAssociates] = field(default_factory=dict)


def _get_meta() -> CachedVariableMeta:
  return graph_meta.get_meta("cached_variables_meta", CachedVariableMeta)


@tf.custom_gradient
def cached_value(var: tf.Variable, async_cached_var: tf.Variable):
  """Returns the value of `async_cached_var`, whose gradient belongs to `var`."""

  def grad(dy):
    return dy, None

  return tf.convert_to_tensor(async_cached_var), grad


def _get_valid_op_name(name: str) -> str:
  return name.replace(":", "_").replace("/", "_")


def cached_variable_creator(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
  """Creates variables whose reads use a local copy, for `tf.variable_creator_scope`.

  A variable on the local device is returned without a cache. `session.run(var)` still reads the
  variable itself; every use in a computation reads the copy.

  Args:
    next_creator: makes the variable.
    **kwargs: its arguments.

  Raises:
    ValueError: the variable is no resource variable, or has a cache already.
  """
  var = next_creator(**kwargs)
  if not isinstance(var, resource_variable_ops.ResourceVariable):
    raise ValueError(
      "Only ResourceVariable is supported. Do you disable V2 behavior or use strategy?"
    )
  if var._cached_value is not None:
    raise ValueError("The variable has already been cached. Consider about removing cache_device.")
  with tf.device(None):
    # Where would a copy go? Variables colocated with their primary, such as optimizer slots, stay
    # without a cache. A no-op costs less than two unused variables.
    if tf.no_op(name="cached_variable_device").device == var.device:
      return var
    associates = CachedVariableAssociates(
      async_fetched_var=_create_local_copy(var), async_cached_var=_create_local_copy(var)
    )
  tf.compat.v1.add_to_collection(_CACHED_VARIABLES, var)
  var._cached_value = cached_value(var, associates.async_cached_var)
  _get_meta().var_id_to_assoc[id(var)] = associates
  return var


def _create_local_copy(var: tf.Variable) -> tf.Variable:
  return resource_variable_ops.ResourceVariable(
    initial_value=var.initial_value,
    trainable=False,
    collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    shape=var.shape,
    dtype=var.dtype,
  )


def fetch_all_cached_variables() -> tf.Operation:
  """Returns an op that copies every cached variable of the graph into its `async_fetched_var`."""
  meta = _get_meta()
  ops = []
  for var in tf.compat.v1.get_collection(_CACHED_VARIABLES):
    fetched_var = meta.var_id_to_assoc[id(var)].async_fetched_var
    ops.append(
      fetched_var.assign(
        var._read_variable_op(),
        name=f"fetch_from_{_get_valid_op_name(var.device)}",
        read_value=False,
      )
    )
  return tf.group(ops)


def assign_all_cached_variables() -> tf.Operation:
  """Returns an op that makes the fetched values the cached ones."""
  meta = _get_meta()
  ops = []
  for var in tf.compat.v1.get_collection(_CACHED_VARIABLES):
    associates = meta.var_id_to_assoc[id(var)]
    ops.append(
      associates.async_cached_var.assign(
        associates.async_fetched_var, name="assign_cached_var", read_value=False
      )
    )
  return tf.group(ops, name="assign_all_cached_variables")


class FetchAllCachedVariablesHook(tf.compat.v1.train.SessionRunHook):
  """Fetches the cached variables during every run and uses the values from the next run on.

  Build it after the variables: it covers those that exist then. The first run of a session fetches
  before it starts, since the copies are initialised with a value of their own.
  """

  def __init__(self):
    self._fetch_op = fetch_all_cached_variables()
    self._assign_op = assign_all_cached_variables()
    self._first_run = True

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    self._first_run = True

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext):
    if self._first_run:
      run_context.session.run(self._fetch_op)
      run_context.session.run(self._assign_op)
      self._first_run = False
    return tf.compat.v1.train.SessionRunArgs(self._fetch_op)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    run_context.session.run(self._assign_op)
