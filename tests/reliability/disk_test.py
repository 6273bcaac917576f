"""Promise: a disk that is full, read-only or gone costs no checkpoint.

Training goes on or stops, as configured, and says why.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import stat
import subprocess

import pytest
import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.checkpoints import files as checkpoint_files
from tests.reliability import trainer

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1


@contextlib.contextmanager
def _limited_file_size(folder: str):
  """Lets every write beyond 100 bytes fail, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def _filled_disk(folder: str):
  """Writes until the disk of a folder is full."""
  path = os.path.join(folder, "filler")
  with open(path, "wb", buffering=0) as f:
    with contextlib.suppress(OSError):
      while True:
        f.write(bytes(1 << 16))
    with contextlib.suppress(OSError):
      while True:
        f.write(bytes(1))
  yield
  os.remove(path)


@contextlib.contextmanager
def _read_only(folder: str):
  """Takes away the permission to write into a folder."""
  mode = stat.S_IMODE(os.stat(folder).st_mode)
  os.chmod(folder, 0o555)
  yield
  os.chmod(folder, mode)


@contextlib.contextmanager
def _vanished(folder: str):
  """Moves a folder away."""
  os.rename(folder, folder + ".away")
  yield
  shutil.rmtree(folder, ignore_errors=True)
  os.rename(folder + ".away", folder)


def _drop_override() -> None:
  """Makes file permissions count for root too, in this process and those it forks."""
  libc = ctypes.CDLL(None, use_errno=True)
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
  # Twice effective, permitted, inheritable.
  data = (ctypes.c_uint32 * 6)()
  if libc.capget(header, data):
    raise OSError(ctypes.get_errno(), "capget")
  data[0] &= ~(1 << _CAP_DAC_OVERRIDE)
  if libc.capset(header, data):
    raise OSError(ctypes.get_errno(), "capset")


def _train_with_fault(model_dir: str, fault, ignore: bool, unprivileged: bool = False) -> dict:
  """Saves two steps, trains one more under a fault and one after it, and tells what happened."""
  if unprivileged and os.getuid() == 0:
    _drop_override()
  training = trainer.Trainer(model_dir, ignore_save_errors=ignore)
  report = {"error": None}
  with contextlib.suppress(tf.errors.OpError, ValueError, OSError):
    with training.session() as sess:
      for _ in range(2):
        sess.run(training.train_op)
      with fault(model_dir):
        try:
          sess.run(training.train_op)
        except (tf.errors.OpError, ValueError, OSError) as e:
          report["error"] = str(e)
        except BaseException as e:
          report["error"] = f"unexpected {type(e)}"
      report["newest"] = tf.train.latest_checkpoint(model_dir)
      report["damage"] = checkpoint_files.find_damage(report["newest"])
      report["leftovers"] = [n for n in os.listdir(model_dir) if n.startswith("model.ckpt-3")]
      if report["error"] is None:
        report["step"] = training.check(sess)
        sess.run(training.train_op)
        report["last"] = tf.train.latest_checkpoint(model_dir)
  return report


def _restore(model_dir: str) -> int:
  training = trainer.Trainer(model_dir)
  with training.session() as sess:
    return training.check(sess)


class DiskTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = os.environ["TEST_TMPDIR"]
    self.model_dir = os.path.join(self.dir, "model")
    os.makedirs(self.model_dir)

  def _check_goes_on(self, model_dir, fault, **kwargs):
    report = trainer.run_in_child(_train_with_fault, model_dir, fault, True, *kwargs.values())

    self.assertIsNone(report["error"])
    self.assertEqual(os.path.basename(report["newest"]), "model.ckpt-2")
    self.assertIsNone(report["damage"])
    self.assertEqual(report["leftovers"], [])
    self.assertEqual(report["step"], 3)
    self.assertEqual(os.path.basename(report["last"]), "model.ckpt-4")

  def _check_stops(self, model_dir, fault, cause, **kwargs):
    report = trainer.run_in_child(_train_with_fault, model_dir, fault, False, *kwargs.values())

    self.assertRegex(report["error"] or "", cause)
    self.assertEqual(os.path.basename(report["newest"]), "model.ckpt-2")
    self.assertIsNone(report["damage"])
    self.assertEqual(trainer.run_in_child(_restore, model_dir), 2)

  def test_file_size_limit_is_survived_if_configured(self):
    self._check_goes_on(self.model_dir, _limited_file_size)

  def test_file_size_limit_stops_training_if_configured(self):
    self._check_stops(self.model_dir, _limited_file_size, "File too large")

  @contextlib.contextmanager
  def _small_disk(self):
    mounted = os.path.join(self.dir, "disk")
    os.makedirs(mounted)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mounted]
    try:
      subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
      self.skipTest("no permission to mount a small disk")
    try:
      yield os.path.join(mounted, "model")
    finally:
      subprocess.run(["umount", "-l", mounted], check=True)

  def test_full_disk_is_survived_if_configured(self):
    with self._small_disk() as model_dir:
      self._check_goes_on(model_dir, _filled_disk)

  def test_full_disk_stops_training_if_configured(self):
    with self._small_disk() as model_dir:
      self._check_stops(model_dir, _filled_disk, "No space left on device")

  def test_read_only_folder_is_survived_if_configured(self):
    self._check_goes_on(self.model_dir, _read_only, unprivileged=True)

  def test_read_only_folder_stops_training_if_configured(self):
    self._check_stops(self.model_dir, _read_only, "Permission denied", unprivileged=True)

  def test_vanished_folder_is_survived_if_configured(self):
    self._check_goes_on(self.model_dir, _vanished)

  def test_vanished_folder_stops_training_if_configured(self):
    cause = f"Parent directory of {self.model_dir}.* doesn't exist, can't save"
    self._check_stops(self.model_dir, _vanished, cause)


if __name__ == "__main__":
  absltest.main()
