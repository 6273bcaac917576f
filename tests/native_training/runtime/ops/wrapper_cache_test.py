"""Compiled wrappers of ops are kept, and compiled again when what is kept does not fit."""

import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import tensorflow as tf
from absl.testing import absltest
from tensorflow.python.autograph.utils import ag_logging

from monolith.native_training.runtime.ops import gen_monolith_ops, wrapper_cache


class WrapperCacheTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    self._library = os.path.join(folder, "libops.so")
    self._old = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = False, None

  def tearDown(self):
    sys.dont_write_bytecode, sys.pycache_prefix = self._old
    super().tearDown()

  def _run(self, source: bytes):
    names: dict = {}
    exec(wrapper_cache._compile(source, self._library), names)
    return names["x"]

  def _files(self):
    return list((pathlib.Path(self._library).parent / "__pycache__").glob("*"))

  def test_functions_that_call_ops_do_not_warn(self):
    @tf.function
    def rows_of(splits):
      return gen_monolith_ops.monolith_fused_value_rowids(splits)

    with mock.patch.object(ag_logging, "warning") as warning:
      self.assertEqual(rows_of(tf.constant([0, 0, 1, 3], tf.int64)).numpy().tolist(), [1, 2, 2])
    warning.assert_not_called()

  def test_code_is_kept_and_used(self):
    self.assertEqual(self._run(b"x = 1"), 1)
    [path] = self._files()
    content = path.read_bytes()

    self.assertEqual(self._run(b"x = 1"), 1)

    self.assertEqual([path], self._files())
    self.assertEqual(content, path.read_bytes())

  def test_other_source_is_compiled(self):
    self._run(b"x = 1")
    self.assertEqual(self._run(b"x = 2"), 2)
    self.assertEqual(self._run(b"x = 2"), 2)
    self.assertLen(self._files(), 1)

  def test_damaged_files_are_not_read(self):
    self._run(b"x = 1")
    [path] = self._files()
    content = path.read_bytes()
    for damaged in (b"", content[:50], content[:-1], content[:-4] + b"\xff\xff\xff\xff"):
      path.write_bytes(damaged)
      self.assertEqual(self._run(b"x = 1"), 1)
      self.assertEqual(path.read_bytes(), content)

  def test_nothing_is_written_where_python_writes_nothing(self):
    sys.dont_write_bytecode = True
    self.assertEqual(self._run(b"x = 1"), 1)
    self.assertEmpty(self._files())

  def test_a_folder_that_cannot_be_written_is_no_error(self):
    self._library = "/proc/none/libops.so"
    self.assertEqual(self._run(b"x = 1"), 1)

  def test_wrappers_from_the_cache_work(self):
    with tempfile.TemporaryDirectory() as folder:
      program = (
        "from monolith.native_training.runtime.ops import gen_monolith_ops as ops\n"
        "print(ops.monolith_fused_value_rowids([0, 0, 1, 3]).numpy().tolist())\n"
      )
      environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
      environment.pop("PYTHONDONTWRITEBYTECODE", None)
      for _ in range(2):
        output = subprocess.run(
          [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        self.assertEqual(output.stdout, "[1, 2, 2]\n", output.stderr)
      self.assertLen(list(pathlib.Path(folder).rglob("*.wrappers")), 1)

  def test_loading_again_gives_the_same_module(self):
    self.assertIs(gen_monolith_ops.load_library(), gen_monolith_ops.load_library())


if __name__ == "__main__":
  absltest.main()
