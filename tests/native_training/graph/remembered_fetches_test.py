"""Runs that are remembered return and raise what `Session.run` does."""

import collections
from unittest import mock

import tensorflow as tf

from monolith.native_training import test_utils
from monolith.native_training.graph import remembered_fetches

tf.compat.v1.disable_eager_execution()

Pair = collections.namedtuple("Pair", "first second")


class RememberFetchesHookTest(tf.test.TestCase):
  def _session(self, *hooks):
    hook = remembered_fetches.RememberFetchesHook()
    return tf.compat.v1.train.MonitoredSession(hooks=[hook, *hooks])

  def test_results_have_the_structure_of_the_fetches(self):
    with tf.Graph().as_default():
      count = tf.compat.v1.get_variable("count", [], tf.int64, tf.zeros_initializer())
      add = count.assign_add(1)
      fetches = [{"add": add, "none": tf.no_op()}, Pair(tf.constant(2), (tf.constant("x"), []))]

      with self._session() as session:
        results = [session.run(fetches) for _ in range(3)]

      self.assertEqual([result[0]["add"] for result in results], [1, 2, 3])
      for result in results:
        self.assertIsNone(result[0]["none"])
        self.assertEqual(result[1], Pair(2, (b"x", [])))

  def test_nothing_to_run_is_no_error(self):
    with tf.Graph().as_default(), self._session() as session:
      raw = session._tf_sess()
      for fetches in ([], {}, {"sizes": {}, "more": [[], ()]}):
        self.assertEqual(raw.run(fetches), fetches)

  def test_a_step_is_looked_at_once(self):
    with tf.Graph().as_default():
      one, two = tf.constant(1), tf.constant(2)
      with self._session() as session:
        raw = session._tf_sess()
        with mock.patch.object(raw, "make_callable", wraps=raw.make_callable) as make:
          results = [session.run([tensor, tensor]) for tensor in (one, two, one, two, one)]

    self.assertEqual(results, [[1, 1], [2, 2], [1, 1], [2, 2], [1, 1]])
    self.assertEqual(make.call_count, 2)

  def test_names_and_many_combinations(self):
    with tf.Graph().as_default():
      tensors = [tf.constant(i, name=f"c{i}") for i in range(80)]
      with self._session() as session:
        for i, tensor in enumerate(tensors):
          self.assertEqual(session.run([tensor, f"c{i}:0"]), [i, i])

  def test_feeds_and_options_are_not_lost(self):
    with tf.Graph().as_default():
      fed = tf.compat.v1.placeholder_with_default(1, [])
      double = 2 * fed
      metadata = tf.compat.v1.RunMetadata()
      options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
      with self._session() as session:
        self.assertEqual(session.run(double), 2)
        self.assertEqual(session.run(double, {fed: 5}), 10)
        self.assertEqual(session.run(double, options=options, run_metadata=metadata), 2)
        self.assertEqual(session.run(double), 2)

    self.assertTrue(metadata.step_stats.dev_stats)

  def test_fetches_of_hooks_that_come_and_go(self):
    class Hook(tf.compat.v1.train.SessionRunHook):
      def __init__(self):
        self.seen = []

      def begin(self):
        self._tensor = tf.constant(7)

      def before_run(self, run_context):
        if len(self.seen) % 2:
          return tf.compat.v1.train.SessionRunArgs({"seven": self._tensor})
        return None

      def after_run(self, run_context, run_values):
        self.seen.append(run_values.results)

    with tf.Graph().as_default():
      hook, three = Hook(), tf.constant(3)
      with self._session(hook) as session:
        self.assertEqual([session.run(three) for _ in range(4)], [3] * 4)

    self.assertEqual(hook.seen, [None, {"seven": 7}, None, {"seven": 7}])

  def test_what_other_processes_have_done_is_not_joined_by_a_message(self):
    servers, config = test_utils.create_test_ps_cluster(2)
    with tf.Graph().as_default():
      with tf.device("/job:ps/task:1"):
        counts = [tf.compat.v1.get_variable(f"c{i}", [], tf.int64) for i in range(3)]
        values = [count.read_value() for count in counts]
        adds = [count.assign_add(1).op for count in counts]
      inner = tf.group(adds[1], adds[2], name="inner")
      joined, empty, three = tf.group(adds[0], inner, name="outer"), tf.no_op(), tf.constant(3)
      creator = tf.compat.v1.train.ChiefSessionCreator(master=servers[0].target, config=config)
      hook = remembered_fetches.RememberFetchesHook()
      with tf.compat.v1.train.MonitoredSession(creator, hooks=[hook]) as session:
        raw = session._tf_sess()
        before = session.run(values)
        with mock.patch.object(raw, "make_callable", wraps=raw.make_callable) as make:
          for _ in range(2):
            results = session.run({"step": joined, "more": (empty, [three])})
            self.assertEqual(results, {"step": None, "more": (None, [3])})
        self.assertEqual(session.run(values), [value + 2 for value in before])
    self.assertEqual(make.call_count, 1)
    fetched = set(tf.nest.flatten(make.call_args[0]))
    self.assertTrue(fetched.issuperset([*adds, empty]))
    self.assertTrue(fetched.isdisjoint([joined, inner]))

  def test_an_error_names_its_op(self):
    with tf.Graph().as_default():
      wrong = tf.debugging.check_numerics(tf.constant(float("nan")), "bad loss", name="the_check")
      with self._session() as session:
        for _ in range(2):
          with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "bad loss") as caught:
            session.run(wrong)
          self.assertEqual(caught.exception.op.name, "the_check")

  def test_a_recovered_session_remembers_nothing_of_the_lost_one(self):
    with tf.Graph().as_default():

      class LoseSecondHook(tf.compat.v1.train.SessionRunHook):
        runs = 0

        def before_run(self, run_context):
          self.runs += 1
          if self.runs == 2:
            raise tf.errors.AbortedError(None, None, "lost")

      one = tf.constant(1)
      with self._session(LoseSecondHook()) as session:
        self.assertEqual(session.run(one), 1)
        lost = session._tf_sess()
        self.assertEqual(session.run(one), 1)
        self.assertIsNot(session._tf_sess(), lost)

  def test_a_closed_session_says_so(self):
    with tf.Graph().as_default():
      one = tf.constant(1)
      session = self._session()
      session.run(one)
      raw = session._tf_sess()
      session.close()
      with self.assertRaises(RuntimeError):
        raw.run(one)


if __name__ == "__main__":
  tf.test.main()
