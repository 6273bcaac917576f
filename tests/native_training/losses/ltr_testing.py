"""Helps the tests of ranking losses."""

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import ltr_losses

LABELS = [[1.0, 0.0, 2.0]]
LOGITS = [[1.0, 2.0, 3.0]]


class LtrTestCase(tf.test.TestCase):
  def evaluate_both(self, fn):
    """Returns the value of `fn()` in eager mode, after checking that a graph gives the same."""
    eager = tf.nest.map_structure(np.asarray, fn())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      graph = session.run(fn())
    tf.nest.map_structure(lambda a, b: self.assertAllClose(a, b, rtol=1e-6), eager, graph)
    return eager

  def loss(self, keys, labels=LABELS, logits=LOGITS, features=None, **kwargs):
    """Returns the value of a loss, a scalar."""
    fn = ltr_losses.make_loss_fn(keys, **kwargs)
    value = self.evaluate_both(lambda: fn(tf.constant(labels), tf.constant(logits), features or {}))
    self.assertEqual(value.shape, ())
    return value
