"""Tensors that travel together: to a parameter server and back, as one tensor each way.

Every tensor that crosses from one process to another costs a call of its own, and each of its
bytes several copies. A parcel is one tensor, and where both processes are on one machine and belong
to the same user, a large one takes its data through memory that they share. With
`MONOLITH_SHARED_MEMORY=0` in the environment of the sender everything goes by the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops


def pack(tensors: Sequence[tf.Tensor], name: str | None = None) -> tf.Tensor:
  """Returns tensors as one, to be unpacked once, perhaps in another process.

  Args:
    tensors: of types whose values are plain bytes.
    name: what to call the op.
  """
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
