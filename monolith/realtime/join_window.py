"""Joins the impressions and actions of one partition, by event time; knows nothing of Kafka.

An impression is open until its first action (`first_action`) or until the watermark has passed its
event time by `window_ms`. The watermark is the newest event time that was read of the stream that
is further behind, minus `lateness_ms`, so that a replay closes no window before it has read the
actions that belong in it. A stream that had nothing more to read counts as far as the other one
was then.

An impression that is sent again, with the event time it had, makes no second sample until its
window has passed, whether the first one is open, in a file, or has left with its action. Later it
makes a sample of its own.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from monolith.realtime import events
from monolith.realtime.closed_keys import ClosedKeys
from monolith.realtime.spill_files import Record, SpilledMinute, hash_keys

FIRST_ACTION, WINDOW_END = "first_action", "window_end"
_MINUTE_MS = 60_000
# Bytes of an open impression in memory: its tuple, numbers, and places in two dictionaries.
_RECORD_BYTES = 420
# Places in a Record.
_OFFSET: Final = 0
_TIME: Final = 1
_CHANNEL: Final = 2
_ITEM: Final = 3
_EXAMPLE: Final = 4


@dataclasses.dataclass(frozen=True)
class SampleRates:
  """Says how many negatives are kept.

  Attributes:
    default: the rate where no rule fits.
    by_channel: rate by channel.
    by_slot: rate by slot of the item; a rule for the channel wins.
  """

  default: float = 1.0
  by_channel: dict[int, float] = dataclasses.field(default_factory=dict)
  by_slot: dict[int, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    for rate in (self.default, *self.by_channel.values(), *self.by_slot.values()):
      if not 0 <= rate <= 1:
        raise ValueError(f"sample rate is {rate}, want 0 to 1")

  def of(self, channel: int, item: int) -> float:
    """Returns the rate of an impression's negatives."""
    rate = self.by_channel.get(channel)
    if rate is None:
      rate = self.by_slot.get(events.slot_of(item), self.default)
    return rate


@dataclasses.dataclass(frozen=True)
class WindowOptions:
  """Holds the options of a window.

  Attributes:
    window_ms: how long after its impression an action counts.
    lateness_ms: how much later than newer events an event may be read.
    emit: `first_action` or `window_end`.
    rates: how many negatives are kept.
    memory_bytes: impressions beyond it go to files. A quarter of it at most remembers those that
      have left with an action.
    spill_folder: where those files are.
  """

  window_ms: int = 600_000
  lateness_ms: int = 2_000
  emit: str = FIRST_ACTION
  rates: SampleRates = SampleRates()
  memory_bytes: int = 512 << 20
  spill_folder: str | None = None

  def __post_init__(self) -> None:
    if self.emit not in (FIRST_ACTION, WINDOW_END):
      raise ValueError(f"emit is {self.emit!r}, want {FIRST_ACTION!r} or {WINDOW_END!r}")
    if self.window_ms <= 0 or self.lateness_ms < 0:
      raise ValueError(
        f"window of {self.window_ms} ms and lateness of {self.lateness_ms} ms: want a positive "
        "window, and no negative lateness"
      )
    if self.memory_bytes < 0:
      raise ValueError(f"memory is {self.memory_bytes} bytes, want none or more")


@dataclasses.dataclass
class Counters:
  """Counts the work of a window since it began."""

  impressions: int = 0
  actions: int = 0
  joined: int = 0
  negatives: int = 0
  sampled_out: int = 0
  late: int = 0
  unmatched: int = 0
  repeated: int = 0
  known: int = 0
  forgotten: int = 0
  spilled_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
  """Is a sample that leaves the window: the key, and a serialized `Example`."""

  request_id: str
  value: bytes


