"""Optimizers of Keras 3 for what depends on all gradients of a step, those of rows among them.

Keras 3 hands the gradient of a table over before it clips by the global norm, asks with a function
that knows dense gradients alone whether a scaled loss was too large, and writes what is not finite
into dense variables. So these come first:

    model.compile(optimizers.GlobalClipOptimizer(keras.optimizers.Adam(), 1.0), ...)
    model.compile(optimizers.LossScaleOptimizer(keras.optimizers.Adam()), ...)    # mixed_float16
    model.compile(optimizers.FiniteOptimizer(keras.optimizers.Adam()), ...)  # skips NaN, as asked

Each takes the optimizer that does the step, which rows follow; the first two look for NaN, too.
Keras 2 needs none of them: its own `global_clipnorm` and `LossScaleOptimizer` hold for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith.keras import table as tables
from monolith.keras._keras import IS_KERAS_3, keras
from monolith.native_training.tables import gradient_checks

if not IS_KERAS_3:
  raise ImportError(
    "monolith.keras.optimizers is for Keras 3: global_clipnorm and LossScaleOptimizer of Keras 2 "
    "hold for the rows of tables as they are"
  )

from monolith.keras import _keras_3  # noqa: E402

_LIMITS = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


@keras.utils.register_keras_serializable(package="monolith")
class FiniteOptimizer(keras.optimizers.Optimizer):
  """Leaves dense variables alone in a step whose gradients of them are not finite.

  It does so where `MONOLITH_BAD_GRADIENTS=skip` says that training goes on without what is not
  finite, and counts the step; otherwise the step is that of the inner optimizer.

  Args:
    inner_optimizer: what makes the step.
    name: the optimizer's name.

  Raises:
    ValueError: `inner_optimizer` is an optimizer of this kind.
  """

  def __init__(self, inner_optimizer: Any, name: str | None = None):
    super().__init__(learning_rate=0.0, name=name)
    if isinstance(inner_optimizer, FiniteOptimizer):
      raise ValueError(
        f"inner_optimizer is a {type(inner_optimizer).__name__}, want the one in it: "
        "GlobalClipOptimizer looks for what is not finite by itself"
      )
    self.inner_optimizer = inner_optimizer

  def build(self, variables: Sequence[Any]) -> None:
    """Creates the variables of the inner optimizer."""
    self.inner_optimizer.build(variables)
    super().build(variables)

  @property
  def variables(self) -> list[Any]:
    """Variables of the inner optimizer, which `save` keeps."""
    return self.inner_optimizer.variables

  def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
    """Makes a step of the inner optimizer."""
    variables = list(trainable_variables or self._trainable_variables)
    if not self.built:
      self.build(variables)
    pairs = list(zip(self._change(list(grads)), variables))
    with _keras_3.without_bad_gradients():
      if gradient_checks.policy() == "skip":
        self._apply_finite(pairs)
      else:
        self._apply(pairs)

  def _change(self, grads: list[Any]) -> list[Any]:
    """Returns the gradients that the inner optimizer gets."""
    return grads

  def _apply(self, pairs: list[tuple[Any, Any]]) -> None:
    self.inner_optimizer.apply(*(list(column) for column in zip(*pairs)))

  def _apply_finite(self, pairs: list[tuple[Any, Any]]) -> None:
    pairs = [pair for pair in pairs if pair[0] is not None]
    # Tables refuse rows one by one.
    of_rows = [pair for pair in pairs if tables.table_of(pair[1]) is not None]
    dense = [grad for grad, variable in pairs if tables.table_of(variable) is None]
    finite = tf.constant(True)
    for grad in dense:
      finite &= tf.reduce_all(tf.math.is_finite(_values(grad)))

    def step() -> tf.Tensor:
      self._apply(pairs)
      return tf.constant(True)

    def leave_dense_variables_alone() -> tf.Tensor:
      if of_rows:
        self._apply(of_rows)
      else:
        self.iterations.assign_add(1)
      return tf.constant(False)

    tf.cond(finite, step, leave_dense_variables_alone)

  def scale_loss(self, loss: Any) -> Any:
    """Returns the loss, scaled as the inner optimizer does it."""
    return self.inner_optimizer.scale_loss(loss)

  def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
    """Ends training as the inner optimizer does it."""
    self.inner_optimizer.finalize_variable_values(var_list)

  @property
  def learning_rate(self) -> Any:
    """The rate of the inner optimizer."""
    return self.inner_optimizer.learning_rate

  @learning_rate.setter
  def learning_rate(self, learning_rate: Any) -> None:
    self.inner_optimizer.learning_rate = learning_rate

  @property
  def iterations(self) -> Any:
    """The steps of the inner optimizer."""
    return self.inner_optimizer.iterations

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments as JSON."""
    return {
      "name": self.name,
      "inner_optimizer": keras.optimizers.serialize(self.inner_optimizer),
    }

  @classmethod
  def from_config(cls, config: dict[str, Any]) -> FiniteOptimizer:
    """Returns the optimizer that `get_config` describes."""
    inner = keras.optimizers.deserialize(config["inner_optimizer"])
    return cls(**{**config, "inner_optimizer": inner})


