"""Hooks of synchronous training, driven by real sessions of one rank.

`sync_training_processes_test` drives them on several.
"""

from __future__ import annotations

import datetime
import os
import pathlib
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from monolith.agent_service import backends
from monolith.native_training import (
  distributed_serving_ops,
  graph_estimator,
  hash_table_ops,
  hvd_lib,
  native_task,
  save_utils,
  sync_training_hooks,
)
from monolith.native_training.data import datasets  # noqa: F401, its op library is loaded
from monolith.native_training.ranks import agreement as sync_agreement

_TRAIN = graph_estimator.ModeKeys.TRAIN


def setUpModule():  # noqa: N802
  hvd_lib.init()


class _SumTask(native_task.NativeTask):
  """Adds its elements to the global step."""

  @classmethod
  def params(cls):
    p = super().params()
    p.define("as_dict", False, "Whether elements are dicts.")
    return p

  def create_input_fn(self, mode):
    def input_fn():
      dataset = tf.data.Dataset.from_tensor_slices(tf.constant([1, 2, 3], tf.int64))
      return dataset.map(lambda x: {"1": x}) if self.p.as_dict else dataset

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      element = features["1"] if self.p.as_dict else features
      global_step = tf.compat.v1.train.get_or_create_global_step()
      train_op = tf.compat.v1.assign_add(global_step, element)
      return graph_estimator.EstimatorSpec(mode, loss=tf.constant(0.0), train_op=train_op.op)

    return model_fn


class EofAwareTaskTest(parameterized.TestCase, tf.test.TestCase):
  def _train(self, as_dict, *args, **kwargs):
    params = _SumTask.params()
    params.as_dict = as_dict
    task = sync_training_hooks.EofAwareTask(params.instantiate(), *args, **kwargs)
    estimator = graph_estimator.Estimator(task.create_model_fn(), os.environ["TEST_TMPDIR"])
    estimator.train(task.create_input_fn(_TRAIN))
    return estimator.get_variable_value("global_step")

  def test_basic(self):
    self.assertEqual(self._train(False), 6)

  def test_dict(self):
    self.assertEqual(self._train(True), 6)

  @parameterized.product(as_dict=[False, True], use_dataservice=[False, True])
  def test_no_element_is_lost_when_ranks_agree(self, as_dict, use_dataservice):
    self.assertEqual(self._train(as_dict, use_dataservice, agree_on_eof=not use_dataservice), 6)

  def test_the_last_element_is_marked_under_a_private_key(self):
    params = _SumTask.params()
    params.as_dict = True
    task = sync_training_hooks.EofAwareTask(params.instantiate(), agree_on_eof=True)
    input_fn = task.create_input_fn(_TRAIN)

    elements = list(input_fn())

    self.assertEqual([e[task.EOF_KEY].numpy() for e in elements], [False, False, True])
    self.assertEqual([set(e) for e in elements], [{"1", "__EofAwareTask_eof"}] * 3)
    self.assertTrue(getattr(input_fn, sync_training_hooks.INPUT_FN_WRAPPER_KEY))

  def test_nothing_is_marked_in_a_dry_run(self):
    params = _SumTask.params()
    params.as_dict = True
    task = sync_training_hooks.EofAwareTask(params.instantiate(), agree_on_eof=True)

    with tf.Graph().as_default() as graph:
      graph.dry_run = True
      dataset = task.create_input_fn(_TRAIN)()

    self.assertEqual(set(dataset.element_spec), {"1"})

  def test_one_rank_ends_the_training_of_all(self):
    with tf.Graph().as_default():
      step = _add_step()
      # The allgather of three ranks, of which the second one has its last element at step 3.
      with mock.patch.object(
        hvd_lib._backend,
        "allgather",
        lambda eof, name: tf.stack([eof[0], tf.cast(tf.equal(step, 3), tf.int32), eof[0]]),
      ):
        hook = sync_training_hooks.EofAwareTask.EofHook(tf.constant(False))

      self.assertEqual(_run([hook], step, limit=10), 3)


def _add_step():
  global_step = tf.compat.v1.train.get_or_create_global_step()
  return tf.compat.v1.assign_add(global_step, 1)


def _run(hooks, step, limit, on_step=None):
  """Runs steps until a hook stops them; returns the last one."""
  last = 0
  with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
    while not session.should_stop() and last < limit:
      last = int(session.run(step))
      if on_step is not None:
        on_step(last)
  return last


class _FakeTimer:
  """Records what a hook does to it."""

  def __init__(self):
    self.calls = []

  def enable(self):
    self.calls.append("enable")

  def disable(self):
    self.calls.append("disable")

  def reset(self):
    self.calls.append("reset")


