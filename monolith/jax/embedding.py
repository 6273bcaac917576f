"""`Embedding`: a table whose lookups `jax.grad` can follow back to it."""

from __future__ import annotations

import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from monolith import table as tables
from monolith.jax import ids as id_types
from monolith.table import optimizers

# Lets `jax.vmap` ask once for all ids. JAX has renamed the argument.
_ANY_SHAPE: dict[str, Any] = (
  {"vmap_method": "broadcast_all"}
  if "vmap_method" in inspect.signature(jax.pure_callback).parameters
  else {"vectorized": True}
)


class Embedding:
  """Ids of any shape to vectors: rows of a table, which come as ids do.

  Every method works outside `jax.jit` and inside it, where Python is called back: a lookup is a
  `pure_callback`, an update an ordered `io_callback`. Of one jitted function after another,
  updates happen in the order of the calls, and a function that updates waits for the one before.
  One that does not may run beside an update that is under way: `jax.effects_barrier()` waits.

  Args:
    dim: length of a row's vector.
    optimizer: an `Optimizer` of `monolith.table`, or its name. By default Adam.
    initializer: what a new row begins with: `"uniform"` (from -0.05 to 0.05), `"zeros"`, a number,
      or a pair of the least and the largest value.
    options: `learning_rate`, `expire_after`, `admit_after`, `admit_capacity`, `name`, `seed` and
      `initial_capacity`, as `monolith.table.HashTable` has them.

  Attributes:
    table: the `monolith.table.HashTable`.

  Raises:
    ValueError, TypeError: an argument is not as described.
  """

  def __init__(
    self,
    dim: int,
    optimizer: optimizers.OptimizerLike | None = None,
    initializer: optimizers.InitializerLike = "uniform",
    **options: Any,
  ):
    self.table = tables.HashTable(dim, optimizer, initializer, **options)
    self._embed = jax.custom_vjp(lambda rows, ids: self._look_up(ids))
    self._embed.defvjp(self._look_up_and_note, self._step)

  @property
  def dim(self) -> int:
    """The length of a vector."""
    return self.table.dim

  def init(self) -> jax.Array:
    """Returns the parameter that stands for the rows, float32 `[0, dim]`.

    It belongs to what a loss is differentiated by: there, the gradients of vectors leave for the
    table, and an empty gradient arrives. Optimizers of JAX have nothing to do with it.
    """
    return jnp.zeros([0, self.dim], jnp.float32)

  def __call__(self, rows: jax.Array, ids: Any) -> jax.Array:
    """Returns the vectors of ids, such that their gradients step the table.

    Under `jax.vmap` there is no way back: ids may have any shape instead.

    Args:
      rows: what `init` returned, out of the parameters that the loss is differentiated by.
      ids: integers of any shape, or `Ids`.

    Returns:
      float32, the shape of `ids` and `[dim]` behind it.

    Raises:
      TypeError, ValueError: `ids` are not ids, or `rows` is something else.
    """
    if rows.shape != (0, self.dim):
      raise ValueError(f"rows has shape {rows.shape}, want {(0, self.dim)}: what init() returns")
    return self._embed(rows, id_types.pack_ids(ids))

  def lookup(self, ids: Any) -> jax.Array:
    """Returns the vectors of ids as constants: float32, `[dim]` behind the shape of `ids`."""
    return jax.lax.stop_gradient(self._look_up(id_types.pack_ids(ids)))

  def update(self, ids: Any, gradients: Any) -> None:
    """Runs the table's optimizer on rows, creating absent ones; equal ids make one step.

    Args:
      ids: integers of any shape, or `Ids`.
      gradients: floats, `dim` for each id.

    Raises:
      TypeError, ValueError: `ids` are not ids, or there is not a gradient of `dim` for each; or
        gradients are not finite, as `monolith.table.HashTable` has it. Inside `jit` that is an
        error of XLA's runtime, when its result or `jax.effects_barrier` is waited for.
    """
    keys = id_types.pack_ids(ids)
    gradients = gradients if isinstance(gradients, jax.Array) else np.asarray(gradients)
    want = (*keys.shape, self.dim)
    if gradients.shape != want:
      raise ValueError(f"gradients has shape {gradients.shape}, want {want}")
    self._update(keys, gradients)

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes all rows with their state, after all updates; returns how many.

    Args:
      path: the files are `<path>-00000-of-00001` and so on, those of all tables of Monolith.
    """
    jax.effects_barrier()
    return self.table.save(path)

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by what `save` wrote, here or in another framework; returns how many."""
    jax.effects_barrier()
    return self.table.load(path)

  def __len__(self) -> int:
    """Returns the number of rows, after all updates."""
    jax.effects_barrier()
    return len(self.table)

  def __bool__(self) -> bool:
    """Returns true: an empty table is a table."""
    return True

  def _look_up(self, ids: id_types.Ids) -> jax.Array:
    if not _is_traced(ids):
      jax.effects_barrier()
      return jnp.asarray(self._rows_of(*ids))
    shape = jax.ShapeDtypeStruct((*ids.shape, self.dim), jnp.float32)
    return jax.pure_callback(self._rows_of, shape, *ids, **_ANY_SHAPE)

  def _look_up_and_note(self, rows: jax.Array, ids: id_types.Ids) -> tuple[jax.Array, Any]:
    vectors = self._look_up(ids)
    return vectors, (ids, vectors.reshape(-1)[:1])

  def _update(self, ids: id_types.Ids, gradients: Any, *after: jax.Array) -> None:
    """Steps rows after whatever `after` comes from; inside `jit` nothing else keeps the order."""
    if not _is_traced((ids, gradients)):
      jax.effects_barrier()
      self._write(*ids, gradients)
    else:
      io_callback(self._write, None, *ids, gradients, *after, ordered=True)

  def _step(self, noted: Any, gradients: jax.Array) -> tuple[jax.Array, None]:
    ids, after = noted
    self._update(ids, gradients, after)
    return self.init(), None

  def _rows_of(self, low: Any, high: Any) -> np.ndarray:
    return self.table.lookup(id_types.unpack_ids(id_types.Ids(low, high)))

  def _write(self, low: Any, high: Any, gradients: Any, *_: Any) -> None:
    self.table.update(id_types.unpack_ids(id_types.Ids(low, high)), np.asarray(gradients))


def _is_traced(values: Any) -> bool:
  return any(isinstance(value, jax.core.Tracer) for value in jax.tree_util.tree_leaves(values))
