"""Finds the folder that holds the `monolith` package, and files below it.

Works in an installed wheel, in a source checkout and in a Bazel runfiles tree. Imports nothing but
`os`, so that build tools can use it.
"""

import os

# Tried in this order; the first that occurs in the path wins.
_MARKERS = ("/__main__/", "/site-packages/", "/monolith/")


def find_main() -> str:
  """Returns the absolute path of the folder that contains `monolith/`.

  Raises:
    ValueError: no such folder is above this file.
  """
  path = os.path.abspath(__file__)
  for marker in _MARKERS:
    position = path.rfind(marker)
    if position < 0:
      continue
    main_dir = path[:position]
    if marker != "/monolith/":
      main_dir = os.path.join(main_dir, marker.strip("/"))
    if os.path.exists(os.path.join(main_dir, "monolith")):
      return main_dir
    break
  raise ValueError(
    f"Unable to find the monolith base directory. This file directory is {path}. "
    "Are you running under bazel structure?"
  )


def get_libops_path(lib_name: str) -> str:
  """Returns the absolute path of `lib_name`, which is relative to the base folder."""
  return os.path.join(find_main(), lib_name)
