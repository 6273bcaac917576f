"""One table as a module, stepped in `backward()` or by the optimizer of PyTorch that it follows."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
  register_optimizer_step_post_hook,
  register_optimizer_step_pre_hook,
)

from monolith.table import arrays, optimizers
from monolith.torch import following, ranks, storage

# The attribute of a parameter that holds its table.
_TABLE_ATTRIBUTE = "_monolith_table"
_hooks: list[Any] = []
# After so many, something is wrong: of backwards without a step, and of changes of an optimizer.
_MANY_BACKWARDS = 100
_MANY_CHANGES = 3


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
    self.learning_rate = first.learning_rate
    if learning_rate is not None:
      self.learning_rate = optimizers.rate(float(learning_rate))
    self.storage = storage.make(self.dim, first, initializer, device, name=self.name, **options)
    # Ids and gradients that wait for the optimizer of PyTorch, and what stands for their sum.
    self._beside: set[int] = set()
    self._num_backwards = 0
    self._num_changes = 0
    self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
    self._gradient: tuple[Any, int] = (None, 0)
    self._stepped_by: Callable[[], Any] = lambda: None
    self._warned: set[str] = set()
    if self._follows:
      self.rows = torch.nn.Parameter(torch.empty(0, self.dim))
      self._mark_parameter()
      _follow_steps()
    else:
      self.register_parameter("rows", None)

  def _mark_parameter(self) -> None:
    """Lets the parameter lead back to the table, also one that has taken its place.

    `load_state_dict(assign=True)` replaces parameters, and so does `Module.to` from another kind of
    device.
    """
    parameter = self.rows
    if table_of(parameter) is None and parameter.is_leaf and parameter.requires_grad:
      setattr(parameter, _TABLE_ATTRIBUTE, weakref.ref(self))
      parameter.register_post_accumulate_grad_hook(_note_gradient)

  def anchor(self) -> torch.Tensor:
    """Returns the parameter that autograd comes back by."""
    self._mark_parameter()
    return self.rows

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

  def take_gradients(self, ids: torch.Tensor, gradients: torch.Tensor) -> bool:
    """Keeps gradients for the optimizer of PyTorch; returns false where the table has its own."""
    if self._follows and self.rows.requires_grad:
      # Copies: until the step, both may be buffers that others write.
      self.keep_gradients(ids.clone(), gradients.clone())
    return self._follows

  def keep_gradients(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """Does so with gradients that nobody else has, of a table without an optimizer of its own."""
    # A frozen parameter never gets a gradient, which would fetch them.
    if self.rows.requires_grad:
      with _arriving_lock:
        _backward_under_way().arrived.setdefault(self, []).append((ids, gradients))

  def note_gradient(self) -> None:
    """Backward is done: sorts out what an earlier one left and `zero_grad` has dropped since."""
    with _arriving_lock:
      now = _backward_pass()
      backward = _backwards.get(now)
      arrived = [] if backward is None else backward.arrived.pop(self, [])
      # Other backwards may have added to the gradient already, and come here later.
      beside = self._other_backwards()
      gradient = self.rows.grad
      before, version = self._gradient
      # One more in-place addition to the same tensor: accumulation over several batches.
      is_sum = gradient is before and gradient is not None and (
        now in self._beside or 1 <= gradient._version - version <= 1 + len(beside)
      )  # fmt: skip
      self._num_backwards = self._num_backwards + 1 if is_sum and self._pending else 1
      self._pending = [*(self._pending if is_sum else []), *arrived]
      self._beside = beside
      self._note_version()
    if self._num_backwards == _MANY_BACKWARDS:
      self._warn_once(
        "Gradients of %d backward passes wait for an optimizer of PyTorch that steps the rows of "
        "table %r: give one the parameters of its module, or the table an optimizer of its own.",
        _MANY_BACKWARDS,
        self.name,
      )
    # DistributedDataParallel writes gradients once more when backward is over.
    _when_backward_is_over(self._note_last_version)

  def _note_version(self) -> None:
    gradient = self.rows.grad
    self._gradient = (gradient, 0 if gradient is None else gradient._version)

  def _note_last_version(self) -> None:
    # The backward of another thread may have added to the gradient, and will note that.
    with _arriving_lock:
      if not self._other_backwards():
        self._note_version()

  def _other_backwards(self) -> set[int]:
    """Returns the backwards whose gradients for this table wait for more of them."""
    return {number for number, one in list(_backwards.items()) if self in one.arrived}

  def check_follows(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Raises ValueError where rows cannot follow an optimizer."""
    following.follow(optimizer, group)

  def take_pending(
    self, optimizer: torch.optim.Optimizer, group: dict[str, Any], *, has_stepped: bool
  ) -> tuple[Any, torch.Tensor, torch.Tensor, float] | None:
    """Prepares the step of the optimizer that the table follows.

    Args:
      optimizer: of PyTorch.
      group: the entry of its `param_groups` with the table's parameter.
      has_stepped: the optimizer has counted this step already.

    Returns:
      An update, or `None`.
    """
    if self.rows.grad is None:
      self._pending = []
    if not self._pending:
      other = self._stepped_by()
      if self.rows.grad is not None and other is not None and other is not optimizer:
        raise ValueError(
          f"Two optimizers, {type(other).__name__} and {type(optimizer).__name__}, have the rows "
          f"of table {self.name!r}, which step once: give the parameter to one of them"
        )
      return None
    followed = following.follow(optimizer, group)
    if followed.left_out:
      self._warn_once(
        "Table %r follows %s without %s, which do not reach its rows.",
        self.name,
        type(optimizer).__name__,
        " and ".join(followed.left_out),
      )
    gradient, version = self._gradient
    if not has_stepped and (self.rows.grad is not gradient or self.rows.grad._version != version):
      self._warn_once(
        "The gradient of table %r was changed before %s has stepped, as clip_grad_norm_ does it, "
        "which does not reach its rows.",
        self.name,
        type(optimizer).__name__,
      )
    if not following.same_rule(followed.optimizer, self.storage.optimizer):
      self.storage.configure(followed.optimizer)
      self._num_changes += 1
      if self._num_changes == _MANY_CHANGES:
        self._warn_once(
          "The numbers of %s have changed again, but for its learning rate; each time all rows of "
          "table %r are copied. OneCycleLR and CyclicLR change them unless cycle_momentum=False.",
          type(optimizer).__name__,
          self.name,
        )
    if followed.optimizer.decay_by_step:
      # A restored optimizer goes on where it was, and a new one begins anew; so do moments of rows.
      taken = following.steps_taken(optimizer, self.rows)
      self.storage.count_from(max(0, taken - has_stepped))
    ids, gradients = (
      parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._pending)
    )
    self._pending = []
    self._stepped_by = weakref.ref(optimizer)
    return self.storage, ids, gradients, followed.optimizer.learning_rate

  def _warn_once(self, text: str, *arguments: Any) -> None:
    if text not in self._warned:
      self._warned.add(text)
      logging.getLogger("monolith").warning(text, *arguments)

  def assign(self, ids: Any, values: Any) -> None:
    """Overwrites vectors, creating absent rows; the optimizer's state stays. On this rank alone.

    Args:
      ids: integers of any shape.
      values: floats, `dim` for each id.
    """
    keys = as_ids(ids, self.device_of_rows).reshape(-1)
    floats = torch.as_tensor(values, dtype=torch.float32, device=self.device_of_rows)
    if not arrays.fits(tuple(floats.shape), keys.numel(), self.dim):
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

  def save(self, path: str | os.PathLike[str]) -> int:
    """Writes the files of a table; returns the number of rows.

    Of several ranks each writes its own rows, to `<path>.rank_00000_of_00002` and so on. None waits
    for the others: before one loads, call `torch.distributed.barrier()`.
    """
    return self.storage.save(ranks.path_of(path, *ranks.place(self.process_group)))

  def load(self, path: str | os.PathLike[str]) -> int:
    """Replaces all rows by what `save` wrote, here or in TensorFlow; returns their number.

    Files of another number of ranks are read by every rank, which keeps the rows whose home it is.
    There, a whole table has to fit into main memory for a moment.

    Raises:
      ValueError: files of a rank are missing, or there are those of several numbers of ranks.
    """
    rank, size = ranks.place(self.process_group)
    saved = ranks.saved_by(path)
    if self._follows:
      found = storage.find_optimizer(
        ranks.path_of(path, rank if saved == size else 0, saved), self.dim
      )
      if found is not None and found.kind != self.storage.optimizer.kind:
        self.storage.configure(found)
    if saved == size:
      return self.storage.load(ranks.path_of(path, rank, size))
    return self.storage.load_homed(
      [ranks.path_of(path, other, saved) for other in range(saved)],
      lambda ids: ids % size == rank,
    )

  def get_extra_state(self) -> dict[str, Any]:
    """Returns all rows with their state, for `state_dict`."""
    with tempfile.TemporaryDirectory() as folder:
      self.storage.save(f"{folder}/rows")
      files = storage.files_of(f"{folder}/rows")
      data = b"".join(pathlib.Path(file).read_bytes() for file in files)
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(
      0, dtype=torch.uint8
    )  # fmt: skip
    rank, size = ranks.place(self.process_group)
    return {
      "dim": self.dim,
      "optimizer": dataclasses.asdict(self.storage.optimizer),
      "rank": rank,
      "world_size": size,
      "records": records,
    }

  def set_extra_state(self, state: Any) -> None:
    """Takes what `get_extra_state` returned.

    Raises:
      ValueError: it is of a table with another dim or optimizer, or of another rank.
    """
    if state["dim"] != self.dim:
      raise ValueError(f"rows of {self.name!r} have dim {state['dim']}, want {self.dim}")
    saved, here = (state["rank"], state["world_size"]), ranks.place(self.process_group)
    if saved != here:
      raise ValueError(
        f"rows of {self.name!r} are those of rank {saved[0]} of {saved[1]}, and this is rank "
        f"{here[0]} of {here[1]}: give each rank its own state_dict, or use save() and load(), "
        "which find the rows of any number of ranks"
      )
    optimizer = optimizers.Optimizer(**state["optimizer"])
    if self._follows:
      self.storage.configure(optimizer)
    elif optimizer.kind != self.storage.optimizer.kind:
      raise ValueError(
        f"rows of {self.name!r} have the state of optimizer {optimizer.kind!r}, and the table has "
        f"{self.storage.optimizer.kind!r}: give it that optimizer, or use save() and load(), where "
        "rows begin with a new state"
      )
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
    _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _hooks.append(register_optimizer_step_post_hook(_after_step))


