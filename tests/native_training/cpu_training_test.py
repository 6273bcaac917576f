"""The driver in one process: what a task sees, what tables learn, what is saved and exported.

Covers `driver/lookups.py`.
"""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import tensorflow as tf

from monolith.native_training import (
  cpu_training,
  device_utils,
  entry,
  feature,
  graph_estimator,
  native_task,
  service_discovery,
  utils,
)
from monolith.native_training.debugging import debugging_server  # noqa: F401, must import early
from monolith.native_training.graph import export_context
from monolith.native_training.metric import cli
from monolith.native_training.model_export import saved_model_exporters
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT


def _ragged(rows):
  return tf.ragged.constant(rows, dtype=tf.int64, row_splits_dtype=tf.int64)


def _zero_slot(name, **kwargs):
  return feature.FeatureSlotConfig(
    name=name,
    default_vec_initializer=entry.ZerosInitializer(),
    default_vec_compressor=entry.Fp32Compressor(),
    **kwargs,
  )


class FeatureTask(native_task.NativeTask):
  """One feature of five columns; every value's gradient is 1."""

  def _features(self):
    return {"feature": _ragged([[0, 1], [2]])}

  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors(self._features())

  def _create_column(self):
    slot = self.ctx.create_feature_slot(_zero_slot("slot"))
    return slot, feature.FeatureColumn(slot, "feature")

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot, column = self._create_column()
      embedding = column.embedding_lookup(slot.add_feature_slice(5))
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=embedding)
      return self._train(mode, tf.reduce_sum(embedding), [column])

    return model_fn

  def _train(self, mode, loss, columns):
    embeddings = [column.get_all_embeddings_concat() for column in columns]
    gradients = tf.gradients(loss, embeddings)
    apply_op = self.ctx.apply_embedding_gradients(zip(gradients, embeddings))
    global_step = tf.compat.v1.train.get_or_create_global_step()
    # Only steps that had data count.
    with tf.control_dependencies([loss]):
      step_op = tf.compat.v1.assign_add(global_step, 1)
    return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(apply_op, step_op))

  def create_serving_input_receiver_fn(self):
    def receiver_fn():
      serialized = tf.compat.v1.placeholder(tf.string, [None], name="instances")
      ids = tf.io.decode_raw(serialized, tf.int64)
      ragged = tf.RaggedTensor.from_tensor(ids, row_splits_dtype=tf.int64)
      return graph_estimator.ServingInputReceiver({"feature": ragged}, {"instances": serialized})

    return receiver_fn


class FloatFeatureTask(FeatureTask):
  """Has a dense feature too."""

  def _features(self):
    return {"feature": _ragged([[0, 1], [2]]), "float": tf.constant([[1.0], [2.0]])}

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot, column = self._create_column()
      embedding = column.embedding_lookup(slot.add_feature_slice(5))
      weighted = embedding * features["float"]
      return self._train(mode, tf.reduce_sum(weighted), [column])

    return model_fn


class SequenceFeatureTask(FeatureTask):
  """Keeps the first two ids of every example."""

  def _features(self):
    return {"feature": _ragged([[1, 2], [], [3, 4, 5]])}

  def create_model_fn(self):
    def model_fn(features, mode, config):
      slot = self.ctx.create_feature_slot(_zero_slot("slot"))
      column = feature.FeatureColumn(slot, "feature", feature.FeatureColumn.first_n(2))
      embedding = column.embedding_lookup(slot.add_feature_slice(5))
      assert embedding.shape[1:].as_list() == [2, 5], embedding.shape
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=embedding)
      return self._train(mode, tf.reduce_sum(embedding), [column])

    return model_fn


class NonFeatureTask(native_task.NativeTask):
  """Has no embedding, and features that are no dict."""

  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors([1])

  def create_model_fn(self):
    def model_fn(features, mode, config):
      global_step = tf.compat.v1.train.get_or_create_global_step()
      train_op = tf.group(features, tf.compat.v1.assign_add(global_step, 1))
      return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=train_op)

    return model_fn


