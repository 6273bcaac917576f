"""A request names a signature of the model, or leaves the name out for `serving_default`."""

import tempfile
import unittest

import grpc
import numpy as np
import tensorflow as tf

from tests.serving import saved_models, server_process


class _Doubles(tf.Module):
  @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
  def double(self, x):
    return {"y": 2 * x}


class SignaturesTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    model = _Doubles()
    # As TensorFlow 2 saves, with a signature of the loader's own, `__saved_model_init_op`.
    tf.saved_model.save(model, f"{folder.name}/1", signatures={"serving_default": model.double})
    cls.server = server_process.ServerProcess("--model_name=m", f"--model_base_path={folder.name}")
    cls.addClassCleanup(cls.server.stop)
    cls.server.wait_until_listening().wait_until_available("m")

  def _ask(self, signature):
    request = saved_models.make_request("m", signature, x=np.float32([1, 2]))
    return self.server.prediction.Predict(request, 60)

  def test_no_name_is_that_of_the_default(self):
    for signature in ("", "serving_default", ""):
      response = self._ask(signature)

      np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), [2, 4])
      self.assertEqual(response.model_spec.signature_name, "serving_default")

  def test_others_are_refused_with_those_of_the_model(self):
    for signature in ("other", "__saved_model_init_op"):
      with self.assertRaises(grpc.RpcError) as raised:
        self._ask(signature)

      self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
      self.assertEqual(
        raised.exception.details(),
        f"the model has no signature '{signature}', only ['serving_default']",
      )


if __name__ == "__main__":
  unittest.main()
