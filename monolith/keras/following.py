"""Maps an optimizer of Keras to the optimizer that does the same to the rows of a table.

Nothing here changes Keras: code that sees both an optimizer and a table calls these functions.

  followed = following.follow(keras.optimizers.Adam(1e-3))
  followed.optimizer                                     # entry.AdamOptimizer(...)
  following.learning_rate(optimizer, step)               # what it would step with now

Keras's optimizers, new and legacy, are known by the class that Keras defines; a subclass that has
update rules of its own is another optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from monolith.keras._keras import IS_KERAS_3, LEGACY_OPTIMIZER
from monolith.native_training import entry

# How new optimizers and legacy ones call the method that makes a step.
_RULES = ("update_step", "_resource_apply_sparse")
_REMEDY = (
  "give the table one of its own, such as Embedding(16, optimizer='adagrad') or an optimizer of "
  "monolith.entry"
)


@dataclasses.dataclass(frozen=True)
class Followed:
  """The optimizer of a table that follows one of Keras.

  Attributes:
    optimizer: what runs on rows; its learning rate is that of the moment, or `None`.
    left_out: settings of Keras's optimizer that do not reach rows, such as `weight_decay=0.004`.
  """

  optimizer: entry.Optimizer
  left_out: tuple[str, ...] = ()


def default_optimizer() -> entry.Optimizer:
  """Returns what runs on rows as long as there is nothing to follow: Keras's Adam."""
  return entry.AdamOptimizer(0.001, beta2=0.999, epsilon=1e-7, decay_by_step=True)


def follow(optimizer: Any) -> Followed:
  """Returns the table's counterpart of an optimizer of Keras.

  Args:
    optimizer: new or legacy, not wrapped.

  Raises:
    ValueError: there is no such thing; the message is one sentence with what to do instead.
  """
  kind = _kind(optimizer)
  if kind not in _KINDS:
    raise ValueError(
      f"Rows of a table cannot follow the optimizer {type(optimizer).__name__}: {_REMEDY}"
    )
  left_out = []
  if _number(optimizer, "weight_decay"):
    left_out.append(f"weight_decay={_number(optimizer, 'weight_decay')}")
  if getattr(optimizer, "use_ema", False):
    left_out.append("use_ema=True")
  return Followed(_KINDS[kind](optimizer), tuple(left_out))


def learning_rate(optimizer: Any, step: tf.Tensor | tf.Variable) -> Any:
  """Returns the rate that an optimizer would step with now: a number, a variable or a tensor.

  Args:
    optimizer: new or legacy.
    step: what schedules get, the optimizer's `iterations`.
  """
  if isinstance(optimizer, LEGACY_OPTIMIZER):
    return optimizer._decayed_lr(tf.float32)
  if IS_KERAS_3:
    return optimizer.learning_rate
  rate = rate_or_schedule(optimizer)
  return rate(step) if callable(rate) and not isinstance(rate, tf.Variable) else rate


def rate_or_schedule(optimizer: Any) -> Any:
  """Returns what an optimizer was given as its rate: a variable, a number, or a schedule.

  Raises:
    ValueError: it has a `decay` of the legacy kind, which is neither.
  """
  if isinstance(optimizer, LEGACY_OPTIMIZER):
    if _number(optimizer, "decay"):
      raise ValueError(
        "decay of a legacy optimizer has no counterpart here: use a schedule of "
        "tf.keras.optimizers.schedules"
      )
    return optimizer._get_hyper("learning_rate")
  return optimizer._learning_rate


def _kind(optimizer: Any) -> str:
  """Returns the name of Keras's class whose rule the optimizer runs, or an empty string."""
  for cls in type(optimizer).__mro__:
    if any(rule in vars(cls) for rule in _RULES):
      package = cls.__module__.partition(".")[0]
      is_keras = package in ("keras", "tf_keras") or ".keras." in cls.__module__
      return cls.__name__ if is_keras else ""
  return ""