class ExpireTask(FeatureTask):
  """Two slots, the rows of the first of which expire at once."""

  def _features(self):
    return {
      "feature_1": _ragged([[1 << 48, (1 << 48) + 1]]),
      "feature_2": _ragged([[2 << 48, (2 << 48) + 1]]),
      "req_time": tf.constant([[100]], tf.int64),
    }

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, embeddings = [], []
      for slot_id, expire_time in ((1, 0), (2, 1)):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            slot_id=slot_id,
            default_vec_initializer=entry.ZerosInitializer(),
            expire_time=expire_time,
          )
        )
        column = feature.FeatureColumn(slot, f"feature_{slot_id}")
        columns.append(column)
        embeddings.append(column.embedding_lookup(slot.add_feature_slice(5)))
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=tf.concat(embeddings, axis=0))
      return self._train(mode, tf.add_n([tf.reduce_sum(e) for e in embeddings]), columns)

    return model_fn


class OccurrenceTask(FeatureTask):
  def _create_column(self):
    slot = self.ctx.create_feature_slot(_zero_slot("slot", slot_id=2021, occurrence_threshold=3))
    return slot, feature.FeatureColumn(slot, "feature")

  def _features(self):
    return {"feature": _ragged([[(2021 << 48) + 1]])}

  def create_input_fn(self, mode):
    repeats = 1 if mode == _PREDICT else 4
    return lambda: tf.data.Dataset.from_tensors(self._features()).repeat(repeats)


