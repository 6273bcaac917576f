"""What the saver leaves on disk: shards, the checkpoints it keeps, and other names of variables."""

import os
import pathlib
import time
from unittest import mock

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops

from monolith.native_training import dense_reload_utils, save_utils
from monolith.native_training.model_export import export_context
from tests.saver_testing import SaverTestCase

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1
Saver = save_utils.PartialRecoverySaver


class SaveUtilsTest(SaverTestCase):
  def test_get_ckpt_steps(self):
    helper = save_utils.SaveHelper(self.path("model.ckpt"))
    self.assertEqual(helper.get_existing_checkpoint_steps(), set())
    with self.session() as sess:
      v1.get_variable("v", initializer=1.0)
      sess.run(v1.global_variables_initializer())
      saver = Saver()

      for step in (10, 20, 300):
        saver.save(sess, self.path("model.ckpt"), global_step=step)

    self.assertEqual(helper.get_existing_checkpoint_steps(), {10, 20, 300})

  def test_exempt_checkpoints(self):
    with self.session() as sess:
      v1.get_variable("v", initializer=1.0)
      sess.run(v1.global_variables_initializer())
      saver = Saver(max_to_keep=3, exempt_checkpoint_paths=["model.ckpt-10", "model.ckpt-20"])

      for step in (10, 20, 30, 40, 50):
        saver.save(sess, self.path("model.ckpt"), global_step=step)
      self.assertEqual(self.steps_on_disk(), {10, 20, 30, 40, 50})

      saver.save(sess, self.path("model.ckpt"), global_step=60)
      self.assertEqual(self.steps_on_disk(), {10, 20, 40, 50, 60})
    helper = save_utils.SaveHelper(self.path("model.ckpt"))
    self.assertEqual(helper.get_existing_checkpoint_steps(), {10, 20, 40, 50, 60})

  def test_names(self):
    helper = save_utils.SaveHelper("/a/model.ckpt")

    self.assertEqual(helper.get_ckpt_prefix(7), "/a/model.ckpt-7")
    self.assertEqual(save_utils.SaveHelper.get_ckpt_asset_dir("/a/m-7"), "/a/m-7.assets/")
    self.assertEqual(save_utils.SaveHelper.get_global_step_value("/a-b/m-7"), 7)
    self.assertEqual(helper.get_global_step_value("/a/model.ckpt"), 0)

  def test_exempt_checkpoints_are_read_again_on_every_access(self):
    saver = Saver({}, allow_empty=True, exempt_checkpoint_paths=["m-1"], model_dir=self.dir)
    self.assertEqual(saver.exempt_checkpoint_paths, {"m-1"})

    self.write_monolith_checkpoint()
    self.assertEqual(saver.exempt_checkpoint_paths, {"m-1"})

    self.write_monolith_checkpoint("/elsewhere/m-2", "m-3")
    self.assertEqual(saver.exempt_checkpoint_paths, {"m-2", "m-3"})

  def test_nothing_is_deleted_while_exempt_checkpoints_are_unknown(self):
    pathlib.Path(self.path("monolith_checkpoint")).write_text("no proto {")
    with self.session() as sess:
      v1.get_variable("v", initializer=1.0)
      sess.run(v1.global_variables_initializer())
      saver = Saver(max_to_keep=1, model_dir=self.dir)
      for step in (1, 2, 3):
        saver.save(sess, self.path("m"), global_step=step)
      self.assertEqual(self.steps_on_disk(), {1, 2, 3})

      self.write_monolith_checkpoint("m-2")
      saver.save(sess, self.path("m"), global_step=4)

    self.assertEqual(self.steps_on_disk(), {2, 4})

  def test_assets_are_deleted_with_their_checkpoint(self):
    with self.session() as sess:
      v1.get_variable("v", initializer=1.0)
      sess.run(v1.global_variables_initializer())
      saver = Saver(max_to_keep=1)
      saver.save(sess, self.path("m"), global_step=1)
      os.makedirs(self.path("m-1.assets/deep"))
      pathlib.Path(self.path("m-1.assets/deep/table-00000-of-00001")).touch()
      pathlib.Path(self.path("m-10.assets")).touch()

      saver.save(sess, self.path("m"), global_step=2)

    self.assertEqual([n for n in self.names() if n.startswith("m-1.")], [])
    self.assertIn("m-10.assets", self.names())

  def test_latest_checkpoint_state_is_read_when_the_step_grows(self):
    self.assertIsNone(save_utils.get_latest_checkpoint_state(self.dir, 5))
    v1.train.update_checkpoint_state(self.dir, self.path("m-1"))
    state = save_utils.get_latest_checkpoint_state(self.dir, 5)
    self.assertEqual(state.model_checkpoint_path, self.path("m-1"))

    v1.train.update_checkpoint_state(self.dir, self.path("m-2"))

    self.assertIs(save_utils.get_latest_checkpoint_state(self.dir, 5), state)
    state = save_utils.get_latest_checkpoint_state(self.dir, 6)
    self.assertEqual(state.model_checkpoint_path, self.path("m-2"))

  def test_monolith_checkpoint_state(self):
    self.assertIsNone(save_utils.get_monolith_checkpoint_state(self.dir))
    pathlib.Path(self.path("m-1.index")).touch()
    self.write_monolith_checkpoint("m-1", "m-2", "/nowhere/m-3")

    state = save_utils.get_monolith_checkpoint_state(self.dir)
    self.assertEqual(list(state.exempt_model_checkpoint_paths), ["m-1", "m-2", "/nowhere/m-3"])
    state = save_utils.get_monolith_checkpoint_state(self.dir, remove_invalid_path=True)
    self.assertEqual(list(state.exempt_model_checkpoint_paths), [self.path("m-1")])
    os.rename(self.path("monolith_checkpoint"), self.path("other"))
    self.assertIsNotNone(save_utils.get_monolith_checkpoint_state(self.dir, "other"))

    pathlib.Path(self.path("other")).write_bytes(b"\xff{")
    self.assertIsNone(save_utils.get_monolith_checkpoint_state(self.dir, "other"))


