"""Tables over parameter servers in this process, and the graphs of exports."""

import collections
import random
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps,
  distributed_ps_factory,
  entry,
  hash_table_ops,
  learning_rate_functions,
  logging_ops,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task_context,
  test_utils,
  utils,
)
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

tf.compat.v1.disable_eager_execution()

_INT64 = (tf.int64.min, tf.int64.max)


def _adagrad_config(dim):
  table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  entry.CuckooHashTableConfig().mutate_table(table_config)
  table_config.entry_config.segments.append(
    entry.CombineAsSegment(
      dim,
      entry.ZerosInitializer(),
      entry.AdagradOptimizer(learning_rate=1.0, initial_accumulator_value=0.1),
      entry.Fp32Compressor(),
    )
  )
  return entry.HashTableConfigInstance(table_config, [1.0])


def _table_factory(_, config=None):
  return hash_table_ops.hash_table_from_config(config, name_suffix=str(_))


def _multi_type_factory(ps, slot_to_config):
  return multi_type_hash_table.MultiTypeHashTable(
    slot_to_config,
    lambda name, config: hash_table_ops.hash_table_from_config(config, name_suffix=f"{name}_{ps}"),
  )


def _native_factory(ps, slot_to_config):
  return multi_hash_table_ops.MultiHashTable.from_configs(slot_to_config, name_suffix=str(ps))


class _ClusterTest(tf.test.TestCase, parameterized.TestCase):
  def session_on(self, num_ps):
    servers, config = test_utils.create_test_ps_cluster(num_ps)
    config.share_cluster_devices_in_session = True
    config.experimental.share_session_state_in_clusterspec_propagation = True
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    session = tf.compat.v1.Session(servers[0].target, config=config)
    self.addCleanup(session.close)
    self._servers = servers
    return session

  def initialize(self, session):
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(resources.initialize_resources(resources.shared_resources()))


class PsDeviceTest(tf.test.TestCase):
  def test_clears_colocation(self):
    with tf.Graph().as_default(), tf.device("/job:worker/task:0"):
      anchor = tf.constant(1)
      with tf.compat.v1.colocate_with(anchor), distributed_ps.ps_device(3):
        op = tf.constant(2).op

    self.assertEqual(op.device, "/job:ps/task:3/device:CPU:0")
    self.assertEqual(op.colocation_groups(), [b"loc:@" + op.name.encode()])


class GetSubTableNameTest(tf.test.TestCase):
  def test_names(self):
    for strs, md5 in (
      (["slot0", "slot1"], "e21904dd414d1780e5fc904866dc69c2"),
      (["uid"], "9871d3a2c554b27151cacf1422eec048"),
      (["cid", "gid"], "c4a398dea30b21551ae4c09454001dba"),
      (["slot_0"], "cde3ba88ba62b682f84241b273f8100c"),
    ):
      self.assertEqual(distributed_ps.get_sub_table_name(strs), (",".join(strs), md5))

  def test_names_are_published(self):
    for name in (
      "Partition",
      "TableName",
      "Fids",
      "Emb",
      "EmbGrad",
      "FidEmbPair",
      "FidEmbGradPair",
      "LookupData",
      "UpdateData",
      "AssignData",
      "TableFactory",
    ):
      self.assertTrue(hasattr(distributed_ps, name), name)
    self.assertEqual(distributed_ps.FeatureInfo._fields, ("slice_dims", "combiner", "sub_table"))


