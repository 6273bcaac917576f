"""Makes Kafka clients that work with brokers from 0.9 on.

librdkafka asks a broker for its version and hangs where the broker is too old to know the question.
So we ask first, on a socket of our own, and tell librdkafka what to assume. The question is not
harmless to a broker before 0.10: requests of other clients that arrive in the same moment get no
answer, and are only repeated when their time is up. `MONOLITH_KAFKA_VERSIONS`, a comma-joined list
of `host:port=version`, says what need not be asked.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from monolith.row_log.kafka_lib import confluent_kafka

# Kafka's default limit of a message is 1,000,012 bytes with its header.
MAX_MESSAGE_BYTES = 900_000
_API_VERSIONS, _METADATA, _CREATE_TOPICS, _INIT_PRODUCER_ID = 18, 3, 19, 22
_ANSWER_SECS = 2.0
_RETRY_SECS = 0.2
_OLD_BROKER = {
  "api.version.request": False,
  "broker.version.fallback": "0.9.0.1",
  # One of those requests that get no answer costs so much, instead of a minute.
  "socket.timeout.ms": 10_000,
  # Every client warns that a later librdkafka will not know such brokers.
  "log_level": 3,
  # Brokers of that age refuse longer sessions.
  "session.timeout.ms": 30_000,
}

_known: dict[str, Features] = {}
_LOG_SECS = 10.0


class _Seldom(logging.Filter):
  """Lets a line of each kind pass every few seconds: they come without end while a broker is away.

  The kind is librdkafka's facility, its first argument.
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
  """Holds the abilities of the brokers of a cluster.

  Attributes:
    api_keys: numbers of the requests that the broker knows; empty for brokers before 0.10, which
      cannot say.
  """

  api_keys: frozenset[int]

  @property
  def is_old(self) -> bool:
    """Whether the broker is older than 0.10, and librdkafka must be told so."""
    return not self.api_keys

  @property
  def can_create_topics(self) -> bool:
    """Whether topics can be created by request (0.10.1)."""
    return _CREATE_TOPICS in self.api_keys

  @property
  def has_transactions(self) -> bool:
    """Whether messages and offsets can be written as one (0.11)."""
    return _INIT_PRODUCER_ID in self.api_keys


def probe(servers: str, timeout_secs: float = 30) -> Features:
  """Returns what brokers can do, asked once per process and list of brokers.

  Args:
    servers: comma-separated `host:port` of brokers.
    timeout_secs: how long to try while none of them answers.

  Raises:
    ConnectionError: none answered in time.
    ValueError: an address is not `host:port`.
  """
  if servers in _known:
    return _known[servers]
  addresses = [_parse(server) for server in servers.split(",") if server.strip()]
  if not addresses:
    raise ValueError("servers is empty, want host:port of at least one broker")
  if any(_is_known_to_be_old(server.strip()) for server in servers.split(",")):
    return Features(frozenset())
  deadline = time.monotonic() + timeout_secs
  while True:
    for address in addresses:
      try:
        _known[servers] = _ask(address)
        return _known[servers]
      except OSError as error:
        reason = error
    if time.monotonic() > deadline:
      raise ConnectionError(f"no Kafka broker answers at {servers}: {reason}")
    time.sleep(_RETRY_SECS)


def remember_version(server: str, version: str) -> None:
  """Tells this process, and those that it starts, how old a broker is.

  Args:
    server: its `host:port`.
    version: such as `0.9.0.1`.
  """
  entries = [e for e in _versions().split(",") if e and not e.startswith(f"{server}=")]
  os.environ["MONOLITH_KAFKA_VERSIONS"] = ",".join([*entries, f"{server}={version}"])


def _versions() -> str:
  return os.environ.get("MONOLITH_KAFKA_VERSIONS", "")


def _is_known_to_be_old(server: str) -> bool:
  for entry in _versions().split(","):
    name, _, version = entry.strip().partition("=")
    if name == server:
      return version.startswith(("0.8", "0.9"))
  return False


def client_settings(
  servers: str, extra: Mapping[str, Any] | None = None, timeout_secs: float = 30
) -> dict[str, Any]:
  """Returns settings of librdkafka that every client of these brokers needs.

  Args:
    servers: comma-separated `host:port` of brokers.
    extra: settings that win over ours. With `security.protocol` among them the brokers are not
      asked for their age: they speak another protocol, and are taken for 0.10 or newer.
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
    # 0: a message waits for its broker as long as the process lives.
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


def _parse(server: str) -> tuple[str, int]:
  host, colon, port = server.strip().rpartition(":")
  if not colon or not host or not port.isdigit():
    raise ValueError(f"Kafka broker {server!r}: want host:port")
  return host.strip("[]"), int(port)


def place_of(message: confluent_kafka.Message) -> tuple[int, int]:
  """Returns the partition and the offset of a message; -1 where an error has none."""
  partition, offset = message.partition(), message.offset()
  return -1 if partition is None else partition, -1 if offset is None else offset


def _ask(address: tuple[str, int]) -> Features:
  """Asks one broker for the requests it knows.

  A broker before 0.10 closes the connection or says nothing; that it is a living broker shows when
  it answers a request for metadata.
  """
  try:
    answer = _request(address, _API_VERSIONS, b"")
  except (ConnectionRefusedError, socket.gaierror):
    raise
  except OSError:
    # Version 0 with an empty list asks for all topics, so we ask for one that cannot exist.
    _request(address, _METADATA, struct.pack(">ih1s", 1, 1, b"/"))
    return Features(frozenset())
  error, count = struct.unpack_from(">hi", answer)
  if error or count < 0 or len(answer) < 6 + 6 * count:
    raise ConnectionError(f"{address[0]}:{address[1]} answered a Kafka request with error {error}")
  return Features(frozenset(struct.unpack_from(">h", answer, 6 + 6 * i)[0] for i in range(count)))


def _request(address: tuple[str, int], key: int, body: bytes) -> bytes:
  """Returns the answer to a request of version 0, without its header."""
  request = struct.pack(">hhih8s", key, 0, 1, 8, b"monolith") + body
  with socket.create_connection(address, timeout=_ANSWER_SECS) as connection:
    connection.sendall(struct.pack(">i", len(request)) + request)
    (size,) = struct.unpack(">i", _receive(connection, 4))
    if not 10 <= size <= 100_000_000:
      raise ConnectionError(f"{address[0]}:{address[1]} is no Kafka broker: an answer of {size} B")
    return _receive(connection, size)[4:]


def _receive(connection: socket.socket, size: int) -> bytes:
  parts = bytearray()
  while len(parts) < size:
    part = connection.recv(size - len(parts))
    if not part:
      raise ConnectionResetError("connection closed before the answer")
    parts += part
  return bytes(parts)
