"""All requirements of the package, and a printer of lists: `requirements.py build test ...`.

`build` is what compiling needs, `runtime` what the package needs; any other name is an extra.
Those that come with TensorFlow are for the version that `tensorflow_versions.target` returns.
"""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tensorflow_versions  # noqa: E402

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# libmonolith_parquet.so names the libraries of the one it was built with.
_PYARROW = "pyarrow>=21,<22"
# Its script draws the pages that `monolith_report` and the demo of real time make.
_PLOTLY = "plotly>=6,<8"
_NUMPY = "numpy>=1.23.5"
# For tests with Keras 3; TensorFlow 2.15 brings TensorBoard along, and keras-rs has no Keras 2.
_TEST_KERAS_3 = ["tensorboard>=2.16,<3", "keras-rs>=0.4,<0.5; python_version >= '3.11'"]
_EXTRAS = {
  "tpu": ["cloud-tpu-client==0.10"],
  "horovod": ["horovod==0.28.1"],
  "torch": ["torch>=2.4"],
  "jax": ["jax>=0.4.30"],
  "kafka": ["confluent-kafka>=2.3"],
  "parquet": [_PYARROW],
  # A CUDA compiler for x86-64 and ARM64, to build libmonolith_cuda.so; 120 MB to download.
  "cuda": [
    "nvidia-cuda-nvcc>=13,<14",
    "nvidia-nvvm>=13,<14",
    "nvidia-cuda-crt>=13,<14",
    "nvidia-cuda-runtime>=13,<14",
    "nvidia-cuda-cccl>=13,<14",
  ],
  # pip takes the releases that run with TensorFlow's protobuf.
  "serving": ["tensorflow-serving-api"],
  # Together with `serving`, whose servers it runs.
  "realtime": [
    "confluent-kafka>=2.3",
    "kazoo>=2.9",
    _PLOTLY,
    "prometheus-client>=0.17,<1",
    "starlette>=0.27,<2",
    "uvicorn>=0.23,<1",
  ],
  "report": [_PLOTLY],
  "debugging": ["flask>=2.2,<4"],
  # Pinned: plugins of MkDocs break with one another's releases.
  "docs": [
    "mkdocs==1.6.1",
    "mkdocs-material>=9.6,<9.7",
    "mkdocstrings==0.30.1",
    "mkdocstrings-python==1.18.2",
    "griffe>=1.13,<2",
    "pymdown-extensions==10.14.3",
    "pygments>=2.17,<3",
  ],
  "test": [
    "pytest>=7,<9",
    "freezegun>=1.2",
    "grpcio-health-checking>=1.48",
    "grpcio-reflection>=1.48",
    "nbclient>=0.10,<1",
    "ipykernel>=6.29",
    "PyYAML>=6,<7",
    "tensorboard>=2.15,<3",  # TensorFlow 2.21 comes without
  ],
  "lint": ["ruff==0.6.9", "clang-format==14.0.6", "mypy>=1.11,<2"],
}
# The others serve parts of the package that need TensorFlow.
_WITHOUT_TENSORFLOW = ("torch", "jax", "cuda")


def build(tensorflow: tensorflow_versions.Version | None) -> list[str]:
  """Returns what compiling for a version needs, or without TensorFlow."""
  tools = ["setuptools>=68,<81", "wheel", "ninja>=1.11"]  # tensorboard imports pkg_resources
  if tensorflow is None:
    return tools
  return [
    *tools,
    f"tensorflow=={tensorflow.release}",
    tensorflow.protoc_package,
    tensorflow.protobuf,
    _PYARROW,  # Arrow's headers and libraries, to read Parquet
  ]


def runtime(tensorflow: tensorflow_versions.Version | None) -> list[str]:
  """Returns what the package needs, compiled for a version, or without TensorFlow."""
  if tensorflow is None:
    return [_NUMPY]
  return [
    f"tensorflow>={tensorflow.release},<{tensorflow.after}",
    # Optimizers of earlier ones make variables for what takes its gradient itself.
    *(["keras>=3.10", tensorflow.within("tf-keras")] if tensorflow.has_keras_3 else []),
    tensorflow.protobuf,
    _NUMPY,
    "absl-py>=1.0",
    "grpcio>=1.53",
    "kazoo>=2.9",
  ]


def extras(tensorflow: tensorflow_versions.Version | None = None) -> dict[str, list[str]]:
  """Returns the requirements of every extra.

  pip cannot build the Horovod of PyPI with its TensorFlow part, but it can build the project in
  third_party/horovod. A wheel that is meant for other machines (environment variable
  `MONOLITH_PORTABLE_WHEEL=1`) must not name a folder of this one.
  """
  tensorflow = tensorflow or tensorflow_versions.target()
  found = {
    extra: [tensorflow.within(name) if name == "tensorflow-serving-api" else name for name in names]
    for extra, names in _EXTRAS.items()
  }
  if tensorflow.has_keras_3:
    found["test"] += _TEST_KERAS_3
  if os.environ.get("MONOLITH_PORTABLE_WHEEL") != "1":
    found["horovod"] = [f"horovod @ {(_ROOT / 'third_party/horovod').as_uri()}"]
  return found


def extras_without_tensorflow() -> dict[str, list[str]]:
  """Returns the requirements of the extras of a package without TensorFlow."""
  return {extra: _EXTRAS[extra] for extra in _WITHOUT_TENSORFLOW}


def requirements(groups: list[str]) -> list[str]:
  """Returns the requirement strings of the named groups, in order, without repeats.

  Raises:
    KeyError: a group is not an extra of the project.
    SetupError: the Python or the TensorFlow is not supported.
  """
  tensorflow = tensorflow_versions.target()
  known = {"build": build(tensorflow), "runtime": runtime(tensorflow), **extras(tensorflow)}
  return list(dict.fromkeys(name for group in groups for name in known[group]))


if __name__ == "__main__":
  try:
    print("\n".join(requirements(sys.argv[1:])))
  except KeyError as error:
    sys.exit(f"error: {error} is no extra; usage: {sys.argv[0]} build runtime EXTRA...")
  except tensorflow_versions.SetupError as error:
    sys.exit(f"error: {error}")
