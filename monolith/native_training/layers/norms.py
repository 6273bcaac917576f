"""Normalization of layers, of losses' gradients, and of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.core import base_layer
from monolith.native_training import graph_estimator, utils
from monolith.native_training.layers import utils as layer_utils

keras: Any = _tensorflow.import_keras()

_TRAIN = graph_estimator.ModeKeys.TRAIN


@utils.with_params
class LayerNorm(keras.layers.Layer):
  """Mean 0 and variance 1 along the last axis, then `gamma x + beta`.

  Args:
    initializer: initializer of `gamma`, ones by default; `beta` starts at 0.
    regularizer: regularizer of both.
  """

  def __init__(self, initializer: Any = None, regularizer: Any = None, **kwargs: Any):
    super().__init__(**kwargs)
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    shape = tf.TensorShape(input_shape)[-1:]
    self.beta = self.add_weight(
      "beta", shape=shape, initializer="zeros", regularizer=self.regularizer, trainable=True
    )
    self.gamma = self.add_weight(
      "gamma",
      shape=shape,
      initializer=layer_utils.new_initializer(self.initializer, "ones"),
      regularizer=self.regularizer,
      trainable=True,
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(inputs, axes=[-1], keepdims=True)
    return tf.nn.batch_normalization(inputs, mean, variance, self.beta, self.gamma, 1e-6)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }


@utils.with_params
class GradNorm(keras.layers.Layer):
  """Weighs losses so that their gradients have similar norms.

  Args:
    loss_names: names of the n losses, for summaries.
    scale: factor of the loss of the weights.
    loss_pow: the power to which a deviation counts.
    relative_diff: whether deviations are relative to the mean.
    epsilon: added to that mean.
  """

  def __init__(
    self,
    loss_names: Sequence[str],
    scale: float = 1.0,
    loss_pow: float = 2.0,
    relative_diff: bool = False,
    epsilon: float = 1e-6,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.loss_names = list(loss_names)
    self.scale = scale
    self.loss_pow = loss_pow
    self.relative_diff = relative_diff
    self.epsilon = epsilon

  def build(self, input_shape: Any) -> None:
    self._grad_norm_weights = self.add_weight(
      "grad_norm_weights", shape=[len(self.loss_names)], initializer="zeros", trainable=True
    )
    super().build(input_shape)

  def get_weights(self) -> tf.Tensor:
    """Returns the weights of the losses; Keras' variables are in `weights`."""
    return tf.nn.softmax(self._grad_norm_weights)

  def call(self, inputs: Any, shared_inputs: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the loss of the weights, and the weighted sum of the losses.

    Args:
      inputs: the list of n losses, and the list of tensors that all of them depend on.
      shared_inputs: that second list, unless it is among `inputs`.
    """
    losses = inputs
    if shared_inputs is None:
      losses, shared_inputs = inputs
    losses, shared_inputs = list(losses), list(shared_inputs)
    norms = []
    for loss in losses:
      gradients = tf.gradients(loss, shared_inputs, unconnected_gradients="zero")
      flat = tf.concat([tf.reshape(g, [tf.shape(g)[0], -1]) for g in gradients], axis=1)
      norms.append(tf.norm(flat))
    norms = tf.stop_gradient(tf.stack(norms))
    weights = self.get_weights()
    weighted = weights * norms
    mean = tf.reduce_mean(weighted)
    difference = tf.abs(weighted - mean)
    if self.relative_diff:
      difference = difference / (mean + self.epsilon)
    for i, name in enumerate(self.loss_names):
      tf.compat.v1.summary.scalar(f"gradnorm_weight/{name}", weights[i])
      tf.compat.v1.summary.scalar(f"gradnorm_gnorm/{name}", norms[i])
      tf.compat.v1.summary.scalar(f"gradnorm_wgnorm/{name}", weighted[i])
    weight_loss = self.scale * tf.reduce_sum(tf.pow(difference, self.loss_pow))
    total = tf.reduce_sum(tf.stack(losses) * tf.stop_gradient(weights))
    return weight_loss, total

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "loss_names": self.loss_names,
      "scale": self.scale,
      "loss_pow": self.loss_pow,
      "relative_diff": self.relative_diff,
      "epsilon": self.epsilon,
    }


@utils.with_params
class BatchNorm(keras.layers.Layer):
  """Mean 0 and variance 1 over a batch (legacy: prefer `tf.keras.layers.BatchNormalization`).

  The moving statistics are trainable variables: the layer losses `<name>_moving_mean` and
  `<name>_moving_variance` have gradients that lead them to the statistics of the batch.

  Args:
    momentum: how much of the old statistics an update keeps.
    center: whether to add `beta_offset`.
    scale: whether to multiply by `gamma_scale`.
    moving_mean_initializer: zeros by default.
    moving_variance_initializer: ones by default.
    beta_initializer: zeros by default.
    gamma_initializer: ones by default.
    regularizer: regularizer of offset and scale.
    training_use_global_dist: mix the moving statistics into those of the batch in training.
    global_dist_momentum: their share in that.
    stop_grad_of_var_mean: whether no gradient goes through the statistics of the batch.
    epsilon: added to the variance.
    mode: the Estimator's mode.
  """

  def __init__(
    self,
    momentum: float = 0.99,
    center: bool = True,
    scale: bool = True,
    moving_mean_initializer: Any = "zeros",
    moving_variance_initializer: Any = "ones",
    beta_initializer: Any = "zeros",
    gamma_initializer: Any = "ones",
    regularizer: Any = None,
    training_use_global_dist: bool = False,
    global_dist_momentum: float = 1.0,
    stop_grad_of_var_mean: bool = False,
    epsilon: float = 1e-6,
    mode: str = _TRAIN,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.momentum = momentum
    self.center = center
    self.scale = scale
    self.moving_mean_initializer = keras.initializers.get(moving_mean_initializer)
    self.moving_variance_initializer = keras.initializers.get(moving_variance_initializer)
    self.beta_initializer = keras.initializers.get(beta_initializer)
    self.gamma_initializer = keras.initializers.get(gamma_initializer)
    self.regularizer = keras.regularizers.get(regularizer)
    self.training_use_global_dist = training_use_global_dist
    self.global_dist_momentum = global_dist_momentum
    self.stop_grad_of_var_mean = stop_grad_of_var_mean
    self.epsilon = epsilon
    self.mode = mode

  def build(self, input_shape: Any) -> None:
    shape = tf.TensorShape(input_shape)[1:]

    def add(name: str, initializer: Any, regularizer: Any = None) -> tf.Variable:
      return self.add_weight(
        name,
        shape=shape,
        initializer=layer_utils.new_initializer(initializer),
        regularizer=regularizer,
        trainable=True,
      )

    self.moving_mean = add("moving_mean", self.moving_mean_initializer)
    self.moving_variance = add("moving_variance", self.moving_variance_initializer)
    self.beta = self.gamma = None
    if self.center:
      self.beta = add("beta_offset", self.beta_initializer, self.regularizer)
    if self.scale:
      self.gamma = add("gamma_scale", self.gamma_initializer, self.regularizer)
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    moving_mean = tf.stop_gradient(tf.convert_to_tensor(self.moving_mean))
    moving_variance = tf.stop_gradient(tf.convert_to_tensor(self.moving_variance))
    if self.mode != _TRAIN:
      return self._normalize(inputs, moving_mean, moving_variance)
    mean, variance = tf.nn.moments(inputs, axes=[0])
    for name, variable, batch in (
      ("moving_mean", self.moving_mean, mean),
      ("moving_variance", self.moving_variance, variance),
    ):
      base_layer.add_layer_loss(f"{self.name}_{name}", _loss_with_gradient(variable, batch))
    if self.stop_grad_of_var_mean:
      mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
    if self.training_use_global_dist:
      share = self.global_dist_momentum
      mean = share * moving_mean + (1 - share) * mean
      variance = share * moving_variance + (1 - share) * variance
    return self._normalize(inputs, mean, variance)

  def set_use_global_dist(self, use_global_dist: bool = True) -> None:
    """Sets whether calls from now on mix the moving statistics into those of a training batch."""
    self.training_use_global_dist = use_global_dist

  def _normalize(self, inputs: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> tf.Tensor:
    return tf.nn.batch_normalization(inputs, mean, variance, self.beta, self.gamma, self.epsilon)

  def get_config(self) -> dict[str, Any]:
    serialize = layer_utils.serialize_initializer
    return {
      **super().get_config(),
      "momentum": self.momentum,
      "center": self.center,
      "scale": self.scale,
      "moving_mean_initializer": serialize(self.moving_mean_initializer),
      "moving_variance_initializer": serialize(self.moving_variance_initializer),
      "beta_initializer": serialize(self.beta_initializer),
      "gamma_initializer": serialize(self.gamma_initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "training_use_global_dist": self.training_use_global_dist,
      "global_dist_momentum": self.global_dist_momentum,
      "stop_grad_of_var_mean": self.stop_grad_of_var_mean,
      "epsilon": self.epsilon,
      "mode": self.mode,
    }


def _loss_with_gradient(variable: tf.Variable, gradient: tf.Tensor) -> tf.Tensor:
  """Returns a scalar whose gradient with respect to the variable is the given one."""
  return tf.reduce_sum(tf.convert_to_tensor(variable) * tf.stop_gradient(gradient))
