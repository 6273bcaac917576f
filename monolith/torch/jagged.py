"""The bags of features that a collection is asked for, from whatever they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


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
      `[batch, n]`, a nested tensor of PyTorch, a `JaggedTensor`, or a pair of ids and offsets.
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
  if hasattr(value, "weights_or_none") and not hasattr(value, "keys"):
    weights = value.weights_or_none()
    return _bags(name, (value.values(), value.offsets()))._replace(weights=weights)
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
