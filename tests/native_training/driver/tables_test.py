"""Tables of a training run: shared by a slot's columns, later spread over other servers."""

from __future__ import annotations

import os
import tempfile
import unittest.mock

import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  device_utils,
  entry,
  feature,
  graph_estimator,
  hvd_lib,
  native_task,
  utils,
)
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.checkpoints import topology as training_topology
from monolith.native_training.graph import export_context
from monolith.native_training.model_export import export_hooks

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_TRAIN = graph_estimator.ModeKeys.TRAIN
_PREDICT = graph_estimator.ModeKeys.PREDICT


def _ragged(rows):
  return tf.ragged.constant(rows, dtype=tf.int64, row_splits_dtype=tf.int64)


class TwoColumnsTask(native_task.NativeTask):
  """Slot "item" with columns "clicked" and "shown"; a row grows by 1 per update.

  Id 7 is in both columns, id 8 twice in one of them.
  """

  slot_name = "item"

  def create_input_fn(self, mode):
    def input_fn():
      features = {"clicked": _ragged([[7], [8, 8]]), "shown": _ragged([[7, 9], []])}
      features["other"] = _ragged([[-1], [7]])
      return tf.data.Dataset.from_tensors(features).repeat()

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      columns, pooled = [], []
      for slot_name, names in ((self.slot_name, ["clicked", "shown"]), ("other_slot", ["other"])):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=slot_name,
            default_vec_initializer=entry.ZerosInitializer(),
            default_vec_optimizer=entry.SgdOptimizer(learning_rate=1.0),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        # Another width, because tables of equal configuration would be merged and share rows.
        vector = slot.add_feature_slice(1 + len(names))
        for name in names:
          columns.append(feature.FeatureColumn(slot, name))
          pooled.append(columns[-1].embedding_lookup(vector))
      if mode == _PREDICT:
        predictions = {c.feature_name: p[:, 0] for c, p in zip(columns, pooled)}
        return graph_estimator.EstimatorSpec(mode, predictions=predictions)
      loss = -tf.add_n([tf.reduce_sum(p) for p in pooled])
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
      features = {name: ragged for name in ("clicked", "shown", "other")}
      return graph_estimator.ServingInputReceiver(features, {"ids": ids})

    return receiver_fn


class NameTakenTask(TwoColumnsTask):
  """Gives the shared slot the name of a feature in the other slot."""

  slot_name = "other"


def _params(task_class=TwoColumnsTask):
  params = task_class.params()
  params.name = "two_columns"
  params.metrics.enable_tf2_profiler_hook = False
  return params


def _train(folder, steps, num_ps=0, task_class=TwoColumnsTask, **config):
  conf = cpu_training.CpuTrainingConfig(num_ps=num_ps, **config)
  cpu_training.local_train_internal(_params(task_class), conf, folder, steps)


def _predict(folder, num_ps=0, task_class=TwoColumnsTask, **config):
  """Returns feature -> pooled first column of both examples, from the checkpoint alone."""
  conf = cpu_training.CpuTrainingConfig(num_ps=num_ps, **config)
  with cpu_training._local_cluster(num_ps) as (session_config, _):
    training = cpu_training.CpuTraining(conf, _params(task_class).instantiate())
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(model_dir=folder, session_config=session_config),
    )
    batches = estimator.predict(training.create_input_fn(_PREDICT), yield_single_examples=False)
    return {name: list(value) for name, value in next(batches).items()}


class SharedSlotTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters((0, True), (2, True), (0, False), (2, False))
  def test_columns_of_a_slot_share_rows(self, num_ps, native):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")

    _train(folder, 1, num_ps, use_native_multi_hash_table=native)
    rows = _predict(folder, num_ps, use_native_multi_hash_table=native)

    # Both columns updated id 7; id 8 was updated twice, id 9 once.
    self.assertAllEqual(rows["clicked"], [2.0, 2.0 + 2.0])
    self.assertAllEqual(rows["shown"], [2.0 + 1.0, 0.0])
    self.assertAllEqual(rows["other"], [1.0, 1.0])

  def test_with_prefetch_and_push(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")

    _train(folder, 5, embedding_prefetch_capacity=1, enable_embedding_postpush=True)

    self.assertAllEqual(_predict(folder)["clicked"], [10.0, 20.0])

  @parameterized.product(
    native=(True, False),
    queues=(
      {},
      {"embedding_prefetch_capacity": 2, "enable_pipelined_fwda2a": True},
      {"enable_async_optimize": True, "enable_pipelined_bwda2a": True},
    ),
  )
  def test_synchronous_training(self, native, queues):
    hvd_lib.init()
    params = _params()
    params.serving.export_mode = export_context.ExportMode.STANDALONE
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    conf = cpu_training.CpuTrainingConfig(
      enable_sync_training=True,
      reorder_fids_in_data_pipeline=True,
      use_native_multi_hash_table=native,
      **queues,
    )
    training = cpu_training.CpuTraining(conf, params.instantiate())
    estimator = graph_estimator.Estimator(
      training.create_model_fn(),
      config=graph_estimator.RunConfig(model_dir=folder, device_fn=device_utils.default_device_fn),
    )

    estimator.train(training.create_input_fn(_TRAIN), steps=1)
    rows = next(estimator.predict(training.create_input_fn(_PREDICT), yield_single_examples=False))
    exported = os.path.join(utils.get_test_tmp_dir(), "exported")
    exporter = cpu_training.create_exporter(training, folder, None, exported, False)
    version = exporter.export_saved_model(training.create_serving_input_receiver_fn())

    self.assertAllEqual(rows["clicked"], [2.0, 2.0 + 2.0])
    self.assertAllEqual(rows["shown"], [2.0 + 1.0, 0.0])
    self.assertAllEqual(rows["other"], [1.0, 1.0])
    self.assertAllEqual(self._serve(version), [2.0, 2.0, 1.0, 0.0])

  def test_table_names(self):
    for task_class, want in ((TwoColumnsTask, "item"), (NameTakenTask, "other/shared")):
      training = cpu_training.CpuTraining(
        cpu_training.CpuTrainingConfig(), _params(task_class).instantiate()
      )
      self.assertEqual(training.collected.shared_tables, {"clicked": want, "shown": want})

  def test_slot_called_like_a_feature(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")

    _train(folder, 1, task_class=NameTakenTask)
    rows = _predict(folder, task_class=NameTakenTask)

    self.assertAllEqual(rows["clicked"], [2.0, 4.0])
    self.assertAllEqual(rows["other"], [1.0, 1.0])

  @parameterized.parameters(
    export_context.ExportMode.STANDALONE, export_context.ExportMode.DISTRIBUTED
  )
  def test_export(self, mode):
    params = _params()
    params.serving.export_when_saving = True
    params.serving.export_mode = mode
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    num_ps = 2 if mode == export_context.ExportMode.DISTRIBUTED else 0
    conf = cpu_training.CpuTrainingConfig(num_ps=num_ps)

    cpu_training.local_train_internal(params, conf, folder, 1)

    exported = os.path.join(folder, "exported_models")
    if mode == export_context.ExportMode.DISTRIBUTED:
      self.assertCountEqual(os.listdir(exported), ["entry", "ps_0", "ps_1"])
      return
    (version,) = (name for name in os.listdir(exported) if name.isdigit())
    self.assertAllEqual(self._serve(os.path.join(exported, version)), [2.0, 2.0, 1.0, 0.0])

  def _serve(self, path):
    """Returns what an exported model predicts for the ids 7 to 10."""
    with tf.Graph().as_default(), self.session() as sess:
      model = tf.compat.v1.saved_model.load(sess, ["serve"], path)
      signature = model.signature_def["serving_default"]
      return sess.run(
        signature.outputs["clicked"].name, {signature.inputs["ids"].name: [7, 8, 9, 10]}
      )


class TopologyTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_goes_on_with_other_servers(self, native):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    steps = 0

    for num_ps in (0, 3, 1, 0):
      _train(folder, 2, num_ps, use_native_multi_hash_table=native)
      steps += 2
      newest = tf.train.latest_checkpoint(folder)
      self.assertEqual(os.path.basename(newest), f"model.ckpt-{steps}")
      self.assertEqual(checkpoint_reshard.count_servers(newest), num_ps)

    rows = _predict(folder, use_native_multi_hash_table=native)
    self.assertAllEqual(rows["clicked"], [2.0 * steps, 4.0 * steps])
    self.assertAllEqual(rows["shown"], [3.0 * steps, 0.0])

  def test_nothing_to_do(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    training_topology.reshard_if_needed(folder, 2)
    self.assertFalse(os.path.exists(folder))

    _train(folder, 1, num_ps=2)
    before = sorted(os.listdir(folder))
    training_topology.reshard_if_needed(folder, 2)

    self.assertEqual(sorted(os.listdir(folder)), before)

  def test_step_of_a_resharded_checkpoint(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    _train(folder, 3)

    training_topology.reshard_if_needed(folder, 2)
    newest = tf.train.latest_checkpoint(folder)

    self.assertEqual(os.path.basename(newest), "resharded.model.ckpt-3")
    self.assertEqual(export_hooks.get_global_step(newest), 3)
    self.assertEqual(export_hooks.get_global_step(folder + "/previous.model.ckpt-12"), 12)

  def test_one_group_fits_with_and_without_a_server(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    for num_ps in (0, 1, 0):
      _train(folder, 1, num_ps)

    self.assertEmpty([name for name in os.listdir(folder) if name.startswith("resharded")])
    self.assertAllEqual(_predict(folder)["clicked"], [6.0, 12.0])
    self.assertAllEqual(_predict(folder, num_ps=1)["clicked"], [6.0, 12.0])

  @parameterized.product(num_ps=(1, 3), native=(True, False))
  def test_prediction_without_servers(self, num_ps, native):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    _train(folder, 2, num_ps, use_native_multi_hash_table=native)
    before = sorted(os.listdir(folder))
    temporary_dir = os.path.join(utils.get_test_tmp_dir(), "temporary")
    os.makedirs(temporary_dir)

    with unittest.mock.patch.object(tempfile, "tempdir", temporary_dir):
      rows = _predict(folder, use_native_multi_hash_table=native)

    self.assertAllEqual(rows["clicked"], [4.0, 8.0])
    self.assertAllEqual(rows["shown"], [6.0, 0.0])
    # Nothing may change: another process may be training in that folder.
    self.assertEqual(sorted(os.listdir(folder)), before)
    self.assertEmpty(os.listdir(temporary_dir))

  def test_evaluation_without_servers(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    _train(folder, 2, num_ps=2)
    before = set(os.listdir(folder))
    training = cpu_training.CpuTraining(cpu_training.CpuTrainingConfig(), _params().instantiate())
    estimator = graph_estimator.Estimator(training.create_model_fn(), folder)

    metrics = estimator.evaluate(training.create_input_fn(graph_estimator.ModeKeys.EVAL), steps=1)

    # Sums all columns: 3 in `clicked` and `shown`, 2 in `other`.
    self.assertEqual(metrics["loss"], -(3 * (4.0 + 8.0) + 3 * 6.0 + 2 * (2.0 + 2.0)))
    self.assertEqual(set(os.listdir(folder)) - before, {"eval"})

  @parameterized.product(num_ps=((0, 2), (3, 2), (2, 3)), native=(True, False))
  def test_prediction_on_other_servers_is_refused(self, num_ps, native):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    saved_on, wanted = num_ps
    _train(folder, 1, saved_on, use_native_multi_hash_table=native)
    before = sorted(os.listdir(folder))

    with self.assertRaisesRegex(
      ValueError, rf"model.ckpt-1 was saved on {saved_on} servers, and num_ps is {wanted}"
    ):
      _predict(folder, wanted, use_native_multi_hash_table=native)

    self.assertEqual(sorted(os.listdir(folder)), before)

  @parameterized.product(
    mode=(export_context.ExportMode.STANDALONE, export_context.ExportMode.DISTRIBUTED),
    native=(True, False),
  )
  def test_export_for_other_servers_is_refused(self, mode, native):
    folder = os.path.join(utils.get_test_tmp_dir(), "model")
    _train(folder, 1, num_ps=3, use_native_multi_hash_table=native)
    exported = os.path.join(utils.get_test_tmp_dir(), "exported")

    def export(num_ps):
      params = _params()
      params.serving.export_mode = mode
      conf = cpu_training.CpuTrainingConfig(num_ps=num_ps, use_native_multi_hash_table=native)
      training = cpu_training.CpuTraining(conf, params.instantiate())
      exporter = cpu_training.create_exporter(training, folder, None, exported, False)
      exporter.export_saved_model(training.create_serving_input_receiver_fn())

    for num_ps in (0, 2):
      with self.assertRaisesRegex(
        ValueError, f"model.ckpt-1 was saved on 3 servers, and num_ps is {num_ps}"
      ):
        export(num_ps)
    self.assertFalse(os.path.exists(exported))
    export(3)
    self.assertNotEmpty(os.listdir(exported))


if __name__ == "__main__":
  tf.test.main()