@keras.utils.register_keras_serializable(package="monolith")
class GlobalClipOptimizer(FiniteOptimizer):
  """Clips all gradients of a model by the norm of them together, rows included.

  Looks for what is not finite as `FiniteOptimizer` does, after clipping: a norm that is not finite
  spoils all gradients.

  Args:
    inner_optimizer: what makes the step with the clipped gradients, without limits of its own.
    global_clipnorm: the largest norm.
    name: the optimizer's name.

  Raises:
    ValueError: the norm is not positive, or `inner_optimizer` has a limit of its own or is one of
      these two kinds.
  """

  def __init__(self, inner_optimizer: Any, global_clipnorm: float, name: str | None = None):
    super().__init__(inner_optimizer, name=name)
    if not global_clipnorm > 0:
      raise ValueError(f"global_clipnorm is {global_clipnorm!r}, want a positive number")
    for limit in _LIMITS:
      if getattr(inner_optimizer, limit, None):
        raise ValueError(f"inner_optimizer has {limit}, want one without")
    self._global_norm = float(global_clipnorm)

  def _change(self, grads: list[Any]) -> list[Any]:
    limit = self._global_norm * (self.inner_optimizer.loss_scale_factor or 1.0)
    return list(tf.clip_by_global_norm(grads, limit)[0])

  def get_config(self) -> dict[str, Any]:
    """Returns the arguments as JSON."""
    return {**super().get_config(), "global_clipnorm": self._global_norm}


@keras.utils.register_keras_serializable(package="monolith")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
  """Scales the loss as Keras's own does, and looks at the gradients of tables, too.

  A step with an infinite gradient changes neither rows nor variables. With the policy
  `mixed_float16`, `compile` takes it instead of its own.
  """

  def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
    """Makes a step of the inner optimizer, if all gradients are finite."""
    variables = list(trainable_variables or self._trainable_variables)
    if not self.built:
      self.build(variables)
    # Keras leaves gradients that it hands over as they are.
    unscaled = [
      _divide(grad, self.dynamic_scale) if tables.table_of(variable) is not None else grad
      for grad, variable in zip(grads, variables)
    ]
    with _keras_3.without_bad_gradients():
      super().apply(unscaled, variables)

  def check_finite(self, grads: Sequence[Any]) -> Any:
    """Returns whether all gradients are finite."""
    return super().check_finite([_values(grad) for grad in grads])


def _values(grad: Any) -> Any:
  return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _divide(grad: Any, scale: Any) -> Any:
  if not isinstance(grad, tf.IndexedSlices):
    return grad
  return tf.IndexedSlices(grad.values / tf.cast(scale, grad.values.dtype), grad.indices)
