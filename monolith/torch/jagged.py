"""Bags of ids of several features, in the shapes of TorchRec.

values  [ 4 | 7 9 |   | 5 ]      feature "user": bags [4], [7, 9]; feature "item": bags [], [5]
offsets [ 0   1   3 3   4 ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class JaggedTensor:
  """Ids of one feature, bag after bag: what a `KeyedJaggedTensor` has under a name.

  Args:
    values: ids `[n]`.
    offsets: where each bag begins, and the last one ends, `[batch + 1]`.
    weights: floats `[n]`, or `None`.
  """

  def __init__(
    self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
  ):
    self._values, self._offsets, self._weights = values, offsets, weights

  def values(self) -> torch.Tensor:
    """Returns all ids."""
    return self._values

  def offsets(self) -> torch.Tensor:
    """Returns where bags begin, and the last one ends."""
    return self._offsets

  def lengths(self) -> torch.Tensor:
    """Returns how many ids bags have."""
    return self._offsets.diff()

  def weights_or_none(self) -> torch.Tensor | None:
    """Returns a float for each id, or `None`."""
    return self._weights

  def weights(self) -> torch.Tensor:
    """Returns a float for each id.

    Raises:
      ValueError: there are none.
    """
    return _given(self._weights)

  def to_dense(self) -> list[torch.Tensor]:
    """Returns the ids of each bag."""
    return list(self._values.split(self.lengths().tolist()))


class KeyedJaggedTensor:
  """Ids of several features, bag after bag, feature after feature.

  Args:
    keys: names of the features.
    values: ids `[n]`.
    weights: floats `[n]`, or `None`.
    lengths: how many ids each bag has, `[features * batch]`; this or `offsets`.
    offsets: where each bag begins, and the last one ends, `[features * batch + 1]`.

  Raises:
    ValueError: the shapes do not fit together.
  """

  def __init__(
    self,
    keys: Sequence[str],
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
  ):
    if (lengths is None) == (offsets is None):
      raise ValueError("a KeyedJaggedTensor has lengths or offsets, one of them")
    if offsets is None:
      assert lengths is not None
      offsets = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0))
    offsets = offsets.reshape(-1)
    self._keys, self._values, self._weights = list(keys), values, weights
    self._offsets = offsets
    bags = len(offsets) - 1
    if bags < 0 or (bags % len(self._keys) if self._keys else bags):
      raise ValueError(f"there are {bags} bags for {len(self._keys)} features: {self._keys}")
    if weights is not None and weights.shape != values.shape:
      raise ValueError(f"weights has shape {tuple(weights.shape)}, ids {tuple(values.shape)}")

  @classmethod
  def from_lengths_sync(
    cls,
    keys: Sequence[str],
    values: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None = None,
  ) -> KeyedJaggedTensor:
    """Returns bags of the given lengths."""
    return cls(keys, values, weights, lengths=lengths)

  @classmethod
  def from_offsets_sync(
    cls,
    keys: Sequence[str],
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
  ) -> KeyedJaggedTensor:
    """Returns bags between the given offsets."""
    return cls(keys, values, weights, offsets=offsets)

  def keys(self) -> list[str]:
    """Returns the names of the features."""
    return self._keys

  def values(self) -> torch.Tensor:
    """Returns all ids."""
    return self._values

  def weights_or_none(self) -> torch.Tensor | None:
    """Returns a float for each id, or `None`."""
    return self._weights

  def weights(self) -> torch.Tensor:
    """Returns a float for each id.

    Raises:
      ValueError: there are none.
    """
    return _given(self._weights)

  def device(self) -> torch.device:
    """Returns where the ids are."""
    return self._values.device

  def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
    """Returns the same on a device."""
    return self._each(lambda one: one.to(device, non_blocking=non_blocking))

  def pin_memory(self) -> KeyedJaggedTensor:
    """Returns the same in memory from which a GPU copies without waiting."""
    return self._each(lambda one: one.pin_memory())

  def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KeyedJaggedTensor:
    weights = None if self._weights is None else change(self._weights)
    values, offsets = change(self._values), change(self._offsets)
    return KeyedJaggedTensor(self._keys, values, weights, offsets=offsets)

  def to_dict(self) -> dict[str, JaggedTensor]:
    """Returns the ids of each feature."""
    batch = self.stride()
    found = {}
    ends = self._offsets[:: max(1, batch)].tolist() if batch else [0] * (len(self._keys) + 1)
    for i, key in enumerate(self._keys):
      part = slice(ends[i], ends[i + 1])
      offsets = self._offsets[i * batch : (i + 1) * batch + 1] - ends[i]
      weights = None if self._weights is None else self._weights[part]
      found[key] = JaggedTensor(self._values[part], offsets, weights)
    return found

  def __getitem__(self, key: str) -> JaggedTensor:
    """Returns the ids of a feature."""
    return self.to_dict()[key]

  def offsets(self) -> torch.Tensor:
    """Returns where bags begin, and the last one ends."""
    return self._offsets

  def lengths(self) -> torch.Tensor:
    """Returns how many ids bags have."""
    return self._offsets.diff()

  def stride(self) -> int:
    """Returns the number of bags of a feature."""
    return (len(self._offsets) - 1) // max(1, len(self._keys))


class KeyedTensor:
  """Vectors of several features side by side.

  Args:
    keys: names of the features.
    length_per_key: how long the vectors of each are.
    values: `[batch, sum of lengths]`.
  """

  def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor):
    self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

  def keys(self) -> list[str]:
    """Returns the names of the features."""
    return self._keys

  def length_per_key(self) -> list[int]:
    """Returns how long the vectors of each feature are."""
    return self._lengths

  def values(self) -> torch.Tensor:
    """Returns all vectors, `[batch, sum of lengths]`."""
    return self._values

  def to_dict(self) -> dict[str, torch.Tensor]:
    """Returns the vectors of each feature, `[batch, dim]`."""
    return dict(zip(self._keys, self._values.split(self._lengths, 1)))

  def __getitem__(self, key: str) -> torch.Tensor:
    """Returns the vectors of a feature, `[batch, dim]`."""
    return self.to_dict()[key]

  @staticmethod
  def regroup(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
  ) -> list[torch.Tensor]:
    """Returns the vectors of each group of features side by side, `[batch, sum of lengths]`.

    Raises:
      KeyError: no tensor has a feature.
    """
    found: dict[str, torch.Tensor] = {}
    for one in keyed_tensors:
      found.update(one.to_dict())
    return [torch.cat([found[key] for key in group], 1) for group in groups]


def _given(weights: torch.Tensor | None) -> torch.Tensor:
  if weights is None:
    raise ValueError("there are no weights")
  return weights


class Bags(NamedTuple):
  """The bags of one feature.

  Attributes:
    ids: int64 `[n]`.
    offsets: int64 `[batch + 1]`, or `None`: there is one id in each bag.
    weights: floats `[n]`, or `None`.
  """

  ids: torch.Tensor
  offsets: torch.Tensor | None
  weights: torch.Tensor | None

  @property
  def batch(self) -> int:
    """The number of bags."""
    return len(self.ids) if self.offsets is None else len(self.offsets) - 1


def split(features: Any, wanted: Sequence[str]) -> dict[str, Bags]:
  """Returns the bags of features.

  Args:
    features: a `KeyedJaggedTensor`, ours or TorchRec's, or a mapping of names to ids `[batch]`,
      `[batch, n]`, a nested tensor of PyTorch, or a pair of ids and offsets.
    wanted: names of features.

  Raises:
    KeyError: a feature is missing.
    ValueError, TypeError: one has another shape, or another batch size than the others.
  """
  if isinstance(features, Mapping):
    missing = [name for name in wanted if name not in features]
    found = {name: _bags(name, features[name]) for name in wanted if name in features}
  elif not hasattr(features, "stride") or not hasattr(features, "weights_or_none"):
    raise TypeError(
      f"features is a {type(features).__name__}, want a KeyedJaggedTensor or a mapping of names"
    )
  else:
    names = list(features.keys())
    missing = [name for name in wanted if name not in names]
    found = {} if missing else _split_keyed(features, names, wanted)
  if missing:
    raise KeyError(f"features {missing} are missing, there are {sorted(features.keys())}")
  sizes = {name: bags.batch for name, bags in found.items()}
  if len(set(sizes.values())) > 1:
    raise ValueError(f"features have different batch sizes: {sizes}")
  return found


def check_offsets(offsets: Any, what: str) -> None:
  """Refuses what cannot be offsets, whatever they are.

  Args:
    offsets: where bags begin.
    what: what messages call them.

  Raises:
    TypeError: they are no tensor of integers.
    ValueError: they have another shape than `[n]`.
  """
  if not isinstance(offsets, torch.Tensor):
    raise TypeError(f"{what} are a {type(offsets).__name__}, want a tensor")
  if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype is torch.bool:
    raise TypeError(f"{what} have dtype {offsets.dtype}, want integers")
  if offsets.dim() != 1:
    raise ValueError(f"{what} have shape {tuple(offsets.shape)}, want one dimension")


def _split_keyed(features: Any, names: list[str], wanted: Sequence[str]) -> dict[str, Bags]:
  batch, offsets = features.stride(), features.offsets()
  ids, weights = features.values(), features.weights_or_none()
  check_offsets(offsets, "offsets")
  if ids.dim() != 1:
    raise ValueError(f"ids have shape {tuple(ids.shape)}, want one dimension")
  # One copy to the host for all features.
  ends = offsets[:: max(1, batch)].tolist() if batch else [0] * (len(names) + 1)
  if len(offsets) != batch * len(names) + 1:
    raise ValueError(
      f"there are {len(offsets)} offsets for {len(names)} features of {batch} bags: a stride for "
      "each key does not work"
    )
  if ends[-1] != len(ids) or ends[0] != 0:
    raise ValueError(
      f"offsets begin at {ends[0]} and end at {ends[-1]}, want 0 and {len(ids)}, the number of ids"
    )
  one_each = (
    offsets.device.type == "cpu"
    and len(ids) == batch * len(names)
    and bool((offsets == torch.arange(len(offsets), device="cpu")).all())
  )
  found = {}
  for name in wanted:
    i = names.index(name)
    begin, end = ends[i], ends[i + 1]
    own = None if one_each else offsets[i * batch : (i + 1) * batch + 1] - begin
    part = None if weights is None else weights[begin:end]
    found[name] = Bags(ids[begin:end], own, part)
  return found


def _bags(name: str, value: Any) -> Bags:
  if isinstance(value, tuple) and len(value) == 2:
    ids, offsets = value
    if not isinstance(ids, torch.Tensor):
      raise TypeError(f"ids of feature {name!r} are a {type(ids).__name__}, want a tensor")
    if ids.dim() != 1:
      raise ValueError(f"ids of feature {name!r} have shape {tuple(ids.shape)}, want [n]")
    check_offsets(offsets, f"offsets of feature {name!r}")
    return Bags(ids, offsets, None)
  if not isinstance(value, torch.Tensor):
    raise TypeError(f"feature {name!r} is a {type(value).__name__}, want a tensor of ids")
  if value.is_nested:
    if value.layout != torch.jagged:
      raise TypeError(f"feature {name!r} is nested without layout=torch.jagged")
    nested: Any = value
    if nested.lengths() is not None:
      # A narrowed one, whose bags have gaps between them.
      nested = nested.contiguous()
    return _bags(name, (nested.values(), nested.offsets()))
  if value.dim() == 1:
    return Bags(value, None, None)
  if value.dim() != 2:
    raise ValueError(f"feature {name!r} has shape {tuple(value.shape)}, want [batch] or [batch, n]")
  if value.shape[1] == 1:
    return Bags(value.reshape(-1), None, None)
  offsets = torch.arange(value.shape[0] + 1, device=value.device) * value.shape[1]
  return Bags(value.reshape(-1), offsets, None)
