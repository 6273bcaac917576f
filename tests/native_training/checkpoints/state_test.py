"""The state files of a folder of checkpoints, good, damaged and missing; names of checkpoints."""

import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from google.protobuf import text_format
from tensorflow.python.checkpoint import checkpoint_management

from monolith.native_training.checkpoints import state
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState


class StateTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def _path(self, name: str) -> pathlib.Path:
    return pathlib.Path(self._dir, name)

  def _record(self, *steps: int) -> None:
    paths = [str(self._path(f"model.ckpt-{step}")) for step in steps]
    checkpoint_management.update_checkpoint_state_internal(self._dir, paths[-1], paths)

  def test_exempt_checkpoints_are_those_that_both_files_name(self):
    self.assertEqual(state.get_exempt_checkpoint_paths(self._dir), [])
    self._record(5, 7, 9)
    exempt = MonolithCheckpointState(exempt_model_checkpoint_paths=["model.ckpt-5", "model.ckpt-9"])
    self._path(state.MONOLITH_CKPT_STATE_FILE_NAME).write_text(text_format.MessageToString(exempt))

    for step in (5, 7, 9):
      self._path(f"model.ckpt-{step}.index").touch()
    self.assertEqual(state.get_exempt_checkpoint_paths(self._dir), ["model.ckpt-5", "model.ckpt-9"])

    self._record(7, 9)
    with self.assertRaisesRegex(AssertionError, "exempt checkpoint model.ckpt-5 is not listed"):
      state.get_exempt_checkpoint_paths(self._dir)

  def test_checkpoint_state_is_read_again_when_the_step_grows(self):
    self.assertIsNone(state.get_latest_checkpoint_state(self._dir, 1))
    self._record(5)
    # None is not remembered.
    self.assertEndsWith(state.get_latest_checkpoint_state(self._dir, 1).model_checkpoint_path, "-5")
    self._record(5, 9)
    self.assertEndsWith(state.get_latest_checkpoint_state(self._dir, 1).model_checkpoint_path, "-5")
    self.assertEndsWith(state.get_latest_checkpoint_state(self._dir, 2).model_checkpoint_path, "-9")

  def test_monolith_state_without_checkpoints_that_are_gone(self):
    self._path("model.ckpt-5.index").write_text("")
    written = MonolithCheckpointState(
      exempt_model_checkpoint_paths=["model.ckpt-5", str(self._path("model.ckpt-6"))]
    )
    self._path("other").write_text(text_format.MessageToString(written))

    self.assertIsNone(state.get_monolith_checkpoint_state(self._dir))
    self.assertEqual(state.get_monolith_checkpoint_state(self._dir, "other"), written)
    got = state.get_monolith_checkpoint_state(self._dir, "other", remove_invalid_path=True)
    self.assertEqual(got.exempt_model_checkpoint_paths, [str(self._path("model.ckpt-5"))])

  def test_paths_of_other_file_systems_are_absolute(self):
    paths = ["hdfs:/a/model.ckpt-1", "hdfs://host/a/model.ckpt-2", "gs://a/model.ckpt-3"]
    written = MonolithCheckpointState(exempt_model_checkpoint_paths=[*paths, "model.ckpt-4"])
    self._path("monolith_checkpoint").write_text(text_format.MessageToString(written))

    with mock.patch.object(
      state.checkpoint_management, "checkpoint_exists_internal", return_value=True
    ):
      got = state.get_monolith_checkpoint_state(self._dir, remove_invalid_path=True)

    self.assertEqual(got.exempt_model_checkpoint_paths, [*paths, str(self._path("model.ckpt-4"))])

  def test_damaged_monolith_state_is_ignored_with_a_warning(self):
    for content in (b"no such field: 1", b"\xff\xfe"):
      self._path("monolith_checkpoint").write_bytes(content)
      with self.assertLogs(level="WARNING") as logs:
        self.assertIsNone(state.get_monolith_checkpoint_state(self._dir))
      self.assertIn("monolith_checkpoint: Checkpoint ignored", logs.output[-1])

  def test_text_proto_is_merged(self):
    self._path("proto").write_text('exempt_model_checkpoint_paths: "b"')
    message = MonolithCheckpointState(exempt_model_checkpoint_paths=["a"])
    self.assertIs(state.read_text_proto(str(self._path("proto")), message), message)
    self.assertEqual(message.exempt_model_checkpoint_paths, ["a", "b"])

  def test_names(self):
    helper = state.SaveHelper(str(self._path("model.ckpt")))
    prefix = helper.get_ckpt_prefix(12)
    self.assertEqual(prefix, str(self._path("model.ckpt-12")))
    self.assertEqual(helper.get_ckpt_asset_dir(prefix), prefix + ".assets/")
    self.assertEqual(helper.get_global_step_value("a-b/model-3.ckpt-12"), 12)
    self.assertEqual(helper.get_global_step_value("model.ckpt"), 0)
    self.assertEqual(helper.get_existing_checkpoint_steps(), set())
    self._record(3, 12)
    self.assertEqual(helper.get_existing_checkpoint_steps(), {3, 12})


if __name__ == "__main__":
  absltest.main()