class CpuTrainingTestBase:
  """The cases that hold for both kinds of tables."""

  use_native_multi_hash_table = None

  def _model_dir(self):
    return os.path.join(utils.get_test_tmp_dir(), self.id(), "model_dir")

  def _create(self, task_class, configure=None, **kwargs):
    params = task_class.params()
    params.name = task_class.__name__
    params.train.per_replica_batch_size = 2
    if configure:
      configure(params)
    config = cpu_training.CpuTrainingConfig(
      use_native_multi_hash_table=self.use_native_multi_hash_table, **kwargs
    )
    return cpu_training.CpuTraining(config, params.instantiate())

  def _train(self, training, steps=None):
    estimator = graph_estimator.Estimator(training.create_model_fn(), self._model_dir())
    return estimator.train(training.create_input_fn(_TRAIN), steps=steps)

  def _predict(self, training):
    estimator = graph_estimator.Estimator(training.create_model_fn(), self._model_dir())
    return np.array(list(estimator.predict(training.create_input_fn(_PREDICT))))

  def test_default_config(self):
    training = self._create(FeatureTask)

    self._train(training)

    # Default Adagrad: learning rate 0.001, accumulator 1, one step with gradient 1.
    update = -0.001 / np.sqrt(2)
    self.assertAllClose(self._predict(training), [[2 * update] * 5, [update] * 5], atol=1e-7)

  def test_checkpoint_announces_table_type(self):
    self._train(self._create(FeatureTask))

    config = cpu_training.CpuTrainingConfig()
    cpu_training.make_config_backward_compatible(self._model_dir(), config)

    is_native = self.use_native_multi_hash_table in (None, True)
    self.assertEqual(config.use_native_multi_hash_table, None if is_native else False)

  def test_resumes_from_checkpoint(self):
    self._train(self._create(RepeatedFeatureTask), steps=1)
    self._train(self._create(RepeatedFeatureTask), steps=1)

    update = -0.001 / np.sqrt(2) - 0.001 / np.sqrt(3)
    predictions = self._predict(self._create(FeatureTask))
    self.assertAllClose(predictions[1], [update] * 5, atol=1e-7)
    self.assertEqual(self._latest_step(), 2)

  def test_input_goes_on_where_it_was(self):
    self._train(self._create(RepeatedFeatureTask), steps=2)

    self._train(self._create(RepeatedFeatureTask))

    self.assertEqual(self._latest_step(), 5)

  def _latest_step(self):
    return int(tf.train.latest_checkpoint(self._model_dir()).rsplit("-", 1)[1])

  def test_feature_eviction_on_save(self):
    training = self._create(FeatureTask, feature_eviction_on_save=True, save_checkpoints_steps=1)

    self._train(training)

    self.assertNotAllEqual(self._predict(training), np.zeros([2, 5]))

  def test_export_when_saving(self):
    def configure(params):
      params.serving.export_when_saving = True

    training = self._create(FeatureTask, configure)

    self._train(training)

    base = os.path.join(self._model_dir(), "exported_models", "entry")
    versions = [name for name in os.listdir(base) if name.isdigit()]
    self.assertLen(versions, 1)
    ids = np.array([0, 1], np.int64).tobytes()
    with tf.Graph().as_default(), self.session() as sess:
      model = tf.compat.v1.saved_model.load(sess, ["serve"], os.path.join(base, versions[0]))
      signature = model.signature_def["serving_default"]
      outputs = sess.run(
        signature.outputs["output"].name, {signature.inputs["instances"].name: [ids]}
      )
    self.assertAllClose(outputs, [[-0.002 / np.sqrt(2)] * 5], atol=1e-7)

  def test_dense_only_checkpoints(self):
    def configure(params):
      params.serving.export_when_saving = True
      params.serving.export_mode = export_context.ExportMode.DISTRIBUTED

    training = self._create(FeatureTask, configure, dense_only_save_checkpoints_steps=10)

    self._train(training)

    self.assertEqual(self._latest_step(), 1)

  def test_dense_only_checkpoints_are_written_between_full_ones(self):
    training = self._create(
      RepeatedFeatureTask, dense_only_save_checkpoints_steps=2, save_checkpoints_steps=4
    )

    self._train(training)

    folder = os.path.join(self._model_dir(), "dense_only")
    dense = tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths
    full = tf.train.get_checkpoint_state(self._model_dir()).all_model_checkpoint_paths
    steps = [int(path.rsplit("-", 1)[1]) for path in dense]
    full_steps = [int(path.rsplit("-", 1)[1]) for path in full]
    self.assertTrue(steps)
    self.assertIn(5, full_steps)
    self.assertNoCommonElements(steps, full_steps)

  def test_all_switches(self):
    training = self._create(
      FeatureTask,
      embedding_prefetch_capacity=1,
      enable_embedding_postpush=True,
      enable_variable_prefetch=True,
      enable_variable_postpush=True,
    )

    self._train(training)

    update = -0.001 / np.sqrt(2)
    self.assertAllClose(self._predict(training), [[2 * update] * 5, [update] * 5], atol=1e-7)

  def test_float_feature(self):
    self._train(self._create(FloatFeatureTask))

    self.assertEqual(self._latest_step(), 1)

  def test_sequence_feature(self):
    training = self._create(SequenceFeatureTask)

    self._train(training)

    update = -0.001 / np.sqrt(2)
    predictions = self._predict(training)
    self.assertEqual(predictions.shape, (3, 2, 5))
    self.assertAllClose(predictions[:, :, 0], [[update, update], [0, 0], [update, update]])

  def test_no_embedding(self):
    training = self._create(NonFeatureTask)

    self._train(training)

    self.assertEqual(training.feature_configs[0], {})

  def test_gpu_export(self):
    training = self._create(FeatureTask)
    self._train(training)
    exporter = saved_model_exporters.DistributedExporter(
      training.create_model_fn(),
      self._model_dir(),
      os.path.join(self._model_dir(), "gpu_models"),
      with_remote_gpu=True,
      export_context_list=training._export_context_list,
    )

    exported = exporter.export_saved_model(training.create_serving_input_receiver_fn())

    self.assertIn("entry", exported)
    self.assertIn("dense_0", exported)
    self.assertFalse(device_utils.is_gpu_training())

  def test_expire_time(self):
    training = self._create(ExpireTask)

    self._train(training)

    self.assertEqual(training._slot_to_expire_time, {1: 0, 2: 1})
    self.assertAllClose(
      self._predict(training), [[0.0] * 5, [-2 * 0.001 / np.sqrt(2)] * 5], atol=1e-6
    )

  def test_occurrence_threshold(self):
    training = self._create(OccurrenceTask)

    self._train(training, steps=2)
    self.assertEqual(training._slot_to_occurrence_threshold, {2021: 3})
    self.assertAllEqual(self._predict(training), [[0.0] * 5])

    self._train(training, steps=2)
    self.assertNotAllEqual(self._predict(training), [[0.0] * 5])

  def test_hashtable_init_capacity(self):
    training = self._create(FeatureTask, hashtable_init_capacity=1000)

    self.assertEqual(training.feature_configs[0]["feature"].table_config.initial_capacity, 1000)


