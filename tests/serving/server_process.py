"""Model servers as processes of their own, for tests that know them by their ports only."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import grpc
from tensorflow_serving.apis import (
  model_service_pb2_grpc,
  prediction_service_pb2_grpc,
)

from monolith.serving import model_server
from tests import free_ports
from tests.wait_until import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command() -> list[str]:
  """Returns the command that starts a server; skips the test where it was not built.

  That is a failure on CI.
  """
  try:
    model_server.find_binary()
  except FileNotFoundError as error:
    if os.environ.get("CI") == "true":
      raise
    raise unittest.SkipTest(str(error)) from error
  return [sys.executable, "-m", "monolith.serving.model_server"]


def run(*flags: str) -> tuple[int, str]:
  """Returns exit status and messages of a server that does not start."""
  done = subprocess.run([*command(), *flags], capture_output=True, text=True, timeout=60, cwd=ROOT)
  return done.returncode, done.stdout + done.stderr


def refusal_of(flags: Sequence[str]) -> str:
  """Returns what is wrong with a command line; nothing if its flags are understood."""
  # It ends where it loads the library: after all flags, before it listens.
  status, text = run(*flags, "--op_library=/no/such/library.so")
  return text if status == 2 else ""


class ServerProcess:
  """A running server, with clients of both its ports.

  Args:
    flags: the server's, without those for its ports.
    environment: variables beside those of this process.
    port: its port for gRPC; a free one by default.
    program: a command instead of the usual one.
  """

  def __init__(
    self,
    *flags: str,
    environment: dict[str, str] | None = None,
    port: int | None = None,
    program: list[str] | None = None,
  ):
    self.port = port or free_ports.get_free_port()
    self.rest_port = free_ports.get_free_port()
    self.address = f"127.0.0.1:{self.port}"
    self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
    self.process = subprocess.Popen(
      [
        *(program or command()),
        f"--port={self.port}",
        f"--rest_api_port={self.rest_port}",
        *flags,
      ],
      cwd=ROOT,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(environment or {})},
      stdout=self._log,
      stderr=subprocess.STDOUT,
    )
    self.channel = grpc.insecure_channel(
      self.address,
      options=[("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)],
    )
    self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
    self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)

  def __enter__(self) -> ServerProcess:
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()

  def wait_until_listening(self) -> ServerProcess:
    """Returns when both ports take connections."""

    def listening() -> bool:
      self.check_alive()
      try:
        self.http("/monitoring/prometheus/metrics")
        grpc.channel_ready_future(self.channel).result(1)
      except (OSError, grpc.FutureTimeoutError):
        return False
      return True

    wait_until(listening)
    return self

  def wait_until_available(self, model: str, version: int | None = None) -> None:
    """Returns when a model answers."""
    path = f"/v1/models/{model}" + (f"/versions/{version}" if version is not None else "")

    def available() -> bool:
      self.check_alive()
      status, answer = self.get(path)
      if status != 200:
        return False
      return "AVAILABLE" in [state["state"] for state in answer["model_version_status"]]

    wait_until(available)

  def check_alive(self) -> None:
    """Fails if the server ended."""
    assert self.process.poll() is None, f"exit status {self.process.returncode}: {self.log()}"

  def log(self) -> str:
    """Returns what the server wrote."""
    return pathlib.Path(self._log.name).read_text(errors="replace")

  def http(self, path: str, body: bytes | None = None, method: str | None = None) -> Any:
    """Returns status and body of an HTTP answer."""
    request = urllib.request.Request(
      f"http://127.0.0.1:{self.rest_port}{path}", data=body, method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
      with opener.open(request, timeout=60) as response:
        return response.status, response.read()
    except urllib.error.HTTPError as error:
      with error:
        return error.code, error.read()

  def get(self, path: str) -> tuple[int, Any]:
    """Returns status and parsed JSON of a GET."""
    status, body = self.http(path)
    return status, json.loads(body)

  def post(self, path: str, document: Any) -> tuple[int, Any]:
    """Returns status and parsed JSON of a POST; `document` is JSON, or the bytes of a body."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    status, answer = self.http(path, body)
    return status, json.loads(answer)

  def stop(self) -> int:
    """Ends the server as an operator does; returns its exit status."""
    self.channel.close()
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGTERM)
      try:
        self.process.wait(60)
      except subprocess.TimeoutExpired:
        self.process.kill()
    status = self.process.wait()
    self._log.close()
    return status

  def kill(self) -> None:
    """Ends the server as a broken machine does."""
    self.process.kill()
    self.process.wait()
