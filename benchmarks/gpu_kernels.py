"""Compares the GPU kernels with other numbers of accesses in flight (runtime/gpu/tuning.h).

  python benchmarks/gpu_kernels.py [--repeats 9] [--only NAME ...]

Compiles the CUDA library once for every row of _VARIANTS, for this machine's GPU, and measures
the kernels that the row concerns as gpu_ops.py does. Needs a GPU and nvcc, not TensorFlow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tools")]

import gpu_ops  # noqa: E402
import native_build  # noqa: E402

# Which source a number changes, which kernels to measure, and the numbers to try.
_VARIANTS = (
  ("SEGMENT_ROWS", "segment.cu", (gpu_ops.segment_sum,), (4, 8)),
  ("REDUCE_ROWS", "segment.cu", (gpu_ops.reduce_split,), (4, 8)),
  ("REDUCE_EXAMPLES", "segment.cu", (gpu_ops.reduce_split,), (2, 8)),
  ("SPREAD_EXAMPLES", "segment.cu", (gpu_ops.reduce_split_grad,), (2, 4, 8)),
  ("POOL_ITEMS", "layout.cu", (gpu_ops.layout,), (1, 2, 4, 8)),
  ("SCATTER_ROWS", "gather.cu", (gpu_ops.gather_grad,), (4, 8)),
  ("SCATTER_ROWS", "layout_grad.cu", (gpu_ops.layout_grad,), (4, 8)),
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


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--only", nargs="*", default=[], help="names like SEGMENT_ROWS")
  options = parser.parse_args()
  nvcc = native_build.find_nvcc()
  if not nvcc:
    print("No nvcc: there is nothing to compile with here.")
    return 1
  variants = [v for v in _VARIANTS if not options.only or v[0] in options.only]
  sources = sorted(source.name for source in native_build.cuda_sources())
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
  ):
    jobs = {(s, ""): pool.submit(_compile, nvcc, s, "", pathlib.Path(folder)) for s in sources}
    for name, source, _, numbers in variants:
      for number in numbers:
        key = (source, f"{name}={number}")
        jobs[key] = pool.submit(_compile, nvcc, *key, pathlib.Path(folder))
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
