"""Requests of every kind leave no memory behind; a model that is replaced again and again neither.

`MONOLITH_SOAK=1` makes 10,000 requests; otherwise there are none, because few would show nothing.
"""

import os
import pathlib
import random
import shutil
import tempfile
import unittest

_REQUESTS = 10_000
_VERSIONS = 30
# What allocators and caches of a server that is warm may still take.
_SLACK_BYTES = 24 << 20


@unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "takes minutes: make soak")
class ServingMemoryTest(unittest.TestCase):
  def setUp(self):
    import tensorflow as tf

    from tests.serving import saved_models, server_process

    tf.compat.v1.disable_eager_execution()
    self.models = saved_models
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)
    saved_models.write_scale_model(f"{self.folder}/m", 1, 1.0)
    self.server = server_process.ServerProcess(
      "--model_name=m", f"--model_base_path={self.folder}/m"
    )
    self.addCleanup(self.server.stop)
    self.server.wait_until_listening().wait_until_available("m")
    self.rng = random.Random(11)

  def _resident_bytes(self):
    status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

  def _ask(self):
    import grpc
    import numpy as np

    rng = self.rng
    size = rng.randrange(1, 200)
    x = np.random.RandomState(rng.randrange(1 << 30)).randn(size, 2).astype(np.float32)
    kind = rng.randrange(6)
    if kind == 0:
      body = {"signature_name": "one", "instances": x.tolist()}
      self.assertEqual(self.server.post("/v1/models/m:predict", body)[0], 200)
      return
    request = self.models.make_request("m", "one", x=x)
    if kind == 1:
      request.model_spec.name = f"nobody{rng.random()}"
    elif kind == 2:
      request.model_spec.signature_name = f"nothing{rng.random()}"
    data = bytearray(request.SerializeToString())
    if kind == 3:
      data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 4:
      del data[rng.randrange(len(data)) :]
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    try:
      call(bytes(data), timeout=60)
    except grpc.RpcError:
      self.assertNotEqual(kind, 5)

  def test_requests(self):
    for _ in range(_REQUESTS // 5):
      self._ask()
    before = self._resident_bytes()
    for _ in range(_REQUESTS):
      self._ask()
    self.server.check_alive()
    self.assertLess(self._resident_bytes() - before, _SLACK_BYTES)

  def test_versions(self):
    base = f"{self.folder}/m"

    def replace(version):
      self.models.write_scale_model(base, version, version)
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
