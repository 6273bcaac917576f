"""Tests of `monolith.core.py_utils`."""

import copy
import unittest

from monolith.core.py_utils import NestedMap


def _example():
  return NestedMap(a=1, b=NestedMap(c=[2, NestedMap(d=3)], e={"k": 4}))


class NestedMapTest(unittest.TestCase):
  def test_attributes_are_items(self):
    m = NestedMap(x=1)
    m.y = 2
    m["z"] = 3
    self.assertEqual((m.x, m["y"], m.z), (1, 2, 3))
    del m.z
    self.assertEqual(m, {"x": 1, "y": 2})

  def test_missing_attribute(self):
    m = NestedMap(y=1, x=2)
    with self.assertRaises(AttributeError) as caught:
      _ = m.zz
    self.assertEqual(str(caught.exception), "'zz'; available attributes: ['x', 'y']")
    with self.assertRaises(AttributeError) as caught:
      del m.zz
    self.assertEqual(str(caught.exception), "'zz'; available attributes: ['x', 'y']")
    self.assertFalse(hasattr(m, "zz"))

  def test_illegal_keys(self):
    for key, error, message in (
      (1, AssertionError, "^Key in a NestedMap has to be a six.string_types"),
      ("1a", ValueError, "^Invalid NestedMap key '1a'$"),
      ("", ValueError, "^Invalid NestedMap key ''$"),
      ("copy", AssertionError, "^copy is a reserved key$"),
      ("items", AssertionError, "^items is a reserved key$"),
      ("__len__", AssertionError, "^__len__ is a reserved key$"),
    ):
      with self.subTest(key=key):
        with self.assertRaisesRegex(error, message):
          NestedMap({key: 1})
        with self.assertRaisesRegex(error, message):
          NestedMap()[key] = 1
        with self.assertRaisesRegex(error, message):
          NestedMap.CheckKey(key)
    with self.assertRaisesRegex(AssertionError, "^keys is a reserved key$"):
      NestedMap().keys = 1
    NestedMap({"a b": 1, "_x": 2})

  def test_copies(self):
    m = _example()
    shallow = m.copy()
    self.assertIs(type(shallow), NestedMap)
    self.assertIs(shallow.b, m.b)
    for deep in (m.DeepCopy(), copy.deepcopy(m)):
      self.assertEqual(deep, m)
      self.assertIsNot(deep.b, m.b)
      self.assertIsNot(deep.b.c, m.b.c)
      self.assertIs(deep.b.e, m.b.e)
    empty = NestedMap(x=NestedMap(), y=[])
    self.assertEqual(empty.DeepCopy(), empty)

  def test_from_nested_dict(self):
    m = NestedMap.FromNestedDict({"a": {"b": [{"c": 1}], "d": ({"e": 2}, 3)}})
    self.assertEqual((m.a.b[0].c, m.a.d[0].e, m.a.d[1]), (1, 2, 3))
    self.assertIsInstance(m.a.d, tuple)

  def test_get(self):
    m = _example()
    self.assertEqual(m.GetItem("b.e.k"), 4)
    self.assertEqual(m.Get("b.c"), m.b.c)
    with self.assertRaises(KeyError):
      m.GetItem("b.zz")
    with self.assertRaises(TypeError):
      m.GetItem("b.c.d")
    self.assertEqual(m.Get("b.c.d", "DEF"), "DEF")
    self.assertIsNone(m.Get("zz"))

  def test_set(self):
    m = NestedMap(a=1)
    m.Set("x.y.z", 5)
    self.assertEqual(m.x.y.z, 5)
    self.assertIsInstance(m.x.y, NestedMap)
    with self.assertRaises(ValueError) as caught:
      m.Set("a.b", 1)
    self.assertEqual(
      str(caught.exception),
      "Error while setting key a.b. Sub key \"a\" is of type <class 'int'> "
      "but must be a dict or NestedMap.",
    )

  def test_flatten(self):
    m = _example()
    self.assertEqual(m.Flatten(), [1, 2, 3, {"k": 4}])
    self.assertEqual([k for k, _ in m.FlattenItems()], ["a", "b.c[0]", "b.c[1].d", "b.e"])
    self.assertEqual(NestedMap().Flatten(), [])

  def test_pack_and_transform(self):
    m = _example()
    packed = m.Pack([10, 20, 30, 40])
    self.assertEqual(packed, NestedMap(a=10, b=NestedMap(c=[20, NestedMap(d=30)], e=40)))
    for values in ([1, 2, 3], [1, 2, 3, 4, 5]):
      with self.assertRaises(AssertionError):
        m.Pack(values)
    self.assertEqual(m.Transform(str).Flatten(), ["1", "2", "3", "{'k': 4}"])

  def test_filter(self):
    m = _example()
    self.assertEqual(m.Filter(lambda v: v == 3), {"b": {"c": [{"d": 3}]}})
    self.assertEqual(m.Filter(lambda v: False), {})
    self.assertIsInstance(m.Filter(lambda v: False), NestedMap)
    self.assertEqual(m.FilterKeyVal(lambda k, v: k == "b.c[0]"), {"b": {"c": [2]}})

  def test_is_compatible(self):
    self.assertTrue(_example().IsCompatible(_example().Transform(str)))
    self.assertFalse(_example().IsCompatible(NestedMap(a=1)))

  def test_debug_string(self):
    m = NestedMap(bb=NestedMap(c=2), a="x")
    self.assertEqual(m.DebugString(), "a       x\nbb.c    2")
    self.assertEqual(NestedMap().DebugString(), "")

  def test_vlog(self):
    with self.assertLogs("absl", level="INFO") as logs:
      NestedMap(a=1).VLog()
      NestedMap(a=1).VLog(0, "mine: ")
    self.assertEqual(
      [record.getMessage() for record in logs.records], ["nmap: a    1", "mine: a    1"]
    )


if __name__ == "__main__":
  unittest.main()
