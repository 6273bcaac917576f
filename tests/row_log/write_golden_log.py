"""Writes a small row log as this version writes it, to be read by every later version.

  python -m tests.row_log.write_golden_log

makes `golden/VERSION` beside this file; a version's files are written once, by that version:

    rows.tfrecord     the messages of three batches, a record each
    dense.tfrecord    the messages of a set of dense variables
    sync_state.json   a position in the log, as checkpoints and exports have it
    expected.json     what a reader must find: rows by id, digests, event time
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

import monolith
from monolith.realtime import row_log_pb2
from monolith.row_log import dense_sets
from monolith.row_log.sync_state import SYNC_STATE, SyncState
from tests.realtime.row_log_tables import TrainedTable

FOLDER = os.path.join(os.path.dirname(__file__), "golden")
# The ids that each batch trains; a row is the sum of its gradients, which are its id.
BATCHES = ([1, 2, 3], [2, -7, 1 << 50], [3, 2])
DENSE = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "power": np.float32(0.5)}


def _write_records(path: str, messages: Iterable[bytes]) -> None:
  with tf.io.TFRecordWriter(path) as writer:
    for message in messages:
      writer.write(message)


def _take_all(trained: TrainedTable) -> Iterable[bytes]:
  while messages := trained.writer.take()[0]:
    yield from messages


def write(folder: str) -> None:
  """Writes all files into a new folder.

  Raises:
    FileExistsError: the folder is there.
  """
  os.makedirs(folder)
  trained = TrainedTable()
  messages: list[bytes] = []
  for seq, ids in enumerate(BATCHES, 1):
    trained.train(ids, req_time=70 + seq)
    header = row_log_pb2.RowBatch(
      model="m", num_shards=1, epoch=1, seq=seq, prev_seq=seq - 1, sample_positions={2: 30 * seq}
    )
    trained.writer.begin(header, digest=True)
    messages += _take_all(trained)
  rows: dict[int, float] = {}
  for id_ in (id_ for ids in BATCHES for id_ in ids):
    rows[id_] = rows.get(id_, 0.0) + id_
  expected = {"rows": rows, "digests": trained.digests(), "newest_event_time": 70 + len(BATCHES)}
  trained.close()
  _write_records(os.path.join(folder, "rows.tfrecord"), messages)
  _write_records(os.path.join(folder, "dense.tfrecord"), dense_sets.make_messages("m", 1, 5, DENSE))
  state = SyncState(1, len(BATCHES), "rows.m", 0, len(messages))
  for name, text in ((SYNC_STATE, state.to_json()), ("expected.json", json.dumps(expected))):
    with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
      file.write(text)


if __name__ == "__main__":
  tf.compat.v1.disable_eager_execution()
  write(os.path.join(FOLDER, monolith.__version__))
