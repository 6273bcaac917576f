"""The batches of `gpu_train.py`, which all its processes read from two files."""

from __future__ import annotations

import os

import numpy as np

NUM_FEATURES = 26
IDS_OF_A_FEATURE = 4_000_000
DIM = 64
UNITS = (512, 256)
LEARNING_RATE = 0.05
INITIAL_ACCUMULATOR = 0.1
# All are seen before the first round, so that rows are updated and few are created.
NUM_BATCHES = 16
_EXPONENT = 1.05


def write(folder: str, batch_size: int) -> None:
  """Writes ids of a Zipf law, in an order of their own for each feature, and random labels."""
  rng = np.random.default_rng(1)
  top = 1 - float(IDS_OF_A_FEATURE + 1) ** (1 - _EXPONENT)
  # Popular ids are not neighbours: a factor without divisor in common is a permutation.
  shifts = rng.integers(0, IDS_OF_A_FEATURE, [NUM_FEATURES, 1])
  with (
    open(os.path.join(folder, "ids"), "wb") as ids_file,
    open(os.path.join(folder, "labels"), "wb") as labels_file,
  ):
    for _ in range(NUM_BATCHES):
      # The continuous law, inverted.
      uniform = rng.random([NUM_FEATURES, batch_size])
      ranks = ((1 - uniform * top) ** (-1 / (_EXPONENT - 1))).astype(np.int64)
      ids = (ranks * 2_654_435_761 + shifts) % IDS_OF_A_FEATURE
      ids_file.write(ids.tobytes())
      labels_file.write(rng.integers(0, 2, batch_size).astype(np.float32).tobytes())


def read(folder: str, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns ids `[batches, features, batch]` and labels `[batches, batch]`."""
  ids = np.fromfile(os.path.join(folder, "ids"), np.int64)
  labels = np.fromfile(os.path.join(folder, "labels"), np.float32)
  return ids.reshape(NUM_BATCHES, NUM_FEATURES, batch_size), labels.reshape(NUM_BATCHES, batch_size)
