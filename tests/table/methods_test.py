"""One class with two doors: `HashTable` of `monolith.table` and of `monolith` are alike."""

import importlib.util
import inspect
import unittest

import numpy as np
import tensorflow as tf

import monolith
from monolith import table as tables
from monolith.table import methods

# The names that one class alone has -> why.
_NUMPY_ALONE = {
  "close": "a tensor's table goes with its last reference",
  "configure": "a tensor's table follows an optimizer of Keras",
  "evict": "the op library does it in the background alone",
  "handle": "the table in the engine, for lookup_many and update_many",
  "load_state": "for modules of PyTorch, which may know the optimizer later",
  "reinitialize": "no op has it for one table",
  "reserve": "no op has it",
  "take_step": "for update_many",
}
_TENSORS_ALONE = {
  "apply": "a step of an optimizer of Keras",
  "check_leader": "as follow",
  "device": "rows of monolith.table are in main memory",
  "expire_config": "for the driver",
  "follow": "an optimizer of Keras",
  "note_loaded": "for load_group",
  "rate_at": "for layers and the driver",
  "slot_arguments": "for the driver",
}
_OPTIONS = {"optimizer": "adagrad", "initializer": "ones", "learning_rate": 0.5}


def _public(cls, but=object):
  of_base = set(dir(but))
  names = {name for name in dir(cls) if not name.startswith("_")} - of_base
  return names | {n for n in ("__contains__", "__len__", "__bool__", "__repr__") if n in dir(cls)}


def _parameters(function):
  return [
    (one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()
  ]


class MethodsTest(unittest.TestCase):
  def test_both_tables_have_the_same_methods(self):
    ours = _public(tables.HashTable)
    theirs = _public(monolith.HashTable, tf.saved_model.experimental.TrackableResource)
    self.assertEqual(ours - theirs, set(_NUMPY_ALONE))
    self.assertEqual(theirs - ours, set(_TENSORS_ALONE))

  def test_methods_take_the_same_arguments(self):
    for name in sorted(_public(tables.HashTable) - set(_NUMPY_ALONE)):
      ours, theirs = (getattr(cls, name) for cls in (tables.HashTable, monolith.HashTable))
      with self.subTest(name):
        self.assertEqual(callable(ours), callable(theirs))
        if callable(ours):
          wanted = _parameters(theirs)
          have = _parameters(ours)
          self.assertEqual(have[: len(wanted)], wanted)
          extra = {parameter for parameter, _, _ in have[len(wanted) :]}
          self.assertLessEqual(extra, {"now", "out"})

  def test_tables_are_described_alike(self):
    ours, theirs = (
      {name: rest for name, *rest in _parameters(cls.__init__)}
      for cls in (tables.HashTable, monolith.HashTable)
    )
    self.assertEqual(set(ours) - set(theirs), {"seed", "initial_capacity"})
    self.assertEqual(set(theirs) - set(ours), {"label", "device"})
    for name in set(ours) & set(theirs):
      self.assertEqual(ours[name], theirs[name], name)

  def test_wrong_arguments_have_one_text(self):
    for arguments in (
      {"dim": 0},
      {"dim": True},
      {"optimizer": "adamw"},
      {"optimizer": 3},
      {"initializer": "none"},
      {"initializer": (2.0, 1.0)},
      {"initializer": float("nan")},
      {"learning_rate": float("inf")},
      {"expire_after": "3h"},
      {"admit_after": -1},
      {"admit_capacity": 0},
    ):
      texts = []
      for cls in (tables.HashTable, monolith.HashTable):
        with self.assertRaises((ValueError, TypeError)) as raised:
          cls(**{"dim": 2, **arguments})
        texts.append((type(raised.exception), str(raised.exception)))
      self.assertEqual(texts[0], texts[1])

  def test_the_same_calls_leave_the_same_rows(self):
    optimizer = tables.Optimizer("ftrl", beta=0.5, l1=0.01, l2=0.02)
    for options in (_OPTIONS, {**_OPTIONS, "initializer": (0.5, 0.5), "optimizer": optimizer}):
      both = [cls(2, **options) for cls in (tables.HashTable, monolith.HashTable)]
      for table in both:
        table.update([7, -9, 7], np.ones([3, 2], np.float32))
        table.assign([8, 2**62], [[1.0, 2.0], [3.0, 4.0]])
        table.assign_add([8, 8, 5], [[1.0, 1.0]] * 3)
        table.erase([2**62])
      self.assertEqual(repr(both[0]), repr(both[1]))
      self.assertEqual((both[0].steps, both[1].steps), (1, 1))
      for one, other in zip(both[0].items(), both[1].items()):
        np.testing.assert_array_equal(one, other)
      self.assertIn(-9, both[1])
      self.assertEqual(both[1].entries([2**62]), [b""])
      self.assertNotEqual(both[1].entries([7]), [b""])
      for table in both:
        table.clear()
        self.assertEqual((len(table), bool(table)), (0, True))

  @unittest.skipUnless(importlib.util.find_spec("pyarrow"), "needs pyarrow")
  def test_rows_become_the_same_table_of_arrow(self):
    both = [cls(2, **_OPTIONS) for cls in (tables.HashTable, monolith.HashTable)]
    for table in both:
      table.assign([2, 1], [[3.0, 4.0], [1.0, 2.0]])
    ours, theirs = (table.to_arrow() for table in both)
    self.assertEqual(ours.schema, theirs.schema)
    self.assertEqual(theirs.to_pydict()["vector"], [[1, 2], [3, 4]])
    self.assertTrue(all(time > 10**9 for time in theirs.to_pydict()["last_update"]))

  def test_a_subclass_must_read_rows(self):
    table = methods.TableMethods()
    for call in (table.size, lambda: table.contains([1]), lambda: table.erase([1]), table.items):
      self.assertRaises(NotImplementedError, call)


if __name__ == "__main__":
  unittest.main()
