"""Tests of reading flags that other modules define."""

import unittest

from absl import flags
from absl.testing import flagsaver

from monolith.native_training.data.data_flags import get_flag

flags.DEFINE_integer("data_flags_test_number", None, "a flag without value")
flags.DEFINE_integer("data_flags_test_default", 4, "a flag with a value")


class GetFlagTest(unittest.TestCase):
  def test_unknown_and_unset_flags_have_the_default(self):
    self.assertIsNone(get_flag("data_flags_test_no_such_flag"))
    self.assertEqual(get_flag("data_flags_test_no_such_flag", 3), 3)
    self.assertEqual(get_flag("data_flags_test_number", 3), 3)

  def test_values_that_are_false_are_values(self):
    with flagsaver.flagsaver(data_flags_test_number=0):
      self.assertEqual(get_flag("data_flags_test_number", 3), 0)

  def test_before_the_command_line_is_parsed(self):
    with flagsaver.flagsaver():
      flags.FLAGS.unparse_flags()
      try:
        self.assertEqual(get_flag("data_flags_test_default"), 4)
      finally:
        flags.FLAGS.mark_as_parsed()


if __name__ == "__main__":
  unittest.main()
