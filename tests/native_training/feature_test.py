"""Slots, slices, columns, and the factories behind them.

Covers `tables/pooling.py`.
"""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import tensorflow as tf

from monolith.native_training import (
  embedding_combiners,
  entry,
  feature,
  learning_rate_functions,
  native_task,
)
from monolith.native_training.graph import export_context
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.tables import pooling
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_Segment = embedding_hash_table_pb2.EntryConfig.Segment


def _sgd_segment(dim):
  return entry.CombineAsSegment(
    dim, entry.ZerosInitializer(), entry.SgdOptimizer(), entry.Fp32Compressor()
  )


def _ragged(splits, values=None):
  count = splits[-1]
  values = list(range(count)) if values is None else values
  return tf.RaggedTensor.from_row_splits(
    tf.constant(values, tf.int64), tf.constant(splits, tf.int64)
  )


class DummyFeatureEmbTableTest(tf.test.TestCase):
  def test_lookup_shape(self):
    table = feature.DummyFeatureEmbTable(4, entry.CuckooHashTableConfig())
    table.add_feature_slice(_sgd_segment(5))
    table.set_feature_metadata("f", feature.FeatureColumn.reduce_sum())

    self.assertEqual(table.embedding_lookup("f", 0, 5).shape, [4, 5])
    self.assertEqual(table.embedding_lookup("f", None, None).shape, [4, 5])

  def test_sequence_lookup_shape(self):
    table = feature.DummyFeatureEmbTable(4, entry.CuckooHashTableConfig())
    table.add_feature_slice(_sgd_segment(5))
    table.set_feature_metadata("f", feature.FeatureColumn.first_n(10))

    self.assertEqual(table.embedding_lookup("f", 0, 5).shape, [4, 10, 5])

  def test_unknown_batch_size(self):
    table = feature.DummyFeatureEmbTable(None, entry.CuckooHashTableConfig())
    table.add_feature_slice(_sgd_segment(5))
    table.set_feature_metadata("f", feature.FeatureColumn.reduce_sum())

    self.assertEqual(table.embedding_lookup("f", 0, 5).shape.as_list(), [None, 5])

  def test_table_config(self):
    table = feature.DummyFeatureEmbTable(4, entry.CuckooHashTableConfig())
    adagrad = entry.CombineAsSegment(
      5, entry.ZerosInitializer(), entry.AdagradOptimizer(warmup_steps=10), entry.Fp32Compressor()
    )
    table.add_feature_slice(adagrad)
    for _ in range(2):
      table.add_feature_slice(
        _sgd_segment(2), learning_rate_functions.PolynomialDecay(0.01, 20, 0.05)
      )
    table.add_feature_slice(_sgd_segment(2))
    table.set_feature_metadata("b", feature.FeatureColumn.reduce_sum())
    table.set_feature_metadata("a", feature.FeatureColumn.reduce_sum())

    config = table.get_table_config()

    self.assertLen(config.slice_configs, 3)
    self.assertEqual(
      config.slice_configs[0].segment.SerializeToString(), adagrad.SerializeToString()
    )
    self.assertIsInstance(
      config.slice_configs[0].learning_rate_fn, learning_rate_functions.LearningRateFunction
    )
    merged = config.slice_configs[1].segment
    self.assertEqual(merged.dim_size, 4)
    self.assertTrue(merged.opt_config.HasField("sgd"))
    self.assertEqual(config.unmerged_slice_dims, [5, 2, 2, 2])
    self.assertEqual(config.feature_names, ["b", "a"])
    self.assertEqual(table.get_table_config().slice_configs[1].segment.dim_size, 4)

  def test_frozen_slice_keeps_its_learning_rate(self):
    table = feature.DummyFeatureEmbTable(4, entry.CuckooHashTableConfig())
    table.add_feature_slice(_sgd_segment(2), 0.0)

    self.assertEqual(table.get_table_config().slice_configs[0].learning_rate_fn, 0.0)

  def test_combiners_differ(self):
    table = feature.DummyFeatureEmbTable(4, entry.CuckooHashTableConfig())
    table.set_feature_metadata("f", feature.FeatureColumn.first_n(2))
    table.set_feature_metadata("f", feature.FeatureColumn.first_n(2))

    with self.assertRaisesRegex(ValueError, "f is bound twice"):
      table.set_feature_metadata("f", feature.FeatureColumn.first_n(3))