class ControlHooksTest(parameterized.TestCase, tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.timer = _FakeTimer()
    graph = tf.Graph()
    self.enter_context(graph.as_default())
    self.step = _add_step()

  def _force_dump(self, hour=3, **kwargs):
    now = datetime.datetime(2024, 5, 6, hour, 59, tzinfo=datetime.timezone.utc)
    clock = mock.Mock(now=lambda tz: now)
    self.enter_context(mock.patch.object(sync_training_hooks.datetime, "datetime", clock))
    return sync_training_hooks.SyncTrainingForceDumpHook(str(self.folder), self.timer, **kwargs)

  @parameterized.parameters((17, "disable"), (18, "enable"), (20, "enable"), (21, "disable"))
  def test_timer_runs_in_the_evening(self, hour, call):
    self.assertEqual(_run([self._force_dump(hour, step_interval=2)], self.step, limit=3), 3)
    self.assertEqual(self.timer.calls, [call])

  def test_dump(self):
    (self.folder / "dump_4").touch()

    self.assertEqual(_run([self._force_dump(step_interval=2)], self.step, limit=7), 7)
    self.assertEqual(self.timer.calls, ["disable", "enable", "reset", "disable"])

  def test_stop(self):
    (self.folder / "stop_3").touch()

    # Between two checks: found at the next one.
    self.assertEqual(_run([self._force_dump(step_interval=2)], self.step, limit=7), 4)
    self.assertEqual(self.timer.calls, ["disable", "enable", "reset"])

  def test_other_files_and_other_steps_do_nothing(self):
    for name in ("dump_x", "dump_100", "stop_", "stop_0", "undump_2"):
      (self.folder / name).touch()

    self.assertEqual(_run([self._force_dump(step_interval=1)], self.step, limit=4), 4)
    self.assertEqual(self.timer.calls, ["disable"] * 4)

  def test_requests_before_a_restart_are_done_with(self):
    (self.folder / "stop_2").touch()
    hook = self._force_dump(step_interval=1)
    with tf.compat.v1.train.MonitoredSession(hooks=[_StartAt(5), hook]) as session:
      session.run(self.step)
      self.assertFalse(session.should_stop())

  def test_missing_folder(self):
    hook = sync_training_hooks.SyncTrainingForceDumpHook(
      str(self.folder / "missing"), self.timer, step_interval=1
    )
    self.assertEqual(_run([hook], self.step, limit=2), 2)

  def test_bad_interval(self):
    with self.assertRaisesRegex(ValueError, "step_interval is 0, want at least 1"):
      sync_training_hooks.SyncTrainingForceDumpHook("", self.timer, step_interval=0)

  def test_saver_control(self):
    hook = sync_training_hooks.SyncTrainingSaverControlHook(
      str(self.folder), self.timer, step_interval=2
    )

    def on_step(step):
      if step == 3:
        (self.folder / "ONLINE").touch()
      if step == 5:
        (self.folder / "ONLINE").unlink()

    # Only the rank of the saver has the hook: a collective would wait for the others forever.
    with mock.patch.object(hvd_lib._backend, "broadcast", side_effect=AssertionError("broadcast")):
      _run([hook], self.step, limit=6, on_step=on_step)

    self.assertEqual(self.timer.calls, ["disable", "enable", "disable"])

  def _req_time_hook(self, **kwargs):
    return sync_training_hooks.ReqTimeControlDumpHook(str(self.folder), self.timer, **kwargs)

  def test_request_time(self):
    tf.compat.v1.add_to_collection("req_time", tf.stack([self.step * 10, 5]))
    (self.folder / "limit_req_time").write_text("45\n")

    # 50 at step 5, found at step 6.
    self.assertEqual(_run([self._req_time_hook(step_interval=2)], self.step, limit=9), 6)
    self.assertEqual(self.timer.calls, ["enable", "reset"])

  @parameterized.parameters(None, "0", "-3", "soon")
  def test_no_request_time_limit(self, text):
    tf.compat.v1.add_to_collection("req_time", self.step)
    if text is not None:
      (self.folder / "limit_req_time").write_text(text)

    self.assertEqual(_run([self._req_time_hook(step_interval=1)], self.step, limit=3), 3)
    self.assertEqual(self.timer.calls, [])

  @parameterized.parameters(0, 2)
  def test_request_time_needs_one_tensor(self, count):
    for _ in range(count):
      tf.compat.v1.add_to_collection("req_time", self.step)
    with self.assertRaisesRegex(AssertionError, f"has {count} tensors, want one"):
      _run([self._req_time_hook()], self.step, limit=1)

  def test_a_real_saver_dumps(self):
    saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
      str(self.folder), save_steps=1000, saver=tf.compat.v1.train.Saver()
    )
    self.timer = saver_hook.timer
    (self.folder / "dump_2").touch()

    _run([self._force_dump(step_interval=1), saver_hook], self.step, limit=4)

    state = tf.train.get_checkpoint_state(str(self.folder))
    self.assertEqual(
      [os.path.basename(path) for path in state.all_model_checkpoint_paths],
      ["model.ckpt-2", "model.ckpt-4"],
    )


