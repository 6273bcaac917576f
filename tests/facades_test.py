"""Tests that a name replaced on a facade (`_facades`) is replaced behind it, and put back."""

import sys
import types
import unittest
from unittest import mock

from monolith import _facades
from monolith.native_training import cpu_training, save_utils
from monolith.native_training.checkpoints import saver
from monolith.native_training.driver import worker


class FacadesTest(unittest.TestCase):
  def setUp(self):
    self._behind = types.ModuleType("behind")
    self._behind.value = 1
    self._facade = types.ModuleType("facade_of_test", "what it is for")
    self._facade.value = 1
    sys.modules["facade_of_test"] = self._facade
    self.addCleanup(sys.modules.pop, "facade_of_test")
    _facades.forward_assignments("facade_of_test", self._behind)

  def test_patch_reaches_the_module_behind_and_is_undone(self):
    with mock.patch.object(self._facade, "value", 2):
      self.assertEqual((self._facade.value, self._behind.value), (2, 2))
    self.assertEqual((self._facade.value, self._behind.value), (1, 1))

  def test_names_of_the_facade_alone_stay_with_it(self):
    self._facade.own = 3
    self._facade.__doc__ = "another"

    self.assertFalse(hasattr(self._behind, "own"))
    self.assertIsNone(self._behind.__doc__)

  def test_names_that_programs_replace_in_the_driver_reach_the_worker(self):
    for name in (
      "_EXTRA_PS_BENCHMARK_SECS",
      "_do_worker_train",
      "_get_blocked_addrs",
      "_run_ps_benchmark",
      "_save_debugging_info",
      "_shutdown_ps",
    ):
      with self.subTest(name), mock.patch.object(cpu_training, name) as replacement:
        self.assertIs(getattr(worker, name), replacement)

  def test_clock_that_programs_replace_in_save_utils_reaches_the_saver(self):
    with mock.patch.object(save_utils, "time") as clock:
      self.assertIs(saver.time, clock)
    self.assertIsNot(saver.time, clock)


if __name__ == "__main__":
  unittest.main()
