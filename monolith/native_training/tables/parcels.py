"""Tensors that travel together: to a parameter server and back, as one tensor each way.

Every tensor that crosses from one process to another costs a call of its own, and each of its
bytes several copies. A parcel is one tensor, and where both processes are on one machine and belong
to the same user, a large one takes its data through memory that they share. Ops that know how to
write their results there do, so that nothing is copied. With `MONOLITH_SHARED_MEMORY=0` in the
environment of the sender everything goes by the network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from monolith.native_training.runtime.ops import gen_monolith_ops

# Tells kernels, which allocate their outputs.
_SHARED_ATTRIBUTE = "_monolith_shared"
_CAN_SHARE = (
  "MonolithMultiHashTableLookup",
  "MonolithMultiHashTableLookupPooled",
  "MonolithSumRows",
)


def may_share_memory() -> bool:
  """Returns whether the environment of this process allows it."""
  return os.environ.get("MONOLITH_SHARED_MEMORY") != "0"


def pack(tensors: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
  """Returns tensors as one, to be unpacked once, perhaps in another process.

  Args:
    tensors: of types whose values are plain bytes.
    name: what to call the op.
  """
  for tensor in tensors:
    if tensor.op.type in _CAN_SHARE:
      tensor.op._set_attr(_SHARED_ATTRIBUTE, attr_value_pb2.AttrValue(b=True))
  return gen_monolith_ops.monolith_pack_parcel(list(tensors), name=name)


def unpack(
  parcel: tf.Tensor, like: Sequence[tf.Tensor], name: str | None = None
) -> list[tf.Tensor]:
  """Returns the tensors of a parcel, without copying them.

  Args:
    parcel: what `pack` returned.
    like: tensors of the same types and static shapes, in the order in which they were packed.
    name: what to call the op.
  """
  return list(
    gen_monolith_ops.monolith_unpack_parcel(
      parcel,
      T=[tensor.dtype for tensor in like],
      shapes=[tensor.shape for tensor in like],
      name=name,
    )
  )
