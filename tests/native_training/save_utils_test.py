"""The saver, its hook, and what they leave on disk.

Long because the specification names these classes and their tests in one file.
"""

import os
import pathlib
import tempfile
import time
from unittest import mock

import freezegun
import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import saver_pb2
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training import saver_test_utils

from monolith.native_training import dense_reload_utils, save_utils
from monolith.native_training.graph import export_context
from monolith.native_training.metric import cli
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1
Saver = save_utils.PartialRecoverySaver


class _Case(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def path(self, name: str) -> str:
    return os.path.join(self.dir, name)

  def names(self) -> list:
    return sorted(os.listdir(self.dir))

  def steps_on_disk(self) -> set:
    return {
      int(name[: -len(".index")].rpartition("-")[2])
      for name in self.names()
      if name.endswith(".index")
    }

  def write_monolith_checkpoint(self, *paths: str) -> None:
    state = MonolithCheckpointState(exempt_model_checkpoint_paths=paths)
    pathlib.Path(self.path("monolith_checkpoint")).write_text(text_format.MessageToString(state))

  def exists(self, prefix: str) -> bool:
    return checkpoint_management.checkpoint_exists_internal(prefix)


class SaveUtilsTest(_Case):
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


class _CountingListener(tf.compat.v1.train.CheckpointSaverListener):
  def __init__(self):
    self.calls = []

  def before_save(self, session, global_step_value):
    self.calls.append(("before", int(global_step_value)))

  def after_save(self, session, global_step_value):
    self.calls.append(("after", int(global_step_value)))

  def end(self, session, global_step_value):
    self.calls.append(("end", int(global_step_value)))


class _FailingListener(_CountingListener):
  def __init__(self, times: int, method: str = "before_save"):
    super().__init__()
    self.times = times
    setattr(self, method, self._fail)

  def _fail(self, session, global_step_value):
    self.calls.append(("fail", int(global_step_value)))
    if self.times:
      self.times -= 1
      raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")


class SaverHookTest(_Case):
  def setUp(self):
    super().setUp()
    v1.reset_default_graph()
    self.train_op = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    self.saver = Saver(sharded=True, allow_empty=True)

  def hook(self, **kwargs):
    kwargs.setdefault("save_steps", 1000000)
    return save_utils.NoFirstSaveCheckpointSaverHook(self.dir, saver=self.saver, **kwargs)

  def train(self, hook, steps=1):
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      for _ in range(steps):
        sess.run(self.train_op)

  def state(self):
    return save_utils.get_monolith_checkpoint_state(self.dir)

  def test_basic(self):
    with v1.train.SingularMonitoredSession(hooks=[self.hook()]) as sess:
      self.assertIsNone(tf.train.latest_checkpoint(self.dir))
      self.assertIn("meta_graph_for_debugging.pb", self.names())
      sess.run(self.train_op)
      self.assertIsNone(tf.train.latest_checkpoint(self.dir))

    self.assertEqual(tf.train.latest_checkpoint(self.dir), self.path("model.ckpt-1"))
    self.assertAllClose(self.state().last_checkpoint_save_timestamp, time.time(), atol=60)
    self.assertEqual(self.state().builtin_hash_table_type, MonolithCheckpointState.CUCKOO_HASH_MAP)

  def test_op_error(self):
    guard = _CountingListener()
    error = tf.errors.OpError(None, None, "no disk", 2)
    hook = self.hook(save_steps=1, guard_saver_listeners=[guard])
    with mock.patch.object(self.saver, "save", side_effect=error) as save:
      with self.assertRaisesRegex(tf.errors.OpError, "no disk"):
        self.train(hook)

    self.assertEqual(guard.calls, [("before", 1), ("after", 1)])
    self.assertEqual(save.call_count, 2)

  def test_trigger_save(self):
    hook = self.hook()
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(self.train_op)
      self.assertIsNone(tf.train.latest_checkpoint(self.dir))

      hook.trigger_save(sess.raw_session())

      self.assertEqual(tf.train.latest_checkpoint(self.dir), self.path("model.ckpt-1"))

  def test_trigger_save_raises_whatever_the_schedule_ignores(self):
    failing = _FailingListener(times=2)
    hook = self.hook(listeners=[failing], ignore_save_errors=True)
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(self.train_op)

      with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, "the disk is full"):
        hook.trigger_save(sess)

      self.assertEqual(self.steps_on_disk(), set())
    # The last save is still made, though no step was run since.
    self.assertEqual(self.steps_on_disk(), {1})

  def test_trigger_save_works_while_the_timer_is_disabled(self):
    hook = self.hook()
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(self.train_op)
      hook.timer.disable()

      hook.trigger_save(sess)

      self.assertEqual(self.steps_on_disk(), {1})

  def test_saves_are_counted_and_timed_by_mode(self):
    emitted = []
    cli.set_sink(lambda method, name, value, tags: emitted.append((method, name, tags)))
    self.addCleanup(cli.set_sink, None)
    full = self.hook(listeners=[_FailingListener(times=1)])
    dense = self.hook(is_dense_only=True, checkpoint_basename="dense")
    with v1.train.SingularMonitoredSession(hooks=[full, dense]) as sess:
      sess.run(self.train_op)
      full.trigger_save(sess)
      dense.trigger_save(sess)

    self.assertEqual(
      [(method, name.rpartition(".")[2], tags) for method, name, tags in emitted],
      [
        ("counter", "save_checkpoint_failed", {"mode": "full"}),
        ("counter", "save_checkpoint", {"mode": "full"}),
        ("timer", "save_checkpoint_time", {"mode": "full"}),
        ("counter", "save_checkpoint", {"mode": "dense_only"}),
        ("timer", "save_checkpoint_time", {"mode": "dense_only"}),
      ],
    )

  def test_first_save_is_made_when_asked_for(self):
    self.train(self.hook(no_first_save=False))

    self.assertEqual(self.steps_on_disk(), {0, 1})

  def test_first_save_is_skipped_in_every_session(self):
    listener = _CountingListener()
    hook = self.hook(listeners=[listener])
    self.train(hook)

    self.train(hook)

    self.assertEqual([c for c in listener.calls if c[0] == "before"], [("before", 1)] * 2)

  def test_retry_succeeds_and_after_save_runs_once(self):
    failing, counting = _FailingListener(times=1), _CountingListener()

    self.train(self.hook(listeners=[failing, counting]))

    self.assertEqual(failing.calls, [("fail", 1), ("fail", 1), ("after", 1), ("end", 1)])
    self.assertEqual(counting.calls, [("before", 1), ("after", 1), ("end", 1)])
    self.assertEqual(self.steps_on_disk(), {1})

  def test_error_after_the_save_is_not_retried(self):
    counting, failing = _CountingListener(), _FailingListener(times=9, method="after_save")

    with self.assertRaisesRegex(tf.errors.ResourceExhaustedError, "the disk is full"):
      self.train(self.hook(listeners=[counting, failing]))

    self.assertEqual(counting.calls, [("before", 1), ("after", 1)])
    self.assertEqual(self.steps_on_disk(), {1})

  def test_errors_are_ignored_when_configured(self):
    failing = _FailingListener(times=2)

    self.train(self.hook(save_steps=1, listeners=[failing], ignore_save_errors=True), steps=2)

    self.assertEqual(self.steps_on_disk(), {2})

  def test_vanished_folder_is_ignored_when_configured(self):
    folder = self.path("gone")
    hook = save_utils.NoFirstSaveCheckpointSaverHook(
      folder, save_steps=1, saver=self.saver, save_graph_def=False, ignore_save_errors=True
    )
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      tf.io.gfile.rmtree(folder)
      with self.assertLogs("absl", "ERROR") as logs:
        self.assertEqual(sess.run(self.train_op), 1)
      os.makedirs(folder)

    self.assertIn("Parent directory of", "".join(logs.output))

  def test_failed_save_leaves_nothing(self):
    litter = _FailingListener(times=2, method="unused")
    litter.before_save = lambda session, step: (
      os.makedirs(self.path(f"model.ckpt-{step}.assets"), exist_ok=True),
      os.makedirs(self.path(f"model.ckpt-{step}_temp"), exist_ok=True),
      litter._fail(session, step),
    )

    self.train(self.hook(save_steps=1, listeners=[litter], ignore_save_errors=True), steps=1)

    self.assertEqual([n for n in self.names() if n.startswith("model.ckpt-")], [])

  def test_error_of_a_guard_does_not_prevent_the_save(self):
    failing = _FailingListener(times=1)
    counting = _CountingListener()

    self.train(self.hook(guard_saver_listeners=[failing, counting]))

    self.assertEqual(self.steps_on_disk(), {1})
    self.assertEqual(failing.calls, [("fail", 1), ("after", 1)])

  def test_guards_are_released_in_reverse_order(self):
    order = []
    guards = [_CountingListener(), _CountingListener()]
    for i, guard in enumerate(guards):
      guard.after_save = lambda session, step, i=i: order.append(i)

    self.train(self.hook(guard_saver_listeners=guards))

    self.assertEqual(order, [1, 0])

  def test_listener_can_stop_the_training(self):
    listener = _CountingListener()
    listener.after_save = lambda session, step: True
    steps = 0
    with v1.train.SingularMonitoredSession(hooks=[self.hook(listeners=[listener])]) as sess:
      hook = sess._hooks[0]
      hook.trigger_save(sess)
      while not sess.should_stop():
        sess.run(self.train_op)
        steps += 1

    self.assertEqual(steps, 1)

  def test_dense_only_saves_no_step_twice_and_not_at_the_end(self):
    full, dense = self.hook(), self.hook(is_dense_only=True, checkpoint_basename="dense")
    dense.skip_steps_saved_by(full)
    with v1.train.SingularMonitoredSession(hooks=[full, dense]) as sess:
      sess.run(self.train_op)
      full.trigger_save(sess)
      dense.trigger_save(sess)
      self.assertNotIn("dense-1.index", self.names())
      sess.run(self.train_op)
      dense.trigger_save(sess)
      self.assertIn("dense-2.index", self.names())
      sess.run(self.train_op)

    self.assertNotIn("dense-3.index", self.names())
    self.assertIn("model.ckpt-3.index", self.names())

  def test_forced_final_save_goes_through_guards(self):
    guard, listener = _CountingListener(), _CountingListener()
    hook = self.hook(listeners=[listener], guard_saver_listeners=[guard])
    with mock.patch.object(save_utils.NoFirstSaveCheckpointSaverHook, "_has_dense_only", True):
      with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
        sess.run(self.train_op)
        hook.trigger_save(sess)

    self.assertEqual(guard.calls, [("before", 1), ("after", 1)] * 2)
    self.assertEqual(listener.calls[-1], ("end", 1))
    self.assertEqual(tf.train.latest_checkpoint(self.dir), self.path("model.ckpt-1"))
    self.assertEqual([n for n in self.names() if "previous" in n], [])

  def test_failed_save_of_the_newest_step_keeps_it(self):
    listener = _FailingListener(times=0)
    hook = self.hook(listeners=[listener])
    with v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(self.train_op)
      hook.trigger_save(sess)
      listener.times = 2
      hook.trigger_save(sess, ignore_save_errors=True)

      newest = tf.train.latest_checkpoint(self.dir)

      self.assertEqual(tf.train.load_variable(newest, "global_step"), 1)
      self.assertEqual(save_utils.SaveHelper.get_global_step_value(newest), 1)
      hook.trigger_save(sess)
      self.assertEqual(tf.train.latest_checkpoint(self.dir), self.path("model.ckpt-1"))
    self.assertEqual([n for n in self.names() if "previous" in n], [])

  def test_monolith_checkpoint_is_left_to_the_owner_of_the_folder(self):
    self.train(self.hook(save_graph_def=False))

    self.assertNotIn("monolith_checkpoint", self.names())
    self.train(self.hook(use_native_multi_hash_table=True))
    self.assertEqual(
      self.state().builtin_hash_table_type, MonolithCheckpointState.MULTI_CUCKOO_HASH_MAP
    )

  def test_updates_keep_what_monolith_checkpoint_says(self):
    self.write_monolith_checkpoint("model.ckpt-7")

    self.train(self.hook())

    self.assertEqual(list(self.state().exempt_model_checkpoint_paths), ["model.ckpt-7"])
    self.assertGreater(self.state().last_checkpoint_save_timestamp, 0)

  def test_leftovers_of_killed_processes_are_deleted(self):
    self.train(self.hook())
    keep = set(self.names()) | {"model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001", "x_temp"}
    keep |= {"other-3.assets", "other-3.unfinished", "model.ckpt.tmp", "model.ckpt-40.assets"}
    leftovers = {
      "model.ckpt-3_temp",
      # Killed in a save, or while it was deleted.
      "model.ckpt-4.assets",
      "model.ckpt-4.data-00000-of-00001",
      "model.ckpt-4.unfinished",
      # Killed before the state file was written.
      "model.ckpt-9.index",
      "model.ckpt-9.data-00000-of-00001",
      "model.ckpt-9.unfinished",
      # Killed after that.
      "model.ckpt-1.unfinished",
      "model.ckpt-6.data-00000-of-00001.tempstate123",
      "checkpoint.tmp" + 32 * "a",
      "monolith_checkpoint.tmp" + 32 * "0",
      "previous.model.ckpt-2.meta",
      "previous.model.ckpt-2.unfinished",
    }
    for name in keep | leftovers:
      if not os.path.exists(self.path(name)):
        pathlib.Path(self.path(name)).touch()

    with v1.train.SingularMonitoredSession(hooks=[self.hook()]):
      names = {name for name in self.names() if not name.startswith("events.")}

    self.assertEqual(names, {name for name in keep if not name.startswith("events.")})

  def test_assets_without_any_checkpoint_are_kept(self):
    os.makedirs(self.path("model.ckpt-4.assets"))

    with v1.train.SingularMonitoredSession(hooks=[self.hook()]):
      self.assertIn("model.ckpt-4.assets", self.names())

  def test_half_of_the_first_save_is_deleted_before_anything_is_restored(self):
    class Restorer(tf.compat.v1.train.SessionRunHook):
      def after_create_session(restorer, session, coord):
        restorer.names = self.names()

    os.makedirs(self.path("model.ckpt-1.assets"))
    pathlib.Path(self.path("model.ckpt-1.unfinished")).touch()
    restorer = Restorer()
    with v1.train.SingularMonitoredSession(hooks=[restorer, self.hook()]):
      pass

    self.assertEqual([n for n in restorer.names if n.startswith("model.ckpt")], [])

  def test_damaged_state_files_stop_the_start(self):
    self.train(self.hook())
    for name in ("checkpoint", "monolith_checkpoint"):
      content = pathlib.Path(self.path(name)).read_bytes()
      pathlib.Path(self.path(name)).write_bytes(b"\x00" + content)
      with self.assertRaisesRegex(
        tf.errors.DataLossError, f"{self.path(name)} is damaged.*{self.path('model.ckpt-1')}"
      ):
        self.train(self.hook())
      pathlib.Path(self.path(name)).write_bytes(content)


