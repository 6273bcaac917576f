"""Layers over sequences of a user's behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils
from monolith.native_training.layers import advanced_activations
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.agru import AGRUCell, dynamic_rnn_with_attention
from monolith.native_training.layers.dense import Dense
from monolith.native_training.layers.mlp import MLP

keras: Any = _tensorflow.import_keras()


@utils.with_params
class DIN(keras.layers.Layer):
  """Deep interest network: attention of a query over keys.

  Takes `(query [B, H], keys [B, T, H])` to `[B, H]`, or to `[B, T, H]` if `mode` is not `sum`.

  Args:
    hidden_units: widths of the MLP that computes the scores; the last is 1.
    activation: activation of that MLP.
    initializer: initializer of that MLP, `GlorotNormal` by default.
    regularizer: regularizer of that MLP.
    mode: `sum` adds the weighted keys up.
    decay: whether scores are divided by the root of H.
  """

  def __init__(
    self,
    hidden_units: Sequence[int],
    activation: Any = None,
    initializer: Any = None,
    regularizer: Any = None,
    mode: str = "sum",
    decay: bool = False,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.hidden_units = list(hidden_units)
    assert self.hidden_units[-1] == 1, f"hidden_units is {hidden_units}, the last one must be 1"
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer or "glorot_normal")
    self.regularizer = keras.regularizers.get(regularizer)
    self.mode = mode
    self.decay = decay
    self._mlp = MLP(
      self.hidden_units,
      activations=self.activation,
      initializers=self.initializer,
      kernel_regularizer=self.regularizer,
      name="compress_tower",
    )

  def call(self, inputs: Any, mask: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the weighted keys.

    Args:
      inputs: query and keys.
      mask: `[B, T]`, less than 1 where there is no key.
    """
    query, keys = inputs
    if isinstance(mask, (list, tuple)):
      # Keras' own masks of the inputs, of which only that of the keys means something.
      mask = mask[-1]
    width = layer_utils.check_dim(query.shape[-1])
    queries = tf.expand_dims(query, 1) * tf.ones_like(keys)
    scores = self._mlp(tf.concat([queries, keys, queries - keys, queries * keys], axis=-1))
    if self.decay:
      scores = scores / (width**0.5)
    if mask is not None:
      is_missing = tf.expand_dims(tf.cast(mask, scores.dtype), 2) < 1
      scores = tf.where(is_missing, tf.zeros_like(scores), scores)
    weighted = scores * keys
    return tf.reduce_sum(weighted, axis=1) if self.mode == "sum" else weighted

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "hidden_units": self.hidden_units,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "mode": self.mode,
      "decay": self.decay,
    }


@utils.with_params
class DIEN(keras.layers.Layer):
  """Deep interest evolution network: `(query [B, H], keys [B, T, E])` to `[B, H]`.

  Args:
    num_units: H.
    att_type: how attention enters the update gate, as in `AGRUCell`.
    activation: activation of both recurrent layers.
    initializer: initializer of the kernels.
    regularizer: regularizer of the kernels.
  """

  def __init__(
    self,
    num_units: int,
    att_type: str = "AGRU",
    activation: Any = "relu",
    initializer: Any = "he_uniform",
    regularizer: Any = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.num_units = num_units
    self.att_type = att_type
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    self._gru = keras.layers.GRU(
      self.num_units,
      activation=self.activation,
      kernel_initializer=layer_utils.new_initializer(self.initializer),
      kernel_regularizer=self.regularizer,
      return_sequences=True,
      name="gru",
    )
    self._cell = AGRUCell(
      self.num_units,
      att_type=self.att_type,
      activation=self.activation,
      initializer=self.initializer,
      regularizer=self.regularizer,
      name="augru_cell",
    )
    self._attention_weight = self.add_weight(
      "attention_weight",
      shape=[self.num_units, self.num_units],
      initializer=layer_utils.new_initializer(self.initializer),
      regularizer=self.regularizer,
      trainable=True,
    )
    super().build(input_shape)

  def call(self, inputs: Any, keys: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the last state.

    Args:
      inputs: the query and the keys, and perhaps a mask `[B, T]` of the keys; or the query alone.
      keys: if they are not among the inputs.
    """
    mask = None
    query = inputs
    if isinstance(inputs, (list, tuple)):
      query, *rest = inputs
      if rest:
        keys = rest[0]
      if len(rest) > 1:
        mask = tf.cast(rest[1], tf.bool)
    outputs = self._gru(keys, mask=mask)
    projected = tf.matmul(query, self._attention_weight, transpose_b=True)
    logits = tf.einsum("bth,bh->bt", outputs, projected)
    if mask is not None:
      logits = tf.where(mask, logits, tf.fill(tf.shape(logits), logits.dtype.min))
    _, state = dynamic_rnn_with_attention(self._cell, outputs, tf.nn.softmax(logits, axis=1))
    return state

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "num_units": self.num_units,
      "att_type": self.att_type,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }


@utils.with_params
class DMR_U2I(keras.layers.Layer):  # noqa: N801, the published name
  """Deep match to rank: `(item [B, I], user_seq [B, T, U])` to `[B, I]`.

  Args:
    cmp_dim: width of the attention.
    activation: activation of the output.
    initializer: initializer of the kernels.
    regularizer: regularizer of the kernels.
  """

  def __init__(
    self,
    cmp_dim: int,
    activation: Any = "PReLU",
    initializer: Any = "glorot_uniform",
    regularizer: Any = None,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.cmp_dim = cmp_dim
    self.activation = advanced_activations.get(activation)
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)

  def build(self, input_shape: Any) -> None:
    item_shape, seq_shape = (tf.TensorShape(shape) for shape in input_shape)
    _, length, width = seq_shape.as_list()

    def add(name: str, shape: list[int], initializer: Any) -> tf.Variable:
      return self.add_weight(
        name,
        shape=shape,
        initializer=layer_utils.new_initializer(initializer),
        regularizer=self.regularizer,
        trainable=True,
      )

    self._pos_emb = add("pos_emb", [length, self.cmp_dim], self.initializer)
    self._emb_weight = add("emb_weight", [width, self.cmp_dim], self.initializer)
    self._z_weight = add("z_weight", [self.cmp_dim, 1], "ones")
    self._bias = add("bias", [self.cmp_dim], "zeros")
    self._dense = Dense(
      layer_utils.check_dim(item_shape[-1]),
      activation=self.activation,
      kernel_initializer=self.initializer,
      kernel_regularizer=self.regularizer,
      name="dense",
    )
    super().build(input_shape)

  def call(self, inputs: Any) -> tf.Tensor:
    item, user_seq = inputs
    compared = self._pos_emb + tf.tensordot(user_seq, self._emb_weight, 1) + self._bias
    scores = tf.nn.softmax(tf.tensordot(compared, self._z_weight, 1), axis=1)
    merged = tf.reduce_sum(scores * user_seq, axis=1)
    return self._dense(merged) * item

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "cmp_dim": self.cmp_dim,
      "activation": advanced_activations.serialize(self.activation),
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
    }
