"""The hook that calls restorer listeners."""

import os
import pathlib

import tensorflow as tf

from monolith.native_training import basic_restore_hook

tf.compat.v1.disable_eager_execution()


class _Listener(basic_restore_hook.CheckpointRestorerListener):
  def __init__(self, log=None):
    self.counts = {"begin": 0, "before": 0, "after": 0}
    self.log = [] if log is None else log

  def begin(self):
    self.counts["begin"] += 1

  def before_restore(self, session):
    self.counts["before"] += 1
    self.log.append((self, "before"))

  def after_restore(self, session):
    self.counts["after"] += 1
    self.log.append((self, "after"))


class CheckpointRestorerHookTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    tf.compat.v1.reset_default_graph()

  def test_restore_only_in_after_create_session(self):
    train_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
    listener = _Listener()
    hook = basic_restore_hook.CheckpointRestorerHook(listeners=[listener])

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      self.assertEqual(listener.counts, {"begin": 1, "before": 1, "after": 1})
      sess.run(train_op)
      sess.run(train_op)
      self.assertEqual(listener.counts, {"begin": 1, "before": 1, "after": 1})
    self.assertEqual(listener.counts, {"begin": 1, "before": 1, "after": 1})

  def test_all_restore_before_any_is_told_that_it_is_over(self):
    log = []
    first, second = _Listener(log), _Listener(log)

    with tf.compat.v1.train.SingularMonitoredSession(
      hooks=[basic_restore_hook.CheckpointRestorerHook([first, second])]
    ):
      pass

    self.assertEqual(
      log, [(first, "before"), (second, "before"), (first, "after"), (second, "after")]
    )

  def test_no_listeners(self):
    with tf.compat.v1.train.SingularMonitoredSession(
      hooks=[basic_restore_hook.CheckpointRestorerHook()]
    ) as sess:
      self.assertEqual(sess.run([]), [])

  def test_damaged_table_file_is_reported_with_an_intact_checkpoint(self):
    folder = os.environ["TEST_TMPDIR"]
    with self.session() as sess:
      tf.compat.v1.get_variable("v", initializer=1.0)
      sess.run(tf.compat.v1.global_variables_initializer())
      saver = tf.compat.v1.train.Saver()
      for step in (1, 2):
        saver.save(sess, os.path.join(folder, "m"), global_step=step)
    table = pathlib.Path(folder, "m-2.assets", "t-00000-of-00001")
    table.parent.mkdir()
    table.write_bytes(b"no record")

    class Failing(basic_restore_hook.CheckpointRestorerListener):
      def before_restore(self, session):
        raise tf.errors.DataLossError(None, None, f"corrupted record in {table}.")

    with self.assertRaisesRegex(
      tf.errors.DataLossError, f"corrupted record in {table}.*intact is {folder}/m-1"
    ):
      tf.compat.v1.train.SingularMonitoredSession(
        hooks=[basic_restore_hook.CheckpointRestorerHook([Failing()])]
      )


if __name__ == "__main__":
  tf.test.main()
