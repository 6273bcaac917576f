"""Makes Kafka clients, all of librdkafka, that work with brokers from 0.9 on.

librdkafka asks a broker what it can do, and a broker before 0.10 does not know the question: the
client hangs, and requests of other clients that arrive in the same moment get no answer. No client
can find that out, so the version of brokers before 0.11 has to be named in
`MONOLITH_KAFKA_VERSIONS`, a comma-joined list of `host:port=version`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from monolith.row_log.kafka_lib import AdminClient, KafkaException, confluent_kafka

# Kafka's default limit of a message is 1,000,012 bytes with its header.
MAX_MESSAGE_BYTES = 900_000
_VERSIONS = "MONOLITH_KAFKA_VERSIONS"
_SHORTEST_SECS = 0.1
_OLD_BROKER = {
  "api.version.request": False,
  "broker.version.fallback": "0.9.0.1",
  # A request that gets no answer costs this much instead of a minute.
  "socket.timeout.ms": 10_000,
  # Every client warns that a later librdkafka will not know such brokers.
  "log_level": 3,
  # Brokers of that age refuse longer sessions.
  "session.timeout.ms": 30_000,
}

_answering: set[str] = set()
_LOG_SECS = 10.0


class _Seldom(logging.Filter):
  """Passes one line of each kind every few seconds: there is no end of them while a broker is away.

  The kind is librdkafka's facility, the first argument.
  """

  def __init__(self) -> None:
    super().__init__()
    self._last: dict[str, float] = {}

  def filter(self, record: logging.LogRecord) -> bool:
    kind = str(record.args[0]) if isinstance(record.args, tuple) and record.args else record.msg
    now = time.monotonic()
    if now - self._last.get(kind, -_LOG_SECS) < _LOG_SECS:
      return False
    self._last[kind] = now
    return True


# The logger of librdkafka's messages, for clients of this process.
LOGGER = logging.getLogger("monolith.kafka")
LOGGER.addFilter(_Seldom())


@dataclasses.dataclass(frozen=True)
class Features:
  """The features of the brokers of a cluster.

  Attributes:
    version: the oldest version named for one of them; empty for 0.11 and newer ones, which need
      not be named.
  """

  version: tuple[int, ...] = ()

  @property
  def is_old(self) -> bool:
    """Whether the broker is older than 0.10, and librdkafka must be told so."""
    return bool(self.version) and self.version < (0, 10)

  @property
  def can_create_topics(self) -> bool:
    """Whether topics can be created by request (0.10.1)."""
    return not self.version or self.version >= (0, 10, 1)

  @property
  def has_transactions(self) -> bool:
    """Whether messages and offsets can be written as one (0.11)."""
    return not self.version or self.version >= (0, 11)


def probe(servers: str, timeout_secs: float = 30) -> Features:
  """Returns the features of brokers. Those without a named version must answer, once per process.

  Args:
    servers: comma-separated `host:port` of brokers.
    timeout_secs: how long to wait for one of them.

  Raises:
    ConnectionError: none answered in time.
    ValueError: an address is not `host:port`, or a named version is malformed.
  """
  addresses = [server.strip() for server in servers.split(",") if server.strip()]
  if not addresses:
    raise ValueError("servers is empty, want host:port of at least one broker")
  for address in addresses:
    _check_address(address)
  named = _named_versions()
  versions = [named[address] for address in addresses if address in named]
  if versions:
    return Features(min(versions))
  if servers not in _answering:
    client = AdminClient({"bootstrap.servers": servers}, logger=LOGGER)
    try:
      client.list_topics(timeout=max(timeout_secs, _SHORTEST_SECS))
    except KafkaException as error:
      raise ConnectionError(
        f"no Kafka broker answers at {servers}: {error.args[0].str()}; one before 0.11 has to be "
        f"named: {_VERSIONS}={addresses[0]}=0.9.0.1"
      ) from error
    _answering.add(servers)
  return Features()


def remember_version(server: str, version: str) -> None:
  """Records the version of a broker, for this process and those that it starts.

  Args:
    server: its `host:port`.
    version: such as `0.9.0.1`.
  """
  entries = [e for e in os.environ.get(_VERSIONS, "").split(",") if e]
  kept = [entry for entry in entries if not entry.startswith(f"{server}=")]
  os.environ[_VERSIONS] = ",".join([*kept, f"{server}={version}"])


def _named_versions() -> dict[str, tuple[int, ...]]:
  """Returns the versions that the environment names, by `host:port`."""
  found = {}
  entries = (entry.strip() for entry in os.environ.get(_VERSIONS, "").split(","))
  for entry in filter(None, entries):
    server, _, version = entry.rpartition("=")
    if not server or not re.fullmatch(r"\d+(\.\d+)+", version):
      raise ValueError(f"{_VERSIONS} has {entry!r}, want host:port=version such as 0.9.0.1")
    found[server] = tuple(int(number) for number in version.split("."))
  return found


def client_settings(
  servers: str, extra: Mapping[str, Any] | None = None, timeout_secs: float = 30
) -> dict[str, Any]:
  """Returns settings of librdkafka that every client of these brokers needs.

  Args:
    servers: comma-separated `host:port` of brokers.
    extra: settings that win over ours. With `security.protocol` among them the brokers need not
      answer first.
    timeout_secs: how long to wait for a broker.

  Raises:
    ConnectionError: no broker answered in time.
  """
  extra = dict(extra or {})
  settings: dict[str, Any] = {"bootstrap.servers": servers}
  if "security.protocol" not in extra and probe(servers, timeout_secs).is_old:
    settings.update(_OLD_BROKER)
  # A broker that was away is found again within a second instead of ten.
  settings.update({"reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 1000})
  settings["log.connection.close"] = False
  return {**settings, **extra}


def make_producer(servers: str, extra: Mapping[str, Any] | None = None) -> confluent_kafka.Producer:
  """Returns a producer that keeps trying while brokers are away, and keeps order.

  Args:
    servers: comma-separated `host:port` of brokers.
    extra: settings that win over ours.

  Raises:
    ConnectionError: no broker answered in time.
  """
  ours = {
    "acks": "all",
    "linger.ms": 5,
    # One at a time: a repeated request cannot overtake the next one.
    "max.in.flight.requests.per.connection": 1,
    "message.send.max.retries": 10_000_000,
    "retry.backoff.ms": 100,
    # 0: a message waits for its broker until the process ends.
    "message.timeout.ms": 0,
    "message.max.bytes": 1_000_000,
  }
  settings = client_settings(servers, {**ours, **(extra or {})})
  settings.pop("session.timeout.ms", None)
  return confluent_kafka.Producer(settings, logger=LOGGER)


def make_consumer(
  servers: str, group: str, extra: Mapping[str, Any] | None = None
) -> confluent_kafka.Consumer:
  """Returns a consumer that commits nothing by itself and starts at the oldest message.

  Args:
    servers: comma-separated `host:port` of brokers.
    group: its consumer group.
    extra: settings that win over ours.

  Raises:
    ConnectionError: no broker answered in time.
  """
  ours = {
    "group.id": group,
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "fetch.wait.max.ms": 50,
    "fetch.error.backoff.ms": 50,
  }
  settings = client_settings(servers, {**ours, **(extra or {})})
  return confluent_kafka.Consumer(settings, logger=LOGGER)


def _check_address(server: str) -> None:
  host, _, port = server.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(f"Kafka broker {server!r}: want host:port")


def place_of(message: confluent_kafka.Message) -> tuple[int, int]:
  """Returns the partition and the offset of a message; -1 where an error has none."""
  partition, offset = message.partition(), message.offset()
  return -1 if partition is None else partition, -1 if offset is None else offset
