"""Promise: rows are never read by a model whose columns mean something else."""

from __future__ import annotations

import json
import os

import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  entry,
  feature,
  graph_estimator,
  learning_rate_functions,
  native_task,
  utils,
)
from monolith.native_training.checkpoints import slices as checkpoint_slices
from monolith.native_training.checkpoints.slices import Slice
from monolith.native_training.graph import export_context

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT

_BIAS = Slice(1, "ftrl", "zeros, 0.1")
_WIDE = Slice(8, "adagrad", "uniform, 0.1")
_NARROW = _WIDE._replace(dim=1)
_DEEP = Slice(8, "adagrad", "zeros, 0.2")


def _ragged(rows):
  return tf.ragged.constant(rows, dtype=tf.int64, row_splits_dtype=tf.int64)


def _snapshot(folder):
  """Returns path -> content of everything in a folder."""
  content = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      with open(path, "rb") as f:
        content[os.path.relpath(path, folder)] = f.read()
  return content


class CheckTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = utils.get_test_tmp_dir()
    self.prefix = os.path.join(self.folder, "model.ckpt-7")
    with self.session(graph=tf.Graph()) as sess:
      tf.compat.v1.get_variable("v", initializer=0.0)
      sess.run(tf.compat.v1.global_variables_initializer())
      tf.compat.v1.train.Saver().save(sess, os.path.join(self.folder, "model.ckpt"), 7)

  def _check(self, saved, wanted):
    checkpoint_slices.write(self.prefix, {"item": saved})
    checkpoint_slices.check_newest(self.folder, {"item": wanted})

  def test_round_trip(self):
    tables = {"item": [_BIAS, _WIDE], "user": [_DEEP]}

    checkpoint_slices.write(self.prefix, tables)

    self.assertEqual(checkpoint_slices.read(self.prefix), tables)

  def test_no_checkpoint(self):
    checkpoint_slices.check_newest(os.path.join(self.folder, "none"), {"item": [_BIAS]})

  def test_checkpoint_without_record(self):
    checkpoint_slices.check_newest(self.folder, {"item": [_BIAS]})

  @parameterized.named_parameters(
    ("sizes_swapped", [_BIAS, _WIDE], [_WIDE, _BIAS]),
    ("sizes_of_equal_slices_swapped", [_WIDE, _NARROW], [_NARROW, _WIDE]),
    ("another_size", [_WIDE], [_WIDE._replace(dim=16)]),
    ("cut_in_two", [_WIDE], [_WIDE._replace(dim=4), _WIDE._replace(dim=4)]),
    ("one_more", [_WIDE], [_WIDE, _DEEP]),
    ("one_less", [_WIDE, _DEEP], [_WIDE]),
    ("optimizers_swapped", [_WIDE, _BIAS._replace(dim=8)], [_BIAS._replace(dim=8), _WIDE]),
    (
      "optimizers_swapped_and_rate_changed",
      [_WIDE, _BIAS._replace(dim=8)],
      [_BIAS._replace(dim=8, config="0.3"), _WIDE],
    ),
    ("configurations_swapped", [_WIDE, _DEEP], [_DEEP, _WIDE]),
    ("two_of_three_swapped", [_BIAS, _WIDE, _DEEP], [_BIAS, _DEEP, _WIDE]),
  )
  def test_error(self, saved, wanted):
    with self.assertRaisesRegex(
      ValueError, r"^the rows of table 'item' in the checkpoint \S+model.ckpt-7 consist of the "
    ) as raised:
      self._check(saved, wanted)
    has, wants = str(raised.exception).split(", but the model declares ")
    self.assertContainsInOrder([f"{s.dim} {s.optimizer}" for s in saved], has)
    self.assertContainsInOrder([f"{s.dim} {s.optimizer}" for s in wanted], wants)
    self.assertNotIn(has[has.index("[") :], wants)

  @parameterized.named_parameters(
    ("same", [_BIAS, _WIDE], [_BIAS, _WIDE]),
    ("configuration_changed", [_WIDE, _DEEP], [_WIDE._replace(config="0.5"), _DEEP]),
    ("both_configured_alike", [_WIDE, _DEEP], [_WIDE, _WIDE]),
    ("optimizer_changed", [_BIAS, _WIDE], [_BIAS._replace(optimizer="sgd"), _WIDE]),
  )
  def test_allowed(self, saved, wanted):
    self._check(saved, wanted)

  def test_other_tables(self):
    checkpoint_slices.write(self.prefix, {"item": [_BIAS], "removed": [_WIDE]})
    checkpoint_slices.check_newest(self.folder, {"item": [_BIAS], "added": [_DEEP]})

  def test_damaged_record_is_named(self):
    checkpoint_slices.write(self.prefix, {"item": [_BIAS, _WIDE]})
    path = self.prefix + ".slices"
    with open(path, "rb") as f:
      good = f.read()
    for position in range(0, len(good), 7):
      for bad in (good[:position], good[:position] + b"%" + good[position + 1 :]):
        with open(path, "wb") as f:
          f.write(bad)
        if json.loads(good) == _parse(bad):
          continue
        with self.assertRaisesRegex(tf.errors.DataLossError, "model.ckpt-7.slices is damaged"):
          checkpoint_slices.check_newest(self.folder, {"item": [_BIAS, _WIDE]})


