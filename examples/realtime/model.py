"""The model of the demo: will this user like this item? It knows user, item, and user x genre."""

from __future__ import annotations

from typing import Any

from monolith.core import hyperparams
from monolith.native_training import entry, graph_estimator, native_model
from monolith.native_training.data import parsers
from monolith.native_training.layers import logit_correction
from monolith.realtime import stream_model
import tensorflow as tf

# Slots of the fids: those of the first three come in samples, the last is made here.
USER_SLOT, ITEM_SLOT, GENRE_SLOT, TASTE_SLOT = 1, 2, 3, 4
_SIGNATURE_BITS = 48
_SIGNATURE_MASK = (1 << _SIGNATURE_BITS) - 1
# An odd number with bits everywhere: users that are numbered in a row land far apart.
_MIXER = 0x9E3779B97F4A7C15 - (1 << 64)
_PREDICT = graph_estimator.ModeKeys.PREDICT
_HEAD = "click"


def cross(users: tf.RaggedTensor, genres: tf.RaggedTensor) -> tf.RaggedTensor:
  """Returns an id for each genre of an example together with its first user.

  Args:
    users: int64 [batch, None].
    genres: int64 [batch, None].
  """
  # An example without a user has no taste.
  first = users[:, :1].to_tensor(default_value=0, shape=[None, 1])[:, 0]
  row_users = tf.gather(first, genres.value_rowids())
  mixed = (row_users * tf.constant(_MIXER, tf.int64)) ^ genres.values
  signatures = tf.bitwise.bitwise_and(
    tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, 17)),
    tf.constant(_SIGNATURE_MASK, tf.int64),
  )
  return genres.with_values(tf.constant(TASTE_SLOT << _SIGNATURE_BITS, tf.int64) | signatures)


class DemoModel(stream_model.StreamModel):
  """Biases of user and item, and the product of the item's vector with the user's tastes."""

  @classmethod
  def params(cls) -> hyperparams.InstantiableParams:
    p = super().params()
    p.define("dim", 8, "Length of a vector.")
    p.define("learning_rate", 0.1, "Of vectors and dense variables.")
    p.define("bias_learning_rate", 0.3, "Of biases.")
    p.metrics.deep_insight_target = _HEAD
    return p

  def parse(self, samples: tf.Tensor) -> dict[str, Any]:
    """Returns `user`, `item`, `taste` and, of training, `label`, `sample_rate` and `req_time`."""
    features = parsers.parse_examples(
      samples,
      ["user", "item", "genre"],
      dense_features=["label"],
      dense_feature_shapes=[1],
      dense_feature_types=[tf.float32],
      extra_features=["sample_rate", "req_time"],
      extra_feature_shapes=[1, 1],
    )
    features["taste"] = cross(features["user"], features["genre"])
    for name in ("label", "sample_rate", "req_time"):
      features[name] = tf.reshape(features[name], [-1])
    return features

  def model_fn(self, features: dict[str, Any], mode: str) -> native_model.EstimatorSpec:
    """Returns the click probability, and in training a loss that corrects for the sampling."""
    optimizer = entry.AdagradOptimizer(
      learning_rate=self.p.learning_rate, initial_accumulator_value=0.1
    )
    names = ("user", "item", "taste")
    for name in names:
      self.create_embedding_feature_column(name)
    biases = self.lookup_embedding_slice(
      names,
      "bias",
      1,
      initializer=entry.ZerosInitializer(),
      # Steps that stay as long as they are: tastes turn, and those of Adagrad are soon too short to
      # follow.
      optimizer=entry.SgdOptimizer(learning_rate=self.p.bias_learning_rate),
      out_type="addn",
    )
    vectors = self.lookup_embedding_slice(
      names,
      "vector",
      self.p.dim,
      initializer=entry.RandomUniformInitializer(-0.05, 0.05),
      optimizer=optimizer,
    )
    user, item, taste = vectors
    bias = tf.compat.v1.get_variable("bias", [1], initializer=tf.zeros_initializer())
    logits = tf.reshape(biases, [-1]) + bias + tf.reduce_sum(item * (user + taste), axis=1)
    predictions = tf.sigmoid(logits, name="predictions")
    dense_optimizer = tf.compat.v1.train.AdagradOptimizer(self.p.learning_rate)
    if mode == _PREDICT:
      return native_model.EstimatorSpec(None, predictions, _HEAD, None, dense_optimizer)
    # Negatives are sampled: among samples, the odds of a click are 1 / sample_rate times the true.
    sampled = logit_correction.LogitCorrection.get_sample_logits(
      logits, tf.clip_by_value(features["sample_rate"], 1e-6, 1.0), sample_bias=False
    )
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=features["label"], logits=sampled)
    # Summed, so that a row's step does not depend on the size of the batch.
    loss = tf.reduce_sum(losses)
    return native_model.EstimatorSpec(features["label"], predictions, _HEAD, loss, dense_optimizer)
