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
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

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
# Step and learning rate of the optimizers that are making a step, by their scopes.
_read: weakref.WeakKeyDictionary[Any, tuple[tf.Tensor, tf.Tensor]] = weakref.WeakKeyDictionary()
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
  def apply(
    self, gradient: tf.IndexedSlices, optimizer: Any, step: tf.Tensor, rate: tf.Tensor
  ) -> tf.Operation | None: ...


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
    optimizer = _find_optimizer()
    for name, remedy in _REFUSED.items():
      value = getattr(optimizer, name, None)
      if value:
        raise ValueError(
          f"{type(optimizer).__name__} has {name}={value}, which cannot reach the rows of table "
          f"{self.table.name!r}: {remedy.format(value=value)}"
        )
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
    scope = _find_scope()
    if scope is None:
      saved_rows.restore(self.table, self.table.name, value)
    elif value is not None:  # Without a gradient there is nothing to do.
      self._apply(value, scope)
    return value

  def _apply(self, gradient: Any, scope: Any) -> None:
    optimizer = scope.caller
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
    if scope not in _read:
      # Once for all tables: another one would wait for the updates before it, as it reads again
      # what the last lines here write.
      _read[scope] = tf.identity(optimizer.iterations), tf.identity(optimizer.learning_rate)
    slices = tf.IndexedSlices(values, gradient.indices)
    updated = self.table.apply(slices, optimizer, *_read[scope])
    if updated is None:
      return
    # A step that tables refuse shall not have spoiled the other variables: they are updated with a
    # rate that is read after this.
    rate = optimizer._learning_rate
    read = rate if isinstance(rate, keras.Variable) else optimizer._iterations
    with tf.control_dependencies([updated]):
      read.assign_add(tf.zeros_like(read.value))


def _find_optimizer() -> Any:
  """Returns the optimizer in whose `apply` or `build` this is called; `None` elsewhere."""
  scope = _find_scope()
  return None if scope is None else scope.caller


def _find_scope() -> Any:
  """Returns the scope that this optimizer has opened; another one in every step."""
  state = _tensorflow.import_keras_state()
  for scope in reversed(state.get_global_attribute("name_scope_stack") or []):
    if isinstance(scope.caller, keras.optimizers.Optimizer):
      return scope
  return None
