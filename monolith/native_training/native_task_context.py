"""Says where in a cluster the code that builds a graph runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class NativeTaskContext(NamedTuple):
  """The role of this process.

  Attributes:
    num_ps: number of parameter servers; 0 when tables live in the worker.
    ps_index: this server's index, 0 on a worker.
    num_workers: number of workers, the chief included.
    worker_index: this worker's index, 0 on a server.
    model_name: the model's name in serving.
    sync_backend: `agent_service.backends.SyncBackend`, or `None`.
    server_type: `"ps"`, `"worker"`, or `""` outside of training.
  """

  num_ps: int
  ps_index: int
  num_workers: int
  worker_index: int
  model_name: str
  sync_backend: Any
  server_type: str


_DEFAULT = NativeTaskContext(
  num_ps=0,
  ps_index=0,
  num_workers=1,
  worker_index=0,
  model_name="",
  sync_backend=None,
  server_type="",
)
_current: NativeTaskContext | None = None


@contextlib.contextmanager
def with_ctx(ctx: NativeTaskContext) -> Iterator[None]:
  """Makes `ctx` the current context.

  On exit an outer context comes back; the outermost one stays, because what runs at exit of the
  process still wants to know its role.
  """
  global _current
  outer = _current
  _current = ctx
  try:
    yield
  finally:
    if outer is not None:
      _current = outer


def get() -> NativeTaskContext:
  """Returns the current context, or one that describes a single process outside of training."""
  return _DEFAULT if _current is None else _current
