"""Where the rows of a table are: in main memory, or in the memory of a GPU. One interface for both.

Ids and floats are tensors on the device of the rows.
"""

from __future__ import annotations

import glob
import os
import pathlib
import re
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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
    """The optimizer of the rows."""
    return self.table.optimizer

  def stats(self) -> dict[str, int]:
    """Returns what the table holds and has done."""
    return self.table.stats()

  def configure(self, optimizer: optimizers.Optimizer) -> None:
    """Gives the rows another optimizer."""
    self.table.configure(optimizer)

  def count_from(self, steps: int) -> None:
    """Sets how many steps there were."""
    self.table.steps = steps

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

  def load_homed(self, paths: Sequence[str], is_home: Callable[[np.ndarray], np.ndarray]) -> int:
    """Replaces all rows by those of several tables that have their home here."""
    with tempfile.TemporaryDirectory() as folder, _join(self.table, paths, is_home, folder) as one:
      one.save(f"{folder}/home")
      return self.table.load(f"{folder}/home")

  @staticmethod
  def look_up(lookups: Sequence[tuple[HostStorage, torch.Tensor, torch.Tensor]]) -> None:
    """Writes the vectors of each table's ids into a tensor, `[n, dim]` without gaps."""
    tables.lookup_many([(one.table, ids.numpy(), out.numpy()) for one, ids, out in lookups])

  @staticmethod
  def update(updates: Sequence[tuple[HostStorage, torch.Tensor, torch.Tensor, float]]) -> None:
    """Takes a step of each table, with a learning rate."""
    for one, _, _, rate in updates:
      one.table.learning_rate = rate
    tables.update_many([(one.table, ids.numpy(), g.numpy()) for one, ids, g, _ in updates])