class _StartAt(tf.compat.v1.train.SessionRunHook):
  """Restores a global step."""

  def __init__(self, step):
    self._step = step

  def begin(self):
    self._assign = tf.compat.v1.train.get_global_step().assign(self._step)

  def after_create_session(self, session, coord):
    session.run(self._assign)


class OtherHooksTest(tf.test.TestCase):
  def test_barrier_listener(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      listener = sync_training_hooks.SyncTrainingBarrierSaverListener()
      listener.begin()
      self.assertIsNotNone(tf.compat.v1.get_default_graph().get_tensor_by_name(
        "hvd_export_barrier_ph:0"
      ))  # fmt: skip

      listener.after_save(session, 7)

      with mock.patch.object(listener._broadcast, "run", lambda *_: 6):
        with self.assertRaisesRegex(RuntimeError, "rank 0 has saved step 6, this rank step 7"):
          listener.after_save(session, 7)

  def test_info(self):
    with tf.Graph().as_default():
      table = hash_table_ops.test_hash_table(2)
      table = table.assign_add([1, 2, 3], tf.ones([3, 2]))
      hook = sync_training_hooks.SyncTrainingInfoHook()
      with (
        self.assertLogs(level="INFO") as logs,
        tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session,
      ):
        session.run(table.as_op())
        session.run(table.as_op())

    sizes = [line for line in logs.output if "Rows in" in line]
    self.assertLen(sizes, 1)  # Not at every step.
    self.assertRegex(sizes[0], r"Rows in MonolithHashTable_\S*: 3")

  def test_parameter_sync(self):
    with tf.Graph().as_default():
      server = distributed_serving_ops.DummySyncServer("localhost:0")
      port = server.get_port()
      with tf.compat.v1.Session() as session:
        address = f"localhost:{session.run(port)[0]}"
        backend = mock.create_autospec(backends.SyncBackend, instance=True)
        backend.get_sync_targets.return_value = ("model", [address])
        hook = sync_training_hooks.ParameterSyncHook(backend, 3)
        hook.begin()
        args = [hook.before_run(None) for _ in range(3)]
        result = session.run(args[0].fetches, args[0].feed_dict)

    # Refreshed by the clock, pushed in every run.
    backend.get_sync_targets.assert_called_once_with("ps_3")
    self.assertIn(address.encode(), list(args[2].feed_dict.values())[0])
    self.assertLen(result, 1)

  def test_parameter_sync_outlives_its_backend(self):
    clock = mock.patch.object(sync_training_hooks.time, "monotonic", return_value=1000.0)
    with tf.Graph().as_default(), clock as now, self.assertLogs(level="ERROR") as logs:
      backend = mock.create_autospec(backends.SyncBackend, instance=True)
      backend.get_sync_targets.return_value = ("model", ["localhost:1"])
      hook = sync_training_hooks.ParameterSyncHook(backend, 3)
      hook.begin()
      (first,) = hook.before_run(None).feed_dict.values()
      backend.get_sync_targets.side_effect = ConnectionError("no ZooKeeper")
      now.return_value += 100
      failed = [list(hook.before_run(None).feed_dict.values())[0] for _ in range(3)]
      asked = backend.get_sync_targets.call_count
      backend.get_sync_targets.side_effect = None
      backend.get_sync_targets.return_value = ("model", ["localhost:2"])
      now.return_value += 10
      (last,) = hook.before_run(None).feed_dict.values()

    self.assertEqual(failed, [first] * 3)
    self.assertEqual(asked, 2)  # Not again in every step.
    self.assertLen(logs.output, 1)
    self.assertIn("no ZooKeeper", logs.output[0])
    self.assertIn(b"localhost:2", last)

  def test_agreements_of_one_rank(self):
    self.assertAllEqual(sync_agreement.gather("test_gather", 5), [5])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      broadcast = sync_agreement.Broadcast("test", [2], tf.int64)
      self.assertAllEqual(broadcast.run(session, [1, -2]), [1, -2])
      self.assertAllEqual(sync_agreement.Votes("votes").run(session, 3), [3])


if __name__ == "__main__":
  tf.test.main()
