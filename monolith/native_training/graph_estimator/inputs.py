"""Calling input functions and model functions: who takes what, and what they give."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Hooks = list[tf.compat.v1.train.SessionRunHook]


class DatasetInitializerHook(tf.compat.v1.train.SessionRunHook):
  """Starts an iterator in every new session.

  Args:
    iterator: an initializable iterator of the graph.
  """

  def __init__(self, iterator: Any):
    self._iterator = iterator
    self._initializer: tf.Operation | None = None

  def begin(self) -> None:
    self._initializer = self._iterator.initializer

  def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
    del coord
    session.run(self._initializer)


def get_argument_names(function: Callable[..., Any]) -> frozenset[str]:
  """Returns the names that a function can be given, without those that are bound already."""
  bound: set[str] = set()
  wrapped = function
  while isinstance(wrapped, functools.partial):
    bound.update(wrapped.keywords)
    wrapped = wrapped.func
  kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  # A decorator that changes the arguments has those of its own function.
  parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
  return frozenset(p.name for p in parameters if p.kind in kinds and p.name not in bound)


def call_input_fn(
  input_fn: Callable[..., Any], mode: str, params: Any, config: Any
) -> tuple[Any, Any, Hooks]:
  """Calls an input function, on the CPU.

  Args:
    input_fn: makes a dataset, or tensors; of `mode`, `params` and `config` it is given those that
      it takes.
    mode: a mode of `ModeKeys`.
    params: the Estimator's parameters.
    config: the Estimator's configuration.

  Returns:
    Features, labels (`None` if there are none), and hooks that start the data.

  Raises:
    ValueError: a tuple has other than two members.
  """
  available = {"mode": mode, "params": params, "config": config}
  names = get_argument_names(input_fn)
  with tf.compat.v1.device("/cpu:0"):
    result = input_fn(**{name: value for name, value in available.items() if name in names})
  hooks: Hooks = []
  if isinstance(result, tf.data.Dataset):
    iterator = tf.compat.v1.data.make_initializable_iterator(result)
    hooks.append(DatasetInitializerHook(iterator))
    result = iterator.get_next()
  if not isinstance(result, (tuple, list)):
    return result, None, hooks
  if len(result) != 2:
    raise ValueError(
      f"input_fn should return features, or (features, labels), but has returned {len(result)} "
      f"things: {result}"
    )
  return result[0], result[1], hooks


def check_model_fn(model_fn: Callable[..., Any], has_params: bool) -> None:
  """Checks the arguments that a model function takes.

  Raises:
    ValueError: it takes no features, takes something unknown, or does not take the parameters.
  """
  names = get_argument_names(model_fn)
  if "features" not in names:
    raise ValueError(f"model_fn ({model_fn}) must include features argument.")
  if has_params and "params" not in names:
    raise ValueError(
      f"model_fn ({model_fn}) does not include params argument, but params are given."
    )
  known = {"features", "labels", "mode", "params", "config", "self"}
  if names - known:
    raise ValueError(
      f"model_fn ({model_fn}) has arguments that are not known: {sorted(names - known)}"
    )


def call_model_fn(
  model_fn: Callable[..., Any], features: Any, labels: Any, mode: str, params: Any, config: Any
) -> Any:
  """Calls a model function with those of the arguments that it takes.

  Raises:
    ValueError: there are labels and it takes none.
  """
  names = get_argument_names(model_fn)
  if "labels" not in names and labels is not None:
    raise ValueError("model_fn does not take labels, but input_fn returns labels.")
  available = {"labels": labels, "mode": mode, "params": params, "config": config}
  return model_fn(
    features=features, **{name: value for name, value in available.items() if name in names}
  )
