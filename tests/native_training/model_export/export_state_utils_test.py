"""Tests of the list of exports."""

import os

from absl.testing import absltest

from monolith.native_training import utils
from monolith.native_training.model_export import export_pb2, export_state_utils


class ExportStateUtilsTest(absltest.TestCase):
  def test_basic(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "export", "deep")
    self.assertEmpty(export_state_utils.get_export_saver_listener_state(folder).entries)
    state = export_pb2.ServingModelState()
    state.entries.add(export_dir="a", global_step=1)

    export_state_utils.overwrite_export_saver_listener_state(folder, state)
    self.assertEqual(export_state_utils.get_export_saver_listener_state(folder), state)

    state.entries[0].global_step = 2
    export_state_utils.overwrite_export_saver_listener_state(folder, state)
    self.assertEqual(export_state_utils.get_export_saver_listener_state(folder), state)
    self.assertEqual(os.listdir(folder), ["ExportSaverListenerState"])


if __name__ == "__main__":
  absltest.main()
