"""Lets hooks work while a stream gives no data, and so no step runs.

Hooks work before and after steps. A stream that falls silent would let checkpoints, barriers and
progress wait for its next message, maybe forever. A hook that has to act in time registers here
when it begins, and code that waits for data calls all of them about every second.
"""

from __future__ import annotations

from typing import Callable

import tensorflow as tf

from monolith.native_training import graph_meta

# Called with the session; returns whether training is to stop.
IdleCallback = Callable[[tf.compat.v1.Session], bool]


def _get_callbacks() -> list[IdleCallback]:
  return graph_meta.get_meta("idle_callbacks", list)


def register(callback: IdleCallback, first: bool = False) -> None:
  """Lets a function be called about every second while no data comes in the default graph.

  Args:
    callback: called in the thread of the training loop, between two steps.
    first: call it before those that are registered.
  """
  callbacks = _get_callbacks()
  callbacks.insert(0 if first else len(callbacks), callback)


def run(session: tf.compat.v1.Session) -> bool:
  """Calls all functions of a session's graph; returns whether one of them wants training to stop.

  Raises:
    Exception: whatever a function raised.
  """
  with session.graph.as_default():
    # All of them, also when the first wants to stop.
    return any([callback(session) for callback in list(_get_callbacks())])
