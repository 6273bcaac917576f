"""Tests tables on a GPU as far as a machine without one can: configuration, placement, messages.

Of `hash_table_ops`, `multi_hash_table_ops`, `entry` and `driver.tables`.
"""

import tensorflow as tf

from monolith.native_training import (
  device_utils,
  distributed_serving_ops,
  entry,
  hash_filter_ops,
  hash_table_ops,
  multi_hash_table_ops,
)
from monolith.native_training.driver import tables as driver_tables
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.settings.training_config import CpuTrainingConfig
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_SENTENCE = "no CUDA device .*; use CuckooHashTableConfig"


def _config(kind: entry.HashTableConfig) -> entry.HashTableConfigInstance:
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.entry_config.segments.append(
    entry.CombineAsSegment(
      2, entry.ZerosInitializer(), entry.SgdOptimizer(), entry.Fp32Compressor()
    )
  )
  kind.mutate_table(config)
  return entry.HashTableConfigInstance(config, [1.0])


def _gpu_config() -> entry.HashTableConfigInstance:
  return _config(entry.GpucucoHashTableConfig())


class ConfigTest(tf.test.TestCase):
  def test_survives_serialization_under_its_field_number(self):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    entry.GpucucoHashTableConfig(initial_capacity=1000, feature_evict_every_n_hours=3).mutate_table(
      config
    )

    parsed = embedding_hash_table_pb2.EmbeddingHashTableConfig.FromString(
      config.SerializeToString()
    )

    self.assertEqual(parsed.WhichOneof("type"), "gpucuco")
    self.assertEqual(parsed.DESCRIPTOR.fields_by_name["gpucuco"].number, 9)
    self.assertEqual(parsed.initial_capacity, 1000)
    self.assertTrue(parsed.enable_feature_eviction)
    self.assertEqual(parsed.feature_evict_every_n_hours, 3)

  def test_one_type_replaces_the_other(self):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    for kind, name in (
      (entry.GpucucoHashTableConfig(), "gpucuco"),
      (entry.CuckooHashTableConfig(), "cuckoo"),
    ):
      kind.mutate_table(config)
      self.assertEqual(config.WhichOneof("type"), name)

  def test_defaults_are_those_of_the_table_in_main_memory(self):
    gpu, cpu = entry.GpucucoHashTableConfig(), entry.CuckooHashTableConfig()

    self.assertEqual(gpu.initial_capacity, cpu.initial_capacity)
    self.assertEqual(gpu.feature_evict_every_n_hours, cpu.feature_evict_every_n_hours)


