"""Computes where the time of a step goes, from a profile of a training run.

A run profiles ten steps within its first minute, and ten more from time to time
(`enable_tf2_profiler_hook`), with every op of every thread. Threads work at the same time, so the
parts of a step may add up to more than its length.
"""

from __future__ import annotations

import collections
import glob
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf import message
from tensorflow.tsl.profiler.protobuf import xplane_pb2

READING = "reading and parsing data"
LOOKUP = "looking up rows"
UPDATE = "updating rows"
FORWARD = "the model, forward"
BACKWARD = "the model, gradients"
OPTIMIZER = "optimizer of variables"
TRANSFER = "queues, sending and receiving"

_PS_PER_MS = 1e9
_HOST_PLANE = "/host:CPU"
_INPUT_THREADS = "tf_data_"
# The name of a step of the session in a profile.
_STEP = "train"
_RUN = "SessionRun"
_WAITING = ("QueueDequeue", "IteratorGetNext", "RecvTensor", "_HostRecv", "_Recv", "Barrier")
_INPUT_WAITING = ("Consume", "Prefetch", "ParallelMapV2", "ParallelInterleaveV4")
_TRANSFERS = ("Queue", "_Send", "_HostSend", "Iterator")


class StepTime(NamedTuple):
  """The parts of the time of a step.

  Attributes:
    num_steps: the number of profiled steps.
    step_ms: the length of a step.
    parts_ms: the milliseconds of each part, of all threads together, the longest first.
    time: when the profile was written, in unix seconds.
  """

  num_steps: int
  step_ms: float
  parts_ms: dict[str, float]
  time: float = 0.0


def read(model_dir: str) -> StepTime | None:
  """Returns the result of the newest profile below a model's folder; `None` if there is none.

  Raises:
    ValueError: the profile is damaged.
  """
  profiles = read_all(model_dir, limit=1)
  return profiles[0] if profiles else None


def read_all(model_dir: str, limit: int = 10) -> list[StepTime]:
  """Returns the results of the newest profiles below a model's folder, the oldest of them first.

  Args:
    model_dir: the folder.
    limit: how many profiles to read at most.

  Raises:
    ValueError: a profile is damaged.
  """
  pattern = os.path.join(glob.escape(model_dir), "plugins", "profile", "*", "*.xplane.pb")
  paths = sorted(glob.glob(pattern), key=os.path.getmtime)[-limit:]
  return [found for path in paths for found in _read_profile(path)]


def _read_profile(path: str) -> Sequence[StepTime]:
  """Returns the result of a profile: one item, or none if it has no step."""
  with open(path, "rb") as file:
    try:
      space = xplane_pb2.XSpace.FromString(file.read())
    except message.DecodeError as e:
      raise ValueError(f"the profile {path} is damaged: {e}") from e
  for plane in space.planes:
    if plane.name == _HOST_PLANE:
      found = _summarise(plane)
      return [] if found is None else [found._replace(time=os.path.getmtime(path))]
  return []


def _summarise(plane: Any) -> StepTime | None:
  names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
  parts: dict[str, float] = collections.Counter()
  steps: list[float] = []
  runs: list[float] = []
  for line in plane.lines:
    if line.name.startswith(_INPUT_THREADS):
      parts[READING] += _working_ps(line.events, names)
      continue
    for event in line.events:
      name = names.get(event.metadata_id, "")
      if name == _STEP:
        steps.append(event.duration_ps)
      elif name == _RUN:
        runs.append(event.duration_ps)
      else:
        part = _part_of(name)
        if part is not None:
          parts[part] += event.duration_ps
  steps = steps or runs
  if not steps:
    return None
  order = sorted(parts, key=lambda part: -parts[part])
  return StepTime(
    len(steps),
    sum(steps) / len(steps) / _PS_PER_MS,
    {part: parts[part] / len(steps) / _PS_PER_MS for part in order if parts[part]},
  )


def _working_ps(events: Any, names: dict[int, str]) -> float:
  """Returns the time for which a thread of the input pipeline works.

  Events are nested. Each counts without those inside it, and not at all if the thread waits for
  others in it.
  """
  working = 0
  stack: list[Any] = []  # [end, does it work], the innermost last
  for event in sorted(events, key=lambda e: (e.offset_ps, -e.duration_ps)):
    while stack and stack[-1][0] <= event.offset_ps:
      stack.pop()
    if stack and stack[-1][1]:
      working -= event.duration_ps
    works = not names.get(event.metadata_id, "").endswith(_INPUT_WAITING)
    if works:
      working += event.duration_ps
    stack.append((event.offset_ps + event.duration_ps, works))
  return float(max(0, working))


def _part_of(name: str) -> str | None:
  """Returns the part of a step that an event belongs to; `None` for other and outer events.

  Args:
    name: `<name of the op>:<its type>` of an op.
  """
  op_name, colon, op_type = name.rpartition(":")
  if not colon or op_name.endswith(":") or any(waiting in op_type for waiting in _WAITING):
    return None
  if "HashTable" in op_type:
    return LOOKUP if "Lookup" in op_type else UPDATE
  if any(transfer in op_type for transfer in _TRANSFERS):
    return TRANSFER
  if "Apply" in op_type:
    return OPTIMIZER
  return BACKWARD if op_name.startswith("gradients") else FORWARD
