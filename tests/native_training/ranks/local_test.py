"""Ranks as children of this process."""

import sys
import tempfile
import unittest
from unittest import mock

from monolith.native_training.ranks import local

try:
  import horovod.runner  # noqa: F401
except ModuleNotFoundError:
  _HAS_HOROVOD = False
else:
  _HAS_HOROVOD = True

_TELL = (
  "import os; print(*(os.environ['HOROVOD_' + n] for n in ('RANK', 'SIZE', 'LOCAL_RANK')), "
  "os.environ['MINE'])"
)


class LocalRanksTest(unittest.TestCase):
  @unittest.skipUnless(_HAS_HOROVOD, "Horovod is not installed")
  def test_each_rank_knows_its_place_and_writes_where_it_is_told(self):
    files = [tempfile.TemporaryFile("w+") for _ in range(3)]
    for file in files:
      self.addCleanup(file.close)

    with local.LocalRanks(3, ["-c", _TELL], {"MINE": "x"}, files) as ranks:
      self.assertEqual([process.wait(120) for process in ranks.processes], [0, 0, 0])

    for file in files:
      file.seek(0)
    self.assertEqual([file.read() for file in files], [f"{rank} 3 {rank} x\n" for rank in range(3)])

  @unittest.skipUnless(_HAS_HOROVOD, "Horovod is not installed")
  def test_ranks_that_still_run_are_killed_at_the_end(self):
    ranks = local.LocalRanks(2, ["-c", "import threading; threading.Event().wait()"])
    self.assertEqual([process.poll() for process in ranks.processes], [None, None])

    ranks.close()

    self.assertEqual([process.returncode for process in ranks.processes], [-9, -9])

  def test_missing_horovod_is_named_with_a_way_to_install_it(self):
    with mock.patch.dict(sys.modules, {"horovod.runner.common.util.hosts": None}):
      with self.assertRaisesRegex(ImportError, "Several ranks need Horovod.*pip install"):
        local.LocalRanks(2, ["-c", ""])


if __name__ == "__main__":
  unittest.main()
