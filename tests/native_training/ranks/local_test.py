"""Ranks as children of this process."""

import os
import sys
import tempfile
import unittest
from unittest import mock

from monolith.native_training.ranks import local
from monolith.native_training.settings import rank_environment
from tests import rank_processes

_TELL = (
  "from monolith.native_training.settings import rank_environment as ranks; import os; "
  "print(*map(ranks.read_launcher, ('rank', 'size', 'local_rank', 'local_size')), "
  "os.environ['MINE'], os.environ['MONOLITH_RANKS_ENGINE'])"
)


class LocalRanksTest(unittest.TestCase):
  def test_each_rank_knows_its_place_and_writes_where_it_is_told(self):
    # The launcher of this process says nothing about them.
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    others = {"OMPI_COMM_WORLD_RANK": "7", "RANK": "8", "TF_CONFIG": str(cluster)}
    for engine in rank_processes.ENGINES:
      with self.subTest(engine), mock.patch.dict(os.environ, others):
        rank_processes.require_engine(engine)
        files = [tempfile.TemporaryFile("w+") for _ in range(3)]
        for file in files:
          self.addCleanup(file.close)

        with local.LocalRanks(3, ["-c", _TELL], {"MINE": "x"}, files, engine) as ranks:
          self.assertEqual([process.wait(120) for process in ranks.processes], [0, 0, 0])

        self.assertEqual(ranks.engine, engine)
        for rank, file in enumerate(files):
          file.seek(0)
          self.assertEqual(file.read(), f"{rank} 3 {rank} 3 x {engine}\n")

  def test_ranks_that_still_run_are_killed_at_the_end(self):
    command = ["-c", "import threading; threading.Event().wait()"]
    ranks = local.LocalRanks(2, command, engine=rank_environment.TENSORFLOW)
    self.assertEqual([process.poll() for process in ranks.processes], [None, None])

    ranks.close()

    self.assertEqual([process.returncode for process in ranks.processes], [-9, -9])

  def test_missing_horovod_is_named_with_a_way_to_install_it(self):
    with mock.patch.dict(sys.modules, {"horovod.runner.common.util.hosts": None}):
      with self.assertRaisesRegex(ImportError, "Horovod is not installed.*pip install"):
        local.LocalRanks(2, ["-c", ""], engine=rank_environment.HOROVOD)


if __name__ == "__main__":
  unittest.main()
