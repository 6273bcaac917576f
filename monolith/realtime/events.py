"""Messages that the stages exchange: impressions and actions in, samples out.

A sample is a serialized `Example`: the features of the impression, `label` (1 if there was an
action, else 0) and a `LineId` with `req_time` (seconds), `actions`, `sample_rate` and, in
`req_id`, the sample's id: `<partition>:<offset>:<kind>`, with partition and offset of the
impression. It is the same however often the joiner reads the impression, so a reader can drop what
it has seen. `sample_rate` is the share of negatives that is kept, in samples with an action, too:
`layers/logit_correction.py` takes it off the logits of both.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from idl.matrix.proto.example_pb2 import Example
from monolith.realtime.events_pb2 import Action, Impression

# Kinds of samples: left at the first action, at the end of the window without one, or at the end of
# the window with all actions.
POSITIVE, NEGATIVE, WINDOW = "p", "n", "w"
KINDS = (POSITIVE, NEGATIVE, WINDOW)

# Tags of the fields that a sample gets; messages of protobuf would take most of the joiner's time.
_LINE_ID, _LABEL = b"\xa2\x06", b"\xaa\x06\x04"  # of Example
_REQ_TIME, _ACTIONS, _SAMPLE_RATE, _REQ_ID = b"\x18", b"\x32", b"\xdd\x01", b"\xd2\xb8\x02"
_FLOAT = struct.Struct("<f")
_LABELS = (_LABEL + _FLOAT.pack(0), _LABEL + _FLOAT.pack(1))
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
  line = b"".join(
    (
      _REQ_TIME,
      _varint(event_time_ms // 1000),
      _packed_actions(actions) if actions else b"",
      _SAMPLE_RATE,
      _FLOAT.pack(sample_rate),
      _REQ_ID,
      _varint(len(identity)),
      identity.encode(),
    )
  )
  return b"".join((example, _LINE_ID, _varint(len(line)), line, _LABELS[bool(actions)]))


def _packed_actions(actions: Sequence[int]) -> bytes:
  # Negative numbers have 64 bits on the wire.
  packed = b"".join(_varint(action & 0xFFFF_FFFF_FFFF_FFFF) for action in actions)
  return _ACTIONS + _varint(len(packed)) + packed


def _varint(value: int) -> bytes:
  parts = bytearray()
  while value > 0x7F:
    parts.append(value & 0x7F | 0x80)
    value >>= 7
  parts.append(value)
  return bytes(parts)


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


def _parse(kind: Any, value: bytes, newest_ms: int) -> Any:
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
