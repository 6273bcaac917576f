"""The hook that saves, its listeners and its timer."""

import os
import pathlib
import time
from unittest import mock

import freezegun
import tensorflow as tf

from monolith.native_training import save_utils
from monolith.native_training.metric import cli
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from tests.saver_testing import SaverTestCase

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1
Saver = save_utils.PartialRecoverySaver


class _CountingListener(tf.estimator.CheckpointSaverListener):
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


class SaverHookTest(SaverTestCase):
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
    class Restorer(tf.estimator.SessionRunHook):
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


if __name__ == "__main__":
  tf.test.main()
