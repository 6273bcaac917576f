"""Turns the embeddings of an example's ids into one tensor: sum, mean, or the first N kept apart.

The mean of no ids is 0. `FirstN` never pads beyond N, so one long row costs no memory.
"""

from __future__ import annotations

import abc

import tensorflow as tf

from monolith.native_training import device_utils, distribution_ops, ragged_utils


class Combiner(abc.ABC):
  """Combines the embeddings of each row of ids."""

  def __init__(self, max_seq_length: int):
    self._max_seq_length = max_seq_length

  @property
  def max_seq_length(self) -> int:
    """Positions per row that the result keeps apart; 0 if it pools them."""
    return self._max_seq_length

  @abc.abstractmethod
  def combine(
    self, key: tf.RaggedTensor, embedding: tf.Tensor, name: str | None = None
  ) -> tf.Tensor:
    """Combines the embeddings of each row.

    Args:
      key: ids; only their row structure counts.
      embedding: float [number of ids, dim].
      name: what to call the op or its scope.

    Returns:
      [nrows, dim], or [nrows, max_seq_length, dim].
    """


def _row_ids(key: tf.RaggedTensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns ([number of ids, 1] row of each id, [1] number of rows), both int64."""
  row_ids = tf.cast(ragged_utils.fused_value_rowids(key), tf.int64)
  return tf.expand_dims(row_ids, -1), tf.expand_dims(key.nrows(out_type=tf.int64), 0)


class ReduceSum(Combiner):
  """Sums a row's embeddings."""

  def __init__(self) -> None:
    super().__init__(max_seq_length=0)

  def combine(
    self, key: tf.RaggedTensor, embedding: tf.Tensor, name: str | None = None
  ) -> tf.Tensor:
    row_ids, num_rows = _row_ids(key)
    return distribution_ops.reduce_sum(row_ids, embedding, num_rows, name=name)


class ReduceMean(Combiner):
  """Averages a row's embeddings."""

  def __init__(self) -> None:
    super().__init__(max_seq_length=0)

  def combine(
    self, key: tf.RaggedTensor, embedding: tf.Tensor, name: str | None = None
  ) -> tf.Tensor:
    row_ids, num_rows = _row_ids(key)
    return distribution_ops.reduce_mean(row_ids, embedding, num_rows, name=name)


class FirstN(Combiner):
  """Keeps the first `seq_length` embeddings of a row, padded with zeros."""

  def __init__(self, seq_length: int):
    assert seq_length > 0, "seq_length must be greater than 0"
    super().__init__(max_seq_length=seq_length)

  def combine(
    self, key: tf.RaggedTensor, embedding: tf.Tensor, name: str | None = None
  ) -> tf.Tensor:
    with tf.name_scope(name or "FirstNCombiner"):
      embedding = tf.convert_to_tensor(embedding)
      row_ids = tf.cast(ragged_utils.fused_value_rowids(key), tf.int64)
      row_starts = tf.cast(key.row_splits, tf.int64)
      positions = tf.range(tf.size(row_ids, out_type=tf.int64)) - tf.gather(row_starts, row_ids)
      # Vectors beyond N share one more place, which is cut off: a gather would turn the gradient
      # into IndexedSlices.
      places = tf.stack([row_ids, tf.minimum(positions, self.max_seq_length)], axis=1)
      dim = embedding.shape.as_list()[-1] if embedding.shape.rank is not None else None
      shape = tf.stack(
        [
          key.nrows(out_type=tf.int64),
          tf.constant(self.max_seq_length + 1, tf.int64),
          tf.shape(embedding, out_type=tf.int64)[1],
        ]
      )
      with device_utils.maybe_device_if_allowed("/device:GPU:0"):
        combined = tf.scatter_nd(places, embedding, shape)[:, : self.max_seq_length]
      combined.set_shape([None, self.max_seq_length, dim])
      return combined
