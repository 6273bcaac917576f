"""The specified path of `tasks.base_tpu_test`: both names are one module."""

import sys

from monolith.tasks import base_tpu_test
from monolith.tasks.base_tpu_test import *  # noqa: F403, for type checkers

sys.modules[__name__] = base_tpu_test
