"""Exported models load elsewhere, with variables and tables.

Also tests of `export_files`, `frozen_model` and `versioned_assign`, which write them.
"""

import os
import pathlib
import shutil
from unittest import mock

import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training import (
  graph_estimator,
  hash_table_ops,
  multi_hash_table_ops,
  save_utils,
  test_utils,
  utils,
)
from monolith.native_training.data import parsers
from monolith.native_training.graph import export_context
from monolith.native_training.model_export import export_files, frozen_model, saved_model_exporters

tf.compat.v1.disable_eager_execution()


def _model_fn(features, mode, config):
  """Predicts what a table, a group of tables and a variable hold."""
  table = hash_table_ops.test_hash_table(2)
  group = multi_hash_table_ops.MultiHashTable.from_configs(
    {"t": test_utils.generate_test_hash_table_config(1)}
  )
  ids = features["ids"]
  weight = tf.compat.v1.get_variable("weight", initializer=3.0)
  if mode == graph_estimator.ModeKeys.PREDICT:
    assert export_context.is_exporting()
    predictions = {
      "table": table.lookup(ids),
      "group": group.lookup({"t": ids})["t"],
      "weight": weight * tf.ones_like(ids, tf.float32),
    }
    return graph_estimator.EstimatorSpec(mode, predictions=predictions)
  global_step = tf.compat.v1.train.get_or_create_global_step()
  zero = tf.constant([0], tf.int64)
  train_op = tf.group(
    table.assign_add(zero, tf.constant([[1.0, 2.0]])).as_op(),
    group.assign_add({"t": (zero, tf.constant([[1.0]]))}).as_op(),
    tf.compat.v1.assign_add(global_step, 1),
  )
  folder = os.path.join(config.model_dir, "model.ckpt")
  hook = save_utils.NoFirstSaveCheckpointSaverHook(
    config.model_dir,
    save_steps=1000,
    saver=save_utils.PartialRecoverySaver(sharded=True),
    listeners=[
      hash_table_ops.HashTableCheckpointSaverListener(folder),
      multi_hash_table_ops.MultiHashTableCheckpointSaverListener(folder),
    ],
  )
  return graph_estimator.EstimatorSpec(
    mode, loss=tf.constant(0.0), train_op=train_op, training_chief_hooks=[hook]
  )


def _receiver_fn():
  ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
  return graph_estimator.ServingInputReceiver({"ids": ids}, {"ids": ids})