class RepeatedFeatureTask(FeatureTask):
  def create_input_fn(self, mode):
    return lambda: tf.data.Dataset.from_tensors(self._features()).repeat(5)


class CpuTrainingTest(CpuTrainingTestBase, tf.test.TestCase):
  use_native_multi_hash_table = True


class CpuTrainingMergedTest(CpuTrainingTestBase, tf.test.TestCase):
  use_native_multi_hash_table = False


class ConfigTest(tf.test.TestCase):
  """The constructor's decisions."""

  def _task(self, configure=None):
    params = FeatureTask.params()
    if configure:
      configure(params)
    return params.instantiate()

  def test_ps_is_rejected(self):
    config = cpu_training.CpuTrainingConfig(server_type="ps")

    with self.assertRaisesRegex(ValueError, "server_type in CpuTraining must be `worker`"):
      cpu_training.CpuTraining(config, self._task())

  def test_defaults_are_filled_in(self):
    config = cpu_training.CpuTrainingConfig()

    cpu_training.CpuTraining(config, self._task())

    self.assertEqual(config.model_name, "di_name_FeatureTask")
    self.assertIs(config.use_native_multi_hash_table, True)
    self.assertIsNone(config.partial_recovery)

  def test_realtime_defaults(self):
    config = cpu_training.CpuTrainingConfig(enable_realtime_training=True)

    cpu_training.CpuTraining(config, self._task())

    self.assertIs(config.partial_recovery, True)
    self.assertEqual(config.dense_only_save_checkpoints_secs, 1800)

  def test_deep_insight_name_is_model_name(self):
    def configure(params):
      params.metrics.deep_insight_name = "insight"

    config = cpu_training.CpuTrainingConfig()
    cpu_training.CpuTraining(config, self._task(configure))

    self.assertEqual(config.model_name, "insight")

  def test_workers_of_servers_share_a_data_set_of_the_service(self):
    platform = {
      "MLP_ROLE": "worker",
      "MLP_ROLE_INDEX": "1",
      "MLP_WORKER_NUM": "2",
      "MLP_PS_NUM": "2",
    }
    for num_ps, devices in ((2, ["/job:ps/task:0/device:CPU:0"]), (0, [])):
      config = cpu_training.CpuTrainingConfig(num_ps=num_ps, use_dataservice=True)
      training = cpu_training.CpuTraining(config, self._task())
      with mock.patch.dict(os.environ, platform), tf.Graph().as_default() as graph:
        training.create_input_fn(_TRAIN)()
        queues = [op for op in graph.get_operations() if op.type == "FIFOQueueV2"]

      self.assertEqual([op.device for op in queues], devices)

  def test_cluster_metrics_are_tagged_with_the_deep_insight_name(self):
    params = FeatureTask.params()
    params.metrics.deep_insight_name = "insight"
    config = cpu_training.DistributedCpuTrainingConfig(
      num_ps=1, model_name="model", model_dir=utils.get_test_tmp_dir(), cluster_type="tide"
    )
    discovery = service_discovery.TfConfigServiceDiscovery(
      {"cluster": {"chief": ["c:1"], "ps": ["p:1"]}, "task": {"type": "chief", "index": 0}}
    )
    tags = {}
    cli.set_sink(lambda method, name, value, tagkv: tags.update({name: tagkv}))
    self.addCleanup(cli.set_sink, None)

    cpu_training._WorkerLoop(config, discovery, params, "c:1", None)._find_cluster()

    expected = {"deep_insight_name": "insight", "cluster_type": "tide"}
    self.assertEqual(
      tags,
      {"monolith.containers.num_left_ps": expected, "monolith.containers.job_waiting": expected},
    )

  def test_dense_only_interval_of_the_task(self):
    def configure(params):
      params.train.dense_only_save_checkpoints_steps = 7

    config = cpu_training.CpuTrainingConfig(enable_realtime_training=True)
    cpu_training.CpuTraining(config, self._task(configure))

    self.assertEqual(config.dense_only_save_checkpoints_steps, 7)
    self.assertIsNone(config.dense_only_save_checkpoints_secs)

  def test_options_without_effect_are_named(self):
    with self.assertLogs("absl", "WARNING") as logs:
      cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(processes_per_gpu=2), self._task())

    self.assertIn("processes_per_gpu = 2", "".join(logs.output))

  def test_model_dump_is_refused(self):
    with self.assertRaisesRegex(ValueError, "enable_model_dump is True, but models cannot be dump"):
      cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(enable_model_dump=True), self._task())
    config = cpu_training.DistributedCpuTrainingConfig(
      server_type="ps", num_ps=1, model_dir=utils.get_test_tmp_dir(), enable_model_dump=True
    )
    with self.assertRaisesRegex(ValueError, "enable_model_dump is True, but models cannot be dump"):
      cpu_training.distributed_train(config, None, FeatureTask.params())

  def test_serving_copies(self):
    config = cpu_training.CpuTrainingConfig(
      embedding_prefetch_capacity=2,
      enable_embedding_postpush=True,
      enable_model_ckpt_info=True,
      skip_zero_embedding_when_serving=True,
    )
    training = cpu_training.CpuTraining(config, self._task())

    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      self.assertEqual(training.config.embedding_prefetch_capacity, 0)
      self.assertFalse(training.config.enable_embedding_postpush)
      self.assertFalse(training.config.enable_model_ckpt_info)
      table = training.feature_configs[0]["feature"].table_config
      self.assertEqual(table.entry_config.entry_type, table.entry_config.SERVING)
      self.assertTrue(table.skip_zero_embedding)
      self.assertTrue(table.HasField("cuckoo"))
    self.assertEqual(training.config.embedding_prefetch_capacity, 2)
    table = training.feature_configs[0]["feature"].table_config
    self.assertEqual(table.entry_config.entry_type, table.entry_config.TRAINING)

  def test_context(self):
    config = cpu_training.CpuTrainingConfig(
      server_type="ps", index=3, num_ps=4, num_workers=2, model_name="m"
    )

    ctx = cpu_training.make_native_task_context(config)

    self.assertEqual(ctx, (4, 3, 2, 0, "m", None, "ps"))

  def test_is_chief(self):
    self.assertTrue(cpu_training.is_chief(cpu_training.CpuTrainingConfig()))
    self.assertFalse(cpu_training.is_chief(cpu_training.CpuTrainingConfig(index=1)))
    self.assertFalse(cpu_training.is_chief(cpu_training.CpuTrainingConfig(server_type="ps")))

  def test_both_save_intervals(self):
    config = cpu_training.CpuTrainingConfig(save_checkpoints_secs=1, save_checkpoints_steps=1)
    training = cpu_training.CpuTraining(config, self._task())
    estimator = graph_estimator.Estimator(training.create_model_fn(), utils.get_test_tmp_dir())

    with self.assertRaisesRegex(ValueError, "Can not provide both save_checkpoints_secs"):
      estimator.train(training.create_input_fn(_TRAIN))

  def test_backward_compatible_config(self):
    folder = utils.get_test_tmp_dir()
    path = os.path.join(folder, "monolith_checkpoint")
    for table_type, want in (("CUCKOO_HASH_MAP", False), ("MULTI_CUCKOO_HASH_MAP", None)):
      self.assertIn(table_type, MonolithCheckpointState.HashTableType.keys())
      with open(path, "w") as f:
        f.write(f"builtin_hash_table_type: {table_type}")
      config = cpu_training.CpuTrainingConfig()
      cpu_training.make_config_backward_compatible(folder, config)
      self.assertEqual(config.use_native_multi_hash_table, want)

    config = cpu_training.CpuTrainingConfig(use_native_multi_hash_table=True)
    cpu_training.make_config_backward_compatible(folder, config)
    self.assertTrue(config.use_native_multi_hash_table)


