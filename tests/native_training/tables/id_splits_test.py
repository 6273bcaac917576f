"""The distinct ids of a batch by server are worked out once per step, also through queues."""

import os

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  distribution_ops,
  entry,
  feature,
  graph_estimator,
  native_task,
  utils,
)
from monolith.native_training.tables import id_splits

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_DIM = 2
_NUM_STEPS = 4
# Ids of one batch; `a` and `c` have one in common, which may have one row or two.
_IDS = {"a": [[1, 1], [2]], "b": [[101], [102, 101]], "c": [[2], [3, 3, 4]]}
# Each feature has another gradient, which no update changes: steps may overlap.
_WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


class _GraphHook(tf.compat.v1.train.SessionRunHook):
  """Remembers the graph once it is complete."""

  graph: tf.Graph

  def after_create_session(self, session, coord):
    _GraphHook.graph = session.graph


class _Task(native_task.NativeTask):
  """Three features; `a` and `c` are columns of one slot, or of two."""

  shared = False
  trained = ("a", "b", "c")

  def create_input_fn(self, mode):
    def input_fn():
      features = {
        name: tf.ragged.constant(rows, tf.int64, row_splits_dtype=tf.int64)
        for name, rows in _IDS.items()
      }
      return tf.data.Dataset.from_tensors(features).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, vectors = self._look_up()
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=vectors)
      loss = tf.add_n([tf.reduce_sum(vectors[name]) * _WEIGHTS[name] for name in self.trained])
      embeddings = [column.get_all_embeddings_concat() for column in columns]
      apply_op = self.ctx.apply_embedding_gradients(zip(tf.gradients(loss, embeddings), embeddings))
      with tf.control_dependencies([loss]):
        step_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=tf.group(apply_op, step_op), training_hooks=[_GraphHook()]
      )

    return model_fn

  def _look_up(self):
    slots, slices, columns, vectors = {}, {}, [], {}
    for name in _IDS:
      slot = "ac" if self.shared and name != "b" else name
      if slot not in slots:
        slots[slot] = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=slot,
            default_vec_initializer=entry.ZerosInitializer(),
            default_vec_optimizer=entry.AdagradOptimizer(
              learning_rate=0.1, initial_accumulator_value=1.0
            ),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        slices[slot] = slots[slot].add_feature_slice(_DIM)
      columns.append(feature.FeatureColumn(slots[slot], name))
      vectors[name] = columns[-1].embedding_lookup(slices[slot])
    return columns, vectors


def _expected(kind: str, trained: tuple[str, ...]) -> dict[str, list[float]]:
  """Returns what a row per (table, id) has learnt, pooled per example."""
  grads: dict[tuple[str, int], float] = {}

  def table(name: str) -> str:
    if kind == "merged":
      return "all"
    return "ac" if kind == "shared" and name != "b" else name

  for name in trained:
    for ids in _IDS[name]:
      for i in ids:
        grads[table(name), i] = grads.get((table(name), i), 0.0) + _WEIGHTS[name]
  rows = {
    key: -0.1 * sum(grad / np.sqrt(1.0 + k * grad**2) for k in range(1, _NUM_STEPS + 1))
    for key, grad in grads.items()
  }
  return {
    name: [sum(rows.get((table(name), i), 0.0) for i in ids) for ids in batch]
    for name, batch in _IDS.items()
  }


class OneSplitPerStepTest(tf.test.TestCase, parameterized.TestCase):
  def _train(self, num_ps, native, queues, shared=False, trained=("a", "b", "c")):
    """Returns the pooled embeddings of the batch after the training run."""
    _Task.shared, _Task.trained = shared, trained
    params = _Task.params()
    params.name = "once"
    folder = os.path.join(utils.get_test_tmp_dir(), self.id())
    conf = cpu_training.CpuTrainingConfig(
      num_ps=num_ps,
      use_native_multi_hash_table=native,
      embedding_prefetch_capacity=int(queues),
      enable_embedding_postpush=queues,
    )
    cpu_training.local_train_internal(params, conf, folder, steps=_NUM_STEPS)
    with cpu_training._local_cluster(num_ps) as (session_config, _):
      training = cpu_training.CpuTraining(conf, params.instantiate())
      estimator = graph_estimator.Estimator(
        training.create_model_fn(),
        config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
      )
      predictions = estimator.predict(
        training.create_input_fn(graph_estimator.ModeKeys.PREDICT), yield_single_examples=False
      )
      return next(predictions)

  def _count_splits(self):
    types = ("MonolithUniqueKeyWithValueAndOffset", "Unique", "UniqueV2")
    return sum(op.type in types for op in _GraphHook.graph.get_operations())

  def _check_rows(self, rows, expected):
    for name, pooled in expected.items():
      self.assertAllClose(rows[name], np.repeat(np.array(pooled)[:, None], _DIM, 1), atol=1e-6)

  @parameterized.product(num_ps=(1, 2), kind=("native", "shared", "merged"), queues=(True, False))
  def test_ids_are_made_distinct_once(self, num_ps, kind, queues):
    shared = kind == "shared"

    rows = self._train(num_ps, kind != "merged", queues, shared=shared)

    self.assertEqual(self._count_splits(), 1)
    self._check_rows(rows, _expected(kind, ("a", "b", "c")))

  @parameterized.product(kind=("native", "shared", "merged"))
  def test_features_without_a_gradient_are_not_updated(self, kind):
    shared = kind == "shared"

    rows = self._train(2, kind != "merged", True, shared=shared, trained=("b", "c"))

    self._check_rows(rows, _expected(kind, ("b", "c")))

  @parameterized.product(kind=("native", "merged"))
  def test_without_servers(self, kind):
    rows = self._train(0, kind == "native", True)

    self._check_rows(rows, _expected(kind, ("a", "b", "c")))


