"""Versions that arrive, and sizes of exports: `model_manager` and `resource_utils`."""

from __future__ import annotations

import os
import pathlib
import shutil
import unittest
from unittest import mock

from monolith.agent_service import resource_utils
from monolith.agent_service.model_manager import ModelManager
from tests.wait_until import wait_until


class ModelManagerTest(unittest.TestCase):
  def setUp(self):
    root = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.source, self.receive = root / "source", root / "receive"
    self.source.mkdir()

  def arrive(self, version, sub_models=("entry", "ps_0"), done=True):
    for sub_model in sub_models:
      folder = self.source / f"m@{version}" / "m" / sub_model / str(version)
      folder.mkdir(parents=True)
      (folder / "saved_model.pb").write_text(f"{sub_model} {version}")
    if done:
      (self.source / f"m@{version}.write.done").touch()

  def manager(self, **kwargs):
    return ModelManager("m", str(self.source), str(self.receive), False, **kwargs)

  def received(self, sub_model="entry"):
    return sorted(int(path.name) for path in (self.receive / "m" / sub_model).iterdir())

  def test_complete_versions_are_copied(self):
    manager = self.manager()
    self.assertFalse(manager.update())
    self.arrive(9, done=False)
    self.assertFalse(manager.update())
    (self.source / "m@9.write.done").touch()
    self.assertTrue(manager.update())
    self.assertFalse(manager.update())
    copied = self.receive / "m" / "ps_0" / "9" / "saved_model.pb"
    self.assertEqual(copied.read_text(), "ps_0 9")
    self.assertEqual(list(self.source.glob("*.read.lock")), [])

  def test_versions_are_numbers(self):
    manager = self.manager()
    self.arrive(9)
    manager.update()
    self.arrive(10)
    self.assertTrue(manager.update())
    self.assertEqual((self.received(), manager.latest_version), ([9, 10], 10))
    # An older one that comes late stays away.
    self.arrive(8)
    self.assertFalse(manager.update())

  def test_five_versions_stay(self):
    manager = self.manager()
    for version in range(1, 8):
      self.arrive(version)
      manager.update()
    self.assertEqual(self.received(), [3, 4, 5, 6, 7])
    self.assertEqual(self.received("ps_0"), [3, 4, 5, 6, 7])

  def test_all_sub_models_or_none(self):
    manager = self.manager()
    self.arrive(1)
    manager.update()
    self.arrive(2)
    shutil.rmtree(self.source / "m@2" / "m" / "ps_0" / "2")
    with self.assertRaises(OSError):
      manager.update()
    self.assertEqual((self.received(), self.received("ps_0")), ([1], [1]))
    self.assertEqual(list(self.source.glob("*.read.lock")), [])

    real_rename = os.rename

    def fail_at_ps(source, target):
      if "ps_0" in target:
        raise OSError("no space left")
      real_rename(source, target)

    self.arrive(3)
    with mock.patch("os.rename", fail_at_ps), self.assertRaises(OSError):
      manager.update()
    self.assertEqual((self.received(), self.received("ps_0")), ([1], [1]))
    self.assertTrue(manager.update())

  def test_the_first_version_is_waited_for(self):
    with self.assertRaisesRegex(TimeoutError, "no version of m"):
      self.manager(max_waiting_sec=0, interval_secs=0.01).start()
    torn = self.receive / "m" / "entry" / "1-temp"
    torn.mkdir(parents=True)
    self.arrive(1)
    manager = self.manager(interval_secs=0.01)
    manager.start()
    self.addCleanup(manager.stop)
    self.assertFalse(torn.exists())
    self.assertEqual(manager.latest_version, 1)
    self.arrive(2)
    wait_until(lambda: manager.latest_version == 2)


class ResourceUtilsTest(unittest.TestCase):
  def setUp(self):
    self.root = pathlib.Path(os.environ["TEST_TMPDIR"])

  def write(self, path, text):
    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
    (self.root / path).write_text(text)

  def test_sizes_of_models(self):
    for sub_model, versions in (("entry", (9, 10, 11)), ("ps_0", (9, 10)), ("ps_1", (9, 10))):
      for version in versions:
        self.write(f"export/{sub_model}/{version}/variables/data", "x" * version)
    export, ckpt = str(self.root / "export"), str(self.root / "model.ckpt-9")
    self.write("model.ckpt-9.assets/table_0-00000-of-00002", "x" * 100)
    self.write("model.ckpt-9.assets/table_0-00001-of-00002", "x" * 10)
    self.write("model.ckpt-9.assets/table_1-00000-of-00001", "x" * 200)
    self.write("model.ckpt-9.assets/other", "x" * 1000)

    newest = resource_utils.cal_model_info_v2(export)
    self.assertEqual(newest["ps_0"], (10, os.path.join(export, "ps_0", "10")))
    of_checkpoint = resource_utils.cal_model_info_v2(export, ckpt)
    sizes = {name: size for name, (size, _) in of_checkpoint.items()}
    self.assertEqual(sizes, {"entry": 9, "ps_0": 119, "ps_1": 209})
    # A checkpoint whose step nobody exported.
    self.assertEqual(resource_utils.cal_model_info_v2(export, ckpt + "9")["entry"][0], 10)
    self.assertEqual(resource_utils.cal_model_info_v2(export, version="9")["entry"][0], 9)
    with self.assertRaisesRegex(FileNotFoundError, "version 11"):
      resource_utils.cal_model_info_v2(export, version=11)

  def test_limits_of_a_container(self):
    self.write("memory.max", "1000000\n")
    self.write("memory.current", "400000\n")
    self.write("cpu.max", "150000 100000\n")
    cgroup = str(self.root)
    self.assertEqual(resource_utils.total_memory(cgroup), 1000000)
    self.assertEqual(resource_utils.available_memory(cgroup), 600000)
    self.assertEqual(resource_utils.num_cpu(cgroup), 1.5)
    self.write("memory.max", "max\n")
    self.write("cpu.max", "max 100000\n")
    self.assertGreater(resource_utils.total_memory(cgroup), 1000000)
    self.assertEqual(resource_utils.num_cpu(cgroup), os.cpu_count())
    self.assertTrue(0 <= resource_utils.cpu_usage(0.01, cgroup) <= 1)
    with mock.patch.object(resource_utils, "psutil", None):
      self.assertGreater(resource_utils.available_memory(cgroup), 1000000)


if __name__ == "__main__":
  unittest.main()
