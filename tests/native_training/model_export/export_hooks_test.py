"""Exports follow checkpoints: made after each save, deleted with it."""

import os
from unittest import mock

import tensorflow as tf

from monolith.native_training import save_utils, utils
from monolith.native_training.model_export import export_hooks, export_state_utils

tf.compat.v1.disable_eager_execution()


class ExportSaverListenerTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.model_dir = os.path.join(utils.get_test_tmp_dir(), self.id())
    self.export_base = os.path.join(self.model_dir, "exported")
    self.save_path = os.path.join(self.model_dir, "model.ckpt")
    self.exporter = mock.Mock()
    self.exporter.export_saved_model.side_effect = self._export

  def _export(self, receiver_fn, checkpoint_path, global_step):
    folder = os.path.join(self.export_base, str(1000 + global_step))
    os.makedirs(folder)
    return folder.encode()

  def _train(self, steps, first_step=0, max_to_keep=5, **kwargs):
    with tf.Graph().as_default():
      global_step = tf.compat.v1.train.get_or_create_global_step()
      train_op = tf.compat.v1.assign_add(global_step, 1)
      set_step = global_step.assign(first_step)
      saver = save_utils.PartialRecoverySaver(max_to_keep=max_to_keep)
      hook = save_utils.NoFirstSaveCheckpointSaverHook(
        self.model_dir,
        save_steps=1,
        saver=saver,
        listeners=[
          export_hooks.ExportSaverListener(self.save_path, "receiver", self.exporter, **kwargs)
        ],
      )
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        sess.raw_session().run(set_step)
        for _ in range(steps):
          sess.run(train_op)

  def _entries(self):
    return export_state_utils.get_export_saver_listener_state(self.export_base).entries

  def test_basic(self):
    self._train(1, first_step=9)

    self.exporter.export_saved_model.assert_called_with("receiver", self.save_path + "-10", 10)
    self.assertEqual([entry.global_step for entry in self._entries()], [10])

  def test_old_exports_are_deleted(self):
    self._train(2, max_to_keep=1)

    self.assertEqual([entry.global_step for entry in self._entries()], [2])
    folders = [name for name in os.listdir(self.export_base) if name.isdigit()]
    self.assertEqual(folders, ["1002"])

  def test_exempt_exports_are_kept(self):
    self._train(2, max_to_keep=1, exempt_checkpoint_paths=["model.ckpt-1"])

    self.assertEqual([entry.global_step for entry in self._entries()], [1, 2])

  def test_several_folders(self):
    self.exporter.export_saved_model.side_effect = lambda *args: {
      name: os.path.join(self.export_base, name, "7").encode() for name in ("entry", "ps_0")
    }

    self._train(1)

    for name in ("entry", "ps_0"):
      state = export_state_utils.get_export_saver_listener_state(
        os.path.join(self.export_base, name)
      )
      self.assertLen(state.entries, 1)

  def test_get_global_step(self):
    self.assertEqual(export_hooks.get_global_step("/a/model.ckpt-30"), 30)
    with self.assertRaises(AssertionError):
      export_hooks.get_global_step("/a/other-30")


if __name__ == "__main__":
  tf.test.main()
