"""Two towers: users and items as vectors whose products say what to retrieve.

Trained with a softmax over the items of the batch, corrected for popularity: Yi et al.,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019. Run
`python examples/two_tower.py`; it prints `recall at 20 0.902, the planted structure allows 0.905`.
"""

from monolith import layers
from monolith.base_model import (
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  RandomUniformInitializer,
)
from monolith.native_training.losses.batch_softmax_loss import batch_softmax_loss
import numpy as np
import tensorflow as tf

from planted import show, to_dataset, train_and_predict

USERS, ITEMS, TOPICS, TOP_K = 500, 400, 20, 20


def draw(seed: int, rows: int) -> dict[str, np.ndarray]:
  """Returns users and the items they have chosen: nine of ten are of the user's one topic."""
  rules = np.random.default_rng(0)  # the same for every draw
  topic_of_user = rules.integers(TOPICS, size=USERS)
  rng = np.random.default_rng(seed)
  user, item = rng.integers(USERS, size=rows), rng.integers(ITEMS, size=rows)
  of_topic = topic_of_user[user] + TOPICS * rng.integers(ITEMS // TOPICS, size=rows)
  return {"user": user, "item": np.where(rng.random(rows) < 0.9, of_topic, item)}


def to_predict() -> dict[str, np.ndarray]:
  """Returns every user and every item, beside one another."""
  rows = np.arange(max(USERS, ITEMS))
  return {"user": rows % USERS, "item": rows % ITEMS}


class TwoTower(MonolithModel):
  def input_fn(self, mode):
    return to_dataset(draw(1, 200_000) if mode == "train" else to_predict())

  def model_fn(self, features, mode):
    for name in ("user", "item"):
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(
      ["user", "item"],
      "vec",
      16,
      initializer=RandomUniformInitializer(-0.1, 0.1),
      optimizer=AdagradOptimizer(0.1),
    )
    user, item = (
      tf.linalg.l2_normalize(layers.MLP([16], name=name)(vector), axis=1)
      for name, vector in zip(("user_tower", "item_tower"), vectors)
    )
    if mode == "infer":
      return EstimatorSpec(None, [user, item], ["user", "item"])
    # All items are equally frequent here, so that there is nothing to correct.
    interval = tf.ones([tf.shape(user)[0]])
    loss = batch_softmax_loss(user, item, interval, r=1.0, temperature=0.1)
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.05)
    score = tf.reduce_sum(user * item, axis=1)
    return EstimatorSpec(tf.ones_like(score), score, "choice", loss, optimizer, False)


def run(steps: int = 390) -> dict[str, tuple[float, float]]:
  """Returns the share of choices among the `TOP_K` items retrieved, and the best possible one."""
  predictions = train_and_predict(TwoTower(), steps)
  users = np.array([row["user"] for row in predictions[:USERS]])
  items = np.array([row["item"] for row in predictions[:ITEMS]])
  top_k = np.argsort(-users @ items.T, axis=1)[:, :TOP_K]  # [users, TOP_K]
  chosen = draw(2, 20_000)
  found = (top_k[chosen["user"]] == chosen["item"][:, None]).any(1).mean()
  # A topic has TOP_K items; one of TOPICS random choices is of it by chance.
  return {f"recall at {TOP_K}": (found, 0.9 + 0.1 / TOPICS)}


if __name__ == "__main__":
  show(run)
