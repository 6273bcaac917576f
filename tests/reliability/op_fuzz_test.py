"""Promise: no tensor, attribute or message ends, stops or fills the process that gets it.

Calls every op of the library with random arguments, in processes that may die. 10 calls per op;
`MONOLITH_SOAK=1` makes 300, and `MONOLITH_FUZZ_SEED` others than usual.
"""

import os
import sys
import unittest

import pytest

from tests.op_fuzzing import cases, driver

pytestmark = pytest.mark.thorough

_SOAK = os.environ.get("MONOLITH_SOAK") == "1"
_CALLS = 300 if _SOAK else 10
_FIRST_SEED = int(os.environ.get("MONOLITH_FUZZ_SEED", "0"))
_MAX_DESCRIBED = 5


class OpFuzzTest(unittest.TestCase):
  def test_every_op_lives_through_random_calls(self):
    names = cases.op_names()
    self.assertGreaterEqual(len(names), 169)
    # Ops in turns: when one of them is slow, the others go on beside it.
    calls = [(name, seed) for seed in range(_FIRST_SEED, _FIRST_SEED + _CALLS) for name in names]

    failures = driver.run(calls, os.cpu_count() or 1)

    if failures:
      for failure in failures[:_MAX_DESCRIBED]:
        print(driver.describe(failure), file=sys.stderr)
      self.fail("\n".join(map(str, failures)))

  def test_calls_do_not_depend_on_anything_but_their_seed(self):
    for name in cases.op_names()[::10]:
      once, again = (cases.make(name, 7, lambda _: True).describe() for _ in range(2))
      self.assertEqual(once, again)

  def test_driver_sees_who_dies_hangs_or_takes_memory(self):
    # Without a library that can do these, the worker has calls of its own.
    calls = [("!abort", 1), ("!hang", 1), ("!memory", 1), ("!fine", 1), ("!segv", 1)]
    failures = driver.run(calls, 2, case_seconds=5)
    self.assertEqual([f.op for f in failures], ["!abort", "!hang", "!memory", "!segv"])
    what = {f.op: f.what for f in failures}
    self.assertIn("status -6", what["!abort"])
    self.assertIn("no answer", what["!hang"])
    self.assertIn("memory", what["!memory"])
    self.assertIn("status -11", what["!segv"])


if __name__ == "__main__":
  unittest.main()
