"""A rank that does every kind of exchange, for tests: `python -m tests.rank_exchanges <folder>`.

What it got is in `<folder>/<rank>.pickle`.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.native_training import hvd_lib

# Rows that rank `r` sends to each rank in the n-th call: shapes change from call to call.
SPLITS = ([[1, 2], [3, 0]], [[0, 0], [0, 0]], [[700, 1], [0, 40]], [[2, 2], [2, 2]])
DTYPES = (tf.float32, tf.float64, tf.float16, tf.int32, tf.int64)


def rows(rank: int, call: int) -> np.ndarray:
  """Returns what a rank sends: each row tells where it comes from."""
  count = sum(SPLITS[call][rank])
  return (1000 * rank + np.arange(count * 3)).reshape([count, 3])


def _exchange_all() -> dict[str, Any]:
  rank, lib = hvd_lib.rank(), hvd_lib.lib
  result: dict[str, Any] = {}
  sent = {dtype: tf.compat.v1.placeholder(dtype, [None, 3]) for dtype in (tf.int64, tf.float32)}
  splits = tf.compat.v1.placeholder(tf.int32, [2])
  changing = {
    f"{kind}_{dtype.name}": function(tensor, dtype)
    for dtype, tensor in sent.items()
    for kind, function in (
      ("alltoall", lambda t, d: hvd_lib.alltoall(t, splits, name=f"alltoall_{d.name}")),
      ("allgather", lambda t, d: hvd_lib.allgather(t, name=f"allgather_{d.name}")),
    )
  }
  slices = tf.IndexedSlices(
    tf.fill([1, 2], rank + 1.0), tf.constant([rank], tf.int64), tf.constant([3, 2], tf.int64)
  )
  fixed = {
    "broadcast": hvd_lib.broadcast(tf.constant([rank, 7 - rank], tf.int64), 1, name="broadcast"),
    "broadcast_int16": hvd_lib.broadcast(tf.constant([rank, 3], tf.int16), 0, name="broadcast_16"),
    "broadcast_bool": hvd_lib.broadcast(tf.constant(rank == 0), 0, name="broadcast_bool"),
    "sums": [
      hvd_lib.allreduce(
        tf.cast(tf.constant([1, 2]), dtype) * (rank + 1), name=f"sum_{dtype.name}", op=lib.Sum
      )
      for dtype in DTYPES
    ],
    "mean": hvd_lib.allreduce(tf.constant([[0.1], [0.7]]) * (rank + 0.3), name="mean"),
    "half": hvd_lib.allreduce(
      tf.constant([1.5, 2.0]) * rank, name="half", compression=lib.Compression.fp16
    ),
    "slices": tf.convert_to_tensor(hvd_lib.allreduce(slices, name="slices")),
    "grouped": hvd_lib.grouped_allreduce(
      [tf.fill([2, 2], rank + 1.0), tf.constant(4.0 * rank), tf.zeros([0])], name="grouped"
    ),
    "unnamed": hvd_lib.allreduce(tf.constant(3.0 * rank)),
  }
  with tf.compat.v1.Session() as session:
    result["fixed"] = [session.run(fixed) for _ in range(2)][1]
    result["changing"] = []
    for call in range(len(SPLITS)):
      feed = {tensor: rows(rank, call) for tensor in sent.values()}
      result["changing"].append(session.run(changing, {**feed, splits: SPLITS[call][rank]}))
  with tf.Graph().as_default():
    variables = [tf.Variable(1.0 + rank), tf.Variable([[5, 6 + rank]]), tf.Variable(rank == 0)]
    hook = hvd_lib.BroadcastGlobalVariablesHook(0)
    with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
      result["variables"] = session.run(variables)
  return result


def _make_mistakes() -> dict[str, str]:
  """Does what is wrong, and lives on."""
  rank = hvd_lib.rank()
  kinds = {
    "shapes": hvd_lib.allreduce(tf.zeros([2 + rank]), name="other_shapes"),
    "types": hvd_lib.alltoall(
      tf.zeros([2], tf.int64 if rank else tf.float32), [1, 1], name="other_types"
    ),
    "splits": hvd_lib.alltoall(tf.zeros([3]), [1, 1], name="too_few"),
  }
  errors = {}
  with tf.compat.v1.Session() as session:
    for name, op in kinds.items():
      try:
        session.run(op)
      except tf.errors.OpError as error:
        errors[name] = error.message
    if rank == 0:
      # The other one never comes to this.
      alone = hvd_lib.allreduce(tf.zeros([1]), name="alone")
      try:
        session.run(alone, options=tf.compat.v1.RunOptions(timeout_in_ms=200))
      except tf.errors.OpError as error:
        errors["alone"] = type(error).__name__
    after = hvd_lib.allreduce(tf.constant(1.0), name="after")
    errors["after"] = str(session.run(after))
  return errors


def main(folder: str) -> None:
  tf.compat.v1.disable_eager_execution()
  hvd_lib.init()
  hvd_lib.init()
  place = (hvd_lib.rank(), hvd_lib.size(), hvd_lib.local_rank(), hvd_lib.local_size())
  result = {"place": place, "engine": hvd_lib.lib.__name__}
  with tf.Graph().as_default():
    result["exchanged"] = _exchange_all()
  if not hvd_lib.lib.__name__.startswith("horovod"):
    with tf.Graph().as_default():
      result["mistakes"] = _make_mistakes()
  with open(os.path.join(folder, f"{hvd_lib.rank()}.pickle"), "wb") as f:
    pickle.dump(result, f)


if __name__ == "__main__":
  main(sys.argv[1])
