"""The specified path of `graph.export_context`: both names are one module, with one state."""

import sys

from monolith.native_training.graph import export_context
from monolith.native_training.graph.export_context import *  # noqa: F403, for type checkers

sys.modules[__name__] = export_context
