"""Stops or skips gradients that are not finite, which would spoil their rows for good.

The environment variable `MONOLITH_BAD_GRADIENTS` chooses: `stop` (the default) fails the step,
`skip` leaves those rows alone in that step and logs a warning, `ignore` checks nothing.

The ops that write to tables check on every path, and name the table and its ids
(`runtime/ops/tables/bad_gradients.h`). Drivers call this module earlier, before gradients leave for
their servers, so that the message names the feature or layout and no row of the step is written.
They do not for tables on this process's GPU, whose kernels skip such rows and report them later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops

_BAD_GRADIENTS_ENV = "MONOLITH_BAD_GRADIENTS"


def policy() -> str:
  """Returns the policy for values that are not finite: `stop`, `skip` or `ignore`.

  Raises:
    ValueError: the environment variable has another value.
  """
  said = os.environ.get(_BAD_GRADIENTS_ENV, "stop")
  if said not in ("stop", "skip", "ignore"):
    raise ValueError(f"{_BAD_GRADIENTS_ENV} is {said!r}, want stop, skip or ignore")
  return said


def check_pooled_gradients(
  gradients: Sequence[tf.Tensor], names: Sequence[str], parts: Sequence[int]
) -> list[tf.Tensor]:
  """Applies the policy to gradients of pooled rows.

  Args:
    gradients: float32 `[examples, columns]` each.
    names: what columns belong to, in messages.
    parts: what `pooling.to_numbers` returned for these names.

  Raises:
    ValueError: the environment variable has another value.
  """
  said = policy()
  if said == "ignore" or not gradients:
    return list(gradients)
  with tf.device("/device:CPU:0"):
    return gen_monolith_ops.monolith_check_pooled_gradients(
      gradients, names=list(names), parts=list(parts), skip=said == "skip"
    )


def check_gradients(names: Sequence[str], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Applies the policy to values that are not finite.

  Args:
    names: the name of each gradient in messages.
    gradients: as many float32 tensors, whose last dimension runs along a row.

  Raises:
    ValueError: the environment variable has another value, or the numbers of names and gradients
      differ.
  """
  if len(names) != len(gradients):
    raise ValueError(f"there are {len(gradients)} gradients, want {len(names)} for {list(names)}")
  said = policy()
  gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
  if said == "ignore" or not gradients:
    return gradients
  with tf.device("/device:CPU:0"):
    return gen_monolith_ops.monolith_check_gradients(
      gradients, names=list(names), skip=said == "skip"
    )
