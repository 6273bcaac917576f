"""The metric client. By default every metric goes nowhere.

With `MONOLITH_METRIC_SINK=logging` in the environment metrics are logged; `set_sink` sends them to
a function of the deployment.
"""

import os
from typing import Any, Callable, Optional

from absl import logging

# Called as sink(method, name, value, tagkv); name starts with the client's prefix.
Sink = Callable[[str, str, Any, Optional[dict]], None]

_sink: Optional[Sink] = None


def set_sink(sink: Optional[Sink]) -> None:
  """Sends all metrics of this process to `sink`; None ends that."""
  global _sink
  _sink = sink


class Client:
  """Emits metrics under a prefix; every method accepts anything and returns None."""

  def __init__(self, prefix: str = "", *unused_args, **unused_kwargs):
    self._prefix = prefix

  def emit_counter(self, *args, **kwargs) -> None:
    self._emit("counter", *args, **kwargs)

  def emit_timer(self, *args, **kwargs) -> None:
    self._emit("timer", *args, **kwargs)

  def emit_store(self, *args, **kwargs) -> None:
    self._emit("store", *args, **kwargs)

  def __getattr__(self, name: str) -> Callable[..., None]:
    if name.startswith("_"):
      raise AttributeError(name)
    return _ignore

  def _emit(
    self,
    method: str,
    name: Any = "",
    value: Any = None,
    tagkv: Optional[dict] = None,
    *unused_args,
    **unused_kwargs,
  ) -> None:
    sink = _sink or (_log if os.environ.get("MONOLITH_METRIC_SINK") == "logging" else None)
    if sink is None:
      return
    try:
      sink(method, f"{self._prefix}.{name}" if self._prefix else str(name), value, tagkv)
    except Exception:  # Metrics must never stop training.
      logging.exception("the metric sink failed for %s", name)


def get_cli(*args, **kwargs) -> Client:
  """Returns a client; the first argument is the prefix of its metric names."""
  return Client(*args, **kwargs)


def _log(method: str, name: str, value: Any, tagkv: Optional[dict]) -> None:
  logging.info("metric %s %s = %s %s", method, name, value, tagkv or "")


def _ignore(*unused_args, **unused_kwargs) -> None:
  pass
