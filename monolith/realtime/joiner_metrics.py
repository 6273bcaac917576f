"""Serves the metrics of a joiner to Prometheus, on loopback."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import prometheus_client
from prometheus_client import core

from monolith.realtime.join_window import Counters

_MEANINGS = {
  "impressions": "Impressions that were read.",
  "actions": "Actions that were read.",
  "joined": "Samples with an action.",
  "negatives": "Samples without one.",
  "sampled_out": "Impressions without an action that were left out by sampling.",
  "late": "Actions that came after the window of their impression.",
  "unmatched": "Actions whose impression did not come in time, or was closed.",
  "forgotten": "Impressions that memory could not keep until their window's end: repeated, they "
  "make a second sample.",
  "repeated": "Further actions of an impression, and impressions that came twice.",
  "known": "Impressions that were read again and whose sample existed.",
  "spilled_bytes": "Bytes of open impressions that went to files.",
}


class Measured(Protocol):
  """Collects the metrics of a joiner, from any thread."""

  poisoned: int

  def counters(self) -> Counters:
    """Returns the counters."""

  def num_open(self) -> int:
    """Returns the number of impressions that wait."""

  def lag(self) -> dict[tuple[str, int], int]:
    """Returns the number of messages that were not read, by topic and partition."""


class _JoinerCollector:
  def __init__(self, joiner: Measured):
    self._joiner = joiner

  def collect(self) -> Iterator[core.Metric]:
    counters = dataclasses.asdict(self._joiner.counters())
    counters["poisoned"] = self._joiner.poisoned
    for name, value in counters.items():
      meaning = _MEANINGS.get(name, "Messages that were skipped.")
      yield core.CounterMetricFamily(f"monolith_joiner_{name}", meaning, value)
    yield core.GaugeMetricFamily(
      "monolith_joiner_open_impressions", "Impressions that wait.", self._joiner.num_open()
    )
    lag = core.GaugeMetricFamily(
      "monolith_joiner_lag_messages", "Messages not read yet.", labels=["topic", "partition"]
    )
    for (topic, partition), count in self._joiner.lag().items():
      lag.add_metric([topic, str(partition)], count)
    yield lag


def serve_metrics(joiner: Measured, port: int) -> int:
  """Starts to answer Prometheus on loopback, and returns the port.

  Args:
    joiner: the joiner to report on.
    port: the port to listen on; 0 for any free one.

  Raises:
    OSError: the port is taken.
  """
  registry = prometheus_client.CollectorRegistry()
  registry.register(_JoinerCollector(joiner))
  prometheus_client.ProcessCollector(registry=registry)
  answer = prometheus_client.start_http_server(port, addr="127.0.0.1", registry=registry)
  return answer[0].server_port
