"""Puts files of a checkpoint into an export, as second names where the file system allows it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence

import tensorflow as tf
from absl import logging


def can_link(source: str, target: str) -> bool:
  """Whether files of a folder can have second names below another, which is made if missing."""
  if "://" in source or "://" in target:
    return False
  os.makedirs(target, exist_ok=True)
  probe = os.path.join(target, f".link-{os.getpid()}-{threading.get_ident()}")
  try:
    # A file of its own, since the right to link another's depends on more than the file system.
    with tempfile.NamedTemporaryFile(dir=source) as file:
      os.link(file.name, probe)
    os.remove(probe)
  except OSError:
    return False
  return True


def put_files(files: Sequence[str], linked: set[str], folder: str) -> None:
  """Puts files into a folder.

  Args:
    files: their paths.
    linked: those that need no copy; they are copied nevertheless if that is all that works.
    folder: where to; made if there are files.
  """
  if files:
    tf.io.gfile.makedirs(folder)
  for file in files:
    target = os.path.join(folder, os.path.basename(file))
    if file in linked:
      try:
        os.link(file, target)
        continue
      except OSError as error:  # A copy is as good, and costs only space.
        logging.warning("Cannot link %s: %s", file, error)
    tf.io.gfile.copy(file, target, overwrite=True)
