"""The extras of the package, and a printer of requirement lists: `requirements.py build test ...`.

`build` is what compiling needs, `runtime` what the package needs, both from pyproject.toml; any
other name is an extra.
"""

from __future__ import annotations

import os
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_EXTRAS = {
  "tpu": ["cloud-tpu-client==0.10"],
  "horovod": ["horovod==0.28.1"],
  "kafka": ["confluent-kafka>=2.3"],
  # As in pyproject.toml: libmonolith_parquet.so names the libraries of the one it was built
  # with.
  "parquet": ["pyarrow>=21,<22"],
  # A CUDA compiler for x86-64 and ARM64, to build libmonolith_cuda.so; 120 MB to download.
  "cuda": [
    "nvidia-cuda-nvcc>=13,<14",
    "nvidia-nvvm>=13,<14",
    "nvidia-cuda-crt>=13,<14",
    "nvidia-cuda-runtime>=13,<14",
    "nvidia-cuda-cccl>=13,<14",
  ],
  # Newer health and reflection services need a protobuf that TensorFlow 2.15 does not run with.
  "serving": [
    "tensorflow-serving-api==2.15.1",
    "grpcio-health-checking>=1.48,<1.63",
    "grpcio-reflection>=1.48,<1.63",
    "prometheus-client>=0.17,<1",
    "starlette>=0.27,<2",
    "uvicorn>=0.23,<1",
  ],
  # Together with `serving`, whose servers it runs.
  "realtime": [
    "confluent-kafka>=2.3",
    "kazoo>=2.9",
    "prometheus-client>=0.17,<1",
    "starlette>=0.27,<2",
    "uvicorn>=0.23,<1",
  ],
  "debugging": ["flask>=2.2,<4"],
  # Pinned: plugins of MkDocs break with one another's releases.
  "docs": [
    "mkdocs==1.6.1",
    "mkdocstrings==0.30.1",
    "mkdocstrings-python==1.18.2",
    "griffe>=1.13,<2",
    "pymdown-extensions==10.14.3",
    "pygments>=2.17,<3",
  ],
  "test": [
    "pytest>=7,<9",
    "freezegun>=1.2",
    "nbclient>=0.10,<1",
    "ipykernel>=6.29",
    "PyYAML>=6,<7",
  ],
  "lint": ["ruff==0.6.9", "clang-format==14.0.6", "mypy>=1.11,<2"],
}


def extras() -> dict[str, list[str]]:
  """Returns the requirements of every extra.

  pip cannot build the Horovod of PyPI with its TensorFlow part, but it can build the project in
  third_party/horovod. A wheel that is meant for other machines (environment variable
  `MONOLITH_PORTABLE_WHEEL=1`) must not name a folder of this one.
  """
  if os.environ.get("MONOLITH_PORTABLE_WHEEL") == "1":
    return _EXTRAS
  return {**_EXTRAS, "horovod": [f"horovod @ {(_ROOT / 'third_party/horovod').as_uri()}"]}


def requirements(groups: list[str]) -> list[str]:
  """Returns the requirement strings of the named groups, in order, without repeats.

  Raises:
    KeyError: a group is not an extra of the project.
  """
  try:
    import tomllib
  except ImportError:  # Python before 3.11: pip ships the same parser
    from pip._vendor import tomli as tomllib

  document = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))
  known = {
    "build": document["build-system"]["requires"],
    "runtime": document["project"]["dependencies"],
    **extras(),
  }
  return list(dict.fromkeys(name for group in groups for name in known[group]))


if __name__ == "__main__":
  try:
    print("\n".join(requirements(sys.argv[1:])))
  except KeyError as error:
    sys.exit(f"error: {error} is no extra; usage: {sys.argv[0]} build runtime EXTRA...")
