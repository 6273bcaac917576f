"""Tests of the losses and predictions of heads."""

import math

import numpy as np
import tensorflow as tf

from monolith.native_training import graph_estimator
from monolith.native_training.losses import head_losses

_EVAL = graph_estimator.ModeKeys.EVAL
_PREDICT = graph_estimator.ModeKeys.PREDICT
_TRAIN = graph_estimator.ModeKeys.TRAIN


def _cross_entropy(logits, labels):
  """The cross entropy of each example, in the textbook way."""
  probabilities = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
  return -np.log(np.where(np.asarray(labels) > 0, probabilities, 1 - probabilities))


class SigmoidTest(tf.test.TestCase):
  def test_the_loss_is_the_sum(self):
    logits, labels = [1.0, -2.0, 0.5], [1.0, 0.0, 0.0]
    for mode in (_TRAIN, _EVAL):
      loss, pred = head_losses.get_sigmoid_loss_and_pred(
        "ctr", tf.constant(logits), tf.constant(labels), None, mode=mode
      )
      self.assertAllClose(loss, _cross_entropy(logits, labels).sum())
      self.assertAllClose(pred, 1 / (1 + np.exp(-np.array(logits))))

  def test_integer_labels_of_any_shape(self):
    loss, pred = head_losses.get_sigmoid_loss_and_pred(
      "ctr", tf.constant([[1.0], [2.0]]), tf.constant([[1], [0]]), 2
    )
    self.assertAllClose(loss, _cross_entropy([1.0, 2.0], [1, 0]).sum())
    self.assertEqual(pred.shape, [2])

  def test_mask_and_weight_go_together(self):
    logits, labels = [1.0, -2.0, 0.5], [1.0, 0.0, 1.0]
    want = _cross_entropy(logits, labels)
    arguments = ("ctr", tf.constant(logits), tf.constant(labels), None)
    mask = tf.constant([[True], [False], [True]])

    loss, _ = head_losses.get_sigmoid_loss_and_pred(*arguments, mask=mask)
    self.assertAllClose(loss, want[0] + want[2])
    loss, _ = head_losses.get_sigmoid_loss_and_pred(
      *arguments, mask=mask, instance_weight=tf.constant([[2.0], [3.0], [4.0]])
    )
    self.assertAllClose(loss, 2 * want[0] + 4 * want[2])

  def test_a_mask_of_nothing(self):
    loss, _ = head_losses.get_sigmoid_loss_and_pred(
      "ctr", tf.constant([1.0]), tf.constant([1.0]), None, mask=tf.constant([False])
    )
    self.assertAllEqual(loss, 0.0)

  def test_sample_bias(self):
    logits, rate = np.array([1.0, -2.0]), 0.25
    log_sigmoid = -np.log1p(np.exp(-logits))

    loss, pred = head_losses.get_sigmoid_loss_and_pred(
      "ctr",
      tf.constant(logits, tf.float32),
      tf.constant([1.0, 0.0]),
      None,
      rate,
      sample_bias=True,
      predict_before_correction=False,
    )

    biased = log_sigmoid - math.log(rate)
    self.assertAllClose(loss, _cross_entropy(biased, [1, 0]).sum())
    self.assertAllClose(pred, 1 / (1 + np.exp(-biased)))

  def test_clipping_limits_both_ends(self):
    limit = math.log(0.8 / 0.2)
    for logit, label in ((9.0, 0.0), (-9.0, 1.0)):
      loss, pred = head_losses.get_sigmoid_loss_and_pred(
        "ctr", tf.constant([logit]), tf.constant([label]), None, logit_clip_threshold=0.2
      )
      self.assertAllClose(loss, np.log1p(np.exp(limit)), msg=str(logit))
      # The prediction is not clipped.
      self.assertAllClose(pred, [1 / (1 + np.exp(-logit))])

  def test_a_label_that_is_missing_is_named(self):
    for function, arguments in (
      (head_losses.get_sigmoid_loss_and_pred, (None, None)),
      (head_losses.get_softmax_loss_and_pred, (None, _TRAIN)),
    ):
      with self.assertRaisesRegex(ValueError, "label of head 'ctr' is None"):
        function("ctr", tf.constant([[0.0]]), *arguments)

  def test_predicting_needs_no_label(self):
    loss, pred = head_losses.get_sigmoid_loss_and_pred(
      "ctr", tf.constant([0.0]), None, None, 0.1, mode=_PREDICT
    )
    self.assertIsNone(loss)
    self.assertAllClose(pred, [0.5])


class SoftmaxTest(tf.test.TestCase):
  def test_losses_are_not_summed(self):
    logits = tf.constant([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    labels = tf.constant([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]])

    losses, pred = head_losses.get_softmax_loss_and_pred("kind", logits, labels, _TRAIN)

    want = -np.sum(labels.numpy() * np.log(tf.nn.softmax(logits).numpy()), axis=1)
    self.assertAllClose(losses, want)
    self.assertAllEqual(pred, [1, 0])

  def test_names_in_a_graph(self):
    with tf.Graph().as_default():
      loss, pred = head_losses.get_softmax_loss_and_pred(
        "kind", tf.zeros([2, 3]), tf.zeros([2, 3]), _TRAIN
      )
      self.assertStartsWith(loss.op.name, "kind_softmax_loss")
      self.assertEqual(pred.op.name, "kind_softmax_pred")


if __name__ == "__main__":
  tf.test.main()
