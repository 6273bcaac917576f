"""Importing the protos of the data package must not load TensorFlow."""

import subprocess
import sys


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

  try:
    data.no_such_name
  except AttributeError as e:
    assert "no_such_name" in str(e)
  else:
    raise AssertionError("no error")
