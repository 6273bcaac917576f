"""Tests of the recorder that records nothing."""

import unittest

from monolith.native_training.model_dump.dump_utils import DumpUtils


class DumpUtilsTest(unittest.TestCase):
  def test_calls_do_nothing(self):
    dump_utils = DumpUtils()

    self.assertFalse(dump_utils.enable)
    for name in (
      "record_params", "dump", "add_config", "add_user_params", "add_model_fn", "add_optimizer",
    ):  # fmt: skip
      self.assertIsNone(getattr(dump_utils, name)("anything", at=["all"]))

  def test_decorators_return_the_function(self):
    dump_utils = DumpUtils()

    def lookup(name):
      return name

    for name in ("record_feature", "record_slice", "record_receiver"):
      self.assertIs(getattr(dump_utils, name)(lookup), lookup)

  def test_enabling_it_is_answered(self):
    with self.assertLogs("absl", "WARNING") as logs:
      dump_utils = DumpUtils(enable=True)

    self.assertIn("models cannot be dumped", logs.output[0])
    self.assertFalse(dump_utils.enable)


if __name__ == "__main__":
  unittest.main()
