"""Dumps parsed features instead of training on them.

A file is a sequence of records: 8 zero bytes, the size in 8 bytes little-endian, a serialized
`ExampleBatch`.

Differences from ByteDance's Monolith: records are written as they come and no empty file is left.
"""

from __future__ import annotations

import os
import struct
import uuid
from typing import Any

import numpy as np
import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training.settings.training_config import CpuTrainingConfig

_HEADER = struct.Struct("<QQ")
_UINT64 = 1 << 64


class FeatureEngineeringSaveHook(tf.compat.v1.train.SessionRunHook):
  """Writes every fetched batch to `<model_dir>/features`.

  Args:
    config: says which worker this is; needs a `model_dir`.
    nxt_elem: feature name -> batch, dense or ragged.
    cap: batches per file.
  """

  def __init__(self, config: CpuTrainingConfig, nxt_elem: dict[str, Any], cap: int = 100):
    self._folder = os.path.join(config.model_dir, "features")
    is_chief = config.server_type == "worker" and config.index == 0
    self._prefix = "chief" if is_chief else f"worker{config.index}"
    self._nxt_elem = nxt_elem
    self._cap = cap
    self._is_first_run = True
    self._file: Any = None
    self._num_in_file = 0

  def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> Any:
    # The first run initialises the iterator.
    return None if self._is_first_run else tf.compat.v1.train.SessionRunArgs(self._nxt_elem)

  def after_run(self, run_context: tf.compat.v1.train.SessionRunContext, run_values: Any) -> None:
    if self._is_first_run:
      self._is_first_run = False
      return
    record = to_example_batch(run_values.results).SerializeToString()
    if self._file is None:
      tf.io.gfile.makedirs(self._folder)
      path = os.path.join(self._folder, f"{self._prefix}_{uuid.uuid1()}.pb")
      self._file = tf.io.gfile.GFile(path, "wb")
    self._file.write(_HEADER.pack(0, len(record)) + record)
    self._num_in_file += 1
    if self._num_in_file >= self._cap:
      self._close()

  def end(self, session: tf.compat.v1.Session) -> None:
    self._close()

  def _close(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None
      self._num_in_file = 0


def to_example_batch(features: dict[str, Any]) -> example_pb2.ExampleBatch:
  """Returns a batch with one column per feature, one value per row.

  Args:
    features: feature name -> array, or `RaggedTensorValue`, of as many rows each.
  """
  batch = example_pb2.ExampleBatch()
  for name, values in features.items():
    rows = values.to_list() if hasattr(values, "to_list") else list(np.asarray(values))
    column = batch.named_feature_list.add(name=name, type=example_pb2.INDIVIDUAL)
    for row in rows:
      _fill(column.feature.add(), np.ravel(np.asarray(row)))
    batch.batch_size = len(rows)
  return batch


def _fill(feature: example_pb2.Feature, row: np.ndarray) -> None:
  if np.issubdtype(row.dtype, np.floating) and row.size:
    feature.float_list.value.extend(row.tolist())
  else:
    feature.fid_v2_list.value.extend(int(value) % _UINT64 for value in row)
