"""Layers that let features interact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import graph_estimator, utils
from monolith.native_training.layers import (
  advanced_activations,
  layer_ops,
)
from monolith.native_training.layers import (
  utils as layer_utils,
)
from monolith.native_training.layers.mlp import MLP

keras: Any = _tensorflow.import_keras()

_TRAIN = graph_estimator.ModeKeys.TRAIN


class _Merging(keras.layers.Layer):
  """A layer whose output is merged as its arguments say."""

  def __init__(self, out_type: str | None = "concat", keep_list: bool = False, **kwargs: Any):
    super().__init__(**kwargs)
    self.out_type = out_type
    self.keep_list = keep_list

  def _merge(self, tensors: Any, num_feature: int | None = None) -> Any:
    return layer_utils.merge_tensor_list(
      tensors, merge_type=self.out_type, num_feature=num_feature, keep_list=self.keep_list
    )

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "out_type": self.out_type, "keep_list": self.keep_list}


@utils.with_params
class GroupInt(_Merging):
  """Interaction of every feature of one group with every one of another.

  Takes `(left, right)`, lists of L and R tensors `[B, D]`, to `[B, L * R * D]` (multiply) or
  `[B, L * R]` (dot).

  Args:
    interaction_type: `multiply` or `dot`.
    use_attention: weigh each pair; only with `multiply`.
    attention_units: widths of the MLP that computes the weights, the last is 1.
    activation: activation of that MLP.
    initializer: initializer of that MLP, `GlorotNormal` by default.
    regularizer: regularizer of that MLP.
    out_type: `concat`, `stack`, or `None` for a list of tensors.
    keep_list: return a single tensor as a list of one.
  """

  def __init__(
    self,
    interaction_type: str = "multiply",
    use_attention: bool = False,
    attention_units: Sequence[int] | None = None,
    activation: Any = "relu",
    initializer: Any = None,
    regularizer: Any = None,
    out_type: str | None = "concat",
    keep_list: bool = False,
    **kwargs: Any,
  ):
    super().__init__(out_type=out_type, keep_list=keep_list, **kwargs)
    self.interaction_type = interaction_type
    self.use_attention = use_attention
    self.attention_units = list(attention_units or [])
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer or "glorot_normal")
    self.regularizer = keras.regularizers.get(regularizer)
    if use_attention:
      assert interaction_type == "multiply", "attention needs interaction_type multiply"
      assert (
        self.attention_units and self.attention_units[-1] == 1
      ), f"attention_units is {attention_units}, the last one must be 1"
      self._mlp = MLP(
        self.attention_units,
        activations=self.activation,
        initializers=self.initializer,
        kernel_regularizer=self.regularizer,
        name="groupint_attention_mlp",
      )

  def call(self, inputs: Any) -> Any:
    left, right = inputs
    left, right = utils.to_list(left), utils.to_list(right)
    dim = layer_utils.check_dim(left[0].shape[-1])
    result = layer_ops.ffm(
      tf.concat(left, axis=1), tf.concat(right, axis=1), dim, int_type=self.interaction_type
    )
    num_pairs = len(left) * len(right)
    if self.use_attention:
      pairs = tf.reshape(result, [-1, num_pairs, dim])
      result = tf.reshape(pairs * self._mlp(pairs), [-1, num_pairs * dim])
    return self._merge(result, num_feature=num_pairs)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "interaction_type": self.interaction_type,
      "use_attention": self.use_attention,
      "attention_units": self.attention_units,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }


FFM = GroupInt


@utils.with_params
class AllInt(_Merging):
  """Interaction of all features with a few combinations of them: `X (X^T C + b)`.

  Takes `[B, F, E]` to `[B, F, C]`, merged.

  Args:
    cmp_dim: number C of combinations.
    initializer: initializer of the kernel, `GlorotNormal` by default.
    regularizer: regularizer of kernel and bias.
    use_bias: whether there is `b`.
    out_type: `concat`, `stack`, or `None` for a list of tensors.
    keep_list: return a single tensor as a list of one.
  """

  def __init__(
    self,
    cmp_dim: int,
    initializer: Any = None,
    regularizer: Any = None,
    use_bias: bool = True,
    out_type: str | None = "concat",
    keep_list: bool = False,
    **kwargs: Any,
  ):
    super().__init__(out_type=out_type, keep_list=keep_list, **kwargs)
    self.cmp_dim = cmp_dim
    self.initializer = keras.initializers.get(initializer or "glorot_normal")
    self.regularizer = keras.regularizers.get(regularizer)
    self.use_bias = use_bias

  def build(self, input_shape: Any) -> None:
    self.kernel = self.add_weight(
      "allint_kernel",
      shape=[tf.TensorShape(input_shape)[1], self.cmp_dim],
      initializer=layer_utils.new_initializer(self.initializer),
      regularizer=self.regularizer,
      trainable=True,
    )
    self.bias = None
    if self.use_bias:
      self.bias = self.add_weight(
        "allint_bias",
        shape=[self.cmp_dim],
        initializer="zeros",
        regularizer=self.regularizer,
        trainable=True,
      )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> Any:
    combined = tf.einsum("bfe,fc->bec", inputs, self.kernel)
    if self.bias is not None:
      combined = combined + self.bias
    return self._merge(tf.matmul(inputs, combined))

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "cmp_dim": self.cmp_dim,
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "use_bias": self.use_bias,
    }


@utils.with_params
class CDot(keras.layers.Layer):
  """Interaction of features with a compressed view of all of them.

  Takes `[B, F, E]` to `[B, F * P + E * P]`.

  Args:
    project_dim: P.
    compress_units: widths of the hidden layers that compress.
    activation: activation of those layers.
    initializer: initializer of all kernels, `GlorotNormal` by default.
    regularizer: regularizer of all kernels.
  """

  def __init__(
    self,
    project_dim: int,
    compress_units: Sequence[int],
    activation: Any = "relu",
    initializer: Any = None,
    regularizer: Any = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.project_dim = project_dim
    self.compress_units = list(compress_units)
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer or "glorot_normal")
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    _, num_feature, emb_size = tf.TensorShape(input_shape).as_list()
    self._project_weight = self.add_weight(
      "project_weight",
      shape=[num_feature, self.project_dim],
      initializer=layer_utils.new_initializer(self.initializer),
      regularizer=self.regularizer,
      trainable=True,
    )
    self._compress_tower = MLP(
      [*self.compress_units, emb_size * self.project_dim],
      activations=self.activation,
      initializers=self.initializer,
      kernel_regularizer=self.regularizer,
      name="compress_tower",
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    _, num_feature, emb_size = inputs.shape.as_list()
    projected = tf.einsum("bfe,fp->bep", inputs, self._project_weight)
    projected = tf.reshape(projected, [-1, emb_size * self.project_dim])
    compressed = self._compress_tower(projected)
    crossed = tf.matmul(inputs, tf.reshape(compressed, [-1, emb_size, self.project_dim]))
    crossed = tf.reshape(crossed, [-1, num_feature * self.project_dim])
    return tf.concat([crossed, compressed], axis=1)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "project_dim": self.project_dim,
      "compress_units": self.compress_units,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }


@utils.with_params
class CAN(keras.layers.Layer):
  """A small network over user features whose weights are the item's embedding.

  Takes `(user, item [B, layer_num * D * (D + 1)])`, where `user` is `[B, F, T, D]` (`is_seq` and
  `is_stacked`), `[B, F, D]` (`is_stacked`), `[B, T, D]` (`is_seq`) or `[B, D]`, to the same without
  the axis T, which is added up.

  Args:
    layer_num: number of layers.
    activation: after each.
    is_seq: whether the user features are sequences.
    is_stacked: whether there are several of them.
  """

  def __init__(
    self,
    layer_num: int = 2,
    activation: Any = "relu",
    is_seq: bool = False,
    is_stacked: bool = True,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.layer_num = layer_num
    self.activation = advanced_activations.get(activation)
    self.is_seq = is_seq
    self.is_stacked = is_stacked

  def call(self, inputs: Any) -> tf.Tensor:
    user, item = inputs
    dim = layer_utils.check_dim(user.shape[-1])
    width = layer_utils.check_dim(item.shape[-1])
    assert width == self.layer_num * dim * (
      dim + 1
    ), f"item has {width} columns, want {self.layer_num} * {dim} * ({dim} + 1)"
    user_batch, item_batch = user.shape[0], item.shape[0]
    assert (
      user_batch is None or item_batch is None or user_batch == item_batch
    ), f"the batch of user is {user_batch}, that of item {item_batch}"
    x = user
    if not self.is_stacked:
      x = tf.expand_dims(x, 1)
    if not self.is_seq:
      x = tf.expand_dims(x, 2)
    # [B, F, T, D] from here on.
    for layer in tf.split(item, self.layer_num, axis=1):
      weight, bias = tf.split(layer, [dim * dim, dim], axis=1)
      x = tf.einsum("bftd,bde->bfte", x, tf.reshape(weight, [-1, dim, dim]))
      x = self._activate(x + tf.reshape(bias, [-1, 1, 1, dim]))
    x = tf.reduce_sum(x, axis=2) if self.is_seq else tf.squeeze(x, axis=2)
    return x if self.is_stacked else tf.squeeze(x, axis=1)

  def _activate(self, x: tf.Tensor) -> tf.Tensor:
    return x if self.activation is None else self.activation(x)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "layer_num": self.layer_num,
      "activation": advanced_activations.serialize(self.activation),
      "is_seq": self.is_seq,
      "is_stacked": self.is_stacked,
    }


@utils.with_params
class DCN(keras.layers.Layer):
  """Cross layers `x <- x0 * (x W + b) + x`, `[B, ..., D]` to the same shape.

  Differences from ByteDance's Monolith: the gates of `mixed` experts are a softmax over the
  experts, not over a single number, which is always 1. Experts are averaged, not added up.

  Args:
    layer_num: number of layers.
    dcn_type: `vector`: W is `[D, 1]`; `matrix`: `[D, D]`; `mixed`: experts of low rank.
    initializer: initializer of the kernels, `GlorotNormal` by default.
    regularizer: regularizer of the kernels.
    num_experts: number of experts of `mixed`.
    low_rank: rank of the kernels of `mixed`.
    allow_kernel_norm: normalise the columns of kernels, with a trainable norm.
    use_dropout: drop elements after each layer, in training.
    keep_prob: share that is kept then.
    mode: the Estimator's mode.
  """

  def __init__(
    self,
    layer_num: int = 1,
    dcn_type: str = "matrix",
    initializer: Any = None,
    regularizer: Any = None,
    num_experts: int = 1,
    low_rank: int = 0,
    allow_kernel_norm: bool = False,
    use_dropout: bool = False,
    keep_prob: float = 0.95,
    mode: str = _TRAIN,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.layer_num = layer_num
    self.dcn_type = dcn_type
    self.initializer = keras.initializers.get(initializer or "glorot_normal")
    self.regularizer = keras.regularizers.get(regularizer)
    self.num_experts = num_experts
    self.low_rank = low_rank
    self.allow_kernel_norm = allow_kernel_norm
    self.use_dropout = use_dropout
    self.keep_prob = keep_prob
    self.mode = mode

  def build(self, input_shape: Any) -> None:
    dim = layer_utils.check_dim(tf.TensorShape(input_shape)[-1])
    rank = self.low_rank
    self._kernels: list[Any] = []
    self._biases = []
    for i in range(self.layer_num):
      if self.dcn_type == layer_utils.DCNType.Mixed:
        self._kernels.append(
          [
            {
              "U": self._add_kernel(f"U_{i}_{j}", [dim, rank]),
              "V": self._add_kernel(f"V_{i}_{j}", [dim, rank]),
              "C": self._add_kernel(f"C_{i}_{j}", [rank, rank]),
              "G": self._add_kernel(f"G_{i}_{j}", [dim, 1]),
            }
            for j in range(self.num_experts)
          ]
        )
      else:
        columns = 1 if self.dcn_type == layer_utils.DCNType.Vector else dim
        self._kernels.append(self._add_kernel(f"kernel_{i}", [dim, columns]))
      self._biases.append(
        self.add_weight(f"bias_{i}", shape=[1, dim], initializer="zeros", trainable=True)
      )
    super().build(input_shape)

  def _add_kernel(self, name: str, shape: list[int]) -> list[tf.Variable]:
    """Returns a kernel and, if it is normalised, its trainable norm."""
    initial = layer_utils.new_initializer(self.initializer)(shape, dtype=tf.float32)
    kernel = self.add_weight(
      name,
      shape=shape,
      initializer=lambda *args, **kwargs: initial,
      regularizer=self.regularizer,
      trainable=True,
    )
    if not self.allow_kernel_norm:
      return [kernel]
    norm = self.add_weight(
      f"{name}/trainable_norm",
      shape=shape[1:],
      initializer=lambda *args, **kwargs: tf.norm(initial, axis=0),
      trainable=True,
    )
    return [kernel, norm]

  def _multiply(
    self, x: tf.Tensor, kernel: list[tf.Variable], transpose: bool = False
  ) -> tf.Tensor:
    """Returns x times the effective kernel."""
    matrix, *norm = kernel
    if norm:
      matrix = tf.nn.l2_normalize(matrix, axis=0, epsilon=1e-6) * norm[0]
    return tf.tensordot(x, tf.transpose(matrix) if transpose else matrix, 1)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    x0 = x = inputs
    for kernel, bias in zip(self._kernels, self._biases):
      if self.dcn_type == layer_utils.DCNType.Vector:
        x = x0 * self._multiply(x, kernel) + bias + x
      elif self.dcn_type == layer_utils.DCNType.Matrix:
        x = x0 * (self._multiply(x, kernel) + bias) + x
      else:
        x = self._mix(x0, x, kernel, bias) + x
      if self.use_dropout and self.mode == _TRAIN:
        x = tf.nn.dropout(x, rate=1 - self.keep_prob)
    return x

  def _mix(self, x0: tf.Tensor, x: tf.Tensor, experts: Any, bias: tf.Tensor) -> tf.Tensor:
    gates = [self._multiply(x, expert["G"]) for expert in experts]
    gates = tf.nn.softmax(tf.concat(gates, axis=-1), axis=-1)
    outputs = []
    for j, expert in enumerate(experts):
      hidden = tf.tanh(self._multiply(x, expert["V"]))
      hidden = tf.tanh(self._multiply(hidden, expert["C"]))
      output = x0 * (self._multiply(hidden, expert["U"], transpose=True) + bias)
      outputs.append(output * gates[..., j : j + 1])
    return tf.add_n(outputs)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "layer_num": self.layer_num,
      "dcn_type": self.dcn_type,
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "num_experts": self.num_experts,
      "low_rank": self.low_rank,
      "allow_kernel_norm": self.allow_kernel_norm,
      "use_dropout": self.use_dropout,
      "keep_prob": self.keep_prob,
      "mode": self.mode,
    }


@utils.with_params
class CIN(keras.layers.Layer):
  """Compressed interaction network, `[B, F, E]` to `[B, sum of hidden_uints]`.

  Args:
    hidden_uints: number of feature maps of each level.
    activation: activation of all levels but the last.
    initializer: initializer of the kernels.
    regularizer: regularizer of the kernels.
  """

  def __init__(
    self,
    hidden_uints: Sequence[int],
    activation: Any = None,
    initializer: Any = "glorot_uniform",
    regularizer: Any = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.hidden_uints = list(hidden_uints)
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    last = len(self.hidden_uints) - 1
    self._convolutions = [
      keras.layers.Conv1D(
        units,
        kernel_size=1,
        activation=None if i == last else self.activation,
        kernel_initializer=layer_utils.new_initializer(self.initializer),
        kernel_regularizer=self.regularizer,
        name="conv1d" if i == 0 else f"conv1d_{i}",
      )
      for i, units in enumerate(self.hidden_uints)
    ]
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    num_feature, emb_size = inputs.shape.as_list()[1:]
    x0 = x = tf.transpose(inputs, [0, 2, 1])  # [B, E, F]
    pooled = []
    for convolution in self._convolutions:
      maps = layer_utils.check_dim(x.shape[-1])
      outer = tf.expand_dims(x, 3) * tf.expand_dims(x0, 2)
      x = convolution(tf.reshape(outer, [-1, emb_size, maps * num_feature]))
      pooled.append(tf.reduce_sum(x, axis=1))
    return tf.concat(pooled, axis=1)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "hidden_uints": self.hidden_uints,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }
