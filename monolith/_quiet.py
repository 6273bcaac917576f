"""Keeps TensorFlow's noise off the screen; `MONOLITH_VERBOSE=1` lets everything through.

Estimator and the graph API say with dozens of lines that they are deprecated, and with dozens more
what they are doing. Errors and other warnings stay.
"""

from __future__ import annotations

import logging
import os
import sys

from monolith.native_training import env_utils

_ENV = "MONOLITH_VERBOSE"
_PHRASES = ("deprecated", "It seems that global step")


class _Filter(logging.Filter):
  """Drops what is said about deprecation, and about reads that pass a step by."""

  def filter(self, record: logging.LogRecord) -> bool:
    text = str(record.msg)
    return not any(phrase in text for phrase in _PHRASES)


_FILTER = _Filter()


def is_verbose() -> bool:
  """Returns whether the user wants to see everything."""
  return env_utils.get_bool(_ENV)


def before_tensorflow() -> None:
  """Silences messages of TensorFlow's C++ below warnings; has an effect before its import only."""
  if not is_verbose() and "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def filter_tensorflow() -> None:
  """Leaves out deprecations and progress reports of TensorFlow's Python; once is enough.

  A program that has chosen a level for TensorFlow's logger keeps it.
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
    # The root logger has a handler as well, and would say everything again.
    logger.propagate = False
