"""Names the commands that install this package, and refuses to run beside a stranger of its name.

On PyPI `monolith` is a framework for command-line programs with a `monolith/` folder of its own.
This distribution is called `monolith-recsys`. The ops have the same line in C++:
`runtime/base/install_line.h`.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

DISTRIBUTION = "monolith-recsys"
_PACKAGE = pathlib.Path(__file__).resolve().parent


def install_line(extra: str = "", *, package: pathlib.Path = _PACKAGE) -> str:
  """Returns the command that installs this package with an extra.

  Args:
    extra: one of the extras in `tools/requirements.py`; without one, the package alone.
    package: the folder `monolith`.
  """
  if (package.parent / "pyproject.toml").exists():  # a checkout
    return f"pip install '.[{extra}]'" if extra else "pip install ."
  return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


@contextlib.contextmanager
def naming_extra(extra: str) -> Iterator[None]:
  """Lets an import that fails in its block say which command installs what is missing.

  Args:
    extra: the extra that has it.

  Raises:
    ModuleNotFoundError: a module of another package is missing.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == _PACKAGE.name:
      raise
    raise ModuleNotFoundError(f"{error}: {install_line(extra)}", name=error.name) from None


def refuse_strangers(package: pathlib.Path = _PACKAGE) -> None:
  """Checks that no other distribution has installed files into the folder of this package.

  Raises:
    ImportError: one has; whichever came last has overwritten files of the other.
  """
  for found in package.parent.glob("monolith-*.dist-info"):
    stranger = found.name[: -len(".dist-info")].replace("-", " ")
    raise ImportError(
      f"Another distribution, {stranger}, shares the folder {package} with this one, "
      f"{DISTRIBUTION}, and they overwrite each other's files: pip uninstall monolith, then "
      f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
    )
