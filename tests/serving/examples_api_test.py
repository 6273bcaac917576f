"""Classify, Regress and MultiInference answer for models that were exported with them."""

import random
import shutil
import tempfile
import unittest

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
  classification_pb2,
  inference_pb2,
  regression_pb2,
)

from tests.serving import server_process

tf.compat.v1.disable_eager_execution()

_CLASSIFY, _REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"


def _write_model(folder):
  """Classes `low` and `high` with scores `1 - x` and `x`; the regression is `10 x + c`."""
  v1 = tf.compat.v1
  with tf.Graph().as_default(), v1.Session() as session:
    serialized = v1.placeholder(tf.string, [None], name="examples")
    parsed = tf.io.parse_example(
      serialized,
      {
        "x": tf.io.FixedLenFeature([], tf.float32),
        "c": tf.io.FixedLenFeature([], tf.int64, default_value=0),
      },
    )
    x = parsed["x"]
    scores = tf.stack([1 - x, x], 1)
    classes = tf.tile(tf.constant([["low", "high"]]), [tf.shape(x)[0], 1])
    value = 10 * x + tf.cast(parsed["c"], tf.float32)
    signatures = {
      "serving_default": v1.saved_model.classification_signature_def(serialized, classes, scores),
      "regress": v1.saved_model.regression_signature_def(serialized, value),
      "odd": v1.saved_model.regression_signature_def(serialized, tf.tile(value, [2])),
      "predict": v1.saved_model.predict_signature_def({"examples": serialized}, {"x": x}),
    }
    builder = v1.saved_model.Builder(f"{folder}/1")
    builder.add_meta_graph_and_variables(session, ["serve"], signature_def_map=signatures)
    builder.save()


def _field(number, content):
  """Returns a field of bytes of a message."""
  size = len(content)
  length = b""
  while size > 127:
    length += bytes([size & 127 | 128])
    size >>= 7
  return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _example(**values):
  example = tf.train.Example()
  for name, value in values.items():
    feature = example.features.feature[name]
    (feature.int64_list if isinstance(value, int) else feature.float_list).value.append(value)
  return example


