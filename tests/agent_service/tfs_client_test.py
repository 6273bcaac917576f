"""The client of a server, against one that adds up what it gets."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import unittest
from concurrent import futures

import grpc
import tensorflow as tf
from tensorflow_serving.apis import (
  get_model_metadata_pb2,
  model_service_pb2_grpc,
  predict_pb2,
  prediction_service_pb2_grpc,
)

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith.agent_service import serving_protos, tfs_client
from monolith.agent_service.mocked_tfserving import FakeTFServing


class _Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):
  def __init__(self):
    self.batches = []

  def Predict(self, request, context):  # noqa: N802
    if request.model_spec.name != "m":
      context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model_spec.name}")
    ((name, proto),) = request.inputs.items()
    self.batches.append((name, tf.make_ndarray(proto).tolist()))
    response = predict_pb2.PredictResponse()
    response.outputs["rows"].CopyFrom(tf.make_tensor_proto(len(self.batches[-1][1])))
    return response

  def GetModelMetadata(self, request, context):  # noqa: N802
    signatures = get_model_metadata_pb2.SignatureDefMap()
    signatures.signature_def["serving_default"].inputs["instances"].name = "x:0"
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.metadata["signature_def"].Pack(signatures)
    return response


class TfsClientTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.predictions = _Prediction()
    cls.models = FakeTFServing("m", "", port=0)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(cls.predictions, server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(cls.models, server)
    cls.port = server.add_insecure_port("localhost:0")
    server.start()
    cls.addClassCleanup(lambda: server.stop(None).wait())

  def setUp(self):
    self.predictions.batches.clear()
    self.rows = [
      proto_parser_pb2.Instance(fid=[i], label=[1]).SerializeToString() for i in range(1, 4)
    ]

  def path(self, name, data):
    path = os.path.join(os.environ["TEST_TMPDIR"], name)
    with open(path, "wb") as file:
      file.write(data)
    return path

  def records(self, messages, header=b""):
    return b"".join(header + struct.pack("<Q", len(data)) + data for data in messages)

  def call(self, cmd_type, *words, model_name="m"):
    out, errors = io.StringIO(), io.StringIO()
    target = ("--target", f"localhost:{self.port}", "--model_name", model_name)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
      status = tfs_client.main(["--cmd_type", cmd_type, *target, *words])
    return status, out.getvalue() if status == 0 else errors.getvalue()

  def test_status_meta_and_load(self):
    self.assertIn("version: 1", self.call("status")[1])
    self.assertIn("instances", self.call("meta")[1])
    config = serving_protos.gen_model_server_config([serving_protos.gen_model_config("n", "")])
    path = self.path("models.conf", str(config).encode())
    self.assertEqual(self.call("load", "--input_file", path)[0], 0)
    self.assertIn("version: 1", self.call("status", model_name="n")[1])

  def test_get(self):
    path = self.path("data", self.records(self.rows, bytes(8)))
    words = ("--input_file", path, "--batch_size", "2")
    status, text = self.call("get", *words, "--lagrangex_header")
    self.assertEqual(status, 0, text)
    self.assertEqual(self.predictions.batches, [("instances", self.rows[:2])])
    # A file with less than a batch is repeated.
    self.call("get", "--input_file", path, "--batch_size", "5", "--lagrangex_header")
    self.assertEqual(self.predictions.batches[1][1], [*self.rows, *self.rows[:2]])
    torn = self.path("torn", self.records(self.rows)[:-1])
    status, text = self.call("get", "--input_file", torn)
    self.assertEqual((status, "ends 1 bytes before" in text), (1, True))
    status, text = self.call("get", *words, "--lagrangex_header", model_name="x")
    self.assertEqual((status, "NOT_FOUND" in text), (1, True))
    status, text = self.call("get", "--input_file", path, "--signature_name", "y")
    self.assertIn("'y' is not one of ['serving_default']", text)

  def test_text_and_batches(self):
    text = self.path("text", b"fid: 7 label: 1")
    self.call("get", "--input_file", text, "--file_type", "pbtxt", "--batch_size", "1")
    ((_, (row,)),) = self.predictions.batches
    self.assertEqual(proto_parser_pb2.Instance.FromString(row).fid, [7])
    batch = example_pb2.ExampleBatch(batch_size=2)
    shared = batch.named_feature_list.add(name="user", type=example_pb2.SHARED)
    shared.feature.add().fid_v2_list.value.append(5)
    own = batch.named_feature_list.add(name="item")
    labels = batch.named_feature_list.add(name="__LABEL__")
    lists = batch.named_feature_list.add(name="clicks")
    for i in range(2):
      own.feature.add().fid_v1_list.value.append(i)
      labels.feature.add().float_list.value.append(i)
      lists.feature.add().fid_v2_lists.list.add().value.extend([i, i])
    path = self.path("batch", self.records([batch.SerializeToString()]))
    self.call("get", "--input_file", path, "--input_type", "example_batch")
    self.assertEqual(self.predictions.batches[1][1], [batch.SerializeToString()])
    self.call(
      "get", "--input_file", path, "--input_type", "example_batch_to_instance", "--batch_size", "2"
    )
    second = proto_parser_pb2.Instance.FromString(self.predictions.batches[2][1][1])
    self.assertEqual((list(second.fid), list(second.label)), ([1], [1.0]))
    features = {feature.name: feature for feature in second.feature}
    self.assertEqual(features["user"].fid, [5])
    self.assertEqual(features["clicks"].fid_list[0].value, [1, 1])
    batch.batch_size = 3
    with self.assertRaisesRegex(ValueError, "'item' has 2 values for 3 rows"):
      tfs_client.example_batch_to_instances(batch)

  def test_profile(self):
    folder = os.path.join(os.environ["TEST_TMPDIR"], "files")
    os.mkdir(folder)
    for i in range(2):
      self.path(f"files/{i}", self.records(self.rows))
    status, text = self.call(
      "profile", "--profile_data_dir", folder, "--batch_size", "3", "--parallel_num", "2",
      "--profile_duration", "2",
    )  # fmt: skip
    self.assertEqual(status, 0, text)
    self.assertRegex(text, r"count \d+, errors 0, mean [\d.]+ ms, p99 [\d.]+ ms, QPS [\d.]+")
    self.assertGreater(len(self.predictions.batches), 1)
    self.assertEqual({len(rows) for _, rows in self.predictions.batches}, {3})


if __name__ == "__main__":
  unittest.main()
