"""Tests a model server without Python: what clients can do to it, and what it does by itself.

Frames and bodies that no client would send, and calls of other servers without Python.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from concurrent import futures

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
  get_model_status_pb2,
  model_service_pb2_grpc,
  predict_pb2,
  prediction_service_pb2_grpc,
)

from monolith.agent_service import agent_service_pb2, agent_service_pb2_grpc
from monolith.native_training import embedding_combiners
from monolith.native_training.graph import export_context
from monolith.native_training.tables import pooling
from monolith.serving import model_server
from tests import free_ports
from tests.serving import saved_models
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

Code = grpc.StatusCode
_X = np.array([[0.1, 0.7], [-3.25, 1e-7]], np.float32)
_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
_WATCH = "/grpc.health.v1.Health/Watch"
# Takes as long as the file $HOLD is there to tell of one file, and makes $HELD meanwhile.
_SLOW_STAT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int stat(const char *path, struct stat *info) {
  int (*real)(const char *, struct stat *) = dlsym(RTLD_NEXT, "stat");
  if (strstr(path, "/broken/1/saved_model.pb") != NULL) {
    while (access(getenv("HOLD"), F_OK) == 0) {
      close(open(getenv("HELD"), O_CREAT | O_WRONLY, 0600));
      usleep(10000);
    }
  }
  return real(path, info);
}
"""


def setUpModule():
  try:
    model_server.find_binary()
  except FileNotFoundError as error:
    raise unittest.SkipTest(str(error)) from error


def write_pooling_model(folder: str) -> str:
  """Features a and b, which both signatures pool, and c and d, the latter made of pooled c."""

  def pool(values, splits):
    ids = tf.RaggedTensor.from_row_splits(tf.range(splits[-1]), splits, validate=False)
    combiners = {name: embedding_combiners.ReduceSum() for name in values}
    return pooling.create_embedding_slices(
      values, {name: ids for name in values}, combiners, {name: [2, 1] for name in values}
    )

  def signatures():
    v1 = tf.compat.v1
    inputs = {name: v1.placeholder(tf.float32, [None, 3], name) for name in "abc"}
    splits = v1.placeholder(tf.int64, [None], "splits")
    with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
      outputs = pool(inputs, splits)
      pooled_c = tf.concat([outputs["c:0_2"], outputs["c:2_3"]], 1)
      outputs |= pool({"d": pooled_c, "e": pooled_c * 2}, tf.constant([0, 1, 3], tf.int64))
    outputs = {name.replace(":", "_"): value for name, value in outputs.items()}
    some = {name: value for name, value in outputs.items() if name[0] in "ab"}
    few = {"a": inputs["a"], "b": inputs["b"], "splits": splits}
    return {"serving_default": ({**inputs, "splits": splits}, outputs), "some": (few, some)}

  return saved_models.write_signatures(folder, signatures)


def write_queue_model(folder: str) -> str:
  """Writes a model whose `wait` answers with what `fill` was asked with, before or after."""

  def signatures():
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, [2])
    queue = v1.FIFOQueue(100, [tf.float32], [[2]], shared_name="q")
    with tf.control_dependencies([queue.enqueue(x)]):
      filled = tf.identity(x)
    return {"fill": ({"x": x}, {"y": filled}), "wait": ({"x": x}, {"y": queue.dequeue() + x})}

  return saved_models.write_signatures(folder, signatures)


def make_request(model: str, x: np.ndarray = _X) -> predict_pb2.PredictRequest:
  request = predict_pb2.PredictRequest()
  request.model_spec.name = model
  request.inputs["x"].CopyFrom(tf.make_tensor_proto(x))
  return request


def field(number: int, data: bytes) -> bytes:
  """A field of bytes of a message."""
  return _varint(number << 3 | 2) + _varint(len(data)) + data


def ask(port: int, data: bytes, wanted: int = 1) -> bytes:
  """Returns what a server answers to a stream, up to the end of the stream."""
  answer = b""
  with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
    connection.sendall(data)
    while True:
      while len(answer) < 9 or len(answer) < 9 + int.from_bytes(answer[:3], "big"):
        received = connection.recv(65536)
        if not received:
          return b"closed"
        answer += received
      size = int.from_bytes(answer[:3], "big")
      kind, flags, stream = struct.unpack(">BBI", answer[3:9])
      payload, answer = answer[9 : 9 + size], answer[9 + size :]
      if stream == wanted and (kind == 3 or flags & 1):
        return payload


class Server:
  """A server process and its clients."""

  def __init__(self, *flags: str, port: int | None = None, environment: dict | None = None):
    self.port = port or free_ports.get_free_port()
    self.rest_port = free_ports.get_free_port()
    self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
    self.process = subprocess.Popen(
      [
        model_server.find_binary(),
        f"--port={self.port}",
        f"--rest_api_port={self.rest_port}",
        *flags,
      ],
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(environment or {})},
      stdout=self.log,
      stderr=subprocess.STDOUT,
    )
    self.channel = grpc.insecure_channel(
      f"127.0.0.1:{self.port}", options=[("grpc.enable_http_proxy", 0)]
    )
    self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
    self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

  def check_alive(self) -> None:
    assert self.process.poll() is None, pathlib.Path(self.log.name).read_text(errors="replace")

  def wait_until_available(self, model: str):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = model

    def available() -> bool:
      self.check_alive()
      try:
        states = self.models.GetModelStatus(request, timeout=5).model_version_status
      except grpc.RpcError:
        return False
      return any(s.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE for s in states)

    wait_until(available)
    return self

  def predict(self, model: str, **options) -> list[float]:
    return list(self.prediction.Predict(make_request(model), **options).outputs["y"].float_val)

  def post(self, path: str, body: bytes) -> tuple[int, dict]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
      with opener.open(f"http://127.0.0.1:{self.rest_port}{path}", body, timeout=60) as response:
        return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
      with error:
        return error.code, json.loads(error.read())

  def stop(self) -> int:
    self.channel.close()
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGTERM)
    status = self.process.wait(60)
    self.log.close()
    return status

  def kill(self) -> None:
    self.process.kill()
    self.process.wait()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
  return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
  """A header that is in no table."""

  def text(data: bytes) -> bytes:
    return (
      bytes([len(data)]) + data if len(data) < 127 else b"\x7f" + _varint(len(data) - 127) + data
    )

  return b"\x00" + text(name) + text(value)


