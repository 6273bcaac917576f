"""A Kafka broker on loopback: the one in librdkafka, which speaks the real protocol."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import confluent_kafka

# Generous: nothing waits this long unless it hangs.
TIMEOUT_SECS = 120
_ERROR_TEXT_BYTES = 512
_PRODUCER = 0


def _library() -> ctypes.CDLL:
  """Returns the library that `confluent_kafka` has loaded."""
  with open("/proc/self/maps", encoding="utf-8") as maps:
    path = next(line.split()[-1] for line in maps if "librdkafka" in line)
  library = ctypes.CDLL(path)
  pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
  for name, result, arguments in (
    ("rd_kafka_conf_new", pointer, []),
    ("rd_kafka_new", pointer, [integer, pointer, text, ctypes.c_size_t]),
    ("rd_kafka_destroy", None, [pointer]),
    ("rd_kafka_mock_cluster_new", pointer, [pointer, integer]),
    ("rd_kafka_mock_cluster_destroy", None, [pointer]),
    ("rd_kafka_mock_cluster_bootstraps", text, [pointer]),
    ("rd_kafka_mock_topic_create", integer, [pointer, text, integer, integer]),
    ("rd_kafka_mock_broker_set_down", integer, [pointer, ctypes.c_int32]),
    ("rd_kafka_mock_broker_set_up", integer, [pointer, ctypes.c_int32]),
    ("rd_kafka_mock_group_initial_rebalance_delay_ms", None, [pointer, ctypes.c_int32]),
  ):
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
  return library


class MockKafka:
  """Runs one broker as a context manager; clients connect to `servers`."""

  def __init__(self):
    self._library = _library()
    text = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
    configuration = self._library.rd_kafka_conf_new()
    self._handle = self._library.rd_kafka_new(_PRODUCER, configuration, text, len(text))
    if not self._handle:
      raise RuntimeError(text.value.decode())
    self._cluster = self._library.rd_kafka_mock_cluster_new(self._handle, 1)
    # A real broker waits three seconds for more members of a new group.
    self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 100)
    self.servers = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
    self._producer = confluent_kafka.Producer({"bootstrap.servers": self.servers})

  def __enter__(self) -> MockKafka:
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    if self._cluster is None:
      return
    del self._producer
    self._library.rd_kafka_mock_cluster_destroy(self._cluster)
    self._library.rd_kafka_destroy(self._handle)
    self._cluster = None

  def create_topic(self, name: str, partitions: int = 1) -> str:
    error = self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
    assert not error, confluent_kafka.KafkaError(error)
    return name

  def send(
    self,
    topic: str,
    messages: Sequence[bytes | None],
    keys: Sequence[bytes] | None = None,
    partition: int = 0,
  ) -> None:
    """Appends messages to a partition, and waits until the broker has them."""
    failed = []
    for i, message in enumerate(messages):
      self._producer.produce(
        topic,
        message,
        key=keys[i] if keys else None,
        partition=partition,
        on_delivery=lambda error, _: failed.append(error) if error else None,
      )
    remaining = self._producer.flush(TIMEOUT_SECS)
    assert not remaining and not failed, (remaining, failed)

  def set_down(self, is_down: bool) -> None:
    """Lets the broker refuse connections, or accept them again."""
    name = "down" if is_down else "up"
    error = getattr(self._library, f"rd_kafka_mock_broker_set_{name}")(self._cluster, 1)
    assert not error, confluent_kafka.KafkaError(error)
