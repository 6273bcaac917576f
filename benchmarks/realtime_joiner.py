"""Measures the joiner: events per second of CPU, and memory of ten million open impressions."""

from __future__ import annotations

import argparse
import pathlib
import resource
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from examples.realtime import broker
from examples.realtime.generator import World  # noqa: E402
from monolith.realtime.events_pb2 import Action, Impression  # noqa: E402
from monolith.realtime.join_window import JoinWindow, WindowOptions  # noqa: E402
from monolith.realtime.joiner import Joiner, JoinerOptions  # noqa: E402
from monolith.row_log import kafka_client, topics

_PARTITIONS = 2
_START_MS = 1_700_000_000_000
GOAL_EVENTS, GOAL_GB, GOAL_OPEN = 50_000, 1.0, 10_000_000


def _cpu_secs() -> float:
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime


def _send(servers: str, num_impressions: int) -> int:
  """Sends impressions, 10,000 per second of event time, of which one in five is clicked."""
  world = World()
  examples = [world.example(u, u % world.items) for u in range(world.users)]
  producer = kafka_client.make_producer(
    servers, {"queue.buffering.max.messages": 10_000_000, "linger.ms": 50}
  )
  sent = 0
  for i in range(num_impressions):
    key = f"{i:016x}"
    when = _START_MS + i // 10
    event = Impression(request_id=key, event_time_ms=when, example=examples[i % world.users])
    producer.produce(topics.IMPRESSIONS, event.SerializeToString(), key)
    sent += 1
    if i % 5 == 0:
      action = Action(request_id=key, event_time_ms=when + 500, action=1)
      producer.produce(topics.ACTIONS, action.SerializeToString(), key)
      sent += 1
    producer.poll(0)
  if producer.flush(120):
    raise RuntimeError("the broker did not take all events")
  return sent


def measure_events(num_impressions: int) -> float:
  """Returns events per second of CPU, of all threads of a joiner that reads a real broker."""
  with tempfile.TemporaryDirectory() as folder, broker.LocalBroker(folder) as kafka:
    names = (topics.IMPRESSIONS, topics.ACTIONS, topics.SAMPLES)
    kafka.create_topics(dict.fromkeys(names, _PARTITIONS))
    sent = _send(kafka.servers, num_impressions)
    joiner = Joiner(
      JoinerOptions(kafka.servers, window=WindowOptions(window_ms=5_000), partitions=[])
    )
    begin, began = _cpu_secs(), time.monotonic()
    counters = joiner.counters()
    while counters.impressions + counters.actions < sent:
      joiner.step()
      counters = joiner.counters()
    used, passed = _cpu_secs() - begin, time.monotonic() - began
    joiner.close()
  print(
    f"joined {sent} events ({counters.joined} clicks, {counters.negatives} negatives) in "
    f"{passed:.1f} s, {used:.1f} s of CPU"
  )
  return sent / used


def measure_memory(num_open: int, memory_mb: int) -> tuple[float, float]:
  """Returns peak memory in GB, and impressions per second of CPU, of a window with many open."""
  example = World().example(1, 2)
  with tempfile.TemporaryDirectory() as folder:
    options = WindowOptions(memory_bytes=memory_mb << 20, spill_folder=folder)
    window = JoinWindow(0, options)
    begin = _cpu_secs()
    for first in range(0, num_open, 10_000):
      window.add(
        [
          (
            i,
            Impression(request_id=f"{i:016x}", event_time_ms=_START_MS + i // 20, example=example),
          )
          for i in range(first, min(first + 10_000, num_open))
        ],
        (),
      )
      # Some find their impression among all of them.
      window.add((), [(first, Action(request_id=f"{first // 2:016x}", event_time_ms=_START_MS))])
    used = _cpu_secs() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(
      f"{window.num_open} open impressions, {window.counters.spilled_bytes / 1e9:.2f} GB in files, "
      f"{window.counters.joined} joined"
    )
    window.close()
  return peak, num_open / used


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--impressions", type=int, default=500_000)
  parser.add_argument("--open", type=int, default=GOAL_OPEN)
  parser.add_argument("--memory_mb", type=int, default=128)
  parser.add_argument("--only", choices=("memory", "events"))
  flags = parser.parse_args()
  rows: list[tuple[str, str, str]] = []
  is_met = True
  # First: the peak is that of the whole process.
  if flags.only != "events":
    peak, rate = measure_memory(flags.open, flags.memory_mb)
    is_met &= peak <= GOAL_GB
    rows += [
      (f"{flags.open:,} open impressions, GB at most", f"{peak:.2f}", f"{GOAL_GB:.2f}"),
      ("impressions/s of one core with that many open", f"{rate:,.0f}", ""),
    ]
  if flags.only != "memory":
    events = measure_events(flags.impressions)
    is_met &= events >= GOAL_EVENTS
    rows.append(("joiner, events/s of one core", f"{events:,.0f}", f"{GOAL_EVENTS:,}"))
  for name, measured, goal in (("what", "measured", "goal"), *rows):
    print(f"{name:46} {measured:>12} {goal:>12}")
  return 0 if is_met else 1


if __name__ == "__main__":
  sys.exit(main())
