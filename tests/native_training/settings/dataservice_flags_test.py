"""Tests of the flags of tf.data service."""

import unittest

from absl import flags

from monolith.native_training import mlp_utils  # noqa: F401, imports the flags too
from monolith.native_training.data import datasets  # noqa: F401
from monolith.native_training.settings import dataservice_flags


class FlagsTest(unittest.TestCase):
  def test_they_have_one_definition_and_default_to_no_service(self):
    for name, default in (("data_service_dispatcher", ""), ("dataset_use_dataservice", False)):
      self.assertEqual(flags.FLAGS[name].default, default)
      self.assertEqual(flags.FLAGS.find_module_defining_flag(name), dataservice_flags.__name__)


if __name__ == "__main__":
  unittest.main()
