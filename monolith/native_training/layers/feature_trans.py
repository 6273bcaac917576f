"""Layers that transform features without mixing groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from monolith import _tensorflow
from monolith.core import base_layer
from monolith.native_training import utils
from monolith.native_training.layers import utils as layer_utils
from monolith.native_training.layers.feature_cross import _Merging
from monolith.native_training.layers.mlp import MLP

keras = _tensorflow.import_keras()


@utils.with_params
class AutoInt(_Merging):
  """Self-attention without variables: `X <- softmax(X X^T) X`, `[B, F, E]`, merged.

  Args:
    layer_num: how many times.
    out_type: `concat`, `stack`, or `None` for a list of tensors.
    keep_list: return a single tensor as a list of one.
  """

  def __init__(
    self,
    layer_num: int = 1,
    out_type: str | None = "concat",
    keep_list: bool = False,
    **kwargs: Any,
  ):
    super().__init__(out_type=out_type, keep_list=keep_list, **kwargs)
    self.layer_num = layer_num

  def call(self, inputs: tf.Tensor) -> Any:
    x = inputs
    for _ in range(self.layer_num):
      x = tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True), axis=-1), x)
    return self._merge(x)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), "layer_num": self.layer_num}


@utils.with_params
class iRazor(_Merging):  # noqa: N801, the published name
  """Learns how wide the embedding of each feature has to be; `[B, F, E]`, merged.

  Args:
    nas_space: widths to choose from, growing; the last is E.
    t: temperature of the choice.
    initializer: initializer of the choice's logits, `glorot_uniform` by default.
    regularizer: regularizer of those logits.
    feature_weight: `(1, F)`, price of a column of each feature; adds a layer loss under the name of
      the layer.
    out_type: `concat`, `stack`, or `None` for a list of tensors.
    keep_list: return a single tensor as a list of one.
  """

  def __init__(
    self,
    nas_space: Sequence[int],
    t: float = 0.05,
    initializer: Any = None,
    regularizer: Any = None,
    feature_weight: Any = None,
    out_type: str | None = "concat",
    keep_list: bool = False,
    **kwargs: Any,
  ):
    super().__init__(out_type=out_type, keep_list=keep_list, **kwargs)
    self.nas_space = list(nas_space)
    self.t = t
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)
    self.feature_weight = feature_weight

  def build(self, input_shape: Any) -> None:
    _, num_feature, emb_size = tf.TensorShape(input_shape).as_list()
    assert emb_size == max(
      self.nas_space
    ), f"embeddings have {emb_size} columns, the largest of nas_space is {max(self.nas_space)}"
    rigid = np.zeros([len(self.nas_space), emb_size], np.float32)
    for i in range(1, len(self.nas_space)):
      rigid[i, self.nas_space[i - 1] : self.nas_space[i]] = 1
    self._rigid_mask = rigid
    self._nas_weight = self.add_weight(
      "nas_weight",
      shape=[num_feature, len(self.nas_space)],
      initializer=layer_utils.new_initializer(self.initializer, "glorot_uniform"),
      regularizer=self.regularizer,
      trainable=True,
    )
    super().build(input_shape)

  def call(self, inputs: tf.Tensor) -> Any:
    mask = tf.matmul(tf.nn.softmax(self._nas_weight / self.t, axis=-1), self._rigid_mask)
    if self.feature_weight is not None:
      widths = tf.reduce_sum(mask, axis=1, keepdims=True)
      weight = tf.cast(self.feature_weight, widths.dtype)
      base_layer.add_layer_loss(self.name, tf.reduce_sum(tf.matmul(weight, widths)))
    return self._merge(inputs * mask)

  def get_config(self) -> dict[str, Any]:
    weight = self.feature_weight
    return {
      **super().get_config(),
      "nas_space": self.nas_space,
      "t": self.t,
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "feature_weight": weight.tolist() if isinstance(weight, np.ndarray) else weight,
    }


@utils.with_params
class SeNet(_Merging):
  """Weighs features by what their means say; `[B, F, E]` or F tensors `[B, E_i]`, merged.

  Args:
    num_feature: F.
    cmp_dim: width of the hidden layer; `None`: the weights are the means.
    initializer: initializer of the kernels, `glorot_uniform` by default.
    regularizer: regularizer of the kernels.
    on_gpu: for a list, compute all means with one op.
    out_type: `concat`, `stack`, or `None` for a list of tensors.
    keep_list: return a single tensor as a list of one.
  """

  def __init__(
    self,
    num_feature: int,
    cmp_dim: int | None,
    initializer: Any = None,
    regularizer: Any = None,
    on_gpu: bool = False,
    out_type: str | None = "concat",
    keep_list: bool = False,
    **kwargs: Any,
  ):
    super().__init__(out_type=out_type, keep_list=keep_list, **kwargs)
    self.num_feature = num_feature
    self.cmp_dim = cmp_dim
    self.initializer = keras.initializers.get(initializer)
    self.regularizer = keras.regularizers.get(regularizer)
    self.on_gpu = on_gpu
    self._cmp_tower = None
    if cmp_dim is not None:
      self._cmp_tower = MLP(
        [cmp_dim, num_feature],
        activations=["relu", "sigmoid"],
        initializers=self.initializer,
        kernel_regularizer=self.regularizer,
        name="cmp_tower",
      )

  def call(self, inputs: Any) -> Any:
    if isinstance(inputs, (list, tuple)):
      inputs = list(inputs)
      weights = self._compute_weights(self._list_means(inputs))
      return self._merge(
        [x * w for x, w in zip(inputs, tf.split(weights, self.num_feature, axis=1))]
      )
    weights = self._compute_weights(tf.reduce_mean(inputs, axis=2))
    return self._merge(inputs * tf.expand_dims(weights, 2))

  def _list_means(self, inputs: list[tf.Tensor]) -> tf.Tensor:
    if not self.on_gpu:
      return tf.concat([tf.reduce_mean(x, axis=1, keepdims=True) for x in inputs], axis=1)
    widths = [layer_utils.check_dim(x.shape[1]) for x in inputs]
    segments = np.repeat(np.arange(len(widths)), widths)
    sums = tf.math.segment_sum(tf.transpose(tf.concat(inputs, axis=1)), segments)
    return tf.transpose(sums) / tf.constant(widths, sums.dtype)

  def _compute_weights(self, means: tf.Tensor) -> tf.Tensor:
    means.set_shape([None, self.num_feature])
    return means if self._cmp_tower is None else self._cmp_tower(means)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      "num_feature": self.num_feature,
      "cmp_dim": self.cmp_dim,
      "initializer": layer_utils.serialize_initializer(self.initializer),
      "regularizer": layer_utils.serialize_regularizer(self.regularizer),
      "on_gpu": self.on_gpu,
    }