def _number(optimizer: Any, name: str) -> Any:
  """Returns a setting as a number, `None` where the optimizer does not have it."""
  if isinstance(optimizer, LEGACY_OPTIMIZER) and name in optimizer._hyper:
    with tf.init_scope():
      value = optimizer._serialize_hyperparameter(name)
    return float(value)
  return getattr(optimizer, name, None)


def _first(optimizer: Any, *names: str) -> Any:
  values = (_number(optimizer, name) for name in names)
  return next(value for value in values if value is not None)


def _refuse(optimizer: Any, name: str, allowed: Any) -> None:
  value = _number(optimizer, name)
  if value is not None and value != allowed:
    raise ValueError(
      f"Rows of a table cannot follow {type(optimizer).__name__} with {name}={value}: {_REMEDY}"
    )


def _sgd(optimizer: Any) -> entry.Optimizer:
  momentum = _number(optimizer, "momentum")
  if not momentum:
    return entry.SgdOptimizer()
  return entry.MomentumOptimizer(momentum=momentum, use_nesterov=bool(optimizer.nesterov))


def _adagrad(optimizer: Any) -> entry.Optimizer:
  # Epsilon only keeps Keras from dividing by 0, which a table does not do either.
  initial = _first(optimizer, "initial_accumulator_value", "_initial_accumulator_value")
  return entry.AdagradOptimizer(initial_accumulator_value=initial)


def _adadelta(optimizer: Any) -> entry.Optimizer:
  return entry.AdadeltaOptimizer(
    averaging_ratio=_number(optimizer, "rho"), epsilon=_number(optimizer, "epsilon")
  )


def _adam(optimizer: Any) -> entry.Optimizer:
  numbers = {
    "beta1": _number(optimizer, "beta_1"),
    "beta2": _number(optimizer, "beta_2"),
    "epsilon": _number(optimizer, "epsilon"),
  }
  if getattr(optimizer, "amsgrad", False):
    return entry.AmsgradOptimizer(**numbers)
  return entry.AdamOptimizer(**numbers, decay_by_step=True)


def _nadam(optimizer: Any) -> entry.Optimizer:
  return entry.AdamOptimizer(
    beta1=_number(optimizer, "beta_1"),
    beta2=_number(optimizer, "beta_2"),
    epsilon=_number(optimizer, "epsilon"),
    use_nesterov=True,
    decay_by_step=True,
  )


def _rmsprop(optimizer: Any) -> entry.Optimizer:
  # Adam without its first moment; a table's own rmsprop adds 1 to the root.
  _refuse(optimizer, "centered", False)
  _refuse(optimizer, "momentum", 0.0)
  epsilon = _number(optimizer, "epsilon")
  # New ones add it under the root.
  is_legacy = isinstance(optimizer, LEGACY_OPTIMIZER)
  return entry.AdamOptimizer(
    beta1=0.0,
    beta2=_number(optimizer, "rho"),
    epsilon=epsilon if is_legacy else math.sqrt(epsilon),
    decay_by_step=True,
  )


def _ftrl(optimizer: Any) -> entry.Optimizer:
  for name, allowed in (
    ("learning_rate_power", -0.5),
    ("l2_shrinkage_regularization_strength", 0.0),
    ("_l2_shrinkage_regularization_strength", 0.0),
  ):
    _refuse(optimizer, name, allowed)
  return entry.FtrlOptimizer(
    initial_accumulator_value=_first(
      optimizer, "initial_accumulator_value", "_initial_accumulator_value"
    ),
    beta=_number(optimizer, "beta"),
    l1_regularization=_number(optimizer, "l1_regularization_strength"),
    # Keras adds the square of a value times this, a table half of it.
    l2_regularization=2 * _number(optimizer, "l2_regularization_strength"),
  )


_KINDS: dict[str, Callable[[Any], entry.Optimizer]] = {
  "Adadelta": _adadelta,
  "Adagrad": _adagrad,
  "Adam": _adam,
  "AdamW": _adam,
  "Ftrl": _ftrl,
  "Nadam": _nadam,
  "RMSprop": _rmsprop,
  "SGD": _sgd,
}