class SavedModelExportersTest(tf.test.TestCase):
  def _train(self):
    self.model_dir = os.path.join(utils.get_test_tmp_dir(), self.id(), "model")
    estimator = graph_estimator.Estimator(_model_fn, self.model_dir)
    dataset_fn = lambda: tf.data.Dataset.from_tensors({"ids": tf.constant([0], tf.int64)})  # noqa: E731
    estimator.train(dataset_fn, steps=1)
    return os.path.join(utils.get_test_tmp_dir(), self.id(), "exported")

  def _call(self, folder, signature_name, inputs):
    with tf.Graph().as_default(), self.session() as sess:
      model = tf.compat.v1.saved_model.load(sess, ["serve"], tf.compat.as_str(folder))
      signature = model.signature_def[signature_name]
      return sess.run(
        {key: info.name for key, info in signature.outputs.items()},
        {signature.inputs[key].name: value for key, value in inputs.items()},
      )

  def test_standalone(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, self.model_dir, base)

    folder = exporter.export_saved_model(_receiver_fn)
    # The model must hold its own copy of the tables.
    shutil.rmtree(self.model_dir)

    self.assertIsInstance(folder, bytes)
    outputs = self._call(folder, "serving_default", {"ids": [0, 1]})
    self.assertAllEqual(outputs["table"], [[1, 2], [0, 0]])
    self.assertAllEqual(outputs["group"], [[1], [0]])
    self.assertAllEqual(outputs["weight"], [3, 3])
    self.assertFalse(export_context.is_exporting())

  def test_files_that_a_model_asks_for(self):
    base = self._train()
    checkpoint = tf.train.latest_checkpoint(self.model_dir)
    pathlib.Path(f"{checkpoint}.assets/words").write_text("a b")

    def model_fn(features, mode, config):
      with tf.name_scope("scope"):
        asset_base = exporter.create_asset_base()
      self.assertEqual(asset_base.name, "ASSET_BASE:0")
      self.assertIs(exporter.create_asset_base(), asset_base)
      for pattern in ("wor*", "words"):
        exporter.add_ckpt_to_assets(checkpoint, pattern)
      return _model_fn(features, mode, config)

    exporter = saved_model_exporters.StandaloneExporter(model_fn, self.model_dir, base)
    folder = exporter.export_saved_model(_receiver_fn)
    shutil.rmtree(self.model_dir)

    words = pathlib.Path(tf.compat.as_str(folder), "assets", "words")
    self.assertEqual(words.read_text(), "a b")
    self.assertAllEqual(self._call(folder, "serving_default", {"ids": [0]})["table"], [[1, 2]])

  def test_all_files_of_a_checkpoint(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, self.model_dir, base)
    checkpoint = tf.train.latest_checkpoint(self.model_dir)
    with tf.Graph().as_default() as graph:
      exporter.add_ckpt_to_assets(checkpoint)
      self.assertCountEqual(
        saved_model_exporters._get_asset_files(graph), tf.io.gfile.glob(f"{checkpoint}.assets/*")
      )
      exporter.add_ckpt_to_assets(checkpoint, "none*")
      # One file for the table, two for the group, which has metadata, and a manifest for each.
      self.assertLen(saved_model_exporters._get_asset_files(graph), 5)

  def test_signature(self):
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, "", "")
    with tf.Graph().as_default():
      x = tf.compat.v1.placeholder(tf.int64, [None], name="x")
      signature = exporter.build_signature({"in": x}, {"out": x + 1})
    self.assertEqual(signature.method_name, "tensorflow/serving/predict")
    self.assertEqual(signature.inputs["in"].name, "x:0")
    self.assertEqual(signature.inputs["in"].dtype, tf.int64.as_datatype_enum)
    self.assertEqual(list(signature.outputs), ["out"])

  def test_shared_embedding(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(
      _model_fn, self.model_dir, base, shared_embedding=True
    )

    folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    # The same files, and not for as long as the checkpoint lives only.
    (tables,) = pathlib.Path(self.model_dir).glob("*.assets")
    saved = {file.stat().st_ino for file in tables.iterdir()}
    self.assertLessEqual(
      {file.stat().st_ino for file in pathlib.Path(folder, "assets").iterdir()}, saved
    )
    shutil.rmtree(self.model_dir)
    outputs = self._call(folder, "serving_default", {"ids": [0]})
    self.assertAllEqual(outputs["table"], [[1, 2]])
    self.assertAllEqual(outputs["group"], [[1]])

  def test_shared_embedding_where_files_cannot_be_linked(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(
      _model_fn, self.model_dir, base, shared_embedding=True
    )

    with mock.patch.object(os, "link", side_effect=OSError("another device")):
      folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    self.assertFalse(os.path.exists(os.path.join(folder, "assets")))
    outputs = self._call(folder, "serving_default", {"ids": [0]})
    self.assertAllEqual(outputs["table"], [[1, 2]])

  def test_a_model_that_wants_its_label_is_told_what_to_do(self):
    base = self._train()

    def model_fn(features, mode, config):
      features["clicked"]
      return _model_fn(features, mode, config)

    exporter = saved_model_exporters.StandaloneExporter(model_fn, self.model_dir, base)
    with self.assertRaisesRegex(KeyError, "'clicked'.*makes.*ids.*features.get"):
      exporter.export_saved_model(_receiver_fn)

  def test_assign_signatures(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, self.model_dir, base)
    folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    with tf.Graph().as_default(), self.session() as sess:
      signatures = tf.compat.v1.saved_model.load(sess, ["serve"], folder).signature_def
      assign = signatures["hashtable_assign"]
      (id_key,) = (key for key in assign.inputs if key.endswith("_id"))
      name = id_key[: -len("_id")]
      result = sess.run(
        assign.outputs[f"{name}_result"].name,
        {assign.inputs[id_key].name: [7], assign.inputs[f"{name}_value"].name: [[5.0, 6.0]]},
      )
      self.assertEqual(result, 1)
      (raw_assign,) = (s for key, s in signatures.items() if key.endswith("/raw_assign"))
      sess.run(
        raw_assign.outputs["result"].name,
        {
          raw_assign.inputs["id"].name: [7],
          raw_assign.inputs["id_split"].name: [0, 1],
          raw_assign.inputs["flat_value"].name: [9.0],
        },
      )
      serving = signatures["serving_default"]
      outputs = sess.run(
        {key: serving.outputs[key].name for key in ("table", "group")},
        {serving.inputs["ids"].name: [7]},
      )

    self.assertAllEqual(outputs["table"], [[5, 6]])
    self.assertAllEqual(outputs["group"], [[9]])

  def test_rows_of_a_writer_that_was_replaced_are_refused(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, self.model_dir, base)
    folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    with tf.Graph().as_default(), self.session() as sess:
      signatures = tf.compat.v1.saved_model.load(sess, ["serve"], folder).signature_def
      (assign,) = (s for key, s in signatures.items() if key.endswith("/versioned_assign"))
      serving = signatures["serving_default"]

      def push(value, epoch, seq):
        inputs = {"id": [7], "id_split": [0, 1], "flat_value": [value], "epoch": epoch, "seq": seq}
        sess.run(
          assign.outputs["result"].name,
          {assign.inputs[key].name: value for key, value in inputs.items()},
        )
        return sess.run(serving.outputs["group"].name, {serving.inputs["ids"].name: [7]})

      self.assertAllEqual(push(1.0, epoch=5, seq=3), [[1]])
      self.assertAllEqual(push(2.0, epoch=5, seq=4), [[2]])
      for epoch, seq in ((5, 4), (5, 3), (4, 9)):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, rf"not newer.*{epoch}.*{seq}"):
          push(3.0, epoch, seq)
      group = serving.outputs["group"].name
      self.assertAllEqual(sess.run(group, {serving.inputs["ids"].name: [7]}), [[2]])
      self.assertAllEqual(push(4.0, epoch=6, seq=1), [[4]])

  def test_distributed_without_servers(self):
    base = self._train()
    os.environ["TF_CONFIG"] = "{}"
    self.addCleanup(os.environ.pop, "TF_CONFIG", None)
    exporter = saved_model_exporters.DistributedExporter(_model_fn, self.model_dir, base)

    exported = exporter.export_saved_model(_receiver_fn)

    self.assertEqual(list(exported), ["entry"])
    self.assertEqual(os.environ["TF_CONFIG"], "{}")
    outputs = self._call(exported["entry"], "serving_default", {"ids": [0]})
    self.assertAllEqual(outputs["table"], [[1, 2]])
    # One process can be kept fresh.
    with tf.Graph().as_default(), self.session() as sess:
      signatures = tf.compat.v1.saved_model.load(
        sess, ["serve"], tf.compat.as_str(exported["entry"])
      ).signature_def
    self.assertIn("hashtable_assign", signatures)
    self.assertTrue([name for name in signatures if name.endswith("/raw_assign")])

  def test_step_as_version(self):
    base = self._train()
    exporter = saved_model_exporters.DistributedExporter(
      _model_fn, self.model_dir, base, global_step_as_timestamp=True
    )

    exported = exporter.export_saved_model(_receiver_fn, global_step=1)
    again = exporter.export_saved_model(_receiver_fn, global_step=1)

    self.assertEqual(os.path.basename(exported["entry"]), b"1")
    self.assertEqual(again, {})

  def test_include_graphs(self):
    base = self._train()
    exporter = saved_model_exporters.DistributedExporter(
      _model_fn, self.model_dir, base, include_graphs=["ps_0"]
    )

    self.assertEqual(exporter.export_saved_model(_receiver_fn), {})

  def test_warmup_file(self):
    base = self._train()
    warmup_file = os.path.join(utils.get_test_tmp_dir(), "warmup")
    with open(warmup_file, "w") as f:
      f.write("requests")
    exporter = saved_model_exporters.StandaloneExporter(
      _model_fn, self.model_dir, base, warmup_file=warmup_file
    )

    folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    path = os.path.join(folder, "assets.extra", "tf_serving_warmup_requests")
    with open(path) as f:
      self.assertEqual(f.read(), "requests")

  def test_warmup_requests_are_made_if_there_are_none(self):
    base = self._train()

    def receiver_fn():
      instances = tf.compat.v1.placeholder(tf.string, [None])
      features = parsers.parse_instances(instances, fidv1_features=[0])
      return graph_estimator.ServingInputReceiver(
        {"ids": features["slot_0"].flat_values}, {"samples": instances}
      )

    warmup_file = os.path.join(utils.get_test_tmp_dir(), "none")
    for exporter_class in (
      saved_model_exporters.StandaloneExporter,
      saved_model_exporters.DistributedExporter,
    ):
      exporter = exporter_class(_model_fn, self.model_dir, base, warmup_file=warmup_file)
      exported = exporter.export_saved_model(receiver_fn)

      folder = tf.compat.as_str(exported["entry"] if isinstance(exported, dict) else exported)
      path = os.path.join(folder, "assets.extra", "tf_serving_warmup_requests")
      (record,) = tf.compat.v1.io.tf_record_iterator(path)
      request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
      self.assertEqual(request.model_spec.signature_name, "serving_default")
      samples = tf.make_ndarray(request.inputs["samples"])
      self.assertEqual(os.listdir(os.path.dirname(path)), [os.path.basename(path)])
      self.assertFalse(os.path.exists(warmup_file))
      if not isinstance(exported, dict):
        outputs = self._call(exported, "serving_default", {"samples": samples})
        fids = [f for s in samples for f in proto_parser_pb2.Instance.FromString(s).fid]
        self.assertNotEmpty(fids)
        self.assertEqual(outputs["table"].shape, (len(fids), 2))

  def test_no_warmup_for_a_model_that_reads_no_samples(self):
    base = self._train()
    exporter = saved_model_exporters.StandaloneExporter(
      _model_fn, self.model_dir, base, warmup_file=os.path.join(utils.get_test_tmp_dir(), "none")
    )

    folder = tf.compat.as_str(exporter.export_saved_model(_receiver_fn))

    self.assertFalse(os.path.exists(os.path.join(folder, "assets.extra")))

  def test_missing_variable(self):
    base = self._train()

    def model_fn(features, mode, config):
      tf.compat.v1.get_variable("other", initializer=1.0)
      return _model_fn(features, mode, config)

    exporter = saved_model_exporters.StandaloneExporter(model_fn, self.model_dir, base)
    with self.assertRaisesRegex(ValueError, r"lacks the variables \['other'\]"):
      exporter.export_saved_model(_receiver_fn)
    self.assertFalse(export_context.is_exporting())

  def test_no_checkpoint(self):
    exporter = saved_model_exporters.StandaloneExporter(_model_fn, "/nowhere", "/nowhere")
    with self.assertRaisesRegex(ValueError, "Couldn't find trained model at /nowhere"):
      exporter.export_saved_model(_receiver_fn)


class FrozenModelTest(tf.test.TestCase):
  def save(self, outputs):
    """Returns the folder of a model with these outputs of `x`, an unused input and a variable."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
      unused = tf.compat.v1.placeholder(tf.int64, [None], name="unused")
      weight = tf.compat.v1.get_variable("weight", initializer=3.0)
      results = outputs(x, weight)
      session.run(tf.compat.v1.global_variables_initializer())
      session.run(tf.compat.v1.assign(weight, 4.0))
      signatures = {
        name: tf.compat.v1.saved_model.predict_signature_def(
          {"x": x, "unused": unused}, {"y": result}
        )
        for name, result in results.items()
      }
      folder = os.path.join(self.get_temp_dir(), self.id())
      frozen_model.save_frozen(session, folder, signatures)
    return folder

  def test_variables_are_constants(self):
    folder = self.save(lambda x, weight: {"a": x * weight, "b": x + weight})
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
      model = tf.compat.v1.saved_model.load(session, ["serve"], folder)
      results = [model.signature_def[name].outputs["y"].name for name in ("a", "b")]
      x = model.signature_def["a"].inputs["x"].name
      self.assertAllClose(session.run(results, {x: [1.0, 2.0]}), [[4.0, 8.0], [5.0, 6.0]])
      self.assertEqual(
        {op.type for op in graph.get_operations()} & {"VarHandleOp", "VariableV2"}, set()
      )
      # A tensor that no output needs is an input all the same.
      self.assertEqual(graph.get_tensor_by_name("unused:0").dtype, tf.int64)

  def test_a_model_is_not_written_over_another(self):
    self.save(lambda x, weight: {"a": x * weight})
    with self.assertRaisesRegex(AssertionError, "already exists"):
      self.save(lambda x, weight: {"a": x})


class ExportFilesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.source, self.target = (self.create_tempdir().full_path for _ in range(2))

  def write(self, name, content="old"):
    path = pathlib.Path(self.source, name)
    path.write_text(content)
    return str(path)

  def test_links(self):
    self.assertTrue(export_files.can_link(self.source, os.path.join(self.target, "new", "folder")))
    self.assertEqual(os.listdir(os.path.join(self.target, "new", "folder")), [])
    self.assertEqual(os.listdir(self.source), [])
    self.assertFalse(export_files.can_link("hdfs://a/b", self.target))
    self.assertFalse(export_files.can_link(self.source, "hdfs://a/b"))
    self.assertFalse(export_files.can_link(os.path.join(self.source, "missing"), self.target))
    with mock.patch.object(os, "link", side_effect=OSError("other file system")):
      self.assertFalse(export_files.can_link(self.source, self.target))
    self.assertEqual(os.listdir(self.target), ["new"])

  def test_a_linked_file_is_the_same_and_a_copy_is_not(self):
    linked, copied = self.write("linked"), self.write("copied")
    folder = os.path.join(self.target, "assets")
    export_files.put_files([linked, copied], {linked}, folder)
    same = [
      os.path.samefile(path, os.path.join(folder, os.path.basename(path)))
      for path in (linked, copied)
    ]
    self.assertEqual(same, [True, False])
    self.write("copied", "new")
    self.assertEqual(pathlib.Path(folder, "copied").read_text(), "old")

  def test_a_copy_is_as_good_as_a_link(self):
    path = self.write("file")
    with mock.patch.object(os, "link", side_effect=OSError("other file system")):
      with self.assertLogs("absl", "WARNING") as logs:
        export_files.put_files([path], {path}, self.target)
    self.assertIn("other file system", str(logs.output))
    # The same when the name is taken, as by an export that was broken off.
    self.write("file", "newer")
    export_files.put_files([path], {path}, self.target)
    self.assertEqual(pathlib.Path(self.target, "file").read_text(), "newer")

  def test_no_files_make_no_folder(self):
    folder = os.path.join(self.target, "assets")
    export_files.put_files([], set(), folder)
    self.assertFalse(os.path.exists(folder))

  def test_a_file_that_is_gone(self):
    path = os.path.join(self.source, "gone")
    with self.assertRaises(tf.errors.NotFoundError):
      export_files.put_files([path], {path}, self.target)


if __name__ == "__main__":
  tf.test.main()