class PlacementTest(tf.test.TestCase):
  def test_a_single_table_and_all_it_needs_go_by_its_type(self):
    with tf.Graph().as_default(), tf.device("/job:worker/task:1"):
      client = distributed_serving_ops.parameter_sync_client_from_config()
      table = hash_table_ops.hash_table_from_config(
        _gpu_config(), name_suffix="gpu", sync_client=client
      )
      host = hash_table_ops.hash_table_from_config(
        _config(entry.CuckooHashTableConfig()), name_suffix="cpu", sync_client=client
      )

    self.assertEqual(table.table.device, "/job:worker/task:1/device:GPU:0")
    inputs = table.table.op.inputs
    self.assertEqual([tensor.op.type for tensor in inputs],
                     ["MonolithDummyHashFilter", "MonolithDummySyncClient"])  # fmt: skip
    self.assertEqual({tensor.device for tensor in inputs}, {table.table.device})
    self.assertEqual(host.table.device, "/job:worker/task:1/device:CPU:0")
    self.assertIs(host.table.op.inputs[1], client)

  def test_ops_are_where_the_table_is_whatever_the_scopes_say(self):
    with tf.Graph().as_default(), tf.device("/device:CPU:0"):
      table = hash_table_ops.hash_table_from_config(_gpu_config(), name_suffix="gpu")
      ids, values = tf.constant([1], tf.int64), tf.constant([[1.0, 2.0]])
      results = [
        table.lookup(ids),
        table.assign(ids, values).table,
        table.assign_add(ids, values).table,
        table.apply_gradients(ids, values, global_step=tf.constant(0, tf.int64)).table,
        table.size(),
        table.stats(),
        table.lookup_entry(ids),
        table.save("folder/base").table,
        table.restore("folder/base").table,
        *hash_table_ops.fused_lookup([table], ids, [1], 1),
        *table.save_as_tensor(0, 1, 10, 0),
      ]
      saved = table.save("folder/base").table.op

    self.assertEqual({tensor.device for tensor in results}, {"/device:GPU:0"})
    # There are no strings on GPUs.
    self.assertEqual(saved.inputs[1].device, "/device:CPU:0")

  def test_a_group_goes_by_the_type_of_its_tables(self):
    configs = {"a": _gpu_config(), "b": _gpu_config()}
    with tf.Graph().as_default():
      group = multi_hash_table_ops.MultiHashTable.from_configs(configs)
      devices = [tensor.device for tensor in (group.handle, *group.initializer.inputs)]
      updated = group.apply_gradients(
        {"a": ([1], [[1.0, 2.0]])}, global_step=tf.constant(0, tf.int64)
      )

    self.assertEqual(devices, ["/device:GPU:0", "/device:CPU:0", "/device:GPU:0", "/device:GPU:0"])
    self.assertEqual(updated.handle.device, "/device:GPU:0")

  def test_a_group_is_in_one_place(self):
    configs = {"a": _gpu_config(), "b": _config(entry.CuckooHashTableConfig())}
    with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, "'a' is for .*GPU:0"):
      multi_hash_table_ops.MultiHashTable.from_configs(configs)

  def test_serving_tables_are_in_main_memory(self):
    with (
      tf.Graph().as_default(),
      export_context.enter_export_mode(export_context.ExportMode.STANDALONE),
    ):
      table = hash_table_ops.hash_table_from_config(_gpu_config(), name_suffix="gpu")
      cached = multi_hash_table_ops.convert_to_cached_config({"a": _gpu_config()})

    config = embedding_hash_table_pb2.EmbeddingHashTableConfig.FromString(
      table.table.op.get_attr("config")
    )
    self.assertEqual(config.WhichOneof("type"), "cuckoo")
    self.assertEqual(config.entry_config.entry_type, embedding_hash_table_pb2.EntryConfig.SERVING)
    self.assertEqual(table.table.device, "/device:CPU:0")
    group = embedding_hash_table_pb2.MultiEmbeddingHashTableConfig.FromString(cached.mconfig)
    self.assertEqual(group.configs[0].WhichOneof("type"), "cuckoo")

  def test_a_test_table_on_a_gpu_begins_with_ones(self):
    with tf.Graph().as_default():
      table = hash_table_ops.test_hash_table(3, use_gpu=True)

    config = embedding_hash_table_pb2.EmbeddingHashTableConfig.FromString(
      table.table.op.get_attr("config")
    )
    self.assertEqual(config.WhichOneof("type"), "gpucuco")
    self.assertEqual(config.entry_config.segments[0].init_config.constants.constant, 1.0)
    self.assertEqual(table.table.op.inputs[0].op.type, "MonolithDummyHashFilter")

  def test_filters_are_saved_where_they_are(self):
    with tf.Graph().as_default():
      with tf.device("/device:GPU:0"):
        handle = hash_filter_ops.create_hash_filter(100, 7)
      with tf.device("/device:CPU:0"):
        saved = hash_filter_ops.save_hash_filter(handle, "folder/base", True)
        restored = hash_filter_ops.restore_hash_filter(handle, "folder/base", True)

    self.assertEqual({saved.device, restored.device}, {"/device:GPU:0"})


class WithoutGpuTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    if tf.config.list_physical_devices("GPU"):
      self.skipTest("there is a GPU")

  def test_a_table_says_what_is_missing(self):
    with tf.Graph().as_default(), self.session(config=gpu_placement.SOFT_PLACEMENT):
      table = hash_table_ops.test_hash_table(2, use_gpu=True)
      with self.assertRaisesRegex(tf.errors.FailedPreconditionError, _SENTENCE):
        table.lookup([1]).eval()

  def test_so_does_a_group(self):
    with tf.Graph().as_default(), self.session(config=gpu_placement.SOFT_PLACEMENT) as session:
      group = multi_hash_table_ops.MultiHashTable.from_configs({"a": _gpu_config()})
      with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "table a: " + _SENTENCE):
        session.run(group.initializer)

  def test_so_does_training(self):
    with (
      tf.Graph().as_default(),
      self.assertRaisesRegex(tf.errors.FailedPreconditionError, _SENTENCE),
    ):
      self._create(CpuTrainingConfig())

  def test_training_says_what_does_not_go_together(self):
    gpu_placement.allow(self)
    for config in (CpuTrainingConfig(num_ps=2), CpuTrainingConfig(enable_realtime_training=True)):
      with (
        self.subTest(config),
        tf.Graph().as_default(),
        self.assertRaisesRegex(ValueError, "use_gpu_emb_table"),
      ):
        self._create(config)

  def _create(self, config):
    driver_tables.create(config, True, {"a": _config(entry.CuckooHashTableConfig())}, {}, {})


class DriverTest(tf.test.TestCase):
  def test_makes_all_tables_and_the_filter_those_of_a_gpu(self):
    gpu_placement.allow(self)
    config = CpuTrainingConfig(use_native_multi_hash_table=True)
    feature_configs = {"a": _config(entry.CuckooHashTableConfig())}
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    with (
      tf.Graph().as_default(),
      tf.compat.v1.test.mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
    ):
      tables = driver_tables.create(config, True, feature_configs, {1: 3}, {})

    self.assertEqual(feature_configs["a"].table_config.WhichOneof("type"), "gpucuco")
    self.assertEqual(tables.hash_table.handle.device, "/device:GPU:0")
    self.assertEqual({handle.device for handle in tables.hash_filters}, {"/device:GPU:0"})
    self.assertTrue(device_utils.is_gpu_training())


if __name__ == "__main__":
  tf.test.main()
