"""Embedding tables in the memory of a GPU, for PyTorch, CuPy, JAX and other owners of arrays there.

A table holds a row for every int64 id that was written, with the state of its optimizer. Arrays
come in by `__cuda_array_interface__`: nothing is copied, and none of these libraries is needed.
`docs/gpu_table.md` shows a training step. The code is in `monolith/native_training/gpu/`.
"""

from monolith.native_training.gpu.library import GpuTableError, OutOfGpuMemoryError, is_available
from monolith.native_training.gpu.many import (
  Place,
  TableRow,
  lookup_at,
  lookup_many,
  optimize_at,
  optimize_many,
)
from monolith.native_training.gpu.structures import COMPRESSORS, INITIALIZERS, OPTIMIZERS
from monolith.native_training.gpu.table import GpuTable, Segment

__all__ = [
  "COMPRESSORS",
  "INITIALIZERS",
  "OPTIMIZERS",
  "GpuTable",
  "GpuTableError",
  "OutOfGpuMemoryError",
  "Place",
  "Segment",
  "TableRow",
  "is_available",
  "lookup_at",
  "lookup_many",
  "optimize_at",
  "optimize_many",
]
