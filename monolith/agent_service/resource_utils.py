"""Memory and CPU of this process's container, and sizes of exported models."""

from __future__ import annotations

import os
import re
import time

try:
  import psutil
except ImportError:  # Without it, what the kernel says about the container is enough.
  psutil = None

_CGROUP = "/sys/fs/cgroup"
_SHARD_FILE = re.compile(r".*_(\d+)-\d+-of-\d+")


def total_memory(cgroup: str = _CGROUP) -> int:
  """Returns the bytes that this container may use: its limit, else the host's memory."""
  limit = _read_number(os.path.join(cgroup, "memory.max"))
  host = _host_memory("MemTotal")
  return host if limit is None else min(limit, host)


def available_memory(cgroup: str = _CGROUP) -> int:
  """Returns the bytes that this container can still use."""
  host = _host_memory("MemAvailable")
  limit = _read_number(os.path.join(cgroup, "memory.max"))
  used = _read_number(os.path.join(cgroup, "memory.current"))
  return host if limit is None or used is None else max(0, min(limit - used, host))


def num_cpu(cgroup: str = _CGROUP) -> float:
  """Returns how many processors this container may use."""
  try:
    with open(os.path.join(cgroup, "cpu.max"), encoding="utf-8") as file:
      quota, _, period = file.read().strip().partition(" ")
    if quota != "max":
      return int(quota) / int(period)
  except (OSError, ValueError, ZeroDivisionError):
    pass
  return float(os.cpu_count() or 1)


def cpu_usage(interval_secs: float = 0.1, cgroup: str = _CGROUP) -> float:
  """Returns the share of its processors that this container used, from 0 to 1, over an interval."""
  before = _cpu_seconds(cgroup)
  start = time.monotonic()
  time.sleep(interval_secs)
  used = _cpu_seconds(cgroup) - before
  return min(1.0, max(0.0, used / (time.monotonic() - start) / num_cpu(cgroup)))


def cal_model_info_v2(
  exported_models: str, ckpt: str | None = None, version: int | str | None = None
) -> dict[str, tuple[int, str]]:
  """Returns the size of every sub model, with the rows that a checkpoint keeps for it.

  Args:
    exported_models: folder with a folder per sub model, which has a folder per version.
    ckpt: prefix of a checkpoint, `model.ckpt-<step>`. The version of that step is taken where all
      sub models have it, and the files of `<ckpt>.assets` count for `ps_<i>`.
    version: which version; by default that of the checkpoint, else the newest that all have.

  Returns:
    sub model -> (bytes, path of its version).

  Raises:
    FileNotFoundError: there is no sub model, or no version that all of them have.
  """
  versions = _list_versions(exported_models)
  common = set.intersection(*(set(found) for found in versions.values())) if versions else set()
  if not common:
    raise FileNotFoundError(f"{exported_models} has no version that all of {sorted(versions)} have")
  if version is None and ckpt is not None:
    step = os.path.basename(ckpt).rpartition("-")[2]
    version = int(step) if step.isdigit() and int(step) in common else None
  chosen = max(common) if version is None else int(version)
  if chosen not in common:
    raise FileNotFoundError(f"{exported_models} has no version {chosen} of all sub models")
  sizes = {}
  for name in sorted(versions):
    path = os.path.join(exported_models, name, str(chosen))
    sizes[name] = (_folder_size(path), path)
  for name, size in _asset_sizes(ckpt).items():
    if name in sizes:
      sizes[name] = (sizes[name][0] + size, sizes[name][1])
  return sizes


def _list_versions(folder: str) -> dict[str, list[int]]:
  versions = {}
  for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    if os.path.isdir(path):
      versions[name] = [int(v) for v in os.listdir(path) if v.isascii() and v.isdigit()]
  return versions


def _asset_sizes(ckpt: str | None) -> dict[str, int]:
  sizes: dict[str, int] = {}
  folder = f"{ckpt}.assets"
  if ckpt is None or not os.path.isdir(folder):
    return sizes
  for name in os.listdir(folder):
    match = _SHARD_FILE.fullmatch(name)
    if match:
      key = f"ps_{int(match[1])}"
      sizes[key] = sizes.get(key, 0) + os.path.getsize(os.path.join(folder, name))
  return sizes


def _folder_size(folder: str) -> int:
  return sum(
    os.path.getsize(os.path.join(parent, name))
    for parent, _, files in os.walk(folder)
    for name in files
  )


def _cpu_seconds(cgroup: str) -> float:
  try:
    with open(os.path.join(cgroup, "cpu.stat"), encoding="utf-8") as file:
      for line in file:
        key, _, value = line.partition(" ")
        if key == "usage_usec":
          return int(value) / 1e6
  except (OSError, ValueError):
    pass
  times = os.times()
  return times.user + times.system


def _read_number(path: str) -> int | None:
  """Returns the number in a file, `None` for no such file and for `max`."""
  try:
    with open(path, encoding="utf-8") as file:
      return int(file.read())
  except (OSError, ValueError):
    return None


def _host_memory(key: str) -> int:
  if psutil is not None:
    memory = psutil.virtual_memory()
    return memory.total if key == "MemTotal" else memory.available
  with open("/proc/meminfo", encoding="utf-8") as file:
    for line in file:
      if line.startswith(f"{key}:"):
        return int(line.split()[1]) * 1024
  raise OSError(f"/proc/meminfo has no {key}")
