"""DLRM in PyTorch: features interact by the products of their vectors, beside dense features.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
2019. Ids come from all of int64. Run `python examples/pytorch/dlrm.py`; it prints
`AUC 0.896, the planted structure allows 0.907`.
"""

from __future__ import annotations

import monolith.torch
import numpy as np
import torch

from planted import auc, draw_labels

FEATURES, IDS, DIM, BATCH_SIZE = ("user", "item", "place"), 300, 8, 512


def draw(seed: int, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, np.ndarray]:
  """Returns ids by feature, dense features [rows, 2], and the logits that labels follow."""
  rules = np.random.default_rng(0)  # the same for every draw
  names = rules.integers(-(2**63), 2**63 - 1, IDS)
  taste = {feature: rules.normal(size=[IDS, 4]) for feature in FEATURES}
  rng = np.random.default_rng(seed)
  ranks = {feature: rng.integers(IDS, size=rows) for feature in FEATURES}
  dense = rng.normal(size=[rows, 2])
  user, item, place = (taste[feature][ranks[feature]] for feature in FEATURES)
  logits = (user * item).sum(1) + (item * place).sum(1) + dense[:, 0]
  ids = {feature: torch.from_numpy(names[rank]) for feature, rank in ranks.items()}
  return ids, torch.tensor(dense, dtype=torch.float32), logits


class Dlrm(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.tables = monolith.torch.EmbeddingBagCollection(
      [
        monolith.torch.EmbeddingBagConfig(
          feature, DIM, [feature], optimizer="adagrad", learning_rate=0.05, seed=1
        )
        for feature in FEATURES
      ]
    )
    self.bottom = torch.nn.Sequential(
      torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, DIM)
    )
    pairs = len(FEATURES) * (len(FEATURES) + 1) // 2
    self.top = torch.nn.Sequential(
      torch.nn.Linear(DIM + pairs, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )

  def forward(self, ids: dict[str, torch.Tensor], dense: torch.Tensor) -> torch.Tensor:
    """Returns logits [batch]."""
    bottom = self.bottom(dense)
    vectors = torch.stack([bottom, *self.tables(ids).to_dict().values()], 1)
    products = vectors @ vectors.transpose(1, 2)
    row, column = torch.tril_indices(len(FEATURES) + 1, len(FEATURES) + 1, -1)
    return self.top(torch.cat([bottom, products[:, row, column]], 1))[:, 0]


def run(steps: int = 600) -> dict[str, tuple[float, float]]:
  """Returns the AUC that was reached for unseen examples, and the best possible one."""
  torch.manual_seed(0)
  model = Dlrm()
  adam = torch.optim.Adam(model.parameters(), lr=0.005)
  ids, dense, logits = draw(1, 200_000)
  labels = torch.from_numpy(draw_labels(np.random.default_rng(2), logits))
  for step in range(steps):
    some = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % len(labels)
    adam.zero_grad()
    scores = model({feature: one[some] for feature, one in ids.items()}, dense[some])
    torch.nn.functional.binary_cross_entropy_with_logits(scores, labels[some]).backward()
    adam.step()
  ids, dense, logits = draw(3, 20_000)
  unseen = draw_labels(np.random.default_rng(4), logits)
  with torch.no_grad():
    return {"AUC": (auc(unseen, model(ids, dense).numpy()), auc(unseen, logits))}


if __name__ == "__main__":
  for name, (reached, possible) in run().items():
    print(f"{name} {reached:.3f}, the planted structure allows {possible:.3f}")