class DummyFeatureFactoryTest(tf.test.TestCase):
  def test_duplicate_slot(self):
    factory = feature.DummyFeatureFactory(4)
    factory.create_feature_slot(feature.FeatureSlotConfig(name="a"))

    with self.assertRaisesRegex(NameError, "Duplicate names for the table. Name: a"):
      factory.create_feature_slot(feature.FeatureSlotConfig(name="a"))

  def test_slot_without_slice(self):
    factory = feature.DummyFeatureFactory(4)
    factory.create_feature_slot(feature.FeatureSlotConfig(name="a"))

    with self.assertRaisesRegex(RuntimeError, "a has no slice, pls. check!"):
      factory.get_table_name_to_table_config()

  def test_thresholds_and_expire_times(self):
    factory = feature.DummyFeatureFactory(4)
    for slot_id, threshold in ((1, 3), (2, 7)):
      factory.create_feature_slot(
        feature.FeatureSlotConfig(
          slot_id=slot_id, occurrence_threshold=threshold, expire_time=slot_id * 10
        )
      )
    factory.create_feature_slot(feature.FeatureSlotConfig(name="no id", occurrence_threshold=5))

    self.assertEqual(factory.slot_to_occurrence_threshold, {1: 3, 2: 7})
    self.assertEqual(factory.slot_to_expire_time, {1: 10, 2: 20})

  def test_no_threshold_is_zero(self):
    factory = feature.DummyFeatureFactory(4)
    factory.create_feature_slot(feature.FeatureSlotConfig(slot_id=1, occurrence_threshold=None))

    self.assertEqual(factory.slot_to_occurrence_threshold, {1: 0})

  def test_apply_gradients_ignores_arguments(self):
    op = feature.DummyFeatureFactory(4).apply_gradients([(None, None)], "anything")

    self.assertEqual(op.type, "NoOp")


class FeatureSlotTest(tf.test.TestCase):
  def _create_slot(self, **kwargs):
    return feature.DummyFeatureFactory(4).create_feature_slot(feature.FeatureSlotConfig(**kwargs))

  def test_bias_comes_first(self):
    slot = self._create_slot(name="1", has_bias=True)
    first, second = slot.add_feature_slice(16), slot.add_feature_slice(8)

    ranges = [(s.start, s.end) for s in (slot.get_bias_slice(), first, second)]
    self.assertEqual(ranges, [(0, 1), (1, 17), (17, 25)])

  def test_no_bias(self):
    with self.assertRaises(AssertionError):
      self._create_slot(name="1").get_bias_slice()

  def test_slot_number(self):
    self.assertEqual(self._create_slot(name="12").slot, 12)
    self.assertEqual(self._create_slot(name="x", slot_id=7).slot, 7)
    self.assertEqual(self._create_slot(slot_id=7).name, "7")
    with self.assertRaises(ValueError):
      _ = self._create_slot(name="x").slot

  def test_columns(self):
    slot = self._create_slot(name="1")
    columns = {feature.FeatureColumn(slot, name) for name in ("a", "b")}

    self.assertEqual(slot.get_feature_columns(), columns)

  def test_slice_of_another_slot(self):
    factory = feature.DummyFeatureFactory(4)
    slots = [factory.create_feature_slot(feature.FeatureSlotConfig(name=n)) for n in "ab"]
    column = feature.FeatureColumn(slots[0], "f")

    with self.assertRaisesRegex(AssertionError, "Slice must come from the dedicated feature slot."):
      column.embedding_lookup(slots[1].add_feature_slice(1))

  def test_size_tensor(self):
    slot = self._create_slot(name="1")
    column = feature.FeatureColumn(slot, "f", feature.FeatureColumn.first_n(2))
    self.assertIsNone(column.get_size_tensor())

    column.set_size_tensor(_ragged([0, 1, 1, 4]).row_lengths())

    self.assertEqual(column.get_size_tensor().dtype, tf.int32)
    self.assertEqual(column.get_size_tensor().op.name, "size_tensor")
    with self.session() as sess:
      self.assertAllEqual(sess.run(column.get_size_tensor()), [[1, 0], [0, 0], [1, 1]])
    with self.assertRaisesRegex(AssertionError, "only supported in a sequence feature"):
      feature.FeatureColumn(slot, "g").set_size_tensor(tf.constant([1]))


