"""Ragged ids of many features as one tensor, to bring them to a GPU in one copy.

ids  a: [[7, 9], [7]]  b: [[4], []]   ->   packed |7 9 7 ..|4 ..|0 2 3 ..|0 1 1 ..|
                                                    ids of a, b    row splits of a, b
                                           places [[0 3] [8 1] [16 3] [24 3]]

Features whose row splits are equal share them. The input pipeline packs them, ahead of the step;
the step unpacks them where the tables are. A copy for each feature's ids and another for its row
splits would take longer than the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops

# Keys of an element's dict, in place of its ragged features.
PACKED_KEY = "monolith_packed_ids"
PLACES_KEY = "monolith_packed_places"
# Key of a bool for each feature: whether each of its rows has one id.
ONE_EACH_KEY = "monolith_packed_one_each"


@tf.autograph.experimental.do_not_convert
def pack(features: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
  """Replaces ragged features of a batch by three tensors.

  Args:
    features: the batch.
    names: which of them to pack, each a `tf.RaggedTensor` of int64 with one ragged dimension.

  Returns:
    The others, and the three tensors.
  """
  ragged = [features[name] for name in names]
  ids = [one.values for one in ragged]
  row_splits = [tf.cast(one.row_splits, tf.int64) for one in ragged]
  packed, places = gen_monolith_ops.monolith_pack_ids(ids + row_splits)
  has_one_each = gen_monolith_ops.monolith_has_one_each(ids, row_splits)
  others = {name: value for name, value in features.items() if name not in set(names)}
  return {**others, PACKED_KEY: packed, PLACES_KEY: places, ONE_EACH_KEY: has_one_each}


def static_rows(spec: Any, names: Sequence[str]) -> dict[str, int | None] | None:
  """Returns the batch size of each feature, `None` where it is not static.

  Args:
    spec: the `element_spec` of a dataset.
    names: features.

  Returns:
    `None` if `pack` cannot pack these features.
  """
  if not isinstance(spec, Mapping):
    return None
  rows = {}
  for name in names:
    one = spec.get(name)
    if not (
      isinstance(one, tf.RaggedTensorSpec)
      and (one.dtype, one.ragged_rank, one.shape.rank) == (tf.int64, 1, 2)
    ):
      return None
    rows[name] = one.shape[0]
  return rows


def unpack(
  features: Mapping[str, Any], rows: Mapping[str, int | None], device: str
) -> tuple[dict[str, tf.RaggedTensor], dict[str, Any]]:
  """Undoes `pack`, on a device.

  Args:
    features: what `pack` returned.
    rows: what `static_rows` returned; its order is that of the names that `pack` had.
    device: where the ids are to be.

  Returns:
    The ragged features, and those of the others that are not ragged, with `ONE_EACH_KEY`.
  """
  others = {
    name: value for name, value in features.items() if not isinstance(value, tf.RaggedTensor)
  }
  packed, places = others.pop(PACKED_KEY), others.pop(PLACES_KEY)
  with tf.device(device):
    vectors = gen_monolith_ops.monolith_unpack_ids(packed, places, N=2 * len(rows))
  ragged = {}
  for name, values, row_splits in zip(rows, vectors, vectors[len(rows) :]):
    num_rows = rows[name]
    row_splits.set_shape([None if num_rows is None else num_rows + 1])
    ragged[name] = tf.RaggedTensor.from_row_splits(values, row_splits, validate=False)
  return ragged, others


def take_has_one_each(
  features: dict[str, tf.Tensor], names: Sequence[str]
) -> dict[str, tf.Tensor] | None:
  """Removes what tells whether each row has one id.

  Args:
    features: the others that `unpack` returned.
    names: what `pack` had.

  Returns:
    Feature name -> bool scalar on the host; `None` where nothing was packed.
  """
  flags = features.pop(ONE_EACH_KEY, None)
  if flags is None:
    return None
  with tf.device("/device:CPU:0"):
    return dict(zip(names, tf.unstack(flags, len(names))))
