"""Promise: requests of every kind leave no memory behind, nor do models that are replaced.

Both servers. `MONOLITH_SOAK=1` makes 10,000 requests and replaces models; otherwise there are as
many requests as show a server that keeps one of ten of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import socket
import tempfile
import unittest

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.serving import saved_models, server_process

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
_WARM_UP, _REQUESTS = (2_000, 10_000) if _SOAK else (500, 1_500)
_VERSIONS = 30
# The most that allocators and caches of a warm server may still take. A tensor has up to 160 kB.
# Every thread of a server has an arena of its own, which its first large request makes.
_SLACK_BYTES = ((24 if _SOAK else 12) + (os.cpu_count() or 1)) << 20
_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class ServingMemoryTest(unittest.TestCase):
  def _start(self):
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)
    saved_models.write_scale_model(f"{self.folder}/m", 1, 1.0)
    self.server = server_process.ServerProcess(
      "--model_name=m", f"--model_base_path={self.folder}/m"
    )
    self.addCleanup(self.server.stop)
    self.server.wait_until_listening().wait_until_available("m")
    self.rng = random.Random(11)
    self.call = self.server.channel.unary_unary(_PREDICT)

  def _resident_bytes(self):
    status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

  def _random_request(self):
    size = self.rng.choice([1, 100, 20_000])
    x = np.full([self.rng.randrange(1, size + 1), 2], self.rng.random(), np.float32)
    return saved_models.make_request("m", "one", x=x)

  def _send(self, port, data):
    """Sends bytes that no client would, and hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
      try:
        connection.sendall(data)
        if self.rng.random() < 0.5:
          connection.shutdown(socket.SHUT_WR)
          connection.recv(65536)
      except OSError:
        pass  # closed on us, which is an answer too

  def _ask(self):
    """Makes one request, of whichever kind."""
    rng = self.rng
    request = self._random_request()
    data = bytearray(request.SerializeToString())
    kind = rng.randrange(12)
    try:
      if kind <= 2:
        self.call(bytes(data), timeout=60)
      elif kind == 3:
        x = tf.make_ndarray(request.inputs["x"])[:200]
        body = {"signature_name": "one", "instances": x.tolist()}
        self.assertEqual(self.server.post("/v1/models/m:predict", body)[0], 200)
      elif kind == 4:
        request.model_spec.name = f"nobody{rng.random()}"
        self.call(request.SerializeToString(), timeout=60)
      elif kind == 5:
        request.model_spec.signature_name = f"nothing{rng.random()}"
        self.call(request.SerializeToString(), timeout=60)
      elif kind == 6:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        self.call(bytes(data), timeout=60)
      elif kind == 7:
        self.call(bytes(data[: rng.randrange(len(data))]), timeout=60)
      elif kind == 8:
        self.call.future(bytes(data), timeout=60).cancel()
      elif kind == 9:
        body = json.dumps({"instances": [rng.random()] * 1000})[: rng.randrange(20_000)]
        self.assertEqual(self.server.http("/v1/models/m:predict", body.encode())[0], 400)
      elif kind == 10:
        garbage = _PREFACE + rng.getrandbits(8 * 2000).to_bytes(2000, "big")
        self._send(self.server.port, garbage[: rng.randrange(len(garbage))])
        self._send(self.server.rest_port, b"POST /v1/models/m:predict HTTP/1.1\r\n" + garbage)
      else:
        question = reflection_pb2.ServerReflectionRequest(
          file_containing_symbol="tensorflow.serving.PredictionService"
        )
        stub = reflection_pb2_grpc.ServerReflectionStub(self.server.channel)
        list(stub.ServerReflectionInfo(iter([question] * 2), timeout=60))
    except grpc.RpcError:
      self.assertIn(kind, (4, 5, 6, 7))

  def test_requests(self):
    self._start()
    for _ in range(_WARM_UP):
      self._ask()
    before = self._resident_bytes()
    for _ in range(_REQUESTS):
      self._ask()
    self.server.check_alive()
    grown = self._resident_bytes() - before
    print(f"{_REQUESTS} requests, {grown / 1e6:.1f} MB more than {before / 1e6:.0f} MB")
    self.assertLess(grown, _SLACK_BYTES)

  @unittest.skipUnless(_SOAK, "takes minutes: make soak")
  def test_versions(self):
    self._start()
    base = f"{self.folder}/m"

    def replace(version):
      saved_models.write_scale_model(base, version, version)
      self.server.wait_until_available("m", version)
      shutil.rmtree(f"{base}/{version - 1}")

    for version in range(2, 12):
      replace(version)
    before = self._resident_bytes()
    for version in range(12, 12 + _VERSIONS):
      replace(version)
    self.server.check_alive()
    self.assertLess(self._resident_bytes() - before, _SLACK_BYTES)


if __name__ == "__main__":
  unittest.main()
