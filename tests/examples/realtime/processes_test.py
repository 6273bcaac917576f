"""Tests of `processes`."""

from __future__ import annotations

import os
import tempfile
import unittest

from examples.realtime.processes import Command, Process


class ProcessTest(unittest.TestCase):
  def start(self, niceness: int) -> Process:
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    process = Process(Command("sleep", ["sleep", "600"], niceness=niceness), folder.name)
    self.addCleanup(process.kill)
    process.start()
    return process

  def test_a_process_stands_back(self):
    own = os.getpriority(os.PRIO_PROCESS, 0)

    self.assertEqual(os.getpriority(os.PRIO_PROCESS, self.start(0).pid), own)
    self.assertEqual(os.getpriority(os.PRIO_PROCESS, self.start(19).pid), 19)

  @unittest.skipUnless(
    os.path.exists("/proc/self/autogroup") and os.geteuid() == 0,
    "cores are not shared among sessions, or the kernel may refuse to hear of one so soon",
  )
  def test_its_session_stands_back(self):
    with open(f"/proc/{self.start(19).pid}/autogroup") as group:
      self.assertRegex(group.read(), " nice 19$")

  def test_it_stands_back_again_when_it_is_started_again(self):
    process = self.start(19)
    process.kill()
    process.start()

    self.assertEqual(process.starts, 2)
    self.assertEqual(os.getpriority(os.PRIO_PROCESS, process.pid), 19)


if __name__ == "__main__":
  unittest.main()
