"""`benchmarks/train_goals.py` says which goals of training were reached."""

import importlib.util
import pathlib
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _load():
  spec = importlib.util.spec_from_file_location("train_goals", _ROOT / "benchmarks/train_goals.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


train_goals = _load()


class TrainGoalsTest(unittest.TestCase):
  def test_two_cores_are_held_to_both_peers(self):
    rates = {"local": 350.0, "keras": 100.0, "tuned_keras": 200.0}

    self.assertEqual(
      train_goals.judge(2, 26, 4096, rates, None),
      ["local: 3.50 of keras, want 3.5", "local: 1.75 of tuned_keras, want 2.2  BELOW"],
    )

  def test_sixteen_cores_reach_a_ratio_or_a_rate(self):
    rates = {"local": 1.0e6, "local, 4 steps": 2.0e6, "monolith_keras": 1.9e6, "tuned_keras": 1.0e6}
    instead = "or 2,000,000 examples/s"

    self.assertEqual(
      train_goals.judge(16, 26, 4096, rates, 0.25e6),
      [
        f"local: 1.00 of tuned_keras, want 2.5 {instead}  BELOW",
        "local: 4.0 of one core, want 8.0  BELOW",
        f"local, 4 steps: 2.00 of tuned_keras, want 2.5 {instead}",
        "local, 4 steps: 8.0 of one core, want 8.0",
        "monolith_keras: 1.90 of tuned_keras, want 2.0  BELOW",
      ],
    )

  def test_what_has_no_goal_is_not_judged(self):
    self.assertEqual(train_goals.judge(4, 26, 4096, {"local": 1.0, "keras": 9.0}, 1.0), [])
    self.assertEqual(train_goals.judge(2, 26, 4096, {"local": 1.0}, None), [])
    self.assertEqual(train_goals.judge_job("2+3", 0.1), "")

  def test_jobs_of_servers_and_workers(self):
    self.assertEqual(train_goals.judge_job("1+1", 0.8), ", want 0.8")
    self.assertEqual(train_goals.judge_job("4+4", 0.69), ", want 0.7  BELOW")


if __name__ == "__main__":
  unittest.main()
