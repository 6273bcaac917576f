"""Everything that this package replaces in Keras 2; nothing in Keras 3.

Keras 3 has a variable that takes its own gradient, which `_keras_3` uses. Keras 2 has no place that
a variable, a layer or a gradient could take:

- An optimizer hands the variable to `tf.distribute`, which calls the optimizer's rule with it; all
  rules but that of SGD write the gradient into moments first, which are plain variables.
- A gradient that updated rows in the backward pass would do so even in a program that only computes
  it. It would come before clipping, unscaling and the check for infinite gradients, and would know
  no optimizer to follow.
- An optimizer or a class of model of our own would be another line in every program.

So what is there is wrapped: not by an import, but when a process makes its first table.

| what | why |
|---|---|
| `apply_gradients` of optimizers, new and legacy | leads gradients of tables to the tables' own |
| `Model.compile` | refuses an optimizer that rows cannot follow before data are read |
| `save_weights_to_hdf5_group` and its counterpart | the old `.h5` would lose the rows |
| `trace_model_call` | names ragged and sparse inputs of a SavedModel |

A table appears among a model's trainable variables as an empty variable `[0, dim]`, `table.rows`,
whose gradient is a `tf.IndexedSlices` of ids and gradients. Such pairs update their tables, and all
others go where they went. What Keras does before that point holds for tables, too: gradients of a
scaled loss are unscaled, a step with infinite gradients is skipped, gradients are clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.keras import layers, signatures
from monolith.keras import table as tables
from monolith.keras._keras import LEGACY_OPTIMIZER, keras
from monolith.native_training.tables import gradient_checks

_MARK = "_monolith_leads_tables"


def install() -> None:
  """Wraps what the table above lists, once per process."""
  # The class that all new optimizers and only they derive from; it is not public.
  new_base = keras.optimizers.Optimizer.__mro__[1]
  _wrap(new_base, _build, _clip)
  _wrap(LEGACY_OPTIMIZER, _build_legacy, _clip_legacy)
  _wrap_compile(keras.Model)
  _wrap_saving()


def _wrap(cls: Any, build: Callable[[Any, list], None], clip: Callable[[Any, list], list]) -> None:
  apply_gradients = cls.apply_gradients
  if getattr(apply_gradients, _MARK, False):
    return

  @functools.wraps(apply_gradients)
  def apply_all(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    if not any(tables.table_of(variable) is not None for _, variable in pairs):
      return apply_gradients(self, pairs, *args, **kwargs)
    build(self, [variable for _, variable in pairs])
    clipped = clip(self, [pair for pair in pairs if pair[0] is not None])
    updated = update(clipped, self.iterations, self)
    # Clipping by the global norm depends on all gradients; clipping again changes nothing.
    together = getattr(self, "global_clipnorm", None) is not None
    rest = [pair for pair in (clipped if together else pairs) if tables.table_of(pair[1]) is None]
    if not any(gradient is not None for gradient, _ in rest):
      return self.iterations.assign_add(1)
    # A step that tables refuse shall not have spoiled the other variables.
    with tf.control_dependencies([] if updated is None else [updated]):
      if gradient_checks.policy() == "skip":
        return _apply_finite(self, rest, lambda: apply_gradients(self, rest, *args, **kwargs))
      return apply_gradients(self, rest, *args, **kwargs)

  setattr(apply_all, _MARK, True)
  cls.apply_gradients = apply_all


def _wrap_compile(cls: Any) -> None:
  compile_model = cls.compile
  if getattr(compile_model, _MARK, False):
    return

  @functools.wraps(compile_model)
  def compile_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
    result = compile_model(self, *args, **kwargs)
    # A step of one's own may give the gradients of tables to another optimizer.
    if type(self).train_step is cls.train_step:
      _check_leader(self)
    return result

  setattr(compile_and_check, _MARK, True)
  cls.compile = compile_and_check


def _wrap_saving() -> None:
  hdf5_format = _tensorflow.import_keras_saving("hdf5_format")
  for function in ("save_weights_to_hdf5_group", "load_weights_from_hdf5_group"):
    setattr(hdf5_format, function, _refuse_tables(getattr(hdf5_format, function)))
  saving_utils: Any = _tensorflow.import_keras_saving("saving_utils")
  saving_utils.trace_model_call = signatures.name_inputs(saving_utils.trace_model_call)


def _refuse_tables(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function of Keras's old HDF5 format, which would lose rows, that raises instead."""

  @functools.wraps(function)
  def checked(group: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in model._flatten_layers(include_self=False):
      if isinstance(layer, layers.TableLayer):
        raise NotImplementedError(
          f"The format .h5 has no place for the rows of layer {layer.name}: "
          "save to a path without suffix, to .keras, or weights to .weights.h5"
        )
    return function(group, model, *args, **kwargs)

  return checked


def _check_leader(model: Any) -> None:
  """Raises a `ValueError` if the model's layers have tables that cannot follow its optimizer."""
  optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
  for layer in model._flatten_layers():
    if layer.trainable and hasattr(layer, "own_tables"):
      for table in layer.own_tables().values():
        table.check_leader(optimizer)


def _apply_finite(optimizer: Any, pairs: list, apply: Callable[[], Any]) -> Any:
  """Leaves variables alone in a step where a gradient is not finite, as tables do with rows."""
  values = [
    gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    for gradient, _ in pairs
    if gradient is not None
  ]
  finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
  if tf.executing_eagerly():
    return apply() if finite else optimizer.iterations.assign_add(1)

  def step() -> tf.Tensor:
    apply()
    return tf.constant(True)

  def count() -> tf.Tensor:
    optimizer.iterations.assign_add(1)
    return tf.constant(False)

  if isinstance(optimizer, LEGACY_OPTIMIZER):
    # Branches cannot create variables.
    with tf.init_scope():
      optimizer._create_all_weights([variable for _, variable in pairs])
  return tf.cond(finite, step, count)


def update(
  pairs: Sequence[tuple[Any, tf.Variable]], step: tf.Tensor | tf.Variable, optimizer: Any
) -> tf.Operation | None:
  """Runs the optimizers of all tables among the pairs.

  Args:
    pairs: gradients and variables; those of other variables are left alone.
    step: int64, the number of the step.
    optimizer: an optimizer of Keras, which tables without one of their own follow.

  Returns:
    What does it, in a graph; `None` eagerly, or without tables.

  Raises:
    TypeError: the gradient of a table has been made dense, which loses its ids.
    ValueError: rows cannot follow the optimizer.
  """
  found = [
    (gradient, table)
    for gradient, table in ((gradient, tables.table_of(variable)) for gradient, variable in pairs)
    if table is not None
  ]
  if not found:
    return None
  for gradient, table in found:
    if not isinstance(gradient, tf.IndexedSlices):
      raise TypeError(
        f"The gradient of table {table.name!r} is a {type(gradient).__name__}, want the "
        "tf.IndexedSlices that GradientTape returns: sum gradients of several batches by "
        "concatenating their indices and values"
      )
    table.follow(optimizer)
  return tables.optimize(
    [table for _, table in found],
    [gradient.indices for gradient, _ in found],
    [tf.cast(gradient.values, tf.float32) for gradient, _ in found],
    step,
  )


def _build(optimizer: Any, variables: list[tf.Variable]) -> None:
  # With the empty variables, as a loaded model builds it: the optimizer's variables are counted.
  with tf.name_scope(optimizer.name or "optimizer"), tf.init_scope():
    optimizer.build(variables)


def _build_legacy(optimizer: Any, variables: list[tf.Variable]) -> None:
  del variables
  with tf.init_scope():
    optimizer.iterations  # noqa: B018  creates it


def _clip(optimizer: Any, pairs: list[tuple[Any, tf.Variable]]) -> list[tuple[Any, tf.Variable]]:
  gradients = optimizer._clip_gradients([gradient for gradient, _ in pairs])
  return list(zip(gradients, (variable for _, variable in pairs)))


def _clip_legacy(
  optimizer: Any, pairs: list[tuple[Any, tf.Variable]]
) -> list[tuple[Any, tf.Variable]]:
  return list(optimizer._transform_gradients(pairs))
