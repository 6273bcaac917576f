"""The binding of GPU tables: its structures, its arguments and, on a GPU, what it does.

Covers `native_training/gpu_table.py` and what is behind it: `gpu/structures.py`, `gpu/library.py`,
`gpu/arrays.py`, `gpu/table.py`, `gpu/many.py`.
"""

import ctypes
import os
import pathlib
import re
import tempfile
import unittest
from unittest import mock

import numpy as np

from monolith.native_training import gpu_table
from monolith.native_training.gpu import arrays, library, structures

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RUNTIME = _ROOT / "monolith/native_training/runtime"
_C_TYPES = {
  "int64_t": ctypes.c_int64,
  "uint64_t": ctypes.c_uint64,
  "int32_t": ctypes.c_int32,
  "uint32_t": ctypes.c_uint32,
  "float": ctypes.c_float,
}


class FakeArray:
  """Has the interface and no memory."""

  def __init__(self, shape, typestr, strides=None, read_only=False):
    self.__cuda_array_interface__ = {
      "shape": shape,
      "typestr": typestr,
      "data": (4096, read_only),
      "strides": strides,
      "version": 3,
    }


class StructuresTest(unittest.TestCase):
  def test_are_those_of_the_c_interface(self):
    text = (_RUNTIME / "gpu/c_api.h").read_text("utf-8")
    for name, structure in (
      ("MonoGpuTableSegment", structures.Segment),
      ("MonoGpuTableConfig", structures.Config),
      ("MonoGpuWriteOptions", structures.WriteOptions),
      ("MonoGpuTableStats", structures.Stats),
      ("MonoGpuLookupJob", structures.LookupJob),
      ("MonoGpuOptimizeJob", structures.OptimizeJob),
    ):
      body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.S).group(1)
      body = re.sub(r"//[^\n]*", "", body)
      declared = re.findall(r"([\w ]+?[\s*]+)(\w+);", body)
      with self.subTest(name):
        self.assertEqual([field for _, field in declared], [f for f, _ in structure._fields_])
        for (c_type, field), (_, python_type) in zip(declared, structure._fields_):
          c_type = c_type.replace("const", "").strip()
          if c_type in _C_TYPES:
            self.assertIs(python_type, _C_TYPES[c_type], field)
          else:
            self.assertEqual(ctypes.sizeof(python_type), ctypes.sizeof(ctypes.c_void_p), field)

  def test_kinds_have_the_numbers_of_the_engine(self):
    text = (_RUNTIME / "hash_table/table_config.h").read_text("utf-8")
    for name, kinds in (
      ("OptimizerKind", gpu_table.OPTIMIZERS),
      ("InitializerKind", gpu_table.INITIALIZERS),
      ("CompressorKind", gpu_table.COMPRESSORS),
    ):
      names = re.findall(r"k(\w+)", re.search(rf"enum class {name}.*?{{(.*?)}}", text, re.S)[1])
      for kind, number in kinds.items():
        wanted = "absent" if kind is None else kind.replace("_", "")
        self.assertEqual(names[number].lower(), wanted)


class ArgumentsTest(unittest.TestCase):
  def test_arrays_have_to_be_as_wanted(self):
    address = arrays.address_of
    self.assertEqual(address(FakeArray((3,), "<i8"), "ids", "<i8", (3,)), 4096)
    self.assertEqual(address(FakeArray((3, 2), "<f4", (8, 4)), "out", "<f4", (3, 2)), 4096)
    for array, error, text in (
      (np.zeros(3, np.int64), TypeError, "ids is no array on a GPU: ndarray"),
      (FakeArray((3,), "<i4"), TypeError, "ids has type <i4, want <i8"),
      (FakeArray((4,), "<i8"), ValueError, r"ids has shape \(4,\), want \(3,\)"),
      (FakeArray((3,), "<i8", (16,)), ValueError, r"ids has gaps: strides are \(16,\)"),
      (FakeArray((3,), "<i8", read_only=True), ValueError, "ids must not be written"),
    ):
      with self.assertRaisesRegex(error, text):
        address(array, "ids", "<i8", (3,), writable=True)

  def test_names_a_library_that_is_missing(self):
    with mock.patch.object(library, "_library", None):
      with mock.patch.dict(os.environ, {"MONOLITH_CUDA_LIBRARY": "/nowhere/lib.so"}):
        with self.assertRaisesRegex(gpu_table.GpuTableError, "/nowhere/lib.so"):
          gpu_table.GpuTable(gpu_table.Segment(4))