class MemoTest(tf.test.TestCase):
  def test_the_same_tensors_are_found(self):
    with tf.Graph().as_default():
      memo = id_splits.Memo()
      ids = tf.constant([1], tf.int64)

      built = memo.get({"a": ids}, lambda: ["split"])

      self.assertIs(memo.get({"a": ids}, lambda: ["another"]), built)
      self.assertIs(memo.find({"a": ids}), built)

  def test_other_slots_and_tensors_are_not(self):
    with tf.Graph().as_default():
      memo = id_splits.Memo()
      ids, other = tf.constant([1], tf.int64), tf.constant([1], tf.int64)
      memo.set({"a": ids}, "split")

      self.assertIsNone(memo.find({"b": ids}))
      self.assertIsNone(memo.find({"a": other}))
      self.assertIsNone(memo.find({"a": ids, "b": ids}))
      self.assertIsNone(memo.find({"a": [1]}))

  def test_what_was_built_in_a_branch_is_not_used_outside(self):
    with tf.Graph().as_default():
      memo = id_splits.Memo()
      ids = tf.constant([1], tf.int64)

      def build_in_a_branch():
        memo.set({"a": ids}, "split")
        return tf.constant(1)

      tf.cond(tf.constant(True), build_in_a_branch, lambda: tf.constant(0))

      self.assertIsNone(memo.find({"a": ids}))


class RawSplitTest(tf.test.TestCase, parameterized.TestCase):
  """Rows for all ids, and sums of their gradients, by the ops for one table after another."""

  _DIMS = (2, 1, 3)

  def split(self, rows, num_ps):
    return id_splits.split_ragged(rows, self._DIMS, num_ps, generate_buffer=True)

  @parameterized.parameters(1, 3)
  def test_equals_the_ops_that_work_on_one_flat_value(self, num_ps):
    random = np.random.default_rng(num_ps)
    lengths = [500, 0, 700]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      ids = tf.RaggedTensor.from_row_lengths(
        tf.constant(random.integers(-60, 60, sum(lengths)), tf.int64),
        tf.constant(lengths, tf.int64),
      )
      split, buffer = self.split(ids, num_ps)
      widths = tf.constant(self._DIMS, tf.int64)
      sizes = session.run([tf.reduce_sum(part.row_lengths() * widths) for part in split.ids])
      rows = [tf.constant(random.normal(size=size), tf.float32) for size in sizes]
      filled = [
        distribution_ops.fill_with_offset_map(
          split.positions_on(i), rows[i], split.offsets, buffer, self._DIMS
        )
        for i in range(num_ps)
      ]
      flat = distribution_ops.finalize_shared_tensor(filled, tf.float32, [None])
      embeddings = split.spread(rows, ids.row_splits, self._DIMS)
      gradients = [
        tf.constant(random.normal(size=[length, dim]), tf.float32)
        for length, dim in zip(lengths, self._DIMS)
      ]
      flat_gradient = tf.concat([tf.reshape(part, [-1]) for part in gradients], axis=0)
      sums = split.sum(gradients, self._DIMS)
      want_sums = [
        distribution_ops.fill_with_offset_map_gradient(
          split.positions_on(i), flat_gradient, split.offsets, self._DIMS
        )
        for i in range(num_ps)
      ]
      back = tf.gradients(embeddings, rows, gradients)
      found, want, shapes, sums, want_sums, back = session.run(
        [
          tf.concat([tf.reshape(part, [-1]) for part in embeddings], axis=0),
          flat,
          [tf.shape(part) for part in embeddings],
          sums,
          want_sums,
          back,
        ]
      )
    self.assertAllEqual(found, want)
    self.assertAllEqual(shapes, list(zip(lengths, self._DIMS)))
    for i in range(num_ps):
      self.assertAllEqual(sums[i], want_sums[i])
      self.assertAllEqual(back[i], want_sums[i])

  def test_bad_arguments(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      ids = tf.ragged.constant([[7, 8, 7], [7], []], tf.int64, row_splits_dtype=tf.int64)
      split, _ = self.split(ids, 1)
      rows = tf.compat.v1.placeholder_with_default(tf.zeros([5]), [None])
      key_splits = tf.compat.v1.placeholder_with_default(ids.row_splits, [None])
      gradient = tf.compat.v1.placeholder_with_default(tf.zeros([6]), None)
      spread = split.spread([rows], key_splits, self._DIMS)
      total = split.sum([gradient, tf.zeros([1]), tf.zeros([0])], self._DIMS)
      session.run([spread, total])
      position, offset = split.positions[0], split.offsets.values

      def check(message, op, feed):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          session.run(op, feed)

      check(r"size of rows\[0\] is 4, want floats of its pos = 5", spread, {rows: [0] * 4})
      check("size of key_split is 2", spread, {key_splits: [0, 3]})
      check("want a place for a row", spread, {key_splits: [0, 1, 2, 2]})
      check("has 5 elements, want a multiple of 2", total, {gradient: [0] * 5})
      check("want a place for a row", total, {gradient: [0] * 4})
      for bad in ([0, 1, 1], [0, 1, 3], [0, 1, -1]):
        check(r"pos\[0\]\[2\] is", [spread, total], {position: bad})
      check("size of .*|ends at", total, {position: [0, 1]})
      check("want a place for a row", total, {offset: [0, 5, 2, 6]})


if __name__ == "__main__":
  tf.test.main()
