"""Messages that the stages exchange: impressions and actions in, samples out.

A sample is a serialized `Example`: the features of the impression, `label` (1 if there was an
action, else 0) and a `LineId` with `req_time` (seconds), `actions`, `sample_rate` and, in
`req_id`, the sample's id: `<partition>:<offset>:<kind>`, with partition and offset of the
impression. It is the same however often the joiner reads the impression, so a reader can drop what
it has seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from idl.matrix.proto.example_pb2 import Example
from idl.matrix.proto.line_id_pb2 import LineId
from monolith.realtime.events_pb2 import Action, Impression

# Kinds of samples: left at the first action, at the end of the window without one, or at the end of
# the window with all actions.
POSITIVE, NEGATIVE, WINDOW = "p", "n", "w"
KINDS = (POSITIVE, NEGATIVE, WINDOW)

_SLOT_SHIFT, _SLOT_MASK = 48, 0x7FFF
_HASH_RANGE = 1 << 64


class PoisonedMessageError(ValueError):
  """A message that is no event, or one that would do harm."""


def parse_impression(value: bytes, newest_ms: int) -> Impression:
  """Returns an impression whose example is one.

  Args:
    value: the message.
    newest_ms: event times after this one are refused: they would end every window.

  Raises:
    PoisonedMessageError: it is not usable; the message says why.
  """
  impression = _parse(Impression, value, newest_ms)
  try:
    Example.FromString(impression.example)
  except Exception as error:
    raise PoisonedMessageError(f"its example is no Example: {error}") from error
  return impression


def parse_action(value: bytes, newest_ms: int) -> Action:
  """Returns an action; arguments and errors are those of `parse_impression`."""
  return _parse(Action, value, newest_ms)


def sample_id(partition: int, offset: int, kind: str) -> str:
  """Returns the id of the sample that an impression becomes."""
  return f"{partition}:{offset}:{kind}"


def parse_sample_id(text: str) -> tuple[int, int, str]:
  """Returns partition, offset and kind.

  Raises:
    ValueError: it is no id of a sample.
  """
  parts = text.split(":")
  if len(parts) != 3 or parts[2] not in KINDS or not (parts[0] + parts[1]).isdigit():
    raise ValueError(f"sample id {text!r}: want <partition>:<offset>:<kind>")
  return int(parts[0]), int(parts[1]), parts[2]


def make_sample(
  example: bytes, *, identity: str, event_time_ms: int, actions: Sequence[int], sample_rate: float
) -> bytes:
  """Returns a serialized `Example` with label and line id.

  Both are appended to the serialized features, which is how protobuf merges messages: nothing is
  parsed again.
  """
  line_id = LineId(
    req_time=event_time_ms // 1000, actions=actions, sample_rate=sample_rate, req_id=identity
  )
  tail = Example(line_id=line_id, label=[1.0 if actions else 0.0])
  return example + tail.SerializeToString()


def hash_request(request_id: str) -> int:
  """Returns 64 bits that decide whether a negative is kept, the same in every process."""
  digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"negatives").digest()
  return int.from_bytes(digest, "little")


def is_kept(request_id: str, rate: float) -> bool:
  """Returns whether a negative is kept at a rate between 0 and 1."""
  return rate >= 1 or hash_request(request_id) < rate * _HASH_RANGE


def slot_of(fid: int) -> int:
  """Returns the slot bits of a fid of the 15-bit layout."""
  return (fid >> _SLOT_SHIFT) & _SLOT_MASK


def _parse(kind, value: bytes, newest_ms: int):
  try:
    event = kind.FromString(value)
  except Exception as error:
    raise PoisonedMessageError(f"it is no {kind.DESCRIPTOR.name}: {error}") from error
  if not event.request_id:
    raise PoisonedMessageError("its request_id is empty")
  if not 0 < event.event_time_ms <= newest_ms:
    raise PoisonedMessageError(
      f"its event_time_ms is {event.event_time_ms}, want milliseconds from 1 to {newest_ms}"
    )
  return event
