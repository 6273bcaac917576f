"""Keeps TensorFlow's noise off the screen; `MONOLITH_VERBOSE=1` lets everything through.

Estimator and the graph API log dozens of lines about their deprecation and dozens more about their
progress. On x86-64 the import of TensorFlow reports errors on every machine, which mean nothing.
Other errors and warnings are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator

from monolith.native_training import env_utils

_ENV = "MONOLITH_VERBOSE"
_LEVEL_ENV = "TF_CPP_MIN_LOG_LEVEL"
# The last two are about Python objects that hooks keep in a graph, which no file needs.
_PHRASES = (
  "deprecated",
  "It seems that global step",
  "Cannot identify data type for collection",
  "encountered when serializing",
)
# The wheel for x86-64 registers its GPU libraries twice, and looks for one that it does not need.
# Newer versions write what they log during the import whatever the level is, under a line that
# says so, and information looks like "I0000 00:00:1795052606.090660   21608 port.cc:153] ...".
_IMPORT_PHRASES = (
  b"Unable to register cuDNN factory",
  b"Unable to register cuFFT factory",
  b"Unable to register cuBLAS factory",
  b"TF-TRT Warning: Could not find TensorRT",
  b"All log messages before absl::InitializeLog() is called are written to STDERR",
)
_IMPORT_INFORMATION = re.compile(rb"I\d{4} \d\d:\d\d:\d+\.\d+ ")


class _Filter(logging.Filter):
  """Drops what is said about deprecation, and about reads that pass a step by."""

  def filter(self, record: logging.LogRecord) -> bool:
    text = str(record.msg)
    return not any(phrase in text for phrase in _PHRASES)


_FILTER = _Filter()


def is_verbose() -> bool:
  """Returns whether the user asked to see everything."""
  return env_utils.get_bool(_ENV)


def before_tensorflow() -> None:
  """Silences messages of TensorFlow's C++ below warnings; has an effect before its import only."""
  if not is_verbose() and "tensorflow" not in sys.modules:
    os.environ.setdefault(_LEVEL_ENV, "1")


@contextlib.contextmanager
def import_of_tensorflow() -> Iterator[None]:
  """Leaves out the lines that TensorFlow writes to stderr at every import; keeps all others.

  C++ libraries write past Python while they are loaded, so the file descriptor is redirected.
  `MONOLITH_VERBOSE=1` and `TF_CPP_MIN_LOG_LEVEL=0` turn this off.
  """
  if is_verbose() or os.environ.get(_LEVEL_ENV) == "0" or not _is_noisy_machine():
    yield
    return
  if sys.stderr is not None:
    sys.stderr.flush()
  try:
    screen = os.dup(2)
  except OSError:  # closed: nobody reads it
    yield
    return
  kept = os.memfd_create("stderr")
  os.dup2(kept, 2)
  try:
    yield
  finally:
    os.dup2(screen, 2)
    with open(screen, "wb") as stderr, open(kept, "rb") as lines:
      lines.seek(0)
      stderr.writelines(line for line in lines if not _is_noise(line))


def _is_noise(line: bytes) -> bool:
  if _IMPORT_INFORMATION.match(line):
    return True
  return any(phrase in line for phrase in _IMPORT_PHRASES)


def _is_noisy_machine() -> bool:
  """Returns whether the import is noisy, and will not abort with a reason that must be seen."""
  if platform.machine() != "x86_64":
    return False
  try:
    with open("/proc/cpuinfo") as cpus:
      return any(line.startswith("flags") and " avx " in line for line in cpus)
  except OSError:
    return False


def filter_tensorflow() -> None:
  """Leaves out deprecations and progress reports of TensorFlow's Python code.

  Calls after the first do nothing. A level that the program chose for TensorFlow's logger is kept.
  """
  if is_verbose():
    return
  import tensorflow as tf

  logger = tf.get_logger()
  if _FILTER in logger.filters:
    return
  logger.addFilter(_FILTER)
  if logger.level in (logging.NOTSET, logging.INFO):
    logger.setLevel(logging.WARNING)
  if logger.handlers:
    # The root logger has a handler as well, which would repeat everything.
    logger.propagate = False
