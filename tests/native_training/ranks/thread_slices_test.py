import contextlib
import os
import threading
import unittest
from unittest import mock

from monolith.native_training.ranks import thread_slices
from tests.wait_until import wait_until


def _kernel_keeps_slices() -> bool:
  release = os.uname().release.split(".")
  return (int(release[0]), int("".join(c for c in release[1] if c.isdigit()))) >= (6, 12)


class ThreadSlicesTest(unittest.TestCase):
  @contextlib.contextmanager
  def _thread(self):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
      yield thread.native_id
    finally:
      stop.set()
      thread.join()

  @unittest.skipUnless(_kernel_keeps_slices(), "slices of threads need Linux 6.12")
  def test_new_threads_get_a_short_slice(self):
    with self._thread() as earlier, contextlib.ExitStack() as stack:
      default = thread_slices.get_slice_nanosecs(earlier)
      with thread_slices.prompt_threads():
        thread = stack.enter_context(self._thread())
      if thread_slices.get_slice_nanosecs(thread) == default:
        self.skipTest("this sandbox does not allow changing slices")

      self.assertEqual(thread_slices.get_slice_nanosecs(thread), 100_000)
      self.assertEqual(thread_slices.get_slice_nanosecs(earlier), default)
      self.assertEqual(os.sched_getscheduler(thread), os.SCHED_OTHER)
      self.assertEqual(os.getpriority(os.PRIO_PROCESS, thread), os.getpriority(os.PRIO_PROCESS, 0))

  def test_thread_that_has_ended(self):
    with self._thread() as thread:
      pass
    # Python joins a thread a moment before the system removes it.
    wait_until(lambda: not os.path.exists(f"/proc/self/task/{thread}"))
    thread_slices._shorten(thread)
    self.assertEqual(thread_slices.get_slice_nanosecs(thread), 0)

  def test_refused_by_the_system(self):
    with mock.patch.object(thread_slices, "_call", return_value=-1) as call:
      with contextlib.ExitStack() as stack:
        with thread_slices.prompt_threads():
          stack.enter_context(self._thread())
    call.assert_called_once()

  def test_other_processors_and_systems(self):
    with mock.patch("platform.machine", return_value="riscv64"):
      with thread_slices.prompt_threads(), self._thread() as thread:
        pass
      self.assertEqual(thread_slices.get_slice_nanosecs(thread), 0)
    with mock.patch("os.listdir", side_effect=FileNotFoundError):
      with thread_slices.prompt_threads(), self._thread():
        pass


if __name__ == "__main__":
  unittest.main()
