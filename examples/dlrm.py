"""DLRM: dense numbers through a tower, then dot products of all pairs of vectors.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
2019. Run `python examples/dlrm.py`; it prints
`AUC 0.820, the planted structure allows 0.823`.
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

from planted import auc, draw_labels, show, to_dataset, train_and_predict

CATEGORIES = ["user", "ad", "site", "device"]
SIZES = [100, 50, 20, 8]
DIM = 8


def draw(seed: int, rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Returns columns, and the logits that their labels were drawn with."""
  rules = np.random.default_rng(0)  # the same for every draw
  vectors = [rules.normal(size=[size, 2]) for size in SIZES]
  weights = rules.normal(size=3)
  rng = np.random.default_rng(seed)
  ids = [rng.integers(size, size=rows) for size in SIZES]
  numbers = rng.normal(size=[rows, 3]).astype(np.float32)
  user, ad, site, device = (v[i] for v, i in zip(vectors, ids))
  logits = (user * ad).sum(1) + 0.5 * (site * device).sum(1) + 0.5 * numbers @ weights
  columns = dict(zip(CATEGORIES, ids), numbers=numbers, label=draw_labels(rng, logits))
  return columns, logits


class Dlrm(MonolithModel):
  def input_fn(self, mode):
    return to_dataset(draw(1, 200_000)[0] if mode == "train" else draw(2, 20_000)[0])

  def model_fn(self, features, mode):
    for name in CATEGORIES:
      self.create_embedding_feature_column(name)
    vectors = self.lookup_embedding_slice(
      CATEGORIES,
      "vec",
      DIM,
      initializer=RandomUniformInitializer(-0.2, 0.2),
      optimizer=AdagradOptimizer(0.3),
    )
    bottom = layers.MLP([16, DIM], name="bottom")(features["numbers"])
    stacked = tf.stack([bottom, *vectors], axis=1)  # [batch, 5, DIM]
    products = tf.matmul(stacked, stacked, transpose_b=True)
    pairs = [products[:, i, j] for i in range(5) for j in range(i)]
    top = tf.concat([bottom, tf.stack(pairs, axis=1)], axis=1)
    logits = layers.MLP([16, 1], name="top")(top)
    label = None if mode == "infer" else features["label"]
    loss, pred = get_sigmoid_loss_and_pred("click", logits, label, None, mode=mode)
    return EstimatorSpec(label, pred, "click", loss, tf.compat.v1.train.AdamOptimizer(0.01))


def run(steps: int = 390) -> dict[str, tuple[float, float]]:
  """Returns the AUC that is reached, and the one that is possible."""
  scores = train_and_predict(Dlrm(), steps)
  columns, logits = draw(2, 20_000)
  return {"AUC": (auc(columns["label"], np.array(scores)), auc(columns["label"], logits))}


if __name__ == "__main__":
  show(run)
