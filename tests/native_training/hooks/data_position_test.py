"""When a training run goes on in its data, and what it takes for the same data."""

from __future__ import annotations

import json
import os
from unittest import mock

import tensorflow as tf

from monolith.native_training.hooks import data_position
from monolith.native_training.hooks.data_position import DataPositionHook, Resume

tf.compat.v1.disable_eager_execution()


def _double(x):
  return x * 2


class _DataPositionTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def path(self, name, content=None):
    path = os.path.join(self.folder, name)
    if content is not None:
      with open(path, "w") as file:
        file.write(content)
    return path


class DataPositionHookTest(_DataPositionTest):
  def save_position(self):
    """Writes what the hook finds of an earlier run: a checkpoint of its input."""
    with tf.Graph().as_default(), self.session() as session:
      tf.compat.v1.get_variable("x", initializer=1.0)
      session.run(tf.compat.v1.global_variables_initializer())
      saver = tf.compat.v1.train.Saver()
      saver.save(
        session, self.path("input"), latest_filename="checkpoint_input_worker_3", global_step=7
      )

  def start(self, resume, fingerprint="same"):
    """Returns the hook of a run that has begun, and whether it restored the position."""
    restorer = mock.create_autospec(tf.compat.v1.train.SessionRunHook, instance=True)
    hook = DataPositionHook(restorer, self.folder, 3, fingerprint, resume)
    hook.after_create_session(None, None)
    self.restorer = restorer
    return hook, restorer.after_create_session.called

  def run_to_end(self, hook, steps=1):
    for _ in range(steps):
      hook.before_run(None)
      hook.after_run(None, None)
    hook.before_run(None)  # breaks off: the data ends
    hook.end(None)

  def record(self):
    with open(self.path("data_worker_3.json")) as file:
      return json.load(file)

  def has_position(self):
    return os.path.exists(self.path("checkpoint_input_worker_3"))

  def test_without_a_position_only_always_restores(self):
    for resume in (Resume.SAME_DATA, Resume.UNFINISHED, Resume.NEVER):
      self.assertFalse(self.start(resume)[1], resume)
    self.assertTrue(self.start(Resume.ALWAYS)[1])

  def test_a_position_is_for_its_own_data(self):
    self.save_position()
    self.start(Resume.SAME_DATA, "same")
    self.assertTrue(self.start(Resume.SAME_DATA, "same")[1])
    with self.assertLogs("absl", "INFO") as logs:
      self.assertFalse(self.start(Resume.SAME_DATA, "other")[1])
    self.assertIn("data is other than that of the last run", str(logs.output))
    # It is not taken for a position in the other data next time.
    self.assertFalse(self.has_position())
    self.assertEqual(self.record(), {"fingerprint": "other", "is_finished": False})

  def test_a_position_is_restored_where_nobody_knows_what_the_data_is(self):
    self.save_position()
    self.start(Resume.SAME_DATA, "same")
    self.assertTrue(self.start(Resume.SAME_DATA, None)[1])

  def test_data_that_was_read_to_its_end(self):
    self.save_position()
    self.run_to_end(self.start(Resume.UNFINISHED)[0])
    self.assertEqual(self.record(), {"fingerprint": "same", "is_finished": True})
    self.save_position()
    self.assertTrue(self.start(Resume.SAME_DATA)[1])
    self.run_to_end(self.start(Resume.ALWAYS)[0])
    self.assertFalse(self.start(Resume.UNFINISHED)[1])

  def test_a_run_that_was_stopped_is_unfinished(self):
    self.save_position()
    hook, _ = self.start(Resume.UNFINISHED)
    hook.before_run(None)
    hook.after_run(None, None)
    hook.end(None)
    self.assertFalse(self.record()["is_finished"])
    self.assertTrue(self.start(Resume.UNFINISHED)[1])

  def test_never_forgets_the_position(self):
    self.save_position()
    self.assertFalse(self.start(Resume.NEVER)[1])
    self.assertFalse(self.has_position())

  def test_a_session_that_replaces_a_broken_one_goes_on(self):
    self.save_position()
    hook, restored = self.start(Resume.NEVER)
    self.assertFalse(restored)
    hook.after_create_session(None, None)
    self.assertEqual(self.restorer.after_create_session.call_count, 1)

  def test_a_damaged_record_is_none(self):
    self.save_position()
    for content in ("", "{", "[1]", "null", '{"is_finished": true}'):
      self.path("data_worker_3.json", content)
      want = content != '{"is_finished": true}'  # another fingerprint
      self.assertEqual(self.start(Resume.UNFINISHED)[1], want, content)
      self.save_position()

  def test_no_step_is_explained(self):
    with self.assertLogs("absl", "WARNING") as logs:
      self.run_to_end(self.start(Resume.SAME_DATA)[0], steps=0)
    self.assertIn("gave no batch", str(logs.output))
    self.save_position()
    with self.assertLogs("absl", "WARNING") as logs:
      self.run_to_end(self.start(Resume.ALWAYS)[0], steps=0)
    self.assertIn(f"restored from {self.path('input-7')}, which is the end", str(logs.output))


