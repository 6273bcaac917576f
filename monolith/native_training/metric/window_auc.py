"""AUC of examples that are in memory."""

from __future__ import annotations

import numpy as np


def compute_auc(labels: np.ndarray, scores: np.ndarray) -> float:
  """Returns the probability that a positive example scores above a negative one; nan without both.

  Args:
    labels: `[n]`, positive means liked.
    scores: `[n]`; equal scores count half.
  """
  labels = np.asarray(labels) > 0
  scores = np.asarray(scores, np.float64)
  num_positive = int(labels.sum())
  num_negative = len(labels) - num_positive
  if not num_positive or not num_negative:
    return float("nan")
  _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
  last_rank = np.cumsum(counts)
  mean_rank = last_rank - (counts - 1) / 2.0
  rank_sum = mean_rank[inverse][labels].sum()
  return float((rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative))
