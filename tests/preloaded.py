"""Imports what most test files need, once: processes of files are forks of one that has.

Its objects are frozen, so that a process neither looks through them for garbage, which pytest does
five times at its end, nor copies the memory they are in.
"""

import gc

import pytest  # noqa: F401
import tensorflow  # noqa: F401

from monolith.native_training import cpu_training, native_model  # noqa: F401

gc.collect()
gc.freeze()