class BadInputTest(tf.test.TestCase):
  """Mistakes of a task, and what it is told."""

  def _train(self, features):
    class Task(FeatureTask):
      def _features(self):
        return features()

    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), Task.params().instantiate()
    )
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    estimator = graph_estimator.Estimator(training.create_model_fn(), folder)
    estimator.train(training.create_input_fn(_TRAIN))
    return folder

  def test_missing_feature(self):
    with self.assertRaisesRegex(KeyError, "no feature 'feature'.*'other'"):
      self._train(lambda: {"other": _ragged([[1]])})

  def test_wrong_dtype(self):
    with self.assertRaisesRegex(TypeError, "feature 'feature'.*want a tf.RaggedTensor of int64"):
      self._train(lambda: {"feature": tf.ragged.constant([[1]], dtype=tf.int32)})

  def test_dense_feature(self):
    with self.assertRaisesRegex(TypeError, "feature 'feature'.*want a tf.RaggedTensor of int64"):
      self._train(lambda: {"feature": tf.constant([[1]], tf.int64)})

  def test_empty_batch(self):
    folder = self._train(
      lambda: {
        "feature": tf.RaggedTensor.from_row_splits(
          tf.constant([], tf.int64), tf.constant([0], tf.int64)
        )
      }
    )
    self.assertIsNotNone(tf.train.latest_checkpoint(folder))

  def test_batch_of_examples_without_ids(self):
    folder = self._train(
      lambda: {
        "feature": tf.RaggedTensor.from_row_splits(
          tf.constant([], tf.int64), tf.constant([0, 0, 0], tf.int64)
        )
      }
    )
    self.assertIsNotNone(tf.train.latest_checkpoint(folder))

  def test_batch_of_one(self):
    self._train(lambda: {"feature": _ragged([[-1]])})

  def test_slot_declared_twice(self):
    class Task(FeatureTask):
      def create_model_fn(self):
        def model_fn(features, mode, config):
          self._create_column()
          self._create_column()

        return model_fn

    with self.assertRaisesRegex(NameError, "Duplicate names for the table. Name: slot"):
      cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(), Task.params().instantiate())

  def test_feature_on_two_slots(self):
    class Task(FeatureTask):
      def create_model_fn(self):
        def model_fn(features, mode, config):
          for name in ("a", "b"):
            slot = self.ctx.create_feature_slot(_zero_slot(name))
            slot.add_feature_slice(1)
            feature.FeatureColumn(slot, "feature")
          return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=tf.no_op())

        return model_fn

    with self.assertRaisesRegex(AssertionError, "Feature must only belongs to one table."):
      cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(), Task.params().instantiate())

  def test_slice_order_changes_between_runs(self):
    class Task(FeatureTask):
      calls = 0

      def create_model_fn(self):
        def model_fn(features, mode, config):
          Task.calls += 1
          slot, column = self._create_column()
          dims = (2, 3) if Task.calls == 1 else (3, 2)
          parts = [column.embedding_lookup(slot.add_feature_slice(dim)) for dim in dims]
          return self._train(mode, tf.reduce_sum(tf.concat(parts, axis=1)), [column])

        return model_fn

    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), Task.params().instantiate()
    )
    estimator = graph_estimator.Estimator(training.create_model_fn(), utils.get_test_tmp_dir())
    with self.assertRaisesRegex(KeyError, r"no columns \[0, 3\).*same order"):
      estimator.train(training.create_input_fn(_TRAIN))


