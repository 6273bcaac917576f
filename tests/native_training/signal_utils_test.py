import contextlib
import importlib
import io
import signal
import subprocess
import sys
import threading
import unittest

from monolith.native_training import signal_utils


class SignalUtilsTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(signal.signal, signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))

  def _raise_signal(self) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      signal.raise_signal(signal.SIGUSR1)
    return out.getvalue()

  def testBasic(self):
    signal_utils.add_siguser1_handler()
    signal_utils.add_siguser1_handler()

    text = self._raise_signal()

    # Both handlers and the one of the import print the stack.
    self.assertEqual(text.count("in testBasic"), 3)

  def test_lines_are_stripped(self):
    lines = self._raise_signal().splitlines()

    self.assertTrue(any(line.startswith("File ") for line in lines))

  def test_previous_handler_is_called_first(self):
    events = []
    signal.signal(signal.SIGUSR1, lambda sig, frame: events.append(sig))
    signal_utils.add_siguser1_handler()

    text = self._raise_signal()

    self.assertEqual(events, [signal.SIGUSR1])
    self.assertEqual(text.count("in _raise_signal"), 1)

  def test_default_and_ignored_handlers_are_not_called(self):
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
      signal.signal(signal.SIGUSR1, handler)
      signal_utils.add_siguser1_handler()

      self.assertIn("in _raise_signal", self._raise_signal())

  def test_import_installs_one_handler(self):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    importlib.reload(signal_utils)
    installed = signal.getsignal(signal.SIGUSR1)

    importlib.reload(signal_utils)

    self.assertTrue(callable(installed))
    self.assertIs(signal.getsignal(signal.SIGUSR1), installed)

  def test_other_threads_install_nothing(self):
    installed = signal.getsignal(signal.SIGUSR1)

    with self.assertLogs(level="WARNING") as logs:
      thread = threading.Thread(target=signal_utils.add_siguser1_handler)
      thread.start()
      thread.join()

    self.assertIs(signal.getsignal(signal.SIGUSR1), installed)
    self.assertIn("Not in the main thread", logs.output[0])

  def test_signal_in_the_middle_of_a_write(self):
    class BusyStdout(io.StringIO):
      def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with contextlib.redirect_stdout(BusyStdout()):
      signal.raise_signal(signal.SIGUSR1)  # goes to stderr

  def test_another_process_asks_for_the_stack(self):
    # The process is stuck in `wait`; the signal of another process shows where.
    code = (
      "import threading\n"
      "from monolith.native_training import signal_utils\n"
      "def stuck():\n"
      "  print('ready', flush=True)\n"
      "  threading.Event().wait(60)\n"
      "stuck()\n"
    )
    process = subprocess.Popen(
      [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    self.assertEqual(process.stdout.readline(), "ready\n")

    process.send_signal(signal.SIGUSR1)

    self.assertIn("in <module>", process.stdout.readline())
    seen = ""
    while "in stuck" not in seen:
      line = process.stdout.readline()
      self.assertTrue(line, "the process ended without printing its stack")
      seen += line
    self.assertIsNone(process.poll())


if __name__ == "__main__":
  unittest.main()
