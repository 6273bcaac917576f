"""Tests what replicas write about themselves."""

import json
import unittest

from monolith.agent_service.data_def import (
  EventType,
  ModelMeta,
  PublishMeta,
  PublishType,
  ReplicaMeta,
  ResourceSpec,
)
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

  def test_paths(self):
    entry = ReplicaMeta(server_type="entry", task=0, replica=12)
    self.assertEqual(entry.get_path("/b/service/m"), "/b/service/m/entry:0/00000000012")
    ps = ReplicaMeta(server_type="ps", task=3, replica=12)
    self.assertEqual(ps.get_path("/b/service/m"), "/b/service/m/ps:3/12")

  def test_nonsense_is_an_error(self):
    for text in ("[]", "7", "{", '{"address": 7}', '{"stat": "30"}', '{"task": null}'):
      with self.assertRaises(ValueError, msg=text):
        ReplicaMeta.from_json(text)


class PublishingTest(unittest.TestCase):
  def test_defaults_and_paths(self):
    self.assertEqual(
      json.loads(ModelMeta(model_name="m", model_dir="/d").to_json()),
      {
        "model_name": "m", "model_dir": "/d", "ckpt": None, "num_shard": -1, "action": "NONE",
        "spec_replicas": [],
      },
    )  # fmt: skip
    publish = PublishMeta(shard_id=1, replica_id=2, model_name="m", sub_models={"ps_0": "/p"})
    self.assertEqual(PublishMeta.deserialize(publish.serialize()), publish)
    self.assertEqual((publish.ptype, publish.total_publish_num), (PublishType.LOAD, 1))
    self.assertEqual(publish.get_path("/b/publish"), "/b/publish/1:2:m")
    resource = ResourceSpec("a:1", 1, 2, memory=3)
    self.assertEqual(resource.get_path("/b/resource"), "/b/resource/1:2")
    self.assertEqual((resource.cpu, resource.network, resource.work_load), (-1, -1, -1))

  def test_every_event_has_a_number_of_its_own(self):
    self.assertEqual(len({int(kind) for kind in EventType}), len(EventType.__members__))


if __name__ == "__main__":
  unittest.main()
