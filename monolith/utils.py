"""TensorFlow patch and file-copy helpers.

TensorFlow is imported inside the functions: build tools import this module for `find_main` and
`get_libops_path` alone.
"""

from __future__ import annotations

import concurrent.futures
import os

from monolith.path_utils import find_main, get_libops_path

__all__ = ["CopyFile", "CopyRecursively", "enable_monkey_patch", "find_main", "get_libops_path"]


def enable_monkey_patch() -> None:
  """Makes monitored sessions recover from `AbortedError` only.

  TensorFlow also treats `UnavailableError` as a preemption and retries forever; in this library
  an unreachable parameter server must surface, so that the driver can restore or stop.
  """
  import tensorflow as tf
  from tensorflow.python.training import monitored_session

  monitored_session._PREEMPTION_ERRORS = (tf.errors.AbortedError,)


def CopyFile(
  src: str, dst: str, overwrite: bool = True, skip_nonexist: bool = True, max_retries: int = 5
) -> None:
  """Copies one file through TensorFlow's file systems.

  Args:
    src: the file to copy.
    dst: its new path.
    overwrite: replace `dst` if it exists.
    skip_nonexist: when `src` keeps being absent for `max_retries` tries, return silently.
    max_retries: how often to try.

  Raises:
    tf.errors.NotFoundError: `src` is absent and `skip_nonexist` is false.
    tf.errors.OpError: any other failure, at once.
  """
  import tensorflow as tf

  for _ in range(max_retries):
    try:
      tf.io.gfile.copy(src, dst, overwrite=overwrite)
      return
    except tf.errors.NotFoundError:
      if not skip_nonexist:
        raise


def CopyRecursively(
  src: str, dst: str, max_workers: int = 1, skip_nonexist: bool = True, max_retries: int = 5
) -> None:
  """Copies a file or a folder tree; an existing `dst` is replaced.

  Args:
    src: file or folder.
    dst: its new path.
    max_workers: copy this many files at a time.
    skip_nonexist: an absent `src`, or a file that vanishes while copying, is not an error.
    max_retries: tries for each file.

  Raises:
    ValueError: `src` does not exist and `skip_nonexist` is false.
    tf.errors.OpError: the first failure of a copy.
  """
  import tensorflow as tf

  if not tf.io.gfile.exists(src):
    if skip_nonexist:
      return
    raise ValueError(f"{src} doesn't exist!")
  if not tf.io.gfile.isdir(src):
    CopyFile(src, dst, skip_nonexist=skip_nonexist, max_retries=max_retries)
    return
  if tf.io.gfile.exists(dst):
    tf.io.gfile.rmtree(dst)
  files = []
  for folder, _, names in tf.io.gfile.walk(src):
    target = os.path.normpath(os.path.join(dst, os.path.relpath(folder, src)))
    tf.io.gfile.makedirs(target)
    files += [(os.path.join(folder, name), os.path.join(target, name)) for name in names]

  def copy(pair: tuple[str, str]) -> None:
    CopyFile(*pair, skip_nonexist=skip_nonexist, max_retries=max_retries)

  with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, max_workers)) as pool:
    for _ in pool.map(copy, files):
      pass
