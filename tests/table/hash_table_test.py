"""`monolith.table.HashTable`: rows, files and errors, with the C interface below it.

Tests `table/library.py` and `table/arrays.py` as well.
"""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import unittest
from unittest import mock

import numpy as np

from monolith import table as tables
from monolith.table import arrays

_LEAST, _MOST = -(2**63), 2**63 - 1


def _sgd(dim=2, **options):
  options = {"optimizer": "sgd", "initializer": "zeros", "learning_rate": 1.0, **options}
  return tables.HashTable(dim, **options)


def _folder() -> pathlib.Path:
  return pathlib.Path(os.environ["TEST_TMPDIR"])


class RowsTest(unittest.TestCase):
  def test_rows_are_made_by_writes_and_not_by_lookups(self):
    table = _sgd()
    self.assertEqual(table.lookup([7, 9]).tolist(), [[0, 0], [0, 0]])
    self.assertEqual(len(table), 0)

    table.update([7], [[1, 2]])

    self.assertEqual(table.lookup([7, 9]).tolist(), [[-1, -2], [0, 0]])
    self.assertEqual(table.contains([[7], [9]]).tolist(), [[True], [False]])
    self.assertIn(7, table)
    self.assertNotIn(9, table)
    self.assertTrue(bool(_sgd()))

  def test_extreme_ids_are_ids(self):
    table = _sgd(1)
    ids = np.array([_LEAST, _LEAST + 1, -1, 0, 1, _MOST - 1, _MOST])
    table.assign(ids, np.arange(7.0))
    np.testing.assert_array_equal(table.lookup(ids)[:, 0], np.arange(7.0))
    np.testing.assert_array_equal(table.items()[0], ids)

  def test_gradients_of_equal_ids_make_one_step(self):
    table = tables.HashTable(
      1, tables.Optimizer("adagrad", initial_accumulator_value=1.0), "zeros", learning_rate=1.0
    )
    table.update([3, 3, 4], [[1.0], [2.0], [1.0]])
    expected = [-3 / np.sqrt(10), -1 / np.sqrt(2)]
    np.testing.assert_allclose(table.lookup([3, 4])[:, 0], expected, rtol=1e-6)

  def test_assign_keeps_the_last_and_assign_add_counts_each(self):
    table = _sgd(1)
    table.assign([5, 5], [[1], [2]])
    table.assign_add([5, 5, 6], [[10], [20], [3]])
    self.assertEqual(table.lookup([5, 6]).tolist(), [[32], [3]])

  def test_empty_batches_change_nothing(self):
    table = _sgd()
    self.assertEqual(table.lookup([]).shape, (0, 2))
    self.assertEqual(table.lookup(np.zeros([3, 0], np.int64)).shape, (3, 0, 2))
    table.update([], np.zeros([0, 2]))
    table.assign([], [])
    table.erase([])
    ids, rows = table.items()
    self.assertEqual((ids.shape, rows.shape, len(table)), ((0,), (0, 2), 0))

  def test_ids_and_gradients_of_any_layout(self):
    table = _sgd()
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    gradients = np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 2, 2))
    table.update(ids, gradients)
    np.testing.assert_array_equal(table.lookup(ids), -gradients)
    np.testing.assert_array_equal(table.lookup(memoryview(np.array([2]))), [[-2, -3]])
    self.assertEqual(table.lookup(np.int64(2)).tolist(), [-2, -3])
    out = np.empty([1, 2], np.float32)
    self.assertIs(table.lookup(np.array([2], ">i8"), out=out), out)
    self.assertEqual(out.tolist(), [[-2, -3]])

  def test_arrays_of_others_are_read_where_they_lie(self):
    class Shared:
      """Has DLPack and nothing else."""

      def __init__(self, values):
        self.values = values

      def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

      def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    values = np.array([3, 2**62])
    self.assertTrue(np.shares_memory(arrays.as_ids(Shared(values)), values))
    self.assertTrue(np.shares_memory(arrays.as_ids(memoryview(values)), values))
    floats = np.ones([2, 4], np.float32)
    given = arrays.as_floats(Shared(floats), "values", values, 4)
    self.assertTrue(np.shares_memory(given, floats))
    rows = _sgd().lookup(values)
    self.assertTrue(np.shares_memory(np.from_dlpack(rows), rows))

  def test_calls_give_the_gil_away(self):
    # One thread waits in the engine until another, in the midst of a call, has run some Python. If
    # it kept the GIL meanwhile, neither would go on.
    program = """
import threading, time
from monolith import table as tables
from monolith.table import library

table = tables.HashTable(2, "sgd", "zeros")
table.assign([1], [[1, 2]])
inside = threading.Event()
steps = []

def take(*_):
  inside.set()
  configure.start()
  while "configure" not in steps:
    time.sleep(0.01)
  for i in range(20):
    time.sleep(0.01)
    steps.append(i)
  return 0

def wait():
  inside.wait()
  steps.append("configure")
  table.configure("adagrad")  # waits for the call that has called `take`
  steps.append("configured")

configure = threading.Thread(target=wait)
sink = library.ROW_SINK(take)
library.call("mono_table_rows", table.handle, sink, None)
configure.join()
print(steps == ["configure", *range(20), "configured"])
"""
    done = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    self.assertEqual(done.stdout, "True\n", done.stderr)

  def test_wrong_ids_and_values_are_named(self):
    table = _sgd()
    for ids, error, text in (
      ([2**63], ValueError, "id 9223372036854775808 does not fit"),
      ([1.5], TypeError, "ids have dtype float64"),
      (["tea"], TypeError, "want integers"),
      ([True], TypeError, "bool"),
      (np.array([1], np.uint64), TypeError, "uint64"),
    ):
      with self.subTest(ids), self.assertRaisesRegex(error, text):
        table.lookup(ids)
    with self.assertRaisesRegex(ValueError, r"gradients has shape \(3,\), want 2 floats"):
      table.update([1], [1, 2, 3])
    for gradients in (np.ones([2, 3]), np.ones([2, 1, 3])):
      with self.assertRaisesRegex(ValueError, "want 2 floats for each of 3 ids"):
        table.update([1, 2, 3], gradients)
    with self.assertRaisesRegex(TypeError, "values have dtype"):
      table.assign([1], [["a", "b"]])
    with self.assertRaisesRegex(ValueError, "out has shape"):
      table.lookup([1], out=np.zeros([2, 2], np.float32))
    with self.assertRaisesRegex(TypeError, "out is float64"):
      table.lookup([1], out=np.zeros([1, 2]))
    with self.assertRaisesRegex(ValueError, "gaps"):
      table.lookup([1], out=np.zeros([1, 4], np.float32)[:, ::2])
    with self.assertRaisesRegex(TypeError, "several ids"):
      table.__contains__([1, 2])
    self.assertEqual(len(table), 0)

  def test_wrong_configurations_are_named(self):
    for options, text in (
      ({"dim": 0}, "dim is 0"),
      ({"optimizer": "adamm"}, "optimizer is 'adamm'"),
      ({"initializer": "zero"}, "initializer is 'zero'"),
      ({"initializer": float("nan")}, "initializer is nan"),
      ({"admit_after": 16}, "admit_after is 16"),
      ({"admit_capacity": 0}, "admit_capacity is 0"),
      ({"expire_after": "3h"}, "expire_after is '3h'"),
      ({"learning_rate": float("inf")}, "learning_rate is inf"),
      ({"seed": -1}, "seed is -1"),
      ({"initial_capacity": -1}, "initial_capacity"),
      ({"initial_capacity": 2**62}, "initial_capacity"),
    ):
      with self.subTest(options), self.assertRaisesRegex((ValueError, MemoryError), text):
        tables.HashTable(**{"dim": 2, **options})

  def test_rows_that_are_not_finite_are_refused_and_named(self):
    table = _sgd(1)
    bad = [[1], [float("nan")]]
    with self.assertRaisesRegex(ValueError, "id 9"):
      table.update([8, 9], bad)
    with self.assertRaisesRegex(ValueError, "id 9"):
      table.assign([8, 9], bad)
    self.assertNotIn(9, table)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
      table.assign([8, 9], bad)
    self.assertEqual(table.lookup([8, 9]).tolist(), [[1], [0]])
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
      table.assign([9], [[float("nan")]])
    self.assertTrue(np.isnan(table.lookup([9])[0, 0]))
    self.assertGreaterEqual(table.stats()["nonfinite_gradients"], 3)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="maybe"):
      with self.assertRaisesRegex(ValueError, "want stop, skip or ignore"):
        table.assign([9], [[1]])

  def test_erase_reinitialize_and_clear(self):
    table = _sgd(1)
    table.assign([1, 2, 3], [[1], [2], [3]])
    table.erase([2, 99])
    self.assertEqual(table.reinitialize([1, 4]).tolist(), [True, False])
    self.assertEqual(table.items()[0].tolist(), [1, 3, 4])
    self.assertEqual(table.lookup([1]).tolist(), [[0]])
    table.clear()
    self.assertEqual(len(table), 0)

  def test_more_rows_than_can_be_numbered_are_refused(self):
    with tables.HashTable(4) as table:
      for rows in (1 << 32, 1 << 62, -1):
        with self.assertRaisesRegex(ValueError, f"capacity is {rows}, want 0 to 4294967294 rows"):
          table.reserve(rows)
      table.reserve(1000)
      table.assign([1], [[1, 2, 3, 4]])

      self.assertEqual(len(table), 1)

  def test_rows_expire(self):
    table = _sgd(1, expire_after="1d")
    table.assign([1], [[1]], now=1000)
    table.assign([2], [[2]], now=1000 + 86400)
    self.assertEqual(table.evict(), 1)
    self.assertEqual(table.items()[0].tolist(), [2])
    self.assertEqual(table.stats()["expired"], 1)

  def test_ids_are_admitted_after_some_occurrences(self):
    table = _sgd(1, admit_after=2)
    for _ in range(2):
      table.update([5], [[1]])
    self.assertNotIn(5, table)
    table.update([5], [[1]])
    self.assertIn(5, table)

  def test_an_id_counts_once_in_a_batch(self):
    table = _sgd(1, admit_after=2)
    for _ in range(2):
      table.update([5, 5, 5], [[1]] * 3)
    self.assertNotIn(5, table)
    table.update([5, 5, 5], [[1]] * 3)
    self.assertIn(5, table)

  def test_schedules_see_the_step(self):
    table = _sgd(1, learning_rate=lambda step: 10.0**step)
    for _ in range(3):
      table.update([1], [[1]])
    self.assertEqual(table.lookup([1]).tolist(), [[-111]])
    self.assertEqual(table.steps, 3)
    table.learning_rate = 0.5
    table.update([1], [[1]])
    self.assertEqual(table.lookup([1]).tolist(), [[-111.5]])
    table.steps = 7
    table.learning_rate = float
    table.update([1], [[1]])
    self.assertEqual((table.lookup([1]).tolist(), table.steps), ([[-118.5]], 8))
    with self.assertRaisesRegex(ValueError, "steps is -1"):
      table.steps = -1

  def test_learning_rates_that_are_no_numbers_change_nothing(self):
    for rate in (float("nan"), float("inf"), 1e39):
      table = _sgd(1, learning_rate=lambda step, rate=rate: rate)
      with self.subTest(rate), self.assertRaisesRegex(ValueError, "learning_rate of step 0"):
        table.update([1], [[1]])
      self.assertEqual(len(table), 0)

  def test_another_optimizer_keeps_rows_and_state_of_its_kind(self):
    table = tables.HashTable(1, "adagrad", "zeros", learning_rate=1.0)
    table.update([1], [[3.0]])
    before = table.lookup([1])
    table.configure(tables.Optimizer("adagrad", weight_decay=0.0, initial_accumulator_value=7))
    self.assertEqual(table.lookup([1]), before)
    table.update([1], [[4.0]])
    np.testing.assert_allclose(table.lookup([1]) - before, [[-4 / 5]], rtol=1e-5)
    with self.assertRaisesRegex(ValueError, "adamm"):
      table.configure("adamm")
    self.assertEqual(table.optimizer.kind, "adagrad")

  def test_several_tables_at_once(self):
    one, two = _sgd(1), _sgd(2)
    tables.update_many([(one, [1, 1], [[1], [2]]), (two, [1], [[3, 4]])])
    out = [np.empty([2, 1], np.float32), np.empty([1, 2], np.float32)]
    tables.lookup_many([(one, [1, 8], out[0]), (two, [1], out[1])])
    self.assertEqual([part.tolist() for part in out], [[[-3], [0]], [[-3, -4]]])
    tables.update_many([])
    tables.lookup_many([])
    with self.assertRaisesRegex(ValueError, "twice"):
      tables.update_many([(one, [1], [[1]]), (one, [1], [[1]])])

  def test_a_closed_table_says_so(self):
    with _sgd() as table:
      pass
    with self.assertRaisesRegex(ValueError, "closed"):
      table.lookup([1])
    self.assertIn("closed", repr(table))
    with self.assertRaisesRegex(TypeError, "save it"):
      __import__("copy").copy(_sgd())

  def test_threads_never_see_half_a_row(self):
    table = _sgd(16)
    ids = np.arange(5000)
    torn, errors = [], []

    def work(number):
      try:
        for step in range(15):
          table.assign(ids, np.full([5000, 16], number * 100 + step, np.float32))
          rows = table.lookup(ids)
          torn.append(int((rows != rows[:, :1]).sum()))
          if step % 5 == number:
            table.configure("sgd")
          table.items()
      except Exception as error:
        errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(errors, [])
    self.assertEqual((sum(torn), len(table)), (0, 5000))

  def test_a_forked_child_can_look_up(self):
    table = _sgd(8)
    ids = np.arange(100000)
    table.assign(ids, np.ones([100000, 8]))
    child = os.fork()
    if child == 0:
      os._exit(0 if table.lookup(ids).sum() == 800000 else 1)
    self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

  def test_threads_can_be_set(self):
    tables.set_num_threads(1)
    self.addCleanup(tables.set_num_threads, 0)
    table = _sgd(1)
    table.assign(np.arange(50000), np.arange(50000.0))
    self.assertEqual(table.lookup([49999]).tolist(), [[49999]])
    with self.assertRaisesRegex(ValueError, "threads is -1"):
      tables.set_num_threads(-1)


