"""Files written from a graph: text and embedding records, closed by a hook."""

from __future__ import annotations

import itertools
import weakref

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as file_ops

_eager_ids = itertools.count()


class WritableFile:
  """A file that is truncated and opened for writing when it is first used; folders are created.

  Each method returns the op that does the work (None in eager mode, where it is done at once).
  Appending to or closing a closed file is a `FailedPreconditionError`.
  """

  def __init__(self, filename: str):
    """Makes the file's handle.

    Args:
      filename: any path TensorFlow's file systems know.
    """
    if tf.executing_eagerly():
      # Eager kernels are cached by their attributes: without a name of its own, a second file of
      # the same path would be the first one, perhaps closed.
      shared_name = f"monolith_writable_file_{next(_eager_ids)}"
      self._handle = file_ops.monolith_writable_file(filename, shared_name=shared_name)
      finalizer = weakref.finalize(self, _destroy, self._handle)
      finalizer.atexit = False
    else:
      self._handle = file_ops.monolith_writable_file(filename)

  def append(self, content: tf.Tensor | str | bytes) -> tf.Operation | None:
    """Appends a string scalar as it is, without a line end."""
    return file_ops.monolith_writable_file_append(self._handle, content)

  def append_entry_dump(
    self, item_id: tf.Tensor, bias: tf.Tensor, embedding: tf.Tensor
  ) -> tf.Operation | None:
    """Appends one TFRecord of `EntryDump{id, num: [bias, embedding...]}` per item.

    Args:
      item_id: int64, n >= 1 ids.
      bias: float32, n numbers.
      embedding: float32, n * dim numbers.
    """
    return file_ops.monolith_entry_dump_file_append(self._handle, item_id, bias, embedding)

  def close(self) -> tf.Operation | None:
    """Flushes and closes the file."""
    return file_ops.monolith_writable_file_close(self._handle)


def _destroy(handle: tf.Tensor) -> None:
  with tf.init_scope(), tf.device(handle.device):
    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


class FileCloseHook(tf.compat.v1.train.SessionRunHook):
  """Closes files when the session ends."""

  def __init__(self, files: list[WritableFile]):
    """Builds the close ops, so that the graph may be finalized later.

    Args:
      files: the files, a list.

    Raises:
      AssertionError: `files` is not a list.
    """
    assert isinstance(files, list), f"files is {type(files).__name__}, want a list"
    self._close_ops = [file.close() for file in files]

  def end(self, session: tf.compat.v1.Session) -> None:
    session.run(self._close_ops)
