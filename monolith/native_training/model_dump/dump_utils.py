"""`DumpUtils`, an interface for recording models; it records nothing.

The recorder belongs to tools that are not public. The object stays so that models that call it, or
decorate methods with it, run unchanged; the drivers refuse `enable_model_dump`.
"""

from __future__ import annotations

from typing import Any, Callable, TypeVar

from absl import logging

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DumpUtils:
  """Has the methods of a model recorder, none of which records anything.

  Args:
    enable: whether to record; a warning says that this is not possible.

  Attributes:
    enable: False.
  """

  enable = False

  def __init__(self, enable: bool = False):
    if enable:
      logging.warning("DumpUtils(enable=True) has no effect: models cannot be dumped.")

  def record_params(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Ignores a model's params."""

  def dump(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Writes nothing."""

  def add_config(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Ignores a run configuration."""

  def add_user_params(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Ignores the names of options that a user set."""

  def add_model_fn(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Ignores the tensors of a model function."""

  def add_optimizer(self, *unused_args: Any, **unused_kwargs: Any) -> None:
    """Ignores a dense optimizer."""

  def record_feature(self, func: _Function) -> _Function:
    """Returns the decorated function, which creates feature columns."""
    return func

  def record_slice(self, func: _Function) -> _Function:
    """Returns the decorated function, which looks slices up."""
    return func

  def record_receiver(self, func: _Function) -> _Function:
    """Returns the decorated function, which makes serving inputs."""
    return func
