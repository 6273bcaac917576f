"""Tests of the softmax over the items of a batch."""

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import batch_softmax_loss

_LOSS = batch_softmax_loss.batch_softmax_loss


class BatchSoftmaxLossTest(tf.test.TestCase):
  def test_batch_softmax_loss(self):
    np.random.seed(87654321)
    query, item = np.random.random([4, 3]), np.random.random([4, 3])
    interval = [np.random.randint(1, 10) for _ in range(4)]
    self.assertEqual(interval, [9, 9, 1, 7])
    self.assertAllClose(_LOSS(query, item, interval, 1.0), 6.593137)

  def test_identity(self):
    eye = tf.eye(2)
    self.assertAllClose(_LOSS(eye, eye, tf.ones([2]), tf.ones([2])), 0.6265233)
    self.assertAllClose(
      _LOSS(eye, eye, tf.constant([0, 2], tf.int64), [1.0, 0.5], temperature=0.5), 0.2722830
    )

  def test_normalize(self):
    query = tf.constant([[3.0, 0.0], [0.0, 5.0]])
    interval = tf.ones([2])
    eye = tf.eye(2)
    self.assertAllClose(_LOSS(query, query, interval, 1.0), _LOSS(eye, eye, interval, 1.0))
    self.assertAllClose(
      _LOSS(query, query, interval, 1.0, normalize=False),
      np.log1p(np.exp(-9.0)) + np.log1p(np.exp(-25.0)),
    )

  def test_low_temperature_does_not_overflow(self):
    self.assertAllClose(_LOSS(tf.eye(2), tf.eye(2), tf.ones([2]), 1.0, temperature=1e-4), 0.0)

  def test_temperature_must_be_positive(self):
    for temperature in (0, -1.0):
      with self.assertRaisesRegex(
        ValueError, f"temperature should be positive, while got {temperature}"
      ):
        _LOSS(tf.eye(2), tf.eye(2), tf.ones([2]), 1.0, temperature=temperature)


if __name__ == "__main__":
  tf.test.main()
