"""The row log's ops with which a training process writes its rows.

A writer's tables are created with its client, and its ops run in their session:

  client = row_log_client("0")
  table = hash_table_from_config(config, sync_client=client)
  writer = RowLogWriter(client)
  writer.bind(session).begin(header)
  messages, num_rows, num_deleted = writer.take()

The model server applies them with ops of its own (`serving/native/model/followed_graph.cc`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training import utils
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.realtime.row_log_pb2 import RowBatch

# Why a batch has to hold all rows.
SCAN_OVERFLOW = 1
SCAN_REPLACED = 2

_CAPACITY = 2097152


def row_log_client(name_suffix: str = "", capacity: int = _CAPACITY) -> tf.Tensor:
  """Returns the handle of a client that remembers which rows of its tables changed or went.

  Args:
    name_suffix: clients of the same suffix are one.
    capacity: when more rows changed, the next batch holds all rows.
  """
  return gen_monolith_ops.monolith_row_log_client(
    capacity=capacity, shared_name=f"MonolithRowLogClient_{name_suffix}"
  )


def create_row_log_clients(num_ps: int) -> list[tf.Tensor]:
  """Returns one client per parameter server, on its device; a single local one for `num_ps` 0."""
  if num_ps == 0:
    return [row_log_client()]
  clients = []
  for i in range(num_ps):
    with tf.device(utils.ps_device(i)):
      clients.append(row_log_client(str(i)))
  return clients


class WriterInfo(NamedTuple):
  """Says where the writer of a row log stands.

  Attributes:
    num_tables: tables that belong to the log.
    waiting_ids: rows that changed since the last batch.
    waiting_bytes: what they take at most.
    scan_reasons: why the next batch has to hold all rows: `SCAN_OVERFLOW`, `SCAN_REPLACED`, both.
    scan_generation: how often there was such a reason.
    chunks_left: chunks of a batch that were not taken.
    epoch, seq, next_offset: the position that was marked last.
    ready_count: how often tables were declared ready.
    restored_epoch, restored_seq, restored_offset, restored_step: the position and the step of the
      checkpoint they had then; the step is negative if they came from none with a position.
    saved_step: the newest complete checkpoint.
  """

  num_tables: int
  waiting_ids: int
  waiting_bytes: int
  scan_reasons: int
  scan_generation: int
  chunks_left: int
  epoch: int
  seq: int
  next_offset: int
  ready_count: int
  restored_epoch: int
  restored_seq: int
  restored_offset: int
  restored_step: int
  saved_step: int


class BatchCounts(NamedTuple):
  """Describes a batch.

  Attributes:
    num_chunks: messages.
    num_ids: changed and deleted rows.
    full_scan: whether it has all rows.
  """

  num_chunks: int
  num_ids: int
  full_scan: bool


class MarkOps:
  """Lets the chief tell the writer of a row log about checkpoints.

  Args:
    client: from `row_log_client`; the ops run where it is.
  """

  def __init__(self, client: tf.Tensor):
    self._values = tf.compat.v1.placeholder(tf.int64, [None], name="row_log_mark")
    self._ops = {
      kind: gen_monolith_ops.monolith_row_log_mark(client, self._values, kind=kind)
      for kind in ("position", "ready", "saved")
    }

  def run(self, session: tf.compat.v1.Session, kind: str, values: Sequence[int]) -> None:
    """Marks a "position" (epoch, seq, next offset), that tables are "ready" (position and step of
    the checkpoint they came from, a negative step for none), or that a step is "saved".

    Raises:
      tf.errors.OpError: the client's server does not answer.
    """
    session.run(self._ops[kind], {self._values: list(values)})


class RowLogWriter:
  """The ops of one client. Build it while its graph is open, then bind a session.

  Args:
    client: from `row_log_client`.
    keep_hashes: whether digests will be asked for; takes about 30 bytes per row.
    half: whether rows are sent in half precision.
  """

  def __init__(self, client: tf.Tensor, keep_hashes: bool = True, half: bool = False):
    self._session: tf.compat.v1.Session | None = None
    self._info = gen_monolith_ops.monolith_row_log_info(client)
    self._header = tf.compat.v1.placeholder(tf.string, [], name="row_log_header")
    self._full_scan = tf.compat.v1.placeholder(tf.bool, [], name="row_log_full_scan")
    self._digest = tf.compat.v1.placeholder(tf.bool, [], name="row_log_digest")
    self._begin = gen_monolith_ops.monolith_row_log_begin(
      client,
      self._header,
      self._full_scan,
      self._digest,
      keep_hashes=keep_hashes,
      fp16=half,
    )
    self._take = gen_monolith_ops.monolith_row_log_take(client)
    self._abandon = gen_monolith_ops.monolith_row_log_abandon(client)
    self._messages = tf.compat.v1.placeholder(tf.string, [None], name="row_log_messages")
    self._touch = gen_monolith_ops.monolith_row_log_touch(client, self._messages)
    self._generation = tf.compat.v1.placeholder(tf.int64, [], name="row_log_generation")
    self._forget = gen_monolith_ops.monolith_row_log_forget_replaced(client, self._generation)
    self._marks = MarkOps(client)
    self._keep_hashes = keep_hashes

  @property
  def keeps_hashes(self) -> bool:
    """Whether digests can be asked for."""
    return self._keep_hashes

  def bind(self, session: tf.compat.v1.Session) -> RowLogWriter:
    """Uses a session from now on, and returns this writer."""
    self._session = session
    return self

  def _run(self, fetches: Any, feeds: dict[Any, Any] | None = None) -> Any:
    if self._session is None:
      raise ValueError("the writer of a row log has no session: call bind first")
    return self._session.run(fetches, feeds)

  @property
  def is_closed(self) -> bool:
    """Whether the session was closed: tables that lived in it are gone."""
    return self._session is not None and bool(self._session._closed)

  def info(self) -> WriterInfo:
    """Returns where the writer stands."""
    return WriterInfo(*(int(value) for value in self._run(self._info)))

  def begin(self, header: RowBatch, full_scan: bool = False, digest: bool = False) -> BatchCounts:
    """Begins a batch with all rows that changed or went since the last one.

    Args:
      header: all but chunks, tables and digest.
      full_scan: whether to take all rows whatever changed.
      digest: whether the batch shall tell the digests of the tables.

    Raises:
      tf.errors.FailedPreconditionError: chunks of the last batch were not taken.
      tf.errors.InvalidArgumentError: a row does not fit into a message.
    """
    counts = self._run(
      self._begin,
      {
        self._header: header.SerializeToString(),
        self._full_scan: full_scan,
        self._digest: digest,
      },
    )
    return BatchCounts(int(counts[0]), int(counts[1]), bool(counts[2]))

  def take(self) -> tuple[list[bytes], int, int]:
    """Returns the next messages, and how many rows and deletions they have; none at the end."""
    messages, counts = self._run(self._take)
    return list(messages), int(counts[0]), int(counts[1])

  def abandon(self) -> None:
    """Drops what is left of a batch; the next one holds all rows."""
    self._run(self._abandon)

  def touch(self, messages: Sequence[bytes]) -> None:
    """Lets the next batch have every id of messages of the log, with its present value.

    Raises:
      tf.errors.DataLossError: a message is damaged.
      tf.errors.InvalidArgumentError: a message is no batch of rows.
    """
    self._run(self._touch, {self._messages: list(messages)})

  def forget_replaced(self, generation: int) -> None:
    """Says that replaced tables need no batch of all rows, unless there was another reason since.

    Args:
      generation: `WriterInfo.scan_generation` from before what differs was touched.
    """
    self._run(self._forget, {self._generation: generation})

  def mark(self, kind: str, values: Sequence[int]) -> None:
    """Does what `MarkOps.run` does."""
    if self._session is None:
      raise ValueError("the writer of a row log has no session: call bind first")
    self._marks.run(self._session, kind, values)
