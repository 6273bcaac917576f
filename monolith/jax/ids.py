"""int64 ids where JAX has 32 bits.

Unless `jax_enable_x64` is on, JAX keeps the low half of an int64 and says nothing, so that two ids
might share a row. `Ids` has both halves.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import jax
import jax.numpy as jnp
import numpy as np

from monolith.table import arrays

Array = Union[np.ndarray, jax.Array]
_config: Any = jax.config  # its types do not have its settings


class Ids(NamedTuple):
  """int64 ids, a pytree of two arrays of one shape; `pack_ids` makes them.

  Attributes:
    low: the lower 32 bits, uint32.
    high: the upper ones, int32.
  """

  low: Array
  high: Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the ids."""
    return self.low.shape


def pack_ids(ids: Any) -> Ids:
  """Returns ids such that they may be arguments of a jitted function, whatever its precision.

  Args:
    ids: integers of any shape: an array, a list, or `Ids`, which come back as they are. An array of
      JAX has 64 bits, or 16 at most: of others JAX may have cut off the upper half.

  Raises:
    TypeError: they are no integers, or JAX may have cut them off.
    ValueError: a Python integer does not fit into int64.
  """
  if isinstance(ids, Ids):
    return ids
  if not isinstance(ids, jax.Array):
    keys = arrays.as_ids(ids)
    halves = keys.reshape(-1).view(np.uint32).reshape(*keys.shape, 2)
    return Ids(halves[..., 0], halves[..., 1].view(np.int32))
  if ids.dtype in (jnp.int32, jnp.uint32) and not _config.jax_enable_x64:
    raise TypeError(
      f"ids have dtype {ids.dtype}, to which JAX cuts 64 bits without a word: make them with "
      "monolith.jax.pack_ids from a NumPy array, or switch jax_enable_x64 on"
    )
  if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype == jnp.uint64:
    raise TypeError(f"ids have dtype {ids.dtype}, want int64, or smaller integers")
  if ids.dtype != jnp.int64:
    # At most 32 bits: the high half holds the sign alone.
    return Ids(ids.astype(jnp.int32).astype(jnp.uint32), -(ids < 0).astype(jnp.int32))
  return Ids((ids & 0xFFFFFFFF).astype(jnp.uint32), (ids >> 32).astype(jnp.int32))


def unpack_ids(ids: Ids) -> np.ndarray:
  """Returns what `pack_ids` was given, int64."""
  halves = np.empty((*ids.shape, 2), np.uint32)
  halves[..., 0] = ids.low
  halves[..., 1] = np.asarray(ids.high).view(np.uint32)
  return halves.view(np.int64)[..., 0]
