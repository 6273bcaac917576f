"""`DumpUtils`, through which models used to record themselves; it records nothing.

The recorder belongs to tools that are not public. The object stays so that models that call it, or
decorate methods with it, run unchanged; the drivers refuse `enable_model_dump`.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from absl import logging

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DumpUtils:
  """Accepts what a recorder of models accepts, and does nothing with it.

  Args:
    enable: whether to record; that it cannot is logged.

  Attributes:
    enable: False.
  """

  enable = False

  def __init__(self, enable: bool = False):
    if enable:
      logging.warning("DumpUtils(enable=True) has no effect: models cannot be dumped.")

  def record_params(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Does nothing with a model's params."""

  def dump(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Writes nothing."""

  def add_config(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Does nothing with a run configuration."""

  def add_user_params(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Does nothing with the names of options that a user set."""

  def add_model_fn(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Does nothing with what a model function built."""

  def add_optimizer(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Does nothing with a dense optimizer."""

  def record_feature(self, func: _Function) -> _Function:
    """Returns the function, a decorator of what creates feature columns."""
    return func

  def record_slice(self, func: _Function) -> _Function:
    """Returns the function, a decorator of what looks slices up."""
    return func

  def record_receiver(self, func: _Function) -> _Function:
    """Returns the function, a decorator of what makes serving inputs."""
    return func