class NanTask(FloatFeatureTask):
  """The gradient of the second example, id 2, is not a number."""

  def _features(self):
    return {"feature": _ragged([[0, 1], [2]]), "float": tf.constant([[1.0], [float("nan")]])}

  def create_model_fn(self):
    float_model_fn = super().create_model_fn()
    model_fn = FeatureTask.create_model_fn(self)

    def choose(features, mode, config):
      if mode == _PREDICT:
        return model_fn(features=features, mode=mode, config=config)
      spec = float_model_fn(features=features, mode=mode, config=config)
      # The loss itself must not stop training.
      return spec._replace(loss=tf.constant(0.0))

    return choose


class BadGradientTest(tf.test.TestCase):
  def _train(self, policy):
    os.environ["MONOLITH_BAD_GRADIENTS"] = policy
    self.addCleanup(os.environ.pop, "MONOLITH_BAD_GRADIENTS", None)
    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), NanTask.params().instantiate()
    )
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    estimator = graph_estimator.Estimator(training.create_model_fn(), folder)
    estimator.train(training.create_input_fn(_TRAIN), steps=1)
    return np.array(list(estimator.predict(training.create_input_fn(_PREDICT))))

  def test_stop_names_the_feature(self):
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "The gradient of feature feature is not finite"
    ):
      self._train("stop")

  def test_stop_on_servers_with_push(self):
    params = NanTask.params()
    conf = cpu_training.CpuTrainingConfig(num_ps=2, enable_embedding_postpush=True)
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "The gradient of feature feature is not finite"
    ):
      cpu_training.local_train_internal(params, conf, folder, steps=1)
    self.assertIsNone(tf.train.latest_checkpoint(folder))

  def test_skip_updates_the_others(self):
    predictions = self._train("skip")

    self.assertAllClose(predictions[0], [-0.002 / np.sqrt(2)] * 5, atol=1e-7)
    self.assertAllEqual(predictions[1], [0.0] * 5)

  def test_unknown_policy(self):
    with self.assertRaisesRegex(ValueError, "MONOLITH_BAD_GRADIENTS is 'what'"):
      self._train("what")


