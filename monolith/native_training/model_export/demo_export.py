"""The specified path of the program `demos.export`: both names are one module."""

import sys

from absl import app, flags

from monolith.native_training.demos import export
from monolith.native_training.demos.export import *  # noqa: F403, for type checkers

sys.modules[__name__] = export

if __name__ == "__main__":
  flags.adopt_module_key_flags(export)
  app.run(export.main)
