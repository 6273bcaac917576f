"""Reads messages of Kafka topics in batches. Needs `confluent_kafka`, but not TensorFlow.

Unlike the original: a stream timeout of -1 never ends, the time to join the consumer group does not
count as silence, and a stream that falls silent because no broker can be reached fails instead of
ending.
"""

from __future__ import annotations

import atexit
import functools
import logging as stdlib_logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import logging

from monolith.native_training.data import kafka_settings

# Longest uninterrupted wait, so that closing a reader takes no longer.
_SLICE_SECS = 0.1
# How long joining the consumer group may take before waiting for it counts as silence.
_JOIN_SECS = 60.0
_CLOSE_SECS = 10.0
# A stream that nobody asked for so long is idle.
_IDLE_SECS = 0.5
_MAX_CHECK_SECS = 10.0
_WARN_SECS = 60


class KafkaReadError(RuntimeError):
  """The brokers cannot be read, or do not let us."""


class Fetch(NamedTuple):
  """What one fetch got; the first three have one element per message."""

  messages: list[bytes]
  keys: list[bytes]
  origins: list[str]
  continue_fetch: bool


class KafkaReader:
  """One consumer of a group; it connects at the first fetch. Thread-safe.

  Args:
    topics: names.
    metadata: see `kafka_settings.make_metadata`.

  Raises:
    ValueError: there is no topic, or the metadata is malformed.
  """

  def __init__(self, topics: Sequence[str], metadata: Sequence[str]):
    self._topics = list(topics)
    if not self._topics:
      raise ValueError("topics is empty, want at least one topic")
    self._metadata = list(metadata)
    self._settings, self._batch_size = kafka_settings.parse_metadata(metadata)
    self._closed = threading.Event()
    self._lock = threading.Lock()  # guards all below
    self._consumer: Any = None
    self._opened_at = 0.0
    self._joined = False
    self._pending: list[Any] = []
    self._deadline: float | None = None  # when the current poll times out
    self._timeouts = 0  # since the last message
    self._at_end: set[tuple[str, int]] = set()
    # What the client complained about since it last heard from a broker, and whether that was the
    # connection.
    self._error: Any = None
    self._is_down = False
    self._connection_error = ""
    _readers.add(self)

  @property
  def closed(self) -> bool:
    return self._closed.is_set()

  def has_same_source(self, topics: Sequence[str], metadata: Sequence[str]) -> bool:
    return self._topics == list(topics) and self._metadata == list(metadata)

  def fetch(
    self, message_poll_timeout: int, stream_timeout: int, max_wait: float | None = None
  ) -> Fetch | None:
    """Collects messages until the batch is full, none came for a while, or all were read.

    Args:
      message_poll_timeout: milliseconds to wait for the next message.
      stream_timeout: see `kafka_settings.check_timeouts`. The result says not to go on once no
        message came for so long.
      max_wait: seconds after which to return `None`; the next call goes on collecting.

    Returns:
      The messages, maybe none; `None` after `max_wait`, or when the reader is closed.

    Raises:
      KafkaReadError: a broker refuses to be read.
      ImportError: `confluent_kafka` is not installed.
    """
    give_up = None if max_wait is None else time.monotonic() + max_wait
    while not self.closed:
      with self._lock:
        if self.closed:
          break
        if self._step(message_poll_timeout / 1000):
          return self._take(message_poll_timeout, stream_timeout)
      if give_up is not None and time.monotonic() >= give_up:
        break
    return None

  def check(self, timeout: int) -> None:
    """Fails when the silence has a reason.

    Args:
      timeout: milliseconds that a broker has to answer, at least a second and at most ten.

    Raises:
      KafkaReadError: there is one.
    """
    with self._lock:
      if self._consumer is None or self._error is None:
        return
      if self._is_down:
        # The client does not tell when a broker is back.
        try:
          self._consumer.list_topics(timeout=min(max(timeout / 1000, 1.0), _MAX_CHECK_SECS))
          return
        except _client().KafkaException:
          pass
      raise self._read_error(self._error)

  def close(self) -> None:
    """Leaves the group; a fetch in progress ends soon. May be called again."""
    self._closed.set()
    with self._lock:
      consumer, self._consumer = self._consumer, None
    if consumer is None:
      return
    # The client waits for brokers that are gone: the interpreter must not.
    thread = threading.Thread(target=consumer.close, name="kafka_close", daemon=True)
    thread.start()
    thread.join(_CLOSE_SECS)
    if thread.is_alive():
      logging.warning("The Kafka consumer of %s still closes.", self._describe())

  def _describe(self) -> str:
    return (
      f"topics {','.join(self._topics)}, group {self._settings.get('group.id')}, "
      f"servers {self._settings.get('bootstrap.servers')}"
    )

  def _open(self) -> Any:
    client = _client()
    logging.info("Reading Kafka: %s.", self._describe())
    # Lines of the client otherwise go to standard error, without end while a broker is away.
    settings = {**self._settings, "error_cb": self._on_error, "logger": _client_logger()}
    consumer = client.Consumer(settings)
    consumer.subscribe(self._topics, on_assign=self._on_assign)
    self._opened_at = time.monotonic()
    return consumer

  def _step(self, poll_secs: float) -> bool:
    """Waits for messages, a slice of time at most; returns whether the fetch is complete."""
    if self._consumer is None:
      self._consumer = self._open()
    now = time.monotonic()
    if self._deadline is None:
      self._deadline = now + poll_secs
    first = self._consumer.poll(max(0.0, min(self._deadline - now, _SLICE_SECS)))
    if first is None:
      # Joining the group starts the clock anew.
      if self._deadline is None or time.monotonic() < self._deadline:
        return False
      self._deadline = None
      if self._joined or self._error is not None or now - self._opened_at > _JOIN_SECS:
        self._timeouts += 1
      return True
    room = self._batch_size - len(self._pending) - 1
    is_end = False
    for message in [first, *(self._consumer.consume(room, 0) if room else [])]:
      is_end |= self._add(message)
    return len(self._pending) >= self._batch_size or (is_end and self._is_all_read())

  def _add(self, message: Any) -> bool:
    """Keeps a message; returns whether it says that a partition has no more."""
    error = message.error()
    partition = (message.topic(), message.partition())
    if error is None:
      self._pending.append(message)
      self._at_end.discard(partition)
      self._timeouts, self._deadline, self._error = 0, None, None
      return False
    if error.code() == _client().KafkaError._PARTITION_EOF:
      self._at_end.add(partition)
      self._error = None
      return True
    self._on_error(error)
    if error.fatal() or error.code() in _permanent_codes():
      raise self._read_error(error)
    return False

  def _is_all_read(self) -> bool:
    assigned = {(part.topic, part.partition) for part in self._consumer.assignment()}
    self._at_end &= assigned
    return bool(assigned) and self._at_end == assigned

  def _take(self, message_poll_timeout: int, stream_timeout: int) -> Fetch:
    pending, self._pending = self._pending, []
    is_endless = stream_timeout == kafka_settings.ENDLESS
    return Fetch(
      [message.value() or b"" for message in pending],
      [message.key() or b"" for message in pending],
      [
        f"Kafka topic {message.topic()}, partition {message.partition()}, offset {message.offset()}"
        for message in pending
      ],
      is_endless or self._timeouts * message_poll_timeout < stream_timeout,
    )

  def _on_assign(self, unused_consumer: Any, partitions: Sequence[Any]) -> None:
    self._joined = True
    self._deadline = None
    if partitions:
      self._error = None

  def _on_error(self, error: Any) -> None:
    code, codes = error.code(), _client().KafkaError
    if code == codes._TRANSPORT:
      # One connection of several; the client tells when all are lost.
      self._connection_error = error.str()
      return
    self._error = error
    self._is_down = code in (codes._ALL_BROKERS_DOWN, codes._RESOLVE)
    logging.log_every_n_seconds(
      logging.WARNING, "Kafka: %s (%s)", _WARN_SECS, error.str(), self._describe()
    )

  def _read_error(self, error: Any) -> KafkaReadError:
    text = f"cannot read {self._describe()}: {error.name()}: {error.str()}"
    return KafkaReadError(f"{text}; {self._connection_error}" if self._is_down else text)


