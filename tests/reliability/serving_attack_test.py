"""Promise: a flood of hostile clients costs the model server in C++ no answer of a healthy one.

`MONOLITH_SOAK=1` sends 20,000 requests and 5,000 handshakes to a server that was built with
AddressSanitizer; otherwise there are a few hundred, for the server that is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import ssl
import struct
import tempfile
import threading
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.serving import certificates, saved_models, server_process
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
_REQUESTS, _HANDSHAKES = (20_000, 5_000) if _SOAK else (600, 150)
_ATTACKERS = 4
_PREDICT = "/tensorflow.serving.PredictionService/Predict"
_REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
_PATH = b"/v1/models/m:predict"
_X = np.array([[0.5, 0.25], [1, 2]], np.float32)
_WANTED = [0.75, 3.0]
# The most that a server under attack may take: the budgets of docs/native_server.md, and what it
# has anyway.
_MAX_RESIDENT_MIB = 2500
# The share of tensors and answers, 1 GiB, with what an allocator keeps.
_MAX_OUTPUT_MIB = 1200


def _program() -> list[str]:
  if not _SOAK:
    return server_process.command()
  program = server_process.ROOT / "build/server-address/monolith_model_server"
  library = server_process.ROOT / (
    "monolith/native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so"
  )
  return [str(program), f"--op_library={library}"]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
  return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(stream: int, path: str = _PREDICT) -> bytes:
  fields = {
    ":method": "POST",
    ":scheme": "http",
    ":path": path,
    ":authority": "a",
    "content-type": "application/grpc",
  }
  block = b"".join(
    b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    for name, value in fields.items()
  )
  return _frame(1, 4, stream, block)


def _message(data: bytes) -> bytes:
  return struct.pack(">BI", 0, len(data)) + data


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)


def _mutate(rng: random.Random, data: bytes, start: int = 0) -> bytes:
  changed = bytearray(data)
  for _ in range(rng.randint(1, 6)):
    place = rng.randrange(start, len(changed))
    if rng.random() < 0.7:
      changed[place] = rng.randrange(256)
    else:
      changed[place : place + rng.randint(0, 9)] = rng.randbytes(rng.randint(1, 9))
  return bytes(changed)


class Attacker:
  """Makes one hostile request after the other.

  Args:
    server: whom.
    seed: of what it sends.
  """

  def __init__(self, server: server_process.ServerProcess, seed: int):
    self._server = server
    self._rng = random.Random(seed)
    request = saved_models.make_request("m", x=_X)
    self._request = request.SerializeToString()
    self._body = json.dumps({"instances": _X.tolist()}).encode()
    self._kinds: list[Callable[[], None]] = [
      self._frames,
      self._protobuf,
      self._http,
      self._json,
      self._large_claim,
      self._repeated_string,
      self._resets,
      self._reflection,
      self._compressed,
      self._torn_body,
      self._tiny_chunks,
      self._empty_lines,
      self._hang_up,
    ]

  def send_one(self) -> str:
    """Sends a request of any kind; returns which it was."""
    kind = self._rng.choice(self._kinds)
    with contextlib.suppress(OSError, grpc.RpcError):  # to be refused is what it asks for
      kind()
    return kind.__name__

  def _send(self, port: int, data: bytes, reads: bool = True) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
      connection.sendall(data)
      if reads:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
          pass

  def _post(self, body: bytes, header: bytes = b"") -> bytes:
    length = b"" if b"chunked" in header else b"Content-Length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nHost: a\r\n%s%s\r\n%s" % (_PATH, length, header, body)

  def _frames(self) -> None:
    good = _PREFACE + _headers(1) + _frame(0, 1, 1, _message(self._request))
    self._send(self._server.port, _mutate(self._rng, good, 24))

  def _compressed(self) -> None:
    call = self._server.channel.unary_unary(_PREDICT)
    call(bytes(self._rng.randrange(1 << 24)), timeout=60, compression=grpc.Compression.Gzip)

  def _protobuf(self) -> None:
    call = self._server.channel.unary_unary(_PREDICT)
    call(_mutate(self._rng, self._request), timeout=60)

  def _http(self) -> None:
    self._send(self._server.rest_port, _mutate(self._rng, self._post(self._body)))

  def _json(self) -> None:
    self._send(self._server.rest_port, self._post(_mutate(self._rng, self._body)))

  def _claim(self, model: str, kind: tf.DType, **values: list) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    tensor = request.inputs["x" if model == "m" else "s"]
    tensor.CopyFrom(tf.make_tensor_proto(values.pop("value"), kind))
    tensor.tensor_shape.Clear()
    for _ in range(self._rng.randint(1, 3)):
      tensor.tensor_shape.dim.add(size=1 << self._rng.randrange(62))
    self._server.prediction.Predict(request, timeout=60)

  def _large_claim(self) -> None:
    self._claim("m", tf.float32, value=[1.0])

  def _repeated_string(self) -> None:
    self._claim("text", tf.string, value=[b"x" * self._rng.randrange(10_000)])

  def _resets(self) -> None:
    streams = range(1, 2 * self._rng.randrange(2, 600), 2)
    resets = b"".join(_headers(i) + _frame(3, 0, i, struct.pack(">I", 8)) for i in streams)
    self._send(self._server.port, _PREFACE + resets)

  def _reflection(self) -> None:
    data = _message(_mutate(self._rng, b"\x22\x24tensorflow.serving.ModelServerConfig"))
    self._send(self._server.port, _PREFACE + _headers(1, _REFLECTION) + _frame(0, 1, 1, data))

  def _torn_body(self) -> None:
    data = self._post(b" " * self._rng.randrange(1, 1 << 20))
    self._send(self._server.rest_port, data[: self._rng.randrange(len(data))], reads=False)

  def _tiny_chunks(self) -> None:
    chunks = b"1\r\n \r\n" * self._rng.randrange(1, 40_000)
    data = self._post(chunks + b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n")
    self._send(self._server.rest_port, data)

  def _empty_lines(self) -> None:
    self._send(self._server.rest_port, b"\r\n" * self._rng.randrange(1, 1 << 18))

  def _hang_up(self) -> None:
    self._server.prediction.Predict.future(
      saved_models.make_request("m", x=_X), timeout=60
    ).cancel()


class HealthyClients:
  """Ask all the time; every answer must come and be right."""

  def __init__(self, **asks: Callable[[], list[float]]):
    self._asks = asks
    self._stop = threading.Event()
    self._slowest: dict[str, float] = dict.fromkeys(asks, 0.0)
    self._count: Counter[str] = Counter()
    self._pool = futures.ThreadPoolExecutor(len(asks))

  def _work(self, name: str) -> None:
    while not self._stop.is_set():
      start = time.monotonic()
      answer = self._asks[name]()
      self._slowest[name] = max(self._slowest[name], time.monotonic() - start)
      if answer != _WANTED:
        raise AssertionError(f"{name}: {answer}, want {_WANTED}")
      self._count[name] += 1

  @contextlib.contextmanager
  def asking(self) -> Iterator[None]:
    """Asks inside of the block; raises there what went wrong with a healthy client."""
    working = [self._pool.submit(self._work, name) for name in self._asks]
    try:
      yield
    finally:
      self._stop.set()
      self._pool.shutdown()
    for work in working:
      work.result()

  def __str__(self) -> str:
    return ", ".join(
      f"{name}: {self._count[name]} answers, the slowest after {self._slowest[name] * 1e3:.0f} ms"
      for name in self._asks
    )


class ServingAttackTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    if not os.path.exists(_program()[0]):
      message = f"{_program()[0]} is not built"
      if _SOAK:
        self.fail(f"{message}: tools/native_build.py --server --sanitize address")
      self.skipTest(message)
    self.folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, self.folder)
    saved_models.write_sum_model(f"{self.folder}/m/1")
    saved_models.write_string_model(f"{self.folder}/text/1")
    configs = "".join(
      f'config {{ name: "{name}" base_path: "{self.folder}/{name}" }}' for name in ("m", "text")
    )
    self.config = pathlib.Path(self.folder, "models.config")
    self.config.write_text(f"model_config_list {{ {configs} }}")

  def _start(self, *flags: str) -> server_process.ServerProcess:
    server = server_process.ServerProcess(
      f"--model_config_file={self.config}",
      *flags,
      program=_program(),
      environment={"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=1"},
    )
    self.addCleanup(server.stop)
    wait_until(lambda: self._is_up(server))
    for name in ("m", "text"):
      server.wait_until_available(name)
    return server

  def _is_up(self, server: server_process.ServerProcess) -> bool:
    server.check_alive()
    try:
      return server.http("/monitoring/prometheus/metrics")[0] == 200
    except OSError:
      return False

  def _ask_rest(self, server: server_process.ServerProcess) -> list[float]:
    status, answer = server.post("/v1/models/m:predict", {"instances": _X.tolist()})
    self.assertEqual(status, 200, answer)
    return answer["predictions"]

  def _finish(self, server: server_process.ServerProcess) -> float:
    """Checks that the server is whole; returns the most that it took, in MiB."""
    server.check_alive()
    resident = _resident_mib(server)
    log = server.log()
    self.assertNotIn("Sanitizer", log)
    self.assertEqual(server.stop(), 0, log)
    return resident

  def test_mixed_requests(self):
    server = self._start()
    request = saved_models.make_request("m", x=_X)

    def ask_grpc() -> list[float]:
      return list(server.prediction.Predict(request, timeout=60).outputs["y"].float_val)

    healthy = HealthyClients(gRPC=ask_grpc, HTTP=lambda: self._ask_rest(server))
    sent: Counter[str] = Counter()

    def attack(seed: int) -> Counter[str]:
      attacker = Attacker(server, seed)
      return Counter(attacker.send_one() for _ in range(_REQUESTS // _ATTACKERS))

    with healthy.asking(), futures.ThreadPoolExecutor(_ATTACKERS) as pool:
      for counted in pool.map(attack, range(_ATTACKERS)):
        sent += counted

    resident = self._finish(server)
    print(f"{sum(sent.values())} hostile requests {dict(sent)}; {healthy}; {resident:.0f} MiB")
    if not _SOAK:  # the sanitizer keeps what is freed
      self.assertLess(resident, _MAX_RESIDENT_MIB)

  def test_outputs_of_many_runs_at_a_time(self):
    """A few bytes each name strings whose outputs, all together, no budget has room for."""
    server = self._start()
    before = _resident_mib(server)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "text"
    tensor = request.inputs["s"]
    tensor.CopyFrom(tf.make_tensor_proto([b"x" * 8_000]))
    tensor.tensor_shape.dim[0].size = 12_000  # 96 MB, and as much again as an output
    answers: Counter[grpc.StatusCode] = Counter()

    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    channel = grpc.insecure_channel(f"localhost:{server.port}", options)
    self.addCleanup(channel.close)

    def ask(_: int) -> grpc.StatusCode:
      try:
        channel.unary_unary(_PREDICT)(request.SerializeToString(), timeout=120)
      except grpc.RpcError as error:
        return error.code()
      return grpc.StatusCode.OK

    with futures.ThreadPoolExecutor(16) as pool:
      answers.update(pool.map(ask, range(32)))

    resident = _resident_mib(server)
    self._finish(server)
    print(f"32 requests for 96 MB and outputs: {dict(answers)}; {before:.0f}, {resident:.0f} MiB")
    self.assertLessEqual(
      set(answers), {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, answers
    )
    self.assertGreater(answers[grpc.StatusCode.OK], 0)
    if not _SOAK:  # the sanitizer keeps what is freed
      self.assertLess(resident - before, _MAX_OUTPUT_MIB)

  @unittest.skipUnless(shutil.which("openssl"), "openssl is not installed")
  def test_handshakes_of_garbage(self):
    texts = certificates.write(self.folder)
    tls = pathlib.Path(self.folder, "tls.config")
    settings = {"server_key": texts["server.key"], "server_cert": texts["server.crt"]}
    tls.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.items()))
    server = self._start(f"--ssl_config_file={tls}")
    credentials = grpc.ssl_channel_credentials(texts["ca.crt"].encode())
    request = saved_models.make_request("m", x=_X)

    def ask() -> list[float]:
      # A connection of its own each time: its handshake is one among the others.
      options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
      with grpc.secure_channel(f"localhost:{server.port}", credentials, options) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        return list(stub.Predict(request, timeout=60).outputs["y"].float_val)

    healthy = HealthyClients(TLS=ask, HTTP=lambda: self._ask_rest(server))
    hello = _client_hello()

    def attack(seed: int) -> None:
      rng = random.Random(seed)
      for _ in range(_HANDSHAKES // _ATTACKERS):
        data = rng.choice(
          (
            rng.randbytes(rng.randrange(1, 20_000)),
            hello[: rng.randrange(1, len(hello))],
            _mutate(rng, hello),
            hello + rng.randbytes(rng.randrange(1, 5_000)),
            _PREFACE,
            b"",
          )
        )
        with contextlib.suppress(OSError):
          with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(data)
            if rng.random() < 0.5:
              connection.shutdown(socket.SHUT_WR)
              connection.recv(1 << 16)

    with healthy.asking(), futures.ThreadPoolExecutor(_ATTACKERS) as pool:
      list(pool.map(attack, range(_ATTACKERS)))

    resident = self._finish(server)
    print(f"{_HANDSHAKES} handshakes of garbage; {healthy}; {resident:.0f} MiB")


def _resident_mib(server: server_process.ServerProcess) -> float:
  """Returns the most that a server has taken so far."""
  status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
  (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
  return int(line.split()[1]) / 1024


def _client_hello() -> bytes:
  """Returns the first bytes of a handshake that a server takes."""
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.set_alpn_protocols(["h2"])
  output = ssl.MemoryBIO()
  handshake = context.wrap_bio(ssl.MemoryBIO(), output, server_hostname="localhost")
  with contextlib.suppress(ssl.SSLWantReadError):
    handshake.do_handshake()
  return output.read()


if __name__ == "__main__":
  unittest.main()
