"""The variable that stands for a table's rows in Keras 3, and what happens to its gradient.

Keras 3 has a place for a variable that the optimizer's rule is not for: `overwrite_with_gradient`.
Every optimizer assigns such a variable its gradient as it is and leaves it out of everything else.
`Rows.assign` gets it, and the table's own optimizer runs. So neither Keras nor a user's program is
changed: computing a gradient changes nothing, and one `apply` is one step.

Which optimizer it is, the rows follow it, says the name scope that Keras opens for it. What it does
to gradients after this point is done here: its fixed loss scale, `clipnorm` and `clipvalue`. What
depends on all gradients is for the optimizers of `optimizers`, which come before this point: where
one of them is needed and missing, there is an error. What depends on several steps is refused.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from monolith import _tensorflow
from monolith.keras import saved_rows
from monolith.keras._keras import keras
from monolith.native_training.tables import gradient_checks

_REFUSED = {
  "global_clipnorm": (
    "give compile monolith.keras.optimizers.GlobalClipOptimizer(an optimizer without it, {value})"
  ),
  "gradient_accumulation_steps": "use larger batches, or concatenate indices and values yourself",
  "use_ema": "leave averages out",
}
_no_bad_gradients = contextvars.ContextVar("_no_bad_gradients", default=False)


@contextlib.contextmanager
def without_bad_gradients() -> Iterator[None]:
  """Tells `Rows` that somebody keeps what is not finite from dense variables."""
  token = _no_bad_gradients.set(True)
  try:
    yield
  finally:
    _no_bad_gradients.reset(token)


class Table(Protocol):
  """A table, as far as it is needed here."""

  name: str | None
  dim: int

  def save(self, path: Any) -> None: ...
  def load(self, path: Any) -> None: ...
  @staticmethod
  def apply(
    pairs: Sequence[tuple[Any, tf.IndexedSlices]], optimizer: Any, step: tf.Tensor, rate: tf.Tensor
  ) -> tf.Operation | None: ...


class Step:
  """One step of an optimizer, which hands over gradients of tables one by one.

  Tables are updated together when the last gradient has come. Which one that is tells Keras before:
  it looks for a variable that takes its own gradient, from the first on, and stops at the first
  one; then it goes through all of them from the last on. Where it does otherwise, gradients come
  that were not expected, and their tables are updated at once.

  Args:
    scope: the scope that the optimizer has opened.
  """

  def __init__(self, scope: Any):
    self.optimizer = scope.caller
    self._last: Rows | None = None
    self._waiting: list[tuple[Any, tf.IndexedSlices]] = []
    weakref.finalize(scope, _check_all_came, self._waiting)

  def expect(self, rows: Rows) -> None:
    """Notes that the optimizer is about to hand over gradients, of these rows as well."""
    if self._last is None:
      self._last = rows

  def take(self, rows: Rows, gradient: tf.IndexedSlices | None) -> None:
    """Takes the gradient of a table, or notes that it has none."""
    if gradient is not None:
      self._waiting.append((rows.table, gradient))
    if self._last is None or self._last is rows:
      self._last = None
      self._update()

  def _update(self) -> None:
    pairs = self._waiting[:]
    self._waiting.clear()
    if not pairs:
      return
    optimizer = self.optimizer
    step, rate = tf.identity(optimizer.iterations), tf.identity(optimizer.learning_rate)
    updated = pairs[0][0].apply(pairs, optimizer, step, rate)
    if updated is None:
      return
    # A step that tables refuse shall not have spoiled the other variables: they are updated with a
    # rate that is read after this.
    own = optimizer._learning_rate
    read = (own if isinstance(own, keras.Variable) else optimizer._iterations).value
    with tf.control_dependencies([updated]):
      read.assign_add(tf.zeros([], read.dtype), read_value=False)


def _check_all_came(waiting: list[tuple[Any, tf.IndexedSlices]]) -> None:
  if waiting:
    names = [table.name for table, _ in waiting]
    logging.error("A step has ended before the rows of tables %s were updated", names)


# By the scopes of optimizers.
_steps: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()


class Layer(keras.layers.Layer):
  """A layer that takes lists and arrays of ids as well, of which Keras 3 would make no tensors."""

  def __init__(self, **kwargs: Any):
    super().__init__(**kwargs)
    # XLA has no hash tables: `jit_compile="auto"` leaves it out.
    self.supports_jit = False

  def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `call` does."""
    return super().__call__(self.as_tensors(inputs), *args, **kwargs)

  def as_tensors(self, inputs: Any) -> Any:
    """Returns ids as tensors of int64, and the inputs of models as they are.

    Raises:
      TypeError, ValueError: they are no ids.
    """
    raise NotImplementedError


def track(layer: Any, tables: Mapping[str, Any]) -> None:
  """Lets `tf.train.Checkpoint` find tables of a layer, as it does not look into dictionaries."""
  holder: Any = tf.__internal__.tracking.AutoTrackable()
  for name, table in tables.items():
    holder._track_trackable(table, name)
  layer._track_trackable(holder, "tables")