class SaverTest(_Case):
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


class SaveRestoreShardedTest(_Case):
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


class MaxToKeepTest(_Case):
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


class RecoverLastCheckpointsTest(_Case):
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


class KeepCheckpointEveryNHoursTest(_Case):
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


class SaveRestoreWithVariableNameMap(_Case):
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


class CustomRestoreTest(_Case):
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


class SecondOrStepTimerWithTideSettingTest(tf.test.TestCase):
  def _timer(self, **kwargs):
    return save_utils.SecondOrStepTimerWithTideSetting(**kwargs)

  def testNoTideSetting(self):
    with freezegun.freeze_time("2020-01-01 02:00:00") as frozen:
      timer = self._timer(every_secs=10)
      self.assertTrue(timer.should_trigger_for_step(1))
      timer.update_last_triggered_step(1)
      self.assertFalse(timer.should_trigger_for_step(1))
      frozen.tick(5)
      self.assertFalse(timer.should_trigger_for_step(2))
      frozen.tick(10)
      self.assertTrue(timer.should_trigger_for_step(2))
      timer.disable()
      self.assertFalse(timer.should_trigger_for_step(2))
      timer.enable()
      self.assertTrue(timer.should_trigger_for_step(2))

  def _tide_timer(self):
    return self._timer(
      every_secs=10,
      tide_start_hour=1,
      tide_start_minute=0,
      tide_end_hour=3,
      tide_end_minute=0,
      tide_every_secs=5,
    )

  def testTideAvailable(self):
    with freezegun.freeze_time("2020-01-01 02:00:00") as frozen:
      timer = self._tide_timer()
      timer.update_last_triggered_step(1)
      frozen.tick(5)
      self.assertFalse(timer.should_trigger_for_step(2))
      frozen.tick(10)
      self.assertTrue(timer.should_trigger_for_step(2))

  def testTideNotAvailable(self):
    with freezegun.freeze_time("2020-01-01 04:00:00") as frozen:
      timer = self._tide_timer()
      timer.update_last_triggered_step(1)
      frozen.tick(2)
      self.assertFalse(timer.should_trigger_for_step(2))
      frozen.tick(7)
      self.assertTrue(timer.should_trigger_for_step(2))

  def test_steps(self):
    timer = self._timer(every_steps=10)
    timer.update_last_triggered_step(5)

    self.assertFalse(timer.should_trigger_for_step(14))
    self.assertTrue(timer.should_trigger_for_step(15))

  def test_exactly_one_period(self):
    with self.assertRaises(ValueError):
      self._timer()
    with self.assertRaises(ValueError):
      self._timer(every_secs=1, every_steps=1)


class SaverDefTest(_Case):
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
