"""Where the rows of a table are: in main memory, or in the memory of a GPU. One interface for both.

Ids and floats are tensors on the device of the rows.
"""

from __future__ import annotations

import glob
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from monolith import table as tables
from monolith.native_training import gpu_table
from monolith.table import optimizers


class HostStorage:
  """Rows in main memory."""

  device = torch.device("cpu")

  def __init__(self, dim: int, optimizer: optimizers.Optimizer, **options: Any):
    self.table = tables.HashTable(dim, optimizer, **options)

  def close(self) -> None:
    """Frees the rows."""
    self.table.close()

  @property
  def optimizer(self) -> optimizers.Optimizer:
    """What a step does to a row."""
    return self.table.optimizer

  def configure(self, optimizer: optimizers.Optimizer) -> None:
    """Gives the rows another optimizer."""
    self.table.configure(optimizer)

  def size(self) -> int:
    """Returns the number of rows."""
    return self.table.size()

  def assign(self, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites vectors."""
    self.table.assign(ids.numpy(), values.numpy())

  def erase(self, ids: torch.Tensor) -> None:
    """Removes rows."""
    self.table.erase(ids.numpy())

  def evict(self) -> int:
    """Removes rows that have expired; returns how many."""
    return self.table.evict()

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes the files of a table; returns the number of rows."""
    return self.table.save(path)

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by those of files; returns their number."""
    return self.table.load(path)

  @staticmethod
  def look_up(lookups: Sequence[tuple[HostStorage, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the vectors of each table's ids."""
    rows = [torch.empty(ids.numel(), one.table.dim) for one, ids in lookups]
    tables.lookup_many(
      [(one.table, ids.numpy(), out.numpy()) for (one, ids), out in zip(lookups, rows)]
    )
    return rows

  @staticmethod
  def update(updates: Sequence[tuple[HostStorage, torch.Tensor, torch.Tensor, float]]) -> None:
    """Takes a step of each table, with a learning rate."""
    for one, _, _, rate in updates:
      one.table.learning_rate = rate
    tables.update_many([(one.table, ids.numpy(), g.numpy()) for one, ids, g, _ in updates])


class GpuStorage:
  """Rows in the memory of a GPU."""

  def __init__(
    self,
    dim: int,
    optimizer: optimizers.Optimizer,
    initializer: Any,
    device: torch.device,
    *,
    expire_after: Any = None,
    admit_after: int = 0,
    admit_capacity: int = 1,
    name: str | None = None,
    seed: int = 0,
    initial_capacity: int = 1,
  ):
    del admit_capacity, name
    if optimizers.admission(admit_after):
      raise ValueError(f"admit_after is {admit_after}, which works in main memory alone")
    index = device.index if device.index is not None else torch.cuda.current_device()
    self.device = torch.device("cuda", index)
    self._dim = dim
    self._first = optimizers.first_values(initializer)
    self._options = {"seed": seed, "initial_capacity": initial_capacity}
    if (days := optimizers.days(expire_after)) is not None:
      self._options["expire_days"] = days
    self._steps = 0
    self.optimizer = optimizer
    self._table = self._make(optimizer)

  def _make(self, optimizer: optimizers.Optimizer) -> gpu_table.GpuTable:
    segment = optimizers.segment(self._dim, optimizer, self._first)
    with torch.cuda.device(self.device):
      return gpu_table.GpuTable(segment, **self._options)

  def close(self) -> None:
    """Frees the rows."""
    self._table.close()

  def _replace(self, table: gpu_table.GpuTable) -> None:
    before, self._table = self._table, table
    before.close()

  def configure(self, optimizer: optimizers.Optimizer) -> None:
    """Gives the rows another optimizer."""
    table = self._make(optimizer)
    if self.size():
      with tempfile.TemporaryDirectory() as folder:
        self._table.save(f"{folder}/rows")
        table.load(f"{folder}/rows")
    self._replace(table)
    self.optimizer = optimizer

  def size(self) -> int:
    """Returns the number of rows."""
    return len(self._table)

  def assign(self, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites vectors."""
    _check_finite([(ids, values)])
    self._table.assign(ids, values, req_time=int(time.time()), stream=_stream(self.device))

  def erase(self, ids: torch.Tensor) -> None:
    """Removes rows."""
    self._table.erase(ids, stream=_stream(self.device))

  def evict(self) -> int:
    """Removes rows that have expired; returns how many."""
    return self._table.evict(stream=_stream(self.device))

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes the file of a table; returns the number of rows."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    saved = self._table.save(partial, leave_out_expired=True)
    with open(partial, "rb") as file:
      os.fsync(file.fileno())
    # Without a manifest a set counts if it is complete: at no moment there is a mixture.
    path.with_name(f".{path.name}.manifest").unlink(missing_ok=True)
    target = path.with_name(f"{path.name}-00000-of-00001")
    for old in files_of(path):
      if old != str(target):
        os.unlink(old)
    os.replace(partial, target)
    return saved

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by those of files; returns their number."""
    files = files_of(path)
    if glob.glob(f"{glob.escape(str(path))}-?????-of-?????-tmp-*"):
      raise ValueError(
        f"{path} was being saved when its process ended: load it into a table in main memory and "
        "save that"
      )
    if not files or len(files) != int(files[0][-5:]):
      raise ValueError(f"{path} has {len(files)} files, want all of <path>-00000-of-?????")
    table = self._make(self.optimizer)
    with torch.cuda.device(self.device):
      loaded = table.load(files)
    self._replace(table)
    return loaded

  @staticmethod
  def look_up(lookups: Sequence[tuple[GpuStorage, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the vectors of each table's ids."""
    device = lookups[0][0].device
    with torch.cuda.device(device):
      rows = [torch.empty(ids.numel(), one._dim, device=device) for one, ids in lookups]
      gpu_table.lookup_many(
        [(one._table, ids, out) for (one, ids), out in zip(lookups, rows)], stream=_stream(device)
      )
    return rows

  @staticmethod
  def update(updates: Sequence[tuple[GpuStorage, torch.Tensor, torch.Tensor, float]]) -> None:
    """Takes a step of each table, with a learning rate."""
    device = updates[0][0].device
    with torch.cuda.device(device):
      _check_finite([(ids, gradients) for _, ids, gradients, _ in updates])
      # Tables that have taken another number of steps take theirs by themselves.
      for steps in sorted({one._steps for one, *_ in updates}):
        group = [update for update in updates if update[0]._steps == steps]
        gpu_table.optimize_many(
          [(one._table, ids, gradients, [rate]) for one, ids, gradients, rate in group],
          global_step=steps,
          req_time=int(time.time()),
          stream=_stream(device),
        )
      for one, *_ in updates:
        one._steps += 1


def make(
  dim: int, optimizer: optimizers.Optimizer, initializer: Any, device: Any, **options: Any
) -> Any:
  """Returns a new, empty storage on a device.

  Raises:
    ValueError: there are no tables on such devices, or an option does not work there.
    RuntimeError: there is no such device, or no library for it.
  """
  device = torch.device("cpu" if device is None else device)
  if device.type == "cpu":
    return HostStorage(dim, optimizer, initializer=initializer, **options)
  if device.type == "cuda":
    return GpuStorage(dim, optimizer, initializer, device, **options)
  raise ValueError(f"device is {str(device)!r}, want 'cpu' or 'cuda'")


def _stream(device: torch.device) -> int:
  return torch.cuda.current_stream(device).cuda_stream


def files_of(path: str | os.PathLike[str]) -> list[str]:
  """Returns the files `<path>-ddddd-of-ddddd`, in order."""
  found = sorted(glob.glob(f"{glob.escape(str(path))}-?????-of-?????"))
  return [name for name in found if re.search(r"-\d{5}-of-\d{5}$", name)]


def _check_finite(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
  """Refuses what is not finite, as main memory does; waits for the GPU.

  Raises:
    ValueError: a row is not finite; its id is named and nothing has changed.
  """
  setting = os.environ.get("MONOLITH_BAD_GRADIENTS", "stop")
  if setting == "ignore":
    return
  if setting != "stop":
    raise ValueError(f"MONOLITH_BAD_GRADIENTS is {setting!r}, want stop or ignore on a GPU")
  if bool(torch.stack([values.isfinite().all() for _, values in batches]).all()):
    return
  bad = [ids[~values.isfinite().all(1)] for ids, values in batches]
  first = torch.cat(bad)[:5].tolist()
  raise ValueError(f"gradients with NaN or infinity were not written: ids {first}")
