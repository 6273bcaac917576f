"""One model, three worlds: rows go from PyTorch to TensorFlow and NumPy and back, bit-equal.

And on to the model server.
"""

import os
import pathlib
import unittest

try:
  import torch
except ImportError:
  raise unittest.SkipTest("needs PyTorch") from None

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

import monolith
import monolith.torch as mt
from monolith import table as tables
from tests.serving import server_process


class _Vectors(tf.Module):
  """A model for the server: it answers with the vectors of ids."""

  def __init__(self, table):
    super().__init__()
    self.table = table

  @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
  def look_up(self, ids):
    return {"vectors": self.table.lookup(ids)}


class WorldsTest(unittest.TestCase):
  def test_training_goes_on_where_another_framework_has_stopped(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    rng = np.random.default_rng(5)
    ids = rng.integers(-(2**63), 2**63 - 1, 3000)
    gradients = rng.normal(size=[4, 3000, 8]).astype(np.float32)
    in_torch = mt.Embedding(8, "adagrad", learning_rate=0.1)
    in_tensorflow = monolith.HashTable(8, "adagrad", learning_rate=0.1)
    in_numpy = tables.HashTable(8, "adagrad", learning_rate=0.1)

    def step_torch(batch):
      (in_torch(torch.from_numpy(ids)) * torch.from_numpy(batch)).sum().backward()

    def rows():
      with torch.no_grad():
        return in_torch(torch.from_numpy(ids)).numpy()

    step_torch(gradients[0])
    in_torch.save(folder / "a")
    in_tensorflow.load(folder / "a")
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())

    # The same step in both: the state of the optimizer came along.
    in_tensorflow.update(ids, tf.constant(gradients[1]))
    step_torch(gradients[1])
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())

    in_tensorflow.update(ids, tf.constant(gradients[2]))
    in_tensorflow.save(folder / "b")
    in_torch.load(folder / "b")
    in_numpy.load(folder / "b")
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())
    step_torch(gradients[3])
    in_tensorflow.update(ids, tf.constant(gradients[3]))
    in_numpy.update(ids, gradients[3])
    np.testing.assert_array_equal(in_tensorflow.lookup(ids).numpy(), rows())
    np.testing.assert_array_equal(in_numpy.lookup(ids), rows())

  def test_what_one_has_trained_is_served_and_goes_on_in_the_other(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    program = server_process.command()  # skips where there is none
    rng = np.random.default_rng(6)
    ids = rng.integers(-(2**63), 2**63 - 1, 2000)
    gradients = rng.normal(size=[2, 2000, 8]).astype(np.float32)
    in_torch = mt.Embedding(8, "adam")
    in_tensorflow = monolith.HashTable(8, "adam")

    def rows_in_torch():
      with torch.no_grad():
        return in_torch(torch.from_numpy(ids)).numpy()

    expected = {}
    (in_torch(torch.from_numpy(ids)) * torch.from_numpy(gradients[0])).sum().backward()
    in_torch.save(folder / "of_torch")
    in_tensorflow.load(folder / "of_torch")
    tf.saved_model.save(_Vectors(in_tensorflow), str(folder / "exports/of_torch/1"))
    expected["of_torch"] = rows_in_torch()

    in_tensorflow.update(ids, gradients[1])
    in_tensorflow.save(folder / "of_tensorflow")
    in_torch.load(folder / "of_tensorflow")
    tf.saved_model.save(_Vectors(in_tensorflow), str(folder / "exports/of_tensorflow/1"))
    expected["of_tensorflow"] = rows_in_torch()

    config = folder / "models.config"
    models = "".join(
      f'config {{ name: "{name}" base_path: "{folder}/exports/{name}" '
      'model_platform: "tensorflow" } '
      for name in expected
    )
    config.write_text(f"model_config_list {{ {models} }}")
    flag = f"--model_config_file={config}"
    with server_process.ServerProcess(flag, program=program) as server:
      server.wait_until_listening()
      for name, rows in expected.items():
        server.wait_until_available(name)
        request = predict_pb2.PredictRequest()
        request.model_spec.name = name
        request.inputs["ids"].CopyFrom(tf.make_tensor_proto(ids))
        answer = server.prediction.Predict(request, 60)
        served = tf.make_ndarray(answer.outputs["vectors"])
        np.testing.assert_array_equal(served, rows)
    self.assertTrue((expected["of_torch"] != expected["of_tensorflow"]).any())


if __name__ == "__main__":
  unittest.main()
