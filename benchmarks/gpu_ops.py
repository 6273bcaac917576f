"""Speed of the GPU kernels, as a share of the copy bandwidth measured in the same run.

  python benchmarks/gpu_ops.py [--repeats 15] [--only NAME ...]

Kernels are called through the C interface of libmonolith_cuda.so, without TensorFlow between; each
moves at least 100 MB. A row's bytes are those that must be read and written once; two gradients
sort their rows first, and a second share counts what that moves, too. The optimizers and clipping
are compared with TensorFlow's own ops, inside TensorFlow. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import pathlib
import statistics
import sys
import time
from typing import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

LIBRARY = ROOT / "monolith/native_training/runtime/ops/libmonolith_cuda.so"
CALLS = 5  # between two looks at the clock


class Feature(ctypes.Structure):
  _fields_ = [
    ("width", ctypes.c_int64),
    ("positions", ctypes.c_int64),
    ("num_targets", ctypes.c_int64),
    ("mean", ctypes.c_int32),
    ("first_n", ctypes.c_int32),
  ]


class Target(ctypes.Structure):
  _fields_ = [
    ("output", ctypes.c_int64),
    ("column", ctypes.c_int64),
    ("step", ctypes.c_int64),
    ("start", ctypes.c_int64),
    ("width", ctypes.c_int64),
    ("add", ctypes.c_int32),
  ]


class Plan(ctypes.Structure):
  _fields_ = [
    ("features", ctypes.c_void_p),
    ("targets", ctypes.c_void_p),
    ("row_sizes", ctypes.c_void_p),
    ("num_features", ctypes.c_int64),
    ("num_outputs", ctypes.c_int64),
  ]


class Request(ctypes.Structure):
  _fields_ = [
    ("ids", ctypes.c_void_p),
    ("rows", ctypes.c_void_p),
    ("starts", ctypes.c_void_p),
    ("num_ids", ctypes.c_int64),
    ("num_rows", ctypes.c_int64),
    ("num_starts", ctypes.c_int64),
    ("batch_size", ctypes.c_int64),
  ]


@functools.lru_cache(maxsize=4)
def _random_floats(n: int) -> np.ndarray:
  return np.random.default_rng(n).random(n, np.float32)


class Gpu:
  """The library, with buffers that live until `close`."""

  def __init__(self, library: pathlib.Path = LIBRARY) -> None:
    self._buffers: list[ctypes.c_void_p] = []
    self._library = ctypes.CDLL(str(library))
    self._library.mono_gpu_last_error.restype = ctypes.c_char_p

  def call(self, name: str, *arguments) -> None:
    """Calls mono_gpu_<name>. Raises RuntimeError with the library's text."""
    if getattr(self._library, f"mono_gpu_{name}")(*arguments) != 0:
      raise RuntimeError(f"mono_gpu_{name}: {self._library.mono_gpu_last_error().decode()}")

  def empty(self, num_bytes: int) -> ctypes.c_void_p:
    memory = ctypes.c_void_p()
    self.call("allocate", ctypes.c_int64(num_bytes), ctypes.byref(memory))
    self._buffers.append(memory)
    return memory

  def close(self) -> None:
    while self._buffers:
      self.call("free", self._buffers.pop())

  def put(self, values: np.ndarray) -> ctypes.c_void_p:
    values = np.ascontiguousarray(values)
    memory = self.empty(values.nbytes)
    self.call(
      "write_now", values.ctypes.data_as(ctypes.c_void_p), memory, ctypes.c_int64(values.nbytes)
    )
    return memory

  def get(self, memory: ctypes.c_void_p, n: int) -> np.ndarray:
    """Returns n floats of the device."""
    values = np.empty(n, np.float32)
    self.call("synchronize", None)
    self.call(
      "read_now", memory, values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.nbytes)
    )
    return values

  def floats(self, n: int) -> ctypes.c_void_p:
    return self.put(_random_floats(n))

  def with_workspace(self, name: str, *arguments) -> Callable[[], None]:
    """Returns a call of an op, its workspace allocated."""
    size = ctypes.c_int64()
    self.call(name, None, *arguments, None, ctypes.byref(size))
    workspace = self.empty(size.value)
    return lambda: self.call(name, None, *arguments, workspace, ctypes.byref(size))

  def seconds(self, call: Callable[[], None], repeats: int) -> float:
    """Returns the median time of a call."""
    times = []
    for i in range(repeats + 2):
      self.call("synchronize", None)
      start = time.perf_counter()
      for _ in range(CALLS):
        call()
      self.call("synchronize", None)
      if i >= 2:
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def pointers(*memory) -> ctypes.Array:
  return (ctypes.c_void_p * len(memory))(*(m.value if m else None for m in memory))


