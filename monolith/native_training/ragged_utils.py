"""Row ids of ragged tensors, fast."""

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ops

tf.no_gradient("MonolithFusedValueRowids")


def fused_value_rowids(rt: tf.RaggedTensor) -> tf.Tensor:
  """Returns `rt.value_rowids()` as int64, computed by one op and remembered on `rt`.

    [[], [1], [2, 3]]  ->  [1, 2, 2]

  Args:
    rt: its outermost ragged dimension counts.

  Returns:
    int64 `[number of values]`, the same tensor in every call.

  Raises:
    ValueError: `rt` is not a `tf.RaggedTensor`.
  """
  if not isinstance(rt, tf.RaggedTensor):
    raise ValueError("rt must be RaggedTensor")
  if not hasattr(rt, "monolith_fused_value_rowids"):
    splits = tf.cast(rt.row_splits, tf.int64)
    rt.monolith_fused_value_rowids = ops.monolith_fused_value_rowids(splits)
  return rt.monolith_fused_value_rowids
