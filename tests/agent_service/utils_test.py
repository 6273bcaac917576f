"""Tests what the serving side agrees on.

Tests of `names`, `serving_protos`, `instance_formater` and `record_file`.
"""

import os
import socket
import struct
import unittest

import tensorflow as tf

from idl.matrix.proto import proto_parser_pb2
from monolith.agent_service import agent_service_pb2, record_file, serving_protos, utils


class UtilsTest(unittest.TestCase):
  def test_model_states(self):
    self.assertEqual(
      {state.name: int(state) for state in utils.ModelState},
      {"UNKNOWN": 0, "START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50},
    )
    self.assertEqual(utils.ModelState.AVAILABLE, 30)

  def test_server_types(self):
    self.assertEqual(dict(agent_service_pb2.ServerType.items()), {"PS": 0, "ENTRY": 1, "DENSE": 2})

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

  def test_normalize_regex(self):
    regex = utils.normalize_regex("ps_{i}")
    self.assertRegex("ps_12", regex)
    self.assertNotRegex("ps_x", regex)
    with self.assertRaisesRegex(ValueError, "no pattern"):
      utils.normalize_regex("ps_{i}_{i}")

  def test_expand_pattern(self):
    self.assertEqual(utils.expand_pattern("ps_[0-3,7]"), ["ps_0", "ps_1", "ps_2", "ps_3", "ps_7"])
    self.assertEqual(utils.expand_pattern("entry"), ["entry"])
    self.assertEqual(utils.expand_pattern("a[0-1]b[2,3]"), ["a0b2", "a0b3", "a1b2", "a1b3"])
    for pattern in ("ps_[a]", "ps_[3-1]", "ps_[0-999999999999]", "[0-999][0-999]", "ps_[]"):
      with self.assertRaises(ValueError, msg=pattern):
        utils.expand_pattern(pattern)

  def test_sub_model_names(self):
    self.assertEqual(utils.pasre_sub_model_name("ps_3"), ("ps", 3))
    self.assertEqual(utils.pasre_sub_model_name("entry"), ("entry", 0))
    for name in ("", "ps_", "ps_x", "_1"):
      with self.assertRaises(ValueError, msg=name):
        utils.pasre_sub_model_name(name)

  def test_ports(self):
    port = utils.find_free_port()
    self.assertFalse(utils.check_port_open(port))
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      s.listen()
      self.assertTrue(utils.check_port_open(s.getsockname()[1]))

  def test_none_of_a_hundred_ports_is_given_twice(self):
    # Without a memory, three of ten hundreds had a port twice.
    for _ in range(50):
      ports = [utils.find_free_port() for _ in range(100)]
      self.assertEqual(len(set(ports)), 100)


class ProtosTest(unittest.TestCase):
  def test_model_config(self):
    latest = utils.gen_model_config("m", "/m", version_data=3, version_labels={"stable": 2})
    self.assertEqual(latest.model_version_policy.latest.num_versions, 3)
    self.assertEqual((latest.model_platform, latest.version_labels["stable"]), ("tensorflow", 2))
    policy = utils.gen_model_config("m", "/m", "all").model_version_policy
    self.assertEqual(policy.WhichOneof("policy_choice"), "all")
    policy = utils.gen_model_config("m", "/m", "specific", [1, 5]).model_version_policy
    self.assertEqual(policy.specific.versions, [1, 5])
    with self.assertRaisesRegex(ValueError, "latest_once"):
      utils.gen_model_config("m", "/m", "latest_once")

  def test_other_messages(self):
    spec = utils.gen_model_spec("m", 3, "lookup")
    self.assertEqual((spec.version.value, spec.signature_name), (3, "lookup"))
    self.assertEqual(utils.gen_model_spec("m", "stable").version_label, "stable")
    self.assertEqual(utils.gen_status_proto(5, "gone").error_message, "gone")
    statuses = [
      utils.gen_model_version_status(version, state)
      for version, state in ((1, 30), (2, 30), (3, 20))
    ]
    self.assertEqual(serving_protos.newest_version_status(statuses).version, 2)
    self.assertEqual(serving_protos.newest_version_status(statuses[2:]).version, 3)
    self.assertIsNone(serving_protos.newest_version_status([]))
    self.assertEqual(tf.make_ndarray(utils.make_tensor_proto(["a", b"b"])).tolist(), [b"a", b"b"])


class InstanceFormaterTest(unittest.TestCase):
  def test_formats(self):
    inst = proto_parser_pb2.Instance(fid=[1, 2], label=[0.5])
    formater = utils.InstanceFormater(inst)
    folder = os.environ["TEST_TMPDIR"]
    text, json = os.path.join(folder, "text"), os.path.join(folder, "json")
    formater.to_pb_text(text)
    formater.to_json(json)
    self.assertEqual(utils.InstanceFormater.from_pb_text(text).inst, inst)
    self.assertEqual(utils.InstanceFormater.from_json(json).inst, inst)
    data = formater.to_pb()
    tensor = tf.make_ndarray(formater.to_tensor_proto(3))
    self.assertEqual(tensor.tolist(), [data] * 3)
    dump = os.path.join(folder, "dump")
    with open(dump, "wb") as file:
      file.write(bytes(8) + struct.pack("<Q", len(data)) + data)
    self.assertEqual(utils.InstanceFormater.from_dump(dump).inst, inst)
    with self.assertRaisesRegex(ValueError, "no JSON"):
      utils.InstanceFormater.from_json(text)
    with open(dump, "wb") as file:
      file.write(bytes(8) + struct.pack("<Q", len(data)) + data[:-1])
    with self.assertRaisesRegex(ValueError, "ends 1 bytes before"):
      utils.InstanceFormater.from_dump(dump)

  def test_headers_of_records(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "records")
    size = struct.pack("<Q", 3)
    for options, header in (
      ({}, b""),
      ({"lagrangex_header": True, "has_sort_id": True}, bytes(8)),
      ({"has_sort_id": True}, struct.pack("<Q", 2) + b"ab"),
      ({"has_sort_id": True, "kafka_dump": True}, bytes(16)),
      ({"kafka_dump_prefix": True, "has_sort_id": True}, bytes(16) + bytes(8)),
      ({"kafka_dump_prefix": True, "has_sort_id": True}, struct.pack("<Q", 2) + b"ab"),
    ):
      with open(path, "wb") as file:
        file.write((header + size + b"xyz") * 2)
      with open(path, "rb") as file:
        self.assertEqual(list(record_file.read_records(file, **options)), [b"xyz"] * 2, options)


if __name__ == "__main__":
  unittest.main()
