"""`EstimatorSpec`: what a model function returns."""

from __future__ import annotations

import collections

EstimatorSpec = collections.namedtuple(
  "EstimatorSpec",
  ["label", "pred", "head_name", "loss", "optimizer", "classification"],
  defaults=[None, None, None, True],
)
EstimatorSpec.__doc__ = """Holds what a model function returns, per head or for one head.

Attributes:
  label: the labels; one tensor, or one per head.
  pred: the predictions; one tensor, one per head, or a dict by head name.
  head_name: the heads' names.
  loss: the scalar to minimise; None when predicting.
  optimizer: applies the gradients of dense variables; None when predicting.
  classification: whether each head's metric is AUC, else the mean squared error.
"""