def _varint(value: int) -> bytes:
  encoded = bytearray()
  while value >= 0x80:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


def headers(stream: int = 1, flags: int = 4, **more: bytes) -> bytes:
  fields = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": _PREDICT.encode(),
    b":authority": b"a",
    b"te": b"trailers",
    b"content-type": b"application/grpc",
    **{name.replace("_", "-").encode(): value for name, value in more.items()},
  }
  return frame(1, flags, stream, b"".join(literal(*item) for item in fields.items()))


def message(data: bytes, length: int | None = None, compressed: int = 0) -> bytes:
  return struct.pack(">BI", compressed, len(data) if length is None else length) + data


class GraphsTest(unittest.TestCase):
  """Answers do not depend on what the server does to graphs, nor on where it runs them."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.pooling = write_pooling_model(f"{cls.folder}/pooling/1")
    write_queue_model(f"{cls.folder}/queue/1")
    saved_models.write_sum_model(f"{cls.folder}/m/1")
    names = ("pooling", "queue", "m")
    models = "".join(
      f'config {{ name: "{name}" base_path: "{cls.folder}/{name}" model_platform: "tensorflow" }}'
      for name in names
    )
    path = pathlib.Path(cls.folder, "models.config")
    path.write_text(f"model_config_list {{ {models} }}")
    cls.server = Server(
      f"--model_config_file={path}", "--num_load_threads=3", "--num_unload_threads=2"
    )
    cls.addClassCleanup(cls.server.stop)
    for name in names:
      cls.server.wait_until_available(name)

  def test_joined_pooling_gives_the_same_bits(self):
    rng = np.random.default_rng(5)
    splits = np.array([0, 1, 1, 7], np.int64)
    values = {name: rng.normal(size=[7, 3]).astype(np.float32) for name in "abc"}
    values["a"][0] = -0.0
    for signature, names in (("serving_default", "abc"), ("some", "ab")):
      inputs = {"splits": splits, **{name: values[name] for name in names}}
      wanted = saved_models.run_session(self.pooling, signature, **inputs)
      for _ in range(20):  # By then it runs where requests are read.
        request = saved_models.make_request("pooling", signature, **inputs)
        outputs = self.server.prediction.Predict(request, timeout=60).outputs
        for name, value in wanted.items():
          self.assertEqual(tf.make_ndarray(outputs[name]).tobytes(), value.tobytes(), name)
    log = pathlib.Path(self.server.log.name).read_text()
    # a and b, d and e; c is needed by one signature only, and by d.
    self.assertIn(f"{self.pooling}: 4 features are pooled together", log)

  def test_a_request_that_waits_does_not_keep_others_from_being_read(self):
    def ask(signature, value):
      request = saved_models.make_request("queue", signature, x=np.full(2, value, np.float32))
      return self.server.prediction.Predict.future(request, timeout=60)

    for i in range(30):
      ask("fill", i).result()
      self.assertEqual(list(ask("wait", 0).result().outputs["y"].float_val), [i, i])
    waiting = ask("wait", 1)
    self.assertRaises(grpc.FutureTimeoutError, waiting.result, 0.01)
    ask("fill", 5).result()
    self.assertEqual(list(waiting.result().outputs["y"].float_val), [6, 6])

  def test_many_requests_at_once_get_their_own_answers(self):
    def ask(i):
      request = make_request("m", np.array([[i, 0.5]], np.float32))
      return self.server.prediction.Predict(request, timeout=60).outputs["y"].float_val[0]

    with futures.ThreadPoolExecutor(16) as pool:
      self.assertEqual(list(pool.map(ask, range(400))), [i + 0.5 for i in range(400)])


class HostileClientTest(unittest.TestCase):
  """One server; after every test it answers as before."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    saved_models.write_sum_model(f"{cls.folder}/m/1")
    cls.server = Server("--model_name=m", f"--model_base_path={cls.folder}/m")
    cls.addClassCleanup(cls.server.stop)
    cls.server.wait_until_available("m")
    cls.request = make_request("m").SerializeToString()

  def tearDown(self):
    self.server.check_alive()
    np.testing.assert_array_equal(
      np.array(self.server.predict("m", timeout=60), np.float32), _X.sum(1)
    )

  def _send(self, data: bytes, port: int | None = None) -> bytes:
    """Returns all that the server answers until it, or this side, has nothing more to say."""
    answer = b""
    address = ("127.0.0.1", port or self.server.port)
    with socket.create_connection(address, timeout=60) as connection:
      try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while received := connection.recv(65536):
          answer += received
      except OSError:
        pass  # closed on us, which is an answer too
    return answer

  def _ask(self, data: bytes) -> bytes:
    return ask(self.server.port, data)

  def test_a_call_by_hand_is_answered(self):
    data = PREFACE + headers() + frame(0, 1, 1, message(self.request))
    self.assertIn(b"0", self._ask(data))

  def test_a_compressed_call_by_hand(self):
    whole = gzip.compress(self.request)
    for data, status in ((whole, b"0"), (whole[:-5], b"13"), (whole[:20], b"13"), (b"", b"13")):
      body = frame(0, 1, 1, message(data, compressed=1))
      answer = self._ask(PREFACE + headers(grpc_encoding=b"gzip") + body)
      self.assertIn(bytes([len(status)]) + status, answer)

  def test_calls_that_break_the_rules_of_grpc_get_a_status(self):
    for name, data in {
      "no message": headers() + frame(0, 1, 1),
      "no body": headers(flags=5),
      "torn prefix": headers() + frame(0, 1, 1, b"\0\0"),
      "torn message": headers() + frame(0, 1, 1, message(b"x", length=10)),
      "two messages": headers() + frame(0, 1, 1, message(b"") * 2),
      "too long": headers() + frame(0, 0, 1, message(b"", length=0xFFFFFFFF)),
      "compressed": headers(grpc_encoding=b"gzip") + frame(0, 1, 1, message(b"x", compressed=1)),
      "compressed, cut off": headers(grpc_encoding=b"gzip")
      + frame(0, 1, 1, message(gzip.compress(self.request)[:-5], compressed=1)),
      "compressed in another way": headers(grpc_encoding=b"snappy")
      + frame(0, 1, 1, message(b"x", compressed=1)),
      "compressed, it is not said how": headers() + frame(0, 1, 1, message(b"x", compressed=1)),
      "timeout": headers(grpc_timeout=b"soon") + frame(0, 1, 1, message(self.request)),
      "no time": headers(grpc_timeout=b"0n") + frame(0, 1, 1, message(self.request)),
      "another content": headers(content_type=b"text/html") + frame(0, 1, 1, b"x"),
      "long headers": frame(1, 0, 1, headers()[9:])
      + frame(9, 0, 1, literal(b"x", b"x" * 9000))
      + frame(9, 4, 1, literal(b"y", b"y" * 9000))
      + frame(0, 1, 1, message(self.request)),
    }.items():
      with self.subTest(name):
        self.assertTrue(self._ask(PREFACE + data))

  def test_streams_that_break_the_rules_of_grpc_get_a_status(self):
    def start(**more: bytes) -> bytes:
      return headers(**{":path": _REFLECTION.encode(), **more})

    list_services, large = b"\x3a\x00", b"\x22\x24tensorflow.serving.ModelServerConfig"
    # So much may be sent that only the server's own limit holds it back.
    window = frame(4, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1)) + frame(
      8, 0, 0, struct.pack(">I", 1 << 30)
    )
    for name, data, status in (
      ("nothing", frame(0, 1, 1), b"0"),
      ("two messages", frame(0, 1, 1, message(list_services) * 2), b"0"),
      ("torn message", frame(0, 1, 1, message(list_services) + b"\0\0"), b"13"),
      ("not a message", frame(0, 0, 1, message(list_services) + message(b"\x3a")), b"3"),
      ("compressed", frame(0, 0, 1, message(list_services, compressed=1)), b"12"),
      ("too long", frame(0, 0, 1, message(b"", length=0xFFFFFFFF)), b"8"),
      ("much to answer", window + frame(0, 0, 1, message(large) * 300) * 8, b"8"),
    ):
      with self.subTest(name):
        trailers = self._ask(PREFACE + start() + data)
        self.assertIn(bytes([len(status)]) + status, trailers)
    for more in ({"grpc_timeout": b"0n"}, {"grpc_timeout": b"soon"}, {"content_type": b"a/b"}):
      with self.subTest(str(more)):
        self.assertTrue(self._ask(PREFACE + start(**more) + frame(0, 1, 1, b"")))
    watch = headers(**{":path": _WATCH.encode()})
    for name, data, status in (
      ("watch of nothing", frame(0, 1, 1), b"13"),
      ("two watches in one", frame(0, 0, 1, message(b"") * 2), b"12"),
      ("watch of no message", frame(0, 1, 1, message(b"\x0a")), b"3"),
      # It would be kept as long as the client likes.
      ("watch of a long name", frame(0, 1, 1, message(field(1, b"a" * 2000))), b"8"),
    ):
      with self.subTest(name):
        self.assertIn(bytes([len(status)]) + status, self._ask(PREFACE + watch + data))
    # One that stays open does not keep the server from ending later.
    with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as connection:
      connection.sendall(PREFACE + start() + frame(0, 0, 1, message(list_services)))
      self.assertTrue(connection.recv(65536))

  def test_random_frames(self):
    rng = random.Random(11)
    good = PREFACE + headers() + frame(0, 1, 1, message(self.request))
    for _ in range(400):
      data = bytearray(good)
      for _ in range(rng.randint(1, 6)):
        place = rng.randrange(24, len(data))
        choice = rng.random()
        if choice < 0.6:
          data[place] = rng.randrange(256)
        elif choice < 0.8:
          del data[place : place + rng.randint(1, 9)]
        else:
          data[place:place] = frame(
            rng.randrange(12),
            rng.randrange(256),
            rng.randrange(6),
            rng.randbytes(rng.randrange(20)),
          )
      self._send(bytes(data))

  def test_floods_are_ended_or_answered(self):
    resets = b"".join(
      headers(stream) + frame(3, 0, stream, struct.pack(">I", 8)) for stream in range(1, 8001, 2)
    )
    self._send(PREFACE + resets)
    self._send(PREFACE + frame(6, 0, 0, bytes(8)) * 50_000)
    self._send(PREFACE + frame(4, 0, 0, struct.pack(">HI", 1, 4096)) * 50_000)
    self._send(PREFACE + b"".join(headers(stream) for stream in range(1, 6001, 2)))

  def test_answers_that_are_not_read(self):
    x = np.zeros([100_000, 2], np.float32)
    data = make_request("m", x).SerializeToString()
    body = b"".join(
      frame(0, 0, 1, message(data)[start : start + 16384])
      for start in range(0, len(data) + 5, 16384)
    )
    with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as connection:
      connection.sendall(PREFACE + headers() + body + frame(0, 1, 1))
      # Others are served meanwhile.
      self.server.predict("m", timeout=60)

  def test_random_bodies(self):
    rng = random.Random(12)
    good = b'{"signature_name": "serving_default", "instances": [{"x": [1, 2.5e0]}, {"x": [3, 4]}]}'
    self.assertEqual(
      self.server.post("/v1/models/m:predict", good), (200, {"predictions": [3.5, 7.0]})
    )
    for _ in range(400):
      data = bytearray(good)
      for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        if rng.random() < 0.7:
          data[place] = rng.randrange(256)
        else:
          data[place : place + rng.randint(1, 5)] = good[place : place + rng.randint(0, 9)]
      status, answer = self.server.post("/v1/models/m:predict", bytes(data))
      self.assertIn(status, (200, 400), answer)

  def test_random_http(self):
    rng = random.Random(13)
    good = (
      b"POST /v1/models/m:predict HTTP/1.1\r\nHost: a\r\nContent-Length: 24\r\n\r\n"
      b'{"instances": [[1, 2.5]]}'
    )
    self.assertIn(b" 400 ", self._send(good, self.server.rest_port))
    good = good.replace(b"24", b"25")
    self.assertIn(b"3.5", self._send(good, self.server.rest_port))
    for _ in range(200):
      data = bytearray(good)
      for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
      self._send(bytes(data), self.server.rest_port)

  def test_http_without_one_host_is_refused(self):
    def ask(version: bytes, *hosts: bytes) -> bytes:
      lines = b"".join(b"Host: %s\r\n" % host for host in hosts)
      request = b"GET /v1/models/m HTTP/%s\r\n%s\r\n" % (version, lines)
      return self._send(request, self.server.rest_port).split(b"\r\n")[0]

    self.assertEqual(ask(b"1.1", b"a"), b"HTTP/1.1 200 OK")
    self.assertEqual(ask(b"1.0"), b"HTTP/1.1 200 OK")
    self.assertEqual(ask(b"1.1"), b"HTTP/1.1 400 Bad Request")
    self.assertEqual(ask(b"1.1", b"a", b"b"), b"HTTP/1.1 400 Bad Request")

  def test_http_that_brings_nothing_is_refused(self):
    chunked = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for name, data in (
      ("empty lines", b"\r\n" * (1 << 19)),
      ("chunks of a byte", chunked + b"1\r\n \r\n" * (1 << 17) + b"0\r\n\r\n"),
    ):
      with self.subTest(name):
        self.assertIn(b" 400 ", self._send(data, self.server.rest_port))

  def test_requests_ahead_are_answered_in_turn(self):
    one = b"GET /v1/models/m HTTP/1.1\r\nHost: a\r\n\r\n"
    last = b"GET /v1/models/m HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    address = ("127.0.0.1", self.server.rest_port)
    count = 5_000
    with socket.create_connection(address, timeout=60) as connection:
      sender = threading.Thread(target=connection.sendall, args=(one * count + last,))
      sender.start()
      answer = b""
      while received := connection.recv(1 << 20):
        answer += received
      sender.join()
    self.assertEqual(answer.count(b"HTTP/1.1 200 OK"), count + 1)

  def test_many_connections_at_once(self):
    connections = [
      socket.create_connection(("127.0.0.1", port), timeout=60)
      for port in (self.server.port, self.server.rest_port)
      for _ in range(100)
    ]
    try:
      self.server.predict("m", timeout=60)
      for connection in connections:
        connection.sendall(b"P")
      self.server.predict("m", timeout=60)
    finally:
      for connection in connections:
        connection.close()

  def test_calls_at_once_get_their_own_answers(self):
    def ask(i: int) -> None:
      x = np.full([1 + i % 7, 2], i, np.float32)
      response = self.server.prediction.Predict(make_request("m", x), timeout=60)
      np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), x.sum(1))

    with futures.ThreadPoolExecutor(16) as pool:
      list(pool.map(ask, range(500)))


