"""Activations as layers, found by name and written into configurations."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils

keras: Any = _tensorflow.import_keras()

ReLU = utils.with_params(keras.layers.ReLU)
LeakyReLU = utils.with_params(keras.layers.LeakyReLU)
ELU = utils.with_params(keras.layers.ELU)
Softmax = utils.with_params(keras.layers.Softmax)
ThresholdedReLU = utils.with_params(keras.layers.ThresholdedReLU)
PReLU = utils.with_params(keras.layers.PReLU)


class _Stateless(keras.layers.Layer):
  """A layer without variables or arguments."""

  def compute_output_shape(self, input_shape: Any) -> Any:
    return input_shape


@utils.with_params
class Exponential(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.exp(x)


@utils.with_params
class Gelu(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return keras.activations.gelu(x)


@utils.with_params
class HardSigmoid(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return keras.activations.hard_sigmoid(x)


@utils.with_params
class Linear(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.identity(x)


@utils.with_params
class Selu(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.selu(x)


@utils.with_params
class Sigmoid(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.sigmoid(x)


@utils.with_params
class Sigmoid2(_Stateless):
  """`2 sigmoid(x)`: 1 at 0."""

  def call(self, x: tf.Tensor) -> tf.Tensor:
    return 2.0 * tf.sigmoid(x)


@utils.with_params
class Softplus(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.math.softplus(x)


@utils.with_params
class Softsign(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.math.softsign(x)


@utils.with_params
class Swish(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return x * tf.sigmoid(x)


@utils.with_params
class Tanh(_Stateless):
  def call(self, x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x)


_ACTIVATIONS: dict[str, type] = {
  "exponential": Exponential,
  "gelu": Gelu,
  "hard_sigmoid": HardSigmoid,
  "hardsigmoid": HardSigmoid,
  "linear": Linear,
  "selu": Selu,
  "sigmoid": Sigmoid,
  "sigmoid2": Sigmoid2,
  "softplus": Softplus,
  "softsign": Softsign,
  "swish": Swish,
  "tanh": Tanh,
  "leakyrelu": LeakyReLU,
  "relu": ReLU,
  "elu": ELU,
  "softmax": Softmax,
  "thresholdedrelu": ThresholdedReLU,
  "prelu": PReLU,
}
ALL_ACTIVATION_NAMES = list(_ACTIVATIONS)

# Class name -> constructor arguments that belong in a configuration.
_CONFIG_KEYS = {
  "LeakyReLU": ("alpha",),
  "ELU": ("alpha",),
  "ReLU": ("max_value", "negative_slope", "threshold"),
  "PReLU": ("alpha_initializer", "alpha_regularizer", "alpha_constraint", "shared_axes"),
  "Softmax": ("axis",),
  "ThresholdedReLU": ("theta",),
}


def get(identifier: Any) -> Any:
  """Returns the activation that is meant.

  Args:
    identifier: `None`; a name in any case; what `serialize` returned, as text or dict; a layer, its
      class; or a function, for which the layer of the same name is returned if there is one.

  Raises:
    TypeError: nothing is known by that identifier.
  """
  if identifier is None:
    return None
  if isinstance(identifier, str):
    if identifier.lower() in _ACTIVATIONS:
      return _ACTIVATIONS[identifier.lower()]()
    config = _parse(identifier)
    if config is not None:
      return deserialize(config)
  elif isinstance(identifier, dict):
    return deserialize(identifier)
  elif inspect.isclass(identifier):
    if issubclass(identifier, keras.layers.Layer) and hasattr(identifier, "params"):
      return identifier()
  elif isinstance(identifier, keras.layers.Layer):
    if hasattr(identifier, "params"):
      return identifier
    name = type(identifier).__name__.lower()
    if name in _ACTIVATIONS:
      return _ACTIVATIONS[name]()
  elif callable(identifier):
    name = getattr(identifier, "__name__", "").lower()
    return _ACTIVATIONS[name]() if name in _ACTIVATIONS else identifier
  raise TypeError(f"Could not interpret activation function identifier: {identifier!r}")


def serialize(activation: Any) -> str | None:
  """Returns the text of a dict with the name of the layer and its arguments.

  `None` for functions that are no layer: their code cannot be written down.
  """
  name = type(activation).__name__
  if name.lower() not in _ACTIVATIONS or not isinstance(activation, keras.layers.Layer):
    return None
  config = activation.get_config()
  return repr(
    {"name": name, **{key: _to_literal(config[key]) for key in _CONFIG_KEYS.get(name, ())}}
  )


def deserialize(identifier: str | dict[str, Any] | None) -> Any:
  """Returns the layer that `serialize` has described.

  Raises:
    AssertionError: the name is unknown.
    TypeError: the text is not that of a dict.
  """
  if identifier is None:
    return None
  if isinstance(identifier, str):
    config = _parse(identifier)
    if config is None:
      raise TypeError(f"Could not interpret activation function identifier: {identifier!r}")
    identifier = config
  arguments = dict(identifier)
  name = arguments.pop("name", None)
  assert (
    isinstance(name, str) and name.lower() in _ACTIVATIONS
  ), f"the activation {name!r} is unknown, want one of {ALL_ACTIVATION_NAMES}"
  return _ACTIVATIONS[name.lower()](**arguments)


def _parse(text: str) -> dict[str, Any] | None:
  try:
    config = ast.literal_eval(text.strip())
  except (ValueError, SyntaxError):
    return None
  return config if isinstance(config, dict) else None


def _to_literal(value: Any) -> Any:
  # Keras keeps numbers as arrays.
  return value.item() if hasattr(value, "item") else value
