"""What a server reads, without one: `json_tensors`, `tensors`, `text_config`, `version_scan`."""

from __future__ import annotations

import os
import pathlib
import tempfile
import threading
import unittest
from unittest import mock

import grpc
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.config.file_system_storage_path_source_pb2 import (
  FileSystemStoragePathSourceConfig,
)

from monolith.serving import (
  grpc_server,
  json_tensors,
  metrics,
  prediction,
  tensors,
  text_config,
  version_scan,
)
from monolith.serving.errors import ServingError
from monolith.serving.model_manager import ModelManager
from tests import free_ports

_Policy = FileSystemStoragePathSourceConfig.ServableVersionPolicy


class TensorsTest(unittest.TestCase):
  def make(self, dtype, shape, **fields):
    proto = tensor_pb2.TensorProto(dtype=dtype, **fields)
    for size in shape:
      proto.tensor_shape.dim.add(size=size)
    return proto

  def test_every_type_comes_back(self):
    for kind, dtype in tensors._DTYPES.items():
      values = [b"a", b""] if kind == types_pb2.DT_STRING else [1, 0]
      for array in (np.array([values, values], dtype), np.zeros([0, 3], dtype)):
        with self.subTest(kind=types_pb2.DataType.Name(kind), shape=array.shape):
          found = tensors.to_array("x", tensors.to_proto(array))
          self.assertEqual((found.dtype, found.shape), (array.dtype, array.shape))
          self.assertEqual(found.tolist(), array.tolist())
          np.testing.assert_array_equal(tf.make_ndarray(tensors.to_proto(array)), array)

  def test_a_value_may_stand_for_the_rest(self):
    found = tensors.to_array("x", self.make(types_pb2.DT_INT32, [4], int_val=[1, 2]))
    self.assertEqual(found.tolist(), [1, 2, 2, 2])
    found = tensors.to_array("x", self.make(types_pb2.DT_STRING, [2]))
    self.assertEqual(found.tolist(), [b"", b""])
    found = tensors.to_array("x", self.make(types_pb2.DT_FLOAT, [2, 0]))
    self.assertEqual(found.shape, (2, 0))

  def test_inputs_count_together(self):
    one = self.make(types_pb2.DT_FLOAT, [12 << 20], float_val=[1.0])
    tensors.check_total({str(i): one for i in range(5)})

    with self.assertRaisesRegex(ServingError, "input '5' and those before it take more than"):
      tensors.check_total({str(i): one for i in range(6)})

  def test_bytes_of_bools_are_bools(self):
    proto = self.make(types_pb2.DT_BOOL, [3], tensor_content=b"\x00\x01\x07")
    self.assertEqual(tensors.to_array("x", proto).tolist(), [False, True, True])

  def test_claims_are_checked_before_memory_is_taken(self):
    integer, half, string = types_pb2.DT_INT8, types_pb2.DT_HALF, types_pb2.DT_STRING
    for proto, message in (
      (self.make(integer, [1 << 40]), "repeated to fill at most"),
      (self.make(integer, [1 << 31, 1 << 31, 4]), "too large"),
      (self.make(integer, [0, 1 << 62]), "too large"),
      (self.make(integer, [-1]), "shape"),
      (self.make(integer, [1] * 33), "33 dimensions"),
      (self.make(integer, [1], int_val=[1, 2]), "2 values, want 1"),
      (self.make(integer, [1], int_val=[128]), "outside of int8"),
      (self.make(integer, [2], tensor_content=b"abc"), "3 bytes of tensor_content, want 2"),
      (self.make(half, [1], half_val=[65536]), "not of 16 bits"),
      (self.make(half, [1], half_val=[-1]), "not of 16 bits"),
      (self.make(string, [1], tensor_content=b"a"), "want string_val"),
      (self.make(string, [1 << 22], string_val=[b"x"]), "repeated to fill at most"),
      (self.make(string, [1 << 13], string_val=[b"x" * 10_000]), "repeated to fill at most"),
      (self.make(types_pb2.DT_RESOURCE, [1]), "DT_RESOURCE, which cannot be sent"),
      (self.make(types_pb2.DT_INVALID, []), "DT_INVALID, which cannot be sent"),
    ):
      with self.subTest(message=message), self.assertRaisesRegex(ServingError, message):
        tensors.to_array("x", proto)
    unknown = tensor_pb2.TensorProto(dtype=integer)
    unknown.tensor_shape.unknown_rank = True
    with self.assertRaisesRegex(ServingError, "input 'x' is of unknown rank"):
      tensors.to_array("x", unknown)