class MemoryTest(unittest.TestCase):
  """Clients can make a server reserve so much memory and no more: others find room."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    saved_models.write_sum_model(f"{cls.folder}/m/1")
    saved_models.write_string_model(f"{cls.folder}/text/1")
    v1 = tf.compat.v1

    def sum_rows():
      x = v1.placeholder(tf.float32, [None, None])
      return {"x": x}, {"y": tf.reduce_sum(x, 1)}

    def answer_much():
      x = v1.placeholder(tf.float32, [])
      return {"x": x}, {"y": tf.fill([200_000], x)}

    saved_models.write_model(f"{cls.folder}/wide/1", sum_rows)
    saved_models.write_model(f"{cls.folder}/much/1", answer_much)
    config = pathlib.Path(cls.folder, "models.config")
    config.write_text(
      "model_config_list {"
      + "".join(
        f'config {{ name: "{name}" base_path: "{cls.folder}/{name}" }}'
        for name in ("m", "text", "wide", "much", "nothing")
      )
      + "}"
    )
    cls.server = Server(f"--model_config_file={config}")
    cls.addClassCleanup(cls.server.stop)
    for name in ("m", "text", "wide", "much"):
      cls.server.wait_until_available(name)

  def setUp(self):
    # Begins to note the most that is resident from now on.
    pathlib.Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")
    self.before = self._mebibytes("VmRSS")

  def tearDown(self):
    self.server.check_alive()
    self.assertEqual(len(self.server.predict("m", timeout=60)), 2)

  def _mebibytes(self, name: str) -> float:
    status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

  def _grown(self) -> float:
    return self._mebibytes("VmHWM") - self.before

  def _repeat(self, count: int, text: bytes) -> grpc.Future:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "text"
    tensor = request.inputs["s"]
    tensor.dtype = tf.string.as_datatype_enum
    tensor.tensor_shape.dim.add(size=count)
    tensor.string_val.append(text)
    return self.server.prediction.Predict.future(request, timeout=60)

  def test_a_repeated_string_counts_as_often_as_it_is_there(self):
    self.assertEqual(self._repeat(3, b"abcd").result().outputs["n"].int_val[:], [4, 4, 4])
    for count, size in ((1 << 15, 10_000), (1 << 40, 1), (1 << 24, 0), ((1 << 62) + 5, 1 << 20)):
      with self.subTest(count=count, size=size):
        self.assertEqual(self._repeat(count, b"x" * size).code(), Code.INVALID_ARGUMENT)
    self.assertLess(self._grown(), 64)

  def _code_of(self, request: bytes) -> grpc.StatusCode:
    return self.server.channel.unary_unary(_PREDICT).future(request, timeout=60).code()

  def test_messages_that_take_more_than_they_say(self):
    tensor = tf.make_tensor_proto(_X).SerializeToString()
    spec = field(1, b"m")

    def request(spec: bytes, tensor: bytes) -> bytes:
      return field(1, spec) + field(2, field(1, b"x") + field(2, tensor))

    self.assertEqual(self._code_of(request(spec, tensor)), Code.OK)
    # Protobuf keeps fields that it does not know, here of two bytes each, and makes a message of
    # each tensor inside of a variant.
    unknown = b"\x0a\0" * (1 << 20)
    group = b"\xa3\6" + unknown * 3 + b"\xa4\6"
    # Protobuf reads to the end of what is torn, and keeps all of it until then. A handle that
    # claims a gigabyte swallows the five bytes that begin the next field.
    gigabyte = b"\x80\x80\x80\x80\x04"
    handle = field(14, b"\x32" + gigabyte + b"\x7a\x05")
    for name, data in (
      ("a group that does not end", spec + b"\xa3\6" + unknown * 4),
      ("a model that claims a gigabyte", b"\x0a" + gigabyte + b"\x7a\0" * (4 << 20)),
      ("a handle that claims one", request(spec, b"\x08\1\x12\0" + handle + field(4, unknown * 4))),
      ("unknown fields", request(spec, tensor + unknown * 5)),
      ("a group", request(spec, tensor + group)),
      ("tensors in a variant", request(spec, tensor + field(15, b"\x1a\0" * (1 << 20)))),
      ("unknown fields of shapes", request(spec, tensor + field(2, b"\x22\0" * 30_000) * 70)),
      ("unknown fields of the model", request(spec + b"\x7a\0" * (2 << 20), tensor)),
      ("a group of the model", request(spec + group, tensor)),
    ):
      with self.subTest(name):
        self.assertEqual(self._code_of(data), Code.INVALID_ARGUMENT)
    self.assertLess(self._grown(), 64)

  def test_rows_of_a_shape_without_elements_count(self):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "wide"
    request.inputs["x"].dtype = tf.float32.as_datatype_enum
    rows = request.inputs["x"].tensor_shape.dim.add(size=3)
    request.inputs["x"].tensor_shape.dim.add(size=0)
    response = self.server.prediction.Predict(request, timeout=60)
    self.assertEqual(tf.make_ndarray(response.outputs["y"]).tolist(), [0, 0, 0])

    for rows.size in (1 << 27, 1 << 40):
      self.assertEqual(self._code_of(request.SerializeToString()), Code.INVALID_ARGUMENT)
    self.assertLess(self._grown(), 64)

  def test_long_headers_of_calls_that_do_not_begin_count(self):
    connections = []
    calls = b"".join(
      headers(stream, **{":path": b"/" + b"a" * 15_000}) for stream in range(1, 1801, 2)
    )
    try:
      for _ in range(60):
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        connections.append(connection)
        connection.sendall(PREFACE + calls)
      self.server.predict("m", timeout=60)
      grown = self._grown()
    finally:
      for connection in connections:
        connection.close()
    self.assertLess(grown, 700)

  def test_answers_to_many_streams_that_are_not_read(self):
    describe = message(b"\x22\x24tensorflow.serving.ModelServerConfig")
    closed = frame(4, 0, 0, struct.pack(">HI", 4, 0))
    calls = b"".join(
      headers(stream, **{":path": _REFLECTION.encode()}) + frame(0, 0, stream, describe * 30)
      for stream in range(1, 400, 2)
    )

    ask(self.server.port, PREFACE + closed + calls, wanted=399)

    self.assertLess(self._grown(), 64)

  def test_bodies_that_are_refused_are_given_back(self):
    address = ("127.0.0.1", self.server.rest_port)
    piece = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    connections = []
    try:
      for _ in range(10):
        connection = socket.create_connection(address, timeout=60)
        connections.append(connection)
        connection.sendall(
          b"POST /v1/models/m:predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(60):
          connection.sendall(piece)
        # Stays open: a client that is cut off would not read why.
        connection.sendall(b"no size\r\n")
        self.assertEqual(connection.recv(12), b"HTTP/1.1 400")
      self.assertLess(self._grown(), 250)
    finally:
      for connection in connections:
        connection.close()

  def test_connections_keep_no_room_for_large_answers(self):
    clients = [http.client.HTTPConnection("127.0.0.1", self.server.rest_port) for _ in range(60)]
    try:
      for client in clients:
        client.request("POST", "/v1/models/much:predict", b'{"inputs": 1}')
        self.assertGreater(len(client.getresponse().read()), 800_000)
      self.assertLess(self._grown(), 64)
    finally:
      for client in clients:
        client.close()

  def test_requests_ahead_wait_until_answers_are_read(self):
    count = 80
    body = b'{"inputs": 1}'
    one = b"POST /v1/models/much:predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(body)
    last = one + b"Connection: close\r\n\r\n" + body
    url = f"http://127.0.0.1:{self.server.rest_port}/monitoring/prometheus/metrics"
    answered = 'code="OK",method="Predict",model="much"} '

    def count_answered() -> int:
      with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
      return int((text + answered + "0").split(answered)[1].split()[0])

    before = count_answered()
    with socket.socket() as connection:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      connection.settimeout(60)
      connection.connect(("127.0.0.1", self.server.rest_port))
      connection.sendall((one + b"\r\n" + body) * (count - 1) + last)
      # Until nothing more happens.
      seen = 0
      while seen != (seen := count_answered() - before) or seen == 0:
        time.sleep(1)
      grown = self._grown()
      answer = bytearray()
      while received := connection.recv(1 << 20):
        answer += received
    self.assertLess(seen, count // 2)
    self.assertLess(grown, 100)
    self.assertEqual(answer.count(b"HTTP/1.1 200 OK"), count)

  def test_requests_in_flight_share_what_there_is(self):
    asked = [self._repeat(7 << 20, b"") for _ in range(6)]

    codes = {call.code() for call in asked}

    self.assertIn(Code.RESOURCE_EXHAUSTED, codes)
    self.assertLessEqual(codes, {Code.OK, Code.RESOURCE_EXHAUSTED})
    self.assertLess(self._grown(), 1600)

  def test_bodies_that_do_not_end_leave_room_for_others(self):
    piece = b" " * (1 << 20)
    connections = []
    try:
      for _ in range(12):
        connection = socket.create_connection(("127.0.0.1", self.server.rest_port), timeout=60)
        connections.append(connection)
        connection.sendall(
          b"POST /v1/models/m:predict HTTP/1.1\r\nHost: a\r\nContent-Length: 60000000\r\n\r\n"
        )
        for _ in range(50):
          connection.sendall(piece)
      answers = []
      for connection in connections:
        connection.settimeout(1)
        try:
          answers.append(connection.recv(1000)[:12])
        except TimeoutError:
          answers.append(b"")
      # Others are answered, whichever way they come.
      self.server.predict("m", timeout=60)
      body = b'{"instances": [[1, 2]]}'
      self.assertEqual(self.server.post("/v1/models/m:predict", body)[0], 200)
      grown = self._grown()
    finally:
      for connection in connections:
        connection.close()
    self.assertIn(b"HTTP/1.1 429", answers)
    self.assertIn(b"", answers)
    self.assertLess(grown, 640)

  def test_json_takes_little_more_than_its_tensors(self):
    for name, body in (
      ("numbers", b'{"instances": [' + b"1," * (4 << 20) + b"1]}"),
      ("lists", b'{"instances": [' + b"[]," * (2 << 20) + b"[]]}"),
      ("objects", b'{"instances": [' + b"{}," * (2 << 20) + b"{}]}"),
      ("names", b'{"inputs": {' + b",".join(b'"%x": 1' % i for i in range(1 << 19)) + b"}}"),
      ("digits", b'{"instances": [1e' + b"0" * (8 << 20) + b"]}"),
      ("depth", b"[" * (8 << 20)),
    ):
      with self.subTest(name):
        self.assertEqual(self.server.post("/v1/models/m:predict", body)[0], 400)
    self.assertLess(self._grown(), 120)

  def test_a_large_body_takes_little_more_than_its_tensors(self):
    rows = (32 << 20) // len(b"[1,2],")
    body = b'{"instances": [' + b",".join([b"[1,2]"] * rows) + b"]}"
    start = time.monotonic()

    status, answer = self.server.post("/v1/models/m:predict", body)

    seconds, grown = time.monotonic() - start, self._grown()
    print(f"{len(body) >> 20} MiB of JSON: {seconds:.1f} s, {grown:.0f} MiB", flush=True)
    self.assertEqual((status, len(answer.get("predictions", answer))), (200, rows))
    self.assertEqual(set(answer["predictions"]), {3})
    # The body, its tensor of 43 MiB, and the answer as a tensor and as text.
    self.assertLess(grown, 200)

  def test_a_base_path_without_versions_is_logged(self):
    log = pathlib.Path(self.server.log.name)
    wait_until(lambda: f"cannot read base path {self.folder}/nothing" in log.read_text())
    os.mkdir(f"{self.folder}/nothing")
    wanted = f"no versions of model 'nothing' under base path {self.folder}/nothing"
    wait_until(lambda: wanted in log.read_text())


class WaitingTest(unittest.TestCase):
  """Requests that wait for a thread when nobody waits for their answers any more."""

  def _folder(self) -> str:
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    return folder.name

  def _start(self, write_model, *flags: str) -> Server:
    folder = self._folder()
    write_model(f"{folder}/m")
    server = Server("--model_name=m", f"--model_base_path={folder}/m", *flags)
    self.addCleanup(server.kill)
    return server.wait_until_available("m")

  def test_requests_whose_time_is_up_are_not_run(self):
    server = self._start(
      lambda base: write_queue_model(f"{base}/1"),
      "--rest_api_num_threads=1",
      "--rest_api_timeout_in_ms=1000",
    )
    body = b'{"signature_name": "wait", "inputs": [1, 2]}'
    # The first one holds the only thread, the others wait for it.
    with futures.ThreadPoolExecutor(4) as pool:
      asked = [pool.submit(server.post, "/v1/models/m:predict", body) for _ in range(4)]
      self.assertEqual({call.result()[0] for call in asked}, {504})

    server.prediction.Predict(saved_models.make_request("m", "fill", x=_X[0]), timeout=60)

    # One of the others would hold the thread for ever.
    wait_until(lambda: server.post("/v1/models/m:nothing", b"")[0] == 400)

  @unittest.skipUnless(
    shutil.which("cc") and platform.libc_ver() >= ("glibc", "2.33"), "stat cannot be replaced"
  )
  def test_a_file_system_that_takes_its_time_holds_up_no_request(self):
    folder = self._folder()
    hold, held = f"{folder}/hold", f"{folder}/held"
    pathlib.Path(f"{folder}/stat.c").write_text(_SLOW_STAT)
    command = ["cc", "-shared", "-fPIC", "-o", f"{folder}/stat.so", f"{folder}/stat.c", "-ldl"]
    subprocess.run(command, check=True)
    saved_models.write_sum_model(f"{folder}/m/1")
    broken = pathlib.Path(folder, "broken/1/saved_model.pb")
    broken.parent.mkdir(parents=True)
    broken.write_text("torn")
    config = pathlib.Path(folder, "config")
    config.write_text(
      "model_config_list {"
      + "".join(f'config {{ name: "{n}" base_path: "{folder}/{n}" }}' for n in ("m", "broken"))
      + "}"
    )
    preload = {"LD_PRELOAD": f"{folder}/stat.so", "HOLD": hold, "HELD": held}
    server = Server(f"--model_config_file={config}", environment=preload)
    self.addCleanup(server.kill)
    server.wait_until_available("m")
    log = pathlib.Path(server.log.name)
    wait_until(lambda: "Loading {name: broken version: 1} failed" in log.read_text())

    # The files of what failed are looked at again and again, for others to be there.
    pathlib.Path(hold).touch()
    wait_until(lambda: os.path.exists(held))

    self.assertEqual(len(server.predict("m", timeout=30)), 2)

  def test_calls_that_wait_do_not_keep_a_server_from_ending(self):
    server = self._start(
      lambda base: saved_models.write_scale_model(base, 1, 1.0), "--grpc_max_threads=1"
    )

    def count_to(loops: int) -> grpc.Future:
      request = saved_models.make_request("m", "slow", loops=np.int64(loops))
      return server.prediction.Predict.future(request)

    count_to(1000).result()
    start = time.monotonic()
    count_to(20_000).result()
    # Some three seconds each, two minutes together.
    loops = int(20_000 * 3 / (time.monotonic() - start))
    asked = [count_to(loops) for _ in range(40)]
    asked[0].result()

    server.process.send_signal(signal.SIGTERM)

    self.assertEqual(server.process.wait(60), 0)

  def test_a_model_that_runs_does_not_keep_a_server_from_ending(self):
    server = self._start(lambda base: saved_models.write_scale_model(base, 1, 1.0))
    request = saved_models.make_request("m", "slow", loops=np.int64(2**62))
    before = _cpu_seconds(server.process.pid)
    server.prediction.Predict.future(request)
    wait_until(lambda: _cpu_seconds(server.process.pid) > before + 1)

    server.process.send_signal(signal.SIGTERM)

    self.assertEqual(server.process.wait(60), 0)
    self.assertIn("while a model still runs", pathlib.Path(server.log.name).read_text())


def _cpu_seconds(process: int) -> float:
  fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class WatchTest(unittest.TestCase):
  def test_watches_end_with_the_server(self):
    with tempfile.TemporaryDirectory() as folder:
      saved_models.write_model(
        f"{folder}/m/1", lambda: ({"x": tf.compat.v1.placeholder(tf.float32)},) * 2
      )
      server = Server("--model_name=m", f"--model_base_path={folder}/m").wait_until_available("m")
      watches = [
        health_pb2_grpc.HealthStub(server.channel).Watch(
          health_pb2.HealthCheckRequest(service=name), timeout=60
        )
        for name in ("m", "", "nobody")
      ]
      states = health_pb2.HealthCheckResponse
      self.assertEqual(
        [next(watch).status for watch in watches],
        [states.SERVING, states.SERVING, states.SERVICE_UNKNOWN],
      )

      server.process.send_signal(signal.SIGTERM)

      for watch in watches:
        with self.assertRaises(grpc.RpcError) as caught:
          next(watch)
        self.assertEqual(caught.exception.code(), Code.UNAVAILABLE)
        self.assertEqual(caught.exception.details(), "the server ends")
      self.assertEqual(server.stop(), 0)


class FlagsTest(unittest.TestCase):
  def _run(self, *flags: str) -> tuple[int, str]:
    result = subprocess.run(
      [model_server.find_binary(), *flags], capture_output=True, text=True, timeout=60
    )
    return result.returncode, result.stdout + result.stderr

  def test_flags_that_it_would_not_obey_are_refused(self):
    for flags, word in (
      (["--row_log_servers=a:1,kafka", "--model_base_path=/m"], "'kafka'"),
      (["--row_log_interval_secs=1", "--model_base_path=/m"], "row_log_servers"),
      (["--row_log_interval_secs=nan", "--model_base_path=/m"], "nan"),
      (["--no_such_flag=1"], "no_such_flag"),
      ([], "model_base_path"),
    ):
      status, text = self._run(*flags)
      self.assertEqual(status, 2)
      self.assertIn(word, text)

  def test_files_that_are_wrong_are_named(self):
    with tempfile.NamedTemporaryFile("w", suffix=".config") as file:
      file.write("model_config_list { config { name: 3 } }")
      file.flush()
      status, text = self._run(f"--model_config_file={file.name}")
    self.assertEqual(status, 1)
    self.assertIn(file.name, text)
    self.assertIn("line 1", text)
    status, text = self._run("--model_base_path=/m", "--op_library=/no/such/library.so")
    self.assertEqual(status, 1)
    self.assertIn("/no/such/library.so", text)
    status, text = self._run("--model_base_path=/m", "--ps_address=ps_0=nowhere")
    self.assertEqual(status, 1)
    self.assertIn("ps_0=nowhere", text)

  def test_version(self):
    status, text = self._run("--version")
    self.assertEqual(status, 0)
    self.assertIn(tf.__version__, text)


class RemotePredictTest(unittest.TestCase):
  """An entry model and two replicas of its parameter server, all without Python."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    saved_models.write_sum_model(f"{cls.folder}/ps/1")
    saved_models.write_entry_model(f"{cls.folder}/entry/1")

  def _start_ps(self, name: str = "ps_0", port: int | None = None) -> Server:
    server = Server(f"--model_name={name}", f"--model_base_path={self.folder}/ps", port=port)
    self.addCleanup(server.stop)
    return server.wait_until_available(name)

  def _start_entry(self, *flags: str, environment: dict | None = None) -> Server:
    server = Server(
      "--model_name=clicks",
      f"--model_base_path={self.folder}/entry",
      *flags,
      environment=environment,
    )
    self.addCleanup(server.stop)
    return server.wait_until_available("clicks")

  def _assert_answers(self, entry: Server) -> None:
    answer = entry.predict("clicks", timeout=60)
    np.testing.assert_array_equal(np.array(answer, np.float32), _X.sum(1) * 2)

  def test_the_death_of_one_replica_fails_no_request(self):
    replicas = [self._start_ps(), self._start_ps()]
    addresses = "|".join(f"127.0.0.1:{replica.port}" for replica in replicas)
    entry = self._start_entry(f"--ps_address=other=127.0.0.1:1, ps_0={addresses}")
    self._assert_answers(entry)
    answered, stop = [], threading.Event()

    def ask() -> None:
      while not stop.is_set():
        self._assert_answers(entry)
        answered.append(1)

    with futures.ThreadPoolExecutor(2) as pool:
      asking = [pool.submit(ask) for _ in range(2)]
      try:
        wait_until(lambda: len(answered) > 20)
        replicas[0].kill()
        count = len(answered)
        wait_until(lambda: len(answered) > count + 50 or any(a.done() for a in asking))
        back = self._start_ps(port=replicas[0].port)
        replicas[1].kill()
        count = len(answered)
        wait_until(lambda: len(answered) > count + 20 or any(a.done() for a in asking))
      finally:
        stop.set()
      for asked in asking:
        asked.result()
    back.kill()
    with self.assertRaises(grpc.RpcError) as caught:
      entry.predict("clicks", timeout=60)
    self.assertEqual(caught.exception.code(), Code.UNAVAILABLE)
    self.assertIn("TfServingRemotePredict", caught.exception.details())

  def test_addresses_come_from_the_agent(self):
    class Agent(agent_service_pb2_grpc.AgentServiceServicer):
      addresses: dict[str, str] = {}

      def HeartBeat(self, request, context):  # noqa: N802
        response = agent_service_pb2.HeartBeatResponse()
        if request.server_type == agent_service_pb2.PS:
          for key, address in self.addresses.items():
            response.addresses[key].address.append(address)
        return response

    agent = Agent()
    service = grpc.server(futures.ThreadPoolExecutor(2))
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(agent, service)
    port = free_ports.get_free_port()
    service.add_insecure_port(f"127.0.0.1:{port}")
    service.start()
    self.addCleanup(service.stop, None)
    entry = self._start_entry(environment={"PORT2": str(port)})
    with self.assertRaises(grpc.RpcError) as caught:
      entry.predict("clicks", timeout=60)
    self.assertIn("agent", caught.exception.details())

    def tell(server: Server) -> None:
      agent.addresses = {"clicks:ps_0": f"127.0.0.1:{server.port}"}

    # When nobody answers, the agent is asked at once: each of these has one try.
    first = self._start_ps("clicks:ps_0")
    tell(first)
    self._assert_answers(entry)
    first.kill()
    second = self._start_ps("clicks:ps_0")
    tell(second)
    self._assert_answers(entry)

    # One that the agent no longer names may have lost its session only.
    second.kill()
    tell(first)
    with self.assertRaises(grpc.RpcError) as caught:
      entry.predict("clicks", timeout=60)
    self.assertEqual(caught.exception.code(), Code.UNAVAILABLE)
    self._start_ps("clicks:ps_0", port=second.port)
    self._assert_answers(entry)

  def test_without_addresses_the_error_says_what_is_missing(self):
    environment = {"PORT2": ""}
    entry = self._start_entry(environment=environment)
    with self.assertRaises(grpc.RpcError) as caught:
      entry.predict("clicks", timeout=60)
    self.assertEqual(caught.exception.code(), Code.UNAVAILABLE)
    self.assertIn("--ps_address", caught.exception.details())


if __name__ == "__main__":
  unittest.main()
