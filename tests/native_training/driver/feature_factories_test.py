"""Gradients reach the tables, each with what belongs to it."""

from __future__ import annotations

from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import prefetch_queue, utils
from monolith.native_training.driver import feature_factories

tf.compat.v1.disable_eager_execution()


class _Tables:
  """Remembers what it is told to apply."""

  def get_id_split(self, slot_to_id):
    return {"names": sorted(slot_to_id)}

  def set_id_split(self, slot_to_id, id_split):
    self.id_split = id_split

  def apply_gradients(self, *args, **kwargs):
    self.args, self.kwargs = args, kwargs
    return self

  def as_op(self):
    return tf.no_op(name="applied")


class FeatureFactoriesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    context = tf.Graph().as_default()
    context.__enter__()
    self.addCleanup(context.__exit__, None, None, None)
    self._tables = _Tables()
    self._embeddings = {name: tf.ones([2, 3], name=name) for name in ("a", "b")}
    self._req_time = tf.constant(100)

  def _cpu_factory(self):
    ids = {
      name: tf.RaggedTensor.from_row_lengths(tf.constant([4, 5], tf.int64), [2])
      for name in self._embeddings
    }
    return feature_factories._CpuFeatureFactory(
      self._tables,
      ids,
      self._embeddings,
      {},
      self._req_time,
      prefetch_queue.AsyncFunctionMgr(is_async=False),
    )

  def _fused_factory(self, use_native_multi_hash_table=True):
    return feature_factories._FusedCpuFeatureFactory(
      self._tables,
      self._embeddings,
      {},
      self._req_time,
      {"left": "by the lookup"},
      use_native_multi_hash_table,
    )

  def test_features_without_gradient_are_left_out(self):
    # A gradient of what was computed from an embedding is taken back to it.
    doubled = 2 * self._embeddings["b"]

    op = self._cpu_factory().apply_gradients([(None, self._embeddings["a"]), (doubled, doubled)])

    pushed, _ = self._tables.args
    self.assertCountEqual(pushed, ["b"])
    self.assertEqual(self._tables.id_split, {"names": ["b"]})
    ids, gradient = pushed["b"]
    with self.session() as session:
      session.run(op)
      self.assertAllEqual(session.run(ids), [4, 5])
      self.assertAllEqual(session.run(gradient), 4 * tf.ones([2, 3]).eval())

  def test_gradients_of_what_was_looked_up_need_no_second_pass(self):
    pairs = [(tf.ones([2, 3]), row) for row in self._embeddings.values()]
    with mock.patch.object(tf, "gradients", side_effect=AssertionError("a second pass")):
      for factory in (self._cpu_factory(), self._fused_factory()):
        factory.apply_gradients(pairs)

    # Several gradients of one embedding are added up.
    row = self._embeddings["a"]
    self._cpu_factory().apply_gradients([(row, row), (2 * row, row)])
    (_, gradient) = self._tables.args[0]["a"]
    with self.session() as session:
      self.assertAllEqual(session.run(gradient), [[3.0] * 3] * 2)

  def test_nothing_to_apply(self):
    for factory in (self._cpu_factory(), self._fused_factory()):
      op = factory.apply_gradients([(None, self._embeddings["a"])])

      self.assertEqual(op.type, "NoOp")
      self.assertFalse(hasattr(self._tables, "args"))

  def test_request_time_is_that_of_the_batch_unless_given(self):
    factory = self._cpu_factory()
    pair = (self._embeddings["a"], self._embeddings["a"])

    factory.apply_gradients([pair])
    self.assertIs(self._tables.kwargs["req_time"], self._req_time)

    other = tf.constant(7)
    factory.apply_gradients([pair], req_time=other)
    self.assertIs(self._tables.kwargs["req_time"], other)

  def test_ranks_send_zeros_for_features_without_gradient(self):
    gradient = 3 * self._embeddings["a"]

    self._fused_factory().apply_gradients([(gradient, self._embeddings["a"])], scale=0.5)

    (name_to_gradient,) = self._tables.args
    with tf.compat.v1.Session(config=tf.compat.v1.ConfigProto(allow_soft_placement=True)) as s:
      values = s.run(name_to_gradient)
    self.assertAllEqual(values["a"], [[3.0] * 3] * 2)
    self.assertAllEqual(values["b"], [[0.0] * 3] * 2)
    self.assertEqual(self._tables.kwargs["scale"], 0.5)
    self.assertEqual(self._tables.kwargs["auxiliary_bundle"], {"left": "by the lookup"})
    self.assertNotIn("skip_merge_id", self._tables.kwargs)

  def test_merged_slots_are_merged_once(self):
    pair = (self._embeddings["a"], self._embeddings["a"])

    self._fused_factory(use_native_multi_hash_table=False).apply_gradients([pair])

    self.assertTrue(self._tables.kwargs["skip_merge_id"])

  def test_updates_wait_for_the_rows_though_gradients_do_not_depend_on_them(self):
    for factory in (self._cpu_factory(), self._fused_factory()):
      factory.apply_gradients([(tf.ones([2, 3]), row) for row in self._embeddings.values()])

      _, *rest = self._tables.args
      (step,) = rest or [self._tables.kwargs["global_step"]]
      needed = utils.get_needed_ops([step.op])
      for row in self._embeddings.values():
        self.assertIn(row.op, needed)

  def test_gradients_of_tables_on_a_gpu_stay_there(self):
    with tf.device("/device:GPU:0"):
      self._embeddings = {name: tf.ones([2, 3], name=name) for name in ("a", "b")}
    self._cpu_factory().apply_gradients(
      [(tf.ones([2, 3]), row) for row in self._embeddings.values()]
    )

    pairs, step = self._tables.args
    graph = tf.compat.v1.get_default_graph()
    types = [op.type for op in graph.get_operations()]
    self.assertNotIn("MonolithCheckGradients", types)
    # The gradients wait, as the step is on the host, which would wait for the GPU.
    needed = utils.get_needed_ops([gradient.op for _, gradient in pairs.values()])
    for row in self._embeddings.values():
      self.assertIn(row.op, needed)
      self.assertNotIn(row.op, utils.get_needed_ops([step.op]))

  def test_request_time_of_features(self):
    self.assertIsNone(feature_factories.get_req_time({}))
    self.assertEqual(feature_factories.get_req_time({"req_time": [5, 6]}), 5)


if __name__ == "__main__":
  absltest.main()
