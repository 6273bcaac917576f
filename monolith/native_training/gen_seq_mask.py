"""Mask of the valid positions of padded sequences."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ops


def gen_seq_mask(splits: tf.Tensor | tf.RaggedTensor, max_seq_length: int) -> tf.Tensor:
  """Makes a mask whose row i starts with as many ones as row i has values.

    splits [0, 2, 3], max_seq_length 3  ->  [[1, 1, 0], [1, 0, 0]]

  Args:
    splits: int32 or int64 row splits `[B + 1]`, or a `RaggedTensor`, whose row splits are used.
    max_seq_length: width of the mask; longer rows are all ones.

  Returns:
    `[B, max_seq_length]` of the dtype of the splits.

  Raises:
    tf.errors.InvalidArgumentError: `splits` is empty, not a vector, negative or decreasing.
  """
  if isinstance(splits, tf.RaggedTensor):
    splits = splits.row_splits
  return ops.gen_seq_mask(splits=splits, max_seq_length=max_seq_length)
