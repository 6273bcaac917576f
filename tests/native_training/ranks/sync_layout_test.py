"""Two ranks with a fused layout: who owns which row, and what it has learnt."""

from __future__ import annotations

import tempfile
import unittest

import numpy as np
import pytest
from tensorflow.python.lib.io import _pywrap_record_io

from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from monolith.native_training.settings import rank_environment
from tests import rank_processes, sync_layout

pytestmark = pytest.mark.thorough

_TIMEOUT_SECS = 600
# How often a batch uses an id.
_USES = {1: 1, 2: 1, 7: 1, 8: 2}


class SyncLayoutTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = folder.name
    command = ["-m", "tests.sync_layout", cls.folder]
    with rank_processes.RankProcesses(2, command, rank_environment.TENSORFLOW) as ranks:
      statuses = ranks.wait(_TIMEOUT_SECS)
      assert not any(statuses), ranks.report()

  def rows(self, name):
    """Returns rank -> id -> vector."""
    assets = f"{self.folder}/{name}/model.ckpt-{sync_layout.STEPS}.assets"
    found = {0: {}, 1: {}}
    for file in checkpoint_files.list_dir(assets):
      stem, dash, _ = file.partition("-")
      if not dash or stem.endswith(".meta") or not stem[-1:].isdigit():
        continue
      compression = "SNAPPY" if stem.startswith("MonolithMultiHashTable") else ""
      for record in _pywrap_record_io.RecordIterator(f"{assets}/{file}", compression):
        row = pb.EntryDump.FromString(record)
        found[int(stem[-1])][row.id] = np.array(row.num)
    return found

  def test_each_row_is_on_its_rank_and_has_the_gradients_of_both(self):
    for name in ("native", "merged"):
      with self.subTest(name):
        rows = self.rows(name)
        self.assertEqual([sorted(rows[rank]) for rank in rows], [[2, 8], [1, 7]])
        for rank in rows:
          for id_, vector in rows[rank].items():
            falls = sync_layout.STEPS * 0.5 * _USES[id_] * 2
            np.testing.assert_allclose(vector, -falls * np.array([1, 2, 2, 2, 2]), rtol=1e-6)


if __name__ == "__main__":
  unittest.main()
