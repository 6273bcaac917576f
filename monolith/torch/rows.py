"""One table as a module, and lookups that autograd can follow back to it."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import sys
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from monolith.table import optimizers
from monolith.torch import following, ranks, storage

# What keeps the table of a parameter on it.
_TABLE_ATTRIBUTE = "_monolith_table"
_hooks: list[Any] = []


class RowTable(torch.nn.Module):
  """The rows of a table. The modules of `monolith.torch` hold one or several of them.

  Args:
    dim: length of a vector.
    optimizer: of the table; `None`: that of PyTorch which gets the parameter `rows`.
    initializer: what a new row begins with.
    learning_rate: of the optimizer, a number; by default its own.
    device: where the rows are: `"cpu"` or `"cuda"`.
    process_group: which ranks share the table.
    name: what messages call it.
    expire_after, admit_after, admit_capacity, seed, initial_capacity: as `monolith.table.HashTable`
      has them.

  Raises:
    ValueError, TypeError: an argument is not as described.
  """

  def __init__(
    self,
    dim: int,
    optimizer: optimizers.OptimizerLike | None = None,
    initializer: optimizers.InitializerLike = "uniform",
    *,
    learning_rate: float | None = None,
    device: Any = None,
    process_group: Any = None,
    name: str | None = None,
    **options: Any,
  ):
    super().__init__()
    self.dim = optimizers.dimension(dim)
    self.name = name or "table"
    self.process_group = process_group
    ranks.find_group(process_group)
    self._follows = optimizer is None
    if self._follows and learning_rate is not None:
      raise ValueError(
        f"learning_rate is {learning_rate!r}, but the table has no optimizer of its own: name one, "
        "or leave the rate to the optimizer of PyTorch"
      )
    first = optimizers.DEFAULT if optimizer is None else optimizers.find(optimizer)
    if self._follows and torch.device("cpu" if device is None else device).type == "cuda":
      first = optimizers.Optimizer("adam", beta2=0.999, epsilon=1e-7)
    self.learning_rate = first.learning_rate if learning_rate is None else float(learning_rate)
    self.storage = storage.make(self.dim, first, initializer, device, name=self.name, **options)
    # Ids and gradients that wait for the optimizer of PyTorch.
    self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
    self._gradient: tuple[Any, int] = (None, 0)
    self._warned = False
    if self._follows:
      self.rows = torch.nn.Parameter(torch.empty(0, self.dim))
      setattr(self.rows, _TABLE_ATTRIBUTE, weakref.ref(self))
      self.rows.register_post_accumulate_grad_hook(_note_gradient)
      _follow_steps()
    else:
      self.register_parameter("rows", None)

  @property
  def follows(self) -> bool:
    """Whether the table has no optimizer of its own."""
    return self._follows

  @property
  def device_of_rows(self) -> torch.device:
    """Where the rows are; `Module.to` does not move them."""
    return self.storage.device

  def __len__(self) -> int:
    return self.storage.size()

  def extra_repr(self) -> str:
    kind = "that of PyTorch" if self._follows else self.storage.optimizer.kind
    device = str(self.device_of_rows)
    return f"dim={self.dim}, optimizer={kind!r}, device={device!r}, name={self.name!r}"

  def __deepcopy__(self, memo: Any) -> Any:
    raise TypeError("a table cannot be copied: save it, and load it into another")

  def __getstate__(self) -> Any:
    raise TypeError("a table cannot be pickled: use state_dict(), or save and load")

  def anchor(self) -> torch.Tensor:
    """Returns what makes autograd come back to a lookup."""
    return self.rows if self._follows else torch.empty(0, self.dim, requires_grad=True)

  def take_gradients(self, ids: torch.Tensor, gradients: torch.Tensor) -> bool:
    """Keeps gradients for the optimizer of PyTorch; returns false where the table has its own."""
    if self._follows:
      self._arriving.append((ids, gradients))
    return self._follows

  def note_gradient(self) -> None:
    """Backward is done: sorts out what an earlier one left and `zero_grad` has dropped since."""
    gradient = self.rows.grad
    before, version = self._gradient
    # One more in-place addition to the same tensor: accumulation over several batches.
    is_sum = gradient is before and gradient is not None and gradient._version == version + 1
    self._pending = [*(self._pending if is_sum else []), *self._arriving]
    self._arriving = []
    self._gradient = (gradient, 0 if gradient is None else gradient._version)

  def take_pending(
    self, optimizer: torch.optim.Optimizer, group: dict[str, Any]
  ) -> tuple[Any, torch.Tensor, torch.Tensor, float] | None:
    """Prepares the step of the optimizer that the table follows; returns an update, or `None`."""
    if self.rows.grad is None:
      self._pending = []
    if not self._pending:
      return None
    followed = following.follow(optimizer, group, on_gpu=self.storage.device.type == "cuda")
    if followed.left_out and not self._warned:
      self._warned = True
      logging.getLogger("monolith").warning(
        "Table %r follows %s without %s, which do not reach its rows.",
        self.name,
        type(optimizer).__name__,
        " and ".join(followed.left_out),
      )
    if not following.same_rule(followed.optimizer, self.storage.optimizer):
      self.storage.configure(followed.optimizer)
    ids, gradients = (torch.cat(parts) for parts in zip(*self._pending))
    self._pending = []
    return self.storage, ids, gradients, followed.optimizer.learning_rate

  def assign(self, ids: Any, values: Any) -> None:
    """Overwrites vectors, creating absent rows; the optimizer's state stays. On this rank alone.

    Args:
      ids: integers of any shape.
      values: floats, `dim` for each id.
    """
    keys = as_ids(ids, self.device_of_rows).reshape(-1)
    floats = torch.as_tensor(values, dtype=torch.float32, device=self.device_of_rows)
    if floats.numel() != keys.numel() * self.dim:
      raise ValueError(
        f"values has shape {tuple(floats.shape)}, want {self.dim} floats for each of "
        f"{keys.numel()} ids"
      )
    self.storage.assign(keys, floats.detach().reshape(-1, self.dim).contiguous())

  def erase(self, ids: Any) -> None:
    """Removes the rows of ids, on this rank."""
    self.storage.erase(as_ids(ids, self.device_of_rows).reshape(-1))

  def evict(self) -> int:
    """Removes rows that have expired, on this rank; returns how many."""
    return self.storage.evict()

  def _path(self, path: str | os.PathLike[str]) -> str:
    group = ranks.find_group(self.process_group)
    if group is None:
      return os.fspath(path)
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return f"{os.fspath(path)}.rank_{rank:05d}_of_{size:05d}"

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes the files of a table; returns the number of rows.

    Of several ranks each writes its own rows, to `<path>.rank_00000_of_00002` and so on.
    """
    return self.storage.save(self._path(path))

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by what `save` wrote, here or in TensorFlow; returns their number."""
    return self.storage.load(self._path(path))

  def get_extra_state(self) -> dict[str, Any]:
    """Returns all rows with their state, for `state_dict`."""
    with tempfile.TemporaryDirectory() as folder:
      self.storage.save(f"{folder}/rows")
      files = storage.files_of(f"{folder}/rows")
      data = b"".join(pathlib.Path(file).read_bytes() for file in files)
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(
      0, dtype=torch.uint8
    )  # fmt: skip
    return {"dim": self.dim, "optimizer": self.storage.optimizer.kind, "records": records}

  def set_extra_state(self, state: Any) -> None:
    """Takes what `get_extra_state` returned.

    Raises:
      ValueError: it is of a table with another dim.
    """
    if state["dim"] != self.dim:
      raise ValueError(f"rows of {self.name!r} have dim {state['dim']}, want {self.dim}")
    with tempfile.TemporaryDirectory() as folder:
      with open(f"{folder}/rows-00000-of-00001", "wb") as file:
        file.write(state["records"].cpu().numpy().tobytes())
      self.storage.load(f"{folder}/rows")


def _note_gradient(parameter: torch.Tensor) -> None:
  table = table_of(parameter)
  if table is not None:
    table.note_gradient()


def table_of(parameter: Any) -> RowTable | None:
  """Returns the table whose rows a parameter stands for; `None` for other parameters."""
  reference = getattr(parameter, _TABLE_ATTRIBUTE, None)
  return None if reference is None else reference()


def _follow_steps() -> None:
  """Lets every optimizer of the process step the tables of its parameters, too."""
  if not _hooks:
    hook = register_optimizer_step_pre_hook(_before_step)
    _hooks.append(hook)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
  del args, kwargs
  updates: dict[type, list[Any]] = {}
  for group in optimizer.param_groups:
    for parameter in group["params"]:
      table = table_of(parameter)
      update = None if table is None else table.take_pending(optimizer, group)
      if update is not None:
        updates.setdefault(type(update[0]), []).append(update)
  for kind, some in updates.items():
    kind.update(some)


def as_ids(ids: Any, device: torch.device) -> torch.Tensor:
  """Returns ids as int64, contiguous, on a device, in their shape.

  Raises:
    TypeError: they are not integers, or uint64.
  """
  tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids)
  if tensor.numel() == 0 and not isinstance(ids, torch.Tensor):
    tensor = tensor.to(torch.int64)
  if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
    raise TypeError(f"ids have dtype {tensor.dtype}, want torch.int64 or a smaller integer")
  return tensor.detach().to(device=device, dtype=torch.int64).contiguous()


def look_up(tables: Sequence[RowTable], ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
  """Returns the vectors of ids of several tables, such that gradients reach the tables.

  torch.compile breaks its graph here: tables are no tensors.

  Args:
    tables: none twice; all in main memory or all on one GPU, and of one group of ranks.
    ids: int64 `[n]` for each, on any device.

  Returns:
    float32 `[n, dim]` for each, on the device of the ids.
  """
  # Only a process that compiles has this module, and importing it takes seconds.
  return (_outside_graphs() if "torch._dynamo" in sys.modules else _look_up)(tables, ids)


_REASON = "monolith.torch looks rows up in a hash table outside the graph"
look_up._torchdynamo_disable = True  # type: ignore[attr-defined]
look_up._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]


@functools.cache
def _outside_graphs() -> Any:
  return torch.compiler.disable(_look_up, reason=_REASON)


def _look_up(tables: Sequence[RowTable], ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
  if not tables:
    return []
  if not torch.is_grad_enabled():
    return list(_forward(tables, ids)[0])
  return list(_Rows.apply(tuple(tables), tuple(ids), *(table.anchor() for table in tables)))


def _forward(
  tables: Sequence[RowTable], ids: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
  """Returns vectors, the exchange between ranks or `None`, and the ids that live here."""
  device = tables[0].device_of_rows
  keys = [one.to(device) for one in ids]
  group = ranks.find_group(tables[0].process_group)
  exchange = None
  if group is not None:
    exchange = ranks.Exchange(keys, [table.dim for table in tables], group)
    keys = exchange.home_ids
  rows = type(tables[0].storage).look_up([(table.storage, one) for table, one in zip(tables, keys)])
  if exchange is not None:
    rows = exchange.send_rows(rows)
  return [row.to(one.device) for row, one in zip(rows, ids)], exchange, keys


class _Rows(torch.autograd.Function):
  """Vectors of ids; the way back is a step of the tables' optimizers."""

  @staticmethod
  def forward(ctx: Any, tables: Any, ids: Any, *anchors: torch.Tensor) -> Any:
    rows, ctx.exchange, ctx.keys = _forward(tables, ids)
    ctx.tables = tables
    ctx.anchors = [(anchor.shape, anchor.device) for anchor in anchors]
    return tuple(rows)

  @staticmethod
  @torch.autograd.function.once_differentiable
  def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
    device = ctx.tables[0].device_of_rows
    gradients = [one.to(device=device, dtype=torch.float32).contiguous() for one in upstream]
    if ctx.exchange is not None:
      gradients = ctx.exchange.send_gradients(gradients)
    updates = [
      (table.storage, ids, gradient, table.learning_rate)
      for table, ids, gradient in zip(ctx.tables, ctx.keys, gradients)
      if not table.take_gradients(ids, gradient)
    ]
    if updates:
      type(updates[0][0]).update(updates)
    anchors = [torch.zeros(shape, device=where) for shape, where in ctx.anchors]
    return (None, None, *anchors)
