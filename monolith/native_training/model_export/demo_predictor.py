"""The specified path of the program `demos.predictor`: both names are one module."""

import sys

from absl import app, flags

from monolith.native_training.demos import predictor
from monolith.native_training.demos.predictor import *  # noqa: F403, for type checkers

sys.modules[__name__] = predictor

if __name__ == "__main__":
  flags.adopt_module_key_flags(predictor)
  app.run(predictor.main)
