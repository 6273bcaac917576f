"""The targets of a model, where hooks that draw its AUC find them."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

# The graph's collection of the `Head`s of a model.
HEADS_COLLECTION = "monolith_heads"
# The graph's collection of the `Evaluation` of a model that a cluster evaluates.
EVALUATION_COLLECTION = "monolith_evaluation"


class Head(NamedTuple):
  """One target of a model.

  Attributes:
    name: its name.
    label: 0 or 1 per example.
    prediction: a probability per example.
  """

  name: str
  label: tf.Tensor
  prediction: tf.Tensor


class EvaluatedHead(NamedTuple):
  """A target that an evaluation measures.

  Attributes:
    name: its name.
    label: a number per example, for a classification 0 or 1.
    prediction: a number per example, for a classification a probability.
    is_classification: which it is.
  """

  name: str
  label: tf.Tensor
  prediction: tf.Tensor
  is_classification: bool


class Evaluation(NamedTuple):
  """Holds the metrics of an evaluation.

  Attributes:
    loss: scalar, the mean per example.
    batch_size: scalar.
    heads: the targets with labels.
  """

  loss: tf.Tensor
  batch_size: tf.Tensor
  heads: tuple[EvaluatedHead, ...]
