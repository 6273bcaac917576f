"""One vector for each bag of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monolith.torch import jagged

# In the order of their numbers in PyTorch.
MODES = ("sum", "mean", "max")


def check_mode(mode: Any) -> str:
  """Returns a way of pooling, `sum`, `mean` or `max`; TorchRec's `PoolingType` is one, too.

  Raises:
    ValueError: it is none.
  """
  text = str(getattr(mode, "value", mode)).lower()
  if text not in MODES:
    raise ValueError(f"pooling is {mode!r}, want one of {list(MODES)}")
  return text


def pool(rows: torch.Tensor, bags: jagged.Bags, mode: str) -> torch.Tensor:
  """Returns the sum, mean or maximum of each bag's vectors; zeros for an empty bag.

  Args:
    rows: float32 `[n, dim]`, the vectors of `bags.ids`.
    bags: with offsets within `[0, n]` that never decrease.
    mode: one of `MODES`.

  Returns:
    float32 `[batch, dim]`.

  Raises:
    ValueError: there are weights, and the mode is not `sum`; or offsets do not fit.
  """
  _check_weights(bags, mode)
  if bags.offsets is not None:
    check_rising(bags.offsets, len(rows))
  return _pool(rows, bags.offsets, bags.weights, mode)


def pool_many(rows: torch.Tensor, bags: Sequence[jagged.Bags], mode: str) -> torch.Tensor:
  """Does what `pool` does for several features, in as few operations as for one.

  Args:
    rows: float32 `[n, dim]`, the vectors of the ids of all `bags`, feature after feature.
    bags: of as many examples each; all have weights, or none.
    mode: one of `MODES`.

  Returns:
    float32 `[features, batch, dim]`.

  Raises:
    ValueError: as `pool`.
  """
  for one in bags:
    _check_weights(one, mode)
    if one.offsets is not None:
      check_rising(one.offsets, len(one.ids))
  offsets = None
  if any(one.offsets is not None for one in bags):
    offsets = _join_offsets(bags, rows.device)
  weights = [one.weights for one in bags if one.weights is not None]
  pooled = _pool(rows, offsets, torch.cat(weights) if weights else None, mode)
  return pooled.view(len(bags), bags[0].batch, rows.shape[1])


def _pool(
  rows: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None, mode: str
) -> torch.Tensor:
  if offsets is None:
    return rows if weights is None else rows * weights.to(rows.dtype)[:, None]
  return _Pool.apply(rows, offsets.to(device=rows.device, dtype=torch.int64), weights, mode)


def _join_offsets(bags: Sequence[jagged.Bags], device: torch.device) -> torch.Tensor:
  """Returns where each bag of each feature begins among the ids of all, and the last one ends."""
  ends = [0]
  for one in bags:
    ends.append(ends[-1] + len(one.ids))
  places = torch.tensor(ends, device="cpu")
  if device.type == "cuda":
    # From pageable memory, a copy would wait for the GPU.
    places = places.pin_memory().to(device, non_blocking=True)
  one_each = torch.arange(bags[0].batch + 1, device=device)
  offsets = torch.stack(
    [
      one_each if one.offsets is None else one.offsets.to(device=device, dtype=torch.int64)
      for one in bags
    ]
  )
  begins = offsets[:, :-1] + places[:-1, None]
  return torch.cat([begins.reshape(-1), places[-1:]])


def _check_weights(bags: jagged.Bags, mode: str) -> None:
  if bags.weights is not None and mode != "sum":
    raise ValueError(f"weights of ids work with pooling 'sum', not {mode!r}")


def check_rising(offsets: torch.Tensor, n: int) -> None:
  """Refuses offsets that do not fit; on a GPU, where asking takes long, autograd does."""
  if offsets.device.type != "cpu":
    return
  if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != n or bool((offsets.diff() < 0).any()):
    raise ValueError(
      f"offsets are {offsets.tolist()[:8]}..., want them to rise from 0 to {n}, the number of ids"
    )


class _Pool(torch.autograd.Function):
  """Sums, means and maxima; the way back gives vectors the gradient of their bag."""

  @staticmethod
  def forward(ctx: Any, rows: torch.Tensor, offsets: Any, weights: Any, mode: str) -> torch.Tensor:
    places = torch.arange(len(rows), device=rows.device)
    factors = None if weights is None else weights.detach().to(rows)
    ctx.mode, ctx.weighted, ctx.num_rows = mode, weights is not None, len(rows)
    batch = len(offsets) - 1
    if not len(rows):
      ctx.save_for_backward(offsets, factors, rows if ctx.weighted else None, None)
      return rows.new_zeros(batch, rows.shape[1])
    # With which of its vectors each element of a bag is the maximum.
    pooled, _, _, places_of_largest = torch.embedding_bag(
      rows.detach(), places, offsets, False, MODES.index(mode), False, factors, True
    )
    largest = places_of_largest[:batch] if mode == "max" else None
    ctx.save_for_backward(offsets, factors, rows if ctx.weighted else None, largest)
    return pooled[:batch]

  @staticmethod
  @torch.autograd.function.once_differentiable
  def backward(ctx: Any, upstream: torch.Tensor) -> Any:
    offsets, factors, rows, largest = ctx.saved_tensors
    lengths = offsets.diff()
    if ctx.mode == "max":
      each = upstream.new_zeros(ctx.num_rows, upstream.shape[1])
      if largest is None:
        return each, None, None, None
      filled = torch.where((lengths > 0)[:, None], upstream, 0.0)
      return each.scatter_add_(0, largest.clamp(min=0), filled), None, None, None
    if ctx.mode == "mean":
      upstream = upstream / lengths.clamp(min=1)[:, None]
    each = upstream.repeat_interleave(lengths, 0, output_size=ctx.num_rows)
    if not ctx.weighted:
      return each, None, None, None
    of_weights = (each * rows).sum(1) if ctx.needs_input_grad[2] else None
    return each * factors[:, None], None, of_weights, None