class DistributedHashTableTest(_ClusterTest):
  def _table(self, num_ps=2, dim=2, learning_rate=1.0):
    config = test_utils.generate_test_hash_table_config(dim, learning_rate=learning_rate)
    return distributed_ps.DistributedHashTable(num_ps, config, _table_factory)

  def test_lookup(self):
    with tf.Graph().as_default():
      table = self._table()
      table = table.assign_add([1, 2, 3], [[1, 1], [2, 2], [3, 3]])
      rows = table.lookup(tf.constant([1, 1, 3], tf.int64), use_multi_threads=True)

      self.assertEqual(table.dim_size, 2)
      self.assertAllEqual(self.session_on(2).run(rows), [[1, 1], [1, 1], [3, 3]])

  def test_assign(self):
    with tf.Graph().as_default():
      ids = tf.constant([1, 2, 3, 4], tf.int64)
      table = self._table().assign([1, 2, 3], [[1, 1], [2, 2], [3, 3]])
      before = table.lookup(ids)
      with tf.control_dependencies([before]):
        table = table.assign([2, 3, 4], [[1, 1], [2, 2], [3, 3]])
      after = table.lookup(ids)

      before, after = self.session_on(2).run([before, after])
    self.assertAllEqual(before, [[1, 1], [2, 2], [3, 3], [0, 0]])
    self.assertAllEqual(after, [[1, 1], [1, 1], [2, 2], [3, 3]])

  def test_of_equal_ids_the_last_assign_wins_and_adds_add_up(self):
    with tf.Graph().as_default():
      table = self._table(dim=1).assign([5, 7, 5], [[1], [2], [3]])
      table = table.assign_add([5, 5, 7], [[10], [10], [10]])

      self.assertAllEqual(self.session_on(2).run(table.lookup([5, 7])), [[23], [12]])

  def test_apply_gradients(self):
    with tf.Graph().as_default():
      ids = tf.constant([0, 3, 0, 1], tf.int64)
      table = self._table(dim=1)
      rows = table.lookup(ids)
      grads = tf.gradients(2 * rows, rows)[0]
      table = table.apply_gradients(ids, grads, global_step=tf.constant(0, tf.int64))

      result = self.session_on(2).run(table.lookup(ids))
    self.assertAllEqual(result, [[-4], [-2], [-4], [-2]])

  def test_apply_gradients_with_ids_that_were_not_looked_up(self):
    with tf.Graph().as_default():
      ids = tf.constant([1, 0], tf.int64)
      table = self._table(dim=1)
      rows = table.lookup(ids)
      grads = tf.gradients(-2 * rows, rows)[0]
      table = table.apply_gradients(
        tf.constant([1, 1], tf.int64), grads, global_step=tf.constant(0, tf.int64)
      )

      self.assertAllEqual(self.session_on(2).run(table.lookup(ids)), [[4], [0]])

  def test_learning_rate_follows_the_global_step(self):
    with tf.Graph().as_default():
      global_step = tf.compat.v1.train.get_or_create_global_step()
      table = self._table(
        dim=1, learning_rate=learning_rate_functions.PolynomialDecay(1.0, 10, 2.0)
      )
      ids = tf.constant([0], tf.int64)
      update = table.apply_gradients(ids, [[2.0]], global_step=global_step).as_op()
      with tf.control_dependencies([update]):
        increment = tf.compat.v1.assign_add(global_step, 1)
      rows = table.lookup(ids)
      session = self.session_on(2)
      self.initialize(session)

      session.run(increment)
      self.assertAllClose(session.run(rows), [[-2.0]])
      session.run(increment)
      self.assertAllClose(session.run(rows), [[-4.2]])

  def test_lookup_and_update_share_one_deduplication(self):
    with tf.Graph().as_default() as graph:
      ids = tf.compat.v1.placeholder(tf.int64, [None])
      table = self._table()
      rows = table.lookup(ids)
      table.apply_gradients(ids, rows, global_step=tf.constant(0, tf.int64))

      self.assertLen([op for op in graph.get_operations() if op.type == "Unique"], 1)

  def test_as_op(self):
    with tf.Graph().as_default():
      self.assertEqual(self._table().as_op().name, "dht_ao/done")
    with tf.Graph().as_default():
      self.assertEqual(self._table().as_op("x").name, "x/done")

  def test_empty_batch_and_servers_without_ids(self):
    with tf.Graph().as_default():
      table = self._table(num_ps=7)
      empty = tf.constant([], tf.int64)
      table = table.assign_add(empty, tf.zeros([0, 2]))
      table = table.apply_gradients(empty, tf.zeros([0, 2]), tf.constant(0, tf.int64))
      table = table.assign_add([14], [[1, 2]])

      session = self.session_on(7)
      self.assertAllEqual(session.run(table.lookup([14, 3])), [[1, 2], [0, 0]])
      self.assertAllEqual(session.run(table.lookup(empty)), np.zeros([0, 2]))

  @parameterized.parameters(1, 2, 3, 5, 7)
  def test_every_id_has_one_home(self, num_ps):
    rng = random.Random(num_ps)
    ids = [0, 1, -1, -2, 3, -3, _INT64[0], _INT64[0] + 1, _INT64[1], _INT64[1] - 1]
    ids += [rng.randint(*_INT64) for _ in range(40)]
    values = np.arange(len(ids) * 2, dtype=np.float32).reshape(-1, 2)
    with tf.Graph().as_default():
      table = self._table(num_ps=num_ps).assign(ids, values)
      rows = table.lookup(ids)
      homes = [
        table._hash_tables[i].lookup(ids[k : k + 1])
        for k in range(len(ids))
        for i in [ids[k] % num_ps]  # Python's % is floor modulo.
      ]
      session = self.session_on(num_ps)
      rows, homes = session.run([rows, homes])
    self.assertAllEqual(rows, values)
    self.assertAllEqual(np.concatenate(homes), values)


