"""Tests of the debugging client against an HTTP server that really listens.

The server answers as `debugging_server.create_app` does, which needs a training run to look into:
`cpu_training_distributed_test` tests both on one. Covers `messages`, on which they agree.
"""

import contextlib
import http.server
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import unittest
from unittest import mock

from absl import app
from absl.testing import flagsaver

from monolith.native_training.debugging import debugging_client

ROOT = pathlib.Path(__file__).resolve().parents[3]
_VARIABLES = {"global_step:0": "1"}
_ROWS = {"0": "id: 0\nnum: 0.5\n", "1": "id: 1\n"}


class _Handler(http.server.BaseHTTPRequestHandler):
  """Knows one variable, and two rows of one feature."""

  def do_POST(self):  # noqa: N802
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    self.server.requests.append((self.path, self.headers["Content-Type"], body))
    if self.server.raw_reply is not None:
      self._send(*self.server.raw_reply)
      return
    try:
      if self.path == "/debugging/variables":
        result = {n: _VARIABLES[n] for n in body["variable_names"] if n in _VARIABLES}
      else:
        assert self.path == "/debugging/features", self.path
        rows = {str(i): _ROWS[str(int(i))] for i in body["feature_ids"] if str(i) in _ROWS}
        result = {n: rows for n in body["feature_names"] if n == "user"}
      if "broken" in str(body):
        raise KeyError("broken")
      reply = {"status": "success", "msg": json.dumps(result)}
    except KeyError as e:
      reply = {"status": "fail", "msg": json.dumps(f"KeyError: {e}")}
    self._send(200, json.dumps(reply))

  def _send(self, code, text):
    self.send_response(code)
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text.encode())

  def log_message(self, *args):
    pass


class DebuggingClientTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    self.server.requests, self.server.raw_reply = [], None
    self.port = self.server.server_address[1]
    thread = threading.Thread(target=self.server.serve_forever)
    thread.start()
    self.addCleanup(thread.join)
    self.addCleanup(self.server.server_close)
    self.addCleanup(self.server.shutdown)

  def _main(self, **flag_values):
    output = io.StringIO()
    with flagsaver.flagsaver(host="127.0.0.1", port=self.port, **flag_values):
      with contextlib.redirect_stdout(output):
        debugging_client.main(["client"])
    return json.loads(output.getvalue())

  def test_variables(self):
    result = self._main(variable_names=["global_step:0", "test"])
    self.assertEqual(result, {"global_step:0": "1"})
    self.assertEqual(
      self.server.requests,
      [
        (
          "/debugging/variables",
          "application/json",
          {"variable_names": ["global_step:0", "test"]},
        )
      ],
    )

  def test_features(self):
    result = self._main(
      type="debugging_features", feature_names=["user", "test"], feature_ids=["0", "1", "2"]
    )
    self.assertEqual(result, {"user": _ROWS})
    ((path, _, body),) = self.server.requests
    self.assertEqual(path, "/debugging/features")
    self.assertEqual(body, {"feature_names": ["user", "test"], "feature_ids": [0, 1, 2]})

  def test_one_feature(self):
    ids = ["-9223372036854775808", "18446744073709551615", "1"]
    result = self._main(type="debugging_features", feature_name="user", feature_ids=ids)
    self.assertEqual(result, {"user": {"1": _ROWS["1"]}})
    self.assertEqual(
      self.server.requests[0][2],
      {"feature_names": ["user"], "feature_ids": [-(2**63), 2**64 - 1, 1]},
    )

  def test_functions(self):
    self.assertEqual(
      debugging_client.fetch_variables("127.0.0.1", self.port, ("global_step:0",)), _VARIABLES
    )
    self.assertEqual(debugging_client.fetch_features("127.0.0.1", self.port, ["no"], [1]), {})

  def test_failure(self):
    with self.assertRaisesRegex(
      debugging_client.DebuggingError, "/debugging/variables failed: KeyError: 'broken'"
    ):
      self._main(variable_names=["broken"])

  def test_http_error(self):
    self.server.raw_reply = (500, "out of order")
    with self.assertRaisesRegex(debugging_client.DebuggingError, "answered 500 .*out of order"):
      self._main(variable_names=["global_step:0"])

  def test_another_server(self):
    for text in ("hello", "[]", "{}", '{"status": "success", "msg": "not JSON"}'):
      self.server.raw_reply = (200, text)
      with self.assertRaisesRegex(debugging_client.DebuggingError, "is no debugging server"):
        self._main(variable_names=["global_step:0"])

  def test_no_server(self):
    with socket.socket() as unused:
      unused.bind(("127.0.0.1", 0))  # taken, but without a listener
      port = unused.getsockname()[1]
      with self.assertRaisesRegex(
        debugging_client.DebuggingError, f"127.0.0.1:{port}/debugging/variables cannot be reached"
      ):
        debugging_client.fetch_variables("127.0.0.1", port, ["global_step:0"])

  def test_proxies_are_not_used(self):
    proxies = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
    with mock.patch.dict(os.environ, proxies):
      self.assertEqual(self._main(variable_names=["global_step:0"]), _VARIABLES)

  def test_usage(self):
    for flag_values, message in (
      ({}, "--variable_names is missing"),
      ({"type": "debugging_features", "feature_ids": ["1"]}, "--feature_names or --feature_name"),
      ({"type": "debugging_features", "feature_names": ["user"]}, "--feature_ids, and"),
      (
        {"type": "debugging_features", "feature_names": ["user"], "feature_ids": ["1", "x"]},
        "--feature_ids=1,x are not all integers",
      ),
    ):
      with self.assertRaisesRegex(app.UsageError, message):
        self._main(**flag_values)
    with self.assertRaisesRegex(app.UsageError, "Unexpected arguments"):
      debugging_client.main(["client", "x"])
    self.assertEqual(self.server.requests, [])

  def test_command_line_without_tensorflow(self):
    code = (
      "import sys\n"
      "sys.modules['tensorflow'] = None\n"
      "import runpy\n"
      "runpy.run_module('monolith.native_training.debugging.debugging_client',\n"
      "                 run_name='__main__', alter_sys=True)\n"
    )
    process = subprocess.run(
      [
        sys.executable,
        "-c",
        code,
        "--host=127.0.0.1",
        f"--port={self.port}",
        "--type=debugging_variables",
        "--variable_names=global_step:0,other",
      ],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertEqual(json.loads(process.stdout), _VARIABLES)

  def test_flags_next_to_those_of_the_server(self):
    code = (
      "from monolith.native_training.debugging import debugging_server, debugging_client\n"
      "from monolith.native_training.debugging.debugging_server import STATUS, SUCCESS, FAIL, MSG\n"
      "assert [STATUS, SUCCESS, FAIL, MSG] == ['status', 'success', 'fail', 'msg']\n"
    )
    process = subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=300,
      check=False,
    )
    self.assertEqual(process.returncode, 0, process.stdout)


if __name__ == "__main__":
  unittest.main()
