"""`VarianceScaling`: an initializer that returns numpy arrays.

Differences from ByteDance's Monolith: the numbers come from a private generator, so that the
caller's global numpy seed survives, and `dtype` is honoured by every distribution.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

_MODES = ("fan_in", "fan_out", "fan_avg")
_DISTRIBUTIONS = ("truncated_normal", "untruncated_normal", "uniform")
# Standard deviation of a standard normal cut at +-2.
_TRUNCATED_STDDEV = 0.87962566103423978
_NORMAL = statistics.NormalDist()


class VarianceScaling:
  """Draws a weight array whose scale suits its shape.

  With `n` the fan in, the fan out or their mean, and `s = scale / max(1, n)`:
  `uniform` draws from `U(-sqrt(3 s), sqrt(3 s))`, `untruncated_normal` from `N(0, s)`, and
  `truncated_normal` from a normal that has variance `s` after it was cut at two sigmas.
  """

  def __init__(
    self,
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "truncated_normal",
    seed: Optional[int] = None,
  ):
    """Args:
      scale: positive.
      mode: `fan_in`, `fan_out` or `fan_avg`, in any case.
      distribution: `truncated_normal`, `untruncated_normal` or `uniform`, in any case.
      seed: with a seed, every call draws the same numbers.

    Raises:
      ValueError: with two arguments, a text and the offending value.
    """
    if scale <= 0.0:
      raise ValueError("`scale` must be a positive float. Got:", scale)
    mode = mode.lower()
    if mode not in _MODES:
      raise ValueError(f"Invalid `mode` argument, want one of {_MODES}. Got:", mode)
    distribution = distribution.lower()
    if distribution not in _DISTRIBUTIONS:
      raise ValueError(
        f"Invalid `distribution` argument, want one of {_DISTRIBUTIONS}. Got:", distribution
      )
    self.scale = scale
    self.mode = mode
    self.distribution = distribution
    self.seed = seed

  def __call__(self, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Returns an array of the given shape and dtype (numpy or TensorFlow)."""
    dtype = getattr(dtype, "as_numpy_dtype", dtype)
    shape = tuple(int(size) for size in shape)
    fan_in, fan_out = _compute_fans(shape)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}[self.mode]
    variance = self.scale / max(1.0, fan)

    generator = np.random.RandomState(self.seed)
    if self.distribution == "uniform":
      limit = math.sqrt(3.0 * variance)
      values = generator.uniform(-limit, limit, shape)
    elif self.distribution == "untruncated_normal":
      values = generator.normal(0.0, math.sqrt(variance), shape)
    else:
      stddev = math.sqrt(variance) / _TRUNCATED_STDDEV
      values = stddev * _truncated_normal(generator, shape)
    return np.asarray(values).astype(dtype)

  def get_config(self) -> dict[str, Any]:
    """Returns the constructor's arguments."""
    return {
      "scale": self.scale,
      "mode": self.mode,
      "distribution": self.distribution,
      "seed": self.seed,
    }


def _truncated_normal(generator: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
  """Draws from a standard normal cut at +-2 by inverting its distribution function.

  One uniform number makes one value, so the stream is that of `scipy.stats.truncnorm`.
  """
  low, high = _NORMAL.cdf(-2.0), _NORMAL.cdf(2.0)
  quantiles = low + generator.uniform(size=shape) * (high - low)
  return np.asarray(np.frompyfunc(_NORMAL.inv_cdf, 1, 1)(quantiles), np.float64)


def _compute_fans(shape: Sequence[int], data_format: str = "channels_last") -> tuple[float, float]:
  """Returns fan in and fan out of a weight array.

  Args:
    shape: 2-D for a dense layer, 3-D to 5-D for a convolution.
    data_format: `channels_last` or `channels_first`, for convolutions.

  Raises:
    ValueError: unknown data format.
  """
  if len(shape) == 2:
    return shape[0], shape[1]
  if len(shape) in (3, 4, 5):
    if data_format == "channels_first":
      field = math.prod(shape[2:])
      return shape[1] * field, shape[0] * field
    if data_format == "channels_last":
      field = math.prod(shape[:-2])
      return shape[-2] * field, shape[-1] * field
    raise ValueError(f"Invalid data_format: {data_format}")
  fan = math.sqrt(math.prod(shape))
  return fan, fan
