"""Makes events for tests."""

from __future__ import annotations

from idl.matrix.proto.example_pb2 import Example, NamedFeature
from monolith.realtime.events_pb2 import Action, Impression

START_MS = 1_700_000_000_000


def make_example(user: int = 1, item: int = 2) -> bytes:
  """Returns a serialized example with two features."""
  example = Example()
  for name, slot, value in (("user", 1, user), ("item", 2, item)):
    feature = NamedFeature(name=name)
    feature.feature.fid_v2_list.value.append((slot << 48) | value)
    example.named_feature.append(feature)
  return example.SerializeToString()


def make_impression(key: str, secs: float = 0, channel: int = 0, item: int = 2 << 48) -> Impression:
  """Returns an impression `secs` after the beginning of time."""
  return Impression(
    request_id=key,
    event_time_ms=START_MS + round(secs * 1000),
    channel=channel,
    item=item,
    example=make_example(),
  )


def make_action(key: str, secs: float = 0, action: int = 1) -> Action:
  """Returns an action `secs` after the beginning of time."""
  return Action(request_id=key, event_time_ms=START_MS + round(secs * 1000), action=action)
