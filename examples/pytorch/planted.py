"""Data with a planted structure: the best AUC that any model can reach is that of the formula."""

from __future__ import annotations

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
  """Returns how often a positive example has a higher score than a negative one."""
  ranks = np.empty(len(scores))
  ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
  positives = labels.sum()
  return (ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (
    positives * (len(labels) - positives)
  )


def draw_labels(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
  """Returns labels, each 1 with the probability of its logit."""
  return (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
