"""Vectors of several tables side by side, for one id of each feature in an example.

On a GPU such a step is bound by what the host does for it, so everything that stays is found once.
Vectors are written to where they belong, and gradients read from where they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from monolith.native_training import gpu_table
from monolith.torch import storage
from monolith.torch.rows import RowTable


class SideBySide:
  """The tables of a collection whose vectors are side by side in an example's row.

  Args:
    tables: none twice, all on one GPU, and not shared by ranks.
    counts: how many features each has; their vectors are neighbours.

  Attributes:
    tables: the same.
  """

  def __init__(self, tables: Sequence[RowTable], counts: Sequence[int]):
    self.tables = tuple(tables)
    self.width = sum(table.dim * count for table, count in zip(tables, counts))
    self._counts = tuple(counts)
    self._device = self.tables[0].device_of_rows
    # A table of its own is one batch, example after example: nothing has to be joined.
    self._is_one = len(self.tables) == 1
    self._columns: list[tuple[RowTable, int, int]] = []  # of features: table, column, number
    column = 0
    for table, count in zip(tables, counts):
      for _ in range(1 if self._is_one else count):
        self._columns.append((table, column, len(self._columns)))
        column += table.dim
    self._own = [one for one in self._columns if not one[0].follows]
    self._stepping = [table for table in self.tables if not table.follows]
    # Autograd comes back by it to tables with optimizers of their own. It never has a gradient.
    self._anchor = torch.empty(0, requires_grad=True)
    self._rows: tuple[gpu_table.TableRow, gpu_table.TableRow] | None = None

  def takes(self, ids: Sequence[Any]) -> bool:
    """Tells whether ids can be used as they are: int64 `[batch]` of one size, on this GPU."""
    first = ids[0]
    if type(first) is not torch.Tensor or first.is_nested or first.dim() != 1:
      return False
    device, shape = self._device, first.shape
    for one in ids:
      if (
        type(one) is not torch.Tensor
        or one.is_nested
        or one.dtype is not torch.int64
        or one.device != device
        or one.shape != shape
        or not one.is_contiguous()
      ):
        return False
    return True

  def look_up(self, ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns vectors, such that gradients reach the tables.

    Args:
      ids: one tensor for each feature, as `takes` wants them.

    Returns:
      float32 `[batch, width]`, on the GPU.
    """
    if self._is_one and len(ids) > 1:
      ids = (torch.stack(tuple(ids), 1).view(-1),)
    if not torch.is_grad_enabled():
      return self.read(ids)
    anchors = [table.anchor() for table in self.tables if table.follows]
    if self._own:
      anchors.append(self._anchor)
    return _Look.apply(self, ids, *anchors)

  def read(self, ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the vectors of ids; those of a single table are example after example."""
    n = ids[0].shape[0]
    batch = n // self._counts[0] if self._is_one else n
    out = torch.empty((batch, self.width), dtype=torch.float32, device=self._device)
    row, addresses, to = self._table_rows()[0], [one.data_ptr() for one in ids], out.data_ptr()
    storage.run_on(self._device, lambda stream: row.lookup(addresses, n, to, stream=stream))
    return out

  def step(self, ids: Sequence[torch.Tensor], upstream: torch.Tensor) -> None:
    """Steps the tables with optimizers of their own; the others keep their gradients.

    Args:
      ids: as `read` has got them.
      upstream: the gradient of what it has returned.
    """
    gradients = upstream.to(torch.float32).contiguous()
    if len(self._own) < len(self._columns):
      self._keep(ids, gradients)
    if not self._own:
      return
    stores = [table.storage for table in self._stepping]
    steps = [one.steps for one in stores]
    if len(set(steps)) == 1:
      self._optimize(self._table_rows()[1], self._own, ids, gradients, steps[0])
    else:
      # Tables that have taken another number of steps take theirs by themselves.
      for number in sorted(set(steps)):
        some = [one for one in self._own if one[0].storage.steps == number]
        self._optimize(self._row_of(some), some, ids, gradients, number)
    for one, number in zip(stores, steps):
      one.count_from(number + 1)

  def _optimize(
    self,
    row: gpu_table.TableRow,
    columns: Sequence[tuple[RowTable, int, int]],
    ids: Sequence[torch.Tensor],
    gradients: torch.Tensor,
    steps: int,
  ) -> None:
    addresses = [ids[number].data_ptr() for _, _, number in columns]
    rates = [table.learning_rate for table, _, _ in columns]
    n, begin, now = ids[0].shape[0], gradients.data_ptr(), int(time.time())

    def run(stream: int) -> None:
      row.optimize(addresses, n, begin, rates, global_step=steps, req_time=now, stream=stream)

    storage.run_on(self._device, run)

  def _keep(self, ids: Sequence[torch.Tensor], gradients: torch.Tensor) -> None:
    """Gives tables that follow an optimizer of PyTorch copies of their ids and gradients."""
    if self._is_one:
      self.tables[0].take_gradients(ids[0], gradients.view(-1, self.tables[0].dim))
      return
    dims = {table.dim for table in self.tables}
    if len(dims) == 1 and not self._own:
      # One copy of all ids, and one of all gradients.
      dim, count = dims.pop(), len(ids)
      own_ids = torch.stack(tuple(ids))
      own = gradients.view(-1, count, dim).transpose(0, 1).contiguous()
      first = 0
      for table, some in zip(self.tables, self._counts):
        part = slice(first, first + some)
        table.keep_gradients(own_ids[part].view(-1), own[part].view(-1, dim))
        first += some
      return
    first, column = 0, 0
    for table, some in zip(self.tables, self._counts):
      if table.follows:
        own_columns = gradients[:, column : column + some * table.dim]
        table.keep_gradients(
          torch.cat(tuple(ids[first : first + some])),
          own_columns.view(-1, some, table.dim).transpose(0, 1).reshape(-1, table.dim).clone(),
        )
      first, column = first + some, column + some * table.dim

  def _table_rows(self) -> tuple[gpu_table.TableRow, gpu_table.TableRow]:
    """Returns all tables, and those that step here."""
    rows = self._rows
    if rows is None or not rows[0].is_open():
      # Loading rows, or another optimizer, has replaced a table.
      whole = self._row_of(self._columns)
      own = whole if len(self._own) == len(self._columns) else self._row_of(self._own)
      rows = self._rows = (whole, own)
    return rows

  def _row_of(self, columns: Sequence[tuple[RowTable, int, int]]) -> gpu_table.TableRow:
    # A single table has a row for each vector.
    width = self.tables[0].dim if self._is_one else self.width
    return gpu_table.TableRow([(one.storage.table, column) for one, column, _ in columns], width)


class _Look(torch.autograd.Function):
  """A lookup; the way back is a step of the tables' optimizers."""

  @staticmethod
  def forward(ctx: Any, side: SideBySide, ids: Any, *anchors: torch.Tensor) -> torch.Tensor:
    ctx.side = side
    # Autograd refuses ids that were overwritten since, as it does those of torch.nn.Embedding.
    ctx.save_for_backward(*ids)
    ctx.anchors = [(anchor.shape, anchor.device) for anchor in anchors if anchor.dim() == 2]
    ctx.num_anchors = len(anchors)
    return side.read(ids)

  @staticmethod
  @torch.autograd.function.once_differentiable
  def backward(ctx: Any, upstream: torch.Tensor) -> Any:
    ctx.side.step(ctx.saved_tensors, upstream)
    # Tables that follow are told by their parameters' gradients.
    zeros = [torch.zeros(shape, device=where) for shape, where in ctx.anchors]
    return (None, None, *zeros, *[None] * (ctx.num_anchors - len(zeros)))
