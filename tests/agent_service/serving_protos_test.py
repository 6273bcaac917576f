"""Tests of `serving_protos`: messages of TensorFlow Serving, with and without TensorFlow."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys
from monolith.agent_service import serving_protos
serving_protos.load_without_tensorflow()
model = serving_protos.gen_model_config("m", "/models/m", "specific", [3, 4])
assert "tensorflow" not in sys.modules, "a package without content is left behind"
assert "tensorflow.python" not in sys.modules
assert list(model.model_version_policy.specific.versions) == [3, 4]

import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

request = predict_pb2.PredictRequest()
request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.5]))
assert tf.make_ndarray(request.inputs["x"]).tolist() == [1.5]
assert tf.constant([2]).numpy().tolist() == [2]
messages = sys.modules["tensorflow.core.framework.tensor_pb2"]
serving_protos.load_without_tensorflow()
assert sys.modules["tensorflow"] is tf
assert sys.modules["tensorflow.core.framework.tensor_pb2"] is messages
"""


class ServingProtosTest(unittest.TestCase):
  def test_messages_come_without_tensorflow_which_can_come_later(self):
    done = subprocess.run(
      [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
  unittest.main()