class SaveRestoreShardedTest(SaverTestCase):
  def _iterator(self):
    dataset = tf.data.Dataset.range(10)
    iterator = v1.data.make_initializable_iterator(dataset)
    saveable = iterator_ops._IteratorSaveable(
      iterator._iterator_resource, iterator._iterator_resource.name
    )
    return iterator, saveable

  def _two_devices(self):
    return v1.Session(target="", config=v1.ConfigProto(device_count={"CPU": 2}))

  def _save(self, save_path):
    with tf.Graph().as_default(), self._two_devices() as sess:
      with tf.device("/cpu:0"):
        it0, saveable0 = self._iterator()
      with tf.device("/cpu:1"):
        it1, saveable1 = self._iterator()
      saver = Saver({"it0": saveable0, "it1": saveable1}, sharded=True)
      get_next0, get_next1 = it0.get_next(), it1.get_next()
      sess.run([it0.initializer, it1.initializer])
      self.assertEqual(0, sess.run(get_next0))
      self.assertEqual(1, sess.run(get_next0))
      self.assertEqual(0, sess.run(get_next1))
      val = saver.save(sess, save_path)
      self.assertEqual(save_path, val)
      self.assertLen(tf.io.gfile.glob(val + ".data-*"), 2)

  def testIterators(self):
    save_path = self.path("sharded_iterators")
    self._save(save_path)
    with tf.Graph().as_default(), self._two_devices() as sess:
      with tf.device("/cpu:0"):
        it0, saveable0 = self._iterator()
      with tf.device("/cpu:1"):
        it1, saveable1 = self._iterator()
      get_next0, get_next1 = it0.get_next(), it1.get_next()
      saver = Saver({"it0": saveable0, "it1": saveable1}, sharded=True)
      sess.run([it0.initializer, it1.initializer])

      saver.restore(sess, save_path)

      self.assertEqual(2, sess.run(get_next0))
      self.assertEqual(1, sess.run(get_next1))

  def testIteratorsUnshardedRestore(self):
    save_path = self.path("unsharded_iterators")
    self._save(save_path)
    with tf.Graph().as_default(), self._two_devices() as sess:
      with tf.device("/cpu:0"):
        it0, saveable0 = self._iterator()
      with tf.device("/cpu:1"):
        it1, saveable1 = self._iterator()
      get_next0, get_next1 = it0.get_next(), it1.get_next()
      saver = Saver({"it0": saveable0, "it1": saveable1}, sharded=False)
      sess.run([it0.initializer, it1.initializer])

      saver.restore(sess, save_path)

      self.assertEqual(2, sess.run(get_next0))
      self.assertEqual(1, sess.run(get_next1))

  def test_restore_ops_per_device(self):
    with tf.Graph().as_default():
      for i in range(2):
        with tf.device(f"/job:ps/task:{i}"):
          v1.get_variable(f"v{i}", initializer=1.0)
      builder = save_utils.SaverBuilder()
      Saver(builder=builder, sharded=True)
      self.assertEqual(list(builder.restore_ops_per_device), ["/job:ps/task:0", "/job:ps/task:1"])
      builder = save_utils.SaverBuilder()
      Saver(builder=builder)
      self.assertEqual(builder.restore_ops_per_device, {})


