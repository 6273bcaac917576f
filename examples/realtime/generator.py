"""Makes events of users whose taste turns: `python -m examples.realtime.generator`.

Every user likes one genre at a time, and another one after `turn_secs`. A model that is not kept
fresh is soon wrong about all of them, which is what the demo shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import heapq
import logging
import os
import random
import signal
import sys
import time

from idl.matrix.proto.example_pb2 import Example, NamedFeature
from monolith.realtime.events_pb2 import Action, Impression
from monolith.row_log import kafka_client, topics

USER_SLOT, ITEM_SLOT, GENRE_SLOT = 1, 2, 3
_SLOT_SHIFT = 48
CLICK = 1
# Users from here on exist for one measurement only.
FIRST_MARKED_USER = 1 << 40
_TICK_SECS = 0.02
_log = logging.getLogger("monolith.generator")


@dataclasses.dataclass(frozen=True)
class World:
  """Says who likes what, by its numbers and the time alone, so that every process agrees.

  Attributes:
    users: number of users.
    items: number of items; the genre of an item is its number modulo `genres`.
    genres: number of genres.
    turn_secs: after this many seconds every user likes another genre.
    like: probability of a click on an item of the liked genre.
    dislike: probability of a click on any other.
  """

  users: int = 100
  items: int = 50
  genres: int = 5
  turn_secs: float = 60
  like: float = 0.7
  dislike: float = 0.05

  def taste(self, user: int, now: float) -> int:
    """Returns the genre that a user likes at a time in seconds."""
    # Users turn one after another, not all at once; 3 is prime to the number of genres.
    turns = int(now / self.turn_secs + (user % 97) / 97)
    return (user + 3 * turns) % self.genres

  def click_probability(self, user: int, item: int, now: float) -> float:
    """Returns how likely a user clicks on an item at a time in seconds."""
    return self.like if self.taste(user, now) == item % self.genres else self.dislike

  def example(self, user: int, item: int) -> bytes:
    """Returns the features of an impression, a serialized Example."""
    example = Example()
    for name, slot, value in (
      ("user", USER_SLOT, user),
      ("item", ITEM_SLOT, item),
      ("genre", GENRE_SLOT, item % self.genres),
    ):
      feature = NamedFeature(name=name)
      feature.feature.fid_v2_list.value.append(make_fid(slot, value))
      example.named_feature.append(feature)
    return example.SerializeToString()


def make_fid(slot: int, value: int) -> int:
  """Returns a fid of the 15-bit layout."""
  return (slot << _SLOT_SHIFT) | value


class EventSender:
  """Writes events to Kafka.

  Args:
    servers: comma-separated `host:port` of brokers.

  Attributes:
    sent: the number of events that were handed over.
  """

  def __init__(self, servers: str):
    self._producer = kafka_client.make_producer(servers)
    self._random = random.Random(os.urandom(8))
    self.sent = 0

  def impression(self, world: World, user: int, item: int, now: float | None = None) -> str:
    """Sends an impression and returns its request id."""
    request_id = f"{self._random.getrandbits(64):016x}"
    event = Impression(
      request_id=request_id,
      event_time_ms=_millis(now),
      item=make_fid(ITEM_SLOT, item),
      example=world.example(user, item),
    )
    self._send(topics.IMPRESSIONS, request_id, event.SerializeToString())
    return request_id

  def action(self, request_id: str, now: float | None = None) -> None:
    """Sends a click."""
    event = Action(request_id=request_id, event_time_ms=_millis(now), action=CLICK)
    self._send(topics.ACTIONS, request_id, event.SerializeToString())

  def poll(self) -> None:
    """Lets the client do its work."""
    self._producer.poll(0)

  def flush(self, timeout_secs: float = 30) -> int:
    """Waits until brokers have everything, and returns how many events they lack."""
    return self._producer.flush(timeout_secs)

  def _send(self, topic: str, key: str, value: bytes) -> None:
    while True:
      try:
        # The client's partitioner sees the key only: both topics get the same partition.
        self._producer.produce(topic, value, key)
        self.sent += 1
        return
      except BufferError:
        self._producer.poll(0.1)


def _millis(now: float | None) -> int:
  return int((time.time() if now is None else now) * 1000)


class Generator:
  """Lets users see items and click on them.

  Args:
    sender: where events go.
    world: who likes what.
    rate: impressions per second.
    max_delay_secs: a click comes up to this many seconds after its impression.
    seed: makes the same choices again.
  """

  def __init__(
    self,
    sender: EventSender,
    world: World,
    rate: float,
    max_delay_secs: float = 0.5,
    seed: int | None = None,
  ):
    self._sender = sender
    self._world = world
    self._rate = rate
    self._max_delay_secs = max_delay_secs
    self._random = random.Random(seed)
    self._clicks: list[tuple[float, str]] = []
    self._owed = 0.0
    self._last: float | None = None

  def step(self, now: float) -> None:
    """Sends what has happened since the last call.

    Args:
      now: seconds since 1970.
    """
    # After a pause of the process nobody expects it to make up for hours.
    self._owed += min(now - self._last, 5.0) * self._rate if self._last is not None else 0
    self._last = now
    world, draw = self._world, self._random
    # Older than what is about to happen: after a pause, later events must not make them late.
    while self._clicks and self._clicks[0][0] <= now:
      when, request_id = heapq.heappop(self._clicks)
      self._sender.action(request_id, when)
    while self._owed >= 1:
      self._owed -= 1
      user, item = draw.randrange(world.users), draw.randrange(world.items)
      # As often of the liked genre as not, so that both outcomes are there to learn from.
      if draw.random() < 0.4:
        item = item - item % world.genres + world.taste(user, now)
      request_id = self._sender.impression(world, user, item, now)
      if draw.random() < world.click_probability(user, item, now):
        heapq.heappush(self._clicks, (now + draw.uniform(0, self._max_delay_secs), request_id))
    self._sender.poll()


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a generator until SIGTERM or Ctrl-C, and returns the exit status."""
  logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
  parser = argparse.ArgumentParser(
    prog="python -m examples.realtime.generator", description=__doc__.split("\n\n")[0]
  )
  parser.add_argument("--kafka_servers", required=True, help="comma-separated host:port of brokers")
  parser.add_argument("--rate", type=float, default=500, help="impressions per second")
  parser.add_argument("--turn_secs", type=float, default=60, help="how long a taste lasts")
  flags = parser.parse_args(arguments)
  stopped = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *unused: stopped.append(True))
  try:
    sender = EventSender(flags.kafka_servers)
  except ConnectionError as error:
    _log.error("%s", error)
    return 1
  generator = Generator(sender, World(turn_secs=flags.turn_secs), flags.rate)
  while not stopped:
    generator.step(time.time())
    time.sleep(_TICK_SECS)
  return 1 if sender.flush() else 0


if __name__ == "__main__":
  sys.exit(main())