def numbers(*values: int) -> ctypes.Array:
  return (ctypes.c_int64 * len(values))(*values)


def _i64(value: int) -> ctypes.c_int64:
  return ctypes.c_int64(value)


def _sort_bytes(rows: int, places: int, dim: int) -> int:
  """Returns the bytes of listing, sorting and reading (key, row) pairs, 8 bytes each.

  The sort leaves out the bits of places that 4 KB hold, and a pass takes 8 of the others
  (runtime/gpu/bucket_sum.h).
  """
  left_out = (4096 // (4 * dim)).bit_length() - 1
  passes = -(-((places - 1).bit_length() - left_out) // 8)
  listed, counted, marked, read = 8, 4, 4, 8
  return rows * (listed + counted + 16 * passes + marked + read)


# Each returns the call, its bytes, the number of rows if a rate of those is of interest, and the
# bytes that a sort moves beside.


def copy(gpu: Gpu):
  n = 1 << 27
  source, to = gpu.floats(n), gpu.empty(4 * n)
  return lambda: gpu.call("copy", None, source, to, _i64(4 * n)), 8 * n, None, 0


def scale(gpu: Gpu):
  count, n = 100, 1 << 20
  inputs = [gpu.floats(n) for _ in range(count)]
  outputs = [gpu.empty(4 * n) for _ in range(count)]
  sizes, factor = numbers(*[n] * count), gpu.put(np.array([0.5], np.float32))
  call = gpu.with_workspace(
    "op_scale", _i64(count), pointers(*inputs), sizes, pointers(*outputs), sizes, factor
  )
  return call, 8 * n * count, None, 0


def sum_of_squares(gpu: Gpu):
  count, n = 100, 1 << 20
  inputs = [gpu.floats(n) for _ in range(count)]
  sizes = numbers(*[n] * count)
  call = gpu.with_workspace(
    "op_sum_of_squares", _i64(count), pointers(*inputs), sizes, gpu.empty(4)
  )
  return call, 4 * n * count, None, 0


def clip(gpu: Gpu):
  count, n = 100, 1 << 20
  inputs = [gpu.floats(n) for _ in range(count)]
  outputs = [gpu.empty(4 * n) for _ in range(count)]
  sizes = numbers(*[n] * count)
  call = gpu.with_workspace(
    "op_clip",
    _i64(count),
    pointers(*inputs),
    sizes,
    pointers(*outputs),
    ctypes.c_float(1.0),
    gpu.empty(4),
  )
  return call, 12 * n * count, None, 0


def _scalars(gpu: Gpu, decay: float = 0.9) -> ctypes.Array:
  return pointers(*(gpu.put(np.array([v], np.float32)) for v in (1e-3, decay, 0.99, 1e-6, 0.0)))


def _limit_of_c(decay: float) -> float:
  """Returns what Adamom's c comes to: its steps go up, and end where they are lost in rounding."""
  c, before = np.float32(0), np.float32(-1)
  while c != before:
    c, before = np.float32(decay) * c + np.float32(1), c
  return float(c)


def rmsprop(gpu: Gpu):
  n = 1 << 25
  arrays = [gpu.floats(n) for _ in range(4)]
  scalars = _scalars(gpu)
  call = lambda: gpu.call("op_rmsprop", None, _i64(n), scalars, *arrays, 0)  # noqa: E731
  return call, 7 * 4 * n, None, 0


def _adamom(gpu: Gpu, c: float, moved: int):
  n, decay = 1 << 25, 0.9999
  arrays = [gpu.floats(n) for _ in range(4)] + [gpu.put(np.full(n, c, np.float32))]
  scalars = _scalars(gpu, decay)
  call = lambda: gpu.call("op_adamom", None, _i64(n), scalars, *arrays, 0)  # noqa: E731
  return call, moved * 4 * n, None, 0


def adamom(gpu: Gpu):
  return _adamom(gpu, 0.0, 9)


def adamom_at_limit(gpu: Gpu):
  """As after 100,000 steps, when its c moves no more and is only read."""
  return _adamom(gpu, _limit_of_c(0.9999), 8)


def _ffm(gpu: Gpu, dot: bool, grad: bool):
  batch, left, right, dim = 1 << 15, 10, 12, 16
  width = left * right * (1 if dot else dim)
  x, y = gpu.floats(batch * left * dim), gpu.floats(batch * right * dim)
  sizes = [_i64(v) for v in (batch, left, right, dim)]
  inputs = 4 * batch * (left + right) * dim
  out = gpu.floats(batch * width)
  if not grad:
    call = lambda: gpu.call("op_ffm", None, *sizes, int(dot), x, y, out)  # noqa: E731
    return call, inputs + 4 * batch * width, None, 0
  dx, dy = gpu.empty(4 * batch * left * dim), gpu.empty(4 * batch * right * dim)
  call = lambda: gpu.call("op_ffm_grad", None, *sizes, int(dot), out, x, y, dx, dy)  # noqa: E731
  return call, 2 * inputs + 4 * batch * width, None, 0


def ffm_multiply(gpu: Gpu):
  return _ffm(gpu, dot=False, grad=False)


def ffm_multiply_grad(gpu: Gpu):
  return _ffm(gpu, dot=False, grad=True)


def _gather_inputs(gpu: Gpu, hot: float = 0.0, dim: int = 16):
  """As many floats whatever the width; `hot`: the share of the rows that are of one place."""
  rows, table = (1 << 27) // dim, (1 << 26) // dim
  rng = np.random.default_rng(1)
  offsets = rng.integers(0, table, rows).astype(np.int32) * dim
  offsets[rng.random(rows) < hot] = 3 * dim
  return rows, table * dim, dim, gpu.put(offsets)


def gather(gpu: Gpu):
  rows, size, dim, offsets = _gather_inputs(gpu)
  fused, out = gpu.floats(size), gpu.empty(4 * rows * dim)
  call = gpu.with_workspace(
    "op_gather",
    _i64(1),
    fused,
    _i64(size),
    pointers(offsets),
    numbers(rows),
    numbers(dim),
    pointers(out),
  )
  return call, rows * (4 + 8 * dim), rows, 0


def gather_grad(gpu: Gpu, hot: float = 0.0, dim: int = 16):
  rows, size, dim, offsets = _gather_inputs(gpu, hot, dim)
  grads, out = gpu.floats(rows * dim), gpu.empty(4 * size)
  call = gpu.with_workspace(
    "op_gather_grad",
    _i64(1),
    pointers(grads),
    pointers(offsets),
    numbers(rows),
    numbers(dim),
    gpu.put(np.array([1.0], np.float32)),
    out,
    _i64(size),
  )
  return call, rows * (4 + 4 * dim) + 4 * size, rows, _sort_bytes(rows, size // dim, dim)


def gather_grad_32(gpu: Gpu):
  return gather_grad(gpu, dim=32)


def gather_grad_64(gpu: Gpu):
  return gather_grad(gpu, dim=64)


def gather_grad_128(gpu: Gpu):
  return gather_grad(gpu, dim=128)


def gather_grad_hot(gpu: Gpu):
  return gather_grad(gpu, hot=0.1)


def gather_grad_one(gpu: Gpu):
  return gather_grad(gpu, hot=1.0)


def gather_grad_mixed(gpu: Gpu, hot: float = 0.0, skew: int = 1, dims: tuple[int, ...] = (16, 32)):
  """Rows of two widths.

  `hot`: the share of each width's rows that are of one place; `skew`: the power of a random number
  that chooses places, so that with 4 the n-th place has about n ** -0.75 of the first one's rows.
  """
  rows = (3 << 26) // sum(dims)
  table = rows // 2
  rng = np.random.default_rng(5)
  grads, offsets, size = [], [], 0
  for dim in dims:
    places = size + (rng.random(rows) ** skew * table).astype(np.int64) * dim
    places[rng.random(rows) < hot] = size + 3 * dim
    offsets.append(gpu.put(places.astype(np.int32)))
    grads.append(gpu.floats(rows * dim))
    size += table * dim
  call = gpu.with_workspace(
    "op_gather_grad",
    _i64(len(dims)),
    pointers(*grads),
    pointers(*offsets),
    numbers(*[rows] * len(dims)),
    numbers(*dims),
    gpu.put(np.array([1.0], np.float32)),
    gpu.empty(4 * size),
    _i64(size),
  )
  return call, sum(rows * (4 + 4 * dim) for dim in dims) + 4 * size, len(dims) * rows, 0


def gather_grad_mixed_hot(gpu: Gpu):
  return gather_grad_mixed(gpu, hot=0.1)


def gather_grad_mixed_one(gpu: Gpu):
  return gather_grad_mixed(gpu, hot=1.0)


def gather_grad_mixed_64(gpu: Gpu):
  return gather_grad_mixed(gpu, dims=(16, 64))


def gather_grad_mixed_skewed(gpu: Gpu):
  return gather_grad_mixed(gpu, skew=4)


def segment_sum(gpu: Gpu):
  count, rows, dim = 1 << 23, 1 << 21, 16
  indices = np.sort(np.random.default_rng(2).integers(0, rows, count)).astype(np.int32)
  call = gpu.with_workspace(
    "op_segment_sum",
    _i64(1),
    4,
    pointers(gpu.put(indices)),
    numbers(count),
    pointers(gpu.floats(count * dim)),
    numbers(rows),
    numbers(dim),
    gpu.empty(4 * rows * dim),
    numbers(0),
  )
  return call, count * (4 + 4 * dim) + 4 * rows * dim, count, 0


def _reduce(gpu: Gpu, grad: bool):
  tables, batch, dim, slices = 8, 1 << 16, 32, 2
  rng = np.random.default_rng(3)
  splits = np.zeros((tables, batch + 1), np.int32)
  splits[:, 1:] = np.cumsum(rng.integers(0, 8, (tables, batch)), axis=1)
  rows = [int(s[-1]) for s in splits]
  table_side = [gpu.floats(r * dim) for r in rows]
  slice_side = [gpu.floats(batch * dim // slices) for _ in range(tables * slices)]
  sizes = [
    numbers(*rows),
    numbers(*[slices] * tables),
    numbers(*[dim // slices] * tables * slices),
  ]
  sides = [table_side, slice_side]
  source, to = reversed(sides) if grad else sides
  call = gpu.with_workspace(
    "op_reduce_split_grad" if grad else "op_reduce_split",
    _i64(tables),
    _i64(batch),
    gpu.put(splits),
    pointers(*source),
    *sizes,
    pointers(*to),
  )
  return call, 4 * sum(rows) * dim + 4 * tables * batch * dim, None, 0


def reduce_split(gpu: Gpu):
  return _reduce(gpu, grad=False)


def reduce_split_grad(gpu: Gpu):
  return _reduce(gpu, grad=True)


def _layout(gpu: Gpu, grad: bool, hot: float = 0.0, widths: tuple[int, ...] = (16,)):
  """`hot`: the share of the ids that are one, of those of a width."""
  features, batch, per_row, table = 20, 1 << 16, 3, 50_000
  rng = np.random.default_rng(4)
  num_ids = features * batch * per_row
  of_feature = np.repeat(np.arange(features), batch * per_row)
  dims = np.resize(widths, features)
  columns = np.concatenate([[0], np.cumsum(dims)])
  dim_of = dims[of_feature]
  ids = columns[of_feature] * table + rng.integers(0, table, num_ids) * dim_of
  is_hot = rng.random(num_ids) < hot
  ids[is_hot] = (columns[of_feature % len(widths)] * table + 3 * dim_of)[is_hot]
  ids = ids.astype(np.uint64)
  rows = (np.arange(features * batch + 1) * per_row).astype(np.int32)
  starts = (np.arange(features + 1) * batch).astype(np.uint32)
  request = Request(
    gpu.put(ids).value,
    gpu.put(rows).value,
    gpu.put(starts).value,
    num_ids,
    rows.size,
    starts.size,
    batch,
  )
  width = int(columns[-1])
  size = width * table
  c_features = (Feature * features)(*(Feature(int(d), 1, 1, 0, 0) for d in dims))
  c_targets = (Target * features)(
    *(Target(0, int(columns[f]), width, 0, int(dims[f]), 0) for f in range(features))
  )
  row_sizes = numbers(width)
  plan = Plan(
    ctypes.addressof(c_features),
    ctypes.addressof(c_targets),
    ctypes.addressof(row_sizes),
    features,
    1,
  )
  layout = gpu.floats(batch * width)
  embeddings = gpu.floats(size)
  _KEPT.append((c_features, c_targets, row_sizes))
  if grad:
    call = gpu.with_workspace(
      "op_layout_grad",
      ctypes.byref(plan),
      ctypes.byref(request),
      _i64(1),
      numbers(0),
      numbers(size),
      pointers(layout),
      embeddings,
      _i64(size),
    )
    moved = 8 * num_ids + 4 * int(dim_of.sum()) + 4 * size
    # The place of each id's gradient is noted and read again; keys are set before.
    beside = 0
    if len(widths) == 1:
      beside = _sort_bytes(num_ids, size // widths[0], widths[0]) + 12 * num_ids
  else:
    call = gpu.with_workspace(
      "op_layout",
      ctypes.byref(plan),
      _i64(1),
      ctypes.byref(request),
      _i64(1),
      pointers(embeddings),
      numbers(size),
      pointers(layout),
    )
    moved, beside = 8 * num_ids + 4 * int(dim_of.sum()) + 4 * batch * width, 0
  return call, moved, num_ids, beside


_KEPT: list = []  # what the plans point to


def layout(gpu: Gpu):
  return _layout(gpu, grad=False)


def layout_grad(gpu: Gpu):
  return _layout(gpu, grad=True)


def layout_grad_64(gpu: Gpu):
  return _layout(gpu, grad=True, widths=(64,))


def layout_grad_128(gpu: Gpu):
  return _layout(gpu, grad=True, widths=(128,))


def layout_grad_hot(gpu: Gpu):
  return _layout(gpu, grad=True, hot=0.1)


def layout_grad_mixed(gpu: Gpu):
  return _layout(gpu, grad=True, widths=(16, 32))


def layout_grad_mixed_hot(gpu: Gpu):
  return _layout(gpu, grad=True, hot=0.1, widths=(16, 32))


KERNELS = (
  scale,
  sum_of_squares,
  clip,
  rmsprop,
  adamom,
  adamom_at_limit,
  ffm_multiply,
  ffm_multiply_grad,
  gather,
  gather_grad,
  gather_grad_32,
  gather_grad_64,
  gather_grad_128,
  gather_grad_hot,
  gather_grad_one,
  gather_grad_mixed,
  gather_grad_mixed_hot,
  gather_grad_mixed_one,
  gather_grad_mixed_64,
  gather_grad_mixed_skewed,
  segment_sum,
  reduce_split,
  reduce_split_grad,
  layout,
  layout_grad,
  layout_grad_64,
  layout_grad_128,
  layout_grad_hot,
  layout_grad_mixed,
  layout_grad_mixed_hot,
)


def measure(kernel: Callable, repeats: int, library: pathlib.Path = LIBRARY) -> str:
  """Returns the line of one kernel."""
  gpu = Gpu(library)
  call, moved, rows, beside = kernel(gpu)
  peer, peer_bytes, _, _ = copy(gpu)
  seconds, peer_seconds = gpu.seconds(call, repeats), gpu.seconds(peer, repeats)
  gpu.close()
  copied = peer_bytes / peer_seconds
  rate = f"  {rows / seconds / 1e9:6.2f} G rows/s" if rows else ""
  with_sort = f"  {(moved + beside) / seconds / copied:5.2f} with the sort" if beside else ""
  return (
    f"{moved / 1e6:8.0f} MB {seconds * 1e6:9.1f} us {moved / seconds / 1e12:6.2f} TB/s  "
    f"{moved / seconds / copied:5.2f} x copy{rate}{with_sort}"
  )


def kernel_rows(repeats: int, only: list[str]) -> None:
  """Prints one line per kernel."""
  for kernel in KERNELS:
    if not only or kernel.__name__ in only:
      print(f"{kernel.__name__:20s} {measure(kernel, repeats)}", flush=True)


def tensorflow_rows(repeats: int, only: list[str]) -> None:
  """Prints the ratios against TensorFlow's ops on the GPU."""
  import tensorflow as tf

  from monolith.native_training.runtime.ops import gen_monolith_ops as gen

  def seconds(function) -> float:
    start = time.perf_counter()
    result = function()
    # A value has to reach the host before the clock is read.
    tf.nest.flatten(result)[-1].numpy()
    return time.perf_counter() - start

  def row(name: str, ours, theirs) -> None:
    """Prints medians of calls that take turns."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(repeats + 3)][3:]
    a, b = (statistics.median(times) for times in zip(*pairs))
    print(f"{name:39s} {a * 1e6:9.1f} us against {b * 1e6:9.1f} us: {b / a:5.2f} x", flush=True)

  with tf.device("/GPU:0"):
    # Many steps, so that what a call of a function costs counts little.
    n, steps = 30_000_000, 50
    w, m, v, c = (tf.Variable(tf.random.uniform([n])) for _ in range(4))
    grad = tf.random.uniform([n])
    scalars = [tf.constant(x) for x in (1e-3, 0.9, 0.99, 1e-6, 0.0)]

    def repeat(step):
      @tf.function
      def run():
        for _ in range(steps):
          step()
        return w[0]

      return run

    adam = repeat(
      lambda: tf.raw_ops.ResourceApplyAdam(
        var=w.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=0.9,
        beta2_power=0.99,
        lr=1e-3,
        beta1=0.9,
        beta2=0.99,
        epsilon=1e-6,
        grad=grad,
      )
    )
    if not only or "rmsprop" in only:
      ours = repeat(
        lambda: gen.resource_apply_rmsprop(w.handle, m.handle, v.handle, *scalars, grad)
      )
      row("Rmsprop / ResourceApplyAdam", ours, adam)
    if not only or "adamom" in only:
      scalars[1] = tf.constant(0.9999)  # as the optimizer has it
      ours = repeat(
        lambda: gen.resource_apply_adamom(w.handle, m.handle, v.handle, c.handle, *scalars, grad)
      )
      c.assign(tf.zeros([n]))
      row("Adamom, first steps / ResourceApplyAdam", ours, adam)
      c.assign(tf.fill([n], _limit_of_c(0.9999)))
      row("Adamom, c at limit / ResourceApplyAdam", ours, adam)
    if not only or "clip" in only:
      grads = [tf.random.uniform([1 << 18]) for _ in range(100)]

      @tf.function
      def clip_ours():
        clipped, norm = gen.monolith_clip_by_global_norm_fused(grads, 1.0)
        return [*clipped, norm]

      @tf.function
      def clip_theirs():
        clipped, norm = tf.clip_by_global_norm(grads, 1.0)
        return [*clipped, norm]

      row("clip / tf.clip_by_global_norm", clip_ours, clip_theirs)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--only", nargs="*", default=[], help="names of rows")
  options = parser.parse_args()
  if not LIBRARY.exists():
    print(f"{LIBRARY.name} is missing: run `make gpu`.")
    return 1
  count = ctypes.c_int32()
  if ctypes.CDLL(str(LIBRARY)).mono_gpu_device_count(ctypes.byref(count)) != 0 or not count.value:
    print("No GPU: there is nothing to measure here.")
    return 0
  kernel_rows(options.repeats, options.only)
  if not options.only or {"rmsprop", "adamom", "clip"}.intersection(options.only):
    tensorflow_rows(options.repeats, options.only)
  return 0


if __name__ == "__main__":
  sys.exit(main())
