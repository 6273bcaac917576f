"""The targets of a model, where hooks that draw its AUC find them."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

# Of the graph: the `Head`s of a model.
HEADS_COLLECTION = "monolith_heads"


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
