"""`benchmarks/step_parts.py` gives each moment of a step to the parts that run in it."""

import importlib.util
import pathlib
import sys
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _load():
  spec = importlib.util.spec_from_file_location("step_parts", _ROOT / "benchmarks/step_parts.py")
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


step_parts = _load()
_MS = 1_000_000


class LabelsTest(unittest.TestCase):
  def test_ops_belong_to_parts(self):
    for name, op_type, part in (
      ("IteratorGetNext", "IteratorGetNext", "input"),
      ("lookup", "MonolithHashTableLookup", "lookup"),
      ("push", "MonolithHashTableOptimize", "update of rows, with sums per id"),
      ("train/gradients/dense/MatMul_grad/MatMul", "MatMul", "dense, backward"),
      ("dense/MatMul", "MatMul", "dense, forward"),
      ("pool", "MonolithReduceSumAndSplit", "pooling"),
      ("pool_grad", "MonolithReduceSumAndSplitGradient", "pooling, backward"),
      ("x", "_Send", "messages"),
      ("x", "NoOp", "other"),
    ):
      with self.subTest(name=name, op_type=op_type):
        self.assertEqual(step_parts.part_of(name, op_type), part)

  def test_events_that_are_no_ops_have_no_label(self):
    self.assertEqual(step_parts._labels("dense/MatMul:MatMul#id=3#"), ("dense, forward", "MatMul"))
    self.assertEqual(step_parts._labels("Iterator::Root::Map[0]"), ("input", "Map"))
    for event in ("SessionRun", "Schedule#x", "executor::run", step_parts.CLOCK):
      self.assertIsNone(step_parts._labels(event))


class InnermostTest(unittest.TestCase):
  def _cut(self, *events):
    ops = step_parts._innermost([(begin, end, name, name) for begin, end, name in events])
    return [(op.begin, op.end, op.name) for op in ops]

  def test_what_an_op_calls_is_not_its_own_time(self):
    self.assertEqual(
      self._cut((0, 100, "outer"), (20, 40, "inner"), (25, 30, "core")),
      [(0, 20, "outer"), (20, 25, "inner"), (25, 30, "core"), (30, 40, "inner")]
      + [(40, 100, "outer")],
    )

  def test_ops_one_after_the_other_stay_whole(self):
    self.assertEqual(self._cut((50, 60, "b"), (0, 50, "a")), [(0, 50, "a"), (50, 60, "b")])

  def test_two_that_begin_together(self):
    self.assertEqual(self._cut((0, 5, "in"), (0, 9, "out")), [(0, 5, "in"), (5, 9, "out")])


class PartsTest(unittest.TestCase):
  def setUp(self):
    Op = step_parts.Op
    ops = [
      Op(-5 * _MS, 2 * _MS, "lookup", "Lookup"),  # began before the first step
      Op(1 * _MS, 5 * _MS, "dense, forward", "MatMul"),
      Op(1 * _MS, 3 * _MS, "dense, forward", "MatMul"),
      Op(20 * _MS, 21 * _MS, "update", "Late"),
    ]
    samples = [(at * _MS, n) for at, n in ((-1, 9), (0, 1), (1, 3), (2, 9), (4, 1), (6, 0))]
    self.parts = step_parts.Parts(ops, samples, 0, 10 * _MS, steps=2, cores=4)

  def _ms(self, counter):
    return {part: ns / _MS for part, ns in counter.items() if ns}

  def test_time_counts_within_the_steps_only(self):
    self.assertEqual(self.parts.step_ms, 5)
    self.assertEqual(self._ms(self.parts.in_ops), {"lookup": 2, "dense, forward": 6})
    self.assertEqual(
      self._ms(self.parts.active), {"lookup": 2, "dense, forward": 4, "nothing runs": 5}
    )
    self.assertEqual(
      self._ms(self.parts.alone), {"lookup": 1, "dense, forward": 3, "nothing runs": 5}
    )

  def test_looks_at_threads_count_for_what_runs_then(self):
    # 9 threads on 4 cores are 4; the look before the first step does not count.
    self.assertEqual(self.parts.cores, (1 + 3 + 4 + 1 + 0) / 5)
    self.assertEqual(dict(self.parts.looks), {"lookup": 2, "dense, forward": 3, "nothing runs": 1})
    self.assertEqual(self.parts.running["dense, forward"], 3 + 4 + 1)
    self.assertEqual(dict(self.parts.serial), {"lookup": 1, "dense, forward": 1, "nothing runs": 1})

  def test_lines_name_the_parts_and_the_serial_ops(self):
    lines = self.parts.lines()

    self.assertTrue(lines[0].endswith("serial"))
    forward = next(line for line in lines if line.startswith("dense, forward"))
    # 2 ops, 6 ms in them, 4 ms active, 3 alone, of two steps; a look stands for 2 ms.
    self.assertEqual(forward.split()[2:], ["1", "3.000", "2.000", "1.500", "2.7", "1.000"])
    self.assertIn("MatMul 1.000", lines[-2])
    self.assertNotIn("Late", lines[-1])


if __name__ == "__main__":
  unittest.main()
