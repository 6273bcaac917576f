"""Defines the inputs of an exported model: placeholders, and the features made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from monolith import _tensorflow

_FEATURE = "feature"
_INPUT = "input"
_EXAMPLES = "examples"
_PREDICTIONS_INPUT = "input_example_tensor"


class _Fields(NamedTuple):
  features: Any
  receiver_tensors: Mapping[str, Any]
  receiver_tensors_alternatives: Mapping[str, Mapping[str, Any]] | None


def _base(name: str) -> Any:
  """Returns the base of a class that is to stand for `tf.estimator`'s where that exists."""
  return type("_Base", (_Fields, *_tensorflow.original_receiver_class(name)), {})


if TYPE_CHECKING:

  class _ServingBase(_Fields):
    """The fields that both kinds share."""

  _TensorBase = _ServingBase
else:
  _ServingBase = _base("ServingInputReceiver")
  _TensorBase = _base("TensorServingInputReceiver")


class ServingInputReceiver(_ServingBase):
  """Holds the inputs of an exported model.

  Attributes:
    features: the features of the model function by name. A single tensor gets the name `feature`.
    receiver_tensors: the placeholders to feed, by name. A single one gets the name `input`.
    receiver_tensors_alternatives: other tensors that can be fed instead, by name.
  """

  __slots__ = ()

  def __new__(
    cls,
    features: Any,
    receiver_tensors: Any,
    receiver_tensors_alternatives: Mapping[str, Any] | None = None,
  ) -> ServingInputReceiver:
    """Checks names and types.

    Raises:
      ValueError: features or receiver tensors are missing, a name is no text, or something is no
        tensor.
    """
    return tuple.__new__(
      cls,
      (
        _check_features(features),
        _check_tensors("receiver_tensors", receiver_tensors, _INPUT),
        _check_alternatives(receiver_tensors_alternatives),
      ),
    )


class TensorServingInputReceiver(_TensorBase):
  """Holds the inputs of an exported model whose function gets a tensor instead of a dict.

  Attributes:
    features: the tensor.
    receiver_tensors: as those of `ServingInputReceiver`.
    receiver_tensors_alternatives: as those of `ServingInputReceiver`.
  """

  __slots__ = ()

  def __new__(
    cls,
    features: Any,
    receiver_tensors: Any,
    receiver_tensors_alternatives: Mapping[str, Any] | None = None,
  ) -> TensorServingInputReceiver:
    """Checks names and types.

    Raises:
      ValueError: the features are no tensor, a name is no text, or something is no tensor.
    """
    _check_tensor("features", _FEATURE, features)
    return tuple.__new__(
      cls,
      (
        features,
        _check_tensors("receiver_tensors", receiver_tensors, _INPUT),
        _check_alternatives(receiver_tensors_alternatives),
      ),
    )


def build_raw_serving_input_receiver_fn(
  features: Mapping[str, tf.Tensor], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
  """Returns a receiver function for models whose features are fed directly.

  Args:
    features: tensors by name, whose shapes and types are those of the inputs; values do not matter.
    default_batch_size: the size of a batch; any by default.
  """

  def serving_input_receiver_fn() -> ServingInputReceiver:
    fed = {}
    for name, tensor in features.items():
      shape = [default_batch_size, *tensor.shape.as_list()[1:]]
      fed[name] = tf.compat.v1.placeholder(tensor.dtype, shape, name=name)
    return ServingInputReceiver(fed, fed)

  return serving_input_receiver_fn


def build_parsing_serving_input_receiver_fn(
  feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
  """Returns a receiver function for models that are fed serialized `tf.train.Example`s.

  Args:
    feature_spec: the specification for `tf.io.parse_example`.
    default_batch_size: the size of a batch; any by default.
  """

  def serving_input_receiver_fn() -> ServingInputReceiver:
    examples = tf.compat.v1.placeholder(tf.string, [default_batch_size], name=_PREDICTIONS_INPUT)
    features = tf.io.parse_example(examples, dict(feature_spec))
    return ServingInputReceiver(features, {_EXAMPLES: examples})

  return serving_input_receiver_fn


def _check_features(features: Any) -> Mapping[str, Any]:
  if callable(features) and not tf.is_tensor(features):
    raise ValueError(f"features is {features!r}, want tensors by name")
  return _check_tensors("features", features, _FEATURE)


def _check_tensors(what: str, tensors: Any, default_name: str) -> Mapping[str, Any]:
  if tensors is None:
    raise ValueError(f"{what} must be defined.")
  if not isinstance(tensors, Mapping):
    tensors = {default_name: tensors}
  for name, tensor in tensors.items():
    if not isinstance(name, str):
      raise ValueError(f"{what} keys must be strings: {name!r}.")
    _check_tensor(what, name, tensor)
  return tensors


def _check_tensor(what: str, name: str, tensor: Any) -> None:
  if not tf.is_tensor(tensor):
    raise ValueError(f"{what} {name!r} must be a Tensor, SparseTensor or RaggedTensor: {tensor!r}")


def _check_alternatives(
  alternatives: Mapping[str, Any] | None,
) -> Mapping[str, Mapping[str, Any]] | None:
  if alternatives is None:
    return None
  if not isinstance(alternatives, Mapping):
    raise ValueError(f"receiver_tensors_alternatives must be a dict: {alternatives!r}.")
  return {
    name: _check_tensors(f"receiver_tensors_alternatives {name!r}", tensors, _INPUT)
    for name, tensors in alternatives.items()
  }
