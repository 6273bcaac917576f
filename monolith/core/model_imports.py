"""Imports the modules in which task params are registered."""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Optional

from absl import logging

_TASK_ROOT = "monolith.tasks"
_TASK_DIRS = ()


def ImportAllParams(
  task_root: str = _TASK_ROOT,
  task_dirs: Sequence[str] = _TASK_DIRS,
  require_success: bool = False,
) -> bool:
  """Imports every module of `<task_root>.<task_dir>.params` for each task folder.

  Args:
    task_root: package that holds the task folders.
    task_dirs: names of task folders.
    require_success: whether it is an error when nothing could be imported.

  Returns:
    Whether any import succeeded.

  Raises:
    LookupError: nothing was imported though `require_success`.
  """
  success = False
  for task_dir in task_dirs:
    package_name = f"{task_root}.{task_dir}.params"
    if _import(package_name) is not None:
      continue
    success = True
    package = importlib.import_module(package_name)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
      _import(f"{package_name}.{module.name}")
  if require_success and not success:
    raise LookupError(
      "Could not import any task params. Make sure task params are linked into the binary."
    )
  return success


def ImportParams(
  model_name: str,
  task_root: str = _TASK_ROOT,
  task_dirs: Sequence[str] = _TASK_DIRS,
  require_success: bool = True,
) -> bool:
  """Imports the module of a model.

  Args:
    model_name: `<module>.<Class>`. The module is also looked for as `<task_root>.<t>.params.<rest>`
      when it starts with `<t>.` for a task folder `t`.
    task_root: package that holds the task folders.
    task_dirs: names of task folders.
    require_success: whether it is an error when nothing could be imported.

  Returns:
    Whether any import succeeded.

  Raises:
    ValueError: the name has no dot.
    LookupError: nothing was imported though `require_success`; the `ImportError` is its cause.
  """
  if "." not in model_name:
    raise ValueError(f"Invalid model name {model_name}")
  module_name = model_name.rpartition(".")[0]

  candidates = [module_name]
  for task_dir in sorted(task_dirs):
    if module_name.startswith(f"{task_dir}."):
      rest = module_name[len(task_dir) + 1 :]
      candidates.append(f"{task_root}.{task_dir}.params.{rest}")
  errors = [_import(candidate) for candidate in candidates]
  success = any(error is None for error in errors)
  if require_success and not success:
    raise LookupError(
      f"Could not find any valid import paths for module {module_name}. Check the logs above to "
      "see if there were errors importing the module, and make sure the relevant params files are "
      "linked into the binary."
    ) from errors[0]
  return success


def _import(name: str) -> Optional[ImportError]:
  """Imports a module. Returns the `ImportError`, if any; other exceptions propagate."""
  try:
    importlib.import_module(name)
    logging.info("Imported %s", name)
    return None
  except ImportError as error:
    logging.info("Could not import %s: %s", name, error)
    return error
