"""What replicas write about themselves."""

import json
import unittest

from monolith.agent_service.data_def import ReplicaMeta
from monolith.agent_service.utils import ModelState


class ReplicaMetaTest(unittest.TestCase):
  def test_round_trip(self):
    meta = ReplicaMeta(
      address="1.2.3.4:5", stat=ModelState.AVAILABLE, model_name="m", server_type="ps", task=3,
      replica=1,
    )  # fmt: skip
    self.assertEqual(ReplicaMeta.deserialize(meta.serialize()), meta)
    self.assertEqual(ReplicaMeta.from_json(meta.to_json()), meta)
    self.assertIsInstance(meta.serialize(), bytes)

  def test_json(self):
    self.assertEqual(
      json.loads(ReplicaMeta(address="a:1").to_json()),
      {
        "address": "a:1", "address_ipv6": None, "stat": 0, "model_name": None,
        "server_type": None, "task": -1, "replica": -1, "archon_address": None,
        "archon_address_ipv6": None,
      },
    )  # fmt: skip

  def test_unknown_and_missing_names(self):
    meta = ReplicaMeta.from_json('{"address": "a:1", "later": 7}')
    self.assertEqual(meta, ReplicaMeta(address="a:1"))

  def test_get_address(self):
    meta = ReplicaMeta(
      address="v4:1", address_ipv6="[v6]:1", archon_address="a4:1", archon_address_ipv6="[a6]:1"
    )
    self.assertEqual(meta.get_address(), "v4:1")
    self.assertEqual(meta.get_address(address_family="ipv6"), "[v6]:1")
    self.assertEqual(meta.get_address(use_archon=True), "a4:1")
    self.assertEqual(meta.get_address(use_archon=True, address_family="ipv6"), "[a6]:1")

  def test_get_address_falls_back_to_the_other_family(self):
    meta = ReplicaMeta(address="0.0.0.0:1", address_ipv6="[v6]:1")
    self.assertEqual(meta.get_address(), "[v6]:1")
    meta = ReplicaMeta(address="v4:1", address_ipv6="[::]:1")
    self.assertEqual(meta.get_address(address_family="ipv6"), "v4:1")
    self.assertIsNone(ReplicaMeta(address="0.0.0.0:1").get_address())
    with self.assertRaisesRegex(ValueError, "ipv5"):
      meta.get_address(address_family="ipv5")


if __name__ == "__main__":
  unittest.main()
