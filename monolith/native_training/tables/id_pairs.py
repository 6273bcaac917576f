"""Ids and what belongs to them, as callers of tables give them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def split_pair(pair: Any) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns (ids, values) of a pair; a set has no order, but ids are integers."""
  first, second = pair
  if not tf.convert_to_tensor(first).dtype.is_integer and isinstance(pair, (set, frozenset)):
    first, second = second, first
  return tf.convert_to_tensor(first, tf.int64), second
