"""`SingleTaskModelParams`: what is registered under the name given to `--task`."""

from monolith.core import hyperparams


class SingleTaskModelParams:
  """A model with one task."""

  def task(self) -> hyperparams.InstantiableParams:
    """Returns the task's params."""
    raise NotImplementedError("Abstract method")
