"""Tests of the slots of features that have no feature list."""

import concurrent.futures
import unittest
from unittest import mock

from monolith.native_training.data import utils


class SlotsTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    for name, value in (("TOBENV", False), ("USED_FREATUE_NAMES", {}), ("NAME_TO_SLOT", {})):
      patcher = mock.patch.object(utils, name, value)
      patcher.start()
      self.addCleanup(patcher.stop)

  def test_the_number_in_a_name_is_its_slot(self):
    self.assertEqual(utils.get_slot_from_feature_name("slot_12"), 12)
    self.assertEqual(utils.get_slot_from_feature_name("fc_slot_345"), 345)
    for name in ("slot_", "slot_1x", "a_slot_1", "fc_1"):
      self.assertIsNone(utils.find_slot(name), name)
    self.assertEqual(utils.USED_FREATUE_NAMES, {})

  def test_other_names_are_numbered_as_they_come(self):
    self.assertEqual(utils.get_slot_from_feature_name("user"), 1)
    self.assertEqual(utils.get_slot_from_feature_name("item"), 2)
    self.assertEqual(utils.get_slot_from_feature_name("user"), 1)

  def test_registered_slots_come_first(self):
    utils.register_slots({"user": 7, "slot_3": 30})
    utils.register_slots([5])

    self.assertEqual(utils.get_slot_from_feature_name("user"), 7)
    self.assertEqual(utils.get_slot_from_feature_name("slot_3"), 30)
    self.assertEqual(utils.NAME_TO_SLOT["slot_5"], 5)

  def test_names_of_slots(self):
    self.assertEqual(utils.get_slot_feature_name(3), "slot_3")
    utils.enable_tob_env()
    self.assertEqual(utils.get_slot_feature_name(3), "fc_slot_3")

  def test_threads_never_share_a_number(self):
    names = [f"feature_{i}" for i in range(200)] * 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      slots = dict(zip(names, pool.map(utils.get_slot_from_feature_name, names)))

    self.assertEqual(sorted(slots.values()), list(range(1, 201)))
    self.assertEqual(slots, utils.USED_FREATUE_NAMES)


if __name__ == "__main__":
  unittest.main()