def _library():
  """Returns the library where it can be used: on a GPU, or if it was named, as loops."""
  try:
    found = library.load()
  except gpu_table.GpuTableError:
    return None
  devices = ctypes.c_int32()
  found.mono_gpu_device_count(ctypes.byref(devices))
  usable = devices.value > 0 or "MONOLITH_CUDA_LIBRARY" in os.environ
  return found if usable else None


class DeviceArray:
  """An array on the device that needs no other library."""

  def __init__(self, values):
    self._library = library.load()
    self._shape, self._dtype = values.shape, values.dtype
    self._memory = ctypes.c_void_p()
    values = np.ascontiguousarray(values)
    assert (
      self._library.mono_gpu_allocate(ctypes.c_int64(values.nbytes), ctypes.byref(self._memory))
      == 0
    )
    self._library.mono_gpu_write_now(
      ctypes.c_void_p(values.ctypes.data), self._memory, ctypes.c_int64(values.nbytes)
    )
    self.__cuda_array_interface__ = {
      "shape": values.shape,
      "typestr": values.dtype.str,
      "data": (self._memory.value, False),
      "version": 3,
    }

  def read(self):
    values = np.empty(self._shape, self._dtype)
    self._library.mono_gpu_synchronize(None)
    self._library.mono_gpu_read_now(
      self._memory, ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(values.nbytes)
    )
    return values

  def __del__(self):
    self._library.mono_gpu_free(self._memory)


