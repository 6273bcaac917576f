"""Runs steps after parsing, and keeps ragged tensors as dicts of plain tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.ragged import row_partition

Features = dict[str, Any]

_extra_parse_steps: collections.deque[Callable[[Features], Features]] = collections.deque()


def add_extra_parse_step(parse_fn: Callable[[Features], Features]) -> None:
  """Queues a function of the features for the next `advanced_parse`."""
  _extra_parse_steps.append(parse_fn)


def advanced_parse(features: Features) -> Features:
  """Applies the queued steps, first in first out, and forgets them.

  Args:
    features: what a parser returned.

  Returns:
    The features after the last step; `features` itself when no step is queued.
  """
  while _extra_parse_steps:
    features = _extra_parse_steps.popleft()(features)
  return features


class RaggedEncodingHelper:
  """Takes ragged tensors apart, with the encodings that are costly to compute, and together."""

  @staticmethod
  def expand(
    name_to_ragged_ids: Mapping[str, Any],
    with_precomputed_nrows: bool = True,
    with_precomputed_value_rowids: bool = False,
  ) -> Features:
    """Turns every ragged tensor into a dict of tensors.

    Args:
      name_to_ragged_ids: features; those that are not ragged stay as they are.
      with_precomputed_nrows: compute `nrows`.
      with_precomputed_value_rowids: compute `value_rowids`.

    Returns:
      name -> `{"values", "row_splits", "nrows", "value_rowids"}`, of the last two `None` what is
      not asked for.
    """

    def expand_one(ragged: tf.RaggedTensor) -> Features:
      return {
        "values": ragged.values,
        "row_splits": ragged.row_splits,
        "nrows": ragged.nrows() if with_precomputed_nrows else None,
        "value_rowids": ragged.value_rowids() if with_precomputed_value_rowids else None,
      }

    return {
      name: expand_one(value) if isinstance(value, tf.RaggedTensor) else value
      for name, value in name_to_ragged_ids.items()
    }

  @staticmethod
  def contract(name_to_ragged_ids: Mapping[str, Any]) -> Features:
    """Inverts `expand`; the ragged tensors keep the encodings that are in the dicts."""

    def contract_one(parts: Mapping[str, tf.Tensor | None]) -> tf.RaggedTensor:
      partition = row_partition.RowPartition(
        row_splits=parts["row_splits"],
        nrows=parts.get("nrows"),
        value_rowids=parts.get("value_rowids"),
        internal=row_partition._row_partition_factory_key,
      )
      # The public constructors cannot take over encodings that exist already.
      return tf.RaggedTensor(values=parts["values"], row_partition=partition, internal=True)

    return {
      name: contract_one(value)
      if isinstance(value, Mapping) and "values" in value and "row_splits" in value
      else value
      for name, value in name_to_ragged_ids.items()
    }
