"""Features and vectors side by side, with the names and calls of TorchRec.

values  [ 4 | 7 9 |   | 5 ]      feature "user": bags [4], [7, 9]; feature "item": bags [], [5]
offsets [ 0   1   3 3   4 ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class JaggedTensor:
  """Ids of one feature, or their vectors, bag after bag.

  Args:
    values: ids `[n]`, or vectors `[n, dim]`.
    weights: floats `[n]`, or `None`.
    lengths: how many values each bag has, `[batch]`; this or `offsets`.
    offsets: where each bag begins, and the last one ends, `[batch + 1]`.

  Raises:
    ValueError: there are neither lengths nor offsets, or both.
  """

  def __init__(
    self,
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
  ):
    self._values, self._weights = values, weights
    self._offsets = _offsets("JaggedTensor", lengths, offsets)

  @staticmethod
  def from_dense(
    values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None
  ) -> JaggedTensor:
    """Returns a tensor for each bag as one."""
    joined = torch.cat(list(values))
    lengths = torch.tensor([len(one) for one in values], device=joined.device)
    return JaggedTensor(joined, None if weights is None else torch.cat(list(weights)), lengths)

  @staticmethod
  def from_dense_lengths(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
  ) -> JaggedTensor:
    """Returns the first `lengths` values of each row of `[batch, n]`."""
    is_there = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    return JaggedTensor(values[is_there], None if weights is None else weights[is_there], lengths)

  def values(self) -> torch.Tensor:
    """Returns all values."""
    return self._values

  def offsets(self) -> torch.Tensor:
    """Returns where bags begin, and the last one ends."""
    return self._offsets

  def lengths(self) -> torch.Tensor:
    """Returns how many values bags have."""
    return self._offsets.diff()

  def weights_or_none(self) -> torch.Tensor | None:
    """Returns a float for each value, or `None`."""
    return self._weights

  def weights(self) -> torch.Tensor:
    """Returns a float for each value.

    Raises:
      ValueError: there are none.
    """
    return _given(self._weights)

  def device(self) -> torch.device:
    """Returns where the values are."""
    return self._values.device

  def to(self, device: Any, non_blocking: bool = False) -> JaggedTensor:
    """Returns the same on a device."""
    return JaggedTensor(*_each(self, lambda one: one.to(device, non_blocking=non_blocking)))

  def to_dense(self) -> list[torch.Tensor]:
    """Returns the values of each bag."""
    return list(self._values.split(self.lengths().tolist()))

  def to_dense_weights(self) -> list[torch.Tensor] | None:
    """Returns the weights of each bag, or `None`."""
    return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

  def to_padded_dense(
    self, desired_length: int | None = None, padding_value: float = 0.0
  ) -> torch.Tensor:
    """Returns values as `[batch, length]`, of vectors as `[batch, length, dim]`.

    Args:
      desired_length: of each bag: longer ones are cut. `None`: that of the longest.
      padding_value: what there is where a bag ends before.
    """
    return self._pad(self._values, desired_length, padding_value)

  def to_padded_dense_weights(
    self, desired_length: int | None = None, padding_value: float = 0.0
  ) -> torch.Tensor | None:
    """Returns weights as `[batch, length]`, or `None`."""
    return (
      None if self._weights is None else self._pad(self._weights, desired_length, padding_value)
    )

  def _pad(self, values: torch.Tensor, length: int | None, padding: float) -> torch.Tensor:
    lengths = self.lengths()
    if length is None:
      length = int(lengths.max()) if len(lengths) else 0
    bags = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    places = torch.arange(len(values), device=values.device) - self._offsets[bags]
    fits = places < length
    padded = values.new_full((len(lengths), length, *values.shape[1:]), padding)
    return padded.index_put((bags[fits], places[fits]), values[fits])

  def record_stream(self, stream: Any) -> None:
    """Keeps memory until a stream of a GPU has done with it."""
    _record(self, stream)

  def __repr__(self) -> str:
    return f"JaggedTensor({self.to_dense()})"


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
    offsets = _offsets("KeyedJaggedTensor", lengths, offsets)
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

  @classmethod
  def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """Returns features as one.

    Raises:
      ValueError: they have different numbers of bags, or only some of them have weights.
    """
    sizes = {key: len(one.offsets()) - 1 for key, one in jt_dict.items()}
    if len(set(sizes.values())) > 1:
      raise ValueError(f"features have different batch sizes: {sizes}")
    return cls._join(list(jt_dict), list(jt_dict.values()))

  @classmethod
  def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Returns the features of all, one after another.

    Raises:
      ValueError: they have different numbers of bags, or only some of them have weights.
    """
    sizes = [one.stride() for one in kjt_list]
    if len(set(sizes)) > 1:
      raise ValueError(f"features have different batch sizes: {sizes}")
    return cls._join([key for one in kjt_list for key in one.keys()], kjt_list)

  @classmethod
  def _join(cls, keys: Sequence[str], parts: Sequence[Any]) -> KeyedJaggedTensor:
    if not parts:
      return cls.empty()
    weights = [one.weights_or_none() for one in parts]
    given = [one for one in weights if one is not None]
    if given and len(given) < len(weights):
      raise ValueError(f"some of the features {list(keys)} have weights, others have none")
    return cls(
      keys,
      torch.cat([one.values() for one in parts]),
      torch.cat(given) if given else None,
      lengths=torch.cat([one.lengths() for one in parts]),
    )

  @classmethod
  def empty(
    cls,
    is_weighted: bool = False,
    device: Any = None,
    values_dtype: torch.dtype = torch.int64,
    weights_dtype: torch.dtype = torch.float32,
    lengths_dtype: torch.dtype = torch.int64,
  ) -> KeyedJaggedTensor:
    """Returns no features."""
    values = torch.empty(0, dtype=values_dtype, device=device)
    weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
    return cls([], values, weights, lengths=torch.empty(0, dtype=lengths_dtype, device=device))

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

  def offsets(self) -> torch.Tensor:
    """Returns where bags begin, and the last one ends."""
    return self._offsets

  def lengths(self) -> torch.Tensor:
    """Returns how many ids bags have."""
    return self._offsets.diff()

  def stride(self) -> int:
    """Returns the number of bags of a feature."""
    return (len(self._offsets) - 1) // max(1, len(self._keys))

  def stride_per_key(self) -> list[int]:
    """Returns the number of bags of each feature, which is the same for all."""
    return [self.stride()] * len(self._keys)

  def offset_per_key(self) -> list[int]:
    """Returns where features begin among the ids, and the last one ends. Waits for a GPU."""
    batch = self.stride()
    return self._offsets[::batch].tolist() if batch else [0] * (len(self._keys) + 1)

  def length_per_key(self) -> list[int]:
    """Returns how many ids features have. Waits for a GPU."""
    ends = self.offset_per_key()
    return [end - begin for begin, end in zip(ends, ends[1:])]

  def to_dict(self) -> dict[str, JaggedTensor]:
    """Returns the ids of each feature."""
    return dict(zip(self._keys, self._parts()))

  def __getitem__(self, key: str) -> JaggedTensor:
    """Returns the ids of a feature."""
    return self.to_dict()[key]

  def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Returns the first features, those after them, and so on.

    Args:
      segments: how many features each has, together all.

    Raises:
      ValueError: that is another number of features.
    """
    if sum(segments) != len(self._keys) or any(one < 0 for one in segments):
      raise ValueError(f"segments are {list(segments)}, want {len(self._keys)} features together")
    ends, batch = self.offset_per_key(), self.stride()
    found, first = [], 0
    for count in segments:
      last = first + count
      ids = slice(ends[first], ends[last])
      offsets = self._offsets[first * batch : last * batch + 1] - ends[first]
      weights = None if self._weights is None else self._weights[ids]
      found.append(
        KeyedJaggedTensor(self._keys[first:last], self._values[ids], weights, offsets=offsets)
      )
      first = last
    return found

  def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
    """Returns features in another order.

    Args:
      indices: the number of each feature to return.
    """
    parts = self._parts()
    return self._join([self._keys[i] for i in indices], [parts[i] for i in indices])

  def _parts(self) -> list[JaggedTensor]:
    ends, batch = self.offset_per_key(), self.stride()
    parts = []
    for i, (begin, end) in enumerate(zip(ends, ends[1:])):
      offsets = self._offsets[i * batch : (i + 1) * batch + 1] - begin
      weights = None if self._weights is None else self._weights[begin:end]
      parts.append(JaggedTensor(self._values[begin:end], weights, offsets=offsets))
    return parts

  def device(self) -> torch.device:
    """Returns where the ids are."""
    return self._values.device

  def to(self, device: Any, non_blocking: bool = False) -> KeyedJaggedTensor:
    """Returns the same on a device."""
    changed = _each(self, lambda one: one.to(device, non_blocking=non_blocking))
    return KeyedJaggedTensor(self._keys, *changed)

  def pin_memory(self) -> KeyedJaggedTensor:
    """Returns the same in memory from which a GPU copies without waiting."""
    return KeyedJaggedTensor(self._keys, *_each(self, lambda one: one.pin_memory()))

  def record_stream(self, stream: Any) -> None:
    """Keeps memory until a stream of a GPU has done with it."""
    _record(self, stream)

  def __repr__(self) -> str:
    return f"KeyedJaggedTensor({self.to_dict()})"


class KeyedTensor:
  """Vectors of several features side by side.

  Args:
    keys: names of the features.
    length_per_key: how long the vectors of each are.
    values: `[batch, sum of lengths]`.
  """

  def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: torch.Tensor):
    self._keys, self._lengths, self._values = list(keys), list(length_per_key), values

  @staticmethod
  def from_tensor_list(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> KeyedTensor:
    """Returns the vectors of each feature, `[batch, length]`, side by side."""
    return KeyedTensor(keys, [one.shape[1] for one in tensors], torch.cat(list(tensors), 1))

  def keys(self) -> list[str]:
    """Returns the names of the features."""
    return self._keys

  def key_dim(self) -> int:
    """Returns in which dimension features are side by side: 1."""
    return 1

  def length_per_key(self) -> list[int]:
    """Returns how long the vectors of each feature are."""
    return self._lengths

  def offset_per_key(self) -> list[int]:
    """Returns where the vectors of each feature begin, and the last ones end."""
    return [sum(self._lengths[:i]) for i in range(len(self._lengths) + 1)]

  def _key_indices(self) -> dict[str, int]:
    """Returns the number of each feature, for which TorchRec's own `regroup` asks."""
    return {key: i for i, key in enumerate(self._keys)}

  def values(self) -> torch.Tensor:
    """Returns all vectors, `[batch, sum of lengths]`."""
    return self._values

  def device(self) -> torch.device:
    """Returns where the vectors are."""
    return self._values.device

  def to(self, device: Any, non_blocking: bool = False) -> KeyedTensor:
    """Returns the same on a device."""
    return KeyedTensor(
      self._keys, self._lengths, self._values.to(device, non_blocking=non_blocking)
    )

  def record_stream(self, stream: Any) -> None:
    """Keeps memory until a stream of a GPU has done with it."""
    self._values.record_stream(stream)

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

  @staticmethod
  def regroup_as_dict(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
  ) -> dict[str, torch.Tensor]:
    """Returns the same, each group under a name.

    Raises:
      KeyError: no tensor has a feature.
      ValueError: there is another number of names.
    """
    if len(groups) != len(keys):
      raise ValueError(f"there are {len(keys)} keys for {len(groups)} groups")
    return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups)))

  def __repr__(self) -> str:
    return f"KeyedTensor({self.to_dict()})"


def _offsets(what: str, lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> torch.Tensor:
  if (lengths is None) == (offsets is None):
    raise ValueError(f"a {what} has lengths or offsets, one of them")
  if offsets is None:
    assert lengths is not None
    offsets = torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0))
  return offsets.reshape(-1)


def _each(
  bags: JaggedTensor | KeyedJaggedTensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor]:
  """Returns changed values, weights, no lengths, and changed offsets."""
  weights = bags.weights_or_none()
  changed = None if weights is None else change(weights)
  return change(bags.values()), changed, None, change(bags.offsets())


def _record(bags: JaggedTensor | KeyedJaggedTensor, stream: Any) -> None:
  for one in (bags.values(), bags.weights_or_none(), bags.offsets()):
    if one is not None:
      one.record_stream(stream)


def _given(weights: torch.Tensor | None) -> torch.Tensor:
  if weights is None:
    raise ValueError("there are no weights")
  return weights
