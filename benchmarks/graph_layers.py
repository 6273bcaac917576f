"""A dense layer for models in graph mode: Keras 3 has taken `tf.compat.v1.layers` away."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def dense(
  units: tf.Tensor, size: int, activation: Callable[[tf.Tensor], tf.Tensor] | None = None
) -> tf.Tensor:
  """Returns `activation(units @ kernel + bias)`, [batch, size], with new variables.

  Args:
    units: float32 [batch, n], n known.
    size: of the result.
    activation: none by default.
  """
  with tf.compat.v1.variable_scope(None, default_name="dense"):
    kernel = tf.compat.v1.get_variable("kernel", [units.shape[-1], size])
    bias = tf.compat.v1.get_variable("bias", [size], initializer=tf.zeros_initializer())
  result = tf.nn.bias_add(tf.matmul(units, kernel), bias)
  return result if activation is None else activation(result)
