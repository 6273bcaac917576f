"""Promise: a kill or an I/O error at any rename of a save leaves one whole save, old or new.

`strace` lets the n-th rename of a process fail or kill it. Each save runs in a process of its own.
"""

import os
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from monolith.native_training import hash_table_ops, multi_hash_table_ops, test_utils

pytestmark = pytest.mark.thorough

_IDS = list(range(1, 501))
_RENAMES = "rename,renameat,renameat2" if os.uname().machine == "x86_64" else "renameat,renameat2"
# A table in two files, and a group in one file of data and one of metadata: the manifest of each,
# then its files.
_NUM_RENAMES = 3


def _table(kind: str):
  if kind == "table":
    table = hash_table_ops.test_hash_table(1)
    table._saver_parallel = 2
    return table
  config = test_utils.generate_test_hash_table_config(1)
  return multi_hash_table_ops.MultiHashTable.from_configs({"a": config}, saver_parallel=1)


def _save(kind: str, base: str, value: float) -> None:
  """Saves rows that all have one value."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
    table = _table(kind)
    values = [[value]] * len(_IDS)
    if kind == "table":
      sess.run(table.assign(_IDS, values).save(base).as_op())
    else:
      sess.run(table.initializer)
      sess.run(table.assign({"a": (_IDS, values)}).save(base).as_op())


def _restore(kind: str, base: str) -> set:
  """Returns the values of all rows."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
    table = _table(kind)
    if kind == "table":
      return set(sess.run(table.restore(base).lookup(_IDS))[:, 0].tolist())
    sess.run(table.initializer)
    return set(sess.run(table.restore(base).lookup({"a": _IDS})["a"])[:, 0].tolist())


def _works_here() -> bool:
  """Tells whether there is a strace that may trace and inject."""
  if shutil.which("strace") is None:
    return False
  command = ["strace", "-o", "/dev/null", "-e", f"inject={_RENAMES}:error=EIO", "true"]
  return subprocess.run(command, capture_output=True).returncode == 0


class SaveFaultsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    if not _works_here():
      self.skipTest("strace cannot inject faults here")
    self.dir = os.environ["TEST_TMPDIR"]

  @parameterized.product(kind=("table", "group"), fault=("error=EIO", "signal=KILL"))
  def test_one_whole_save_is_left(self, kind, fault):
    seen = []
    for at in range(1, _NUM_RENAMES + 2):
      base = os.path.join(self.dir, f"{at}", "base")
      _save(kind, base, 1.0)
      result = self._save_with_fault(kind, base, 2.0, fault, at)
      (value,) = _restore(kind, base)
      seen.append(value)
      if at > _NUM_RENAMES:
        self.assertEqual(result.returncode, 0, result.stderr)
      elif fault == "signal=KILL":
        self.assertNotEqual(result.returncode, 0)
      else:
        self.assertRegex(result.stderr, "Input/output error")

    self.assertEqual(seen, [1.0, 2.0, 2.0, 2.0])

  def _save_with_fault(self, kind, base, value, fault, at):
    inject = f"inject={_RENAMES}:{fault}:when={at}"
    log = os.path.join(self.dir, "log")
    command = ["strace", "-f", "-o", log, "-e", f"trace={_RENAMES}", "-e", inject]
    command += [sys.executable, "-m", "tests.reliability.save_faults_test", kind, base, str(value)]
    return subprocess.run(command, capture_output=True, text=True)


if __name__ == "__main__":
  if len(sys.argv) == 4:
    _save(sys.argv[1], sys.argv[2], float(sys.argv[3]))
  else:
    absltest.main()
