"""Pieces of the saver; `save_utils_test` saves and restores, `restore_test` loses servers."""

import os
import tempfile

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.checkpoints import saver, state

tf.compat.v1.disable_eager_execution()


class PsMonitorTest(absltest.TestCase):
  def test_a_task_has_one_spelling(self):
    for device in (
      "/job:ps/task:1",
      "/job:ps/replica:0/task:1/device:CPU:0",
      "/job:ps/task:1/cpu:0",
    ):
      self.assertEqual(saver._task_of(device), "/job:ps/replica:0/task:1")
    self.assertEqual(saver._task_of(""), "/replica:0/task:0")

  def test_servers_are_new_until_they_are_marked(self):
    server = tf.distribute.Server({"ps": ["localhost:0"]}, "ps", 0, start=True)
    with tf.Graph().as_default():
      monitor = saver.PsMonitor(1)
      with tf.compat.v1.Session(server.target) as session:
        device = "/job:ps/task:0/device:CPU:0"
        self.assertTrue(monitor.is_ps_uninitialized(session, device))
        for _ in range(2):  # marking twice must not wait for room in the queue
          monitor.setup_ps_initialized_state(session)
          self.assertFalse(monitor.is_ps_uninitialized(session, device))
        self.assertTrue(monitor.is_ps_uninitialized(session, "/job:worker/task:0"))


class PartialRecoverySaverTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    self._path = os.path.join(self._dir, "model.ckpt")
    self._graph = tf.Graph()
    with self._graph.as_default():
      self._variable = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=True)
      self._saver = saver.PartialRecoverySaver(sharded=True, max_to_keep=2)
      self._session = tf.compat.v1.Session()
    self.addCleanup(self._session.close)
    self._session.run(self._variable.initializer)

  def _save(self, step: int) -> None:
    with self._graph.as_default():
      self._saver.save(self._session, self._path, global_step=step, write_meta_graph=False)

  def _recorded(self) -> list[str]:
    recorded = tf.train.get_checkpoint_state(self._dir)
    return [os.path.basename(path) for path in recorded.all_model_checkpoint_paths]

  def test_state_names_a_copy_while_the_newest_is_rewritten(self):
    self._save(1)
    prefix = state.SaveHelper(self._path).get_ckpt_prefix(1)

    self._saver.set_aside_if_recorded(prefix)

    copy = tf.train.latest_checkpoint(self._dir)
    self.assertNotEqual(copy, prefix)
    # The copy survives whatever happens to the first name.
    for name in os.listdir(self._dir):
      if name.startswith("model.ckpt-1."):
        os.remove(os.path.join(self._dir, name))
    with self._graph.as_default():
      self._session.run(self._variable.assign(7.0))
      self._saver.restore(self._session, copy)
    self.assertEqual(self._session.run(self._variable), 1.0)
    # The next save of the step drops it.
    self._save(1)
    self.assertEqual(self._recorded(), ["model.ckpt-1"])
    self.assertFalse(os.path.exists(copy + ".index"))

  def test_other_checkpoints_are_not_set_aside(self):
    self._save(1)
    self._save(2)
    before = sorted(os.listdir(self._dir))
    self._saver.set_aside_if_recorded(self._path + "-1")
    self.assertEqual(sorted(os.listdir(self._dir)), before)

  def test_restore_ops_are_kept_by_device(self):
    self.assertLen(self._saver._builder.restore_ops_per_device, 1)

  def test_missing_file_of_a_checkpoint_is_named(self):
    self._save(1)
    (data,) = (name for name in os.listdir(self._dir) if ".data-" in name)
    os.remove(os.path.join(self._dir, data))
    with (
      self._graph.as_default(),
      self.assertRaisesRegex(tf.errors.DataLossError, r"model.ckpt-1.data-.*: no such file"),
    ):
      self._saver.restore(self._session, self._path + "-1")


if __name__ == "__main__":
  absltest.main()
