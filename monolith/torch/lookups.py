"""Lookups in one or several tables that autograd can follow back to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monolith.torch import ranks, storage
from monolith.torch.rows import RowTable


def look_up(
  tables: Sequence[RowTable],
  ids: Sequence[torch.Tensor],
  into: Sequence[int] | None = None,
) -> list[torch.Tensor]:
  """Returns the vectors of ids of several tables, such that gradients reach the tables.

  torch.compile breaks its graph here: tables are no tensors.

  Args:
    tables: none twice; all in main memory or all on one GPU, and of one group of ranks.
    ids: int64 `[n]` for each, on any device.
    into: the number of the tensor that a table's vectors are to be in; tables that share one have
      equal dims, and their vectors are one after the other. By default each has its own.

  Returns:
    float32 `[n, dim]` for each tensor, on the device of the ids.

  Raises:
    RuntimeError: the call is part of a graph or a transform that cannot look rows up.
  """
  # Only a process that compiles has torch._dynamo, and importing it takes seconds.
  return (_outside_graphs(_look_up) if _is_compiling() else _look_up)(tables, ids, into)


_REASON = "monolith.torch looks rows up in a hash table outside the graph"
look_up._torchdynamo_disable = True  # type: ignore[attr-defined]
look_up._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


def _find_transform() -> str:
  """Returns what is being done to the function that called a lookup, where that does not work."""
  if torch._C._get_tracing_state() is not None:
    return "torch.jit.trace"
  if torch._C._are_functorch_transforms_active():
    return "a transform of torch.func, such as vmap"
  if _is_compiling() and getattr(torch.compiler, "is_exporting", bool)():
    return "torch.export"
  return ""


def _is_compiling() -> bool:
  return "torch._dynamo" in sys.modules


# Not a cache of functools, of which torch.compile warns.
_disabled: dict[Any, Any] = {}


def _outside_graphs(function: Any) -> Any:
  if function not in _disabled:
    _disabled[function] = torch.compiler.disable(function, reason=_REASON)
  return _disabled[function]


def _look_up(
  tables: Sequence[RowTable], ids: Sequence[torch.Tensor], into: Sequence[int] | None
) -> list[torch.Tensor]:
  if not tables:
    return []
  if transform := _find_transform():
    raise RuntimeError(
      f"monolith.torch looks rows up in a hash table, which {transform} cannot: look the vectors "
      "up first, and give it the part of the model that takes them"
    )
  places = list(range(len(tables))) if into is None else list(into)
  if not torch.is_grad_enabled():
    return list(_forward(tables, ids, places)[0])
  return list(_Rows.apply(tuple(tables), tuple(ids), places, *_anchors(tables)))


def can_look_up_side_by_side(table: RowTable) -> bool:
  """Tells whether `look_up_side_by_side` works: the rows are on a GPU, and all on this one."""
  return isinstance(table.storage, storage.GpuStorage) and (
    ranks.find_group(table.process_group) is None
  )


def look_up_side_by_side(find: Callable[[], Any], ids: Sequence[torch.Tensor]) -> torch.Tensor:
  """Returns one vector of each table for each example, such that gradients reach the tables.

  Args:
    find: returns the `SideBySide` of tables for which `can_look_up_side_by_side`.
    ids: int64 `[batch]`, one for each feature, on any device.

  Returns:
    float32 `[batch, dim for each of all ids]`, on the device of the ids.
  """
  return (_outside_graphs(_look_side_by_side) if _is_compiling() else _look_side_by_side)(find, ids)


look_up_side_by_side._torchdynamo_disable = True  # type: ignore[attr-defined]
look_up_side_by_side._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


def _look_side_by_side(find: Callable[[], Any], ids: Sequence[torch.Tensor]) -> torch.Tensor:
  side = find()
  if side.takes(ids):
    return side.look_up(ids)
  device = side.tables[0].device_of_rows
  return side.look_up([one.to(device) for one in ids]).to(ids[0].device)


def _anchors(tables: Sequence[RowTable]) -> list[torch.Tensor]:
  """Returns what makes autograd come back to a lookup."""
  anchors: list[torch.Tensor] = [table.anchor() for table in tables if table.follows]
  if len(anchors) < len(tables):
    # One for all tables with optimizers of their own.
    anchors.append(torch.empty(0, requires_grad=True))
  return anchors


def _step(
  tables: Sequence[RowTable],
  keys: Sequence[torch.Tensor],
  gradients: Sequence[torch.Tensor],
) -> None:
  """Steps the tables with optimizers of their own; the others keep their gradients."""
  updates = [
    (table.storage, ids, gradient, table.learning_rate)
    for table, ids, gradient in zip(tables, keys, gradients)
    if not table.take_gradients(ids, gradient)
  ]
  if updates:
    type(updates[0][0]).update(updates)


class _Parts:
  """Finds the vectors of each table: a part of one of several tensors.

  Args:
    sizes: how many vectors each table has.
    into: the number of the tensor of each.
  """

  def __init__(self, sizes: Sequence[int], into: Sequence[int]):
    self.sizes = list(sizes)
    self.totals = [0] * (max(into) + 1)
    self._at = []
    for place, size in zip(into, sizes):
      self._at.append((place, self.totals[place]))
      self.totals[place] += size

  def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the part of each table."""
    return [
      tensors[place].narrow(0, begin, size) for (place, begin), size in zip(self._at, self.sizes)
    ]

  def join(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that these are the parts of."""
    joined: list[list[torch.Tensor]] = [[] for _ in self.totals]
    for (place, _), part in zip(self._at, parts):
      joined[place].append(part)
    return [some[0] if len(some) == 1 else torch.cat(some) for some in joined]


def _forward(
  tables: Sequence[RowTable], ids: Sequence[torch.Tensor], into: Sequence[int]
) -> tuple[list[torch.Tensor], Any, list[torch.Tensor], _Parts]:
  """Returns vectors, the exchange between ranks or `None`, and the ids that live here."""
  device = tables[0].device_of_rows
  keys = [one.to(device) for one in ids]
  parts = _Parts([len(one) for one in ids], into)
  group = ranks.find_group(tables[0].process_group)
  exchange = None
  if group is not None:
    exchange = ranks.Exchange(keys, [table.dim for table in tables], group)
    keys = exchange.home_ids
    places = _Parts([len(one) for one in keys], range(len(keys)))
  else:
    places = parts
  dims = dict(zip(into if group is None else range(len(keys)), (table.dim for table in tables)))
  rows = [
    torch.empty(n, dims[i], dtype=torch.float32, device=device) for i, n in enumerate(places.totals)
  ]
  lookups = zip((table.storage for table in tables), keys, places.of(rows))
  type(tables[0].storage).look_up(list(lookups))
  if exchange is not None:
    rows = parts.join(exchange.send_rows(rows))
  return [row.to(ids[0].device) for row in rows], exchange, keys, parts


class _Rows(torch.autograd.Function):
  """Vectors of ids; the way back is a step of the tables' optimizers."""

  @staticmethod
  def forward(ctx: Any, tables: Any, ids: Any, into: Any, *anchors: torch.Tensor) -> Any:
    rows, ctx.exchange, keys, ctx.parts = _forward(tables, ids, into)
    # Autograd refuses ids that were overwritten since, as it does those of torch.nn.Embedding.
    ctx.save_for_backward(*keys)
    ctx.tables = tables
    ctx.anchors = [(anchor.shape, anchor.device) for anchor in anchors]
    return tuple(rows)

  @staticmethod
  @torch.autograd.function.once_differentiable
  def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
    keys = ctx.saved_tensors
    device = ctx.tables[0].device_of_rows
    gradients = ctx.parts.of(
      [one.to(device=device, dtype=torch.float32).contiguous() for one in upstream]
    )
    if ctx.exchange is not None:
      gradients = ctx.exchange.send_gradients(gradients)
    _step(ctx.tables, keys, gradients)
    anchors = [torch.zeros(shape, device=where) for shape, where in ctx.anchors]
    return (None, None, None, *anchors)
