"""Choosing the fastest parameter servers."""

from __future__ import annotations

import os

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import cpu_training, ps_benchmark, utils

tf.compat.v1.disable_eager_execution()


class PsBenchmarkTest(tf.test.TestCase):
  def _train(self, **kwargs):
    p = ps_benchmark.PsBenchMarkTask.params()
    p.bm_config = ps_benchmark.BenchmarkConfig(
      ps_list=["ps0", "ps1"],
      num_ps_required=1,
      num_workers=1,
      index=0,
      benchmark_secs=1.0,
      **kwargs,
    )
    ps_list = p.bm_config.ps_list
    model_dir = os.path.join(utils.get_test_tmp_dir(), self.id())
    cpu_training.local_train(p, num_ps=2, model_dir=model_dir)
    self.assertIs(p.bm_config.ps_list, ps_list)
    self.assertIsNone(tf.train.latest_checkpoint(model_dir))
    return p

  def testBasic(self):
    p = self._train()

    self.assertEqual(len(p.bm_config.ps_list), 1)
    self.assertIn(p.bm_config.ps_list[0], ("ps0", "ps1"))

  def testSkipBenchmark(self):
    p = self._train(ps_str_overridden="overridden")

    self.assertEqual(p.bm_config.ps_list[0], "overridden")

  def test_overriding_list_is_cut(self):
    p = self._train(ps_str_overridden="ps1,ps0,ps2")

    self.assertEqual(p.bm_config.ps_list, ["ps1"])

  def test_overriding_list_is_too_short(self):
    config = ps_benchmark.BenchmarkConfig(["a", "b"], 2, 1, 0, ps_str_overridden="a")

    with self.assertRaisesRegex(ValueError, "ps_str_overridden is 'a', want 2 servers"):
      ps_benchmark._BenchmarkWorkerHook(config, None)


class ChooseTest(absltest.TestCase):
  def test_fastest_win(self):
    chosen = ps_benchmark._choose(["a:1", "b:1", "c:1"], [1.0, 3.0, 2.0], 2)

    self.assertEqual(chosen, ["b:1", "c:1"])

  def test_one_server_of_each_machine_comes_first(self):
    chosen = ps_benchmark._choose(["a:1", "a:2", "b:1"], [10.0, 10.0, 12.0], 2)

    self.assertEqual(chosen, ["a:2", "b:1"])

  def test_slower_servers_of_the_same_machine_are_added(self):
    addrs, throughputs = ["a:1", "a:2", "b:1", "c:1"], [2.0, 1.5, 3.0, 1.0]

    self.assertEqual(ps_benchmark._choose(addrs, throughputs, 4), ["a:1", "b:1", "a:2", "c:1"])

  def test_address_without_port(self):
    self.assertEqual(ps_benchmark._choose(["a", "b"], [1.0, 2.0], 1), ["b"])

  def test_fewer_servers_than_required(self):
    self.assertEqual(ps_benchmark._choose(["a"], [1.0], 3), ["a"])


if __name__ == "__main__":
  absltest.main()
