"""Where the time of a training step goes: ops from TensorFlow's profiler, cores from the kernel.

The profiler tells when each thread was in which op, but nothing of the threads that help with it.
So the states of all threads of the process are read meanwhile, a few thousand times a second, and
each look counts for the ops of that moment:

  op ms    time of all threads inside ops of the part
  active   time in which at least one op of the part is running
  alone    time of these in which no other part is
  cores    threads that run, on average, while the part is active
  serial   time in which the part is active, and no more than one thread runs in the whole process
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

CLOCK = "benchmark_clock"  # the event that the traced process marks its clock with

_OP = re.compile(r"^(?P<name>[^:#]*):(?P<type>_?[A-Z][A-Za-z0-9_]*)(#|$)")
_NOTHING = "nothing runs"
_OTHER = "other"
# In this order: the first whose expressions match the type, or the name, of an op.
_PARTS: tuple[tuple[str, str, str], ...] = (
  ("input", r"Ragged.*Variant|Iterator|Decode|Unpack|FloorMod|^Unbatch|Dataset", r"^Iterator::"),
  ("update of rows, with sums per id", r"HashTable.*Optimize|OptimizeList", r"^$"),
  ("sum of gradients", r"UnsortedSegmentSum|MapIdToEmbedding|FillWithOffset", r"^$"),
  ("update of rows", r"ResourceSparseApply|ScatterSub|ScatterAdd|ResourceScatter", r"^$"),
  ("unique", r"Unique|Reorder|SplitByIndices|FusedGather|ShardingSparse", r"^$"),
  ("lookup", r"HashTable.*Lookup|LookupList|ResourceGather|^GatherV2", r"^$"),
  ("checks of gradients", r"CheckGradients|CheckPooledGradients|CheckNumerics|IsFinite", r"^$"),
  ("pooling", r"Rowids|ReduceSumAndSplit$|SegmentSum|ReduceMean$", r"^$"),
  ("pooling, backward", r"ReduceSumAndSplitGradient|BroadcastTo", r"^$"),
  ("queues", r"Queue|Barrier|^Stage|^Unstage", r"^$"),
  ("messages", r"^_Send|^_Recv|^_HostSend|^_HostRecv|RecvTensor|Horovod", r"^$"),
  ("update of variables", r"ResourceApply|AssignSubVariable|AssignAddVariable", r"(?i)adagrad"),
  ("dense, backward", r"", r"gradient"),
  ("dense, forward", r"MatMul|BiasAdd|Relu|Concat|Split|Log|Exp|Mean|Select|Sum|Mul|Sub", r"^$"),
)


@dataclasses.dataclass(frozen=True)
class Op:
  """One stretch of time that a thread was in an op, and in none that this one called."""

  begin: int  # ns
  end: int
  part: str
  name: str


def part_of(name: str, op_type: str) -> str:
  """Returns which part of a step an op belongs to."""
  for part, types, names in _PARTS:
    if (types and re.search(types, op_type)) or re.search(names, name):
      return part
  return _OTHER


class ThreadStates:
  """Counts the threads of a process that run, again and again."""

  def __init__(self, pid: int):
    self._folder = f"/proc/{pid}/task"
    self._files: dict[str, int] = {}
    self.samples: list[tuple[int, int]] = []  # ns of the monotonic clock, threads that run

  def watch(self, is_over: Callable[[], bool]) -> None:
    """Samples until `is_over`, which is asked now and then."""
    try:
      while not is_over():
        self._find_threads()
        for _ in range(50):
          self.samples.append((time.monotonic_ns(), self._count()))
          time.sleep(0.0002)
    finally:
      for file in self._files.values():
        os.close(file)
      self._files.clear()

  def _find_threads(self) -> None:
    for thread in os.listdir(self._folder):
      if thread not in self._files:
        try:
          self._files[thread] = os.open(f"{self._folder}/{thread}/stat", os.O_RDONLY)
        except OSError:
          pass  # it has ended

  def _count(self) -> int:
    running = 0
    for thread, file in list(self._files.items()):
      try:
        stat = os.pread(file, 256, 0)
      except OSError:
        os.close(self._files.pop(thread))
        continue
      running += stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] == b"R"
    return running


def read_trace(folder: str, clock_ns: int) -> list[Op]:
  """Returns what the profiler has left in `folder`, in nanoseconds of the monotonic clock.

  Args:
    folder: what `tf.profiler.experimental.start` was given.
    clock_ns: the time of the event `CLOCK`.

  Raises:
    ValueError: there is no trace, or it lacks the event.
  """
  try:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2
  except ImportError:
    from tensorflow.core.profiler.protobuf import xplane_pb2  # of other versions

  files = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
  if len(files) != 1:
    raise ValueError(f"{folder} has {len(files)} traces, want one")
  space = xplane_pb2.XSpace.FromString(pathlib.Path(files[0]).read_bytes())
  ops: list[Op] = []
  clock = None
  for plane in space.planes:
    names = {number: meta.name for number, meta in plane.event_metadata.items()}
    for line in plane.lines:
      events = []
      for event in line.events:
        name = names[event.metadata_id]
        begin = line.timestamp_ns + event.offset_ps // 1000
        if name.partition("#")[0] == CLOCK:
          clock = begin
        labels = _labels(name)
        if labels is not None:
          events.append((begin, begin + event.duration_ps // 1000, *labels))
      ops.extend(_innermost(events))
  if clock is None:
    raise ValueError(f"{files[0]} lacks the event {CLOCK}")
  shift = clock_ns - clock
  return [dataclasses.replace(op, begin=op.begin + shift, end=op.end + shift) for op in ops]


def _labels(event: str) -> tuple[str, str] | None:
  """Returns part and name of an op, `None` for other events."""
  if event.startswith("Iterator::"):
    return "input", event.rpartition("::")[2].partition("[")[0]
  match = _OP.match(event)
  if match is None:
    return None
  op_type = match["type"]
  return part_of(match["name"].strip(), op_type), op_type


def _innermost(events: list[tuple[int, int, str, str]]) -> Iterable[Op]:
  """Cuts events of one thread, which may contain each other, into those that contain none."""
  open_events: list[tuple[int, int, str, str]] = []
  at = 0

  def close(until: int) -> Iterable[Op]:
    nonlocal at
    while open_events and open_events[-1][1] <= until:
      _, end, part, name = open_events.pop()
      if end > at:
        yield Op(at, end, part, name)
        at = end
    if open_events and until > at:
      yield Op(at, until, *open_events[-1][2:])

  for event in sorted(events, key=lambda e: (e[0], -e[1])):
    yield from close(event[0])
    at = event[0]
    open_events.append(event)
  yield from close(1 << 62)


class Parts:
  """The table.

  Args:
    ops: of all threads.
    samples: times and how many threads ran then, in the same clock.
    begin: when the first step began.
    end: when the last one ended.
    steps: how many there were.
    cores: that the process may use.
  """

  def __init__(
    self,
    ops: Sequence[Op],
    samples: Sequence[tuple[int, int]],
    begin: int,
    end: int,
    steps: int,
    cores: int,
  ):
    self._ms = 1e-6 / steps
    self._duration = end - begin
    self.in_ops: collections.Counter[str] = collections.Counter()
    self.active: collections.Counter[str] = collections.Counter()
    self.alone: collections.Counter[str] = collections.Counter()
    self.calls: collections.Counter[str] = collections.Counter()
    self.running: collections.Counter[str] = collections.Counter()
    self.looks: collections.Counter[str] = collections.Counter()
    self.serial: collections.Counter[str] = collections.Counter()
    self.serial_ops: collections.Counter[tuple[str, str]] = collections.Counter()
    self.op_time: collections.Counter[tuple[str, str]] = collections.Counter()
    marks: list[tuple[int, int, Any]] = []
    for op in ops:
      first, last = max(begin, op.begin), min(end, op.end)
      if first >= last:
        continue
      self.in_ops[op.part] += last - first
      self.calls[op.part] += 1
      self.op_time[op.part, op.name] += last - first
      marks += [(first, 1, op), (last, 0, op)]
    inside = [(at, min(n, cores)) for at, n in samples if begin <= at < end]
    self.step_ms = self._duration * self._ms
    self.cores = sum(n for _, n in inside) / max(1, len(inside))
    self._num_looks = max(1, len(inside))
    marks += [(at, 2, n) for at, n in inside]
    marks.append((end, 3, None))
    self._sweep(sorted(marks, key=lambda mark: mark[:2]), begin)

  def _sweep(self, marks: Sequence[tuple[int, int, Any]], begin: int) -> None:
    open_ops: collections.Counter[tuple[str, str]] = collections.Counter()
    at = begin
    for time_ns, kind, what in marks:
      parts = {part for part, _ in open_ops} or {_NOTHING}
      for part in parts:
        self.active[part] += time_ns - at
      if len(parts) == 1:
        self.alone[next(iter(parts))] += time_ns - at
      at = time_ns
      if kind == 1:
        open_ops[what.part, what.name] += 1
      elif kind == 0:
        open_ops[what.part, what.name] -= 1
        if not open_ops[what.part, what.name]:
          del open_ops[what.part, what.name]
      elif kind == 2:
        for part in parts:
          self.looks[part] += 1
          self.running[part] += what
        if what <= 1:
          for part in parts:
            self.serial[part] += 1
          for op in open_ops or ((_NOTHING, ""),):
            self.serial_ops[op] += 1

  def lines(self, num_ops: int = 8) -> list[str]:
    """Returns the table, and the `num_ops` longest ops, of all and of those that run alone."""
    per_look = self._duration / self._num_looks
    order = [part for part, _, _ in _PARTS] + [_OTHER, _NOTHING]
    heads = "".join(f"{head:>9}" for head in ("ops", "op ms", "active", "alone", "cores", "serial"))
    lines = [f"{'part of a step, ms':<34}{heads}"]
    for part in order:
      if not self.active[part]:
        continue
      cores = f"{self.running[part] / self.looks[part]:.1f}" if self.looks[part] else "-"
      lines.append(
        f"{part:<34}{self.calls[part] * self._ms * 1e6:>9.0f}{self.in_ops[part] * self._ms:>9.3f}"
        f"{self.active[part] * self._ms:>9.3f}{self.alone[part] * self._ms:>9.3f}{cores:>9}"
        f"{self.serial[part] * per_look * self._ms:>9.3f}"
      )
    serial = ", ".join(
      f"{name or part} {n * per_look * self._ms:.3f}"
      for (part, name), n in self.serial_ops.most_common(num_ops)
    )
    longest = ", ".join(
      f"{name} {ns * self._ms:.3f}" for (_, name), ns in self.op_time.most_common(num_ops)
    )
    return [*lines, f"serial: {serial}", f"longest ops: {longest}"]
