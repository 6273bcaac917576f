"""Builds graphs as a process that may use a GPU does. Soft placement runs them also without one."""

from __future__ import annotations

import unittest

import tensorflow as tf

from monolith.native_training import device_utils

SOFT_PLACEMENT = tf.compat.v1.ConfigProto(allow_soft_placement=True)


def allow(test: unittest.TestCase) -> None:
  """Allows placement on GPUs until the end of a test."""
  device_utils.enable_gpu_training()
  test.addCleanup(device_utils.disable_gpu_training)


def devices_of(op_type: str) -> set[str]:
  """Returns where the default graph's ops of a type are to run, by device type."""
  operations = tf.compat.v1.get_default_graph().get_operations()
  return {
    tf.DeviceSpec.from_string(op.device).device_type or ""
    for op in operations
    if op.type == op_type
  }
