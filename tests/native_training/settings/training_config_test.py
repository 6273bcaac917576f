"""The configurations of training processes: their defaults, their documents and their flags."""

import dataclasses
import re

from absl import flags
from absl.testing import absltest

from monolith.native_training import gflags_utils
from monolith.native_training.settings import training_config as config

# Fields that only code can set.
_WITHOUT_FLAG = {"device_fn", "profile_save_steps_interval", "reload_alias_map", "use_dataservice"}


class ConfigTest(absltest.TestCase):
  def test_every_field_is_documented_once_and_nothing_else_is(self):
    for cls, base in (
      (config.CpuTrainingConfig, set()),
      (
        config.DistributedCpuTrainingConfig,
        {field.name for field in dataclasses.fields(config.CpuTrainingConfig)},
      ),
    ):
      documented = re.findall(r"^ *:param (\w+):", cls.__doc__, re.MULTILINE)
      fields = {field.name for field in dataclasses.fields(cls)} - base
      self.assertCountEqual(documented, fields - _WITHOUT_FLAG)

  def test_a_process_without_arguments_is_a_chief_that_keeps_its_tables(self):
    got = config.DistributedCpuTrainingConfig()

    self.assertEqual((got.server_type, got.index, got.num_ps), ("worker", 0, 0))
    self.assertEqual((got.mode, got.filter_type), ("train", "sliding_hash_filter"))
    self.assertIsNone(got.check_restore("/nowhere"))

  def test_partial_synchronous_training_is_not_full(self):
    for sync, partial, full in (
      (False, False, False),
      (False, True, False),
      (True, True, False),
      (True, False, True),
    ):
      got = config.CpuTrainingConfig(
        enable_sync_training=sync, enable_partial_sync_training=partial
      )
      self.assertEqual(got.enable_full_sync_training, full, (sync, partial))

  def test_dataservice_follows_its_flag_unless_the_code_says(self):
    @gflags_utils.update_by_flags
    @dataclasses.dataclass
    class Config(config.CpuTrainingConfig):
      pass

    self.addCleanup(setattr, flags.FLAGS, "dataset_use_dataservice", False)
    self.assertIsNone(Config().use_dataservice)
    flags.FLAGS.dataset_use_dataservice = True
    self.assertTrue(Config().use_dataservice)
    self.assertFalse(Config(use_dataservice=False).use_dataservice)


if __name__ == "__main__":
  absltest.main()
