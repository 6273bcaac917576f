"""KerasRS on our tables: retrieval of items for users, then ranking of lists, in Keras 3.

`monolith.keras.layers.Embedding` stands where `keras_rs.layers.DistributedEmbedding` does: users
are any int64, and films are texts, of which nobody has to count how many there are. Run
`python examples/retrieve_and_rank.py` with Keras 3 and the package keras-rs.
"""

from __future__ import annotations

from monolith.keras.layers import Embedding
import keras
import keras_rs
import numpy as np
import tensorflow as tf

USERS, FILMS, TOPICS, TOP_K, LIST = 400, 200, 10, 20, 8
BATCH_SIZE = 500
_USER_IDS = np.random.default_rng(0).integers(2**62, size=USERS)
_FILM_NAMES = np.char.add("film", np.arange(FILMS).astype(str))
# The models are to find out that a user chooses films of one topic, and likes some of them best.
_TOPIC_OF_USER = np.random.default_rng(1).integers(TOPICS, size=USERS)
_TASTE = np.random.default_rng(2).normal(size=[USERS, 3])
_FLAVOUR = np.random.default_rng(3).normal(size=[FILMS, 3])


def draw_choices(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns numbers of users and of the films they chose: nine of ten are of the user's topic."""
  rng = np.random.default_rng(seed)
  user, film = rng.integers(USERS, size=rows), rng.integers(FILMS, size=rows)
  of_topic = _TOPIC_OF_USER[user] + TOPICS * rng.integers(FILMS // TOPICS, size=rows)
  return user, np.where(rng.random(rows) < 0.9, of_topic, film)


def draw_lists(seed: int, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns users with lists of films, and how much they liked each, from 0 to 2."""
  rng = np.random.default_rng(seed)
  user, films = rng.integers(USERS, size=rows), rng.integers(FILMS, size=[rows, LIST])
  liking = np.einsum("ud,uld->ul", _TASTE[user], _FLAVOUR[films])
  stars = (liking > 0).astype(np.float32) + (liking > 2)
  return {"user": _USER_IDS[user], "films": _FILM_NAMES[films]}, stars.astype(np.float32)


class Retrieval(keras.Model):
  """Two towers, trained with a softmax over the films of the batch."""

  def __init__(self) -> None:
    super().__init__()
    self.user = Embedding(16, name="retrieval_users")
    self.film = Embedding(16, name="retrieval_films")
    self.forget_accidental_hits = keras_rs.layers.RemoveAccidentalHits()
    self.correct = keras_rs.layers.SamplingProbabilityCorrection()

  def call(self, inputs: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the vectors of users and films, float32 `[batch, 16]` each."""
    return self.user(inputs["user"]), self.film(inputs["film"])

  def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    """Returns the loss: the films that others of the batch chose are not this user's."""
    users, films = y_pred
    logits = keras.ops.matmul(users, keras.ops.transpose(films))
    labels = keras.ops.eye(BATCH_SIZE)
    numbers = tf.strings.to_hash_bucket_fast(x["film"], 2**31)
    logits = self.forget_accidental_hits(logits, labels, numbers)
    logits = self.correct(logits, keras.ops.ones_like(logits) / FILMS)
    return keras.ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))


def retrieve(epochs: int = 12) -> tuple[float, float]:
  """Returns the share of choices among the `TOP_K` films retrieved, and the best possible one."""
  user, film = draw_choices(1, 20_000)
  batch = {"user": tf.constant(_USER_IDS[user]), "film": tf.constant(_FILM_NAMES[film])}
  data = tf.data.Dataset.from_tensor_slices((batch, film))
  model = Retrieval()
  model.compile(keras.optimizers.Adam(0.02))
  model.fit(data.batch(BATCH_SIZE, drop_remainder=True), epochs=epochs, verbose=0)

  # Numbers of films: KerasRS keeps the identifiers of candidates as int32.
  find = keras_rs.layers.BruteForceRetrieval(model.film(tf.constant(_FILM_NAMES)), k=TOP_K)
  chosen_by, chosen = draw_choices(2, 5_000)
  _, found = find(model.user(tf.constant(_USER_IDS[chosen_by])))
  hits = (keras.ops.convert_to_numpy(found) == chosen[:, None]).any(axis=1)
  return float(hits.mean()), 0.9 + 0.1 * TOP_K / FILMS


def rank(epochs: int = 12) -> tuple[float, float]:
  """Returns NDCG of the five films that are ranked first in unseen lists, and the best one."""
  user = keras.Input([], dtype="int64", name="user")
  films = keras.Input([LIST], dtype="string", name="films")
  vectors = Embedding(8, name="ranking_films")(films)
  wanted = keras.layers.RepeatVector(LIST)(Embedding(8, name="ranking_users")(user))
  crossed = keras_rs.layers.FeatureCross()(keras.layers.Concatenate()([wanted, vectors]))
  product = keras.layers.Multiply()([wanted, vectors])
  units = keras.layers.Dense(16, "relu")(keras.layers.Concatenate()([crossed, product]))
  scores = keras.layers.Reshape([LIST])(keras.layers.Dense(1)(units))
  model = keras.Model({"user": user, "films": films}, scores)
  model.compile(
    keras.optimizers.Adam(0.01),
    keras_rs.losses.PairwiseLogisticLoss(),
    metrics=[keras_rs.metrics.NDCG(k=5, name="ndcg")],
  )

  def batches(seed: int, rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(draw_lists(seed, rows)).batch(BATCH_SIZE)

  model.fit(batches(1, 20_000), epochs=epochs, verbose=0)
  return model.evaluate(batches(2, 2_000), return_dict=True, verbose=0)["ndcg"], 1.0


def run() -> dict[str, tuple[float, float]]:
  """Returns name -> (what was reached, what is possible)."""
  return {f"recall at {TOP_K}": retrieve(), "NDCG at 5": rank()}


if __name__ == "__main__":
  for name, (reached, possible) in run().items():
    print(f"{name} {reached:.3f}, the planted structure allows {possible:.3f}")
