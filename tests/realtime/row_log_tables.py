"""Tables at both ends of a row log, each in a session of its own, as in two processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from monolith.native_training import hash_table_ops, multi_hash_table_ops
from monolith.row_log import row_log
from tests.hash_table_testing import config_of, segment
from tests.realtime.table_follower import TableFollower

DIM = 4
NAME = "MonolithHashTable_t"


class TrainedTable:
  """A single table that writes a row log, or a group of two if `group`.

  Args:
    capacity: how many touched rows are remembered.
    group: whether to make the tables `t` and `u`, of which `train` updates the first.
  """

  def __init__(self, capacity: int = 1 << 20, group: bool = False):
    self.graph = tf.Graph()
    with self.graph.as_default():
      client = row_log.row_log_client(capacity=capacity)
      self.ids = tf.compat.v1.placeholder(tf.int64, [None])
      gradients = -tf.ones([tf.size(self.ids), DIM]) * tf.cast(self.ids, tf.float32)[:, None]
      step = tf.constant(0, tf.int64)
      self.req_time = tf.compat.v1.placeholder_with_default(tf.constant(0, tf.int64), [])
      self.basename = tf.compat.v1.placeholder(tf.string, [])
      if group:
        tables = multi_hash_table_ops.MultiHashTable.from_configs(
          {name: config_of(segment(DIM)) for name in ("t", "u")}, sync_client=client
        )
        self._train = tables.apply_gradients(
          {"t": (self.ids, gradients)}, step, req_time=self.req_time
        ).as_op()
        self.handle = tables.handle
        create = tables.initializer
      else:
        table = hash_table_ops.hash_table_from_config(
          config_of(segment(DIM)), name_suffix="t", sync_client=client
        )
        self._train = table.apply_gradients(
          self.ids, gradients, step, req_time=self.req_time
        ).as_op()
        self._save = table.save(self.basename).as_op()
        self._restore = table.restore(self.basename).as_op()
        self.handle = table.table
        create = self.handle.op
      self.writer = row_log.RowLogWriter(client)
      self._names, self._digests, self._rows = row_log.gen_monolith_ops.monolith_row_log_digests(
        [self.handle]
      )
      self.session = tf.compat.v1.Session()
    self.session.run(create)
    self.writer.bind(self.session)

  def train(self, ids: Sequence[int], req_time: int = 0) -> None:
    self.session.run(self._train, {self.ids: list(ids), self.req_time: req_time})

  def save(self, basename: str) -> None:
    self.session.run(self._save, {self.basename: basename})

  def restore(self, basename: str) -> None:
    self.session.run(self._restore, {self.basename: basename})

  def be_ready(self, position: Sequence[int] = (0, 0, 0, -1)) -> None:
    """Does what the chief's hook does when tables are restored."""
    self.writer.mark("ready", position)

  def digests(self) -> dict[str, tuple[int, int]]:
    values = self.session.run([self._names, self._digests, self._rows])
    return {name.decode(): (int(d), int(n)) for name, d, n in zip(*values)}

  def close(self) -> None:
    self.session.close()


class ServedTable:
  """A table of a serving process that follows; `group` as in `TrainedTable`."""

  def __init__(self, group: bool = False):
    with tf.Graph().as_default():
      self._ids = tf.compat.v1.placeholder(tf.int64, [None])
      if group:
        tables = multi_hash_table_ops.MultiHashTable.from_configs(
          {name: config_of(segment(DIM), serving=True) for name in ("t", "u")}
        )
        handle, create = tables.handle, tables.initializer
        self._lookup = tables.lookup({"t": self._ids})["t"]
      else:
        table = hash_table_ops.hash_table_from_config(
          config_of(segment(DIM), serving=True), name_suffix="t"
        )
        handle, create = table.table, table.table.op
        self._lookup = table.lookup(self._ids)
      self.follower = TableFollower([handle])
      self.session = tf.compat.v1.Session()
    self.session.run(create)
    self.follower.bind(self.session)

  def lookup(self, ids: Sequence[int]) -> np.ndarray:
    return self.session.run(self._lookup, {self._ids: list(ids)})

  def close(self) -> None:
    self.session.close()
