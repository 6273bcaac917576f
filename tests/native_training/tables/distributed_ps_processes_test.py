"""Tables on two and three real server processes; they give what one process gives."""

import json
import threading

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import resources

from monolith.native_training import (
  distributed_ps,
  distributed_ps_factory,
  distributed_serving_ops,
  entry,
  hash_filter_ops,
  hash_table_ops,
  test_utils,
  utils,
)
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from tests.ps_processes import PsProcesses
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_DIMS = {"a": 3, "b": 5}
_LOOKUP = {slot: np.arange(-60, 60) for slot in _DIMS}


def _configs():
  configs = {}
  for slot, dim in _DIMS.items():
    table_config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    entry.CuckooHashTableConfig().mutate_table(table_config)
    table_config.entry_config.segments.append(
      entry.CombineAsSegment(
        dim,
        entry.ZerosInitializer(),
        entry.AdagradOptimizer(initial_accumulator_value=0.1),
        entry.Fp32Compressor(),
      )
    )
    configs[slot] = entry.HashTableConfigInstance(table_config, [0.5])
  return configs


def _create(kind, num_ps):
  filters = hash_filter_ops.create_hash_filters(num_ps, False)
  if kind == "native":
    return distributed_ps_factory.create_native_multi_hash_table(num_ps, _configs(), filters)
  return distributed_ps_factory.create_multi_type_hash_table(
    num_ps, _configs(), filters, reduce_network_packets=kind == "packed"
  )


def _initialize(session):
  session.run(resources.initialize_resources(resources.shared_resources()))


def _history(table):
  """Returns ops that write in every way, to be run one after the other."""
  rng = np.random.default_rng(7)

  def pairs():
    return {
      slot: (rng.integers(-50, 50, 40), rng.normal(size=[40, dim]).astype(np.float32))
      for slot, dim in _DIMS.items()
    }

  step = tf.constant(0, tf.int64)
  return [
    table.assign(pairs()).as_op("assign"),
    table.apply_gradients(pairs(), step).as_op("apply_1"),
    table.assign_add(pairs()).as_op("assign_add"),
    table.apply_gradients(pairs(), step, req_time=tf.constant(5, tf.int64)).as_op("apply_2"),
  ]


class DistributedPsProcessesTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.cluster = PsProcesses(3)

  @classmethod
  def tearDownClass(cls):
    cls.cluster.stop()
    super().tearDownClass()

  def _run(self, kind, num_ps):
    """Returns what every step of the history leaves, looked up."""
    with tf.Graph().as_default():
      # Tables on servers outlive a session: every test has its own.
      with tf.compat.v1.get_default_graph().container(self._testMethodName.replace("_", ".")):
        table = _create(kind, num_ps)
      history = _history(table)
      rows = table.lookup(_LOOKUP)
      session = self.cluster.session(num_ps) if num_ps else tf.compat.v1.Session()
      results = []
      with session:
        _initialize(session)
        for op in history:
          session.run(op)
          results.append(session.run(rows))
    return results

  @parameterized.product(kind=("native", "packed", "single"), num_ps=(2, 3))
  def test_same_as_one_process(self, kind, num_ps):
    expected = self._run(kind, 0)
    results = self._run(kind, num_ps)

    self.assertGreater(np.abs(expected[-1]["b"]).sum(), 1)
    for result, want in zip(results, expected):
      for slot in _DIMS:
        self.assertAllClose(result[slot], want[slot], rtol=1e-6, atol=1e-7)

  def test_rows_are_spread_over_the_servers(self):
    with tf.Graph().as_default() as graph, graph.container(self._testMethodName.replace("_", ".")):
      config = test_utils.generate_test_hash_table_config(1)
      table = distributed_ps.DistributedHashTable(
        3, config, lambda i, c: hash_table_ops.hash_table_from_config(c, name_suffix=f"s{i}")
      )
      assign = table.assign(np.arange(-9, 9), np.ones([18, 1])).as_op()
      sizes = [part.size() for part in table._hash_tables]
      with self.cluster.session() as session:
        session.run(assign)
        self.assertEqual(session.run(sizes), [6, 6, 6])

  def test_pushes_come_from_the_servers(self):
    with tf.Graph().as_default() as graph, graph.container(self._testMethodName.replace("_", ".")):
      clients = distributed_serving_ops.create_parameter_sync_clients(2)
      table = distributed_ps_factory.create_native_multi_hash_table(
        2, _configs(), [None, None], clients
      )
      update = table.apply_gradients(
        {"a": ([1, 2, 3], np.ones([3, 3]))}, tf.constant(0, tf.int64)
      ).as_op()
      server = distributed_serving_ops.DummySyncServer("localhost:0")
      config = tf.compat.v1.placeholder(tf.string, [])
      pushes = [
        distributed_serving_ops.ParameterSyncClient(client).create_sync_op(config)
        for client in clients
      ]
      with self.cluster.session(2) as session:
        _initialize(session)
        session.run(update)
        target = f"localhost:{session.run(server.get_port())[0]}"
        serialized = parameter_sync_pb2.ClientConfig(
          model_name="m", targets=[target], timeout_in_ms=60000
        ).SerializeToString()
        results = session.run(pushes, {config: serialized})
        session.run(server.shutdown())

    counts = [json.loads(result[0])["responses"][0]["update_num"] for result in results]
    self.assertEqual(counts, [1, 2])


class SaveRestoreTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(2, 3)
  def test_restore_into_new_processes(self, num_ps):
    with tf.Graph().as_default():
      table = _create("native", num_ps)
      history = _history(table)
      rows = table.lookup(_LOOKUP)
      path = self.get_temp_dir()
      saves = [t.save(f"{path}/ps_{i}").as_op() for i, t in enumerate(table._tables)]
      restores = [t.restore(f"{path}/ps_{i}").as_op() for i, t in enumerate(table._tables)]

      cluster = PsProcesses(num_ps)
      self.addCleanup(cluster.stop)
      with cluster.session() as session:
        _initialize(session)
        for op in history:
          session.run(op)
        saved = session.run(rows)
        session.run(saves)
      cluster.stop()

      cluster = PsProcesses(num_ps)
      self.addCleanup(cluster.stop)
      with cluster.session() as session:
        _initialize(session)
        self.assertAllEqual(session.run(rows)["a"], np.zeros([120, 3]))
        session.run(restores)
        restored = session.run(rows)
        # The optimizer's state came back too: the next step is that of a process without pause.
        session.run(history[-1])
        after = session.run(rows)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      table = _create("native", 0)
      history = _history(table)
      rows = table.lookup(_LOOKUP)
      _initialize(session)
      for op in history:
        session.run(op)
      expected = session.run(rows)
      session.run(history[-1])
      expected_after = session.run(rows)

    for slot in _DIMS:
      self.assertAllEqual(restored[slot], saved[slot])
      self.assertAllClose(restored[slot], expected[slot], rtol=1e-6, atol=1e-7)
      self.assertAllClose(after[slot], expected_after[slot], rtol=1e-6, atol=1e-7)


class DeadServerTest(tf.test.TestCase):
  def _abandon(self, session):
    """Leaves a session open: closing it would wait for the dead server forever."""
    session._closed = True
    session._session = None

  def test_a_server_that_dies_in_a_call_is_named(self):
    cluster = PsProcesses(2)
    self.addCleanup(cluster.stop)
    with tf.Graph().as_default():
      table = _create("native", 2)
      with tf.device(utils.ps_device(1)):
        gate = tf.queue.FIFOQueue(1, tf.int64, shapes=[[]])
        started = tf.Variable(0, use_resource=True, trainable=False)
        with tf.control_dependencies([started.assign_add(1)]):
          ids = tf.reshape(gate.dequeue(), [1])
      rows = table.lookup({"a": ids})
      session = cluster.session()
      self.addCleanup(self._abandon, session)
      _initialize(session)
      session.run(started.initializer)
      errors = []

      def look_up():
        try:
          session.run(rows)
        except tf.errors.OpError as error:
          errors.append(error)

      thread = threading.Thread(target=look_up)
      thread.start()
      wait_until(lambda: session.run(started) == 1)
      cluster.kill(1)
      thread.join(timeout=120)

      self.assertFalse(thread.is_alive())
      self.assertLen(errors, 1)
      self.assertRegex(str(errors[0]), "/job:ps/replica:0/task:1")
      with self.assertRaisesRegex(tf.errors.OpError, "/job:ps/replica:0/task:1"):
        session.run(table.lookup({"a": [1]}))


if __name__ == "__main__":
  tf.test.main()
