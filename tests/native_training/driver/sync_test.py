"""Tests what a rank changes in its process for the length of a training run."""

import os
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.training import monitored_session
from tensorflow.python.training.summary_io import SummaryWriterCache

from monolith.native_training.driver import sync
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig


class AdaptedTensorFlowTest(absltest.TestCase):
  def _state(self):
    return (
      monitored_session._PREEMPTION_ERRORS,
      SummaryWriterCache.__dict__["get"],
    )

  def test_all_is_put_back_after_a_failure(self):
    before = self._state()
    for is_root in (True, False):
      with self.assertRaisesRegex(ValueError, "inside"):
        with sync._adapted_tensorflow(is_root):
          self.assertEqual(monitored_session._PREEMPTION_ERRORS, ())
          raise ValueError("inside")

      self.assertEqual(self._state(), before)

  def test_one_rank_writes_summaries(self):
    folder = os.path.join(os.environ["TEST_TMPDIR"], "events")
    with tf.Graph().as_default():
      with sync._adapted_tensorflow(is_root=False):
        writer = SummaryWriterCache.get(folder)
        writer.add_summary("text", 1)
        writer.flush()
      self.assertFalse(os.path.exists(folder))

      with sync._adapted_tensorflow(is_root=True):
        SummaryWriterCache.get(folder).flush()
      self.assertLen(os.listdir(folder), 1)


class RunConfigTest(absltest.TestCase):
  def _config(self, index, **environment):
    config = DistributedCpuTrainingConfig(
      index=index, num_workers=2, model_dir="/model", save_summary_steps=7, log_step_count_steps=9
    )
    with mock.patch.dict(os.environ, environment):
      return sync._run_config(config)

  def test_rank_0_alone_has_intervals(self):
    root, other = self._config(0), self._config(1)
    self.assertEqual((root.save_summary_steps, root.log_step_count_steps), (7, 9))
    self.assertEqual((other.save_summary_steps, other.log_step_count_steps), (None, None))

  def test_a_failed_rank_waits_little_for_its_threads(self):
    self.assertEqual(self._config(0).stop_grace_period_secs, 5)

  def test_environment_overrides_intervals(self):
    root = self._config(0, MONOLITH_SAVE_SUMMARY_INTERVAL="3", MONOLITH_ROOT_LOG_INTERVAL="4")
    self.assertEqual((root.save_summary_steps, root.log_step_count_steps), (3, 4))

  def test_xla_is_on_where_flags_say_so(self):
    def level(**environment):
      options = self._config(0, **environment).session_config.graph_options.optimizer_options
      return options.global_jit_level

    self.assertEqual(level(TF_XLA_FLAGS="--x"), tf.compat.v1.OptimizerOptions.ON_1)
    self.assertNotEqual(level(TF_XLA_FLAGS=""), tf.compat.v1.OptimizerOptions.ON_1)


class EofTest(absltest.TestCase):
  def _agrees(self, switch=None, **config):
    environment = {} if switch is None else {"MONOLITH_SYNC_EOF": switch}
    with mock.patch.dict(os.environ, environment):
      return sync._agrees_on_eof(DistributedCpuTrainingConfig(**config))

  def test_several_ranks_agree_unless_data_is_a_stream(self):
    self.assertTrue(self._agrees(num_workers=2))
    self.assertFalse(self._agrees(num_workers=1))
    self.assertFalse(self._agrees(num_workers=2, enable_realtime_training=True))

  def test_switch_decides(self):
    self.assertFalse(self._agrees("0", num_workers=2))
    self.assertTrue(self._agrees("1", num_workers=1))


if __name__ == "__main__":
  absltest.main()