class Rows(keras.Variable):
  """An empty variable `[0, dim]` whose values are the rows of a table.

  Args:
    table: the table, which owns the variable.
  """

  def __init__(self, table: Table):
    name = f"{table.name or 'table'}_rows".replace("/", "_")
    super().__init__(tf.zeros([0, table.dim]), trainable=True, autocast=False, name=name)
    self._monolith_table = weakref.ref(table)

  @property
  def overwrite_with_gradient(self) -> bool:
    """Returns true: the optimizer hands over the gradient.

    Raises:
      ValueError: an optimizer asks that would do something to it which does not reach rows.
    """
    step = _find_step()
    optimizer = None if step is None else step.optimizer
    for name, remedy in _REFUSED.items():
      value = getattr(optimizer, name, None)
      if value:
        raise ValueError(
          f"{type(optimizer).__name__} has {name}={value}, which cannot reach the rows of table "
          f"{self.table.name!r}: {remedy.format(value=value)}"
        )
    if step is not None:
      step.expect(self)
    return True

  @property
  def value(self) -> tf.Variable:
    """The empty variable, as TensorFlow has it.

    Raises:
      ValueError: Keras's optimizer asks that scales losses for float16.
    """
    if isinstance(_find_optimizer(), keras.optimizers.LossScaleOptimizer):
      raise ValueError(
        "Keras's LossScaleOptimizer cannot check the gradients of a table's rows: give compile "
        "monolith.keras.optimizers.LossScaleOptimizer(your optimizer), or use the policy "
        "'mixed_bfloat16' instead of 'mixed_float16'"
      )
    return super().value

  @property
  def table(self) -> Any:
    """The table."""
    table = self._monolith_table()
    assert table is not None  # The variable belongs to it.
    return table

  def numpy(self) -> saved_rows.SavedRows:
    """Returns an empty array that knows a copy of the rows, for `get_weights`."""
    return saved_rows.SavedRows.of(self.table, self.table.dim)

  def __array__(self, dtype: Any = None) -> Any:
    """Refuses what the old `.h5` format would write, as it has no place for rows."""
    del dtype
    raise NotImplementedError(
      f"The rows of table {self.table.name!r} are no array, and the format .h5 has no place for "
      "them: save to .keras, or weights to .weights.h5; get_weights takes them along"
    )

  def assign(self, value: Any) -> Any:
    """Takes the gradient from an optimizer, or rows from what `numpy` returned.

    Raises:
      TypeError: the gradient has been made dense, which loses its ids.
      ValueError: gradients that are not finite are to be skipped, which the optimizer does not.
      NotImplementedError: an array knows no rows.
    """
    step = _find_step()
    if step is None:
      saved_rows.restore(self.table, self.table.name, value)
    else:
      step.take(self, None if value is None else self._prepare(value, step.optimizer))
    return value

  def _prepare(self, gradient: Any, optimizer: Any) -> tf.IndexedSlices:
    """Returns a gradient after what the optimizer does to each."""
    if not isinstance(gradient, tf.IndexedSlices):
      raise TypeError(
        f"The gradient of table {self.table.name!r} is a {type(gradient).__name__}, want the "
        "tf.IndexedSlices that GradientTape returns: sum gradients of several batches by "
        "concatenating their indices and values"
      )
    if gradient_checks.policy() == "skip" and not _no_bad_gradients.get():
      raise ValueError(
        f"MONOLITH_BAD_GRADIENTS=skip, but {type(optimizer).__name__} would write NaN to dense "
        "variables: give compile monolith.keras.optimizers.FiniteOptimizer(your optimizer)"
      )
    values = tf.cast(gradient.values, tf.float32)
    if optimizer.loss_scale_factor is not None:
      values /= optimizer.loss_scale_factor
    if optimizer.clipnorm is not None:
      values = tf.clip_by_norm(values, optimizer.clipnorm)
    elif optimizer.clipvalue is not None:
      values = tf.clip_by_value(values, -optimizer.clipvalue, optimizer.clipvalue)
    return tf.IndexedSlices(values, gradient.indices)


def _find_optimizer() -> Any:
  """Returns the optimizer in whose `apply` or `build` this is called; `None` elsewhere."""
  scope = _find_scope()
  return None if scope is None else scope.caller


def _find_step() -> Step | None:
  """Returns the step of that optimizer."""
  scope = _find_scope()
  if scope is None:
    return None
  if scope not in _steps:
    _steps[scope] = Step(scope)
  return _steps[scope]


def _find_scope() -> Any:
  """Returns the scope that this optimizer has opened; another one in every step."""
  state = _tensorflow.import_keras_state()
  for scope in reversed(state.get_global_attribute("name_scope_stack") or []):
    if isinstance(scope.caller, keras.optimizers.Optimizer):
      return scope
  return None
