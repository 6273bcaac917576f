"""The build backend that pip calls (PEP 517): setuptools, and what compiling needs of this Python.

It builds for the TensorFlow that is installed, or for another as in
`MONOLITH_TENSORFLOW=2.18 pip install .`, or, where that is `none`, without TensorFlow.
"""

from __future__ import annotations

import sys

import requirements
import tensorflow_versions
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _needs(of_setuptools: list[str]) -> list[str]:
  try:
    left_out = tensorflow_versions.is_left_out()
    return [*of_setuptools, *requirements.build(None if left_out else tensorflow_versions.target())]
  except tensorflow_versions.SetupError as error:
    sys.exit(f"error: {error}")


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
  return _needs(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
  return _needs(build_meta.get_requires_for_build_editable(config_settings))
