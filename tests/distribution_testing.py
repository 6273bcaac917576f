"""Helps the tests of distribution ops."""

from __future__ import annotations

import tensorflow as tf

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def int64(values) -> tf.Tensor:
  return tf.constant(values, tf.int64)


def ragged(rows) -> tf.RaggedTensor:
  return tf.RaggedTensor.from_row_lengths(
    int64([value for row in rows for value in row]), int64([len(row) for row in rows])
  )


class DistributionTestCase(tf.test.TestCase):
  """Runs tensors in a fresh session on the default graph."""

  def run_tensors(self, tensors):
    with self.session(use_gpu=False) as sess:
      return sess.run(tensors)

  def assert_invalid(self, tensors, *words: str):
    with self.assertRaises(tf.errors.InvalidArgumentError) as caught:
      self.run_tensors(tensors)
    for word in words:
      self.assertIn(word, caught.exception.message)
