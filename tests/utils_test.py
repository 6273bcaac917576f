"""Tests of `monolith.utils` and `monolith.path_utils`."""

import os
import pathlib
import shutil
import subprocess
import sys

import tensorflow as tf
from tensorflow.python.framework import errors

from monolith import path_utils, utils


class UtilsTest(tf.test.TestCase):
  def testFindMain(self):
    base = utils.find_main()

    # `__main__` in a Bazel runfiles tree, the checkout's or site-packages' folder elsewhere.
    self.assertTrue(os.path.isdir(os.path.join(base, "monolith")))
    if "/__main__/" in os.path.abspath(path_utils.__file__):
      self.assertEqual(os.path.basename(base), "__main__")

  def testGetLibopsPath(self):
    self.assertTrue(os.path.exists(utils.get_libops_path("monolith/utils.py")))

  def testLoadMonitoredSession(self):
    utils.enable_monkey_patch()

    from tensorflow.python.training import monitored_session

    self.assertEqual(monitored_session._PREEMPTION_ERRORS, (errors.AbortedError,))

  def testMultiThreadedCopy(self):
    src = pathlib.Path(os.environ["TEST_TMPDIR"]) / "src"
    dst = src.with_name("dst")
    contents = {f"a/{i}/b/{j}.txt": f"{i} {j}" for i in range(4) for j in range(5)}
    for name, text in contents.items():
      (src / name).parent.mkdir(parents=True, exist_ok=True)
      (src / name).write_text(text)
    dst.mkdir()
    (dst / "stale").write_text("gone after the copy")

    utils.CopyRecursively(str(src), str(dst), max_workers=2)

    found = {str(p.relative_to(dst)): p.read_text() for p in dst.rglob("*") if p.is_file()}
    self.assertEqual(found, contents)

  def test_copy_recursively_takes_a_single_file(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    (folder / "one").write_text("text")

    utils.CopyRecursively(str(folder / "one"), str(folder / "two"))

    self.assertEqual((folder / "two").read_text(), "text")

  def test_copy_recursively_of_an_absent_source(self):
    folder = os.environ["TEST_TMPDIR"]
    utils.CopyRecursively(folder + "/absent", folder + "/dst")
    self.assertFalse(os.path.exists(folder + "/dst"))

    with self.assertRaisesRegex(ValueError, "absent doesn't exist!"):
      utils.CopyRecursively(folder + "/absent", folder + "/dst", skip_nonexist=False)

  def test_copy_recursively_raises_what_a_worker_met(self):
    src = pathlib.Path(os.environ["TEST_TMPDIR"]) / "src"
    src.mkdir()
    (src / "file").write_text("text")
    (src / "dangling").symlink_to(src / "nowhere")

    with self.assertRaises(tf.errors.NotFoundError):
      utils.CopyRecursively(str(src), str(src) + "2", max_workers=2, skip_nonexist=False)

  def test_copy_file_gives_up_silently_or_raises(self):
    folder = os.environ["TEST_TMPDIR"]
    utils.CopyFile(folder + "/absent", folder + "/dst", max_retries=2)

    with self.assertRaises(tf.errors.NotFoundError):
      utils.CopyFile(folder + "/absent", folder + "/dst", skip_nonexist=False)

  def test_copy_file_does_not_overwrite_when_told_so(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")

    with self.assertRaises(tf.errors.AlreadyExistsError):
      utils.CopyFile(str(folder / "a"), str(folder / "b"), overwrite=False)
    self.assertEqual((folder / "b").read_text(), "b")


class FindMainTest(tf.test.TestCase):
  def _find_main_in(self, layout: str) -> str:
    """Copies path_utils to a folder laid out like `layout` and asks it there."""
    package = pathlib.Path(os.environ["TEST_TMPDIR"]) / layout / "monolith"
    package.mkdir(parents=True)
    shutil.copy(path_utils.__file__, package / "path_utils.py")
    program = "import path_utils; print(path_utils.find_main())"
    process = subprocess.run(
      [sys.executable, "-c", program], cwd=package, capture_output=True, text=True
    )
    return (process.stdout or process.stderr).strip()

  def test_site_packages(self):
    self.assertEndsWith(self._find_main_in("lib/site-packages"), "/lib/site-packages")

  def test_bazel_runfiles_win_over_site_packages(self):
    found = self._find_main_in("site-packages/x.runfiles/__main__")
    self.assertEndsWith(found, "/x.runfiles/__main__")

  def test_checkout_below_another_folder_named_monolith(self):
    self.assertEndsWith(self._find_main_in("monolith/src"), "/monolith/src")

  def test_no_base_directory(self):
    folder = pathlib.Path(os.environ["TEST_TMPDIR"]) / "site-packages"
    folder.mkdir()
    shutil.copy(path_utils.__file__, folder / "path_utils.py")
    process = subprocess.run(
      [sys.executable, "-c", "import path_utils; path_utils.find_main()"],
      cwd=folder,
      capture_output=True,
      text=True,
    )
    self.assertIn("Unable to find the monolith base directory", process.stderr)
    self.assertIn(str(folder / "path_utils.py"), process.stderr)


if __name__ == "__main__":
  tf.test.main()
