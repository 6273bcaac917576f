"""Files written from graphs."""

import os

import tensorflow as tf

from monolith.native_training import file_ops
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

tf.compat.v1.disable_eager_execution()


def _path(name: str) -> str:
  return os.path.join(os.environ["TEST_TMPDIR"], name)


def _read(path: str) -> bytes:
  with open(path, "rb") as f:
    return f.read()


class FileOpsTest(tf.test.TestCase):
  def test_basic(self):
    path = _path("test_basic/sub/folder/name")
    f = file_ops.WritableFile(path)

    @tf.function
    def append_all():
      for _ in tf.range(1000):
        f.append("1234")
      # A function without a result is None in a graph and cannot be run.
      return tf.constant(0)

    with self.session() as session:
      session.run(append_all())
      session.run(f.close())

    self.assertEqual(_read(path), b"1234" * 1000)

  def test_hook(self):
    path = _path("test_hook/name")
    f = file_ops.WritableFile(path)
    append = f.append("1234")
    hook = file_ops.FileCloseHook([f])

    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as session:
      session.run(append)
      session.run(append)

    self.assertEqual(_read(path), b"12341234")
    self.assertIsInstance(hook, tf.compat.v1.train.SessionRunHook)

  def test_hook_wants_a_list(self):
    f = file_ops.WritableFile(_path("unused"))
    with self.assertRaises(AssertionError):
      file_ops.FileCloseHook((f,))

  def test_appends_in_a_function_keep_their_order(self):
    path = _path("order")
    f = file_ops.WritableFile(path)

    @tf.function
    def append_all():
      for i in range(20):
        f.append(f"{i},")
      return tf.constant(0)

    with self.session() as session:
      session.run(append_all())
      session.run(f.close())

    self.assertEqual(_read(path).decode(), "".join(f"{i}," for i in range(20)))

  def test_opening_truncates_and_relative_paths_work(self):
    self.addCleanup(os.chdir, os.getcwd())
    os.chdir(os.environ["TEST_TMPDIR"])
    with open("plain", "w") as f:
      f.write("old content")
    f = file_ops.WritableFile("plain")
    append, close = f.append(b"\x00\xffnew"), f.close()

    with self.session() as session:
      session.run(append)
      session.run(close)

    self.assertEqual(_read("plain"), b"\x00\xffnew")

  def test_append_entry_dump(self):
    path = _path("dump/entries")
    f = file_ops.WritableFile(path)
    append = f.append_entry_dump(
      item_id=tf.constant([1, -(2**63), 2**63 - 1], dtype=tf.int64),
      bias=[0.5, 1.5, 2.5],
      embedding=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    )
    without_embedding = f.append_entry_dump(
      tf.constant([7], dtype=tf.int64), tf.constant([[9.0]]), tf.zeros([1, 0])
    )
    close = f.close()

    with self.session() as session:
      session.run(append)
      session.run(without_embedding)
      session.run(close)

    entries = [
      embedding_hash_table_pb2.EntryDump.FromString(record)
      for record in tf.compat.v1.io.tf_record_iterator(path)
    ]
    self.assertEqual([e.id for e in entries], [1, -(2**63), 2**63 - 1, 7])
    self.assertEqual([list(e.num) for e in entries], [[0.5, 1, 2], [1.5, 3, 4], [2.5, 5, 6], [9]])

  def test_bad_entry_dump_writes_nothing(self):
    path = _path("bad_dump")
    f = file_ops.WritableFile(path)
    ids = tf.compat.v1.placeholder(tf.int64)
    bias = tf.compat.v1.placeholder(tf.float32)
    embedding = tf.compat.v1.placeholder(tf.float32)
    append = f.append_entry_dump(ids, bias, embedding)
    close = f.close()

    with self.session() as session:
      for feed, message in (
        ({ids: [], bias: [], embedding: []}, "item_id is empty"),
        ({ids: [1, 2], bias: [1], embedding: [1, 2]}, "size of bias is 1, want .* = 2"),
        ({ids: [1, 2], bias: [1, 2], embedding: [1, 2, 3]}, "size of embedding is 3, want .* = 2"),
      ):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          session.run(append, feed)
      session.run(close)

    self.assertEqual(_read(path), b"")

  def test_a_closed_file_is_a_failed_precondition(self):
    f = file_ops.WritableFile(_path("closed"))
    append, close = f.append("x"), f.close()
    dump = f.append_entry_dump(tf.constant([1], dtype=tf.int64), [1.0], [1.0])

    with self.session() as session:
      session.run(append)
      session.run(close)

      for op in (append, close, dump):
        with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "closed"):
          session.run(op)
    self.assertEqual(_read(_path("closed")), b"x")

  def test_a_destroyed_file_is_flushed_and_then_not_found(self):
    ops = file_ops.file_ops
    path = _path("destroyed")
    handle = ops.monolith_writable_file(path, shared_name="destroyed")
    append = ops.monolith_writable_file_append(handle, "x")
    with tf.control_dependencies([append]):
      destroy = tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=False)
    with tf.control_dependencies([destroy]):
      append_again = ops.monolith_writable_file_append(handle, "y")

    with self.session() as session, self.assertRaises(tf.errors.NotFoundError):
      session.run(append_again)
    self.assertEqual(_read(path), b"x")

  def test_one_file_per_shared_name(self):
    ops = file_ops.file_ops
    path = _path("shared")
    first = ops.monolith_writable_file(path, shared_name="shared")
    second = ops.monolith_writable_file(path, shared_name="shared")

    with self.session() as session:
      session.run(ops.monolith_writable_file_append(first, "a"))
      session.run(ops.monolith_writable_file_append(second, "b"))
      session.run(ops.monolith_writable_file_close(first))

    self.assertEqual(_read(path), b"ab")

  def test_a_file_that_cannot_be_opened(self):
    with open(_path("file"), "w"):
      pass
    for path in ("", _path("file/below_a_file")):
      with self.session() as session, self.assertRaises(tf.errors.OpError):
        session.run(file_ops.WritableFile(path).append("x"))

  def test_errors_of_a_full_disk_surface(self):
    if not os.path.exists("/dev/full"):
      self.skipTest("no /dev/full")
    f = file_ops.WritableFile("/dev/full")
    append, close = f.append("x" * 10), f.close()

    with self.session() as session:
      session.run(append)
      with self.assertRaises(tf.errors.OpError):
        session.run(close)

  def test_content_must_be_a_scalar(self):
    f = file_ops.WritableFile(_path("scalar"))
    content = tf.compat.v1.placeholder(tf.string)
    append = f.append(content)

    with self.session() as session:
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"content has shape \[2\]"):
        session.run(append, {content: ["a", "b"]})
    with self.assertRaises(ValueError):
      f.append(["a", "b"])


if __name__ == "__main__":
  tf.test.main()
