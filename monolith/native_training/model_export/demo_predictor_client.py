"""The specified path of the program `demos.predictor_client`: both names are one module."""

import sys

from absl import app, flags

from monolith.native_training.demos import predictor_client
from monolith.native_training.demos.predictor_client import *  # noqa: F403, for type checkers

sys.modules[__name__] = predictor_client

if __name__ == "__main__":
  flags.adopt_module_key_flags(predictor_client)
  app.run(predictor_client.main)
