import threading
import time
from unittest import mock

import tensorflow as tf

from monolith.native_training import sync_hooks
from tests.free_ports import get_free_port

tf.compat.v1.disable_eager_execution()


class CountHook(tf.compat.v1.train.SessionRunHook):
  """Counts the calls that came through, and lets a test wait for them."""

  def __init__(self):
    self.created = threading.Event()
    self.ended = threading.Event()

  def after_create_session(self, session, coord):
    self.created.set()

  def end(self, session):
    self.ended.set()


class SyncHooksTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    patcher = mock.patch.object(sync_hooks, "_POLL_SECONDS", 0.01)
    patcher.start()
    self.addCleanup(patcher.stop)

  def _run_thread(self, target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    self.addCleanup(thread.join, 60)
    return thread

  def _local_helper(self, sess, num_workers=2):
    helper = sync_hooks.SyncHelper(num_workers, is_chief=True, var_device=None)
    sess.run(tf.compat.v1.local_variables_initializer())
    return helper

  def test_sync_process(self):
    with self.session() as sess:
      helper = self._local_helper(sess)
      chief_hooks = [sync_hooks.ChiefSyncHook(helper), CountHook()]
      worker_hooks = [sync_hooks.WorkerSyncHook(1, helper), CountHook()]
      chief_count, worker_count = chief_hooks[1], worker_hooks[1]

      def start(hooks):
        for hook in hooks:
          hook.after_create_session(sess, None)

      def end(hooks):
        for hook in hooks:
          hook.end(sess)

      worker_start = self._run_thread(lambda: start(worker_hooks))
      self.assertTrue(_eventually(lambda: helper.get_num_alive_workers(sess) == 1))
      self.assertFalse(worker_count.created.wait(0.2))
      start(chief_hooks)
      self.assertTrue(chief_count.created.is_set())
      self.assertTrue(worker_count.created.wait(60))
      worker_start.join(60)

      chief_end = self._run_thread(lambda: end(chief_hooks))
      self.assertFalse(chief_count.ended.wait(0.2))
      end(worker_hooks)
      self.assertTrue(worker_count.ended.is_set())
      self.assertTrue(chief_count.ended.wait(60))
      chief_end.join(60)

  def test_hook_helper(self):
    disabled = sync_hooks.TrainingHooksHelper(False, 0, 0)
    self.assertEqual(disabled.training_hooks, ())
    self.assertEqual(disabled.training_chief_hooks, ())
    self.assertEqual(disabled.get_alive_workers(None), [])

    enabled = sync_hooks.TrainingHooksHelper(True, 2, 1)
    self.assertLen(enabled.training_hooks, 1)
    self.assertIsInstance(enabled.training_hooks[0], sync_hooks.WorkerSyncHook)
    self.assertLen(enabled.training_chief_hooks, 1)
    self.assertIsInstance(enabled.training_chief_hooks[0], sync_hooks.ChiefSyncHook)

  def test_state(self):
    with self.session() as sess:
      helper = self._local_helper(sess, num_workers=4)
      self.assertEqual(helper.num_workers, 4)
      self.assertFalse(helper.get_restore_status(sess))
      self.assertEqual(helper.get_alive_workers(sess).tolist(), [])

      helper.start_worker(sess, 3)
      helper.start_worker(sess, 1)
      self.assertEqual(helper.get_alive_workers(sess).tolist(), [1, 3])
      self.assertFalse(helper.get_restore_status(sess))

      helper.mark_restore_done(sess)
      self.assertTrue(helper.get_restore_status(sess))
      self.assertEqual(helper.get_num_alive_workers(sess), 2)

      helper.finish_worker(sess, 3)
      helper.finish_worker(sess, 3)
      self.assertEqual(helper.get_alive_workers(sess).tolist(), [1])

  def test_index_out_of_range(self):
    with self.session() as sess:
      helper = self._local_helper(sess, num_workers=2)
      for idx in (-1, 0, 2):
        for method in (helper.start_worker, helper.finish_worker):
          with self.assertRaisesWithLiteralMatch(AssertionError, f"Index {idx} is out range "):
            method(sess, idx)

  def test_one_worker(self):
    with self.session() as sess:
      helper = self._local_helper(sess, num_workers=1)

      self.assertEqual(helper.get_num_alive_workers(sess), 0)
      sync_hooks.ChiefSyncHook(helper).end(sess)

  def test_names_and_collections(self):
    keys = tf.compat.v1.GraphKeys
    for is_chief, own, other in (
      (True, keys.LOCAL_VARIABLES, keys.GLOBAL_VARIABLES),
      (False, keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES),
    ):
      with tf.Graph().as_default() as graph:
        sync_hooks.SyncHelper(3, is_chief=is_chief)

        (variable,) = graph.get_collection(own)
        self.assertEmpty(graph.get_collection(other))
        self.assertEmpty(graph.get_collection(keys.TRAINABLE_VARIABLES))
        self.assertEqual(variable.name, "monolith_sync_helper/control_var:0")
        self.assertEqual(variable.shape.as_list(), [3])
        self.assertEqual(variable.device, "/job:chief/task:0")
        for name, dtype in (("idx_ph", tf.int32), ("value_ph", tf.bool)):
          placeholder = graph.get_tensor_by_name(f"monolith_sync_helper/{name}:0")
          self.assertEqual((placeholder.dtype, placeholder.shape.rank), (dtype, 0))

  def test_methods_work_on_a_finalized_graph_without_default(self):
    graph = tf.Graph()
    with graph.as_default():
      helper = sync_hooks.SyncHelper(2, is_chief=True, var_device=None)
      init = tf.compat.v1.local_variables_initializer()
    graph.finalize()
    sess = tf.compat.v1.Session(graph=graph)
    self.addCleanup(sess.close)
    sess.run(init)
    errors = []

    def use():
      try:
        helper.start_worker(sess, 1)
        helper.mark_restore_done(sess)
        sync_hooks.WorkerSyncHook(1, helper).after_create_session(sess, None)
        sync_hooks.WorkerSyncHook(1, helper).end(sess)
        sync_hooks.ChiefSyncHook(helper).end(sess)
      except Exception as e:
        errors.append(e)

    thread = self._run_thread(use)
    thread.join(60)

    self.assertEmpty(errors)
    self.assertFalse(thread.is_alive())

  def test_chief_gives_up(self):
    with self.session() as sess:
      helper = self._local_helper(sess, num_workers=3)
      helper.start_worker(sess, 1)
      helper.start_worker(sess, 2)

      with self.assertLogs(level="WARNING") as logs:
        sync_hooks.ChiefSyncHook(helper, timeout_seconds=0.05).end(sess)

    self.assertIn("Reach timeout seconds! Remaining worker count: 2.", logs.output[0])

  def test_chief_does_not_sleep_without_workers(self):
    with self.session() as sess:
      helper = self._local_helper(sess)
      with mock.patch.object(time, "sleep") as sleep, self.assertLogs(level="INFO") as logs:
        sync_hooks.ChiefSyncHook(helper).end(sess)

    sleep.assert_not_called()
    self.assertIn("All other workers had been finished.", logs.output[0])

  def test_worker_zero_does_nothing(self):
    hook = sync_hooks.WorkerSyncHook(0, None)

    hook.after_create_session(None, None)
    hook.after_run(None, None)
    hook.end(None)

  def test_worker_that_was_forgotten_says_that_it_is_alive(self):
    with self.session() as sess:
      helper = self._local_helper(sess)
      helper.mark_restore_done(sess)
      hook = sync_hooks.WorkerSyncHook(1, helper)
      hook.after_create_session(sess, None)
      run_context = tf.compat.v1.train.SessionRunContext(original_args=None, session=sess)

      # The chief recovers.
      sess.run(tf.compat.v1.local_variables_initializer())
      with mock.patch.object(sync_hooks, "_ALIVE_SECONDS", 3600):
        hook.after_run(run_context, None)
      self.assertEqual(helper.get_alive_workers(sess).tolist(), [])
      with mock.patch.object(sync_hooks, "_ALIVE_SECONDS", 0):
        hook.after_run(run_context, None)

      self.assertEqual(helper.get_alive_workers(sess).tolist(), [1])

  def test_worker_stops_waiting_with_its_coordinator(self):
    with self.session() as sess:
      helper = self._local_helper(sess)
      coord = tf.train.Coordinator()
      coord.request_stop()

      sync_hooks.WorkerSyncHook(1, helper).after_create_session(sess, coord)

      # It returned, although the chief never restored.
      self.assertFalse(helper.get_restore_status(sess))

  def test_waiting_worker_logs(self):
    with self.session() as sess:
      helper = self._local_helper(sess)

      def restore(_):
        helper.mark_restore_done(sess)

      with (
        mock.patch.object(time, "sleep", side_effect=restore),
        self.assertLogs(level="INFO") as logs,
      ):
        sync_hooks.WorkerSyncHook(1, helper).after_create_session(sess, None)

    self.assertIn("The worker 1 waits for start signal of chief.", logs.output[0])

  def test_two_sessions_of_a_cluster(self):
    """Chief and worker, each with its server, graph and session, over a real cluster."""
    servers = _create_cluster()
    done = []

    def run(job):
      is_chief = job == "chief"
      with tf.Graph().as_default():
        helper = sync_hooks.TrainingHooksHelper(True, 2, 0 if is_chief else 1, 60)
        hooks = helper.training_hooks + (helper.training_chief_hooks if is_chief else ())
        creator_class = (
          tf.compat.v1.train.ChiefSessionCreator if is_chief
          else tf.compat.v1.train.WorkerSessionCreator
        )  # fmt: skip
        creator = creator_class(master=servers[job].target)
        value = tf.constant(1)
        with tf.compat.v1.train.MonitoredSession(creator, hooks=hooks) as sess:
          sess.run(value)
          done.append((job, "ran"))
        done.append((job, "ended"))

    threads = [self._run_thread(lambda job=job: run(job)) for job in ("worker", "chief")]
    for thread in threads:
      thread.join(120)

    self.assertCountEqual(
      done, [(job, what) for job in ("chief", "worker") for what in ("ran", "ended")]
    )


def _create_cluster():
  """Starts one chief and one worker server on free ports."""
  ports = [get_free_port() for _ in range(2)]
  cluster = tf.train.ClusterSpec(
    {"chief": [f"localhost:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]}
  )
  return {
    job: tf.distribute.Server(cluster, job_name=job, task_index=0) for job in ("chief", "worker")
  }


def _eventually(condition, seconds: float = 60) -> bool:
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    if condition():
      return True
    threading.Event().wait(0.01)
  return False


if __name__ == "__main__":
  tf.test.main()
