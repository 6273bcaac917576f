"""The server in C++ passes the tests of the server in Python, where it is built."""

import os
import pathlib
import subprocess
import sys
import unittest

from tests.serving import server_process

_FOLDER = pathlib.Path(__file__).resolve().parent


@unittest.skipUnless(
  os.path.exists(server_process.SERVERS["native"][0]), "make server has not built the server"
)
class NativeSuiteTest(unittest.TestCase):
  def _run(self, name):
    result = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", str(_FOLDER / name)],
      cwd=server_process.ROOT,
      env={**os.environ, "MONOLITH_TEST_SERVER": "native"},
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 0, result.stdout[-20_000:])

  def test_what_a_client_sees(self):
    self._run("model_server_test.py")

  def test_exports(self):
    self._run("exports_test.py")


if __name__ == "__main__":
  unittest.main()
