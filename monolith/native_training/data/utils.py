"""Slots of features that have no feature list."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence

TOBENV = False
# Features that got the next free number because nothing else says their slot.
USED_FREATUE_NAMES: dict[str, int] = {}
NAME_TO_SLOT: dict[str, int] = {}

_SLOT_NAME = re.compile(r"^(?:fc_)?slot_(\d+)$")
_lock = threading.Lock()


def enable_tob_env() -> None:
  """Names unnamed slots `fc_slot_<n>` instead of `slot_<n>` from now on."""
  global TOBENV
  TOBENV = True


def get_slot_feature_name(slot: int) -> str:
  """Returns the feature name of an unnamed slot."""
  return f"fc_slot_{slot}" if TOBENV else f"slot_{slot}"


def get_slot_from_feature_name(name: str) -> int:
  """Returns the slot of a feature.

  It is the registered one, else the number in `slot_<n>` or `fc_slot_<n>`, else the next number
  of a counter of this process, which stays with the name.
  """
  slot = find_slot(name)
  if slot is not None:
    return slot
  with _lock:
    return USED_FREATUE_NAMES.setdefault(name, len(USED_FREATUE_NAMES) + 1)


def find_slot(name: str) -> int | None:
  """Returns the registered slot of `name` or the number in it, `None` if there is neither."""
  if name in NAME_TO_SLOT:
    return NAME_TO_SLOT[name]
  match = _SLOT_NAME.match(name)
  return int(match.group(1)) if match else None


def register_slots(slots: Sequence[int] | Mapping[str, int]) -> None:
  """Registers slots: a list gives them their usual names, a dict names them."""
  if isinstance(slots, Mapping):
    NAME_TO_SLOT.update(slots)
  else:
    NAME_TO_SLOT.update({get_slot_feature_name(slot): slot for slot in slots})