class FingerprintTest(_DataPositionTest):
  def fingerprint(self, make):
    with tf.Graph().as_default():
      return data_position.fingerprint(make())

  def assert_same(self, first, second, want=True):
    same = self.fingerprint(first) == self.fingerprint(second)
    self.assertEqual(same, want)

  def test_pipelines(self):
    numbers = tf.data.Dataset.range

    def from_list():
      return tf.data.Dataset.from_tensor_slices([1, 2])

    self.assert_same(lambda: numbers(8).batch(2), lambda: numbers(8).batch(2))
    self.assert_same(lambda: numbers(8).batch(2), lambda: numbers(8).batch(4), False)
    self.assert_same(lambda: numbers(8).batch(2), lambda: numbers(9).batch(2), False)
    self.assert_same(lambda: numbers(8).map(_double), lambda: numbers(8).map(_double))
    self.assert_same(
      lambda: numbers(8).map(_double), lambda: numbers(8).map(lambda x: x * 3), False
    )
    self.assert_same(from_list, from_list)
    self.assert_same(from_list, lambda: tf.data.Dataset.from_tensor_slices([1, 3]), False)

  def test_names_of_ops_do_not_count(self):
    def other_names():
      tf.constant(1, name="one_more")
      tf.data.Dataset.range(3)
      return tf.data.Dataset.range(8, name="numbers").map(_double)

    self.assert_same(lambda: tf.data.Dataset.range(8).map(_double), other_names)

  def test_how_a_function_is_compiled_does_not_count(self):
    concrete = tf.function(_double).get_concrete_function(tf.TensorSpec([], tf.int64))

    def make():
      return tf.data.Dataset.range(8).map(lambda x: concrete(x))

    with_rewrites = self.fingerprint(make)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
      self.assertEqual(self.fingerprint(make), with_rewrites)
    finally:
      tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})

  def test_files_count_by_size_and_time(self):
    path = self.path("part-1", "a\n")
    for source in (path, self.path("part-*")):
      with self.subTest(source=source):
        self.path("part-1", "a\n")
        os.utime(path, ns=(1, 1))

        def make(source=source):
          return tf.data.Dataset.from_tensor_slices([source]).flat_map(tf.data.TextLineDataset)

        before = self.fingerprint(make)
        self.assertEqual(self.fingerprint(make), before)
        os.utime(path, ns=(1, 2))
        touched = self.fingerprint(make)
        self.path("part-1", "ab\n")
        os.utime(path, ns=(1, 2))
        self.assertNotIn(self.fingerprint(make), (before, touched))
        self.assertNotEqual(touched, before)

  def test_texts_that_are_no_paths(self):
    def make():
      return tf.data.Dataset.from_tensor_slices([b"\xff\0[", b"x" * 5000, b"", b"no/such/file"])

    self.assert_same(make, make)

  def test_strings_of_an_eager_dataset(self):
    values = [b"", b"abc", b"x" * 300]
    lengths = b"\x00\x03\xac\x02"
    proto = tf.make_tensor_proto(["", "", ""])
    del proto.string_val[:]
    proto.tensor_content = lengths + b"".join(values)
    self.assertEqual(data_position._read_strings(proto), values)


if __name__ == "__main__":
  tf.test.main()
