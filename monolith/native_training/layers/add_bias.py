"""A bias for every element of an example."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils
from monolith.native_training.layers import utils as layer_utils

keras: Any = _tensorflow.import_keras()

_DATA_FORMATS = ("channels_first", "channels_last")


@utils.with_params
class AddBias(keras.layers.Layer):
  """`y = x + b`, where `b` has the shape of an example.

  Args:
    initializer: initializer of the bias, zeros by default.
    regularizer: regularizer of the bias.
  """

  def __init__(self, initializer: Any = None, regularizer: Any = None, **kwargs: Any):
    super().__init__(**kwargs)
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)
    self.input_spec = keras.layers.InputSpec(min_ndim=2)

  def build(self, input_shape: Any) -> None:
    self.bias = self.add_weight(
      "bias",
      shape=tf.TensorShape(input_shape)[1:],
      initializer=layer_utils.new_initializer(self.initializer, "zeros"),
      regularizer=self.regularizer,
      trainable=True,
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor, data_format: str = "channels_last") -> tf.Tensor:
    """Adds the bias; it has the layout of the input, whichever that is.

    Raises:
      ValueError: an unknown `data_format`.
    """
    if data_format not in _DATA_FORMATS:
      raise ValueError(f"Unknown data_format: {data_format}")
    return inputs + self.bias

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }
