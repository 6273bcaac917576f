"""Settings of agents: `agent_config`, `config_file`, `deploy_type` and `expressions`."""

import hashlib
import os
import pathlib
import shlex
import unittest
from unittest import mock

from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from monolith.agent_service import config_file, expressions, layouts
from monolith.agent_service.utils import AgentConfig, DeployType, TfServingConfig

_ENVIRONMENT = ("MONOLITH_HOST_SHARD_N", "SHARD_ID", "REPLICA_ID", "MY_POD_NAME", "TCE_PSM")


def _clean_environment(**values):
  kept = {
    name: value
    for name, value in os.environ.items()
    if name not in _ENVIRONMENT and not name.startswith(("PORT", "TCE_"))
  }
  return mock.patch.dict("os.environ", {**kept, **values}, clear=True)


def _flags(command):
  words = shlex.split(command)
  return words[0], dict(word[2:].partition("=")[::2] for word in words[1:])


class ExpressionsTest(unittest.TestCase):
  def test_values(self):
    for text, value in (
      ("60 * 1000 * 1000", 60_000_000),
      ("-(7 // 2) + 5 % 3", -1),
      ("1e6 / 4", 250_000),
      ("i % 3 == 0 and 1 <= i < 7", True),
      ("i > 7 or not i == 6", False),
      ("i == 7 or 1 / 0", None),
    ):
      if value is None:
        with self.assertRaisesRegex(ValueError, "division"):
          expressions.evaluate(text, {"i": 6})
      else:
        self.assertEqual(expressions.evaluate(text, {"i": 6}), value, text)

  def test_nothing_is_run(self):
    for text in (
      "__import__('os').system('true')", "open", "(1).real", "[1]", "'a'", "2 ** 9", "x", "i.j",
      "lambda: 1", "1 if 1 else 2", "", "1 +", "(" * 300 + "1" + ")" * 300, "1" * 2000, "{}",
      "1 << 99",
    ):  # fmt: skip
      with self.assertRaises(ValueError, msg=text):
        expressions.evaluate(text, {"i": 1})


