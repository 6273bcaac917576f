"""Groups of tables on servers in this process, and writes that only some servers do.

Also tests of `ps_group`, `gradient_checks` and `step_order`.
"""

import os
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps,
  feature_utils,
  hash_table_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task_context,
  test_utils,
)
from monolith.native_training.data import stream_positions
from monolith.native_training.graph import export_context
from monolith.native_training.tables import gradient_checks, ps_group, ps_transfer, step_order
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
    [first] = positions._positions[0]  # of the one topic
    set_first = first.scatter_update(tf.IndexedSlices([5, 9], [0, 1]))
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


class PsGroupTest(tf.test.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def make(self, factory, configs, num_ps=2, remote_predict=None):
    dims = {name: 2 for name in configs}
    transfer = ps_transfer.PsTransfer(pinned=False, dims=dims)
    return ps_group.PsGroup(num_ps, configs, factory, transfer, remote_predict, 100)

  def initialized(self):
    session = tf.compat.v1.Session()
    self.addCleanup(session.close)
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(resources.initialize_resources(resources.shared_resources()))
    return session

  def test_each_server_has_a_group_of_its_own(self):
    asked = []

    def factory(i, configs):
      asked.append((i, sorted(configs)))
      return _native_tables(i, configs)

    group = self.make(factory, {"b": config_of(segment(2)), "a": config_of(segment(2))})
    self.assertEqual(asked, [(0, ["a", "b"]), (1, ["a", "b"])])
    self.assertTrue(group.is_raw)
    self.assertEqual(group.get_table_dim_sizes(), [2, 2])
    ids = tf.constant([1], tf.int64)
    written = group.with_tables(
      [group.tables[0].assign({"a": (ids, tf.constant([[3.0, 4.0]]))}), group.tables[1]]
    )
    self.assertIsNot(written, group)
    self.assertEqual(written.as_op("write").name, "write/done")
    with tf.control_dependencies([written.as_op("write")]):
      found = [written.lookup(i, {"a": ids}, "lookup")["a"] for i in range(2)]
      ragged = tf.RaggedTensor.from_row_splits(ids, tf.constant([0, 1, 1], tf.int64))
      flat, timers = written.raw_lookup(0, ragged, "raw")
    session = self.initialized()
    self.assertAllEqual(session.run(found), [[[3, 4]], [[0, 0]]])
    self.assertAllEqual(session.run(flat), [3, 4])
    self.assertEqual(len(timers), 1)

  def test_groups_of_single_tables_are_not_raw(self):
    configs = {"a": config_of(segment(2))}
    self.assertFalse(self.make(_single_tables, configs).is_raw)
    # One server of another kind is enough.
    kinds = [_native_tables, _single_tables]
    with tf.Graph().as_default():
      self.assertFalse(self.make(lambda i, c: kinds[i](i, c), configs).is_raw)

  def test_no_tables(self):
    group = self.make(lambda i, configs: _native_tables(i, configs), {})
    self.assertEqual(group.lookup(1, {}, "lookup"), {})

  def test_learning_rates_are_put_back(self):
    configs = {"a": config_of(segment(2)), "b": config_of(segment(2))}
    configs["b"].set_learning_rate_tensor(before := tf.constant([5.0]))
    rates = {name: tf.constant([7.0]) for name in configs}
    with self.assertRaisesRegex(KeyError, "inside"), ps_group.learning_rates(configs, rates):
      self.assertIs(configs["a"].learning_rate_tensor, rates["a"])
      raise KeyError("inside")
    self.assertIsNone(configs["a"].learning_rate_tensor)
    self.assertIs(configs["b"].learning_rate_tensor, before)

  def test_exported_groups_are_asked_remotely(self):
    calls = []

    def remote_predict(names, inputs, outputs, **kwargs):
      calls.append((names, outputs, kwargs["task"], kwargs["signature_name"]))
      return [tf.zeros([4]) for _ in outputs]

    with export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as ctx:
      group = self.make(_native_tables, {"a": config_of(segment(2))}, remote_predict=remote_predict)
      ids = tf.constant([1, 2], tf.int64)
      rows = group.lookup(1, {"a": ids}, "lookup")
      flat, timers = group.raw_lookup(0, tf.RaggedTensor.from_row_lengths(ids, [2]), "raw")
    self.assertEqual(rows["a"].shape.as_list(), [2, 2])
    self.assertEqual((flat.shape.as_list(), timers), ([4], []))
    self.assertEqual(
      calls,
      [(["a"], ["a"], 1, "lookup"), (["id", "id_split"], ["flat_emb"], 0, "raw_lookup")],
    )
    self.assertEqual(sorted(ctx.sub_graphs), ["ps_0", "ps_1"])


class GradientChecksTest(tf.test.TestCase):
  def check(self, policy, names, gradients):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS=policy):
        return session.run(gradient_checks.check_gradients(names, gradients))

  def test_policies(self):
    good = np.array([[1.0, 2.0]], np.float32)
    bad = np.array([[1.0, np.nan], [3.0, 4.0], [np.inf, 0.0]], np.float32)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "b"):
      self.check("stop", ["a", "b"], [good, bad])
    self.assertAllEqual(self.check("stop", ["a", "b"], [good, bad[1:2]]), [good, bad[1:2]])
    kept = self.check("skip", ["a", "b"], [good, bad])
    self.assertAllEqual(kept[0], good)
    self.assertAllEqual(kept[1], [[0, 0], [3, 4], [0, 0]])
    np.testing.assert_array_equal(self.check("ignore", ["b"], [bad])[0], bad)

  def test_edges(self):
    self.assertEqual(gradient_checks.check_gradients([], []), [])
    empty = np.zeros([0, 2], np.float32)
    self.assertAllEqual(self.check("stop", ["a"], [empty])[0], empty)
    with self.assertRaisesRegex(ValueError, r"2 gradients, want 1 for \['a'\]"):
      gradient_checks.check_gradients(["a"], [empty, empty])
    with self.assertRaisesRegex(ValueError, "'Stop', want stop, skip or ignore"):
      self.check("Stop", ["a"], [empty])


class StepOrderTest(tf.test.TestCase):
  def test_lists_belong_to_the_graph(self):
    with tf.Graph().as_default():
      first = tf.no_op()
      step_order.control_ops().append(first)
      self.assertEqual(step_order.control_ops(), [first])
      self.assertEqual(step_order.dense_opt_ops(), [])
      self.assertIs(feature_utils.control_ops, step_order.control_ops())
      with tf.Graph().as_default():
        self.assertEqual(step_order.control_ops(), [])
      self.assertEqual(step_order.control_ops(), [first])


if __name__ == "__main__":
  tf.test.main()
