"""One rank's own decisions about checkpoints; `sync_training_processes_test` runs several."""

import os
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.checkpoints import ranks
from monolith.native_training.ranks import agreement
from tests import written_checkpoint


class RanksTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def _rank_folders(self, steps_of_ranks):
    """Writes checkpoints with a row per rank; returns the folders."""
    folders = []
    for rank, steps in enumerate(steps_of_ranks):
      folders.append(os.path.join(self._dir, f"index-{rank:04d}"))
      os.makedirs(folders[-1])
      for step in steps:
        written_checkpoint.write_checkpoint(folders[-1], {f"user_{rank}": [rank]}, step=step)
    return folders

  def test_merges_the_newest_step_that_all_ranks_have(self):
    folders = self._rank_folders([[5], [5]])
    target = os.path.join(self._dir, "merged")

    prefix = ranks.merge_rank_checkpoints(folders, target)

    self.assertEqual(prefix, os.path.join(target, "model.ckpt-5"))
    self.assertEqual(tf.train.latest_checkpoint(target), prefix)
    self.assertEqual(written_checkpoint.read_ids(prefix), {"user_0": [0], "user_1": [1]})

  def test_no_common_step_and_missing_rows_are_told(self):
    folders = self._rank_folders([[5], [7], [5]])
    with self.assertRaisesRegex(ValueError, "no step that all of .*index-0001"):
      ranks.merge_rank_checkpoints(folders, os.path.join(self._dir, "merged"))
    with self.assertRaisesRegex(ValueError, "no step that all of"):
      ranks.merge_rank_checkpoints([], os.path.join(self._dir, "merged"))
    # Rows of ranks 0 and 2.
    with self.assertRaisesRegex(ValueError, "are not those of 2 ranks"):
      ranks.merge_rank_checkpoints([folders[0], folders[2]], os.path.join(self._dir, "merged"))
    self.assertIsNone(tf.train.latest_checkpoint(os.path.join(self._dir, "merged")))

  def test_ranks_with_folders_of_their_own_must_stay_as_many(self):
    folders = self._rank_folders([[5], [5]])

    ranks.prepare(folders[0], num_ranks=1, rank=0)  # the folder of all ranks may have any name
    with self.assertRaisesRegex(ValueError, "2 ranks have saved .* now there are 1: merge them"):
      ranks.prepare(folders[0], num_ranks=1, rank=0, is_merged=False)

  def test_rank_0_reshards_a_merged_folder(self):
    written_checkpoint.write_checkpoint(self._dir, {"user_0": [0, 2], "user_1": [1]})

    ranks.prepare(self._dir, num_ranks=1, rank=0)

    newest = tf.train.latest_checkpoint(self._dir)
    self.assertEqual(written_checkpoint.read_ids(newest), {"user_0": [0, 2, 1]})

  def test_what_the_check_raises_comes_before_anything_is_written(self):
    written_checkpoint.write_checkpoint(self._dir, {"user_0": [0, 2], "user_1": [1]})
    before = sorted(os.listdir(self._dir))

    def refuse(model_dir):
      raise ValueError(f"{model_dir} is refused")

    with self.assertRaisesRegex(ValueError, "is refused"):
      ranks.prepare(self._dir, num_ranks=1, rank=0, check=refuse)
    self.assertEqual(sorted(os.listdir(self._dir)), before)

  def test_trouble_of_another_rank_is_trouble_here(self):
    with mock.patch.object(agreement, "gather", lambda name, value: np.array([value, -2])):
      with self.assertRaisesRegex(ValueError, "rank 1 cannot prepare the checkpoint in"):
        ranks.prepare(self._dir, num_ranks=2, rank=0)

  def test_ranks_must_see_the_same_step(self):
    written_checkpoint.write_checkpoint(self._dir, {"user_0": [0], "user_1": [1]}, step=5)
    other = {"monolith_checkpoint_ready": -1, "monolith_checkpoint_step": 4}
    with mock.patch.object(agreement, "gather", lambda name, value: np.array([value, other[name]])):
      with self.assertRaisesRegex(ValueError, r"finds .*model.ckpt-5 .* are \[5, 4\]"):
        ranks.prepare(self._dir, num_ranks=2, rank=0)


if __name__ == "__main__":
  absltest.main()