class GpuStorage:
  """Rows in the memory of a GPU.

  Attributes:
    table: holds them; another one after `load` and `configure`.
  """

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
    del admit_capacity
    if optimizers.admission(admit_after):
      raise ValueError(f"admit_after is {admit_after}, which works in main memory alone")
    index = device.index if device.index is not None else torch.cuda.current_device()
    self.device = torch.device("cuda", index)
    self._dim = dim
    self._first = optimizers.first_values(initializer)
    self._options: dict[str, Any] = {
      "seed": seed,
      "initial_capacity": initial_capacity,
      "name": name or "",
    }
    if (days := optimizers.days(expire_after)) is not None:
      self._options["expire_days"] = days
    self._steps = 0
    self._was_loaded = False
    self.optimizer = optimizer
    self.table = self._make(optimizer)

  def _make(self, optimizer: optimizers.Optimizer) -> gpu_table.GpuTable:
    segment = optimizers.segment(self._dim, optimizer, self._first)
    with torch.cuda.device(self.device):
      return gpu_table.GpuTable(segment, **self._options)

  @property
  def steps(self) -> int:
    """How many steps were taken, those before a load included where an optimizer counts them."""
    if self._was_loaded:
      self._was_loaded = False
      if self.optimizer.decay_by_step:
        with tempfile.TemporaryDirectory() as folder:
          self.save(f"{folder}/rows")
          with tables.HashTable(self._dim, self.optimizer) as like:
            like.load(f"{folder}/rows")
            self._steps = like._find_last_step() or self._steps
    return self._steps

  def count_from(self, steps: int) -> None:
    """Sets how many steps there were."""
    self._steps, self._was_loaded = steps, False

  def close(self) -> None:
    """Frees the rows."""
    self.table.close()

  def _replace(self, table: gpu_table.GpuTable) -> None:
    before, self.table = self.table, table
    before.close()

  def stats(self) -> dict[str, int]:
    """Returns what the table holds and has done; waits for the GPU."""
    return self.table.stats()

  def configure(self, optimizer: optimizers.Optimizer) -> None:
    """Gives the rows another optimizer."""
    table = self._make(optimizer)
    if self.size():
      with tempfile.TemporaryDirectory() as folder:
        self.table.save(f"{folder}/rows")
        table.load(f"{folder}/rows")
    self._replace(table)
    self.optimizer = optimizer

  def size(self) -> int:
    """Returns the number of rows."""
    return len(self.table)

  def assign(self, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites vectors; waits for the GPU.

    Raises:
      ValueError: values are not finite; theirs were not written.
    """
    self.table.assign(ids, values, req_time=int(time.time()), stream=_stream(self.device))
    self.table.check()

  def erase(self, ids: torch.Tensor) -> None:
    """Removes rows."""
    self.table.erase(ids, stream=_stream(self.device))

  def evict(self) -> int:
    """Removes rows that have expired; returns how many."""
    return self.table.evict(stream=_stream(self.device))

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes the file of a table; returns the number of rows."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    saved = self.table.save(partial, leave_out_expired=True)
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
    files = _complete(path)
    table = self._make(self.optimizer)
    with torch.cuda.device(self.device):
      loaded = table.load(files)
    self._replace(table)
    self._was_loaded = True
    return loaded

  def load_homed(self, paths: Sequence[str], is_home: Callable[[np.ndarray], np.ndarray]) -> int:
    """Replaces all rows by those of several tables that have their home here."""
    with tempfile.TemporaryDirectory() as folder:
      with tables.HashTable(self._dim, self.optimizer) as like:
        with _join(like, paths, is_home, folder) as one:
          one.save(f"{folder}/home")
      return self.load(f"{folder}/home")

  @staticmethod
  def look_up(lookups: Sequence[tuple[GpuStorage, torch.Tensor, torch.Tensor]]) -> None:
    """Writes the vectors of each table's ids into a tensor, `[n, dim]` without gaps."""
    places = [(one.table, ids.data_ptr(), ids.numel(), out.data_ptr()) for one, ids, out in lookups]
    run_on(lookups[0][0].device, lambda stream: gpu_table.lookup_at(places, stream=stream))

  @staticmethod
  def update(updates: Sequence[tuple[GpuStorage, torch.Tensor, torch.Tensor, float]]) -> None:
    """Takes a step of each table, with a learning rate.

    Raises:
      ValueError: an earlier step had gradients that are not finite, which were not written.
    """
    now = int(time.time())
    # Tables that have taken another number of steps take theirs by themselves.
    for steps in sorted({one.steps for one, *_ in updates}):
      group = [update for update in updates if update[0].steps == steps]
      places = [
        (one.table, ids.data_ptr(), ids.numel(), gradients.data_ptr())
        for one, ids, gradients, _ in group
      ]
      rates = [rate for *_, rate in group]

      def run(stream: int, steps: int = steps, places: Any = places, rates: Any = rates) -> None:
        gpu_table.optimize_at(places, rates, global_step=steps, req_time=now, stream=stream)

      run_on(updates[0][0].device, run)
    for one, *_ in updates:
      one.count_from(one.steps + 1)


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


# Optimizers that PyTorch's may be followed by and that keep a state for each row.
_STATEFUL = ("adagrad", "adam", "momentum", "adadelta", "amsgrad")


def find_optimizer(path: str | os.PathLike[str], dim: int) -> optimizers.Optimizer | None:
  """Returns the optimizer whose state the first row of a file has; `None` if it has none."""
  for name in files_of(path):
    with open(name, "rb") as file, tempfile.TemporaryDirectory() as folder:
      header = file.read(12)
      if len(header) < 12:
        continue
      size = struct.unpack("<Q", header[:8])[0] + 4
      row = header + file.read(min(size, os.path.getsize(name)))
      pathlib.Path(f"{folder}/row-00000-of-00001").write_bytes(row)
      for kind in _STATEFUL:
        optimizer = optimizers.Optimizer(kind, decay_by_step=kind == "adam")
        with tables.HashTable(dim, optimizer) as table:
          try:
            if table.load_state(f"{folder}/row")[1] == 0:
              return optimizer
          except (ValueError, tables.TableError):
            # Damaged files and those of another dim are refused, by name, when they are loaded.
            return None
    return None
  return None


def _complete(path: str | os.PathLike[str]) -> list[str]:
  """Returns the files of a table.

  Raises:
    ValueError: they are not complete.
  """
  files = files_of(path)
  if glob.glob(f"{glob.escape(str(path))}-?????-of-?????-tmp-*"):
    raise ValueError(
      f"{path} was being saved when its process ended: load it into a table in main memory and "
      "save that"
    )
  if not files or len(files) != int(files[0][-5:]):
    raise ValueError(f"{path} has {len(files)} files, want all of <path>-00000-of-?????")
  return files


def _join(
  like: tables.HashTable,
  paths: Sequence[str],
  is_home: Callable[[np.ndarray], np.ndarray],
  folder: str,
) -> tables.HashTable:
  """Returns a table with those rows of several others that have their home here."""
  files = [pathlib.Path(file).resolve() for path in paths for file in _complete(path)]
  for i, file in enumerate(files):
    os.symlink(file, f"{folder}/all-{i:05d}-of-{len(files):05d}")
  joined = tables.HashTable(like.dim, like.optimizer)
  joined.load(f"{folder}/all")
  ids, _ = joined.items()
  joined.erase(ids[~is_home(ids)])
  return joined


def _stream(device: torch.device) -> int:
  return torch.cuda.current_stream(device).cuda_stream


# Returns the address of the current stream without an object for it, which costs as much as a
# launch; builds of PyTorch without CUDA do not have it.
_find_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def run_on(device: torch.device, function: Callable[[int], None]) -> None:
  """Calls a function with the current stream of a GPU, which is the current one meanwhile."""
  stream = _stream(device) if _find_stream is None else _find_stream(device.index)
  if torch.cuda.current_device() == device.index:
    function(stream)
    return
  with torch.cuda.device(device):
    function(stream)


def files_of(path: str | os.PathLike[str]) -> list[str]:
  """Returns the files `<path>-ddddd-of-ddddd`, in order."""
  found = sorted(glob.glob(f"{glob.escape(str(path))}-?????-of-?????"))
  return [name for name in found if re.search(r"-\d{5}-of-\d{5}$", name)]
