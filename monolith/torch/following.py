"""Maps an optimizer of PyTorch to the one that does the same to the rows of a table.

  followed = following.follow(torch.optim.Adam(parameters), group)
  followed.optimizer                              # Optimizer("adam", decay_by_step=True, ...)

A subclass with a `step` of its own is another optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from monolith.table import optimizers

_REMEDY = "give the table one of its own, such as Embedding(16, optimizer='adagrad')"
# The least first value of an accumulator, as a step divides by its root.
_LEAST_ACCUMULATOR = 1e-20
# PyTorch's default, too little to be missed.
_ADAGRAD_EPSILON = 1e-10


@dataclasses.dataclass(frozen=True)
class Followed:
  """The optimizer of a table that follows one of PyTorch.

  Attributes:
    optimizer: what runs on rows; the learning rate is that of the moment.
    left_out: settings that do not reach rows, such as `weight_decay=0.01`.
  """

  optimizer: optimizers.Optimizer
  left_out: tuple[str, ...] = ()


def follow(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Followed:
  """Returns the table's counterpart of an optimizer.

  Args:
    optimizer: of PyTorch.
    group: the entry of its `param_groups` with the table's parameter.

  Raises:
    ValueError: there is no such thing; the message says what to do instead.
  """
  kind = _kind(optimizer)
  if kind not in _KINDS:
    raise ValueError(
      f"Rows of a table cannot follow the optimizer {type(optimizer).__name__}: {_REMEDY}"
    )
  _refuse(optimizer, group, "maximize", False)
  numbers = _KINDS[kind](optimizer, group)
  left_out = []
  if group.get("weight_decay"):
    left_out.append(f"weight_decay={group['weight_decay']}")
  if kind == "Adagrad" and group["eps"] > _ADAGRAD_EPSILON:
    left_out.append(f"eps={group['eps']}")
  rate = float(group["lr"])
  return Followed(optimizers.Optimizer(learning_rate=rate, **numbers), tuple(left_out))


def steps_taken(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
  """Returns how many steps an optimizer of PyTorch counts for a parameter, 0 if it does not."""
  return int(optimizer.state.get(parameter, {}).get("step", 0))


def _kind(optimizer: torch.optim.Optimizer) -> str:
  """Returns the name of PyTorch's class whose rule the optimizer runs, or an empty string."""
  for cls in type(optimizer).__mro__:
    if "step" in vars(cls):
      return cls.__name__ if cls.__module__.partition(".")[0] == "torch" else ""
  return ""


def _refuse(optimizer: Any, group: Mapping[str, Any], name: str, allowed: Any) -> None:
  value = group.get(name, allowed)
  if value != allowed:
    raise ValueError(
      f"Rows of a table cannot follow {type(optimizer).__name__} with {name}={value}: {_REMEDY}"
    )


def _sgd(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
  _refuse(optimizer, group, "dampening", 0)
  if not group["momentum"]:
    return {"kind": "sgd"}
  return {
    "kind": "momentum",
    "momentum": group["momentum"],
    "use_nesterov": bool(group["nesterov"]),
  }


def _adagrad(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
  _refuse(optimizer, group, "lr_decay", 0)
  first = max(group["initial_accumulator_value"], _LEAST_ACCUMULATOR)
  return {"kind": "adagrad", "initial_accumulator_value": first}


def _adadelta(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
  del optimizer
  return {"kind": "adadelta", "averaging_ratio": group["rho"], "epsilon": group["eps"]}


def _adam(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
  del optimizer
  beta1, beta2 = map(float, group["betas"])
  numbers = {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}
  if group.get("amsgrad"):
    return {"kind": "amsgrad", **numbers}
  return {"kind": "adam", "decay_by_step": True, **numbers}


_KINDS: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
  "Adadelta": _adadelta,
  "Adagrad": _adagrad,
  "Adam": _adam,
  "AdamW": _adam,
  "SGD": _sgd,
}


def same_rule(one: optimizers.Optimizer, other: optimizers.Optimizer) -> bool:
  """Returns whether two optimizers differ in nothing but their learning rate."""
  return dataclasses.replace(one, learning_rate=0.0) == dataclasses.replace(
    other, learning_rate=0.0
  )