class FilesTest(unittest.TestCase):
  def test_paths_with_null_bytes_are_refused(self):
    table = _sgd(1)
    for call in (table.save, table.load):
      with self.assertRaisesRegex(ValueError, "null bytes"):
        call("a\0b")

  def test_load_restores_rows_and_state(self):
    table, other = tables.HashTable(3, "adam"), tables.HashTable(3, "adam")
    table.update([1, _LEAST], np.ones([2, 3]))
    path = _folder() / "sub" / "table"
    self.assertEqual(table.save(path), 2)
    self.assertEqual(other.load(path), 2)
    self.assertEqual(other.entries(), table.entries())
    names = sorted(os.listdir(path.parent))
    self.assertEqual(names, [".table.manifest", "table-00000-of-00001"])

  def test_adam_goes_on_from_files(self):
    path = _folder() / "adam"
    gradients = np.random.default_rng(1).normal(size=[30, 3, 2])
    table, other, older = (tables.HashTable(2, initializer="zeros") for _ in range(3))
    for step in gradients[:10]:
      table.update([1, 2, 3], step)
    table.save(path)
    for step in gradients[10:20]:
      table.update([1, 2, 3], step)
      older.update([1, 2, 3], step)
    other.load(path)
    older.load(path)
    # New rows have no moments yet.
    other.assign([4], [[5, 6]])
    for step in gradients[10:20]:
      other.update([1, 2, 3], step)
      older.update([1, 2, 3], step)
    np.testing.assert_array_equal(other.lookup([1, 2, 3]), table.lookup([1, 2, 3]))
    np.testing.assert_array_equal(older.lookup([1, 2, 3]), table.lookup([1, 2, 3]))
    self.assertEqual(other.steps, 10)

  def test_what_cannot_be_loaded_changes_nothing(self):
    table = _sgd(2)
    table.assign(np.arange(1000), np.ones([1000, 2]))
    path = _folder() / "torn"
    table.save(path)
    other = _sgd(2)
    other.assign([5], [[8, 9]])
    with self.assertRaisesRegex(ValueError, "missing|no "):
      other.load(_folder() / "nothing")
    wide = _sgd(3)
    with self.assertRaises(ValueError):
      wide.load(path)

    file = _folder() / "torn-00000-of-00001"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (b"", whole[:-1], whole[:11], whole + b"x", bytes(flipped)):
      file.write_bytes(damaged)
      with self.assertRaisesRegex(tables.TableError, "torn-00000-of-00001"):
        other.load(path)
    self.assertEqual(other.items()[1].tolist(), [[8, 9]])
    file.unlink()
    with self.assertRaises(ValueError):
      other.load(path)
    self.assertEqual(len(other), 1)

  def test_a_folder_that_cannot_be_written_is_an_error(self):
    with self.assertRaises((OSError, tables.TableError)):
      _sgd().save("/proc/none/table")

  def test_a_kill_in_the_middle_of_a_save_leaves_one_of_both_sets(self):
    path = _folder() / "killed"
    program = (
      "import sys, numpy as np, monolith.table as t\n"
      "table = t.HashTable(4, 'sgd', 'zeros')\n"
      "ids = np.arange(200000)\n"
      "for i in range(10**6):\n"
      "  table.assign(ids, np.full([len(ids), 4], i, np.float32))\n"
      "  table.save(sys.argv[1])\n"
      "  print(i, flush=True)\n"
    )
    for lines in (1, 2):
      process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
      )
      with process:
        for _ in range(lines):
          saved = int(process.stdout.readline())
        # Somewhere in the next assignment or save.
        threading.Event().wait(0.02 * lines)
        process.send_signal(signal.SIGKILL)
      table = _sgd(4)
      self.assertEqual(table.load(path), 200000)
      rows = table.items()[1]
      self.assertEqual(len(np.unique(rows)), 1)
      self.assertGreaterEqual(rows[0, 0], saved)

  @unittest.skipUnless(importlib.util.find_spec("pyarrow"), "needs pyarrow")
  def test_all_rows_become_a_table_of_arrow(self):
    table = _sgd(2)
    table.assign([2, 1], [[3, 4], [1, 2]], now=77)
    self.assertEqual(
      table.to_arrow().to_pydict(),
      {"id": [1, 2], "last_update": [77, 77], "vector": [[1, 2], [3, 4]]},
    )

  @unittest.skipUnless(importlib.util.find_spec("pandas"), "needs pandas")
  def test_all_rows_become_a_frame_of_pandas(self):
    table = _sgd(2)
    table.assign([2, 1], [[3, 4], [1, 2]])
    self.assertEqual(table.to_pandas().loc[2].tolist(), [3, 4])