class ReaderLease:
  """The use of a reader; readers with a name are shared by all who give that name.

  Args:
    topics: see `KafkaReader`.
    metadata: see `KafkaReader`.
    container: part of the name.
    shared_name: the name; empty: the reader is not shared.

  Raises:
    ValueError: the reader of that name reads something else.
  """

  def __init__(
    self,
    topics: Sequence[str],
    metadata: Sequence[str],
    container: str = "",
    shared_name: str = "",
  ):
    self._name = (container, shared_name) if shared_name else None
    if self._name is None:
      self.reader = KafkaReader(topics, metadata)
      self._is_released = False
      return
    with _shared_lock:
      reader, users = _shared.get(self._name, (None, 0))
      if reader is None:
        reader = KafkaReader(topics, metadata)
      elif not reader.has_same_source(topics, metadata):
        raise ValueError(f"shared_name {shared_name!r} is a reader of other topics or settings")
      _shared[self._name] = (reader, users + 1)
    self.reader = reader
    self._is_released = False

  def release(self) -> None:
    """Closes the reader unless others use it. May be called again."""
    with _shared_lock:
      if self._is_released:
        return
      self._is_released = True
      if self._name is not None:
        reader, users = _shared[self._name]
        if users > 1:
          _shared[self._name] = (reader, users - 1)
          return
        del _shared[self._name]
    self.reader.close()


