"""Messages of a row log, for tests that have no training behind them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from monolith.realtime.row_log_pb2 import RowBatch
from monolith.row_log.framing import frame


def make_batch(
  seq: int,
  tables: Mapping[str, Mapping[int, np.ndarray]],
  num_chunks: int = 1,
  digests: Mapping[str, tuple[int, int]] | None = None,
  **fields: object,
) -> list[bytes]:
  """Returns the messages of a batch.

  Args:
    seq: its number; the one before it is `seq - 1`.
    tables: row by id, by name of the table.
    num_chunks: how many messages; the first one has the rows.
    digests: digest and number of rows of each table after the batch; None for a batch without.
    **fields: other fields of `RowBatch`.
  """
  messages = []
  for chunk in range(num_chunks):
    batch = RowBatch(model="clicks", num_shards=1, epoch=1, seq=seq, prev_seq=seq - 1)
    batch.chunk, batch.num_chunks = chunk, num_chunks
    for name, value in fields.items():
      setattr(batch, name, value)
    for name, rows in tables.items() if chunk == 0 else ():
      ids = np.array(list(rows), "<i8")
      values = np.array(list(rows.values()), "<f4")
      batch.tables.add(name=name, dim=values.shape[1], ids=ids.tobytes(), rows=values.tobytes())
    if digests is not None and chunk + 1 == num_chunks:
      batch.digest.seq = seq
      for name, (digest, num_rows) in digests.items():
        batch.digest.tables[name] = digest
        batch.digest.row_counts[name] = num_rows
    messages.append(frame(batch.SerializeToString()))
  return messages
