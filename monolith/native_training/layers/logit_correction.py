"""Corrects logits for the sampling of the data they are trained on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations

keras: Any = _tensorflow.import_keras()


@utils.with_params
class LogitCorrection(keras.layers.Layer):
  """Takes `(logits, sample_rate)` to corrected logits.

  Args:
    activation: applied to the result.
    sample_bias: whether the logits are those of a model that is biased by the sampling.
  """

  def __init__(self, activation: Any = None, sample_bias: bool = False, **kwargs: Any):
    super().__init__(**kwargs)
    self.activation = advanced_activations.get(activation)
    self.sample_bias = sample_bias

  def call(self, inputs: Any, sample_rate: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the corrected logits.

    Args:
      inputs: the logits and the sample rate (or `None`), or the logits alone.
      sample_rate: the sample rate, unless it is among `inputs`.
    """
    logits = inputs
    if isinstance(inputs, (list, tuple)):
      logits, sample_rate = inputs
    result = self.get_sample_logits(logits, sample_rate, self.sample_bias)
    return result if self.activation is None else self.activation(result)

  @staticmethod
  def safe_log_sigmoid(logits: tf.Tensor) -> tf.Tensor:
    """Returns `ln(sigmoid(x))` without overflow."""
    return -(tf.nn.relu(logits) - logits + tf.math.log1p(tf.exp(-tf.abs(logits))))

  @staticmethod
  def get_sample_logits(
    logits: tf.Tensor, sample_rate: tf.Tensor | None, sample_bias: bool
  ) -> tf.Tensor:
    """Returns the logits minus `ln(sample_rate)`, with `sample_bias` their log sigmoid minus it."""
    result = LogitCorrection.safe_log_sigmoid(logits) if sample_bias else logits
    return result if sample_rate is None else result - tf.math.log(sample_rate)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "activation": advanced_activations.serialize(self.activation),
      "sample_bias": self.sample_bias,
    }
