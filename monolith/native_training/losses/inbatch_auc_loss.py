"""In-batch AUC loss and its gradient."""

from __future__ import annotations

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as inbatch_auc_loss_ops


def inbatch_auc_loss(label: tf.Tensor, logit: tf.Tensor, neg_weight: float = 1.0) -> tf.Tensor:
  """Returns the log-likelihood that every positive of the batch scores above every negative.

  `sum(log(sigmoid(logit_i - logit_j)))` over all pairs of a positive i and a negative j. It is at
  most 0 and to be maximised: negate it to get something to minimise.

  Args:
    label: float32 or a list; positive if > 0, negative if in (-10000, 0], otherwise ignored.
    logit: float32 or a list, as many elements as `label`.
    neg_weight: in (0, 1], scales the gradient (not the value) of the negatives.

  Returns:
    A float32 scalar. Only `logit` gets a gradient.

  Raises:
    tf.errors.InvalidArgumentError: the sizes differ or `neg_weight` is out of range (`ValueError`
      for sizes that are known where a graph is built).
  """
  label = tf.convert_to_tensor(label, dtype=tf.float32)
  logit = tf.convert_to_tensor(logit, dtype=tf.float32)
  return inbatch_auc_loss_ops.inbatch_auc_loss(label=label, logit=logit, neg_weight=neg_weight)


@tf.RegisterGradient("InbatchAucLoss")
def _inbatch_auc_loss_grad(op: tf.Operation, grad: tf.Tensor) -> tuple[None, tf.Tensor]:
  label, logit = op.inputs
  return None, inbatch_auc_loss_ops.inbatch_auc_loss_grad(
    label=label, logit=logit, grad=grad, neg_weight=op.get_attr("neg_weight")
  )