class MaxToKeepTest(SaverTestCase):
  def assertCheckpointState(self, model_checkpoint_path, all_model_checkpoint_paths):
    state = tf.train.get_checkpoint_state(self.dir)
    self.assertEqual(state.model_checkpoint_path, model_checkpoint_path)
    self.assertEqual(list(state.all_model_checkpoint_paths), all_model_checkpoint_paths)

  def testMaxToKeepEager(self):
    with context.eager_mode():
      v = resource_variable_ops.ResourceVariable(10.0, name="v")
      save = Saver([v], max_to_keep=2)
      s = [None] + [save.save(None, self.path(f"s{i}")) for i in (1, 2)]
      self.assertEqual(save.last_checkpoints, s[1:])
      self.assertCheckpointState(s[2], s[1:])

      s.append(save.save(None, self.path("s3")))

      self.assertEqual(save.last_checkpoints, s[2:])
      self.assertFalse(self.exists(s[1]))
      self.assertTrue(self.exists(s[2]))
      self.assertCheckpointState(s[3], s[2:])
      # A second saver with the same list deletes as the first would.
      save2 = Saver([v], max_to_keep=2)
      save2.set_last_checkpoints_with_time([(path, time.time()) for path in s[2:]])
      self.assertEqual(save2.save(None, self.path("s4")), self.path("s4"))
      self.assertEqual(save2.last_checkpoints, [s[3], self.path("s4")])
      self.assertFalse(self.exists(s[2]))

  def testNonSharded(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(10.0, name="v")
      save = Saver({"v": v}, max_to_keep=2)
      sess.run(v1.global_variables_initializer())
      self.assertEqual([], save.last_checkpoints)
      s1 = save.save(sess, self.path("s1"))
      self.assertEqual([s1], save.last_checkpoints)
      self.assertCheckpointState(s1, [s1])
      s2 = save.save(sess, self.path("s2"))
      self.assertEqual([s1, s2], save.last_checkpoints)
      s3 = save.save(sess, self.path("s3"))
      self.assertEqual([s2, s3], save.last_checkpoints)
      self.assertFalse(self.exists(s1))
      self.assertTrue(self.exists(s2) and self.exists(s3))
      self.assertCheckpointState(s3, [s2, s3])

      save2 = Saver(saver_def=save.as_saver_def())
      save2.set_last_checkpoints_with_time([(p, time.time()) for p in save.last_checkpoints])
      # Saving under a name that exists moves it to the end.
      s2 = save.save(sess, self.path("s2"))
      self.assertEqual([s3, s2], save.last_checkpoints)
      self.assertTrue(self.exists(s2) and self.exists(s3))
      self.assertCheckpointState(s2, [s3, s2])
      s1 = save.save(sess, self.path("s1"))
      self.assertEqual([s2, s1], save.last_checkpoints)
      self.assertFalse(self.exists(s3))
      self.assertCheckpointState(s1, [s2, s1])

      # The second saver knows nothing of that.
      s4 = save2.save(sess, self.path("s4"))
      self.assertEqual([s3, s4], save2.last_checkpoints)
      self.assertFalse(self.exists(s2))
      self.assertTrue(self.exists(s4))

  def testSharded(self):
    config = v1.ConfigProto(device_count={"CPU": 2})
    with tf.Graph().as_default(), v1.Session(config=config) as sess:
      with tf.device("/cpu:0"):
        v0 = v1.Variable(111, name="v0")
      with tf.device("/cpu:1"):
        v1_var = v1.Variable(222, name="v1")
      save = Saver({"v0": v0, "v1": v1_var}, sharded=True, max_to_keep=2)
      sess.run(v1.global_variables_initializer())
      s = [save.save(sess, self.path(f"s{i}")) for i in (1, 2)]
      self.assertLen(tf.io.gfile.glob(s[0] + ".data-*"), 2)
      self.assertTrue(tf.io.gfile.exists(s[0] + ".meta"))

      s.append(save.save(sess, self.path("s3")))

      self.assertEqual(tf.io.gfile.glob(s[0] + "*"), [])
      self.assertLen(tf.io.gfile.glob(s[1] + ".data-*"), 2)
      self.assertEqual(save.last_checkpoints, s[1:])

  def testNoMaxToKeep(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(10.0, name="v")
      sess.run(v1.global_variables_initializer())
      for max_to_keep in (None, 0):
        save = Saver({"v": v}, max_to_keep=max_to_keep)
        self.assertEqual([], save.last_checkpoints)
        for i in (1, 2):
          path = save.save(sess, self.path(f"s{i}"))
          self.assertEqual([], save.last_checkpoints)
          self.assertCheckpointState(path, [path])
        self.assertTrue(self.exists(self.path("s1")) and self.exists(self.path("s2")))

  def testNoMetaGraph(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(10.0, name="v")
      save = Saver({"v": v})
      sess.run(v1.global_variables_initializer())
      s1 = save.save(sess, self.path("s1"), write_meta_graph=False)
      self.assertTrue(self.exists(s1))
      self.assertFalse(tf.io.gfile.exists(checkpoint_management.meta_graph_filename(s1)))


class RecoverLastCheckpointsTest(SaverTestCase):
  def test_recover_last_checkpoints(self):
    with context.eager_mode():
      v = resource_variable_ops.ResourceVariable(10.0, name="v")
      save = Saver([v], max_to_keep=10)
      s1, s2, s3 = (save.save(None, self.path(f"ckpt-{i}")) for i in (1, 2, 3))
      self.assertEqual([s1, s2, s3], save.last_checkpoints)
      recovered = Saver([v], max_to_keep=10)

      recovered.recover_last_checkpoints([s1, s2, s3])
      self.assertEqual([s1, s2, s3], recovered.last_checkpoints)

      for path in tf.io.gfile.glob(s1 + "*"):
        tf.io.gfile.remove(path)
      recovered.recover_last_checkpoints([s1, s2, s3])
      self.assertEqual([s2, s3], recovered.last_checkpoints)
      s4 = recovered.save(None, self.path("ckpt-4"))
      self.assertEqual([s2, s3, s4], recovered.last_checkpoints)


class KeepCheckpointEveryNHoursTest(SaverTestCase):
  @mock.patch.object(save_utils, "time")
  def testNonSharded(self, mock_time):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable([10.0], name="v")
      sess.run(v1.global_variables_initializer())
      start = time.time()
      mock_time.time.return_value = start
      save = Saver({"v": v}, max_to_keep=2, keep_checkpoint_every_n_hours=0.7 / 3600)
      self.assertEqual([], save.last_checkpoints)
      # After one second s1 is old enough to be kept.
      mock_time.time.return_value = start + 1.0
      s1 = save.save(sess, self.path("s1"))
      s2 = save.save(sess, self.path("s2"))
      self.assertEqual([s1, s2], save.last_checkpoints)

      s3 = save.save(sess, self.path("s3"))
      self.assertEqual([s2, s3], save.last_checkpoints)
      self.assertTrue(self.exists(s1))

      s4 = save.save(sess, self.path("s4"))
      self.assertEqual([s3, s4], save.last_checkpoints)
      self.assertTrue(self.exists(s1))
      self.assertFalse(self.exists(s2))
      self.assertTrue(self.exists(s3) and self.exists(s4))


class SaveRestoreWithVariableNameMap(SaverTestCase):
  def _testNonReshape(self, variable_op):
    save_path = self.path("non_reshape")
    with self.session(graph=tf.Graph()) as sess:
      v0 = variable_op(10.0, name="v0")
      v1_var = variable_op(20.0, name="v1")
      save = Saver({"save_prefix/v0": v0, "save_prefix/v1": v1_var})
      sess.run(v1.global_variables_initializer())
      self.assertEqual(save.save(sess, save_path), save_path)
      # The old names are not there.
      with self.assertRaisesRegex(tf.errors.OpError, r"Key v[01] not found in checkpoint"):
        Saver({"v0": v0, "v1": v1_var}).restore(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      v0 = variable_op(-1.0, name="restore_prefix/v0")
      v1_var = variable_op(-1.0, name="restore_prefix/v1")
      save = Saver({"save_prefix/v0": v0, "save_prefix/v1": v1_var})
      save.restore(sess, save_path)
      self.assertEqual(sess.run([v0, v1_var]), [10.0, 20.0])

  def testNonReshapeResourceVariable(self):
    self._testNonReshape(resource_variable_ops.ResourceVariable)

  def testNonReshapeVariable(self):
    self._testNonReshape(v1.Variable)


class CustomRestoreTest(SaverTestCase):
  def _save_old_model(self, values=(1.0, 2.0)):
    with self.session(graph=tf.Graph()) as sess:
      v1.train.get_or_create_global_step()
      for i, value in enumerate(values):
        v1.get_variable(f"old{i}", initializer=value)
      sess.run(v1.global_variables_initializer())
      sess.run(v1.train.get_global_step().assign(7))
      return Saver().save(sess, self.path("model.ckpt"), global_step=7)

  def _restore(self, listener, names=("new0", "new1")):
    """Returns global step and variables of a new model after the restore."""
    with self.session(graph=tf.Graph()) as sess:
      step = v1.train.get_or_create_global_step()
      variables = [v1.get_variable(name, initializer=-1.0) for name in names]
      listener.begin()
      saver = Saver()
      saver.restore(sess, tf.train.latest_checkpoint(self.dir))
      self.assertEqual(v1.get_collection(dense_reload_utils.CUSTOM_RESTORE_OP), [])
      return sess.run([step, *variables])

  def test_alias_map(self):
    self._save_old_model()
    alias_map = {"new0": "old1", "new1": "old0", "global_step": "global_step"}
    listener = dense_reload_utils.CustomRestoreListener(alias_map=alias_map, model_dir=self.dir)

    self.assertEqual(self._restore(listener), [7, 2.0, 1.0])

  def test_alias_map_is_not_needed_when_all_names_are_there(self):
    self._save_old_model()
    alias_map = {"old0": "old1", "old1": "old0", "global_step": "global_step"}
    listener = dense_reload_utils.CustomRestoreListener(alias_map=alias_map, model_dir=self.dir)

    self.assertEqual(self._restore(listener, names=("old0", "old1")), [7, 1.0, 2.0])

  def test_clear_nn_happens_once(self):
    self._save_old_model()
    listener = dense_reload_utils.CustomRestoreListener(clear_nn=True, model_dir=self.dir)

    self.assertEqual(self._restore(listener, names=("old0", "old1")), [0, -1.0, -1.0])
    self.assertIn("clear_nn", self.names())
    self.assertEqual(self._restore(listener, names=("old0", "old1")), [7, 1.0, 2.0])

  def test_clear_nn_can_keep_the_global_step(self):
    self._save_old_model()
    listener = dense_reload_utils.CustomRestoreListener(
      clear_nn=True, continue_training=True, model_dir=self.dir
    )

    self.assertEqual(self._restore(listener, names=("old0", "old1")), [7, -1.0, -1.0])

  def test_exporting_restores_normally(self):
    path = self._save_old_model()
    with self.session(graph=tf.Graph()) as sess:
      variable = v1.get_variable("old0", initializer=-1.0)
      v1.add_to_collection(dense_reload_utils.CUSTOM_RESTORE_OP, ([None], [None], {}))
      saver = Saver()
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
        saver.restore(sess, path)
      self.assertEqual(sess.run(variable), 1.0)


if __name__ == "__main__":
  tf.test.main()