def _has_closure(args: Any, kwargs: Any) -> bool:
  # The first argument is the optimizer.
  return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
  if not _has_closure(args, kwargs):
    _step_followers(optimizer, has_stepped=False)
    return
  # Its gradients come while the optimizer steps. What cannot be followed is refused before.
  for group in optimizer.param_groups:
    for parameter in group["params"]:
      if (table := table_of(parameter)) is not None:
        table.check_follows(optimizer, group)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
  if _has_closure(args, kwargs):
    _step_followers(optimizer, has_stepped=True)


def _step_followers(optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
  updates: dict[Any, list[Any]] = {}
  for group in optimizer.param_groups:
    for parameter in group["params"]:
      table = table_of(parameter)
      if table is None:
        continue
      update = table.take_pending(optimizer, group, has_stepped=has_stepped)
      if update is not None:
        updates.setdefault(type(update[0]), []).append(update)
  for kind, some in updates.items():
    kind.update(some)


class _Backward:
  """Keeps what a backward under way has brought and no parameter's gradient has fetched yet.

  The backward itself holds it, as what is called when it is over: it goes with its backward, also
  with one that failed or whose gradients `torch.autograd.grad` took. So neither the thread matters
  that runs it (those of a GPU all have one), nor whether another one runs inside it, as
  checkpoints do.

  Attributes:
    arrived: ids and gradients of each table.
  """

  def __init__(self) -> None:
    self.arrived: dict[RowTable, list[tuple[torch.Tensor, torch.Tensor]]] = {}

  def __call__(self) -> None:
    """Does nothing: backward calls it when it is over."""


# By the number of the backward.
_backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
_arriving_lock = threading.Lock()


def _backward_under_way() -> _Backward:
  number = _backward_pass()
  backward = _backwards.get(number)
  if backward is None:
    backward = _backwards[number] = _Backward()
    torch.autograd.Variable._execution_engine.queue_callback(backward)
  return backward


def _backward_pass() -> int:
  """Returns a number that the backward under way has and no other."""
  return torch._C._current_graph_task_id()


def _when_backward_is_over(function: Callable[[], None]) -> None:
  """Calls a function after everything else that waits for the end of the backward under way."""
  engine = torch.autograd.Variable._execution_engine
  engine.queue_callback(lambda: engine.queue_callback(function))


# PyTorch before 2.3 has no unsigned integers but uint8.
_ID_TYPES = (
  torch.int64,
  *(
    getattr(torch, name)
    for name in ("int32", "int16", "int8", "uint8", "uint16", "uint32")
    if hasattr(torch, name)
  ),
)


def as_ids(ids: Any, device: torch.device) -> torch.Tensor:
  """Returns ids as int64, contiguous, on a device, in their shape.

  Raises:
    TypeError: they are not integers, or uint64.
  """
  if isinstance(ids, torch.Tensor) and ids.dtype is torch.int64 and ids.device == device:
    return ids.contiguous()
  tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids)
  if tensor.numel() == 0 and not isinstance(ids, torch.Tensor):
    tensor = tensor.to(torch.int64)
  if tensor.dtype not in _ID_TYPES:
    raise TypeError(f"ids have dtype {tensor.dtype}, want torch.int64 or a smaller integer")
  return tensor.detach().to(device=device, dtype=torch.int64).contiguous()
