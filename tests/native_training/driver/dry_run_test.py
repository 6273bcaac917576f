"""Tests what a dry run finds out about a task."""

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import (
  embedding_combiners,
  entry,
  feature,
  graph_estimator,
  native_task,
)
from monolith.native_training.driver import dry_run

tf.compat.v1.disable_eager_execution()


class _Task(native_task.NativeTask):
  """`user` has a bias and two slices; `liked` and `seen` share the slot `item`."""

  def create_input_fn(self, mode):
    def input_fn():
      self.is_dry_run = tf.compat.v1.get_default_graph().dry_run
      ragged = tf.ragged.constant([[1]], dtype=tf.int64, row_splits_dtype=tf.int64)
      return tf.data.Dataset.from_tensors({"user": ragged, "liked": ragged, "seen": ragged})

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      user = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(name="user", slot_id=1, occurrence_threshold=3, has_bias=True)
      )
      column = feature.FeatureColumn(user, "user")
      column.embedding_lookup(user.add_feature_slice(4, entry.ZerosInitializer()))
      column.embedding_lookup(user.add_feature_slice(2, optimizer=entry.SgdOptimizer(0.5)))
      item = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(name="item", slot_id=2, expire_time=5)
      )
      item_slice = item.add_feature_slice(8)
      feature.FeatureColumn(item, "liked").embedding_lookup(item_slice)
      combiner = feature.FeatureColumn.first_n(3)
      feature.FeatureColumn(item, "seen", combiner).embedding_lookup(item_slice)
      return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=tf.no_op())

    return model_fn


class CollectTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._task = _Task.params().instantiate()
    cls._outer = tf.Graph()
    with cls._outer.as_default():
      cls._collected = dry_run.collect(cls._task)

  def test_graph_of_the_caller_stays_as_it_was(self):
    self.assertTrue(self._task.is_dry_run)
    self.assertEmpty(self._outer.get_operations())

  def test_slots(self):
    self.assertEqual(self._collected.slot_to_occurrence_threshold, {1: 3, 2: 0})
    self.assertEqual(self._collected.slot_to_expire_time[2], 5)

  def test_one_segment_per_declared_kind_of_slice(self):
    configs = self._collected.feature_configs
    segments = configs.configs["user"].table_config.entry_config.segments
    self.assertEqual([segment.dim_size for segment in segments], [1, 4, 2])
    self.assertEqual(configs.unmerged_slice_dims["user"], [1, 4, 2])
    self.assertTrue(segments[2].opt_config.HasField("sgd"))

  def test_features_of_one_slot_share_its_table(self):
    configs = self._collected.feature_configs
    self.assertEqual(self._collected.shared_tables, {"liked": "item", "seen": "item"})
    self.assertIsInstance(configs.combiners["seen"], embedding_combiners.FirstN)
    self.assertIsInstance(configs.combiners["liked"], embedding_combiners.ReduceSum)

  def test_slices_are_told_apart_by_all_but_their_size(self):
    slices = self._collected.slices
    self.assertCountEqual(slices, ["user", "item"])
    self.assertEqual([s.dim for s in slices["user"]], [1, 4, 2])
    self.assertEqual(slices["user"][2].optimizer, "sgd")
    self.assertNotIn("dim_size", slices["user"][1].config)


if __name__ == "__main__":
  absltest.main()
