"""A session starts from one checkpoint, whatever another process saves or deletes meanwhile."""

from __future__ import annotations

import os

import tensorflow as tf

from monolith.native_training import basic_restore_hook, hash_table_ops
from monolith.native_training.checkpoints import restored
from tests.reliability import trainer

tf.compat.v1.disable_eager_execution()


class _Meanwhile(basic_restore_hook.CheckpointRestorerListener):
  """Calls a function between the restore of the variables and that of the tables, once."""

  def __init__(self, function):
    self._function = function

  def before_restore(self, session):
    function, self._function = self._function, lambda: None
    function()


class RestoredTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(self.create_tempdir().full_path, "model")
    os.mkdir(self._dir)

  def _train(self, steps, max_to_keep=5, save_twice=False):
    training = trainer.Trainer(self._dir, max_to_keep)
    with training.session() as session:
      for _ in range(steps):
        session.run(training.train_op)
      if save_twice:
        training.saver_hook.trigger_save(session)

  def _restore(self, meanwhile):
    """Returns the step that is restored; everything is compared with it."""
    reader = trainer.Trainer(self._dir, save_steps=10**9)
    reader.restore_listeners.insert(0, _Meanwhile(meanwhile))
    with reader.session() as session:
      return reader.check(session)

  def test_a_checkpoint_saved_meanwhile_is_not_mixed_in(self):
    self._train(2)

    self.assertEqual(self._restore(lambda: self._train(3)), 2)
    self.assertEqual(self._restore(lambda: None), 5)

  def _restore_with_saver_of_tensorflow(self, meanwhile):
    """Returns the step and the rows that a graph with one of the tables restores."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
      step = v1.train.get_or_create_global_step()
      table = hash_table_ops.hash_table_from_config(
        trainer.table_config(trainer.DIM), name_suffix="single"
      )
      rows = table.lookup(tf.range(2, dtype=tf.int64))
      listeners = [
        _Meanwhile(meanwhile),
        hash_table_ops.HashTableCheckpointRestorerListener(os.path.join(self._dir, "model.ckpt")),
      ]
      with v1.train.SingularMonitoredSession(
        hooks=[basic_restore_hook.CheckpointRestorerHook(listeners)],
        scaffold=v1.train.Scaffold(saver=v1.train.Saver()),
        checkpoint_dir=self._dir,
      ) as session:
        return session.raw_session().run([step, rows])

  def test_a_saver_of_tensorflow_that_restored_an_older_checkpoint_is_an_error(self):
    self._train(2)

    step, rows = self._restore_with_saver_of_tensorflow(lambda: None)

    self.assertEqual(step, 2)
    self.assertAllLess(rows, 0)
    with self.assertRaisesRegex(
      restored.CheckpointChangedError, r"from step 2, .*model\.ckpt-5, of step 5"
    ):
      self._restore_with_saver_of_tensorflow(lambda: self._train(3))

  def test_the_first_checkpoint_comes_too_late_for_a_new_session(self):
    self.assertEqual(self._restore(lambda: self._train(2)), 0)

  def test_a_checkpoint_deleted_meanwhile_is_an_error_that_names_the_newest(self):
    self._train(2, max_to_keep=1)

    with self.assertRaisesRegex(
      restored.CheckpointChangedError, r"deleted .*model\.ckpt-2, .*newest .* is .*model\.ckpt-4"
    ):
      self._restore(lambda: self._train(2, max_to_keep=1))

  def test_a_checkpoint_written_again_meanwhile_is_an_error(self):
    self._train(2)

    with self.assertRaisesRegex(restored.CheckpointChangedError, r"wrote it again"):
      self._restore(lambda: self._train(0, save_twice=True))

  def test_a_checkpoint_written_again_within_a_second_is_an_error(self):
    self._train(2)
    index = os.path.join(self._dir, "model.ckpt-2.index")
    second = os.stat(index).st_mtime_ns // 10**9 * 10**9
    os.utime(index, ns=(second, second))

    def write_again():
      self._train(0, save_twice=True)
      os.utime(index, ns=(second + 1000, second + 1000))

    with self.assertRaisesRegex(restored.CheckpointChangedError, r"wrote it again"):
      self._restore(write_again)

  def test_a_kept_checkpoint_that_a_kill_left_marked_is_restored(self):
    self._train(2)
    # Killed between the state file and the end of the save.
    with open(os.path.join(self._dir, "model.ckpt-2.unfinished"), "w"):
      pass

    self.assertEqual(self._restore(lambda: None), 2)

  def test_who_may_read_any_checkpoint_reads_the_next_one(self):
    self._train(1, max_to_keep=1)
    read = []

    def fail_once(prefix):
      read.append(os.path.basename(prefix))
      if len(read) == 1:
        self._train(1, max_to_keep=1)
        raise tf.errors.NotFoundError(None, None, "a file is gone")
      return "whole"

    self.assertEqual(restored.with_newest(self._dir, fail_once), "whole")
    self.assertEqual(read, ["model.ckpt-1", "model.ckpt-2"])

  def test_an_error_about_a_checkpoint_that_is_there_is_raised(self):
    self._train(1)

    def fail(prefix):
      raise ValueError(f"bad {prefix}")

    with self.assertRaisesRegex(ValueError, "bad .*model.ckpt-1"):
      restored.with_newest(self._dir, fail)


if __name__ == "__main__":
  tf.test.main()
