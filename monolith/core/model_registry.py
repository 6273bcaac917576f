"""Maps the names given to `--task` to registered `SingleTaskModelParams` classes.

The registry is filled while modules are imported, which Python's import lock makes sequential; it
has no lock of its own.
"""

import difflib

from absl import logging

from monolith.core import base_model_params, hyperparams, model_imports

_TASK_ROOT = "monolith.tasks."
_registry: dict[str, type[base_model_params.SingleTaskModelParams]] = {}


def RegisterSingleTaskModel(
  src_cls: type[base_model_params.SingleTaskModelParams],
) -> type[base_model_params.SingleTaskModelParams]:
  """Class decorator: registers a class under `<module>.<Class>` and under a shortcut.

  The shortcut is the key without `monolith.tasks.` and `params.`.

  Raises:
    TypeError: `src_cls` is not a `SingleTaskModelParams`.
    ValueError: a key is already taken.
  """
  if not issubclass(src_cls, base_model_params.SingleTaskModelParams):
    raise TypeError(f"src_cls {src_cls.__name__} is not a SingleTaskModelParams!")
  keys = _class_keys(src_cls)
  for key in keys:
    if key in _registry:
      raise ValueError(
        f"Duplicate model registered for key {key}: {src_cls.__module__}.{src_cls.__name__}"
      )
  for key in keys:
    _registry[key] = src_cls
  return src_cls


def GetAllRegisteredClasses() -> dict[str, type[base_model_params.SingleTaskModelParams]]:
  """Imports all known task params and returns the registry itself."""
  model_imports.ImportAllParams()
  if not _registry:
    logging.warning("No classes registered.")
  return _registry


def GetClass(class_key: str) -> type[base_model_params.SingleTaskModelParams]:
  """Returns a registered class, importing its module if need be.

  Raises:
    ValueError: the key has no dot.
    LookupError: there is no such module, or no such class; the nearest known names are suggested.
  """
  if class_key in _registry:
    return _registry[class_key]
  try:
    model_imports.ImportParams(class_key)
  except LookupError as error:
    raise LookupError(f"{error}{_suggestion(class_key)}") from error.__cause__
  if class_key not in _registry:
    for key in sorted(_registry):
      logging.info("Known model: %s", key)
    raise LookupError(
      f"Model {class_key} not found from list of above known models.{_suggestion(class_key)}"
    )
  return _registry[class_key]


def GetParams(class_key: str) -> hyperparams.InstantiableParams:
  """Returns the task params of a registered class; raises as `GetClass` does."""
  return GetClass(class_key)().task()


def _class_keys(src_cls: type) -> list[str]:
  module = f"{src_cls.__module__}."
  shortcut = module.replace(_TASK_ROOT, "").replace("params.", "")
  return list(dict.fromkeys((module + src_cls.__name__, shortcut + src_cls.__name__)))


def _suggestion(class_key: str) -> str:
  nearest = difflib.get_close_matches(class_key, sorted(_registry), n=3)
  return f" Did you mean: {', '.join(nearest)}?" if nearest else ""
