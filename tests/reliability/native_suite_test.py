"""The server in C++ passes the tests of the server in Python, where it is built.

`MONOLITH_SOAK=1` adds those of exports, and of agents, servers and replicas that are killed;
`MONOLITH_TEST_SERVER=native` makes any test in `tests/serving` ask that server.
`tests/realtime/replica_test.py` asks both.
"""

import os
import pathlib
import subprocess
import sys
import unittest

import pytest

pytestmark = pytest.mark.thorough

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = _ROOT / "monolith" / "serving" / "native" / "monolith_model_server"


@unittest.skipUnless(_PROGRAM.exists(), "make server has not built the server")
class NativeSuiteTest(unittest.TestCase):
  def _run(self, *names):
    result = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", *(f"tests/{name}" for name in names)],
      cwd=_ROOT,
      env={**os.environ, "MONOLITH_TEST_SERVER": "native"},
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 0, result.stdout[-20_000:])

  def test_what_a_client_sees(self):
    self._run("serving/model_server_test.py")

  def test_flags(self):
    self._run("serving/server_flags_test.py")

  def test_tls(self):
    self._run("serving/tls_test.py")

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "trains models: make soak")
  def test_exports(self):
    self._run("serving/exports_test.py")

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_replicas_that_are_killed(self):
    self._run("reliability/replica_faults_test.py")

  @unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
  def test_agents_and_servers_that_are_killed(self):
    self._run("reliability/serving_faults_test.py")


if __name__ == "__main__":
  unittest.main()
