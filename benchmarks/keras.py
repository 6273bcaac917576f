"""Starts `keras_layers.py`, the speed of a Keras model on our tables.

  python benchmarks/keras.py [--rounds 7] [--steps 20]

Scripts in this folder find this file before the package of its name. To them it is the package.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

if __name__ == "__main__":
  import keras_layers

  keras_layers.main()
else:
  _folder = os.path.dirname(os.path.abspath(__file__))
  _spec = importlib.machinery.PathFinder.find_spec(
    __name__, [path for path in sys.path if os.path.abspath(path) != _folder]
  )
  if _spec is None or _spec.loader is None:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
  sys.modules[__name__] = importlib.util.module_from_spec(_spec)
  _spec.loader.exec_module(sys.modules[__name__])
