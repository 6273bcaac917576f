"""Factories: which tables they make, their names, filters and clients."""

import gc
import subprocess
import sys

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps,
  distributed_ps_factory,
  distributed_serving_ops,
  entry,
  hash_filter_ops,
  learning_rate_functions,
  multi_hash_table_ops,
  multi_type_hash_table,
  test_utils,
)
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

tf.compat.v1.disable_v2_behavior()


def _configs():
  return {
    "slot0": test_utils.generate_test_hash_table_config(2),
    "slot1": test_utils.generate_test_hash_table_config(2),
    "slot2": test_utils.generate_test_hash_table_config(1),
  }


def _shared_names(kind):
  ops = tf.compat.v1.get_default_graph().get_operations()
  return {op.get_attr("shared_name").decode(): op.device for op in ops if op.type == kind}


class FactoryTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)

  def run_on(self, num_ps, fetches):
    servers, config = test_utils.create_test_ps_cluster(max(num_ps, 1))
    config.share_cluster_devices_in_session = True
    config.experimental.share_session_state_in_clusterspec_propagation = True
    with tf.compat.v1.Session(servers[0].target, config=config) as session:
      session.run(tf.compat.v1.global_variables_initializer())
      session.run(resources.initialize_resources(resources.shared_resources()))
      return session.run(fetches)

  def check_works(self, table, num_ps):
    table = table.assign_add({"slot0": ([1, -1], [[1, 2], [3, 4]]), "slot2": ([5], [[7]])})
    table = table.apply_gradients({"slot1": ([2, 2], [[1, 1], [1, 1]])}, tf.constant(0, tf.int64))
    rows = self.run_on(num_ps, table.lookup({"slot0": [-1, 1, 9], "slot1": [2], "slot2": [5]}))
    self.assertAllEqual(rows["slot0"], [[3, 4], [1, 2], [0, 0]])
    self.assertAllEqual(rows["slot1"], [[-2, -2]])
    self.assertAllEqual(rows["slot2"], [[7]])

  @parameterized.product(num_ps=(0, 1, 2), reduce_network_packets=(False, True))
  def test_create_multi_type_hash_table(self, num_ps, reduce_network_packets):
    filters = hash_filter_ops.create_hash_filters(num_ps, False)
    table = distributed_ps_factory.create_multi_type_hash_table(
      num_ps, _configs(), filters, reduce_network_packets=reduce_network_packets
    )

    self.assertIsInstance(table, multi_type_hash_table.MergedMultiTypeHashTable)
    self.assertEqual(table.slot_mapping["slot1"], "e21904dd414d1780e5fc904866dc69c2")
    self.assertEqual(
      isinstance(table._table, distributed_ps.DistributedMultiTypeHashTable),
      num_ps > 0 and reduce_network_packets,
    )
    name = "MonolithHashTable_e21904dd414d1780e5fc904866dc69c2"
    names = _shared_names("MonolithHashTable")
    if num_ps == 0:
      self.assertEqual(names[name], "/device:CPU:0")
    for ps in range(num_ps):
      self.assertEqual(names[f"{name}_{ps}"], f"/job:ps/task:{ps}/device:CPU:0")
    self.check_works(table, num_ps)

  @parameterized.parameters(0, 2)
  def test_number_of_ids_need_not_be_known(self, num_ps):
    # With v1 behaviour, an unknown dimension of a shape is an object, not `None`.
    schedule = learning_rate_functions.PolynomialDecay(1.0, 10, 2.0)
    table = distributed_ps_factory.create_native_multi_hash_table(
      num_ps,
      {"slot": test_utils.generate_test_hash_table_config(2, learning_rate=schedule)},
      hash_filter_ops.create_hash_filters(num_ps, False),
    )
    ids = tf.compat.v1.placeholder_with_default(tf.constant([3, 4, 3], tf.int64), [None])
    step = tf.compat.v1.train.get_or_create_global_step()
    embeddings = table.lookup({"slot": ids})["slot"]
    table = table.apply_gradients({"slot": (ids, tf.ones_like(embeddings))}, step)
    known = table.lookup({"slot": tf.constant([3, 4], tf.int64)})["slot"]

    self.assertEqual(embeddings.shape.as_list(), [None, 2])
    self.assertEqual(known.shape.as_list(), [2, 2])
    self.assertAllEqual(self.run_on(num_ps, known), [[-2, -2], [-1, -1]])

  @parameterized.parameters(0, 1, 2)
  def test_create_native_multi_hash_table(self, num_ps):
    filters = hash_filter_ops.create_hash_filters(num_ps, False)
    table = distributed_ps_factory.create_native_multi_hash_table(num_ps, _configs(), filters)

    names = _shared_names("CreateMonolithMultiHashTable")
    if num_ps == 0:
      self.assertIsInstance(table, multi_hash_table_ops.MultiHashTable)
      self.assertCountEqual(names, ["MonolithMultiHashTable_"])
    else:
      self.assertEqual(
        names,
        {f"MonolithMultiHashTable_{ps}": f"/job:ps/task:{ps}/device:CPU:0" for ps in range(num_ps)},
      )
    self.check_works(table, num_ps)

  def test_every_server_has_its_own_config_constant(self):
    distributed_ps_factory.create_native_multi_hash_table(2, _configs(), [None, None])
    for op in tf.compat.v1.get_default_graph().get_operations():
      if op.type == "CreateMonolithMultiHashTable":
        self.assertEqual(op.inputs[0].device, op.device)

  @parameterized.parameters("multi_type", "native")
  def test_filters_and_clients_are_wired(self, kind):
    filters = hash_filter_ops.create_hash_filters(2, False)
    clients = distributed_serving_ops.create_parameter_sync_clients(2)
    if kind == "native":
      distributed_ps_factory.create_native_multi_hash_table(2, _configs(), filters, clients)
      op_type, filter_input = "CreateMonolithMultiHashTable", 1
    else:
      distributed_ps_factory.create_multi_type_hash_table(
        2, _configs(), filters, clients, reduce_network_packets=True
      )
      op_type, filter_input = "MonolithHashTable", 0
    found = 0
    for op in tf.compat.v1.get_default_graph().get_operations():
      if op.type == op_type:
        found += 1
        ps = int(op.get_attr("shared_name").decode().rsplit("_", 1)[1])
        self.assertIs(op.inputs[filter_input], filters[ps])
        self.assertIs(op.inputs[filter_input + 1], clients[ps])
    self.assertEqual(found, 2 if kind == "native" else 4)

  def test_number_of_clients_must_match(self):
    message = "Number of PS should be equal to number of sync clients, while got 2 vs 1"
    with self.assertRaisesRegex(AssertionError, message):
      distributed_ps_factory.create_multi_type_hash_table(2, _configs(), [None] * 2, ["x"])
    with self.assertRaisesRegex(AssertionError, message):
      distributed_ps_factory.create_native_multi_hash_table(2, _configs(), [None] * 2, ["x"])

  def test_multi_hash_table_factory_converts_a_dict_once(self):
    factory = distributed_ps_factory.MultiHashTableFactory([None] * 2, [None] * 2)
    configs = _configs()
    factory(0, configs)
    factory(1, configs)
    self.assertLen(factory._converted, 1)
    # A dict that is gone must not lend its identity to another one.
    for i in range(3):
      distributed = dict(configs, **{f"extra{i}": test_utils.generate_test_hash_table_config(1)})
      cc = factory._convert(distributed)
      self.assertIn(f"extra{i}", cc.table_names)
      del distributed
      gc.collect()

  def test_learning_rates_follow_sorted_names(self):
    configs = {
      "z": test_utils.generate_test_hash_table_config(1, learning_rate=1.0),
      "a": test_utils.generate_test_hash_table_config(
        1, learning_rate=learning_rate_functions.PolynomialDecay(0.5, 10, 0.5)
      ),
    }
    tf.compat.v1.train.get_or_create_global_step()
    table = distributed_ps_factory.create_native_multi_hash_table(2, configs, [None] * 2)
    table = table.apply_gradients({"a": ([1], [[2]]), "z": ([1], [[2]])}, tf.constant(0, tf.int64))
    rows = self.run_on(2, table.lookup({"a": [1], "z": [1]}))
    self.assertAllEqual([rows["a"][0, 0], rows["z"][0, 0]], [-1, -2])

  @parameterized.product(native=(True, False), per_occurrence=(True, False))
  def test_duplicate_ids_without_servers(self, native, per_occurrence):
    if per_occurrence:
      with self._env("MONOLITH_UPDATE_PER_OCCURRENCE", "1"):
        rows = self._adagrad_rows(native)
      accumulators = np.sqrt([1.1, 2.1])
      self.assertAllClose(rows, [[-(1 / accumulators).sum()], [-1 / np.sqrt(1.1)]])
    else:
      rows = self._adagrad_rows(native)
      self.assertAllClose(rows, [[-2 / np.sqrt(4.1)], [-1 / np.sqrt(1.1)]])

  @parameterized.product(native=(True, False), num_ps=(0, 2))
  def test_filters_count_steps_however_often_an_id_comes_in_one(self, native, num_ps):
    thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(
      default_occurrence_threshold=2
    )
    filters = hash_filter_ops.create_hash_filters(
      num_ps, True, thresholds.SerializeToString(), filter_capacity=1000
    )
    make = (
      distributed_ps_factory.create_native_multi_hash_table
      if native
      else distributed_ps_factory.create_multi_type_hash_table
    )
    table = make(num_ps, {"a": test_utils.generate_test_hash_table_config(1)}, filters)
    ids = tf.constant([4, 4, 4, 5], tf.int64)
    rows = []
    for _ in range(3):
      with tf.control_dependencies(rows[-1:]):
        step = tf.constant(0, tf.int64)
        table = table.apply_gradients({"a": (ids, tf.ones([4, 1]))}, step)
        rows.append(table.lookup({"a": [4, 5]})["a"])
    # Twice the ids are counted, the third time they are in.
    self.assertAllEqual(self.run_on(num_ps, rows), [[[0], [0]], [[0], [0]], [[-3], [-1]]])

  def _env(self, name, value):
    from unittest import mock

    return mock.patch.dict("os.environ", {name: value})

  def _adagrad_rows(self, native):
    table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    entry.CuckooHashTableConfig().mutate_table(table_config)
    table_config.entry_config.segments.append(
      entry.CombineAsSegment(
        1,
        entry.ZerosInitializer(),
        entry.AdagradOptimizer(initial_accumulator_value=0.1),
        entry.Fp32Compressor(),
      )
    )
    configs = {"a": entry.HashTableConfigInstance(table_config, [1.0])}
    if native:
      table = distributed_ps_factory.create_native_multi_hash_table(0, configs, [None])
    else:
      table = distributed_ps_factory.create_multi_type_hash_table(0, configs, [None])
    grads = {"a": (tf.constant([4, 4, 5], tf.int64), tf.ones([3, 1]))}
    table = table.apply_gradients(grads, tf.constant(0, tf.int64))
    return self.run_on(0, table.lookup({"a": tf.constant([4, 5], tf.int64)}))["a"]

  def test_without_horovod_several_workers_are_told_what_to_install(self):
    code = (
      "import sys; sys.modules['horovod'] = None\n"
      "from monolith.native_training import distributed_ps_factory as f\n"
      "from monolith.native_training import test_utils\n"
      "configs = {'a': test_utils.generate_test_hash_table_config(1)}\n"
      "import tensorflow as tf; tf.compat.v1.disable_eager_execution()\n"
      "for create in (f.create_in_worker_multi_type_hash_table,\n"
      "               f.create_in_worker_native_multi_hash_table):\n"
      "  create(1, configs, None)\n"
      "  try:\n"
      "    create(2, configs, None)\n"
      "  except AssertionError as error:\n"
      "    assert 'Horovod is not installed: ' in str(error), error\n"
      "  else:\n"
      "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
  tf.test.main()
