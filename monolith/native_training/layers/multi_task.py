"""Layers that share parts of a model between tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import graph_estimator, utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.dense_options import DenseOptions
from monolith.native_training.layers.mlp import MLP

keras: Any = _tensorflow.import_keras()

_PREDICT = graph_estimator.ModeKeys.PREDICT
_EPSILON = 1e-7


@utils.with_params
class MMoE(keras.layers.Layer):
  """Multi-gate mixture of experts: `x`, or `[expert_input, gate_input]`, to one tensor per task.

  Args:
    num_tasks: number of outputs.
    expert_output_dims: widths of an expert's layers, or a list per expert; all end alike.
    expert_activations: `activations` of an expert's `MLP`, or a list with one per expert.
    expert_initializers: `initializers` of an expert's `MLP`, or a list with one per expert.
    gate_type: `softmax`; `topk` keeps the largest gates only; `noise_topk` adds noise before.
    top_k: how many are kept.
    num_experts: by default as many as there are lists, activations or initializers.

  The arguments from `kernel_regularizer` on are those of `MLP`, for every expert.
  """

  def __init__(
    self,
    num_tasks: int,
    expert_output_dims: Sequence[Any],
    expert_activations: Any,
    expert_initializers: Any = "glorot_uniform",
    gate_type: str = "softmax",
    top_k: int = 1,
    num_experts: int | None = None,
    kernel_regularizer: Any = None,
    use_weight_norm: bool = True,
    use_learnable_weight_norm: bool = True,
    use_bias: bool = True,
    bias_regularizer: Any = None,
    enable_batch_normalization: bool = False,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_renorm: bool = False,
    batch_normalization_renorm_clipping: Any = None,
    batch_normalization_renorm_momentum: float = 0.99,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    assert gate_type in (
      "softmax",
      "topk",
      "noise_topk",
    ), f"gate_type is {gate_type}, want softmax, topk or noise_topk"
    self.num_tasks = num_tasks
    self.gate_type = gate_type
    self.top_k = top_k
    is_nested = all(isinstance(dims, (list, tuple)) for dims in expert_output_dims)
    if num_experts is None:
      if is_nested:
        num_experts = len(expert_output_dims)
      elif isinstance(expert_activations, (list, tuple)):
        num_experts = len(expert_activations)
      elif isinstance(expert_initializers, (list, tuple)):
        num_experts = len(expert_initializers)
      else:
        raise Exception("num_experts not set")
    self.num_experts = num_experts
    if is_nested:
      self._expert_output_dims = [list(dims) for dims in expert_output_dims]
    else:
      self._expert_output_dims = [list(expert_output_dims) for _ in range(num_experts)]
    assert (
      len(self._expert_output_dims) == num_experts
    ), f"expert_output_dims is of {len(self._expert_output_dims)} experts, want {num_experts}"
    assert (
      len({dims[-1] for dims in self._expert_output_dims}) == 1
    ), f"all experts must have the same last dim: {self._expert_output_dims}"
    self._expert_activations = self._per_expert(expert_activations, "expert_activations")
    self._expert_initializers = self._per_expert(expert_initializers, "expert_initializers")
    self._options = DenseOptions(
      kernel_regularizer=kernel_regularizer,
      use_weight_norm=use_weight_norm,
      use_learnable_weight_norm=use_learnable_weight_norm,
      use_bias=use_bias,
      bias_regularizer=bias_regularizer,
      enable_batch_normalization=enable_batch_normalization,
      batch_normalization_momentum=batch_normalization_momentum,
      batch_normalization_renorm=batch_normalization_renorm,
      batch_normalization_renorm_clipping=batch_normalization_renorm_clipping,
      batch_normalization_renorm_momentum=batch_normalization_renorm_momentum,
    )
    self._experts = [
      MLP(dims, activations, initializers, name=f"expert_{i}", **self._options.as_arguments())
      for i, (dims, activations, initializers) in enumerate(
        zip(self._expert_output_dims, self._expert_activations, self._expert_initializers)
      )
    ]

  def _per_expert(self, values: Any, what: str) -> list[Any]:
    if not isinstance(values, (list, tuple)):
      return [values] * self.num_experts
    assert (
      len(values) == self.num_experts
    ), f"{what} has {len(values)} elements, want one per expert: {self.num_experts}"
    return list(values)

  def build(self, input_shape: Any) -> None:
    gate_shape = input_shape[1] if _is_pair(input_shape) else input_shape
    shape = [tf.TensorShape(gate_shape)[-1], self.num_experts * self.num_tasks]
    self._gate_weight = self.add_weight(
      "gate_weight", shape=shape, initializer="zeros", trainable=True
    )
    self._gate_noise = None
    if self.gate_type == "noise_topk":
      self._gate_noise = self.add_weight(
        "gate_noise", shape=shape, initializer="glorot_normal", trainable=True
      )
    super().build(input_shape)

  def call(self, inputs: Any, training: Any = None) -> list[tf.Tensor]:
    if isinstance(inputs, (list, tuple)):
      expert_input, gate_input = inputs
    else:
      expert_input = gate_input = inputs
    experts = tf.stack([expert(expert_input, training=training) for expert in self._experts], 1)
    gates = self._compute_gates(gate_input)
    return tf.unstack(tf.matmul(gates, experts), num=self.num_tasks, axis=1)

  def _compute_gates(self, gate_input: tf.Tensor) -> tf.Tensor:
    """Returns `[B, tasks, experts]`."""
    logits = tf.matmul(gate_input, self._gate_weight)
    if self._gate_noise is not None:
      deviation = tf.math.softplus(tf.matmul(gate_input, self._gate_noise))
      logits = logits + tf.random.normal(tf.shape(logits)) * deviation
    gates = tf.nn.softmax(tf.reshape(logits, [-1, self.num_tasks, self.num_experts]), axis=-1)
    if self.gate_type == "softmax":
      return gates
    # By index, so that exactly this many are kept where gates are equal.
    _, chosen = tf.math.top_k(gates, self.top_k)
    gates = gates * tf.reduce_sum(tf.one_hot(chosen, self.num_experts, dtype=gates.dtype), axis=2)
    gates = gates / tf.reduce_sum(gates, axis=-1, keepdims=True)
    importance = tf.reduce_sum(gates, axis=0)
    mean, variance = tf.nn.moments(importance, axes=[1])
    for i in range(self.num_tasks):
      self.add_loss(variance[i] / tf.square(mean[i]))
    return gates

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "num_tasks": self.num_tasks,
      "expert_output_dims": self._expert_output_dims,
      "expert_activations": [_serialize_activations(a) for a in self._expert_activations],
      "expert_initializers": [_serialize_initializers(i) for i in self._expert_initializers],
      "gate_type": self.gate_type,
      "top_k": self.top_k,
      "num_experts": self.num_experts,
      **self._options.get_config(),
    }


def _is_pair(input_shape: Any) -> bool:
  return (
    isinstance(input_shape, (list, tuple))
    and len(input_shape) == 2
    and not (isinstance(input_shape[1], (int, type(None))))
  )


def _serialize_activations(activations: Any) -> Any:
  if isinstance(activations, (list, tuple)):
    return [advanced_activations.serialize(advanced_activations.get(a)) for a in activations]
  return advanced_activations.serialize(advanced_activations.get(activations))


def _serialize_initializers(initializers: Any) -> Any:
  if isinstance(initializers, (list, tuple)):
    return [layer_utils.serialize_initializer(i) for i in initializers]
  return layer_utils.serialize_initializer(initializers)


@utils.with_params
class SNR(keras.layers.Layer):
  """Sub-network routing: I tensors `[B, d]` to O tensors `[B, out]`, over learned routes.

  Args:
    num_out_subnet: O.
    out_subnet_dim: width of the outputs.
    snr_type: `trans`: a route is a matrix; `aver`: it is the identity, and `out_subnet_dim` is d.
    zeta: upper end of the stretched gate.
    gamma: lower end of it.
    beta: temperature of the gate.
    use_ste: whether gradients pass the gate's clipping as if it were not there.
    mode: the Estimator's mode; gates are random except in prediction.
    initializer: initializer of the matrices.
    regularizer: regularizer of the matrices.
  """

  def __init__(
    self,
    num_out_subnet: int,
    out_subnet_dim: int,
    snr_type: str = "trans",
    zeta: float = 1.1,
    gamma: float = -0.1,
    beta: float = 0.5,
    use_ste: bool = False,
    mode: str = graph_estimator.ModeKeys.TRAIN,
    initializer: Any = "glorot_uniform",
    regularizer: Any = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    assert snr_type in ("trans", "aver"), f"snr_type is {snr_type}, want trans or aver"
    self.num_out_subnet = num_out_subnet
    self.out_subnet_dim = out_subnet_dim
    self.snr_type = snr_type
    self.zeta = zeta
    self.gamma = gamma
    self.beta = beta
    self.use_ste = use_ste
    self.mode = mode
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    dims = [layer_utils.check_dim(tf.TensorShape(shape)[-1]) for shape in input_shape]
    assert len(set(dims)) == 1, f"all inputs must have the same width: {dims}"
    self._num_in, self._in_dim = len(dims), dims[0]
    num_routes = self._num_in * self.num_out_subnet
    self._log_alpha = self.add_weight(
      "log_alpha", shape=[num_routes, 1], initializer="zeros", trainable=True
    )
    if self.snr_type == "trans":
      self._weight = self.add_weight(
        "weight",
        shape=[num_routes, self._in_dim * self.out_subnet_dim],
        initializer=layer_utils.new_initializer(self.initializer),
        regularizer=self.regularizer,
        trainable=True,
      )
    else:
      assert (
        self._in_dim == self.out_subnet_dim
      ), f"snr_type aver needs inputs as wide as outputs: {self._in_dim}, {self.out_subnet_dim}"
      self._weight = tf.tile(tf.reshape(tf.eye(self._in_dim), [1, -1]), [num_routes, 1])
    super().build(input_shape)

  @tf.custom_gradient
  def hard_concrete_ste(self, x: tf.Tensor) -> Any:
    """Clips to [0, 1]; the gradient passes unchanged."""
    return tf.clip_by_value(x, 0.0, 1.0), lambda grad: grad

  def _compute_gates(self) -> tf.Tensor:
    """Returns `[routes, 1]`, in [0, 1]."""
    if self.mode == _PREDICT:
      s = tf.sigmoid(self._log_alpha)
    else:
      u = tf.random.uniform(tf.shape(self._log_alpha), _EPSILON, 1 - _EPSILON)
      s = tf.sigmoid((tf.math.log(u) - tf.math.log(1 - u) + self._log_alpha) / self.beta)
    stretched = s * (self.zeta - self.gamma) + self.gamma
    if self.use_ste:
      return self.hard_concrete_ste(stretched)
    return tf.clip_by_value(stretched, 0.0, 1.0)

  def call(self, inputs: Any) -> list[tf.Tensor]:
    inputs = list(inputs)
    routes = tf.reshape(
      self._compute_gates() * self._weight,
      [self._num_in, self.num_out_subnet, self._in_dim, self.out_subnet_dim],
    )
    # The block matrix whose rows belong to the inputs, columns to the outputs.
    matrix = tf.reshape(
      tf.transpose(routes, [0, 2, 1, 3]),
      [self._num_in * self._in_dim, self.num_out_subnet * self.out_subnet_dim],
    )
    threshold = self.beta * tf.math.log(-self.gamma / self.zeta)
    self.add_loss(tf.reduce_sum(tf.sigmoid(self._log_alpha - threshold)))
    return tf.split(tf.matmul(tf.concat(inputs, axis=1), matrix), self.num_out_subnet, axis=1)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "num_out_subnet": self.num_out_subnet,
      "out_subnet_dim": self.out_subnet_dim,
      "snr_type": self.snr_type,
      "zeta": self.zeta,
      "gamma": self.gamma,
      "beta": self.beta,
      "use_ste": self.use_ste,
      "mode": self.mode,
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }
