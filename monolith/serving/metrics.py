"""What a server counts, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client import core

from monolith.serving.model_manager import ModelManager

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_BUCKETS = (
  *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, float("inf")),
)


class Metrics:
  """The metrics of one server.

  Args:
    manager: its models; names that clients make up are not counted by name.
  """

  def __init__(self, manager: ModelManager):
    self._manager = manager
    self._registry = prometheus_client.CollectorRegistry()
    self._requests = prometheus_client.Counter(
      "monolith_serving_requests_total",
      "Requests that were answered, by the code of the answer.",
      ["model", "method", "code"],
      registry=self._registry,
    )
    self._seconds = prometheus_client.Histogram(
      "monolith_serving_request_seconds",
      "Time from a request's arrival to its answer.",
      ["model", "method"],
      buckets=_BUCKETS,
      registry=self._registry,
    )
    self._registry.register(_ModelStates(manager))
    self._registry.register(_FollowerStates(manager))
    prometheus_client.ProcessCollector(registry=self._registry)

  def observe(self, model: str, method: str, code: str, seconds: float) -> None:
    """Counts a request.

    Args:
      model: the model that the client named.
      method: which call.
      code: gRPC's name of the answer's code.
      seconds: how long it took.
    """
    model = model if self._manager.knows(model) else ""
    self._requests.labels(model, method, code).inc()
    self._seconds.labels(model, method).observe(seconds)

  def text(self) -> bytes:
    """Returns all metrics as Prometheus reads them."""
    return prometheus_client.generate_latest(self._registry)


class _ModelStates:
  """A collector of the states of versions: read when asked for, so that none is left behind."""

  def __init__(self, manager: ModelManager):
    self._manager = manager

  def collect(self) -> Iterator[core.Metric]:
    states = core.GaugeMetricFamily(
      "monolith_serving_model_state",
      "1 for the state in which a version is.",
      labels=["model", "version", "state"],
    )
    for model, version, state in self._manager.states():
      states.add_metric([model, str(version), state], 1)
    yield states


class _FollowerStates:
  """A collector of how new models are, which tells what their followers say."""

  def __init__(self, manager: ModelManager):
    self._manager = manager

  def collect(self) -> Iterator[core.Metric]:
    families: dict[str, core.GaugeMetricFamily | core.CounterMetricFamily] = {}
    for model, follower in self._manager.followers():
      for sample in follower.samples():
        if sample.name not in families:
          kind = core.CounterMetricFamily if sample.is_counter else core.GaugeMetricFamily
          families[sample.name] = kind(sample.name, sample.meaning, labels=["model", "shard"])
        families[sample.name].add_metric([model, str(sample.shard)], sample.value)
    yield from families.values()
