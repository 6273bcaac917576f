"""One vector for each bag of vectors."""

from __future__ import annotations

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
  if bags.weights is not None and mode != "sum":
    raise ValueError(f"weights of ids work with pooling 'sum', not {mode!r}")
  if bags.offsets is None:
    return rows if bags.weights is None else rows * bags.weights.to(rows.dtype)[:, None]
  _check_offsets(bags.offsets, len(rows))
  offsets = bags.offsets.to(device=rows.device, dtype=torch.int64)
  return _Pool.apply(rows, offsets, bags.weights, mode)


def _check_offsets(offsets: torch.Tensor, n: int) -> None:
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
    pooled, _, _, largest = torch.embedding_bag(
      rows.detach(), places, offsets, False, MODES.index(mode), False, factors, True
    )
    largest = largest[:batch] if mode == "max" else None
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
