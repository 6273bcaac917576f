"""Compares the GPU kernels with other numbers of accesses in flight (runtime/gpu/tuning.h).

  python benchmarks/gpu_kernels.py [--repeats 9] [--check] [--only NAME ...]

Compiles the CUDA library once for every row of _VARIANTS, for this machine's GPU, and measures
the kernels that the row concerns as gpu_ops.py does. Needs a GPU and nvcc, not TensorFlow. With
--check the sums of the library as it is are compared with numpy's first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

import gpu_ops  # noqa: E402
import native_build  # noqa: E402
import numpy as np  # noqa: E402

# The source that a number changes, the kernels to measure, and the numbers to try.
_VARIANTS = (
  ("SEGMENT_ROWS", "segment.cu", (gpu_ops.segment_sum,), (2, 4, 8)),
  ("SEGMENT_EXAMPLES", "segment.cu", (gpu_ops.segment_sum,), (2, 8)),
  ("REDUCE_ROWS", "segment.cu", (gpu_ops.reduce_split,), (4, 8)),
  ("POOL_BLOCKS", "layout.cu", (gpu_ops.layout,), (3, 4, 5, 6)),
  (
    "BUCKET_BLOCKS",
    "gather.cu",
    (gpu_ops.gather_grad, gpu_ops.gather_grad_hot, gpu_ops.gather_grad_one),
    (8, 9, 12),
  ),
  (
    "BUCKET_ROUNDS",
    "gather.cu",
    (gpu_ops.gather_grad, gpu_ops.gather_grad_64, gpu_ops.gather_grad_hot),
    (1, 2, 4),
  ),
  (
    "BUCKET_ROUNDS",
    "layout_grad.cu",
    (gpu_ops.layout_grad, gpu_ops.layout_grad_64, gpu_ops.layout_grad_hot),
    (1, 2, 4),
  ),
  (
    "RUN_STRETCH",
    "gather.cu",
    (
      gpu_ops.gather_grad_mixed_hot,
      gpu_ops.gather_grad_mixed_one,
      gpu_ops.gather_grad_mixed_skewed,
    ),
    (256, 512, 1024),
  ),
  (
    "MAX_PIECES",
    "gather.cu",
    (
      gpu_ops.gather_grad,
      gpu_ops.gather_grad_mixed,
      gpu_ops.gather_grad_mixed_64,
      gpu_ops.gather_grad_mixed_skewed,
    ),
    (1, 8),
  ),
  (
    "MAX_PIECES",
    "layout_grad.cu",
    (gpu_ops.layout_grad, gpu_ops.layout_grad_mixed, gpu_ops.layout_grad_mixed_hot),
    (1, 8),
  ),
  (
    "BUCKET_STRETCH",
    "gather.cu",
    (gpu_ops.gather_grad, gpu_ops.gather_grad_hot, gpu_ops.gather_grad_mixed_skewed),
    (512, 1024, 2048),
  ),
  (
    "BUCKET_STRETCH",
    "layout_grad.cu",
    (gpu_ops.layout_grad, gpu_ops.layout_grad_hot, gpu_ops.layout_grad_mixed_hot),
    (512, 1024, 2048),
  ),
  ("BUCKET_ROWS", "layout_grad.cu", (gpu_ops.layout_grad,), (128, 256)),
  (
    "BUCKET_BLOCKS",
    "layout_grad.cu",
    (gpu_ops.layout_grad, gpu_ops.layout_grad_hot),
    (8, 9, 12),
  ),
)


def _compile(nvcc: str, source: str, define: str, folder: pathlib.Path) -> pathlib.Path:
  """Returns the object file of a source."""
  path = folder / f"{source}.{define}.o"
  command = [nvcc, *native_build.CUDA_FLAGS.split(), "-arch=native", "-c"]
  if define:
    command.append(f"-DMONO_GPU_{define}")
  command += [str(native_build.RUNTIME / "gpu" / source), "-o", str(path)]
  subprocess.run(command, cwd=ROOT, check=True)
  return path


def _link(nvcc: str, objects: list[pathlib.Path], path: pathlib.Path) -> pathlib.Path:
  """Returns the library, whose name no other has: a process loads it beside the others."""
  command = [nvcc, *native_build.CUDA_LINK_FLAGS.split(), "-o", str(path), *map(str, objects)]
  subprocess.run(command, cwd=ROOT, check=True)
  return path


def _close(name: str, got: np.ndarray, want: np.ndarray) -> None:
  """Raises AssertionError where the results are not those of numpy."""
  error = float((np.abs(got - want) / np.maximum(1, np.abs(want))).max())
  print(f"{name:18s} differs from numpy by {error:.1e} at most", flush=True)
  assert error <= 1e-4, (name, error)


def check(library: pathlib.Path) -> None:
  """Compares the kernels that sum with numpy, on problems of a few thousand rows.

  Raises:
    AssertionError: they differ.
  """
  gpu = gpu_ops.Gpu(library)
  rng = np.random.default_rng(7)
  one = gpu.put(np.array([1.0], np.float32))
  numbers, pointers = gpu_ops.numbers, gpu_ops.pointers
  for dim, rows, places in (
    (16, 40_000, 20_001),
    (16, 400_000, 9001),
    (16, 100_000, 5),
    (5, 3000, 40),
    (2, 90_000, 1000),
    (64, 9000, 70_000),
    (300, 99, 7),
  ):
    size = places * dim
    indices = rng.integers(0, places, rows)
    indices[rng.random(rows) < 0.1] = 3  # a place with many rows
    grads = rng.random((rows, dim), np.float32)
    want = np.zeros((places, dim), np.float32)
    np.add.at(want, indices, grads)
    out = gpu.put(np.full(size, 7, np.float32))
    gpu.with_workspace(
      "op_gather_grad",
      ctypes.c_int64(1),
      pointers(gpu.put(grads)),
      pointers(gpu.put((indices * dim).astype(np.int32))),
      numbers(rows),
      numbers(dim),
      one,
      out,
      ctypes.c_int64(size),
    )()
    _close(f"gather_grad {dim}", gpu.get(out, size), want.ravel())

    order = np.argsort(indices, kind="stable")
    out = gpu.put(np.full(size, 7, np.float32))
    gpu.with_workspace(
      "op_segment_sum",
      ctypes.c_int64(1),
      4,
      pointers(gpu.put(indices[order].astype(np.int32))),
      numbers(rows),
      pointers(gpu.put(grads[order])),
      numbers(places),
      numbers(dim),
      out,
      numbers(0),
    )()
    _close(f"segment_sum {dim}", gpu.get(out, size), want.ravel())
  _check_mixed(gpu, rng)
  gpu.close()


def _check_mixed(gpu: gpu_ops.Gpu, rng: np.random.Generator) -> None:
  """The same for rows of several widths, of which some or all are at one place of their own."""
  one = gpu.put(np.array([1.0], np.float32))
  for dims, rows, places, hot, shift in (
    ((16, 32), 40_000, 9000, 0.1, 0),
    ((16, 32), 40_000, 9000, 1.0, 0),
    ((1, 64), 60_000, 500, 0.1, 0),
    ((1, 64), 60_000, 500, 1.0, 0),
    ((5, 300, 7), 3000, 40, 0.9, 0),
    ((16, 32), 40_000, 9000, 1.0, 7),  # they overlap
    ((1, 64), 3000, 500, 0.5, 3),
    ((8, 16), 0, 9, 0.0, 0),
  ):
    starts = np.cumsum([0, *(places * dim for dim in dims)])
    size = int(starts[-1])
    want = np.zeros(size, np.float64)
    grads, offsets = [], []
    for dim, start in zip(dims, starts):
      own = start + rng.integers(0, places, rows) * dim
      is_hot = rng.random(rows) < hot
      own[is_hot] = (start if shift == 0 else starts[1]) + shift * rng.integers(0, 4, is_hot.sum())
      values = rng.random((rows, dim), np.float32)
      np.add.at(want, own[:, None] + np.arange(dim), values)
      grads.append(gpu.put(values))
      offsets.append(gpu.put(own.astype(np.int32)))
    out = gpu.put(np.full(size, 7, np.float32))
    call = gpu.with_workspace(
      "op_gather_grad",
      ctypes.c_int64(len(dims)),
      gpu_ops.pointers(*grads),
      gpu_ops.pointers(*offsets),
      gpu_ops.numbers(*[rows] * len(dims)),
      gpu_ops.numbers(*dims),
      one,
      out,
      ctypes.c_int64(size),
    )
    call()
    first = gpu.get(out, size)
    _close(f"gather_grad {dims} {hot}", first, want)
    call()
    assert np.array_equal(gpu.get(out, size), first), "sums differ from call to call"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--only", nargs="*", default=[], help="names like SEGMENT_ROWS")
  parser.add_argument("--check", action="store_true", help="compare sums with numpy's first")
  options = parser.parse_args()
  nvcc = native_build.find_nvcc()
  if not nvcc:
    print("No nvcc: there is nothing to compile with here.")
    return 1
  variants = [v for v in _VARIANTS if not options.only or v[0] in options.only]
  # Tables are measured elsewhere, and need the engine.
  sources = sorted(s.name for s in native_build.cuda_sources() if "table" not in s.name)
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
  ):
    jobs = {(s, ""): pool.submit(_compile, nvcc, s, "", pathlib.Path(folder)) for s in sources}
    for name, source, _, numbers in variants:
      for number in numbers:
        key = (source, f"{name}={number}")
        jobs[key] = pool.submit(_compile, nvcc, *key, pathlib.Path(folder))
    if options.check:
      objects = [jobs[(s, "")].result() for s in sources]
      check(_link(nvcc, objects, pathlib.Path(folder) / "libchecked.so"))
    for name, source, kernels, numbers in variants:
      for number in numbers:
        own = (source, f"{name}={number}")
        objects = [jobs[own if s == source else (s, "")].result() for s in sources]
        library = _link(nvcc, objects, pathlib.Path(folder) / f"lib{source}.{own[1]}.so")
        for kernel in kernels:
          line = gpu_ops.measure(kernel, options.repeats, library)
          print(f"{kernel.__name__:18s} {own[1]:16s} {line}", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
