"""Sessions that look at what a step fetches once, instead of in every step.

`Session.run` makes a flat list of its fetches anew in every run. For those of a dozen hooks that
takes Python a third of a millisecond: as long as the ops of a small step, and time in which many
cores wait.

A session over several processes is also asked for what is joined, not for the op that joins it: an
op of one process that waits for one of another costs a message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import tensorflow as tf

# Hooks of a training run ask for a few combinations, but some make new ops again and again.
_MAX_REMEMBERED = 32


class RememberFetchesHook(tf.compat.v1.train.SessionRunHook):
  """Lets `run` of a monitored session's raw session remember fetches. Results are the same."""

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    # TensorFlow makes the session itself; a class of ours cannot be handed in.
    session.run = _RememberingRun(session)


class _RememberingRun:
  """`Session.run` of one session, without feeds and options fast."""

  def __init__(self, session: tf.compat.v1.Session):
    self._session = session
    self._run = session.run
    # The fetches are kept, so that no other object gets the id of one.
    self._callables: dict[Hashable, tuple[Any, Callable[[], Any]]] = {}

  def __call__(
    self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
  ) -> Any:
    # Monitored sessions always hand options and metadata in; the latter are filled as options say.
    is_plain = (
      not feed_dict and not _is_set(options) and (run_metadata is None or options is not None)
    )
    if not is_plain or self._session._closed:
      return self._run(fetches, feed_dict, options, run_metadata)
    key = _key(fetches)
    remembered = self._callables.get(key)
    if remembered is None:
      if _is_empty(fetches):  # a callable must have something to do
        return self._run(fetches)
      if len(self._callables) >= _MAX_REMEMBERED:
        self._callables.clear()
      remembered = (fetches, self._make_callable(fetches))
      self._callables[key] = remembered
    # As `run` does it, so that errors name the op, and where it was made.
    return self._session._do_call(remembered[1])

  def _make_callable(self, fetches: Any) -> Callable[[], Any]:
    if not self._session._target:  # All is in this process.
      return self._session.make_callable(fetches)
    more: list[tf.Operation] = []
    run = self._session.make_callable([_without_joins(fetches, more), more])
    return lambda: run()[0]


def _without_joins(fetches: Any, more: list[tf.Operation]) -> Any:
  """Returns fetches of the same structure, in which an op that joins others is one of these.

  Args:
    fetches: what a session may run.
    more: the others are added to it.
  """
  if type(fetches) in (list, tuple):
    return type(fetches)(_without_joins(fetch, more) for fetch in fetches)
  if type(fetches) is dict:
    return {key: _without_joins(fetch, more) for key, fetch in fetches.items()}
  if not isinstance(fetches, tf.Operation):
    return fetches
  joined = _joined_ops(fetches)
  if not joined:
    return fetches
  more += joined[1:]
  return joined[0]


def _joined_ops(op: tf.Operation) -> list[tf.Operation]:
  """Returns what an op waits for that does nothing else, directly or through more such ops."""
  joined: dict[tf.Operation, None] = {}
  pending, seen = [op], {op}
  while pending:
    op = pending.pop()
    if op.type != "NoOp":
      joined[op] = None
      continue
    new = [other for other in op.control_inputs if other not in seen]
    seen.update(new)
    pending += new
  return list(joined)


def _is_set(options: Any) -> bool:
  return options is not None and options.ByteSize() > 0


def _is_empty(fetches: Any) -> bool:
  """Tells whether there is nothing to run in a structure of fetches."""
  if isinstance(fetches, Mapping):
    fetches = list(fetches.values())
  return isinstance(fetches, (list, tuple)) and all(map(_is_empty, fetches))


def _key(fetches: Any) -> Hashable:
  """Returns what is equal for fetches of the same objects in the same structure."""
  if isinstance(fetches, str):
    return fetches
  if isinstance(fetches, (list, tuple)):
    return (type(fetches), *map(_key, fetches))
  if isinstance(fetches, Mapping):
    return (
      type(fetches),
      *((k if isinstance(k, str) else id(k), _key(v)) for k, v in fetches.items()),
    )
  return id(fetches)
