"""Training writes its row log: in one process, with and without servers in it, after a restart too.

Tests `row_log_hooks`, and what `driver/hooks.py`, `local.py` and `tables.py` do with it.
"""

import os
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import cpu_training, entry, feature, graph_estimator, native_task
from monolith.native_training.driver import server as training_server
from monolith.realtime.row_log_pb2 import RowBatch
from monolith.row_log import row_log_hooks
from monolith.row_log.log_partition import LogPartition
from tests.native_training.data.mock_kafka import MockKafka
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()


class GrowingTask(native_task.NativeTask):
  """Rows of ids 7 and 8 grow by 1 per step, in two columns."""

  def create_input_fn(self, mode):
    def input_fn():
      ids = tf.ragged.constant([[7], [8]], dtype=tf.int64, row_splits_dtype=tf.int64)
      return tf.data.Dataset.from_tensors({"item": ids}).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name="item",
          default_vec_initializer=entry.ZerosInitializer(),
          default_vec_optimizer=entry.SgdOptimizer(learning_rate=1.0),
          default_vec_compressor=entry.Fp32Compressor(),
        )
      )
      column = feature.FeatureColumn(slot, "item")
      loss = -tf.reduce_sum(column.embedding_lookup(slot.add_feature_slice(2)))
      embeddings = column.get_all_embeddings_concat()
      gradients = tf.gradients(loss, [embeddings])
      apply_op = self.ctx.apply_embedding_gradients(zip(gradients, [embeddings]))
      with tf.control_dependencies([apply_op]):
        step_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=step_op)

    return model_fn

  def create_serving_input_receiver_fn(self):
    return None


class WaitForLogHook(tf.compat.v1.train.SessionRunHook):
  """Lets a step end when every shard has published: before that, there are all rows to publish.

  Args:
    logs: the shards' partitions.
  """

  def __init__(self, logs):
    self._logs = logs

  def after_run(self, run_context, run_values):
    wait_until(lambda: all(log.ends()[1] > 0 for log in self._logs))


class RowLogOfTrainingTest(tf.test.TestCase, parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.kafka = MockKafka()
    cls.addClassCleanup(cls.kafka.close)

  def _train(self, folder, model, num_ps, steps, native):
    logs = [LogPartition(self.kafka.servers, f"rows.{model}", i) for i in range(max(1, num_ps))]
    params = GrowingTask.params()
    params.name = "growing"
    params.metrics.enable_tf2_profiler_hook = False
    params.serving.export_when_saving = False
    conf = cpu_training.CpuTrainingConfig(
      num_ps=num_ps,
      enable_realtime_training=True,
      realtime_kafka_servers=self.kafka.servers,
      realtime_model_name=model,
      sync_interval_secs=0.1,
      use_native_multi_hash_table=native,
    )
    hook = WaitForLogHook(logs)
    cpu_training.local_train_internal(params, conf, folder, steps, user_hooks=[hook])
    for log in logs:
      log.close()

  def _read(self, model, num_shards):
    """Returns all batches of all shards, and id -> row as a replica would have it."""
    batches, rows = [], {}
    for shard in range(num_shards):
      log = LogPartition(self.kafka.servers, f"rows.{model}", shard)
      self.addCleanup(log.close)
      for _, value in log.read(*log.ends()):
        batch = RowBatch.FromString(value[4:])
        batches.append(batch)
        for table in batch.tables:
          ids = np.frombuffer(table.ids, "<i8")
          values = np.frombuffer(table.rows, "<f4").reshape(-1, table.dim)
          rows.update(zip(ids.tolist(), values.tolist()))
    return batches, rows

  @parameterized.parameters((0, True), (0, False), (2, True))
  def test_rows_reach_the_log_and_a_restart_goes_on(self, num_ps, native):
    model = f"growing{num_ps}{native}"
    shards = max(1, num_ps)
    self.kafka.create_topic(f"rows.{model}", shards)
    self.kafka.create_topic(f"dense.{model}")
    with tempfile.TemporaryDirectory() as folder:
      self._train(folder, model, num_ps, 3, native)
      batches, rows = self._read(model, shards)

      self.assertEqual(rows, {7: [3.0, 3.0], 8: [3.0, 3.0]})
      self.assertEqual({batch.epoch for batch in batches}, {1})
      self.assertEqual({batch.num_shards for batch in batches}, {shards})
      self.assertEqual(max(batch.saved_step for batch in batches), 3)

      self._train(folder, model, num_ps, 2, native)
      more, rows = self._read(model, shards)

    self.assertEqual(rows, {7: [5.0, 5.0], 8: [5.0, 5.0]})
    second = [batch for batch in more if batch.epoch == 2]
    self.assertEqual({batch.shard for batch in second}, set(range(shards)))
    # Restored rows are known from the log: nobody sends all rows again.
    self.assertEqual([batch.full_scan for batch in second if batch.full_scan], [])

  def test_a_server_publishes_instead_of_pushing(self):
    conf = cpu_training.DistributedCpuTrainingConfig(
      num_ps=2, realtime_kafka_servers=self.kafka.servers, realtime_model_name="served"
    )
    server = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default(), tf.compat.v1.Session(server.target) as session:
      session.run(training_server._create_shutdown_queue(1).enqueue(1))
    published = []
    publish = row_log_hooks.publish_from_server

    def spy(*args):
      published.append(args)
      return publish(*args)

    with mock.patch.object(row_log_hooks, "publish_from_server", spy):
      # A backend that is asked anything raises.
      training_server._join_ps(server.target, 1, object(), conf)

    self.assertEqual(published, [(conf, server.target, 1)])

  def test_a_model_without_a_name_is_refused(self):
    conf = cpu_training.CpuTrainingConfig(realtime_kafka_servers=self.kafka.servers)
    with self.assertRaisesRegex(ValueError, "has no name for its topic"):
      row_log_hooks.RowLogHook(conf, os.path.join(tempfile.gettempdir(), "none"))


if __name__ == "__main__":
  tf.test.main()
