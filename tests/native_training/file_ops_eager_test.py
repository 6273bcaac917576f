"""Files written eagerly, where TensorFlow caches kernels by their attributes."""

import gc
import os

import tensorflow as tf

from monolith.native_training import file_ops


def _read(path: str) -> bytes:
  with open(path, "rb") as f:
    return f.read()


class FileOpsEagerTest(tf.test.TestCase):
  def test_the_same_path_opened_twice_is_two_files(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "name")
    first = file_ops.WritableFile(path)
    first.append("first")
    first.close()
    self.assertEqual(_read(path), b"first")

    second = file_ops.WritableFile(path)
    second.append("2")
    second.close()

    self.assertEqual(_read(path), b"2")
    with self.assertRaises(tf.errors.FailedPreconditionError):
      second.append("3")

  def test_a_file_nobody_holds_is_closed(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "dropped")
    file = file_ops.WritableFile(path)
    file.append("content")

    del file
    gc.collect()

    self.assertEqual(_read(path), b"content")

  def test_inside_a_function(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "function")
    file = file_ops.WritableFile(path)

    @tf.function
    def write(n):
      for i in tf.range(n):
        file.append(tf.strings.as_string(i))
      file.close()

    write(5)

    self.assertEqual(_read(path), b"01234")


if __name__ == "__main__":
  tf.test.main()
