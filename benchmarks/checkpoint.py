"""Speed of saving and restoring a table, against `dd` with the same bytes on the same disk.

  python benchmarks/checkpoint.py [--rows 10000000] [--repeats 3] [--dir /tmp]

`dd` writes with `conv=fsync`, for a save is only over when its files are on the disk. Reads are
measured twice: with the files in the page cache, where `dd` is a copy in memory, and after asking
the kernel to drop them. The memory column is how much the process grew at most beyond the table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import glob
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # The other side of the comparison runs there, too.
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from ratio_table import record  # noqa: E402

from monolith.native_training import hash_table_ops  # noqa: E402

tf.compat.v1.disable_eager_execution()

_DIM = 16
_FILL_BATCH = 500_000
_WANTED_RATIO = 0.6
_WANTED_EXTRA_MEMORY = 0.1


class Memory:
  """The largest size that the process has had in a block, as growth over what it had before."""

  def __init__(self):
    self.growth = 0

  @contextlib.contextmanager
  def watch(self) -> Iterator[None]:
    # 5 resets the high-water mark (proc(5)).
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield
    self.growth = max(self.growth, _status("VmHWM") - before)


def _status(name: str) -> int:
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(name + ":"):
      return int(line.split()[1]) * 1024
  raise ValueError(f"/proc/self/status has no {name}")


def _drop_from_cache(paths: list[str]) -> None:
  for path in paths:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _dd(*args: str) -> None:
  subprocess.run(["dd", "bs=1M", *args], check=True, capture_output=True)


def _seconds(function: Callable[[], object]) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def _fill(sess: tf.compat.v1.Session, table: hash_table_ops.HashTable, rows: int) -> None:
  ids = tf.compat.v1.placeholder(tf.int64, [None])
  values = tf.compat.v1.placeholder(tf.float32, [None, _DIM])
  assign = table.assign(ids, values).as_op()
  rng = np.random.default_rng(1)
  for start in range(0, rows, _FILL_BATCH):
    count = min(_FILL_BATCH, rows - start)
    batch = np.arange(start, start + count) * 7919
    sess.run(assign, {ids: batch, values: rng.random([count, _DIM], np.float32)})


def _row(name: str, ours: list[float], peer: list[float], size: int, memory: str) -> str:
  our_speed = size / statistics.median(ours) / 1e6
  peer_speed = size / statistics.median(peer) / 1e6
  ratio = our_speed / peer_speed
  below = "  BELOW" if ratio < _WANTED_RATIO else ""
  return f"{name:<28} {our_speed:>9.0f} {peer_speed:>9.0f} {ratio:>7.2f} {memory:>13}{below}"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rows", type=int, default=10_000_000)
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--dir", default=None, help="a folder on the disk to measure")
  args = parser.parse_args()

  with tempfile.TemporaryDirectory(dir=args.dir) as folder, tf.compat.v1.Session() as sess:
    table = hash_table_ops.test_hash_table(_DIM, use_adagrad=True, name_suffix="saved")
    target = hash_table_ops.test_hash_table(_DIM, use_adagrad=True, name_suffix="restored")
    basename = os.path.join(folder, "table")
    save, restore = table.save(basename).as_op(), target.restore(basename).as_op()
    target_size = target.size()
    before = _status("VmRSS")
    _fill(sess, table, args.rows)
    table_bytes = _status("VmRSS") - before
    print(f"{args.rows} rows of dimension {_DIM} with Adagrad: {table_bytes / 1e6:.0f} MB")

    peer_file = os.path.join(folder, "dd")
    times: dict[str, list[float]] = {}
    save_memory, restore_memory = Memory(), Memory()

    def measure(name: str, function: Callable[[], object]) -> None:
      times.setdefault(name, []).append(_seconds(function))

    for repeat in range(args.repeats):
      with save_memory.watch():
        measure("save", lambda: sess.run(save))
      files = glob.glob(basename + "-*")
      size = sum(os.path.getsize(path) for path in files)
      write = [f"of={peer_file}", f"count={size >> 20}", "conv=fsync"]
      measure("dd write", functools.partial(_dd, "if=/dev/zero", *write))
      # The first restore fills an empty table; later ones load aside what replaces a full one.
      with restore_memory.watch() if repeat == 0 else contextlib.nullcontext():
        measure("restore", lambda: sess.run(restore))
      measure("dd read", lambda: _dd(f"if={peer_file}", "of=/dev/null"))
      _drop_from_cache([*files, peer_file])
      measure("cold restore", lambda: sess.run(restore))
      measure("cold dd read", lambda: _dd(f"if={peer_file}", "of=/dev/null"))
      os.remove(peer_file)
    if sess.run(target_size) != args.rows:
      raise RuntimeError(f"restored {sess.run(target_size)} rows of {args.rows}")

  extra_save = save_memory.growth / table_bytes
  extra_restore = max(0.0, restore_memory.growth / table_bytes - 1)
  print(f"{size / 1e6:.0f} MB in {len(files)} files; speeds in MB/s, medians of {args.repeats}\n")
  print(f"{'':<28} {'ours':>9} {'dd':>9} {'ratio':>7} {'extra memory':>13}")
  for name, ours, peer, memory in (
    ("save (with fsync)", "save", "dd write", f"{extra_save:.1%}"),
    ("restore (page cache)", "restore", "dd read", f"{extra_restore:.1%}"),
    ("restore (cache dropped)", "cold restore", "cold dd read", ""),
  ):
    print(_row(name, times[ours], times[peer], size, memory))
    ratio = statistics.median(times[peer]) / statistics.median(times[ours])
    record([(name, "dd", ratio)])
  print(f"\nwanted: ratio {_WANTED_RATIO} and {_WANTED_EXTRA_MEMORY:.0%} extra memory at most")


if __name__ == "__main__":
  main()
