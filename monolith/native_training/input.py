"""Generated examples for the FFM model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def slot_to_key(slot: int) -> str:
  """Returns the feature key of a slot."""
  return f"feature_{slot}"


def generate_ffm_example(vocab_sizes: Sequence[int], length: int = 5, num_labels: int = 1) -> bytes:
  """Returns a random serialized `tf.train.Example` from NumPy's global generator.

  Ids of slot i lie in `[M * i, M * i + vocab_sizes[i])` with M the largest vocabulary.

  Args:
    vocab_sizes: number of ids per slot.
    length: each slot holds 1 to `length` ids.
    num_labels: the label is drawn from `[0, num_labels)`: always 0.0 by default, as seeded data
      expects; pass 2 for labels worth learning.
  """
  largest = max(vocab_sizes)
  feature = {
    "label": tf.train.Feature(
      float_list=tf.train.FloatList(value=[float(np.random.randint(num_labels))])
    )
  }
  for slot, vocab_size in enumerate(vocab_sizes):
    count = np.random.randint(length) + 1
    ids = np.random.randint(largest * slot, largest * slot + vocab_size, size=count)
    feature[slot_to_key(slot)] = tf.train.Feature(int64_list=tf.train.Int64List(value=ids))
  return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
