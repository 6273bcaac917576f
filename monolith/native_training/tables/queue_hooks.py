"""The hooks that fill and drain the queues of a group of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
  from typing_extensions import TypeAlias

QueueHook: TypeAlias = tf.compat.v1.train.SessionRunHook


class QueueHooks:
  """A group that keeps its queue hooks, and finds those of the groups inside it.

  Attributes:
    _table: a group inside this one, if any.
    _tables: more groups inside this one.
    _local_queue_hooks: this group's own hooks.
  """

  _table: Any = None
  _tables: Sequence[Any] = ()
  _local_queue_hooks: list[QueueHook]

  def add_queue_hook(self, hook: QueueHook) -> None:
    """Adds a hook that the session must run."""
    if not hasattr(self, "_local_queue_hooks"):
      self._local_queue_hooks = []
    self._local_queue_hooks.append(hook)

  def get_queue_hooks(self) -> list[QueueHook]:
    """Returns the hooks of this group and of what is inside it."""
    hooks = list(getattr(self, "_local_queue_hooks", []))
    nested = [] if self._table is None else [self._table]
    for table in [*nested, *self._tables]:
      if hasattr(table, "get_queue_hooks"):
        hooks += table.get_queue_hooks()
    return hooks
