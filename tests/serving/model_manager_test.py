"""Tests of `model_manager` and `model_config` that need no server."""

import os
import shutil
import tempfile
import unittest
from unittest import mock

from tensorflow_serving.apis import model_pb2

from monolith.serving import model_config
from monolith.serving.model_manager import ModelManager
from tests.wait_until import wait_until


class RetryTest(unittest.TestCase):
  def test_a_version_that_failed_is_tried_again_though_nobody_looks_for_new_ones(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    os.mkdir(os.path.join(folder, "1"))
    servable = mock.Mock(follower=None)
    load = mock.Mock(side_effect=[ValueError("the servers of its tables start too"), servable])
    manager = ModelManager(load, max_load_retries=1, retry_secs=0.01)
    self.addCleanup(manager.close)

    manager.set_models(model_config.from_flags("m", folder))

    wait_until(lambda: manager.availability().get("m"))
    self.assertEqual(load.call_count, 2)


class FolderTest(unittest.TestCase):
  def test_a_base_path_without_versions_is_logged_once(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    manager = ModelManager(mock.Mock())
    self.addCleanup(manager.close)

    with self.assertLogs("absl", "WARNING") as logs:
      manager.set_models(model_config.from_flags("m", folder))
      manager.poll()

    (line,) = logs.output
    self.assertIn(f"No versions of model 'm' under base path {folder}", line)


class LabelsTest(unittest.TestCase):
  def test_a_label_of_the_first_configuration_is_set_though_nobody_looks_for_new_versions(self):
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    os.mkdir(os.path.join(folder, "7"))
    models = model_config.from_flags("m", folder)
    models["m"].version_labels["stable"] = 7
    manager = ModelManager(mock.Mock(return_value=mock.Mock(follower=None)))
    self.addCleanup(manager.close)

    manager.set_models(models)

    wait_until(lambda: manager.availability().get("m"))
    spec = model_pb2.ModelSpec(name="m", version_label="stable")
    with manager.lease(spec) as lease:
      self.assertEqual(lease.number, 7)


if __name__ == "__main__":
  unittest.main()