class JsonTensorsTest(unittest.TestCase):
  def test_numbers_keep_their_exact_value(self):
    large = json_tensors._to_array("x", [[2**63 - 1], [-(2**63)]], tf.int64)
    self.assertEqual((large.dtype, large.tolist()), (np.int64, [[2**63 - 1], [-(2**63)]]))

    # 0.1 as a float is another double than 0.1; the text must not show that.
    self.assertEqual(json_tensors.to_json("y", np.float32([[0.1], [2]])), [[0.1], [2.0]])
    self.assertEqual(json_tensors.to_json("y", np.array(7, np.int64)), 7)

  def test_strings_and_bytes(self):
    array = json_tensors._to_array("x", ["ä", {"b64": "/wA="}], tf.string)
    self.assertEqual(array.tolist(), ["ä".encode(), b"\xff\x00"])

    # Bytes that are no text travel as base64, whatever the output is called.
    self.assertEqual(json_tensors.to_json("y", array), ["ä", {"b64": "/wA="}])
    self.assertEqual(json_tensors.to_json("y_bytes", array[:1]), [{"b64": "w6Q="}])

  def test_values_that_do_not_fit_are_named(self):
    for value, dtype, message in (
      ([1.5], tf.int64, "input 'x' has 1.5, want int64"),
      ([True], tf.int32, "input 'x' has True, want int32"),
      ([None], tf.float32, "input 'x' has None, want float32"),
      ([1], tf.bool, "input 'x' has 1, want bool"),
      ([2**31], tf.int32, "outside of int32"),
      ([[1], [2, 3]], tf.int64, "input 'x' is ragged"),
      ([3], tf.string, "input 'x' has 3, want a string"),
      ([{"b64": "?"}], tf.string, "b64 that is not base64"),
      (["\ud800"], tf.string, "half of a character"),
      ([1], tf.complex64, "complex64, which JSON cannot hold"),
    ):
      with self.assertRaisesRegex(ServingError, message):
        json_tensors._to_array("x", value, dtype)

  def test_bodies_that_are_no_requests(self):
    for body, message in (
      (b"{", "the body is not JSON"),
      (b"[" * 100000, "the body is not JSON"),
      (b"[]", "the body is not a JSON object"),
      (b'{"inputs": 1, "instances": [1]}', "want either instances or inputs"),
      (b'{"inputs": 1, "other": 2}', "unknown keys"),
    ):
      with self.assertRaisesRegex(ServingError, message):
        json_tensors._parse(body)
    with self.assertRaisesRegex(ServingError, "signature_name is 5, want a string"):
      json_tensors.get_signature_name({"signature_name": 5})


class GrpcServerTest(unittest.TestCase):
  def test_a_message_of_a_stream_that_cannot_be_read_does_not_keep_it_from_stopping(self):
    manager = ModelManager(mock.Mock())
    self.addCleanup(manager.close)
    service = grpc_server.Service(manager, metrics.Metrics(manager), prediction.run_directly)
    port = free_ports.get_free_port()
    server = grpc_server.GrpcServer(service, f"127.0.0.1:{port}", 2)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
      ask = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
      with self.assertRaises(grpc.RpcError):
        list(ask(iter([b"\x22\xff\xff\xff\x7f"]), timeout=60))
    stopping = threading.Thread(target=server.stop, args=(0.1,), daemon=True)

    stopping.start()
    stopping.join(60)

    self.assertFalse(stopping.is_alive())


class FilesTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))

  def test_batching_parameters(self):
    path = self._dir / "batching.txt"
    path.write_text("max_batch_size { value: 64 }\nallowed_batch_sizes: [8, 64]\n")

    read = text_config.read("BatchingParameters", str(path))

    self.assertEqual(read.max_batch_size.value, 64)
    self.assertEqual(list(read.allowed_batch_sizes), [8, 64])
    self.assertFalse(read.HasField("num_batch_threads"))

  def test_files_that_cannot_be_read_are_named(self):
    path = self._dir / "ssl.txt"
    with self.assertRaisesRegex(ServingError, f"cannot read the SSLConfig of {path}"):
      text_config.read("SSLConfig", str(path))
    for content in (b"unknown_field: 1", b'server_key: "a', b"\xff\xfe"):
      path.write_bytes(content)
      with self.assertRaisesRegex(ServingError, f"cannot read the SSLConfig of {path}"):
        text_config.read("SSLConfig", str(path))

  def test_versions_are_numbered_folders(self):
    for name in ("1", "20", "003", "tmp", "4x", "1" * 19):
      (self._dir / name).mkdir()
    (self._dir / "5").touch()

    found = version_scan.list_versions(str(self._dir))

    self.assertEqual(found, {n: str(self._dir / s) for n, s in ((1, "1"), (20, "20"), (3, "003"))})
    self.assertEqual(version_scan.list_versions(str(self._dir / "missing")), {})

  def test_policies(self):
    available = {1: "a", 3: "c", 20: "t"}
    latest, specific, every = _Policy(), _Policy(), _Policy()
    latest.latest.num_versions = 2
    specific.specific.versions.extend([3, 4])
    every.all.SetInParent()

    self.assertEqual(version_scan.select_versions(_Policy(), available), {20: "t"})
    self.assertEqual(version_scan.select_versions(latest, available), {3: "c", 20: "t"})
    self.assertEqual(version_scan.select_versions(specific, available), {3: "c"})
    self.assertEqual(version_scan.select_versions(every, available), available)

  def test_fingerprint_changes_when_a_graph_is_completed(self):
    empty = version_scan.fingerprint(str(self._dir))
    (self._dir / "saved_model.pb").write_bytes(b"half")
    half = version_scan.fingerprint(str(self._dir))
    (self._dir / "saved_model.pb").write_bytes(b"half and half")

    self.assertEqual(empty, ())
    self.assertNotEqual(half, empty)
    self.assertNotEqual(version_scan.fingerprint(str(self._dir)), half)


if __name__ == "__main__":
  unittest.main()