class ConfigFileTest(unittest.TestCase):
  def write(self, text, name="agent.conf"):
    path = os.path.join(os.environ["TEST_TMPDIR"], name)
    with open(path, "w", encoding="utf-8") as file:
      file.write(text)
    return path

  def test_forms(self):
    self.write("num_ps\t4\nuse_metrics = no # not here\n", "common.conf")
    path = self.write(
      "# An agent.\n\nbzid demo\nserver_type=PS\ninclude common.conf\n"
      "load_retry_interval_micros 2 * 1000 # micros\nlayout_pattern none\n"
      "layout_filters ps_{i};i % 2 == 0\nlayout_filters entry;1\nlayout_filters dense;1\n"
      "version_data 5\nper_process_gpu_memory_fraction 1 / 4\n"
    )
    config = AgentConfig.from_file(path)
    self.assertEqual((config.bzid, config.deploy_type, config.num_ps), ("demo", "ps", 4))
    self.assertEqual(config.use_metrics, False)
    self.assertEqual(config.load_retry_interval_micros, 2000)
    self.assertIsNone(config.layout_pattern)
    # All values of a repeated key, not the first two.
    self.assertEqual(config.layout_filters, ["ps_{i};i % 2 == 0", "entry;1", "dense;1"])
    self.assertEqual((config.version_data, config.per_process_gpu_memory_fraction), (5, 0.25))

  def test_files_on_the_page_of_agents(self):
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    files = [block for block in page.split("```")[1::2] if "\nbzid " in block]
    with _clean_environment(SHARD_ID="1"):
      unified, roles = (AgentConfig.from_file(self.write(text)) for text in files)
      self.assertEqual((unified.agent_version, len(unified.layout_filters)), (3, 2))
      layout_filter = layouts.LayoutFilter(unified.layout_filters, shard_id=1, shard_num=2)
      names = ["entry", "ps_0", "ps_1", "ps_3"]
      self.assertEqual([n for n in names if layout_filter.accepts(n)], ["entry", "ps_1", "ps_3"])
      self.assertEqual((roles.deploy_type, roles.ps_tasks()), ("ps", [1, 3]))

  def test_words_of_switches(self):
    for words, value in ((("true", "Y", "t", "yes", "1"), True), (("False", "n", "f", "0"), False)):
      for word in words:
        self.assertIs(config_file.convert("x", word, "bool"), value)

  def test_errors_name_the_setting(self):
    for text, message in (
      ("deploy_type ps\nnum_pss 3", "num_pss is no setting"),
      ("deploy_type ps\nnum_ps three", "num_ps is 'three'"),
      ("deploy_type ps\nnum_ps 1.5", "whole number"),
      ("deploy_type ps\nnum_ps 1\nnum_ps 2", "num_ps is given 2 times"),
      ("deploy_type ps\ndc_aware maybe", "dc_aware is 'maybe'"),
      ("deploy_type", "agent.conf:1"),
      ("deploy_type ps\nserver_type ps", "two names"),
      ("num_ps __import__('os').getpid()", "num_ps is"),
      ("include agent.conf", "includes itself"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        AgentConfig.from_file(self.write(text))
    with self.assertRaises(OSError):
      AgentConfig.from_file(self.write("include nothing.conf"))


class DeployTypeTest(unittest.TestCase):
  def test_compares_with_strings(self):
    self.assertEqual(DeployType("PS"), "ps")
    self.assertEqual(DeployType.PS, "Ps")
    self.assertNotEqual(DeployType.PS, "entry")
    self.assertIn(DeployType("entry"), {"entry"})
    with self.assertRaisesRegex(AssertionError, "'xyz'"):
      DeployType("xyz")

  def test_compat_server_type(self):
    self.assertEqual(DeployType.MIXED.compat_server_type("ps"), "ps")
    with self.assertRaises(RuntimeError):
      DeployType.MIXED.compat_server_type(None)
    self.assertEqual(DeployType.ENTRY.compat_server_type(None), "entry")
    self.assertEqual(DeployType.ENTRY.compat_server_type("entry"), "entry")
    with self.assertRaises(AssertionError):
      DeployType.ENTRY.compat_server_type("ps")


class AgentConfigTest(unittest.TestCase):
  def setUp(self):
    patch = _clean_environment()
    patch.start()
    self.addCleanup(patch.stop)

  def test_deploy_type(self):
    config = AgentConfig(bzid="gip", base_name="m", deploy_type="mixed", num_ps=3)
    self.assertEqual((str(config.deploy_type), config.num_ps), ("mixed", 3))
    self.assertEqual(AgentConfig(stand_alone_serving=True).deploy_type, "mixed")
    with self.assertRaisesRegex(AssertionError, "deploy_type is None, want one of"):
      AgentConfig(bzid="gip")
    with self.assertRaisesRegex(AssertionError, "deploy_type is 'xyz'"):
      AgentConfig(deploy_type="xyz")
    with self.assertRaisesRegex(ValueError, "agent_version is 2"):
      AgentConfig(deploy_type="ps", agent_version=2)

  def test_shards(self):
    self.assertEqual(AgentConfig(deploy_type="ps").num_shard, 1)
    self.assertEqual(AgentConfig(deploy_type="ps", num_ps=3).ps_tasks(), [0, 1, 2])
    with _clean_environment(MONOLITH_HOST_SHARD_N="2", SHARD_ID="1"):
      config = AgentConfig(deploy_type="ps", num_ps=5)
      self.assertEqual((config.num_shard, config.shard_id), (2, 1))
      self.assertEqual(config.ps_tasks(), [1, 3])
      with self.assertRaisesRegex(AssertionError, "MONOLITH_HOST_SHARD_N is 2"):
        AgentConfig(deploy_type="ps", num_shard=3)
    with self.assertRaisesRegex(ValueError, "SHARD_ID is -1"):
      AgentConfig(deploy_type="ps", num_shard=2).ps_tasks()

  def test_replica_ids(self):
    self.assertEqual(AgentConfig(deploy_type="ps").replica_id, -1)
    self.assertEqual(AgentConfig(deploy_type="ps", replica_id=4).replica_id, 4)
    with _clean_environment(REPLICA_ID="7", MY_POD_NAME="pod"):
      self.assertEqual(AgentConfig(deploy_type="unified", agent_version=3).replica_id, 7)
      # Version 1 does not read REPLICA_ID.
      digits = hashlib.md5(b"pod").hexdigest()[10:20]
      self.assertEqual(AgentConfig(deploy_type="ps").replica_id, int(digits, 16))

  def test_places(self):
    with _clean_environment(TCE_INTERNAL_IDC="LF", TCE_PHYSICAL_CLUSTER="x", TCE_CLUSTER="Default"):
      config = AgentConfig(bzid="b", base_name="m", deploy_type="ps", dc_aware=True)
      self.assertEqual((config.idc, config.cluster), ("lf", "default"))
      self.assertEqual(config.location, "lf:default")
      self.assertEqual(config.path_prefix, "/b/service/m/lf:default")
      self.assertEqual(config.container_cluster, "unknown;lf;default")
    config = AgentConfig(bzid="b", base_name="m", deploy_type="ps", layout_pattern="mixed/one")
    self.assertEqual(config.path_prefix, "/b/service/m")
    self.assertEqual(config.layout_path, "/b/layouts/mixed/one")
    config.layout_pattern = "/b/elsewhere"
    self.assertEqual(config.layout_path, "/b/elsewhere")
    with _clean_environment(MY_POD_NAME="pod"):
      self.assertEqual(config.container_id, "pod")

  def test_ports(self):
    ports = {"PORT": "1000"} | {f"PORT{i}": str(1000 + i) for i in range(2, 11)}
    with _clean_environment(**ports):
      entry = AgentConfig(deploy_type="entry")
      self.assertEqual(
        (entry.tfs_entry_archon_port, entry.tfs_entry_port, entry.tfs_entry_http_port),
        (1000, 1003, 1004),
      )
      self.assertEqual(entry.agent_port, 1002)
      mixed = AgentConfig(deploy_type="mixed", dense_alone=True)
      self.assertEqual(
        (mixed.tfs_ps_port, mixed.tfs_ps_http_port, mixed.tfs_ps_archon_port), (1005, 1006, 1007)
      )
      self.assertEqual((mixed.tfs_entry_port, mixed.tfs_dense_port), (1003, 1008))
      unified = AgentConfig(deploy_type="unified", agent_version=3)
      self.assertEqual(
        (unified.tfs_port_archon, unified.tfs_port_grpc, unified.tfs_port_http), (1000, 1003, 1004)
      )
    free = AgentConfig(deploy_type="ps")
    self.assertEqual(len({free.tfs_ps_port, free.tfs_ps_http_port, free.agent_port}), 3)
    with _clean_environment(PORT2="http"), self.assertRaisesRegex(ValueError, "PORT2 is 'http'"):
      AgentConfig(deploy_type="ps")

  def test_command_of_parameter_servers(self):
    config = AgentConfig(
      deploy_type="mixed", base_path="/models/m", num_ps=2, enable_batching=True,
      flush_filesystem_caches=False, file_system_poll_wait_seconds=9,
    )  # fmt: skip
    program, flags = _flags(config.get_cmd("tensorflow_model_server", "ps"))
    self.addCleanup(os.remove, flags["model_config_file"])
    self.assertEqual(program, "tensorflow_model_server")
    self.assertEqual(flags["port"], str(config.tfs_ps_port))
    self.assertEqual(flags["rest_api_port"], str(config.tfs_ps_http_port))
    self.assertEqual(flags["file_system_poll_wait_seconds"], "0")
    self.assertEqual(
      (flags["enable_batching"], flags["flush_filesystem_caches"]), ("true", "false")
    )
    self.assertNotIn("model_config_file_poll_wait_seconds", flags)
    self.assertNotIn("enable_profiler", flags)
    with open(flags["model_config_file"], encoding="utf-8") as file:
      models = text_format.Parse(file.read(), model_server_config_pb2.ModelServerConfig())
    self.assertEqual(
      [(model.name, model.base_path) for model in models.model_config_list.config],
      [("ps_0", "/models/m/ps_0"), ("ps_1", "/models/m/ps_1")],
    )
    self.assertEqual(models.model_config_list.config[0].model_version_policy.latest.num_versions, 1)
    with self.assertRaises(RuntimeError):
      config.get_cmd("tensorflow_model_server")

  def test_command_of_unified_serving(self):
    config = AgentConfig(deploy_type="unified", agent_version=3, fetch_ps_retry=3)
    _, flags = _flags(config.get_cmd("server"))
    self.addCleanup(os.remove, flags["model_config_file"])
    self.assertEqual(flags["model_config_file_poll_wait_seconds"], "0")
    self.assertEqual(flags["fetch_ps_retry"], "3")
    self.assertEqual(os.stat(flags["model_config_file"]).st_size > 0, True)
    self.assertEqual(TfServingConfig(version="1").get_cmd("server"), "server --version=1")


if __name__ == "__main__":
  unittest.main()
