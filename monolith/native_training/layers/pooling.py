"""Layers that make one tensor of a list of equally shaped ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import utils

keras: Any = _tensorflow.import_keras()


@utils.with_params
class Pooling(keras.layers.Layer):
  """Base of the layers below."""

  def call(self, vec_list: Sequence[tf.Tensor]) -> tf.Tensor:
    """Pools tensors; a single one is returned as it is.

    Raises:
      TypeError: not a list.
      ValueError: an empty list.
    """
    vectors: Any = list(vec_list) if isinstance(vec_list, tuple) else vec_list
    utils.check_list(vectors, lambda length: length > 0)
    return vectors[0] if len(vectors) == 1 else self.pool(list(vectors))

  def pool(self, vec_list: list[tf.Tensor]) -> tf.Tensor:
    raise NotImplementedError("Abstract method.")


@utils.with_params
class SumPooling(Pooling):
  """The sum."""

  def pool(self, vec_list: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(vec_list)


@utils.with_params
class AvgPooling(Pooling):
  """The mean."""

  def pool(self, vec_list: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(vec_list) / len(vec_list)


@utils.with_params
class MaxPooling(Pooling):
  """The maximum, element by element."""

  def pool(self, vec_list: list[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_max(tf.stack(vec_list), axis=0)