class EmbeddingSlicesTest(tf.test.TestCase):
  def _slices(self, embeddings, ids, combiner, dims=(1, 1)):
    return feature.create_embedding_slices(
      {"f": embeddings}, {"f": ids}, {"f": combiner}, {"f": list(dims)}
    )

  def test_reduce_sum(self):
    embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5]])
    slices = self._slices(embeddings, _ragged([0, 1, 1, 3]), embedding_combiners.ReduceSum())

    self.assertEqual(sorted(slices), ["f:0_1", "f:1_2"])
    self.assertEqual([(s.feature, s.start, s.end) for s in slices], [("f", 0, 1), ("f", 1, 2)])
    with self.session() as sess:
      values = sess.run(slices)
    self.assertAllEqual(values["f:0_1"], [[1], [0], [5]])
    self.assertAllEqual(values["f:1_2"], [[2], [0], [8]])

  def test_exported_reduce_sum_is_plain_tensorflow(self):
    with tf.Graph().as_default() as graph:
      embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5]])
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
        slices = self._slices(embeddings, _ragged([0, 1, 1, 3]), embedding_combiners.ReduceSum())
      with self.session(graph=graph) as sess:
        self.assertAllEqual(sess.run(slices["f:1_2"]), [[2], [0], [8]])
      self.assertEmpty([op.type for op in graph.get_operations() if "Monolith" in op.type])
      self.assertLen(tf.compat.v1.get_collection("monolith_reduced_embs"), 1)
      # By this the model server in C++ knows what to join.
      self.assertTrue(graph.get_operation_by_name("f").get_attr("_monolith_pools"))

  def test_exported_feature_of_one_id_is_not_pooled(self):
    with tf.Graph().as_default() as graph:
      ids = tf.RaggedTensor.from_tensor(tf.compat.v1.placeholder(tf.int64, [None])[:, None])
      embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5]])
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
        slices = self._slices(embeddings, ids, embedding_combiners.ReduceSum())
      with self.session(graph=graph) as sess:
        # Without the ids: nothing of them is needed.
        self.assertAllEqual(sess.run(slices["f:1_2"]), [[2], [3], [5]])
        self.assertAllEqual(sess.run("f:0"), [[1, 2], [2, 3], [3, 5]])
      self.assertLen(tf.compat.v1.get_collection("monolith_reduced_embs"), 1)

  def test_first_n(self):
    embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5], [10, 11]])
    slices = self._slices(embeddings, _ragged([0, 1, 1, 4]), embedding_combiners.FirstN(2))

    with self.session() as sess:
      values = sess.run(slices)
    self.assertAllEqual(values["f:0_1"], [[[1], [0]], [[0], [0]], [[2], [3]]])
    self.assertAllEqual(values["f:1_2"], [[[2], [0]], [[0], [0]], [[3], [5]]])

  def test_reduce_sum_on_the_gpu(self):
    gpu_placement.allow(self)
    splits = tf.compat.v1.placeholder_with_default(tf.constant([0, 1, 1, 3], tf.int64), [None])
    dynamic = tf.RaggedTensor.from_row_splits(tf.range(3, dtype=tf.int64), splits, validate=False)
    # The fused op needs a static batch size; TensorFlow's own ops do not.
    for ids, kind in (
      (_ragged([0, 1, 1, 3]), "MonolithFusedReduceAndSplitGPU"),
      (dynamic, "ScatterNd"),
    ):
      with self.subTest(kind):
        embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5]])
        slices = self._slices(embeddings, ids, embedding_combiners.ReduceSum())
        (gradient,) = tf.gradients(tf.reduce_sum(slices["f:1_2"]), embeddings)
        self.assertEqual(gpu_placement.devices_of(kind), {"GPU"})
        self.assertEmpty(gpu_placement.devices_of("MonolithFusedReduceSumAndSplit"))
        with self.session(config=gpu_placement.SOFT_PLACEMENT) as sess:
          self.assertAllEqual(sess.run(slices["f:1_2"]), [[2], [0], [8]])
          self.assertAllEqual(sess.run(gradient), [[0, 1], [0, 1], [0, 1]])

  def test_gradients(self):
    embeddings = tf.constant([[1.0, 2], [2, 3], [3, 5]])
    for combiner in (embedding_combiners.ReduceSum(), embedding_combiners.ReduceMean()):
      slices = self._slices(embeddings, _ragged([0, 1, 1, 3]), combiner)
      (gradient,) = tf.gradients(tf.reduce_sum(slices["f:1_2"]), embeddings)
      share = 0.5 if isinstance(combiner, embedding_combiners.ReduceMean) else 1.0
      with self.session() as sess:
        self.assertAllEqual(sess.run(gradient), [[0, 1], [0, share], [0, share]])

  def test_copies_of_keys_are_keys(self):
    key = pooling.SliceKey("f:0_1", 2, 6)

    for copied in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
      self.assertEqual(copied, "f:0_1:2_6")
      self.assertEqual((copied.feature, copied.start, copied.end), ("f:0_1", 2, 6))


class FeatureFactoryFromEmbeddingsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.embeddings = {"f": tf.constant([[1.0, 2, 3], [4, 5, 6]])}
    slices = feature.create_embedding_slices(
      self.embeddings,
      {"f": _ragged([0, 2])},
      {"f": feature.FeatureColumn.reduce_sum()},
      {"f": [1, 2]},
    )
    self.factory = feature.FeatureFactoryFromEmbeddings(self.embeddings, slices)
    self.slot = self.factory.create_feature_slot(feature.FeatureSlotConfig(name="s", has_bias=True))
    self.column = feature.FeatureColumn(self.slot, "f")

  def test_lookup(self):
    vector = self.column.embedding_lookup(self.slot.add_feature_slice(2))

    with self.session() as sess:
      self.assertAllEqual(sess.run(self.column.get_bias()), [[5]])
      self.assertAllEqual(sess.run(vector), [[7, 9]])
      self.assertAllEqual(sess.run(self.column.get_all_embedding_slices()[1]), [[7, 9]])

  def test_concat_is_the_very_tensor(self):
    self.assertIs(self.column.get_all_embeddings_concat(), self.embeddings["f"])

  def test_slices_come_by_their_first_column(self):
    ids = _ragged([0, 1])
    widths = [1] * 11
    slices = feature.create_embedding_slices(
      {name: tf.constant([[float(i) for i in range(11)]]) for name in ("f", "ff")},
      {"f": ids, "ff": ids},
      dict.fromkeys(("f", "ff"), embedding_combiners.ReduceSum()),
      {"f": widths, "ff": widths},
    )
    table = feature.EmbeddingFeatureEmbTable({}, dict(reversed(slices.items())))

    with self.session() as sess:
      values = sess.run(table.get_slices("f"))

    self.assertAllEqual([value[0, 0] for value in values], range(11))

  def test_unknown_slice(self):
    with self.assertRaisesRegex(KeyError, r"f has no columns \[1, 4\).*\[1, 3\)"):
      self.column.embedding_lookup(self.slot.add_feature_slice(3))

  def test_no_gradients_here(self):
    with self.assertRaisesRegex(NotImplementedError, "apply_gradients is not supported"):
      self.factory.apply_gradients([])


class EmbeddingLayoutFactoryTest(tf.test.TestCase):
  def test_basic(self):
    table = mock.Mock()
    layout = tf.constant([1.0])
    bundle = {"req_time": tf.constant(5, tf.int64)}
    factory = feature.EmbeddingLayoutFactory(table, {"bias": layout}, bundle, async_push=True)

    slot = factory.create_feature_slot(feature.FeatureSlotConfig(name="s"))
    self.assertIsNone(feature.FeatureColumn(slot, "f").get_all_embeddings_concat())
    self.assertIs(factory.get_layout("bias"), layout)
    with self.assertRaisesRegex(AssertionError, "no layout vec"):
      factory.get_layout("vec")
    factory.flattened_layout()
    table.flatten_layout.assert_called_with({"bias": layout})

    pairs = [(tf.constant([2.0]), layout)]
    native_task.NativeContext(layout_factory=factory).apply_embedding_gradients(pairs)
    _, kwargs = table.apply_gradients.call_args
    self.assertIs(kwargs["layout_grads_and_vars"], pairs)
    self.assertIs(kwargs["req_time"], bundle["req_time"])
    self.assertIs(kwargs["auxiliary_bundle"], bundle)
    self.assertTrue(kwargs["async_push"])

  def test_without_tables_nothing_can_be_updated(self):
    layout = tf.constant([1.0])
    factory = feature.EmbeddingLayoutFactory(None, {"bias": layout})

    with self.assertRaisesRegex(ValueError, "hash_table is None"):
      factory.apply_gradients([(tf.constant([2.0]), layout)])


if __name__ == "__main__":
  tf.test.main()
