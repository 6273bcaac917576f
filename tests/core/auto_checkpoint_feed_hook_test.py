"""Tests of `monolith.core.auto_checkpoint_feed_hook`."""

import contextlib
import time
import types
import unittest

import tensorflow as tf

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from tensorflow_estimator.python.estimator.tpu import error_handling, tpu_estimator

from monolith.core import auto_checkpoint_feed_hook
from monolith.core.auto_checkpoint_feed_hook import (
  TPUInfeedOutfeedSessionWithEndOfStreamHandlingHook as Hook,
)

tf.compat.v1.disable_v2_behavior()

_ITERATIONS = 3


class FeedHookTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    graph = tf.Graph().as_default()
    graph.__enter__()
    self.addCleanup(graph.__exit__, None, None, None)
    self.rendezvous = error_handling.ErrorRendezvous(num_sources=3)
    self.done = []
    record_done = self.rendezvous.record_done
    self.rendezvous.record_done = lambda source: (self.done.append(source), record_done(source))
    tf.compat.v1.train.get_or_create_global_step()
    with tf.compat.v1.variable_scope("", use_resource=True):
      self.enqueued = tf.compat.v1.get_variable("enqueued", initializer=0)
      self.dequeued = tf.compat.v1.get_variable("dequeued", initializer=0)

  def _create_hook(self, outputs_fn, outfeed_every_n_steps=1):
    context = types.SimpleNamespace(
      master_job="worker",
      embedding_config=None,
      model_parallelism_enabled=False,
      config=types.SimpleNamespace(
        tpu_config=types.SimpleNamespace(initial_infeed_sleep_secs=None)
      ),
    )
    count = self.dequeued.assign_add(1)
    hook = Hook(
      context,
      [self.enqueued.assign_add(1)],
      {"host_call": count, **outputs_fn(count)},
      tpu_compile_op=tf.no_op(),
      rendezvous=self.rendezvous,
      master="",
      outfeed_every_n_steps=outfeed_every_n_steps,
    )
    hook._should_initialize_tpu = False  # there is no TPU
    hook.begin()
    return hook

  @contextlib.contextmanager
  def _session(self, hook):
    with tf.compat.v1.Session() as session:
      session.run(tf.compat.v1.global_variables_initializer())
      hook._iterations_per_loop_var.load(_ITERATIONS, session=session)
      hook.after_create_session(session, tf.train.Coordinator())
      yield session

  def _run_loop(self, hook, session, want, variables=None):
    """Runs a loop and waits until its batches went through."""
    hook.before_run(types.SimpleNamespace(session=session))
    deadline = time.time() + 60
    while session.run(variables or [self.enqueued, self.dequeued]) != want:
      self.assertLess(time.time(), deadline, "the threads did not do their work")
      time.sleep(0.01)

  def _signal(self, count):
    return {"_user_provided_signal_name": {"stopping": tf.stack([count >= 5])}}

  def test_stops_after_the_loop_with_the_signal(self):
    hook = self._create_hook(self._signal)
    with self._session(hook) as session:
      self._run_loop(hook, session, [3, 3])
      self.assertFalse(hook.stopping_signal)
      self._run_loop(hook, session, [6, 6])
      deadline = time.time() + 60
      while not hook.stopping_signal:  # set after the last batch of the loop
        self.assertLess(time.time(), deadline)
        time.sleep(0.01)
      with self.assertRaisesRegex(tf.errors.OutOfRangeError, "^Stopped by stopping signal.$"):
        hook.before_run(types.SimpleNamespace(session=session))
      hook.end(session)
      self.assertEqual(session.run([self.enqueued, self.dequeued]), [6, 6])
    self.assertEqual(self.done, ["infeed", "outfeed"])

  def test_without_signal_it_goes_on(self):
    hook = self._create_hook(lambda count: {})
    with self._session(hook) as session:
      for i in (1, 2, 3):
        self._run_loop(hook, session, [3 * i, 3 * i])
      self.assertFalse(hook.stopping_signal)
      hook.end(session)

  def test_outfeed_every_n_steps(self):
    hook = self._create_hook(lambda count: {}, outfeed_every_n_steps=2)
    with self._session(hook) as session:
      self._run_loop(hook, session, [3, 2])
      hook.end(session)

  def test_missing_stopping_key(self):
    hook = self._create_hook(lambda count: {"_user_provided_signal_name": {"other": count}})
    with self._session(hook) as session:
      hook.before_run(types.SimpleNamespace(session=session))
      hook._outfeed_controller._thread.join(60)
    with self.assertRaisesRegex(RuntimeError, "has the keys .*other.*, want stopping"):
      self.rendezvous.raise_errors()

  def test_ends_a_monitored_session_normally(self):
    hook = self._create_hook(self._signal)
    train_op = tf.no_op()
    hook.begin = lambda: None  # done already, in order to switch the initialisation off
    set_iterations = hook._iterations_per_loop_var.assign(_ITERATIONS)
    loops = 0
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[_RunFirst(set_iterations), hook]) as s:
      while not s.should_stop():
        s.run(train_op)
        loops += 1
        self.assertLess(loops, 10000)
        time.sleep(0.01)
    self.assertGreaterEqual(loops, 2)
    self.assertTrue(hook.stopping_signal)

  def test_get_stopping_signals_and_name(self):
    name = "_user_provided_signal_name"
    self.assertEqual(Hook.get_stopping_signals_and_name({}), (None, name))
    signals, got_name = Hook.get_stopping_signals_and_name({name: tf.constant([True, False])})
    self.assertEqual(got_name, name)
    self.assertEqual((signals["stopping"].dtype, signals["stopping"].shape), (tf.bool, [2]))
    sums = [
      op for op in tf.compat.v1.get_default_graph().get_operations() if op.type == "CrossReplicaSum"
    ]
    self.assertEqual(len(sums), 1)
    self.assertEqual(sums[0].outputs[0].dtype, tf.int32)

  def test_other_names(self):
    self.assertEqual(auto_checkpoint_feed_hook._SIGNAL.NEXT_BATCH, -1)
    self.assertEqual(auto_checkpoint_feed_hook._SIGNAL.STOP, -2)
    auto_checkpoint_feed_hook.PeriodicLogger(60).log("message %d", 1)
    self.assertTrue(
      issubclass(
        auto_checkpoint_feed_hook._OpSignalOnceQueueContext,
        auto_checkpoint_feed_hook._OpQueueContext,
      )
    )
    self.assertTrue(issubclass(Hook, tpu_estimator.TPUInfeedOutfeedSessionHook))


class _RunFirst(tf.compat.v1.train.SessionRunHook):
  def __init__(self, op):
    self._op = op

  def after_create_session(self, session, coord):
    session.run(self._op)


if __name__ == "__main__":
  unittest.main()