def _native_and_merged(test_method):
  return parameterized.named_parameters(("native", True), ("merged", False))(test_method)


class DistributedMultiTypeHashTableTest(_ClusterTest):
  def _table(self, configs, native, num_ps=2, **kwargs):
    return distributed_ps.DistributedMultiTypeHashTable(
      num_ps, configs, _native_factory if native else _multi_type_factory, **kwargs
    )

  def _configs(self, **kwargs):
    return {
      "1": test_utils.generate_test_hash_table_config(1, **kwargs),
      "2": test_utils.generate_test_hash_table_config(2),
    }

  @_native_and_merged
  def test_lookup(self, native):
    with tf.Graph().as_default():
      table = self._table(self._configs(), native)
      update = table.assign_add({"1": ([1], [[1.0]]), "2": ([1, 2, 3], [[2, 2], [4, 4], [8, 8]])})
      rows = update.lookup({"1": [1, 2], "2": tf.constant([3, 1, 1, 2], tf.int64)})
      session = self.session_on(2)
      self.initialize(session)

      self.assertEqual(rows["2"].shape.as_list()[1], 2)
      rows = session.run(rows)
    self.assertAllEqual(rows["1"], [[1], [0]])
    self.assertAllEqual(rows["2"], [[8, 8], [2, 2], [2, 2], [4, 4]])

  def test_static_length_is_kept(self):
    with tf.Graph().as_default():
      table = self._table(self._configs(), native=True)
      rows = table.lookup({"2": tf.constant([1, 2, 1], tf.int64)})

      self.assertEqual(rows["2"].shape.as_list(), [3, 2])

  @_native_and_merged
  def test_assign_with_order(self, native):
    with tf.Graph().as_default():
      table = self._table(self._configs(), native)
      table = table.assign({"1": ([1, 2, 1], [[1], [2], [3]])})
      table = table.assign({"1": ([2], [[7]]), "2": ([5], [[1, 2]])})
      rows = table.lookup({"1": [1, 2], "2": [5]})
      session = self.session_on(2)
      self.initialize(session)

      rows = session.run(rows)
    self.assertAllEqual(rows["1"], [[3], [7]])
    self.assertAllEqual(rows["2"], [[1, 2]])

  @_native_and_merged
  def test_apply_gradients(self, native):
    with tf.Graph().as_default():
      global_step = tf.compat.v1.train.get_or_create_global_step()
      configs = self._configs(learning_rate=learning_rate_functions.PolynomialDecay(1.0, 10, 2.0))
      ids = {"1": tf.constant([1, 2], tf.int64), "2": tf.constant([3], tf.int64)}
      values = {"1": tf.constant([[-1.0], [-2.0]]), "2": tf.constant([[-3.0, -3.0]])}
      table = self._table(configs, native)
      assign = table.assign({slot: (ids[slot], values[slot]) for slot in ids}).as_op()
      update = table.apply_gradients(
        {slot: (ids[slot], values[slot] / 2) for slot in ids}, global_step=global_step
      ).as_op()
      with tf.control_dependencies([update]):
        step = tf.compat.v1.assign_add(global_step, 1)
      rows = table.lookup(ids)
      session = self.session_on(2)
      self.initialize(session)

      session.run(assign)
      session.run(step)
      first = session.run(rows)
      session.run(step)
      second = session.run(rows)
    self.assertAllClose(first["1"], [[-0.5], [-1.0]])
    self.assertAllClose(first["2"], [[-1.5, -1.5]])
    self.assertAllClose(second["1"], [[0.05], [0.1]])
    self.assertAllClose(second["2"], [[0, 0]])

  @_native_and_merged
  def test_gradients_of_equal_ids_make_one_step(self, native):
    with tf.Graph().as_default():
      table = self._table({"a": _adagrad_config(1)}, native)
      ids = tf.constant([4, 4, 5], tf.int64)
      table = table.apply_gradients({"a": (ids, [[1.0], [1.0], [2.0]])}, tf.constant(0, tf.int64))
      session = self.session_on(2)
      self.initialize(session)

      rows = session.run(table.lookup({"a": [4, 5]}))["a"]
    self.assertAllClose(rows, [[-2 / np.sqrt(4.1)]] * 2)

  @_native_and_merged
  def test_float16_transfer_with_sets(self, native):
    with tf.Graph().as_default() as graph:
      table = self._table(self._configs(), native, transfer_float16=True)
      table = table.apply_gradients(
        {
          "1": {tf.constant([1], tf.int64), tf.constant([[2.0]])},
          "2": {tf.constant([[3.0, 3.0]]), tf.constant([3], tf.int64)},
        },
        global_step=tf.constant(0, tf.int64),
      )
      rows = table.lookup({"1": [1], "2": [3]})
      session = self.session_on(2)
      self.initialize(session)

      names = [op.name for op in graph.get_operations() if "_Cast" in op.name]
      rows = session.run(rows)
    self.assertAllEqual(rows["1"], [[-2]])
    self.assertAllEqual(rows["2"], [[-3, -3]])
    self.assertTrue([name for name in names if name.endswith("_send_1_CastToFloat16")], names)
    self.assertTrue([name for name in names if name.endswith("_recv_0_CastToFloat32")], names)

  def test_reinitialize(self):
    with tf.Graph().as_default():
      table = self._table(self._configs(), native=True)
      table = table.assign({"1": ([1, 2], [[1], [2]]), "2": ([3], [[3, 3]])})
      table, status = table.reinitialize("1", [1, 2, 3])
      table, unknown = table.reinitialize("3", [1, 2, 3])
      table, in_order = table.reinitialize("1", [9, 2, 5, 1])
      rows = table.lookup({"1": [1, 2, 3], "2": [3], "3": [1]})
      session = self.session_on(2)
      self.initialize(session)

      status, unknown, in_order, rows = session.run([status, unknown, in_order, rows])
    self.assertAllEqual(status, [1, 1, 0])
    self.assertAllEqual(unknown, [-1, -1, -1])
    self.assertAllEqual(in_order, [0, 1, 0, 1])
    self.assertAllEqual(rows["1"], [[0], [0], [0]])
    self.assertAllEqual(rows["2"], [[3, 3]])
    self.assertNotIn("3", rows)

  def test_reinitialize_needs_native_tables(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(NotImplementedError, "dost not support reinitialize"):
        self._table(self._configs(), native=False).reinitialize("1", [1])

  def test_unknown_slot_of_merged_tables(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(KeyError, "no table for slot x, only"):
        self._table(self._configs(), native=False).lookup({"x": [1]})

  @_native_and_merged
  def test_as_op_and_dims(self, native):
    with tf.Graph().as_default() as graph:
      table = self._table(self._configs(), native)

      self.assertEqual(table.as_op().name, "dmtht_ao/done")
      self.assertEqual(table.as_op("x").name, "x/done")
      graph.get_operation_by_name("x/sub_1")
      self.assertEqual(table.get_table_dim_sizes(), [1, 2])

  @_native_and_merged
  def test_tables_are_on_their_servers(self, native):
    with tf.Graph().as_default() as graph:
      table = self._table(self._configs(), native)
      table.apply_gradients({"1": ([1], [1.0])}, tf.constant(0, tf.int64))
      kind = "MonolithMultiHashTable" if native else "MonolithHashTable"

      for op in graph.get_operations():
        if op.type in (kind + "Optimize", kind + "Lookup", kind, "CreateMonolithMultiHashTable"):
          self.assertRegex(op.device, "/job:ps/task:[01]/device:CPU:0")

  @parameterized.parameters(False, True)
  def test_native_tables_get_few_messages(self, float16):
    with tf.Graph().as_default() as graph:
      global_step = tf.compat.v1.train.get_or_create_global_step()
      rate = learning_rate_functions.PolynomialDecay(1.0, 10, 2.0)
      table = self._table(self._configs(learning_rate=rate), True, transfer_float16=float16)
      ids = tf.compat.v1.placeholder(tf.int64, [None])
      rows = table.lookup({"1": ids, "2": ids})
      update = table.apply_gradients(
        {"1": (ids, rows["1"]), "2": (ids, rows["2"])}, global_step, tf.constant(3, tf.int64)
      ).as_op()

      def messages(fetches):
        """Returns the tensors that travel between the worker and servers, by their way."""
        ways = collections.defaultdict(set)
        for op in utils.get_needed_ops(fetches):
          for tensor in op.inputs:
            # Variables, as the global step, are placed by the caller.
            if tensor.op.device != op.device and tensor.dtype != tf.resource:
              ways[tensor.op.device, op.device].add(tensor.name)
        return {way: len(names) for way, names in ways.items()}

      worker, servers = "", [f"/job:ps/task:{i}/device:CPU:0" for i in range(2)]
      lookup_messages = messages([row.op for row in rows.values()])
      self.assertEqual(
        lookup_messages,
        {way: 1 for s in servers for way in ((worker, s), (s, worker))},
      )
      # The update's ids with gradients, step, time and rates.
      self.assertEqual(
        messages([update]),
        {way: n for s in servers for way, n in (((worker, s), 2), ((s, worker), 1))},
      )
      self.assertLen(graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_STEP), 1)

  def test_float16_transfer_of_native_tables_rounds_rows_and_nothing_else(self):
    with tf.Graph().as_default():
      # Neither the rate nor the step fits into 16 bits.
      configs = self._configs(learning_rate=lambda: tf.constant(1 + 2**-20))
      table = self._table(configs, True, transfer_float16=True)
      step = tf.constant(2**40, tf.int64)
      table = table.apply_gradients({"1": ([2**40, 3], [[1.0], [2**-13]])}, step)
      local = [part.lookup({"1": [2**40, 3]})["1"] for part in table._tables]
      rows = table.lookup({"1": [2**40, 3]})["1"]
      session = self.session_on(2)
      self.initialize(session)

      exact, rows = session.run([local, rows])
    self.assertAllEqual(exact[0] + exact[1], np.float32(-1 - 2**-20) * np.array([[1], [2**-13]]))
    self.assertAllEqual(rows, [[-1], [-(2**-13)]])

  @_native_and_merged
  def test_empty_batch(self, native):
    with tf.Graph().as_default():
      table = self._table(self._configs(), native, num_ps=3)
      empty = tf.constant([], tf.int64)
      table = table.assign({"2": (empty, tf.zeros([0, 2]))})
      table = table.assign_add({})
      table = table.apply_gradients({"1": (empty, tf.zeros([0, 1]))}, tf.constant(0, tf.int64))
      rows = table.lookup({"1": empty, "2": [1]})
      session = self.session_on(3)
      self.initialize(session)

      rows = session.run(rows)
    self.assertAllEqual(rows["1"], np.zeros([0, 1]))
    self.assertAllEqual(rows["2"], [[0, 0]])

  def test_raw_lookup_and_update_share_one_deduplication(self):
    with tf.Graph().as_default() as graph:
      ids = tf.compat.v1.placeholder(tf.int64, [None])
      table = self._table(self._configs(), native=True)
      rows = table.lookup({"1": ids})
      table.apply_gradients({"1": (ids, rows["1"])}, tf.constant(0, tf.int64))

      unique = [op for op in graph.get_operations() if op.type.startswith("MonolithUniqueKey")]
      self.assertLen(unique, 1)

  @_native_and_merged
  def test_the_same_ids_may_be_looked_up_and_updated_in_different_slots(self, native):
    with tf.Graph().as_default():
      ids = tf.constant([1, 1], tf.int64)
      table = self._table(self._configs(), native=native)
      rows = table.lookup({"1": ids})
      with tf.control_dependencies([rows["1"]]):
        updated = table.apply_gradients({"2": (ids, tf.ones([2, 2]))}, tf.constant(0, tf.int64))
      after = updated.lookup({"1": ids, "2": ids})
      session = self.session_on(2)
      self.initialize(session)
      after = session.run(after)

    self.assertAllEqual(after["1"], np.zeros([2, 1]))
    self.assertTrue(np.all(after["2"] < 0))

  def test_lookup_latency_is_measured(self):
    seen = []
    logging_ops.set_metric_sink(lambda key, value, tags: seen.append((key, value, tags)))
    self.addCleanup(logging_ops.set_metric_sink, None)
    with tf.Graph().as_default():
      table = self._table(self._configs(), native=True)
      rows = table.lookup({"1": [1]})
      session = self.session_on(2)
      self.initialize(session)
      session.run(rows)

    self.assertCountEqual(
      [(key, tags) for key, _, tags in seen],
      [("embedding_lookup", "model_name=|ps=0"), ("embedding_lookup", "model_name=|ps=1")],
    )
    self.assertTrue(all(value >= 0 for _, value, _ in seen))

  @_native_and_merged
  def test_same_as_one_local_table(self, native):
    rng = np.random.default_rng(0)
    ids = rng.integers(-50, 50, [4, 60])
    grads = rng.normal(size=[4, 60, 3]).astype(np.float32)
    results = []
    for num_ps in (0, 1, 3):
      with tf.Graph().as_default():
        configs = {"a": _adagrad_config(3), "b": _adagrad_config(3)}
        create = (
          distributed_ps_factory.create_native_multi_hash_table
          if native
          else distributed_ps_factory.create_multi_type_hash_table
        )
        table = create(num_ps, configs, [None] * max(num_ps, 1))
        for step in range(len(ids)):
          table = table.apply_gradients(
            {"a": (ids[step], grads[step]), "b": (ids[step] + 1000, -grads[step])},
            tf.constant(step, tf.int64),
          )
        rows = table.lookup({"a": np.arange(-50, 50), "b": np.arange(950, 1050)})
        session = self.session_on(max(num_ps, 1))
        self.initialize(session)
        results.append(session.run(rows))
    for result in results[1:]:
      self.assertAllClose(result["a"], results[0]["a"], rtol=1e-6)
      self.assertAllClose(result["b"], results[0]["b"], rtol=1e-6)


class ExportTest(_ClusterTest):
  def _configs(self):
    return {
      "a": test_utils.generate_test_hash_table_config(1),
      "b": test_utils.generate_test_hash_table_config(2),
    }

  @_native_and_merged
  def test_standalone(self, native):
    factory = _native_factory if native else _multi_type_factory
    with tf.Graph().as_default() as graph:
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE) as ctx:
        table = distributed_ps.DistributedMultiTypeHashTable(2, self._configs(), factory)
        rows = table.lookup({"a": [1], "b": [2]})

      self.assertEqual(ctx.sub_graph_num, 0)
      for op in graph.get_operations():
        self.assertNotIn("/job:ps", op.device)
        self.assertNotEqual(op.type, "MonolithMetricV2")
      with tf.compat.v1.Session() as session:
        self.initialize(session)
        self.assertAllEqual(session.run(rows)["b"], [[0, 0]])

  @_native_and_merged
  def test_distributed(self, native):
    factory = _native_factory if native else _multi_type_factory
    ctx = native_task_context.NativeTaskContext(2, 0, 1, 0, "model", None, "worker")
    calls = []

    def remote_predict(inputs, tensors, outputs, **kwargs):
      calls.append((inputs, outputs, kwargs))
      return [tf.zeros([4]) for _ in outputs]

    with (
      native_task_context.with_ctx(ctx),
      tf.Graph().as_default(),
      mock.patch.object(distributed_ps, "remote_predict", remote_predict),
      export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as export_ctx,
    ):
      table = distributed_ps.DistributedMultiTypeHashTable(
        2, self._configs(), factory, max_rpc_deadline_millis=77
      )
      rows = table.lookup({"b": [2], "a": [1]})

    self.assertCountEqual(export_ctx.sub_graphs, ["ps_0", "ps_1"])
    graph = export_ctx.sub_graph("ps_1")
    signatures = {signature.name: signature for signature in export_ctx.signatures(graph)}
    self.assertCountEqual(signatures, ["lookup", "raw_lookup"] if native else ["lookup"])
    self.assertCountEqual(signatures["lookup"].inputs, ["a", "b"])
    self.assertCountEqual(signatures["lookup"].outputs, ["a", "b"])
    self.assertEqual(signatures["lookup"].inputs["a"].shape.as_list(), [None])
    if native:
      self.assertCountEqual(signatures["raw_lookup"].inputs, ["id", "id_split"])
      self.assertCountEqual(signatures["raw_lookup"].outputs, ["flat_emb"])
    self.assertLen(calls, 2)
    inputs, outputs, kwargs = calls[1]
    self.assertEqual(inputs, ["id", "id_split"] if native else ["a", "b"])
    self.assertEqual(outputs, ["flat_emb"] if native else ["a", "b"])
    self.assertEqual(kwargs["task"], 1)
    self.assertEqual(kwargs["old_model_name"], "ps_1")
    self.assertEqual(kwargs["model_name"], "model:ps_1")
    self.assertEqual(kwargs["model_version"], -1)
    self.assertEqual(kwargs["max_rpc_deadline_millis"], 77)
    self.assertEqual(kwargs["signature_name"], "raw_lookup" if native else "lookup")
    self.assertEqual(rows["b"].shape.as_list()[-1], 2)

  def test_distributed_builds_the_op(self):
    with (
      tf.Graph().as_default() as graph,
      export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED),
    ):
      table = distributed_ps.DistributedMultiTypeHashTable(2, self._configs(), _native_factory)
      table.lookup({"a": [1]})

      ops = [op for op in graph.get_operations() if op.type == "TfServingRemotePredict"]
      self.assertLen(ops, 2)

  def test_the_exported_graph_of_a_server_works(self):
    with (
      tf.Graph().as_default(),
      export_context.enter_export_mode(export_context.ExportMode.DISTRIBUTED) as export_ctx,
    ):
      distributed_ps.DistributedMultiTypeHashTable(2, self._configs(), _native_factory)
    graph = export_ctx.sub_graph("ps_0")
    signatures = {signature.name: signature for signature in export_ctx.signatures(graph)}
    with graph.as_default(), tf.compat.v1.Session() as session:
      self.initialize(session)
      lookup, raw = signatures["lookup"], signatures["raw_lookup"]
      rows = session.run(lookup.outputs, {lookup.inputs["a"]: [1], lookup.inputs["b"]: [3, 4]})
      flat = session.run(raw.outputs, {raw.inputs["id"]: [1, 2], raw.inputs["id_split"]: [0, 1, 2]})

    self.assertAllEqual(rows["b"], np.zeros([2, 2]))
    self.assertAllEqual(flat["flat_emb"], np.zeros([3]))


if __name__ == "__main__":
  tf.test.main()
