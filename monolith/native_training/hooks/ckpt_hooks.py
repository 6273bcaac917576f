"""The specified path of `checkpoints.ckpt_hooks`: both names are one module, with one state."""

import sys

from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.checkpoints.ckpt_hooks import *  # noqa: F403, for type checkers

sys.modules[__name__] = ckpt_hooks
