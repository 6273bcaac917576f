"""Compares the in-batch AUC loss with its definition, value and gradient."""

import numpy as np
import tensorflow as tf

from monolith.native_training.losses import inbatch_auc_loss as inbatch_auc_loss_lib
from monolith.native_training.losses.inbatch_auc_loss import inbatch_auc_loss

_LABEL = [1, 0, 0, 1]
_LOGIT = [0.5, -0.2, -0.4, 0.8]


def _numpy_loss(label: np.ndarray, logit: np.ndarray) -> float:
  logit = logit.astype(np.float64)
  positives = logit[label > 0]
  negatives = logit[(label > -10000) & (label <= 0)]
  d = positives[:, None] - negatives[None, :]
  return float(np.sum(-np.logaddexp(0, -d)))


class InbatchAucLossTest(tf.test.TestCase):
  def test_inbatch_auc_loss(self):
    self.assertAllClose(inbatch_auc_loss(_LABEL, _LOGIT), -1.32088408, rtol=1e-6)

  def test_ignored_label(self):
    self.assertAllClose(inbatch_auc_loss([1, 0, -10000, 1], _LOGIT), -0.71644774, rtol=1e-6)

  def test_inbatch_auc_loss_grad(self):
    grad = inbatch_auc_loss_lib.inbatch_auc_loss_ops.inbatch_auc_loss_grad(
      label=_LABEL, logit=_LOGIT, grad=2.0, neg_weight=1.0
    )

    self.assertAllClose(grad, [1.24172545, -1.20150730, -1.04105143, 1.00083328], rtol=1e-6)

  def test_gradient_tape(self):
    logit = tf.constant(_LOGIT)
    with tf.GradientTape() as tape:
      tape.watch(logit)
      loss = inbatch_auc_loss(_LABEL, logit, neg_weight=0.5)

    grad = tape.gradient(loss, logit)

    self.assertAllClose(grad, [0.62086273, -0.30037682, -0.26026286, 0.50041664], rtol=1e-6)
    self.assertAllClose(loss, -1.32088408, rtol=1e-6)

  def test_label_has_no_gradient(self):
    label = tf.constant([1.0, 0.0])
    with tf.GradientTape() as tape:
      tape.watch(label)
      loss = inbatch_auc_loss(label, [1.0, 2.0])

    self.assertIsNone(tape.gradient(loss, label))

  def test_random_batches_against_numpy(self):
    rng = np.random.default_rng(4)
    for size in (1, 2, 255, 256, 257, 1500):
      label = rng.choice([1.0, 0.0, -1.0, -10000.0, 2.0], size=size).astype(np.float32)
      logit = (10 * rng.standard_normal(size)).astype(np.float32)

      self.assertAllClose(inbatch_auc_loss(label, logit), _numpy_loss(label, logit), rtol=1e-5)

  def test_gradient_matches_finite_differences(self):
    rng = np.random.default_rng(5)
    label = rng.choice([1.0, 0.0], size=12).astype(np.float32)
    logit = rng.standard_normal(12).astype(np.float32)

    theoretical, numerical = tf.test.compute_gradient(
      lambda logit: inbatch_auc_loss(label, logit), [logit], delta=1e-2
    )

    self.assertAllClose(theoretical, numerical, atol=1e-2, rtol=1e-2)

  def test_extreme_differences_do_not_overflow(self):
    logit = tf.constant([200.0, -200.0, 1e30])
    with tf.GradientTape() as tape:
      tape.watch(logit)
      loss = inbatch_auc_loss([0.0, 1.0, -10000.0], logit)
    self.assertAllClose(loss, -400.0)
    self.assertAllClose(tape.gradient(loss, logit), [-1.0, 1.0, 0.0])

    with tf.GradientTape() as tape:
      tape.watch(logit)
      loss = inbatch_auc_loss([1.0, 0.0, -10000.0], logit)
    self.assertAllClose(loss, 0.0)
    self.assertAllClose(tape.gradient(loss, logit), [0.0, 0.0, 0.0])

  def test_nan_logit_shows(self):
    self.assertTrue(np.isnan(inbatch_auc_loss([1.0, 0.0], [float("nan"), 0.0])))

  def test_no_pairs(self):
    for label in ([], [1.0, 1.0], [0.0, 0.0], [-10000.0], [float("nan")]):
      logit = tf.ones([len(label)])
      with tf.GradientTape() as tape:
        tape.watch(logit)
        loss = inbatch_auc_loss(label, logit)

      self.assertAllEqual(loss, 0.0)
      self.assertAllEqual(tape.gradient(loss, logit), np.zeros(len(label)))

  def test_two_calls_are_bit_equal(self):
    label = tf.cast(tf.random.uniform([3000]) > 0.7, tf.float32)
    logit = tf.random.normal([3000])

    self.assertAllEqual(inbatch_auc_loss(label, logit), inbatch_auc_loss(label, logit))

  def test_shapes_may_differ_if_sizes_agree(self):
    logit = tf.reshape(tf.constant(_LOGIT), [4, 1])
    with tf.GradientTape() as tape:
      tape.watch(logit)
      loss = inbatch_auc_loss(_LABEL, logit)

    self.assertAllClose(loss, -1.32088408, rtol=1e-6)
    self.assertEqual(tape.gradient(loss, logit).shape, (4, 1))

  def test_graph_mode(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      label = tf.compat.v1.placeholder(tf.float32, [None])
      logit = tf.compat.v1.placeholder(tf.float32, [None])
      loss = inbatch_auc_loss(label, logit)
      (grad,) = tf.gradients(2 * loss, logit)
      feed = {label: _LABEL, logit: _LOGIT}

      self.assertEqual(loss.shape.as_list(), [])
      self.assertAllClose(session.run(loss, feed), -1.32088408, rtol=1e-6)
      self.assertAllClose(
        session.run(grad, feed), [1.24172545, -1.20150730, -1.04105143, 1.00083328], rtol=1e-6
      )

  def test_bad_input(self):
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "the label and logit not match: .* 2 .* 3"
    ):
      inbatch_auc_loss([1.0, 0.0], [1.0, 2.0, 3.0])
    for neg_weight in (0.0, -0.5, 1.5, float("nan")):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "neg_weight"):
        inbatch_auc_loss([1.0, 0.0], [1.0, 2.0], neg_weight)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"grad has shape \[2\]"):
      inbatch_auc_loss_lib.inbatch_auc_loss_ops.inbatch_auc_loss_grad(
        label=[1.0], logit=[1.0], grad=[1.0, 2.0], neg_weight=1.0
      )


if __name__ == "__main__":
  tf.test.main()