class ImportTest(unittest.TestCase):
  def _run(self, program, **environment):
    return subprocess.run(
      [sys.executable, "-c", program],
      capture_output=True,
      text=True,
      env={**os.environ, **environment},
    )

  def test_no_tensorflow_is_loaded(self):
    program = (
      "import sys, monolith.table\n"
      "monolith.table.HashTable(2).update([1], [[1, 2]])\n"
      "print([m for m in ('tensorflow', 'google.protobuf', 'pandas', 'pyarrow') "
      "if m in sys.modules])"
    )
    done = self._run(program)
    self.assertEqual(done.stdout, "[]\n", done.stderr)

  def test_configurations_of_entry_load_no_tensorflow(self):
    program = (
      "import sys, monolith.table\n"
      "from monolith.native_training import entry\n"
      "t = monolith.table.HashTable(2, entry.FtrlOptimizer(), entry.ZerosInitializer())\n"
      "print(t.optimizer.kind, 'tensorflow' in sys.modules)"
    )
    done = self._run(program)
    self.assertEqual(done.stdout, "ftrl False\n", done.stderr)

  def test_a_missing_library_is_named(self):
    done = self._run(
      "import monolith.table\nmonolith.table.HashTable(2)", MONOLITH_ENGINE_LIBRARY="/no/lib.so"
    )
    self.assertIn("TableError: Tables need libmonolith_engine.so", done.stderr)
    self.assertIn("/no/lib.so", done.stderr)


if __name__ == "__main__":
  unittest.main()
