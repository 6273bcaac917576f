"""A Kafka producer that never blocks training: messages wait in a bounded queue for its thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from absl import logging

from monolith import _install

_MAX_PENDING = 100000
_CLOSE_TIMEOUT_SECS = 1
_POLL_SECS = 0.1


class KProducer:
  """Sends messages to one topic from a thread of its own.

  Args:
    brokers: `host:port` addresses, comma-separated.
    topic: where messages go.

  Raises:
    ImportError: `confluent_kafka` is not installed.
  """

  def __init__(self, brokers: str, topic: str):
    with _install.naming_extra("kafka"):
      import confluent_kafka

    self._topic = topic
    self._producer = confluent_kafka.Producer({"bootstrap.servers": brokers})
    self._queue: queue.Queue[bytes] = queue.Queue(_MAX_PENDING)
    self._lock = threading.Lock()
    self._total = self._success = self._failed = 0
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._run, name="kafka_producer", daemon=True)
    self._thread.start()

  def send(self, msgs: str | bytes | Iterable[str | bytes | None] | None) -> None:
    """Queues one message or several; `None` and empty ones are dropped."""
    if msgs is None:
      return
    for msg in [msgs] if isinstance(msgs, (str, bytes)) else msgs:
      if not msg:
        continue
      with self._lock:
        self._total += 1
      try:
        self._queue.put_nowait(msg.encode() if isinstance(msg, str) else bytes(msg))
      except queue.Full:
        self._count_failure()
        logging.log_every_n_seconds(logging.WARNING, "Kafka is too slow: messages are lost.", 60)

  def total(self) -> int:
    """Messages that were given to `send`."""
    return self._total

  def success(self) -> int:
    """Messages that a broker has confirmed."""
    return self._success

  def failed(self) -> int:
    """Messages that were lost."""
    return self._failed

  def close(self) -> None:
    """Sends what is queued, and waits a second for confirmations."""
    self._stopped.set()
    self._thread.join()
    remaining = self._producer.flush(_CLOSE_TIMEOUT_SECS)
    if remaining:
      logging.warning("%d messages were not confirmed by Kafka.", remaining)

  def _run(self) -> None:
    while not (self._stopped.is_set() and self._queue.empty()):
      try:
        msg = self._queue.get(timeout=_POLL_SECS)
      except queue.Empty:
        self._producer.poll(0)
        continue
      if not self._produce(msg):
        # The client's own queue is full; it empties while it is polled.
        self._producer.poll(_CLOSE_TIMEOUT_SECS)
        if not self._produce(msg):
          self._count_failure()
      self._producer.poll(0)

  def _produce(self, msg: bytes) -> bool:
    """Gives a message to the client; returns False if there is no room for it now."""
    try:
      self._producer.produce(self._topic, msg, on_delivery=self._on_delivery)
    except BufferError:
      return False
    except Exception as error:  # One that cannot be sent, say too large, is no reason to stop.
      self._count_failure()
      logging.log_every_n_seconds(logging.WARNING, "Kafka refuses messages: %s", 60, error)
    return True

  def _on_delivery(self, error: object, unused_msg: object) -> None:
    if error is None:
      with self._lock:
        self._success += 1
    else:
      self._count_failure()

  def _count_failure(self) -> None:
    with self._lock:
      self._failed += 1