class _RateLimit(stdlib_logging.Filter):
  """Lets one line of a kind through, and then none for a while."""

  def __init__(self):
    super().__init__()
    self._last: dict[str, float] = {}

  def filter(self, record: stdlib_logging.LogRecord) -> bool:
    # The client's lines begin with a word that says what happened: `FAIL [rdkafka#consumer-1] ...`.
    kind = record.getMessage().partition(" ")[0]
    now = time.monotonic()
    if now - self._last.get(kind, -_WARN_SECS) < _WARN_SECS:
      return False
    self._last[kind] = now
    return True


@functools.cache
def _client_logger() -> stdlib_logging.Logger:
  logger = logging.get_absl_logger().getChild("kafka")
  logger.addFilter(_RateLimit())
  return logger


def _client() -> Any:
  """Returns the module `confluent_kafka`, an optional dependency."""
  try:
    import confluent_kafka
  except ImportError as error:
    raise ImportError(
      "reading Kafka needs confluent_kafka: pip install 'monolith[kafka]'"
    ) from error
  return confluent_kafka


def _permanent_codes() -> tuple[int, ...]:
  """Errors that no waiting mends."""
  codes = _client().KafkaError
  return (
    codes._FATAL,
    codes._AUTO_OFFSET_RESET,
    codes.TOPIC_AUTHORIZATION_FAILED,
    codes.GROUP_AUTHORIZATION_FAILED,
    codes.INVALID_GROUP_ID,
  )


class MessageStream:
  """Iterates over fetches until the stream ends. They may be empty, and come often.

  Args:
    make_lease: called when the first fetch is asked for.
    message_poll_timeout: see `KafkaReader.fetch`.
    stream_timeout: see `KafkaReader.fetch`.
    max_wait: seconds after which a fetch is returned even if it is empty.
  """

  def __init__(
    self,
    make_lease: Callable[[], ReaderLease],
    message_poll_timeout: int,
    stream_timeout: int,
    max_wait: float,
  ):
    self._make_lease = make_lease
    self._lease: ReaderLease | None = None
    self._message_poll_timeout = message_poll_timeout
    self._stream_timeout = stream_timeout
    self._max_wait = max_wait
    self._is_last = False
    self._is_ended = False
    self._is_busy = False
    self._last_used = 0.0
    _streams.add(self)

  def __iter__(self) -> MessageStream:
    return self

  def __next__(self) -> Fetch:
    self._is_busy = True
    try:
      return self._fetch()
    except BaseException:
      self.close()
      raise
    finally:
      self._last_used = time.monotonic()
      self._is_busy = False

  def __del__(self):
    self.close()

  def close(self) -> None:
    """Gives the reader back. May be called again."""
    self._is_ended = True
    lease, self._lease = self._lease, None
    if lease is not None:
      lease.release()

  def is_in_use(self) -> bool:
    """Returns whether a thread asks for fetches, as far as one can tell."""
    return self._is_busy or time.monotonic() - self._last_used < _IDLE_SECS

  def _fetch(self) -> Fetch:
    if self._is_ended:
      raise StopIteration
    if self._lease is None:
      self._lease = self._make_lease()
    reader = self._lease.reader
    if not self._is_last:
      fetch = reader.fetch(self._message_poll_timeout, self._stream_timeout, self._max_wait)
      if reader.closed:
        raise StopIteration
      if fetch is None:
        return Fetch([], [], [], True)
      self._is_last = not fetch.continue_fetch
      if fetch.messages or fetch.continue_fetch:
        return fetch
    reader.check(self._message_poll_timeout)
    raise StopIteration


_readers: weakref.WeakSet[KafkaReader] = weakref.WeakSet()
_shared: dict[tuple[str, str], tuple[KafkaReader, int]] = {}
_shared_lock = threading.RLock()  # releasing may be part of a garbage collection


_streams: weakref.WeakSet[MessageStream] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  """Lets the threads of TensorFlow that read leave Python before it is gone.

  A thread that is in Python when the interpreter ends never comes back, and who waits for it hangs.
  """
  in_use = [weakref.ref(stream) for stream in _streams if stream.is_in_use()]
  for reader in list(_readers):
    reader.close()
  deadline = time.monotonic() + _CLOSE_SECS
  while time.monotonic() < deadline:
    # TensorFlow drops a stream that has ended; one that nobody reads becomes idle.
    streams = [ref() for ref in in_use]
    if not any(stream is not None and stream.is_in_use() for stream in streams):
      break
    del streams
    time.sleep(_SLICE_SECS / 10)
  if in_use:
    time.sleep(_SLICE_SECS)  # They have returned to TensorFlow, or are about to.