class JoinWindow:
  """The open impressions of one partition.

  Args:
    partition: its number, part of every sample's id.
    options: what it does.
  """

  def __init__(self, partition: int, options: WindowOptions):
    self._partition = partition
    self._options = options
    self.counters = Counters()
    self._open: dict[str, Record] = {}
    # Keys of open impressions by minute; may have keys that were closed.
    self._minutes: dict[int, list[str]] = {}
    self._spilled: dict[int, SpilledMinute] = {}
    self._memory = 0
    # Actions that wait for their impression: key -> [(event time, action, offset)].
    self._waiting: dict[str, list[tuple[int, int, int]]] = {}
    self._waiting_order: list[tuple[int, str]] = []
    self._closed = ClosedKeys(options.memory_bytes // 4)
    # With WINDOW_END: actions of impressions that are open.
    self._collected: dict[str, list[int]] = {}
    # Impressions whose samples are in the topic already, one bit per offset after the first: after
    # a restart there may be tens of millions.
    self._known = bytearray()
    self._first_known = 0
    self._newest_impression = 0
    self._newest_action = 0
    # Event time whose windows have passed.
    self._end = 0
    # The length of a minute: shorter where the window is, so that waiting for the end of a minute
    # adds little to it.
    self._unit_ms = max(1, min(_MINUTE_MS, options.window_ms // 20))

  @property
  def num_open(self) -> int:
    """The number of impressions that wait."""
    return len(self._open) + sum(minute.num_open for minute in list(self._spilled.values()))

  @property
  def memory_bytes(self) -> int:
    """About how much memory impressions take, those that have left with an action included."""
    return self._memory + self._closed.memory_bytes

  def know(self, first: int, offsets: Iterable[int]) -> None:
    """Tells the window of impressions whose samples were written before: they make no other.

    Args:
      first: where impressions are read from; offsets before it are ignored.
      offsets: their offsets.
    """
    self._known, self._first_known = bytearray(), first
    for offset in offsets:
      place = offset - first
      if place >= 0:
        if place >> 3 >= len(self._known):
          self._known.extend(bytes((place >> 3) + 1 - len(self._known)))
        self._known[place >> 3] |= 1 << (place & 7)

  def _is_known(self, offset: int) -> bool:
    place = offset - self._first_known
    if place >> 3 >= len(self._known):
      self._known = bytearray()
      return False
    return bool(self._known[place >> 3] >> (place & 7) & 1)

  def add(
    self,
    impressions: Sequence[tuple[int, events.Impression]],
    actions: Sequence[tuple[int, events.Action]],
  ) -> list[Sample]:
    """Adds what was read, each with its offset, and returns the samples that leave at once.

    Raises:
      OSError: a spill file cannot be written; the window must not be used any more.
    """
    samples: list[Sample] = []
    for offset, impression in impressions:
      self._add_impression(offset, impression, samples)
    self._add_actions(actions, samples)
    if self.memory_bytes > self._options.memory_bytes:
      self._spill()
    self.counters.forgotten = self._closed.forgotten
    return samples

  @property
  def newest_impression_ms(self) -> int:
    """The newest event time of an impression, 0 before the first."""
    return self._newest_impression

  @property
  def newest_action_ms(self) -> int:
    """The newest event time of an action, 0 before the first."""
    return self._newest_action

  def watermark(self, *, impressions_until: int, actions_until: int) -> int:
    """Returns the event time, in ms, before which nothing more is expected.

    Args:
      impressions_until: the newest action, in ms, that had been read when all impressions there
        were had been read, so that a silent stream holds nothing back up to there.
      actions_until: the same of the actions, by the newest impression.
    """
    impressions = max(self._newest_impression, impressions_until)
    actions = max(self._newest_action, actions_until)
    return min(impressions, actions) - self._options.lateness_ms

  def advance(self, watermark_ms: int) -> list[Sample]:
    """Closes what the watermark has passed, and returns the samples of it, oldest minute first.

    Raises:
      OSError: a spill file cannot be read; the window must not be used any more.
    """
    samples: list[Sample] = []
    end = self._end = max(self._end, watermark_ms - self._options.window_ms)
    # A minute is closed as a whole: files are never read twice.
    for minute in sorted({*self._minutes, *self._spilled}):
      if (minute + 1) * self._unit_ms > end:
        break
      spilled = self._spilled.pop(minute, None)
      # Memory has a key once, but it may be in a file as well, or several times.
      done: set[str] = set()
      for key in self._minutes.pop(minute, ()):
        record = self._open.get(key)
        if record is not None and record[_TIME] // self._unit_ms == minute:
          self._forget(key, record)
          self._close(key, record, samples)
          if spilled is not None:
            done.add(key)
      if spilled is not None:
        for key, record in spilled.drain():
          if key in done or key in self._closed:
            self.counters.repeated += 1
          else:
            done.add(key)
            self._close(key, record, samples)
        spilled.close()
    self._closed.forget_before(end // self._unit_ms)
    while self._waiting_order and self._waiting_order[0][0] < end:
      _, key = heapq.heappop(self._waiting_order)
      self.counters.unmatched += len(self._waiting.pop(key, ()))
    return samples

  def oldest_needed_offset(self) -> int | None:
    """Returns the offset of the first impression that is open or remembered, or None.

    A joiner that reads from there on knows what this one does.
    """
    candidates = (self.oldest_open_offset(), self._closed.oldest_offset())
    return min((offset for offset in candidates if offset is not None), default=None)

  def oldest_open_offset(self) -> int | None:
    """Returns the offset of the first impression that is open, or None."""
    candidates = [minute.oldest_offset() for minute in self._spilled.values()]
    if self._open:
      candidates.append(min(record[_OFFSET] for record in self._open.values()))
    return min((offset for offset in candidates if offset is not None), default=None)

  def oldest_waiting_offset(self) -> int | None:
    """Returns the offset of the first action that waits for its impression, or None."""
    return min((a[2] for waiting in self._waiting.values() for a in waiting), default=None)

  def close(self) -> None:
    """Deletes the spill files."""
    for minute in self._spilled.values():
      minute.close()
    self._spilled = {}

  def _add_impression(self, offset: int, event: events.Impression, samples: list[Sample]) -> None:
    self.counters.impressions += 1
    time_ms = event.event_time_ms
    self._newest_impression = max(self._newest_impression, time_ms)
    key = event.request_id
    if self._known and self._is_known(offset):
      self.counters.known += 1
      self._waiting.pop(key, None)
      self._closed.add(key, time_ms // self._unit_ms, offset)
      return
    if key in self._closed:
      self.counters.repeated += 1
      return
    record = (offset, time_ms, event.channel, event.item, event.example)
    waiting = self._waiting.pop(key, None)
    if waiting is not None:
      in_time = [action for when, action, _ in waiting if self._is_in_time(time_ms, when)]
      self.counters.late += len(waiting) - len(in_time)
      if in_time and self._options.emit == FIRST_ACTION:
        self.counters.repeated += len(in_time) - 1
        self._emit_positive(key, record, in_time[0], samples)
        return
      if in_time:
        self._collected[key] = in_time
    if key in self._open:
      self.counters.repeated += 1
      return
    self._insert(key, record)

  def _insert(self, key: str, record: Record) -> None:
    self._open[key] = record
    self._minutes.setdefault(record[_TIME] // self._unit_ms, []).append(key)
    self._memory += _size(key, record)

  def _add_actions(
    self, actions: Sequence[tuple[int, events.Action]], samples: list[Sample]
  ) -> None:
    rest: list[tuple[int, events.Action]] = []
    for offset, action in actions:
      self.counters.actions += 1
      self._newest_action = max(self._newest_action, action.event_time_ms)
      record = self._open.get(action.request_id)
      if record is None and action.request_id in self._closed:
        self.counters.repeated += 1
      elif record is None:
        rest.append((offset, action))
      else:
        self._join(record, action, samples)
    for spilled in list(self._spilled.values()) if rest else ():
      self._bring_back(spilled, {action.request_id for _, action in rest})
    for offset, action in rest:
      record = self._open.get(action.request_id)
      if record is None:
        self._wait(offset, action)
      else:
        self._join(record, action, samples)

  def _join(self, record: Record, action: events.Action, samples: list[Sample]) -> None:
    """Adds an action to an open impression, in time or not."""
    key = action.request_id
    if not self._is_in_time(record[_TIME], action.event_time_ms):
      self.counters.late += 1
    elif self._options.emit == WINDOW_END:
      self._collected.setdefault(key, []).append(action.action)
    else:
      self._forget(key, record)
      self._emit_positive(key, record, action.action, samples)

  def _emit_positive(self, key: str, record: Record, action: int, samples: list[Sample]) -> None:
    """Lets an impression leave with an action, before its window has passed."""
    self._emit(key, record, events.POSITIVE, [action], samples)
    self._closed.add(key, record[_TIME] // self._unit_ms, record[_OFFSET])

  def _bring_back(self, spilled: SpilledMinute, keys: set[str]) -> None:
    """Moves impressions that actions ask for from a file to memory."""
    ordered = list(keys)
    for i, record in spilled.take(hash_keys(ordered)).items():
      self._insert(ordered[i], record)

  def _wait(self, offset: int, action: events.Action) -> None:
    if action.event_time_ms < self._end:
      self.counters.late += 1
      return
    key = action.request_id
    self._waiting.setdefault(key, []).append((action.event_time_ms, action.action, offset))
    heapq.heappush(self._waiting_order, (action.event_time_ms, key))

  def _is_in_time(self, impression_ms: int, action_ms: int) -> bool:
    return action_ms <= impression_ms + self._options.window_ms

  def _close(self, key: str, record: Record, samples: list[Sample]) -> None:
    """Ends the window of an impression."""
    actions = self._collected.pop(key, None)
    if actions:
      self._emit(key, record, events.WINDOW, actions, samples)
      return
    rate = self._options.rates.of(record[_CHANNEL], record[_ITEM])
    if events.is_kept(key, rate):
      kind = events.WINDOW if self._options.emit == WINDOW_END else events.NEGATIVE
      self._emit(key, record, kind, [], samples)
    else:
      self.counters.sampled_out += 1

  def _emit(
    self, key: str, record: Record, kind: str, actions: list[int], samples: list[Sample]
  ) -> None:
    if actions:
      self.counters.joined += 1
    else:
      self.counters.negatives += 1
    value = events.make_sample(
      record[_EXAMPLE],
      identity=events.sample_id(self._partition, record[_OFFSET], kind),
      event_time_ms=record[_TIME],
      actions=actions,
      # For positives as well: it says how many negatives their like has, and a model corrects the
      # logits of both.
      sample_rate=self._options.rates.of(record[_CHANNEL], record[_ITEM]),
    )
    samples.append(Sample(key, value))

  def _forget(self, key: str, record: Record) -> None:
    del self._open[key]
    self._memory -= _size(key, record)

  def _spill(self) -> None:
    """Moves impressions to files, newest minutes last, until half of the memory is free."""
    for minute in sorted(self._minutes):
      keys = self._minutes[minute]
      records = {
        key: self._open[key]
        for key in keys
        if key in self._open and self._open[key][_TIME] // self._unit_ms == minute
      }
      if records:
        if minute not in self._spilled:
          self._spilled[minute] = SpilledMinute(self._options.spill_folder or ".")
        self.counters.spilled_bytes += self._spilled[minute].append(records)
      for key, record in records.items():
        self._forget(key, record)
      del self._minutes[minute]
      if self.memory_bytes <= self._options.memory_bytes // 2:
        return


def _size(key: str, record: Record) -> int:
  return _RECORD_BYTES + len(key) + len(record[_EXAMPLE])
