"""`Embedding` and `EmbeddingBag`: tables with the calls of `torch.nn`'s modules."""

from __future__ import annotations

import os
from typing import Any

import torch

from monolith.torch import jagged, lookups, pooling, rows

_OPTIONS = frozenset(
  (
    "admit_after",
    "admit_capacity",
    "device",
    "expire_after",
    "initial_capacity",
    "learning_rate",
    "name",
    "process_group",
    "seed",
  )
)


def _check_tensor(ids: Any, what: str) -> None:
  if not isinstance(ids, torch.Tensor):
    raise TypeError(f"{what} is a {type(ids).__name__}, want a tensor of integers")


class _OneTable(torch.nn.Module):
  """The base of modules with one table.

  Attributes:
    table: the `RowTable`.
  """

  def __init__(self, dim: int, optimizer: Any, initializer: Any, **options: Any):
    super().__init__()
    if "embedding_dim" in options or "num_embeddings" in options:
      raise TypeError(
        f"{type(self).__name__}(dim) has no num_embeddings: rows come as ids do. Write "
        f"{type(self).__name__}({options.get('embedding_dim', dim)})"
      )
    if isinstance(optimizer, int) and not isinstance(optimizer, bool):
      raise TypeError(
        f"{type(self).__name__}(dim) has no num_embeddings: rows come as ids do. Write "
        f"{type(self).__name__}({optimizer}) instead of {type(self).__name__}({dim}, {optimizer})"
      )
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
      raise TypeError(
        f"{type(self).__name__} has no argument {unknown[0]!r}; its options are {sorted(_OPTIONS)}"
      )
    self.table = rows.RowTable(dim, optimizer, initializer, **options)

  @property
  def dim(self) -> int:
    """The length of a vector."""
    return self.table.dim

  def __len__(self) -> int:
    """Returns the number of rows of this process."""
    return len(self.table)

  def __bool__(self) -> bool:
    """Returns true: an empty table is a table."""
    return True

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes all rows with their state to `<path>-00000-of-00001` and so on; returns how many."""
    return self.table.save(path)

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by what `save` wrote, here or in TensorFlow; returns how many."""
    return self.table.load(path)


class Embedding(_OneTable):
  """A vector for every int64 id; a row is made when an id's gradient first comes.

  An id without a row has zeros as its vector.

  Args:
    dim: length of a vector.
    optimizer: what steps in `backward()`: a name such as `"adagrad"`, an optimizer of
      `monolith.table` or of `monolith.entry`. `None`: the rows follow the optimizer of PyTorch that
      gets the module's parameters, when it steps.
    initializer: what a new row begins with: `"uniform"`, `"zeros"`, a number, a pair of the least
      and the largest value.
    options: `learning_rate`, `device` (`"cpu"` or `"cuda"`), `expire_after`, `admit_after`,
      `admit_capacity`, `seed`, `initial_capacity`, `process_group` and `name` of
      `monolith.torch.rows.RowTable`.

  Raises:
    ValueError, TypeError: an argument is not as described.
  """

  def __init__(self, dim: int, optimizer: Any = None, initializer: Any = "uniform", **options: Any):
    super().__init__(dim, optimizer, initializer, **options)

  def forward(self, ids: torch.Tensor) -> torch.Tensor:
    """Returns vectors.

    Args:
      ids: integers of any shape.

    Returns:
      float32, the shape of `ids` and `[dim]` behind it, on their device.

    Raises:
      TypeError: `ids` is no tensor of integers.
    """
    _check_tensor(ids, "ids")
    keys = rows.as_ids(ids, ids.device)
    (vectors,) = lookups.look_up([self.table], [keys.reshape(-1)])
    return vectors.reshape(*ids.shape, self.dim)


class EmbeddingBag(_OneTable):
  """The sum, mean or maximum of the vectors of each bag of ids.

  Args:
    dim, optimizer, initializer, options: as `Embedding`.
    mode: `sum`, `mean` or `max`. `torch.nn.EmbeddingBag` has `mean` as its default, too.
    include_last_offset: `offsets` has the end of the last bag, too.

  Raises:
    ValueError, TypeError: an argument is not as described.
  """

  def __init__(
    self,
    dim: int,
    optimizer: Any = None,
    initializer: Any = "uniform",
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    **options: Any,
  ):
    super().__init__(dim, optimizer, initializer, **options)
    self.mode = pooling.check_mode(mode)
    self.include_last_offset = include_last_offset

  def forward(
    self,
    input: torch.Tensor,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
  ) -> torch.Tensor:
    """Returns a vector for each bag.

    Args:
      input: ids `[batch, n]`, one bag in each row; or `[n]`, with `offsets`.
      offsets: where bags begin, `[batch]`; with `include_last_offset` `[batch + 1]`.
      per_sample_weights: a factor for each id, in the shape of `input`; for mode `sum`.

    Returns:
      float32 `[batch, dim]`, on the device of the ids.

    Raises:
      ValueError: shapes do not fit together.
      TypeError: `input` is no tensor of integers.
    """
    _check_tensor(input, "input")
    if input.dim() != (2 if offsets is None else 1):
      raise ValueError(
        f"input has shape {tuple(input.shape)} {'without' if offsets is None else 'with'} offsets, "
        "want [batch, n] without or [n] with them"
      )
    if per_sample_weights is not None and per_sample_weights.shape != input.shape:
      raise ValueError(
        f"per_sample_weights has shape {tuple(per_sample_weights.shape)}, want that of input, "
        f"{tuple(input.shape)}"
      )
    keys = rows.as_ids(input, input.device)
    if offsets is None:
      offsets = torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
    else:
      jagged.check_offsets(offsets, "offsets")
      if not self.include_last_offset:
        offsets = torch.nn.functional.pad(offsets, (0, 1), value=len(input))
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    flat = keys.reshape(-1)
    (vectors,) = lookups.look_up([self.table], [flat])
    return pooling.pool(vectors, jagged.Bags(flat, offsets, weights), self.mode)