class LocalTrainTest(tf.test.TestCase):
  def test_eager_mode_is_an_error(self):
    params = FeatureTask.params()
    with tf.compat.v1.Graph().as_default():
      self.assertFalse(tf.executing_eagerly())
    with tf.__internal__.eager_context.eager_mode():
      with self.assertRaisesRegex(EnvironmentError, "disable_eager_execution"):
        cpu_training.local_train_internal(
          params, cpu_training.CpuTrainingConfig(), utils.get_test_tmp_dir()
        )

  def test_one_and_two_servers_learn_the_same(self):
    results = []
    for num_ps in (0, 1, 3):
      params = RepeatedFeatureTask.params()
      params.name = "local"
      folder = os.path.join(utils.get_test_tmp_dir(), str(num_ps))
      estimator = cpu_training.local_train(
        params,
        num_ps=num_ps,
        model_dir=folder,
        steps=5,
        enable_embedding_prefetch=False,
        enable_embedding_postpush=False,
      )
      self.assertEqual(estimator.model_dir, folder)
      self.assertNotIn("TF_CONFIG", os.environ)
      results.append(self._read(params, num_ps, folder))

    update = -0.001 * sum(1 / np.sqrt(1 + k) for k in range(1, 6))
    self.assertAllClose(results[0], [[2 * update] * 5, [update] * 5], atol=1e-7)
    self.assertAllEqual(results[0], results[1])
    self.assertAllEqual(results[0], results[2])

  def _read(self, params, num_ps, folder):
    """Predicts on fresh servers, so that everything comes from the checkpoint."""
    conf = cpu_training.CpuTrainingConfig(num_ps=num_ps)
    with cpu_training._local_cluster(num_ps) as (session_config, _):
      training = cpu_training.CpuTraining(conf, params.instantiate())
      estimator = graph_estimator.Estimator(
        training.create_model_fn(),
        config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
      )
      predictions = estimator.predict(training.create_input_fn(_PREDICT))
      return np.array([next(predictions), next(predictions)])

  def test_model_dir_is_removed(self):
    params = FeatureTask.params()
    folder = os.path.join(utils.get_test_tmp_dir(), "old")
    os.makedirs(folder)
    open(os.path.join(folder, "leftover"), "w").close()

    cpu_training.local_train(params, model_dir=folder, steps=1, remove_model_dir_if_exists=True)

    self.assertFalse(os.path.exists(os.path.join(folder, "leftover")))

  def test_profiling(self):
    params = FeatureTask.params()
    for features in (False, True):
      folder = os.path.join(utils.get_test_tmp_dir(), str(features))

      cpu_training.local_train(
        params, model_dir=folder, steps=1, profiling=True, only_feature_engineering=features
      )

      self.assertLen(os.listdir(os.path.join(folder, "plugins", "profile")), 1)

  def test_feature_engineering(self):
    params = FloatFeatureTask.params()

    cpu_training.local_train(
      params, model_dir=utils.get_test_tmp_dir(), only_feature_engineering=True
    )

    files = os.listdir(os.path.join(utils.get_test_tmp_dir(), "features"))
    self.assertLen(files, 1)
    self.assertStartsWith(files[0], "chief_")


if __name__ == "__main__":
  tf.test.main()