def _mutate(rng, data):
  changed = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    place = rng.randrange(len(changed))
    changed[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
  return bytes(changed)


class ExamplesApiTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder)
    _write_model(folder)
    cls.server = server_process.ServerProcess(f"--model_base_path={folder}")
    cls.addClassCleanup(cls.server.stop)
    cls.server.wait_until_listening().wait_until_available("default")
    cls.stub = cls.server.prediction

  def _request(self, request_class, signature, *examples):
    request = request_class()
    request.model_spec.name = "default"
    request.model_spec.signature_name = signature
    request.input.example_list.examples.extend(examples)
    return request

  def _post(self, verb, document):
    return self.server.post(f"/v1/models/default:{verb}", document)

  def test_classify(self):
    request = self._request(
      classification_pb2.ClassificationRequest, "", _example(x=0.25), _example(x=1.0)
    )
    response = self.stub.Classify(request, timeout=60)
    self.assertEqual(response.model_spec.signature_name, "serving_default")
    self.assertEqual(response.model_spec.version.value, 1)
    found = [[(c.label, c.score) for c in row.classes] for row in response.result.classifications]
    self.assertEqual(found, [[("low", 0.75), ("high", 0.25)], [("low", 0.0), ("high", 1.0)]])

  def test_regress_with_a_context(self):
    request = regression_pb2.RegressionRequest()
    request.model_spec.name, request.model_spec.signature_name = "default", "regress"
    listed = request.input.example_list_with_context
    listed.context.CopyFrom(_example(c=3, x=0.5))
    listed.examples.extend([_example(x=2.0), _example(c=4)])
    response = self.stub.Regress(request, timeout=60)
    self.assertEqual([row.value for row in response.result.regressions], [23.0, 9.0])

  def test_multi_inference(self):
    request = inference_pb2.MultiInferenceRequest()
    for signature, method in (("serving_default", _CLASSIFY), ("regress", _REGRESS)):
      task = request.tasks.add(method_name=method)
      task.model_spec.name, task.model_spec.signature_name = "default", signature
    request.input.example_list.examples.append(_example(x=0.5))
    classified, regressed = self.stub.MultiInference(request, timeout=60).results
    self.assertEqual(classified.classification_result.classifications[0].classes[1].score, 0.5)
    self.assertEqual(regressed.regression_result.regressions[0].value, 5.0)

  def _tasks(self, *models, method=_CLASSIFY):
    request = inference_pb2.MultiInferenceRequest()
    request.input.example_list.examples.append(_example(x=0.5))
    for model in models:
      request.tasks.add(method_name=method).model_spec.name = model
    return request

  def test_messages_that_claim_much(self):
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Classify")
    spec = b"\x0a\x09\x0a\x07default"
    # Each example has a context of a megabyte.
    context = _example(x=0.5)
    context.features.feature["long"].bytes_list.value.append(bytes(1 << 20))
    repeated = classification_pb2.ClassificationRequest()
    repeated.model_spec.name = "default"
    listed = repeated.input.example_list_with_context
    listed.context.CopyFrom(context)
    listed.examples.extend([_example(x=1.0)] * 1000)
    for data, word in (
      (repeated.SerializeToString(), "more than"),
      (spec + _field(2, _field(1, _field(1, b"") * 100_001)), "100000 examples"),
      (spec + _field(2, _field(1, b"\x0a\x7f")), "not an Input"),
      (spec + _field(2, b"\x0a\xff\xff\xff\xff\x07x"), "not an Input"),
      (spec + _field(2, _field(1, _field(1, b"\xff"))), ""),
    ):
      with self.assertRaises(grpc.RpcError) as caught:
        call(data, timeout=60)
      self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
      self.assertIn(word, caught.exception.details())

  def test_random_bytes(self):
    rng = random.Random(7)
    request = self._request(classification_pb2.ClassificationRequest, "", _example(x=0.25))
    request.input.example_list_with_context.context.CopyFrom(_example(c=3))
    request.input.example_list_with_context.examples.extend([_example(x=0.5)] * 2)
    message = request.SerializeToString()
    body = b'{"context": {"c": 1}, "examples": [{"x": [0.5], "s": {"b64": "YQ=="}}, {"x": 1.5}]}'
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Classify")
    answered = set()
    for _ in range(300):
      answered.add(self._post("classify", _mutate(rng, body))[0])
      try:
        call(_mutate(rng, message), timeout=60)
      except grpc.RpcError as error:
        self.assertNotIn(
          error.code(), (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        )
    self.server.check_alive()
    self.assertLessEqual(answered, {200, 400, 501})
    self.assertIn(400, answered)

  def test_calls_are_counted(self):
    request = self._request(regression_pb2.RegressionRequest, "regress", _example(x=0.5))
    self.stub.Regress(request, timeout=60)
    text = self.server.http("/monitoring/prometheus/metrics")[1].decode()
    self.assertIn('{code="OK",method="Regress",model="default"}', text)

  def test_errors(self):
    classify = classification_pb2.ClassificationRequest
    regress = regression_pb2.RegressionRequest
    code = grpc.StatusCode
    for method, request, wanted in (
      (self.stub.Classify, self._request(classify, ""), code.INVALID_ARGUMENT),
      (
        self.stub.Classify,
        self._request(classify, "regress", _example(x=0.5)),
        code.INVALID_ARGUMENT,
      ),
      (
        self.stub.Classify,
        self._request(classify, "nothing", _example(x=0.5)),
        code.INVALID_ARGUMENT,
      ),
      (self.stub.Classify, self._request(classify, "", _example(c=1)), code.INVALID_ARGUMENT),
      (
        self.stub.Regress,
        self._request(regress, "odd", _example(x=0.5)),
        code.FAILED_PRECONDITION,
      ),
      (self.stub.Classify, classify(), code.NOT_FOUND),
      (self.stub.MultiInference, inference_pb2.MultiInferenceRequest(), code.INVALID_ARGUMENT),
      (self.stub.MultiInference, self._tasks("default", "other"), code.INVALID_ARGUMENT),
      (self.stub.MultiInference, self._tasks("default", method="odd"), code.UNIMPLEMENTED),
      # As many runs of a signature as a message has room for tasks.
      (self.stub.MultiInference, self._tasks("default", "default"), code.INVALID_ARGUMENT),
    ):
      with self.assertRaises(grpc.RpcError) as caught:
        method(request, timeout=60)
      self.assertEqual(caught.exception.code(), wanted, caught.exception.details())

  def test_rest(self):
    status, answer = self._post("classify", {"examples": [{"x": 0.25}]})
    self.assertEqual((status, answer), (200, {"results": [[["low", 0.75], ["high", 0.25]]]}))
    document = {"signature_name": "regress", "context": {"c": 1}, "examples": [{"x": 0.01}]}
    status, answer = self._post("regress", document)
    self.assertEqual(status, 200)
    self.assertEqual(np.float32(answer["results"][0]), np.float32(1.1))
    mixed = {"examples": [{"x": 1}], "context": {"c": [2], "none": []}, "signature_name": "regress"}
    self.assertEqual(self._post("regress", mixed)[0], 400)  # x is an integer here
    mixed["examples"] = [{"x": [0.5], "s": ["a", {"b64": "/wA="}]}, {"x": 2.5e-1, "c": 0}]
    self.assertEqual(self._post("regress", mixed), (200, {"results": [7, 2.5]}))
    for document in (
      {},
      [],
      b"[" * 1000,
      {"examples": {}},
      {"examples": [[]]},
      {"examples": [{"x": 0.5}], "context": []},
      {"examples": [{"x": 0.5}], "signature_name": 3},
      {"examples": [{"x": [[0.5]]}]},
      {"examples": [{"x": 1e300}]},
      {"examples": [{"x": 0.5, "s": {"b64": "?"}}]},
      {"examples": [{"x": 0.5, "s": {"b64": "YQ==", "c": 1}}]},
      {"examples": [{"x": 0.5, "s": {}}]},
      b'{"examples": [{"x": 0.5, "x": 0.5}]}',
      {"examples": []},
      {"examples": [3]},
      {"examples": [{"x": None}]},
      {"examples": [{"x": [1, "a"]}]},
      {"examples": [{"x": 0.5}], "colour": 1},
      {"examples": [{"x": 1 << 70}]},
      {"examples": [{"x": 0.5}], "signature_name": "regress"},
    ):
      status, answer = self._post("classify", document)
      self.assertEqual(status, 400, (document, answer))
      self.assertTrue(answer["error"])


if __name__ == "__main__":
  unittest.main()
