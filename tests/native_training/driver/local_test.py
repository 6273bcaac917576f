"""Servers inside a process; tests/native_training/cpu_training_test.py trains on them."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.driver import local
from monolith.native_training.settings.training_config import CpuTrainingConfig

tf.compat.v1.disable_eager_execution()


class LocalClusterTest(absltest.TestCase):
  def test_servers_are_described_to_estimator_only_meanwhile(self):
    with self.assertRaisesRegex(ValueError, "inside"):
      with local._local_cluster(2) as (config, target):
        described = json.loads(os.environ["TF_CONFIG"])
        jobs = {job.name: dict(job.tasks) for job in config.cluster_def.job}
        raise ValueError("inside")

    self.assertNotIn("TF_CONFIG", os.environ)
    self.assertEqual(described["task"], {"type": "chief", "index": 0})
    self.assertEqual([f"grpc://{described['cluster']['chief'][0]}"], [target])
    self.assertEqual(list(jobs["ps"].values()), described["cluster"]["ps"])
    self.assertLen(jobs["ps"], 2)

  def test_session_reaches_every_server(self):
    with local._local_cluster(2) as (config, target), tf.Graph().as_default():
      with tf.device("/job:ps/task:1"):
        constant = tf.constant(3)
      with tf.compat.v1.Session(target, config=config) as session:
        self.assertEqual(session.run(constant), 3)

  def test_without_servers_an_older_description_is_dropped(self):
    with mock.patch.dict(os.environ, TF_CONFIG='{"cluster": {}}'):
      with local._local_cluster(0) as (config, target):
        self.assertNotIn("TF_CONFIG", os.environ)

    self.assertEqual(target, "")
    self.assertEmpty(config.cluster_def.job)


class BackwardCompatibleTest(absltest.TestCase):
  def _kind(self, state, given=None):
    folder = os.path.join(os.environ["TEST_TMPDIR"], "model")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "monolith_checkpoint"), "w") as f:
      f.write(state)
    config = CpuTrainingConfig(use_native_multi_hash_table=given)
    local.make_config_backward_compatible(folder, config)
    return config.use_native_multi_hash_table

  def test_kind_of_tables_is_kept_only_if_it_was_left_open(self):
    self.assertIs(self._kind("builtin_hash_table_type: CUCKOO_HASH_MAP"), False)
    self.assertIsNone(self._kind("builtin_hash_table_type: MULTI_CUCKOO_HASH_MAP"))
    self.assertIs(self._kind("builtin_hash_table_type: CUCKOO_HASH_MAP", given=True), True)


if __name__ == "__main__":
  absltest.main()
