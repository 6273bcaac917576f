"""The command line tools over ZooKeeper: `agent_controller`, `agent_client`, `client` and `run`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import unittest
from unittest import mock

from kazoo.handlers.threading import KazooTimeoutError
from tensorflow.core.protobuf import saved_model_pb2

from monolith.agent_service import agent_client, agent_controller, backends, run
from monolith.agent_service.agent_service import AgentDataProvider, AgentService
from monolith.agent_service.mocked_zkclient import FakeKazooClient
from monolith.agent_service.utils import AgentConfig
from monolith.native_training.zk_utils import MonolithKazooClient
from tests.free_ports import get_free_port
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper


def _export(sub_graphs, names_by_version):
  """Writes an export whose entry calls models of these names; returns its folder."""
  base = pathlib.Path(os.environ["TEST_TMPDIR"]) / "export"
  for sub_graph in sub_graphs:
    (base / sub_graph / "1").mkdir(parents=True, exist_ok=True)
  for version, names in names_by_version.items():
    saved_model = saved_model_pb2.SavedModel()
    graph = saved_model.meta_graphs.add().graph_def
    graph.node.add(name="x", op="Placeholder")
    for i, name in enumerate(names):
      # Some in a function, where an exported Keras model has them.
      nodes = graph.node if i == 0 else graph.library.function.add().node_def
      nodes.add(name=f"call{i}", op="TfServingRemotePredict").attr["model_name"].s = name.encode()
    folder = base / "entry" / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "saved_model.pb").write_bytes(saved_model.SerializeToString())
  return str(base)


class ControllerTest(unittest.TestCase):
  def setUp(self):
    self.backend = backends.ZKBackend("demo", None)
    self.zk = self.backend._zk = FakeKazooClient()
    self.backend.start()
    self.addCleanup(self.backend.stop)

  def declare(self, base, **kwargs):
    return agent_controller.declare_saved_model(self.backend, base, **kwargs)

  def test_the_newest_entry_names_the_model(self):
    base = _export(["ps_0", "ps_1"], {9: ["old:ps_0"], 10: ["clicks:ps_0", "clicks:ps_1"]})
    self.assertEqual(self.declare(base), "clicks")
    self.assertEqual(
      [str(model) for model in self.backend.list_saved_models("clicks")],
      ["clicks:entry", "clicks:ps_0", "clicks:ps_1"],
    )
    data, _ = self.zk.get("/demo/saved_models/clicks/ps_1")
    self.assertEqual(
      json.loads(data), {"model_base_path": f"{base}/ps_1", "version_policy": "latest"}
    )
    with self.assertRaisesRegex(ValueError, "already"):
      self.declare(base)
    self.declare(base, overwrite=True)

  def test_exports_that_are_refused(self):
    base = _export([], {1: ["a:ps_0", "b:ps_0"]})
    with self.assertRaisesRegex(ValueError, "several models"):
      self.declare(base)
    base = _export([], {2: ["a:ps_0"]})
    with self.assertRaisesRegex(ValueError, "'b', but the entry calls servers of 'a'"):
      self.declare(base, model_name="b")
    with self.assertRaisesRegex(ValueError, "arch is 'x'"):
      self.declare(base, arch="x")
    base = _export([], {3: []})
    with self.assertRaisesRegex(ValueError, "--model_name"):
      self.declare(base)
    self.assertEqual(self.declare(base, model_name="b"), "b")
    pathlib.Path(base, "entry", "4").mkdir()
    pathlib.Path(base, "entry", "4", "saved_model.pb").write_bytes(b"\xff\xff")
    with self.assertRaisesRegex(ValueError, "no SavedModel"):
      self.declare(base)
    with self.assertRaises(OSError):
      self.declare(base + "x")

  def test_publish_and_unpublish(self):
    self.declare(_export(["ps_0", "ps_1"], {1: ["m:ps_0"]}))
    layout = "/demo/layouts/one"

    def change(action, pattern):
      models = agent_controller.map_model_to_layout(self.backend, pattern, layout, action)
      return [model.sub_graph for model in models]

    self.assertEqual(change("pub", "m:ps_*"), ["ps_0", "ps_1"])
    self.assertEqual(change("pub", "m:entry"), ["entry"])
    self.assertEqual(self.backend.list_layout(layout), ["m:entry", "m:ps_0", "m:ps_1"])
    self.assertEqual(change("unpub", "m:ps_1"), ["ps_1"])
    self.assertEqual(change("unpub", "m"), ["entry", "ps_0"])
    for action, pattern in (("pub", "m:x*"), ("unpub", "m"), ("pub", "n"), ("drop", "m")):
      with self.assertRaises(ValueError):
        change(action, pattern)


class CommandLineTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    require_zookeeper()
    cls.zookeeper = ZooKeeperServer()
    cls.addClassCleanup(cls.zookeeper.close)
    cls.zookeeper.start()

  def run_tool(self, name, *words):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
      status = run.main(["--bin_name", name, *words])
    return status, json.loads(out.getvalue()) if status == 0 else errors.getvalue()

  def test_from_declaration_to_cleaning(self):
    base = _export(["ps_0"], {1: ["m:ps_0"]})
    zk = ("--bzid", "demo", "--zk_servers", self.zookeeper.hosts)
    decl = ("agent_controller", "--cmd", "decl", *zk, "--export_base", base)
    self.assertEqual(self.run_tool(*decl), (0, ["m:entry", "m:ps_0"]))
    status, error = self.run_tool(*decl)
    self.assertEqual(status, 1)
    self.assertIn("--overwrite=1", error)
    self.assertEqual(self.run_tool(*decl, "--overwrite", "1")[0], 0)
    publish = ("--model_name", "m:ps_*", "--layout", "one")
    self.assertEqual(
      self.run_tool("agent_controller", "--cmd", "pub", *zk, *publish), (0, ["m:ps_0"])
    )
    _, info = self.run_tool("agent_controller", "--cmd", "bzid_info", *zk)
    self.assertEqual(info["layout_info"], {"one": ["m:ps_0"]})
    self.assertEqual(self.run_tool("agent_client", "--cmd_type", "get", "--args", "info", *zk)[1],
                     info)  # fmt: skip
    self.assertEqual(
      self.run_tool("agent_controller", "--cmd", "unpub", *zk, *publish), (0, ["m:ps_0"])
    )

    load = ("--cmd_type", "load", "--model_name", "m", "--model_dir", base, *zk)
    expected = {"portal": True, "publish": False, "service": False}
    self.assertEqual(self.run_tool("agent_client", *load), (0, expected))
    get = ("--cmd_type", "get", "--args", "portal", *zk)
    _, portal = self.run_tool("agent_client", *get)
    self.assertEqual(portal["/demo/portal/m"]["model_dir"], base)
    clean = ("--cmd_type", "clean", "--args", "portal", *zk)
    self.assertEqual(self.run_tool("agent_client", *clean), (0, ["m"]))
    self.assertEqual(self.run_tool("agent_client", *get), (0, {}))
    status, error = self.run_tool("client", "--cmd", "unload", "--model_name", "m", *zk)
    self.assertEqual((status, error.strip()), (1, "client: nobody asked for m"))
    self.assertEqual(self.run_tool("agent_client", "--cmd_type", "addr", *zk), (0, {}))

  def test_errors_are_one_line(self):
    words = ("--bzid", "demo", "--zk_servers", f"127.0.0.1:{get_free_port()}")
    # Waiting for an answer takes the client a quarter of a minute.
    error = KazooTimeoutError("no answer")
    with mock.patch.object(MonolithKazooClient, "start", side_effect=error):
      for name, command in (("agent_controller", "--cmd=bzid_info"),
                            ("agent_client", "--cmd_type=addr")):  # fmt: skip
        status, text = self.run_tool(name, command, *words)
        self.assertEqual((status, text.count("\n"), "no answer" in text), (1, 1, True))
    conf = pathlib.Path(os.environ["TEST_TMPDIR"]) / "agent.conf"
    conf.write_text("bzid demo\nnum_pss 3\n")
    status, error = self.run_tool("agent", "--conf", str(conf))
    self.assertEqual((status, "num_pss is no setting" in error), (2, True))
    conf.write_text("bzid demo\ndeploy_type unified\nagent_version 3\n")
    status, error = self.run_tool("agent", "--conf", str(conf))
    self.assertEqual((status, "layout_pattern is not set" in error), (2, True))

  def test_an_agent_is_asked(self):
    conf = AgentConfig(deploy_type="unified", agent_version=3)
    service = AgentService(AgentDataProvider(lambda: {"m:ps_0": ["a:1"]}), conf=conf)
    service.start()
    self.addCleanup(service.stop)
    port = ("--port", str(service.port))
    self.assertEqual(self.run_tool("agent_client", "--cmd_type", "hb", *port),
                     (0, {"m:ps_0": ["a:1"]}))  # fmt: skip
    status, error = self.run_tool("agent_client", "--cmd_type", "gr", *port)
    self.assertEqual(status, 1)
    self.assertIn("UNIMPLEMENTED", error)
    with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
      agent_client.main(["--cmd_type", "hb"])


if __name__ == "__main__":
  unittest.main()
