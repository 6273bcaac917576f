"""States, agent settings and paths of the serving side."""

import unittest

from monolith.agent_service import agent_service_pb2, utils


class UtilsTest(unittest.TestCase):
  def test_model_states(self):
    self.assertEqual(
      {state.name: int(state) for state in utils.ModelState},
      {"UNKNOWN": 0, "START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50},
    )
    self.assertEqual(utils.ModelState.AVAILABLE, 30)

  def test_server_types(self):
    self.assertEqual(dict(agent_service_pb2.ServerType.items()), {"PS": 0, "ENTRY": 1, "DENSE": 2})

  def test_agent_config(self):
    config = utils.AgentConfig(bzid="gip", base_name="m", deploy_type="mixed", num_ps=3)
    self.assertEqual(config.deploy_type, "mixed")
    self.assertEqual(str(config.deploy_type), "mixed")
    self.assertEqual((config.num_ps, config.num_shard, config.dc_aware), (3, None, False))

  def test_agent_config_needs_a_deploy_type_unless_stand_alone(self):
    self.assertIsNone(utils.AgentConfig(stand_alone_serving=True).deploy_type)
    with self.assertRaisesRegex(ValueError, "deploy_type is None, want one of"):
      utils.AgentConfig(bzid="gip")
    with self.assertRaisesRegex(ValueError, "deploy_type is 'xyz'"):
      utils.AgentConfig(deploy_type="xyz")
    for name in ("ps", "entry", "dense", "mixed", "unified"):
      self.assertEqual(utils.AgentConfig(deploy_type=name).deploy_type, name)

  def test_zk_path(self):
    path = utils.ZKPath("/gip/service/model/ps:7/2")
    self.assertEqual(
      (path.bzid, path.base_name, path.server_type, path.index, path.replica_id),
      ("gip", "model", "ps", "7", "2"),
    )
    self.assertEqual(path.task, "ps:7")
    self.assertIsNone(path.idc)
    self.assertIsNone(path.location)

  def test_zk_path_takes_any_word_and_id(self):
    path = utils.ZKPath("/gip/service/model/retrieval:7/pod-a_1")
    self.assertEqual((path.task, path.replica_id, path.replica), ("retrieval:7", "pod-a_1", -1))
    self.assertEqual(utils.ZKPath("/gip/service/model/entry:0/00000000012").replica, 12)

  def test_zk_path_of_a_data_centre(self):
    path = utils.ZKPath("/gip/service/model/lq:default/entry:0")
    self.assertEqual((path.idc, path.cluster, path.location), ("lq", "default", "lq:default"))
    self.assertEqual((path.task, path.replica_id), ("entry:0", None))
    self.assertTrue(path.ship_in("lq", "default"))
    self.assertFalse(path.ship_in("lq", "other"))
    self.assertTrue(path.ship_in(None, "other"))
    self.assertTrue(path.ship_in("other", None))

  def test_zk_path_of_something_else(self):
    for text in ("", "/", "/gip/model", "/gip/service/model/ps", "/gip/service/model/ps:x/1"):
      path = utils.ZKPath(text)
      self.assertIsNone(path.bzid, text)
      self.assertIsNone(path.task, text)


if __name__ == "__main__":
  unittest.main()
