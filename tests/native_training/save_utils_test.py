"""The saver: what it writes, and what it restores."""

import os
import pathlib
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saver_pb2
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training import saver_test_utils

from monolith.native_training import save_utils
from tests.saver_testing import SaverTestCase

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1
Saver = save_utils.PartialRecoverySaver


class SaverTest(SaverTestCase):
  def basicSaveRestore(self, variable_op):
    save_path = self.path("basic_save_restore")
    with self.session(graph=tf.Graph()) as sess:
      v0 = variable_op(10.0, name="v0")
      v1_var = variable_op(20.0, name="v1")
      v2 = saver_test_utils.CheckpointedOp(name="v2")
      v2_init = v2.insert("k1", 30.0)
      sess.run(v1.global_variables_initializer())
      sess.run(v2_init)
      save = Saver({"v0": v0, "v1": v1_var, "v2": v2.saveable}, restore_sequentially=True)

      val = save.save(sess, save_path)

      self.assertEqual(val, save_path)
    with self.session(graph=tf.Graph()) as sess:
      v0 = variable_op(-1.0, name="v0")
      v1_var = variable_op(-1.0, name="v1")
      v2 = saver_test_utils.CheckpointedOp(name="v2")
      save = Saver({"v0": v0, "v1": v1_var, "v2": v2.saveable})
      self.assertEqual(len(sess.run(v1.report_uninitialized_variables())), 2)

      save.restore(sess, save_path)

      self.assertEqual(sess.run([v0, v1_var]), [10.0, 20.0])
      self.assertAllEqual(sess.run([v2.keys(), v2.values()]), [[b"k1"], [30.0]])

  def testBasic(self):
    self.basicSaveRestore(v1.Variable)

  def testResourceBasic(self):
    self.basicSaveRestore(resource_variable_ops.ResourceVariable)

  def testSaveMaxToKeep(self):
    with self.session(graph=tf.Graph()) as sess:
      v1.get_variable("v", initializer=1.0)
      sess.run(v1.global_variables_initializer())
      saver = Saver(max_to_keep=2, exempt_checkpoint_paths=[self.path("m-1")])

      for step in (1, 2, 3, 4):
        saver.save(sess, self.path("m"), global_step=step)

    self.assertEqual(self.steps_on_disk(), {1, 3, 4})
    self.assertEqual(saver.last_checkpoints, [self.path(f"m-{i}") for i in (1, 3, 4)])

  def testResourceColocation(self):
    with tf.Graph().as_default() as graph:
      partitioner = tf.compat.v1.fixed_size_partitioner(num_shards=2)
      with tf.device("/job:ps/device:GPU:0"):
        v1.get_variable("v0", shape=[10, 2], partitioner=partitioner, use_resource=True)
      Saver()
      save_op = next(op for op in graph.get_operations() if op.type == "SaveV2")

      for tensor in save_op.inputs[3:]:
        self.assertEqual("/job:ps/device:CPU:0", tensor.device)

  def testResourceVariableReadOpsAddedDeterministically(self):
    def build() -> v1.GraphDef:
      with tf.Graph().as_default() as graph:
        for i in range(10):
          resource_variable_ops.ResourceVariable(1.0, name=f"var{i}")
        Saver()
        return graph.as_graph_def()

    graphs = [build() for _ in range(4)]

    for graph in graphs[1:]:
      self.assertProtoEquals(graphs[0], graph)

  def testEagerBasic(self):
    with context.eager_mode():
      value = resource_variable_ops.ResourceVariable([[5.0]], name="v")
      save = Saver([value])
      path = save.save(None, self.path("eager"))
      value.assign([[7.0]])

      save.restore(None, path)

      self.assertAllEqual(value.numpy(), [[5.0]])

  def testEagerGraphCompatibility(self):
    with context.eager_mode():
      path = Saver([resource_variable_ops.ResourceVariable(3.0, name="v")]).save(
        None, self.path("eager"), global_step=2
      )
    with self.session(graph=tf.Graph()) as sess:
      variable = resource_variable_ops.ResourceVariable(0.0, name="v")
      saver = Saver()
      saver.restore(sess, path)
      self.assertEqual(sess.run(variable), 3.0)
      sess.run(variable.assign(4.0))
      path = saver.save(sess, self.path("graph"))
    with context.eager_mode():
      variable = resource_variable_ops.ResourceVariable(0.0, name="v")
      Saver([variable]).restore(None, path)
      self.assertEqual(variable.numpy(), 4.0)

  def testResourceSaveRestoreCachingDevice(self):
    save_path = self.path("cached")
    with self.session(graph=tf.Graph()) as sess:
      v = resource_variable_ops.ResourceVariable([1], caching_device="/cpu:0", name="v")
      sess.run(v1.global_variables_initializer())
      Saver([v]).save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      v = resource_variable_ops.ResourceVariable([0], caching_device="/cpu:0", name="v")

      Saver([v]).restore(sess, save_path)

      self.assertEqual(sess.run(v), [1])

  def testNoAdditionalOpsAddedBySaverForResourceVariablesOutsideSaveScope(self):
    with tf.Graph().as_default() as graph:
      v = resource_variable_ops.ResourceVariable(1.0, name="v")
      before = {op.name for op in graph.get_operations()}

      Saver([v])

      added = {op.name for op in graph.get_operations()} - before
      self.assertNotEmpty(added)
      self.assertEqual([name for name in added if not name.startswith("save/")], [])

  def testSaveCopyRestoreWithSaveRelativePaths(self):
    dir1, dir2 = self.path("dir1"), self.path("dir2")
    os.makedirs(dir1)
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(10.0, name="v0")
      sess.run(v1.global_variables_initializer())
      Saver(save_relative_paths=True).save(sess, os.path.join(dir1, "model"))
    os.rename(dir1, dir2)
    with self.session(graph=tf.Graph()) as sess:
      v0 = v1.Variable(-1.0, name="v0")
      path = tf.train.latest_checkpoint(dir2)
      self.assertEqual(path, os.path.join(dir2, "model"))

      Saver().restore(sess, path)

      self.assertEqual(sess.run(v0), 10.0)

  def testFilenameTensor(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(0, name="v")
      save = Saver({"v": v}, filename="somerandomfilename")

      self.assertEqual(sess.run(save.saver_def.filename_tensor_name), b"somerandomfilename")

  def testInvalidPath(self):
    with self.session(graph=tf.Graph()) as sess:
      v0 = v1.Variable(0, name="v0")
      save = Saver({"v0": v0})
      with self.assertRaisesRegex(
        ValueError, "The passed save_path is not a valid checkpoint: " + self.path("invalid")
      ):
        save.restore(sess, self.path("invalid"))
      with self.assertRaisesRegex(ValueError, "Can't load save_path when it is None."):
        save.restore(sess, None)

  def testInt64(self):
    save_path = self.path("int64")
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(np.int64([2**63 - 1, -(2**63)]), name="v")
      sess.run(v1.global_variables_initializer())
      Saver({"v": v}).save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(np.int64([0, 0]), name="v")
      Saver({"v": v}).restore(sess, save_path)
      self.assertAllEqual(sess.run(v), [2**63 - 1, -(2**63)])

  def testSomeErrors(self):
    with tf.Graph().as_default():
      v0 = v1.Variable([10.0], name="v0")
      v1_var = v1.Variable([20.0], name="v1")
      v2 = v1.Variable([20.0], name="v2")
      v2._set_save_slice_info(v1.Variable.SaveSliceInfo("v1", [1], [0], [1]))

      # By default the name used for "v2" will be "v1" and raise an error.
      with self.assertRaisesRegex(ValueError, "same name: v1"):
        Saver([v0, v1_var, v2])
      # The names are different and will work.
      Saver({"vee1": v1_var, "other": [v2]})
      # Partitioned variables also cause name conflicts.
      p_v1 = v1.get_variable(
        "p_v1", shape=[4, 5], partitioner=v1.fixed_size_partitioner(num_shards=2)
      )
      p_v2 = v1.get_variable(
        "p_v2", shape=[4, 5], partitioner=v1.fixed_size_partitioner(num_shards=2)
      )
      p_v2._name = "p_v1"
      with self.assertRaisesRegex(ValueError, "same name: p_v1"):
        Saver([p_v1, p_v2])

  def testSameName(self):
    with tf.Graph().as_default():
      v0 = v1.Variable([10.0], name="v0")
      v2 = saver_test_utils.CheckpointedOp(name="v2")
      with self.assertRaisesRegex(
        ValueError, "The same saveable will be restored with two names: v0"
      ):
        Saver({"v0": v0, "v0too": v0})
      with self.assertRaisesRegex(
        ValueError, "The same saveable will be restored with two names: v2"
      ):
        Saver({"v2": v2.saveable, "v2too": v2.saveable})

  def testBasicsWithListOfVariables(self):
    save_path = self.path("list")
    with self.session(graph=tf.Graph()) as sess:
      v0 = v1.Variable(10.0, name="v0")
      v2 = saver_test_utils.CheckpointedOp(name="v2")
      v2_init = v2.insert("k1", 30.0)
      save = Saver([v0, v2.saveable])
      sess.run(v1.global_variables_initializer())
      sess.run(v2_init)
      self.assertEqual(save.save(sess, save_path), save_path)
    with self.session(graph=tf.Graph()) as sess:
      v0 = v1.Variable(-1.0, name="v0")
      v2 = saver_test_utils.CheckpointedOp(name="v2")
      save = Saver([v0, v2.saveable])
      with self.assertRaisesWithPredicateMatch(tf.errors.OpError, lambda e: "v0" in e.message):
        sess.run(v0)

      save.restore(sess, save_path)

      self.assertEqual(sess.run(v0), 10.0)
      self.assertAllEqual(sess.run(v2.values()), [30.0])

  def _SaveAndLoad(self, var_name, var_value, other_value, save_path):
    with self.session(graph=tf.Graph()) as sess:
      var = resource_variable_ops.ResourceVariable(var_value, name=var_name)
      save = Saver({var_name: var})
      sess.run(var.initializer)
      self.assertEqual(save.save(sess, save_path), save_path)
    with self.session(graph=tf.Graph()) as sess:
      var = resource_variable_ops.ResourceVariable(other_value, name=var_name)
      save = Saver({var_name: var})
      save.restore(sess, save_path)
      self.assertAllClose(var_value, sess.run(var))

  def testCacheRereadsFile(self):
    save_path = self.path("cache_rereads")
    self._SaveAndLoad("v0", 0.0, 1.0, save_path)
    self._SaveAndLoad("v0", 1.0, 0.0, save_path)
    self.assertEqual([n for n in self.names() if "previous" in n], [])

  def testAllowEmpty(self):
    save_path = self.path("allow_empty")
    with self.session(graph=tf.Graph()) as sess:
      tf.constant(1)
      save = Saver(allow_empty=True)
      self.assertIsNone(save.save(sess, save_path))
    with self.session(graph=tf.Graph()) as sess:
      tf.constant(1)
      save = Saver(allow_empty=True)
      save.restore(sess, save_path)
      with self.assertRaisesRegex(ValueError, "No variables to save"):
        Saver()

  def testGPU(self):
    if not tf.test.is_gpu_available():
      self.skipTest("no GPU")
    self._check_on_device("/gpu:0")

  def testSharedServerOnGPU(self):
    if not tf.test.is_gpu_available():
      self.skipTest("no GPU")
    self._check_on_device("/gpu:0", sharded=True)

  def _check_on_device(self, device, sharded=False):
    save_path = self.path("device")
    with self.session(graph=tf.Graph()) as sess:
      with tf.device(device):
        v1.Variable(123.45, name="v")
      save = Saver(sharded=sharded, allow_empty=True)
      sess.run(v1.global_variables_initializer())
      save.save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      with tf.device(device):
        v = v1.Variable(0.0, name="v")
      Saver(sharded=sharded).restore(sess, save_path)
      self.assertAlmostEqual(sess.run(v), 123.45, places=4)

  def testVariables(self):
    save_path = self.path("variables")
    with self.session(graph=tf.Graph()) as sess:
      one = v1.Variable(1.0)
      twos = v1.Variable([2.0, 2.0, 2.0])
      saveable = saver_test_utils.CheckpointedOp(name="v2")
      init = v1.global_variables_initializer()
      save = Saver()
      sess.run(init)
      sess.run(saveable.insert("k1", 3.0))
      save.save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      one = v1.Variable(0.0)
      twos = v1.Variable([0.0, 0.0, 0.0])
      saveable = saver_test_utils.CheckpointedOp(name="v2")
      save = Saver()

      save.restore(sess, save_path)

      self.assertAllClose(1.0, sess.run(one))
      self.assertAllClose([2.0, 2.0, 2.0], sess.run(twos))
      self.assertAllEqual([3.0], sess.run(saveable.values()))

  def testVarListShouldBeEmptyInDeferredBuild(self):
    with tf.Graph().as_default():
      v = v1.Variable(1.0)
      with self.assertRaisesRegex(ValueError, "defer_build"):
        Saver([v], defer_build=True)

  def testBuildShouldBeCalledBeforeSaveInCaseOfDeferBuild(self):
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(1.0)
      saver = Saver(defer_build=True)
      with self.assertRaisesRegex(RuntimeError, "build"):
        saver.save(sess, self.path("deferred"))

  def testDeferredBuild(self):
    save_path = self.path("deferred")
    with self.session(graph=tf.Graph()) as sess:
      one = v1.Variable(1.0)
      save = Saver(defer_build=True)
      # If build is not deferred, twos is not seen by the saver.
      twos = v1.Variable([2.0, 2.0, 2.0])
      save.build()
      sess.run(v1.global_variables_initializer())
      save.save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      one = v1.Variable(0.0)
      twos = v1.Variable([0.0, 0.0, 0.0])
      Saver().restore(sess, save_path)
      self.assertAllClose(1.0, sess.run(one))
      self.assertAllClose([2.0, 2.0, 2.0], sess.run(twos))

  def testReshape(self):
    save_path = self.path("reshape")
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      sess.run(v1.global_variables_initializer())
      Saver().save(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], use_resource=False)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "mismatch between the current"):
        Saver().restore(sess, save_path)
    with self.session(graph=tf.Graph()) as sess:
      var = v1.Variable([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
      Saver(reshape=True).restore(sess, save_path)
      self.assertAllClose([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], sess.run(var))

  def testSaveWithGlobalStep(self, pad_step_number=False):
    save_path = self.path("ckpt_with_global_step")
    global_step_int = 5
    with self.session(graph=tf.Graph()) as sess:
      var = resource_variable_ops.ResourceVariable(1.0, name="var0")
      for use_tensor in (True, False):
        save = Saver({"var0": var}, pad_step_number=pad_step_number)
        sess.run(var.initializer)
        step = tf.constant(global_step_int) if use_tensor else global_step_int

        val = save.save(sess, save_path, global_step=step)

        suffix = f"{global_step_int:08d}" if pad_step_number else str(global_step_int)
        self.assertEqual(f"{save_path}-{suffix}", val)

  def testSaveWithGlobalStepWithPadding(self):
    self.testSaveWithGlobalStep(pad_step_number=True)

  def testSaveToNonexistingPath(self):
    file_path = pathlib.Path(self.path("actually_a_file"))
    file_path.touch()
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(10.0, name="v0")
      v1.Variable(20.0, name="v1")
      save = Saver()
      sess.run(v1.global_variables_initializer())
      for save_path in (self.path("other_nonexisting_dir/p1/p2/p3"), str(file_path / "path")):
        with self.assertRaisesRegex(
          ValueError, f"^Parent directory of {save_path} doesn't exist, can't save.$"
        ):
          save.save(sess, save_path)
      # One missing folder is made.
      save.save(sess, self.path("nonexisting_dir/path"))
      self.assertTrue(self.exists(self.path("nonexisting_dir/path")))

  def testSaveToURI(self):
    save_path = "file://" + self.path("uri")
    with self.session(graph=tf.Graph()) as sess:
      v0 = v1.Variable(10.0, name="v0")
      save = Saver({"v0": v0})
      sess.run(v1.global_variables_initializer())
      self.assertEqual(save.save(sess, save_path), save_path)
      sess.run(v0.assign(0.0))

      save.restore(sess, save_path)

      self.assertEqual(sess.run(v0), 10.0)

  def testSaveRestoreAndValidateVariableDtype(self):
    for variable_op in (v1.Variable, resource_variable_ops.ResourceVariable):
      save_path = self.path("basic_save_restore")
      with self.session(graph=tf.Graph()) as sess:
        v0 = variable_op(10.0, name="v0")
        sess.run(v1.global_variables_initializer())
        Saver({"v0": v0}).save(sess, save_path)
      with self.session(graph=tf.Graph()) as sess:
        v0_wrong_dtype = variable_op(1, name="v0")
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "original dtype"):
          Saver({"v0": v0_wrong_dtype}).restore(sess, save_path)

  def testRestoreLargeTensors(self):
    save_dir = self.path("large_tensors")

    def model():
      small_v = [v1.get_variable(f"small{i}", shape=[10, 2], use_resource=True) for i in range(5)]
      large_v = [
        v1.get_variable(f"large{i}", shape=[32000, 1000], use_resource=True) for i in range(3)
      ]
      return small_v + large_v

    with tf.Graph().as_default(), v1.Session() as sess:
      save_graph = model()
      sess.run(v1.global_variables_initializer())
      expected = sess.run(save_graph)
      os.makedirs(save_dir)
      Saver(max_to_keep=1, var_list=save_graph).save(sess, os.path.join(save_dir, "m"))
    with tf.Graph().as_default(), v1.Session() as sess:
      restored = model()
      Saver(max_to_keep=1, var_list=restored).restore(sess, tf.train.latest_checkpoint(save_dir))
      for want, got in zip(expected, sess.run(restored)):
        np.testing.assert_array_equal(want, got)

  def test_missing_key(self):
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(1.0, name="old")
      sess.run(v1.global_variables_initializer())
      path = Saver().save(sess, self.path("m"))
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(1.0, name="new")
      with self.assertRaisesRegex(tf.errors.OpError, "not found in checkpoint"):
        Saver().restore(sess, path)

  def test_skip_save(self):
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(1.0, name="v")
      sess.run(v1.global_variables_initializer())
      self.assertIsNone(Saver(skip_save=True).save(sess, self.path("m")))
    self.assertEqual(self.names(), [])

  def test_bad_latest_filename(self):
    with self.session(graph=tf.Graph()) as sess:
      v1.Variable(1.0, name="v")
      saver = Saver()
      with self.assertRaisesRegex(ValueError, "must not contain path components"):
        saver.save(sess, self.path("m"), latest_filename="a/b")
      with self.assertRaisesRegex(ValueError, "collides with 'save_path'"):
        saver.save(sess, self.path("checkpoint"))
      with self.assertRaisesRegex(TypeError, "'sess' must be a Session"):
        saver.save(None, self.path("m"))

  def test_state_names_a_complete_checkpoint_while_the_newest_is_written_again(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(1.0, name="v")
      sess.run(v1.global_variables_initializer())
      saver = Saver(max_to_keep=1)
      saver.save(sess, self.path("m"), global_step=1)
      os.makedirs(self.path("m-1.assets/sub"))
      pathlib.Path(self.path("m-1.assets/sub/table")).write_text("rows")
      sess.run(v.assign(2.0))
      seen = []

      def look(*args):
        newest = tf.train.latest_checkpoint(self.dir)
        rows = pathlib.Path(newest + ".assets/sub/table").read_text()
        seen.append((tf.train.load_variable(newest, "v"), rows))
        return Saver._write_variables(saver, *args)

      with mock.patch.object(saver, "_write_variables", look):
        saver.save(sess, self.path("m"), global_step=1)

    self.assertEqual(seen, [(1.0, "rows")])
    self.assertEqual(tf.train.latest_checkpoint(self.dir), self.path("m-1"))
    self.assertEqual(tf.train.load_variable(self.path("m-1"), "v"), 2.0)
    self.assertEqual([n for n in self.names() if "previous" in n], [])
    self.assertEqual(saver.last_checkpoints, [self.path("m-1")])

  def test_object_based_checkpoint(self):
    with context.eager_mode():
      checkpoint = tf.train.Checkpoint(v=tf.Variable(3.0, name="v"))
      path = checkpoint.save(self.path("object"))
    with self.session(graph=tf.Graph()) as sess:
      v = resource_variable_ops.ResourceVariable(0.0, name="v")
      saver = Saver([v])
      saver.restore(sess, path)
      self.assertEqual(sess.run(v), 3.0)


class SaverDefTest(SaverTestCase):
  def test_saver_of_a_saver_def_restores_all(self):
    with self.session(graph=tf.Graph()) as sess:
      v = v1.Variable(1.0, name="v")
      sess.run(v1.global_variables_initializer())
      saver = Saver(sharded=True)
      path = saver.save(sess, self.path("m"))
      sess.run(v.assign(2.0))
      copy = Saver(saver_def=saver.as_saver_def())
      self.assertIsInstance(copy.as_saver_def(), saver_pb2.SaverDef)

      copy.restore(sess, path)

      self.assertEqual(sess.run(v), 1.0)


if __name__ == "__main__":
  tf.test.main()