def _parse(content):
  try:
    return json.loads(content)
  except ValueError:
    return None


class SlicesTask(native_task.NativeTask):
  """Has a feature with the slices that the params name, and another one."""

  @classmethod
  def params(cls):
    p = super().params()
    p.define("slices", None, "(size, optimizer) of each slice.")
    p.define("names", ("item", "user"), "Of the features.")
    p.define("initializer", entry.ZerosInitializer(), "Of all slices.")
    p.name = "slices"
    p.metrics.enable_tf2_profiler_hook = False
    p.train.per_replica_batch_size = 2
    return p

  def create_input_fn(self, mode):
    def input_fn():
      features = {name: _ragged([[1, 2], [3]]) for name in ("item", "user", "new")}
      return tf.data.Dataset.from_tensors(features).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, parts = [], []
      for name in self.p.names:
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=f"slot_of_{name}",
            default_vec_initializer=self.p.initializer,
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        columns.append(feature.FeatureColumn(slot, name))
        slices = self.p.slices if name == "item" else [(3, entry.SgdOptimizer(0.1))]
        for dim, optimizer in slices:
          feature_slice = slot.add_feature_slice(dim, optimizer=optimizer)
          parts.append(columns[-1].embedding_lookup(feature_slice))
      if mode == _PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=tf.concat(parts, axis=1))
      loss = tf.add_n([(i + 1) * tf.reduce_sum(part) for i, part in enumerate(parts)])
      embeddings = [column.get_all_embeddings_concat() for column in columns]
      apply_op = self.ctx.apply_embedding_gradients(zip(tf.gradients(loss, embeddings), embeddings))
      with tf.control_dependencies([apply_op]):
        step_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=step_op)

    return model_fn

  def create_serving_input_receiver_fn(self):
    def receiver_fn():
      ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
      ragged = tf.RaggedTensor.from_row_lengths(ids, tf.ones_like(ids))
      features = {name: ragged for name in self.p.names}
      return graph_estimator.ServingInputReceiver(features, {"ids": ids})

    return receiver_fn


_SGD = entry.SgdOptimizer(0.1)
_SIZES = [(1, _SGD), (8, _SGD)]
_SWAPPED_SIZES = [(8, _SGD), (1, _SGD)]


def _params(slices, **values):
  params = SlicesTask.params()
  params.slices = slices
  for name, value in values.items():
    setattr(params, name, value)
  return params


def _train(folder, slices, steps=1, values=None, **config):
  conf = cpu_training.CpuTrainingConfig(**config)
  cpu_training.local_train_internal(_params(slices, **(values or {})), conf, folder, steps)


def _predict(folder, slices, **config):
  conf = cpu_training.CpuTrainingConfig(**config)
  with cpu_training._local_cluster(conf.num_ps) as (session_config, _):
    training = cpu_training.CpuTraining(conf, _params(slices).instantiate())
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
    )
    return next(estimator.predict(training.create_input_fn(_PREDICT), yield_single_examples=False))


class RestartTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = os.path.join(utils.get_test_tmp_dir(), "model")

  def _assert_refused(self, function, *args, pattern="table 'item'", **kwargs):
    before = _snapshot(self.folder)
    with self.assertRaisesRegex(ValueError, pattern):
      function(self.folder, *args, **kwargs)
    self.assertEqual(_snapshot(self.folder), before)

  @parameterized.product(num_ps=(0, 2), use_native_multi_hash_table=(True, False))
  def test_swapped_slices_are_refused(self, num_ps, use_native_multi_hash_table):
    config = {
      "num_ps": num_ps,
      "use_native_multi_hash_table": use_native_multi_hash_table,
    }
    _train(self.folder, _SIZES, **config)

    pattern = (
      r"^the rows of table 'item' in the checkpoint \S+/model.ckpt-1 consist of the slices "
      r"\[1 sgd, 8 sgd\], but the model declares \[8 sgd, 1 sgd\]: .*model.ckpt-1.slices"
    )
    self._assert_refused(_train, _SWAPPED_SIZES, pattern=pattern, **config)
    self._assert_refused(_predict, _SWAPPED_SIZES, **config)

    _train(self.folder, _SIZES, **config)
    self.assertAllClose(_predict(self.folder, _SIZES, **config)[1], _expected(steps=2))

  def test_other_optimizers_and_rates(self):
    adagrad = entry.AdagradOptimizer(learning_rate=0.1)
    _train(self.folder, [(4, _SGD), (4, adagrad), (4, entry.SgdOptimizer(0.2))])

    self._assert_refused(_train, [(4, adagrad), (4, _SGD), (4, entry.SgdOptimizer(0.2))])
    self._assert_refused(
      _train,
      [(4, entry.SgdOptimizer(0.2)), (4, adagrad), (4, _SGD)],
      pattern=r"4 sgd \(.*learning rate 0.1.*but the model.*learning rate 0.2",
    )
    self._assert_refused(_train, [(4, _SGD), (4, adagrad)])
    self._assert_refused(_train, [(4, _SGD), (4, adagrad), (5, entry.SgdOptimizer(0.2))])
    _train(self.folder, [(4, _SGD), (4, adagrad), (4, entry.SgdOptimizer(0.3))])

  def test_what_may_change(self):
    _train(self.folder, _SIZES)

    _train(self.folder, _SIZES, values={"names": ("item", "user", "new")})
    _train(self.folder, _SIZES, values={"names": ("item",)})
    _train(self.folder, _SIZES, values={"initializer": entry.RandomUniformInitializer()})
    adagrad = entry.AdagradOptimizer(learning_rate=0.1)
    _train(self.folder, [(1, adagrad), (8, entry.SgdOptimizer(0.3))])

    self.assertEqual(tf.train.latest_checkpoint(self.folder), self.folder + "/model.ckpt-5")

  def test_other_servers(self):
    _train(self.folder, _SIZES)

    # Refuses before it reshards anything; a resharded checkpoint has the record too.
    self._assert_refused(_train, _SWAPPED_SIZES, num_ps=2)
    _train(self.folder, _SIZES, num_ps=2)
    self.assertEqual(
      checkpoint_slices.read(self.folder + "/resharded.model.ckpt-1"),
      checkpoint_slices.read(self.folder + "/model.ckpt-1"),
    )

  def test_checkpoint_without_record_is_restored(self):
    _train(self.folder, _SIZES)
    os.remove(self.folder + "/model.ckpt-1.slices")

    _train(self.folder, _SWAPPED_SIZES)

    # The checkpoint has had a record since then.
    self._assert_refused(_train, _SIZES)

  def test_record_goes_with_its_checkpoint(self):
    _train(self.folder, _SIZES, 5, save_checkpoints_steps=1, checkpoints_max_to_keep=2)

    records = [name for name in os.listdir(self.folder) if ".slices" in name]
    self.assertCountEqual(records, ["model.ckpt-4.slices", "model.ckpt-5.slices"])

  @parameterized.parameters(
    export_context.ExportMode.STANDALONE, export_context.ExportMode.DISTRIBUTED
  )
  def test_export(self, mode):
    _train(self.folder, _SIZES)

    def export(folder, slices):
      params = _params(slices)
      params.serving.export_mode = mode
      training = cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(), params.instantiate())
      exported = os.path.join(utils.get_test_tmp_dir(), "exported")
      exporter = cpu_training.create_exporter(training, folder, None, exported, False)
      exporter.export_saved_model(training.create_serving_input_receiver_fn())

    self._assert_refused(export, _SWAPPED_SIZES)
    export(self.folder, _SIZES)

  def test_columns_that_share_a_slot(self):
    class Task(SlicesTask):
      def create_model_fn(self):
        def model_fn(features, mode, config):
          slot = self.ctx.create_feature_slot(feature.FeatureSlotConfig(name="shared"))
          for name in ("item", "user"):
            feature.FeatureColumn(slot, name)
          decay = learning_rate_functions.PolynomialDecay(0.1, 10)
          slot.add_feature_slice(2, learning_rate_fn=decay)
          slot.add_feature_slice(3, learning_rate_fn=0.5)
          return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=tf.no_op())

        return model_fn

    training = cpu_training.CpuTraining(
      cpu_training.CpuTrainingConfig(), Task.params().instantiate()
    )

    (slices,) = training._collected.slices.values()
    self.assertEqual(list(training._collected.slices), ["shared"])
    self.assertEqual([s.dim for s in slices], [2, 3])
    self.assertIn("PolynomialDecay", slices[0].config)
    self.assertEndsWith(slices[1].config, "learning rate 0.5")


def _expected(steps):
  """The second example, id 3: the k-th slice has gradient k in every step."""
  return [-0.1 * steps] + [-0.2 * steps] * 8 + [-0.3 * steps] * 3


if __name__ == "__main__":
  tf.test.main()
