"""What the tests of savers share: a folder, and what is in it."""

from __future__ import annotations

import os
import pathlib
import tempfile

import tensorflow as tf
from google.protobuf import text_format
from tensorflow.python.checkpoint import checkpoint_management

from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState


class SaverTestCase(tf.test.TestCase):
  """Has a folder of its own."""

  def setUp(self):
    super().setUp()
    self.dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def path(self, name: str) -> str:
    return os.path.join(self.dir, name)

  def names(self) -> list[str]:
    return sorted(os.listdir(self.dir))

  def steps_on_disk(self) -> set[int]:
    return {
      int(name[: -len(".index")].rpartition("-")[2])
      for name in self.names()
      if name.endswith(".index")
    }

  def write_monolith_checkpoint(self, *paths: str) -> None:
    state = MonolithCheckpointState(exempt_model_checkpoint_paths=paths)
    pathlib.Path(self.path("monolith_checkpoint")).write_text(text_format.MessageToString(state))

  def exists(self, prefix: str) -> bool:
    return checkpoint_management.checkpoint_exists_internal(prefix)
