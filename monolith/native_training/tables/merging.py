"""Decides which slots share a table, and maps their ids and values to those of the tables.

slots  a: [1, 2]  b: [3]  c: [1]      tables  s: [1, 2, 1]  (a and c)  t: [3]  (b)
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import tensorflow as tf

from monolith.native_training import entry, hash_table_utils

SlotToConfig = Mapping[str, entry.HashTableConfigInstance]
_Value = TypeVar("_Value")

# Slots of this form were once called without the leading `fc_`; checkpoints may still hold them.
_RENAMED_SLOT = re.compile(r"^fc_slot_[0-9]*$")


def known_slots(slots: Mapping[str, _Value], tables: Collection[str]) -> dict[str, _Value]:
  """Returns the slots that have a table; native groups ignore the others."""
  return {slot: value for slot, value in slots.items() if slot in tables}


def merged_name(slots: Iterable[str]) -> str:
  """Returns the name of the table that holds `slots`; it is part of checkpoint file names."""
  return hashlib.md5(",".join(slots).encode()).hexdigest()


def merge_slots(
  slot_to_config: SlotToConfig,
) -> tuple[dict[str, entry.HashTableConfigInstance], dict[str, str]]:
  """Groups slots of equal configuration.

  Returns:
    `(merged name -> configuration, slot -> merged name)`. The configuration is a copy of that of
    the group's first slot; its `extra_restore_names` also list the name the group had when its
    slots were called without `fc_`.
  """
  groups: dict[str, list[str]] = {}
  for slot in sorted(slot_to_config):
    groups.setdefault(str(slot_to_config[slot]), []).append(slot)
  merged_to_config: dict[str, entry.HashTableConfigInstance] = {}
  slot_to_merged: dict[str, str] = {}
  for slots in groups.values():
    name = merged_name(slots)
    config = copy.copy(slot_to_config[slots[0]])
    old_name = merged_name([s[len("fc_") :] if _RENAMED_SLOT.match(s) else s for s in slots])
    # The text of a configuration is enough for a caller that only wants the grouping.
    if not isinstance(config, str):
      config.extra_restore_names = list(config.extra_restore_names)
      if old_name != name:
        config.extra_restore_names.append(old_name)
    merged_to_config[name] = config
    slot_to_merged.update({slot: name for slot in slots})
  return merged_to_config, slot_to_merged


@dataclasses.dataclass(frozen=True)
class SlotMerging:
  """Says which slots share which table.

  Attributes:
    merged_to_config: table -> its configuration.
    slot_to_merged: slot -> its table.
  """

  merged_to_config: dict[str, entry.HashTableConfigInstance]
  slot_to_merged: dict[str, str]

  @classmethod
  def by_config(cls, slot_to_config: SlotToConfig) -> SlotMerging:
    """Puts slots of equal configuration into one table."""
    return cls(*merge_slots(slot_to_config))

  @classmethod
  def by_name(cls, slot_to_config: SlotToConfig, shared_tables: Mapping[str, str]) -> SlotMerging:
    """Puts the slots that `shared_tables` names into the table it says, the others apart."""
    slot_to_merged = {slot: shared_tables.get(slot, slot) for slot in slot_to_config}
    merged_to_config = {
      slot_to_merged[slot]: slot_to_config[slot] for slot in sorted(slot_to_config)
    }
    return cls(merged_to_config, slot_to_merged)

  def group(self, slots: Iterable[str]) -> dict[str, list[str]]:
    """Returns table -> its slots among `slots`, sorted."""
    groups: dict[str, list[str]] = {}
    for slot in sorted(slots):
      groups.setdefault(self.slot_to_merged[slot], []).append(slot)
    return groups

  def merge(
    self, slot_to_tensor: Mapping[str, tf.Tensor], dtype: tf.DType | None = None
  ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Concatenates the tensors of each table's slots.

    Returns:
      `(table -> the tensors one after the other, table -> their lengths)`.
    """
    groups = self.group(slot_to_tensor)
    tensors = {slot: _as_rows(tensor, dtype) for slot, tensor in slot_to_tensor.items()}
    merged = {name: tf.concat([tensors[s] for s in slots], 0) for name, slots in groups.items()}
    return merged, self.sizes(tensors)

  def sizes(self, slot_to_tensor: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns table -> the lengths of its slots' tensors, int32, sorted by slot."""
    return {
      name: tf.stack([tf.shape(_as_rows(slot_to_tensor[slot]))[0] for slot in slots])
      for name, slots in self.group(slot_to_tensor).items()
    }

  def split(
    self,
    slots: Collection[str],
    merged: Mapping[str, tf.Tensor],
    merged_to_sizes: Mapping[str, tf.Tensor],
  ) -> dict[str, tf.Tensor]:
    """Undoes `merge`: returns slot -> its part, given the lengths that `merge` returned."""
    parts: dict[str, tf.Tensor] = {}
    for name, group in self.group(slots).items():
      with hash_table_utils.on_device_of(merged[name]):
        split = tf.split(merged[name], merged_to_sizes[name], num=len(group))
      parts.update(zip(group, split))
    return {slot: parts[slot] for slot in slots}


def _as_rows(tensor: tf.Tensor, dtype: tf.DType | None = None) -> tf.Tensor:
  # One value of one dimension may be a scalar, which cannot be concatenated.
  tensor = tf.convert_to_tensor(tensor, dtype)
  return tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor
