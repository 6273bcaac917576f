"""DIN: the items a user has seen count as much as they resemble the item at hand.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018. Run
`python examples/din.py`; it prints `AUC 0.878, the planted structure allows 0.878`.
"""

from monolith import layers
from monolith.base_model import (
  AdagradOptimizer,
  EstimatorSpec,
  MonolithModel,
  RandomUniformInitializer,
  get_sigmoid_loss_and_pred,
)
import numpy as np
import tensorflow as tf

from planted import NO_ID, auc, draw_labels, show, to_dataset, train_and_predict

ITEMS, TOPICS, HISTORY, DIM = 100, 6, 6, 8


def draw(seed: int, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns columns, and the logits that their labels were drawn with."""
  topic_of = np.random.default_rng(0).integers(TOPICS, size=ITEMS)  # nobody tells the model
  rng = np.random.default_rng(seed)
  item, seen = rng.integers(ITEMS, size=rows), rng.integers(ITEMS, size=[rows, HISTORY])
  length = rng.integers(1, HISTORY + 1, size=rows)
  is_seen = np.arange(HISTORY) < length[:, None]
  same_topic = (topic_of[seen] == topic_of[item][:, None]) & is_seen
  logits = np.where(same_topic.any(1), 2.0, -2.0)
  columns = {"item": item, "seen": np.where(is_seen, seen, NO_ID)}
  columns["length"] = length.astype(np.float32)
  return {**columns, "label": draw_labels(rng, logits)}, logits


class Din(MonolithModel):
  def input_fn(self, mode):
    return to_dataset(draw(1, 200_000)[0] if mode == "train" else draw(2, 20_000)[0])

  def model_fn(self, features, mode):
    self.create_embedding_feature_column("item")
    # The rows of `item`, one vector for each of the first ids instead of their sum.
    self.create_embedding_feature_column("seen", max_seq_length=HISTORY, shared_name="item")
    item, seen = self.lookup_embedding_slice(
      ["item", "seen"],
      "vec",
      DIM,
      initializer=RandomUniformInitializer(-0.5, 0.5),
      optimizer=AdagradOptimizer(0.1),
    )  # [batch, DIM], [batch, HISTORY, DIM]
    is_seen = tf.sequence_mask(features["length"], HISTORY, tf.float32)
    interest = layers.DIN([32, 1], activation="relu", name="attention")((item, seen), mask=is_seen)
    inputs = tf.concat([item, interest, item * interest], axis=1)
    logits = layers.MLP([32, 1], name="tower")(inputs)
    label = None if mode == "infer" else features["label"]
    loss, pred = get_sigmoid_loss_and_pred("click", logits, label, None, mode=mode)
    return EstimatorSpec(label, pred, "click", loss, tf.compat.v1.train.AdamOptimizer(0.005))


def run(steps: int = 390) -> dict[str, tuple[float, float]]:
  """Returns the AUC that is reached, and the one that is possible."""
  scores = train_and_predict(Din(), steps)
  columns, logits = draw(2, 20_000)
  return {"AUC": (auc(columns["label"], np.array(scores)), auc(columns["label"], logits))}


if __name__ == "__main__":
  show(run)
