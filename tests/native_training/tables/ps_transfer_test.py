"""Writes that only some servers do, on servers in this process; covers `write_only_if`."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps,
  hash_table_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task_context,
  test_utils,
)
from monolith.native_training.data import stream_positions
from monolith.native_training.tables import ps_transfer
from tests.hash_table_testing import config_of, segment

tf.compat.v1.disable_eager_execution()

_IDS = [0, 1, 2, 3]


def _native_tables(ps, slot_to_config):
  return multi_hash_table_ops.MultiHashTable.from_configs(slot_to_config, name_suffix=str(ps))


def _single_tables(ps, slot_to_config):
  return multi_type_hash_table.MultiTypeHashTable(
    slot_to_config,
    lambda name, config: hash_table_ops.hash_table_from_config(config, name_suffix=f"{name}_{ps}"),
  )


class WriteOnlyIfTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.servers, cls.config = test_utils.create_test_ps_cluster(2)
    cls.config.share_cluster_devices_in_session = True
    cls.config.experimental.share_session_state_in_clusterspec_propagation = True

  def start(self):
    session = tf.compat.v1.Session(self.servers[0].target, config=self.config)
    self.addCleanup(session.close)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(resources.initialize_resources(resources.shared_resources()))
    return session

  @parameterized.parameters(
    (_native_tables, False), (_native_tables, True), (_single_tables, False)
  )
  def test_servers_whose_condition_is_false_write_nothing(self, factory, float16):
    tables = distributed_ps.DistributedMultiTypeHashTable(
      2, {"a": config_of(segment(2)), "b": config_of(segment(3))}, factory, float16
    )
    conditions = [tf.compat.v1.placeholder(tf.bool, []) for _ in range(2)]
    ids = tf.constant(_IDS, tf.int64)
    with ps_transfer.write_only_if(conditions):
      write = tables.apply_gradients(
        {"a": (ids, tf.ones([4, 2])), "b": (ids, tf.ones([4, 3]))}, tf.constant(0, tf.int64)
      ).as_op()
    rows = tables.lookup({"a": ids, "b": ids})
    session = self.start()
    before = session.run(rows)

    def written():
      after = session.run(rows)
      changed = [np.any(after[s] != before[s], axis=1).tolist() for s in ("a", "b")]
      self.assertEqual(changed[0], changed[1])
      return changed[0]

    for value, want in (
      ([False, False], [False] * 4),
      ([False, True], [False, True, False, True]),
      ([True, True], [True] * 4),
    ):
      session.run(write, dict(zip(conditions, value)))
      self.assertEqual(written(), want)

  def test_a_server_lacks_a_batch_until_it_has_moved_behind_it(self):
    with native_task_context.with_ctx(native_task_context.get()._replace(num_ps=2)):
      positions = stream_positions.create(["t"], ["group.id=g"])
    pairs = tf.compat.v1.placeholder(tf.int64, [None, 2])
    batch = stream_positions.StreamBatch(pairs, tf.constant([7, 1, 0, 99], tf.int64))
    lacks = positions.lacks(batch)
    move = positions.move_after(None, batch)
    set_first = positions._positions[0].scatter_update(tf.IndexedSlices([5, 9], [0, 1]))
    session = self.start()

    session.run(set_first)  # it has applied what the other one has not
    self.assertEqual(session.run(lacks, {pairs: [[0, 5], [1, 9]]}), [False, True])
    self.assertEqual(session.run(lacks, {pairs: [[0, 5], [1, 10]]}), [True, True])
    session.run(move, {pairs: [[0, 4], [1, 9]]})

    self.assertAllEqual(session.run(positions.start)[:, 0, :3], [[5, 9, -1], [4, 9, -1]])
    state = positions.read(session)
    self.assertEqual(state.positions, {("t", 0): 4, ("t", 1): 9})
    self.assertEqual((state.samples, state.newest_event_time), (0, 99))
    session.run(move, {pairs: [[0, 6]]})
    self.assertEqual(positions.read(session).samples, 7)


if __name__ == "__main__":
  tf.test.main()
