"""Importing the protos of the data package must not load TensorFlow."""

import subprocess
import sys

import pytest


def test_pb2_does_not_import_tensorflow():
  code = (
    "import sys\n"
    "from monolith.native_training.data import data_op_config_pb2\n"
    "from monolith.native_training.data.transform import transform_config_pb2\n"
    "assert 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name():
  from monolith.native_training import data

  name = "no_such_name"
  with pytest.raises(AttributeError, match=name):
    getattr(data, name)
