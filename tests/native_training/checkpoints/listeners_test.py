"""Tests of `checkpoints/listeners.py`, with variables whose values are files in the assets."""

import os

import tensorflow as tf

from monolith.native_training.checkpoints import listeners

tf.compat.v1.disable_eager_execution()

_TIMEOUT_IN_MS = 60000


def _device_of(variable):
  return variable.device


def _save(variable, path):
  return tf.io.write_file(path, tf.strings.as_string(variable.read_value()))


def _restore(variable, path):
  return variable.assign(tf.strings.to_number(tf.io.read_file(path), variable.dtype)).op


class _Saver(listeners.AssetSaverListener):
  def __init__(self, basename, variables, **kwargs):
    assets = listeners.build_assets(variables, _device_of, _save)
    super().__init__(basename, "variables", assets, _TIMEOUT_IN_MS, **kwargs)

  def _name_of(self, item):
    return item.op.name


class _Restorer(listeners.AssetRestorerListener):
  def __init__(self, basename, variables, ps_monitor=None):
    assets = listeners.build_assets(variables, _device_of, _restore)
    super().__init__(basename, "variables", assets, _TIMEOUT_IN_MS, ps_monitor)

  def _find_paths(self, path_prefix, items):
    return [path_prefix + item.op.name for item in items]


class _OnlyOn:
  """Calls the server of one device uninitialized, and counts how often it is asked."""

  def __init__(self, device):
    self._device = device
    self.asked = []

  def is_ps_uninitialized(self, sess, device):
    del sess
    self.asked.append(device)
    return device == self._device


class ListenersTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.basename = os.path.join(self.folder, "model.ckpt")

  def _variables(self, *devices):
    variables = []
    for i, device in enumerate(devices):
      with tf.device(device):
        variables.append(tf.compat.v1.get_variable(f"v{i}", initializer=i + 1, use_resource=True))
    return variables

  def _save_checkpoint(self, sess, saver, step):
    """Does what a saver hook does: the listener first, then the variables."""
    saver.before_save(sess, step)
    tf.compat.v1.train.Saver(sharded=False).save(sess, self.basename, global_step=step)

  def test_each_asset_gets_its_file(self):
    variables = self._variables("", "")
    saver = _Saver(self.basename, variables, save_op_name="save_all")
    graph = tf.compat.v1.get_default_graph()
    graph.finalize()
    with self.session() as sess:
      for variable in variables:
        sess.run(variable.initializer)
      saver.before_save(sess, 7)

    self.assertEqual(graph.get_operation_by_name("save_all").type, "NoOp")
    self.assertCountEqual(os.listdir(self.basename + "-7.assets"), ["v0", "v1"])
    with open(self.basename + "-7.assets/v1") as file:
      self.assertEqual(file.read(), "2")

  def test_restores_the_newest_checkpoint(self):
    (variable,) = self._variables("")
    saver, restorer = _Saver(self.basename, [variable]), _Restorer(self.basename, [variable])
    with self.session() as sess:
      sess.run(variable.initializer)
      self._save_checkpoint(sess, saver, 1)
      sess.run(variable.assign(20))
      self._save_checkpoint(sess, saver, 2)
      sess.run(variable.assign(30))

      restorer.before_restore(sess)

      self.assertEqual(sess.run(variable), 20)

  def test_without_checkpoint_nothing_is_restored(self):
    (variable,) = self._variables("")
    restorer = _Restorer(self.basename, [variable])
    os.mkdir(self.basename + "-1.assets")
    with self.session() as sess:
      sess.run(variable.initializer)
      restorer.before_restore(sess)
      self.assertEqual(sess.run(variable), 1)

  def test_a_missing_file_is_an_error_and_loses_nothing(self):
    (variable,) = self._variables("")
    saver, restorer = _Saver(self.basename, [variable]), _Restorer(self.basename, [variable])
    with self.session() as sess:
      sess.run(variable.initializer)
      self._save_checkpoint(sess, saver, 1)
      os.remove(self.basename + "-1.assets/v0")
      sess.run(variable.assign(5))
      with self.assertRaisesRegex(tf.errors.NotFoundError, "model.ckpt-1.assets/v0"):
        restorer.before_restore(sess)
      self.assertEqual(sess.run(variable), 5)

  def test_only_uninitialized_devices_are_restored(self):
    variables = self._variables("/cpu:0", "/cpu:0", "/cpu:1")
    saver = _Saver(self.basename, variables)
    monitor = _OnlyOn(variables[2].device)
    restorer = _Restorer(self.basename, variables, monitor)
    later = [variable.assign(100) for variable in variables]
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with tf.compat.v1.Session(config=config) as sess:
      sess.run([variable.initializer for variable in variables])
      self._save_checkpoint(sess, saver, 1)
      sess.run(later)
      # Files of the others are not even looked at.
      os.remove(self.basename + "-1.assets/v0")

      restorer.before_restore(sess)

      self.assertEqual(sess.run(variables), [100, 100, 3])
    self.assertCountEqual(monitor.asked, {variables[0].device, variables[2].device})

  def test_without_assets_nothing_is_written_or_read(self):
    saver, restorer = _Saver(self.basename, []), _Restorer(self.basename, [])
    restorer_saver = listeners.AssetRestorerSaverListener(self.basename, restorer)
    with self.session() as sess:
      saver.before_save(sess, 1)
      restorer.before_restore(sess)
      restorer_saver.after_save(sess, 1)
    self.assertEmpty(os.listdir(self.folder))

  def test_restoring_after_a_save_drops_what_was_written_since(self):
    (variable,) = self._variables("")
    saver = _Saver(self.basename, [variable])
    restorer_saver = listeners.AssetRestorerSaverListener(
      self.basename, _Restorer(self.basename, [variable])
    )
    with self.session() as sess:
      sess.run(variable.initializer)
      saver.before_save(sess, 3)
      sess.run(variable.assign(9))
      restorer_saver.after_save(sess, 3)
      self.assertEqual(sess.run(variable), 1)


if __name__ == "__main__":
  tf.test.main()
