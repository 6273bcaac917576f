"""Holds the topics and files of a joiner, and parses its command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence

from monolith.realtime.join_window import FIRST_ACTION, WINDOW_END, SampleRates, WindowOptions
from monolith.row_log import topics


@dataclasses.dataclass(frozen=True)
class JoinerOptions:
  """Holds the topics and files of a joiner.

  Attributes:
    servers: comma-separated `host:port` of brokers.
    group: consumer group, under which offsets are committed.
    window: how events are joined; its memory is shared among partitions.
    impressions: topic of impressions.
    actions: topic of actions, with as many partitions.
    samples: topic of samples, with as many partitions.
    partitions: partitions to read; None shares all of them with other joiners of the group, and an
      empty list reads all without waiting for others.
    commit_secs: how often offsets are committed.
    transactions: whether to use them where the brokers can.
    max_future_secs: events that are further ahead of the clock are poisoned.
  """

  servers: str
  group: str = "joiner"
  window: WindowOptions = WindowOptions()
  impressions: str = topics.IMPRESSIONS
  actions: str = topics.ACTIONS
  samples: str = topics.SAMPLES
  partitions: Sequence[int] | None = None
  commit_secs: float = 1.0
  transactions: bool = True
  max_future_secs: float = 3600


def parse_rates(text: str) -> SampleRates:
  """Returns rates of negatives from `0.1,channel:3=0.5,slot:200=0.2`.

  Raises:
    ValueError: the text is not of that form, or a rate is not between 0 and 1.
  """
  default = 1.0
  by_channel: dict[int, float] = {}
  by_slot: dict[int, float] = {}
  for rule in filter(None, (part.strip() for part in text.split(","))):
    where, equals, value = rule.rpartition("=")
    kind, _, number = where.partition(":")
    try:
      if not equals:
        default = float(value)
      elif kind in ("channel", "slot"):
        (by_channel if kind == "channel" else by_slot)[int(number)] = float(value)
      else:
        raise ValueError
    except ValueError:
      raise ValueError(
        f"rule {rule!r}: want a rate, channel:<number>=<rate> or slot:<number>=<rate>"
      ) from None
  return SampleRates(default, by_channel, by_slot)


def _parse_rates_of_flag(text: str) -> SampleRates:
  try:
    return parse_rates(text)
  except ValueError as error:  # of which argparse would tell nothing
    raise argparse.ArgumentTypeError(str(error)) from error


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
  """Returns the flags of a command line.

  Raises:
    SystemExit: the command line is wrong, or asks for help.
  """
  parser = argparse.ArgumentParser(
    prog="python -m monolith.realtime.joiner",
    description="Joins impressions and actions to samples.",
  )
  add = parser.add_argument
  add("--kafka_servers", required=True, help="comma-separated host:port of brokers")
  add("--group", default="joiner", help="consumer group under which offsets are committed")
  add("--window_secs", type=float, default=600, help="how long after it an action counts")
  add("--lateness_secs", type=float, default=2, help="how much an event may be out of order")
  add("--emit", choices=(FIRST_ACTION, WINDOW_END), default=FIRST_ACTION)
  add(
    "--sample_rate",
    type=_parse_rates_of_flag,
    default=SampleRates(),
    help="share of negatives that is kept: 0.1,channel:3=0.5,slot:200=0.2",
  )
  add("--memory_mb", type=int, default=512, help="open impressions beyond it go to files")
  add("--spill_dir", default=tempfile.gettempdir(), help="folder of those files")
  add("--impressions_topic", default=topics.IMPRESSIONS)
  add("--actions_topic", default=topics.ACTIONS)
  add("--samples_topic", default=topics.SAMPLES)
  add(
    "--partitions",
    default="",
    help="comma-separated numbers, or `all`; by default joiners of the group share them",
  )
  add("--commit_secs", type=float, default=1.0, help="how often offsets are committed")
  add("--no_transactions", action="store_true", help="write samples and offsets one after another")
  add("--metrics_port", type=int, default=-1, help="port on loopback for Prometheus; 0: any free")
  return parser.parse_args(arguments)


def make_options(flags: argparse.Namespace) -> JoinerOptions:
  """Returns what the flags of a command line say.

  Raises:
    ValueError: a partition is not a number, a time or the memory makes no sense, or there is no
      folder for files; the message has it.
  """
  for name in ("window_secs", "lateness_secs", "commit_secs"):
    if not 0 <= getattr(flags, name) < math.inf:
      raise ValueError(f"--{name} is {getattr(flags, name)}, want a number of seconds")
  if not os.path.isdir(flags.spill_dir):
    raise ValueError(f"--spill_dir is {flags.spill_dir!r}, want a folder")
  window = WindowOptions(
    window_ms=round(flags.window_secs * 1000),
    lateness_ms=round(flags.lateness_secs * 1000),
    emit=flags.emit,
    rates=flags.sample_rate,
    memory_bytes=flags.memory_mb << 20,
    spill_folder=flags.spill_dir,
  )
  partitions = None
  if flags.partitions:
    parts = [] if flags.partitions == "all" else flags.partitions.split(",")
    partitions = list(dict.fromkeys(map(_parse_partition, parts)))
  return JoinerOptions(
    servers=flags.kafka_servers,
    group=flags.group,
    window=window,
    impressions=flags.impressions_topic,
    actions=flags.actions_topic,
    samples=flags.samples_topic,
    partitions=partitions,
    commit_secs=flags.commit_secs,
    transactions=not flags.no_transactions,
  )


def _parse_partition(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    raise ValueError(f"--partitions has {text!r}, want comma-separated numbers, or all") from None
