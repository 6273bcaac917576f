"""Tests of the report by which signal a process ended."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import unittest
from unittest import mock

from monolith.native_training.metric import cli, exit_hook

_PROGRAM = """
import json, threading
from monolith.native_training.metric import cli, exit_hook

cli.set_sink(lambda *metric: print(json.dumps(metric), flush=True))
exit_hook.install()
print("ready", flush=True)
threading.Event().wait(600)
"""


class ProcessTest(unittest.TestCase):
  def test_a_process_that_is_terminated_says_so(self):
    with subprocess.Popen(
      [sys.executable, "-c", _PROGRAM],
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ) as process:
      self.assertEqual(process.stdout.readline(), "ready\n")
      process.send_signal(signal.SIGTERM)
      reports = [json.loads(line) for line in process.stdout]

    self.assertEqual(process.returncode, signal.SIGTERM)
    self.assertEqual(len(reports), 1, reports)
    method, name, value, tags = reports[0]
    self.assertEqual((method, value, tags["sig"]), ("counter", 1, "SIGTERM"))
    self.assertTrue(name.endswith(".exit_hook"), name)


class HandlersTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.reports = []
    cli.set_sink(lambda *metric: self.reports.append(metric))
    self.addCleanup(cli.set_sink, None)
    for name, value in (("_installed", False), ("_seen_signal", None)):
      patcher = mock.patch.object(exit_hook, name, value)
      patcher.start()
      self.addCleanup(patcher.stop)
    self.addCleanup(atexit.unregister, exit_hook._report)
    for signo in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
      self.addCleanup(signal.signal, signo, signal.getsignal(signo))

  def _reported(self):
    exit_hook._report()
    return [tags["sig"] for *_, tags in self.reports]

  def test_without_a_signal_nothing_is_reported(self):
    exit_hook.install()

    self.assertEqual(self._reported(), [])

  def test_every_signal_ends_the_process_with_its_number(self):
    for signo in (signal.SIGHUP, signal.SIGTERM):
      signal.signal(signo, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_hook.install()

    for signo in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
      with self.assertRaises(SystemExit) as raised:
        signal.raise_signal(signo)
      self.assertEqual(raised.exception.code, signo)
    self.assertEqual(self._reported(), ["SIGTERM"])

  def test_an_earlier_handler_decides(self):
    seen = []
    signal.signal(signal.SIGTERM, lambda signo, frame: seen.append(signo))
    exit_hook.install()
    exit_hook.install()

    signal.raise_signal(signal.SIGTERM)

    self.assertEqual(seen, [signal.SIGTERM])
    self.assertEqual(self._reported(), ["SIGTERM"])

  def test_an_ignored_signal_stays_ignored(self):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    exit_hook.install()

    signal.raise_signal(signal.SIGHUP)

    self.assertEqual(self._reported(), ["SIGHUP"])

  def test_another_thread_installs_nothing(self):
    before = signal.getsignal(signal.SIGTERM)

    thread = threading.Thread(target=exit_hook.install)
    thread.start()
    thread.join()

    self.assertIs(signal.getsignal(signal.SIGTERM), before)
    # The main thread can still do it.
    exit_hook.install()
    self.assertIsNot(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
  unittest.main()
