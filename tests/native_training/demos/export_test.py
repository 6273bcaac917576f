"""The FFM model, trained on servers in this process, is exported in both ways and answers.

Covers `predictor` and `predictor_client`.
"""

import os
import shutil
import tempfile

import numpy as np
import tensorflow as tf
from absl import flags

from idl.matrix.proto import proto_parser_pb2
from monolith.native_training import cpu_training, model, utils
from monolith.native_training.demos import export as demo_export
from monolith.native_training.demos import predictor as demo_predictor
from monolith.native_training.demos import predictor_client as demo_predictor_client
from monolith.native_training.graph import export_context
from tests.serving import server_process

tf.compat.v1.disable_eager_execution()

_NUM_PS = 5


class DemoExportTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls._folder)
    params = model.TestFFMModel.params()
    params.name = "demo_export"
    params.train.per_replica_batch_size = 64
    cls._model_dir = os.path.join(cls._folder, "model")
    cpu_training.local_train(
      params, num_ps=_NUM_PS, model_dir=cls._model_dir, steps=10, save_checkpoints_steps=10
    )

  def test_standalone(self):
    base = os.path.join(self._folder, "standalone")
    mode = export_context.ExportMode.STANDALONE
    exported = demo_export.export_saved_model(self._model_dir, base, _NUM_PS, mode)

    self.assertEqual(os.path.dirname(exported.decode()), base)
    instance = proto_parser_pb2.Instance(fid=[(slot << 54) + 1 for slot in range(6)])
    with tf.Graph().as_default(), self.session(graph=tf.compat.v1.get_default_graph()) as sess:
      meta_graph = tf.compat.v1.saved_model.load(sess, ["serve"], exported.decode())
      signature = meta_graph.signature_def["serving_default"]
      self.assertEqual(list(signature.inputs), ["instances"])
      predictions = sess.run(
        signature.outputs["output"].name,
        {signature.inputs["instances"].name: [instance.SerializeToString()] * 3},
      )
    self.assertAllEqual(predictions.shape, [3])
    self.assertTrue(np.all((predictions > 0) & (predictions < 1)))

    # The folder of the versions will do.
    outputs = demo_predictor.predict(base, "serving_default", 5)
    self.assertAllEqual(outputs["output"].shape, [5])

    serving = server_process.ServerProcess(f"--model_base_path={base}")
    self.addCleanup(serving.stop)
    serving.wait_until_listening().wait_until_available("default")
    outputs = demo_predictor_client.predict(serving.address, "default", "serving_default", 7)
    self.assertAllEqual(outputs["output"].shape, [7])

  def test_distributed(self):
    base = os.path.join(self._folder, "distributed")
    mode = export_context.ExportMode.DISTRIBUTED
    exported = demo_export.export_saved_model(self._model_dir, base, _NUM_PS, mode)

    names = ["entry", *(f"ps_{i}" for i in range(_NUM_PS))]
    self.assertCountEqual(exported, names)
    for name, path in exported.items():
      self.assertEqual(os.path.dirname(path.decode()), os.path.join(base, name))
      self.assertTrue(tf.compat.v1.saved_model.contains_saved_model(path.decode()))

  def test_other_modes_are_refused(self):
    with self.assertRaisesRegex(ValueError, "Invalid export_mode: .*NONE"):
      demo_export.export_saved_model(
        self._model_dir, utils.get_test_tmp_dir(), _NUM_PS, export_context.ExportMode.NONE
      )

  def test_flags(self):
    self.assertContainsSubset(["num_ps", "model_dir", "export_base", "export_mode"], flags.FLAGS)


if __name__ == "__main__":
  tf.test.main()
