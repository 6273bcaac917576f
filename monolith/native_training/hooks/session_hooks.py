"""The specified path of `graph.session_hooks`: both names are one module, with one state."""

import sys

from monolith.native_training.graph import session_hooks
from monolith.native_training.graph.session_hooks import *  # noqa: F403, for type checkers

sys.modules[__name__] = session_hooks