@unittest.skipIf(_library() is None, "needs libmonolith_cuda.so and a GPU")
class TableTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    segment = gpu_table.Segment(4, optimizer="adagrad", initializer="constants", constant=1.0)
    self.table = gpu_table.GpuTable(segment, expire_days=1)
    self.addCleanup(self.table.close)
    self.ids = DeviceArray(np.array([7, -1, 0, 7], np.int64))

  def _lookup(self, table, ids=(7, -1, 0)):
    ids = DeviceArray(np.array(ids, np.int64))
    n = ids.__cuda_array_interface__["shape"][0]
    found = DeviceArray(np.zeros(n, np.uint8))
    out = DeviceArray(np.full((n, 4), 9, np.float32))
    self.assertIs(table.lookup(ids, out, found), out)
    return out.read(), found.read()

  def test_steps_once_for_the_sum_of_gradients_or_for_each(self):
    gradients = DeviceArray(np.full((4, 4), 0.5, np.float32))

    self.table.optimize(self.ids, gradients, [0.1], req_time=100)

    out, found = self._lookup(self.table, (7, -1, 5))
    once = 1 - 0.1 * 0.5 / np.sqrt(0.1 + 0.25)
    summed = 1 - 0.1 * 1.0 / np.sqrt(0.1 + 1.0)
    np.testing.assert_allclose(out, [[summed] * 4, [once] * 4, [0] * 4], rtol=1e-6)
    np.testing.assert_array_equal(found, [1, 1, 0])
    self.assertEqual(len(self.table), 3)

    self.table.clear()
    self.table.optimize(self.ids, gradients, [0.1], duplicates="steps")

    twice = once - 0.1 * 0.5 / np.sqrt(0.1 + 0.5)
    np.testing.assert_allclose(self._lookup(self.table)[0][0], [twice] * 4, rtol=1e-6)

  def test_many_tables_are_looked_up_together(self):
    wide = gpu_table.GpuTable(gpu_table.Segment(7, optimizer="sgd"))
    self.addCleanup(wide.close)
    narrow_values = np.arange(16, dtype=np.float32).reshape(4, 4)
    wide_values = np.arange(21, dtype=np.float32).reshape(3, 7)
    self.table.assign(self.ids, DeviceArray(narrow_values))
    wide.assign(DeviceArray(np.array([3, 2**62, -9], np.int64)), DeviceArray(wide_values))
    found = DeviceArray(np.full(2, 9, np.uint8))
    lookups = [
      (self.table, [-1, 7], np.full((2, 4), 9, np.float32)),
      (wide, [-9, 5], np.full((2, 7), 9, np.float32), found),
      (self.table, [], np.zeros((0, 4), np.float32)),
      (self.table, [0], np.full((1, 4), 9, np.float32)),
    ]
    lookups = [
      (table, DeviceArray(np.array(ids, np.int64)), DeviceArray(out), *rest)
      for table, ids, out, *rest in lookups
    ]

    outs = gpu_table.lookup_many(lookups)

    self.assertEqual(outs, [lookup[2] for lookup in lookups])
    np.testing.assert_array_equal(outs[0].read(), narrow_values[[1, 3]])
    np.testing.assert_array_equal(outs[1].read(), [wide_values[2], np.zeros(7)])
    np.testing.assert_array_equal(outs[3].read(), narrow_values[[2]])
    np.testing.assert_array_equal(found.read(), [1, 0])
    self.assertEqual(gpu_table.lookup_many([]), [])
    with self.assertRaisesRegex(ValueError, r"lookups\[1\]: out has shape \(1, 4\), want \(1, 7\)"):
      gpu_table.lookup_many([lookups[3], (wide, lookups[3][1], lookups[3][2])])
    wide.close()
    with self.assertRaisesRegex(ValueError, r"lookups\[0\]: the table is closed"):
      gpu_table.lookup_many([lookups[1]])

  def test_many_tables_are_stepped_together(self):
    wide = gpu_table.GpuTable(gpu_table.Segment(7, optimizer="sgd", initializer="zeros"))
    self.addCleanup(wide.close)
    steps = [
      (self.table, [7, -1], np.full((2, 4), 0.5, np.float32), [0.1]),
      (wide, [3, 3, -9], np.arange(21, dtype=np.float32).reshape(3, 7), [1.0]),
      (wide, [], np.zeros((0, 7), np.float32), [1.0]),
      (self.table, [0, 7], np.full((2, 4), 0.5, np.float32), [0.1]),
    ]
    steps = [
      (table, DeviceArray(np.array(ids, np.int64)), DeviceArray(gradients), rates)
      for table, ids, gradients, rates in steps
    ]

    gpu_table.optimize_many(steps, req_time=100)

    once = 1 - 0.1 * 0.5 / np.sqrt(0.1 + 0.25)
    summed = 1 - 0.1 * 1.0 / np.sqrt(0.1 + 1.0)
    out, found = self._lookup(self.table, (7, -1, 0))
    np.testing.assert_allclose(out, [[summed] * 4, [once] * 4, [once] * 4], rtol=1e-6)
    np.testing.assert_array_equal(found, [1, 1, 1])
    rows = DeviceArray(np.full((2, 7), 9, np.float32))
    wide.lookup(DeviceArray(np.array([3, -9], np.int64)), rows)
    values = np.arange(21, dtype=np.float32).reshape(3, 7)
    np.testing.assert_array_equal(rows.read(), [-(values[0] + values[1]), -values[2]])
    self.assertEqual(self.table.stats()["max_update_ts"], 100)

    gpu_table.optimize_many([steps[0]], duplicates="none")
    self.assertEqual(len(self.table), 3)
    gpu_table.optimize_many([])
    with self.assertRaisesRegex(
      ValueError, r"steps\[1\]: learning_rates are \[0.2\], those before"
    ):
      gpu_table.optimize_many([steps[0], (*steps[3][:3], [0.2])])
    with self.assertRaisesRegex(
      ValueError, r"steps\[1\]: gradients has shape \(2, 4\), want \(3, 7\)"
    ):
      gpu_table.optimize_many([steps[0], (*steps[1][:2], steps[0][2], [1.0])])
    wide.close()
    with self.assertRaisesRegex(ValueError, r"steps\[0\]: the table is closed"):
      gpu_table.optimize_many([steps[1]])

  def test_callers_that_know_their_arrays_hand_over_addresses(self):
    def address(array):
      return array.__cuda_array_interface__["data"][0]

    wide = gpu_table.GpuTable(gpu_table.Segment(7, optimizer="sgd", initializer="zeros"))
    self.addCleanup(wide.close)
    more = DeviceArray(np.array([3, 3], np.int64))
    narrow_gradients = DeviceArray(np.full((4, 4), 0.5, np.float32))
    wide_gradients = DeviceArray(np.full((2, 7), 3.0, np.float32))
    steps = [
      (self.table, address(self.ids), 4, address(narrow_gradients)),
      (wide, address(more), 2, address(wide_gradients)),
    ]
    outs = DeviceArray(np.zeros((4, 4), np.float32)), DeviceArray(np.zeros((2, 7), np.float32))

    gpu_table.optimize_at(steps, [0.1, 0.5], req_time=100)
    gpu_table.lookup_at([(*step[:3], address(out)) for step, out in zip(steps, outs)])

    once = 1 - 0.1 * 0.5 / np.sqrt(0.1 + 0.25)
    summed = 1 - 0.1 * 1.0 / np.sqrt(0.1 + 1.0)
    expected = [[summed] * 4, [once] * 4, [once] * 4, [summed] * 4]
    np.testing.assert_allclose(outs[0].read(), expected, rtol=1e-6)
    np.testing.assert_allclose(outs[1].read(), [[-3.0] * 7] * 2)
    self.assertEqual(wide.stats()["max_update_ts"], 100)
    gpu_table.lookup_at([])
    gpu_table.optimize_at([], [])
    with self.assertRaises(ValueError):
      gpu_table.optimize_at(steps, [0.1])
    wide.close()
    with self.assertRaisesRegex(ValueError, "the table is closed"):
      gpu_table.lookup_at(steps)

  def test_vectors_of_several_tables_lie_in_one_row(self):
    def address(array):
      return array.__cuda_array_interface__["data"][0]

    wide = gpu_table.GpuTable(gpu_table.Segment(7, optimizer="sgd", initializer="zeros"))
    self.addCleanup(wide.close)
    row = gpu_table.TableRow([(self.table, 1), (wide, 5)], 12)
    ids = [DeviceArray(np.array(some, np.int64)) for some in ([7, 8, 7], [3, 3, 4])]
    gradients = np.arange(36, dtype=np.float32).reshape(3, 12)
    on_device, out = DeviceArray(gradients), DeviceArray(np.full((3, 12), 9, np.float32))
    addresses = [address(array) for array in ids]

    row.optimize(addresses, 3, address(on_device), [0.1, 1.0], req_time=100)
    row.lookup(addresses, 3, address(out))

    def adagrad(gradient):
      return 1 - 0.1 * gradient / np.sqrt(0.1 + gradient**2)

    narrow, sums = gradients[:, 1:5], gradients[:, 5:]
    expected = np.full((3, 12), 9, np.float32)
    expected[:, 1:5] = adagrad(narrow[0] + narrow[2])
    expected[1, 1:5] = adagrad(narrow[1])
    expected[:, 5:] = [-(sums[0] + sums[1]), -(sums[0] + sums[1]), -sums[2]]
    np.testing.assert_allclose(out.read(), expected, rtol=1e-5)
    self.assertEqual(wide.stats()["max_update_ts"], 100)

    gpu_table.GpuTable(gpu_table.Segment(1)).close()
    self.assertTrue(row.is_open())
    wide.close()
    self.assertFalse(row.is_open())
    for call in (row.lookup, row.optimize):
      with self.assertRaisesRegex(ValueError, "the table is closed"):
        call(addresses, 3, address(out), *([[0.1, 1.0]] if call == row.optimize else []))

  def test_gradients_of_16_bits_step_as_the_same_numbers_of_32(self):
    halves = (np.arange(16).reshape(4, 4) / 7 - 1).astype(np.float16)
    other = gpu_table.GpuTable(self.table._segments, expire_days=1)
    self.addCleanup(other.close)

    self.table.optimize(self.ids, DeviceArray(halves), [0.1])
    gpu_table.optimize_many([(self.table, self.ids, DeviceArray(halves), [0.1])])
    for _ in range(2):
      other.optimize(self.ids, DeviceArray(halves.astype(np.float32)), [0.1])

    np.testing.assert_array_equal(self._lookup(self.table)[0], self._lookup(other)[0])
    with self.assertRaisesRegex(TypeError, "gradients has type <f8, want <f4"):
      other.optimize(self.ids, DeviceArray(halves.astype(np.float64)), [0.1])

  def test_leaves_out_what_is_not_finite_and_tells_later(self):
    segment = gpu_table.Segment(4, optimizer="adagrad", initializer="constants", constant=1.0)
    table = gpu_table.GpuTable(segment, name="user")
    self.addCleanup(table.close)
    gradients = np.full((4, 4), 0.5, np.float32)
    gradients[1, 3] = np.nan
    bad = DeviceArray(gradients)
    told = "Table 'user'.* NaN or infinity were not written, those of 1 row: id -1"

    table.optimize(self.ids, bad, [0.1])

    self.assertEqual(len(table), 2)
    with self.assertRaisesRegex(ValueError, told):
      table.optimize(self.ids, DeviceArray(np.zeros((4, 4), np.float32)), [0.1])
    self.assertEqual(len(table), 2)
    gpu_table.optimize_many([(table, self.ids, bad, [0.1])])
    with self.assertRaisesRegex(ValueError, told):
      table.check()
    table.check()
    table.assign(self.ids, bad)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "table"
      with self.assertRaisesRegex(ValueError, told):
        table.save(path)
      self.assertFalse(path.exists())
      self.assertEqual(table.save(path), 2)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
      table.optimize(self.ids, bad, [0.1])
      table.check()
      self.assertEqual(len(table), 2)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
      table.optimize(self.ids, bad, [0.1])
      table.check()
    self.assertTrue(np.isnan(self._lookup(table, [-1])[0]).any())
    self.assertEqual(table.stats()["nonfinite_gradients"], 5)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="maybe"):
      with self.assertRaisesRegex(ValueError, "MONOLITH_BAD_GRADIENTS is 'maybe'"):
        table.optimize(self.ids, bad, [0.1])

  def test_assigns_adds_erases_and_evicts(self):
    values = DeviceArray(np.arange(16, dtype=np.float32).reshape(4, 4))
    self.table.assign(self.ids, values, req_time=100)
    self.table.assign_add(DeviceArray(np.array([0], np.int64)), DeviceArray(np.ones((1, 4), "<f4")))
    out, _ = self._lookup(self.table)
    np.testing.assert_array_equal(out[0], [12, 13, 14, 15])
    np.testing.assert_array_equal(out[2], [9, 10, 11, 12])

    self.table.erase(DeviceArray(np.array([-1, 55], np.int64)))
    self.assertEqual(len(self.table), 2)

    one = DeviceArray(np.array([7], np.int64))
    self.table.assign(one, DeviceArray(np.zeros((1, 4), np.float32)), req_time=100 + 86400)
    self.assertEqual(self.table.evict(), 1)
    self.assertEqual(self.table.stats()["expired"], 1)

  def test_saves_and_loads_and_finds_damage(self):
    self.table.assign(self.ids, DeviceArray(np.random.rand(4, 4).astype(np.float32)), req_time=5)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "table"
      self.assertEqual(self.table.save(path), 3)
      segment = gpu_table.Segment(4, optimizer="adagrad", initializer="zeros")
      with gpu_table.GpuTable(segment) as other:
        self.assertEqual(other.load(path), 3)
        np.testing.assert_array_equal(self._lookup(other)[0], self._lookup(self.table)[0])
        self.assertEqual(other.stats()["max_update_ts"], 5)
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        path.write_bytes(data)
        with self.assertRaisesRegex(gpu_table.GpuTableError, "damaged"):
          other.load(path)
        path.write_bytes(data[:-3])
        with self.assertRaises(gpu_table.GpuTableError):
          other.load([path])
      with gpu_table.GpuTable(gpu_table.Segment(3)) as narrow:
        self.table.save(path)
        with self.assertRaisesRegex(ValueError, "dim 3"):
          narrow.load(path)

  def test_says_what_is_wrong(self):
    with self.assertRaisesRegex(ValueError, "optimizer is 'sgdd', want one of"):
      gpu_table.GpuTable(gpu_table.Segment(4, optimizer="sgdd"))
    with self.assertRaisesRegex(ValueError, "dim_size is 0"):
      gpu_table.GpuTable(gpu_table.Segment(0))
    with self.assertRaisesRegex(ValueError, "learning_rate has 0 elements"):
      self.table.optimize(self.ids, DeviceArray(np.zeros((4, 4), np.float32)), [])
    self.table.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      self.table.stats()


if __name__ == "__main__":
  unittest.main()
