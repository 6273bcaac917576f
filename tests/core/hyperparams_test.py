"""Tests of `monolith.core.hyperparams`."""

import collections
import copy
import enum
import pickle
import subprocess
import sys
import unittest

import numpy as np
import tensorflow as tf

from monolith.core import hyperparams
from monolith.core.hyperparams import InstantiableParams, Params

tf.compat.v1.disable_eager_execution()


class TestEnum(enum.Enum):
  __test__ = False  # not a test, whatever its name says

  A = 1
  B = 2


def _bag(**values):
  params = Params()
  for name, value in values.items():
    params.define(name, value, "")
  return params


class ParamsTest(unittest.TestCase):
  def test_legal_names(self):
    params = _bag(foo_bar=1, foo9=2)
    self.assertEqual((params.foo_bar, params["foo9"]), (1, 2))

  def test_illegal_names(self):
    for name in (None, "", "_foo", "Foo", "1foo", "foo$", "_immutable", "foo\n", "fóo", 3):
      with self.subTest(name=name), self.assertRaises(AssertionError):
        Params().define(name, 1, "")

  def test_defining_twice(self):
    params = _bag(foo=1)
    with self.assertRaisesRegex(AttributeError, "^Parameter foo is already defined$"):
      params.define("foo", 2, "")
    self.assertEqual(params.foo, 1)

  def test_unknown_name_is_attribute_error_by_every_route(self):
    params = _bag(foo=1)
    routes = {
      "attribute": lambda: params.bar,
      "item": lambda: params["bar"],
      "get": lambda: params.get("bar"),
      "set": lambda: params.set(bar=2),
      "delete": lambda: params.delete("bar"),
      "setattr": lambda: setattr(params, "bar", 2),
      "setitem": lambda: params.__setitem__("bar", 2),
    }
    for route, access in routes.items():
      with self.subTest(route=route), self.assertRaisesRegex(AttributeError, "^bar$"):
        access()
    self.assertFalse(hasattr(params, "bar"))
    self.assertNotIn("bar", params)

  def test_set_and_get(self):
    params = _bag(foo=1, bar=None)
    self.assertIs(params.set(foo=4, bar=5), params)
    self.assertEqual((params.foo, params.get("bar")), (4, 5))
    params.foo = 6
    params["bar"] = 7
    self.assertEqual((params.get("foo"), params["bar"]), (6, 7))
    self.assertIs(params.delete("foo"), params)
    self.assertNotIn("foo", params)
    self.assertEqual(len(params), 1)

  def test_freeze(self):
    params = _bag(foo=1, nested=_bag(x=1))
    self.assertFalse(params.is_immutable())
    params.freeze()

    self.assertTrue(params.is_immutable())
    message = r"^This Params instance is immutable\.$"
    with self.assertRaisesRegex(TypeError, message):
      params.define("bar", 1, "")
    with self.assertRaisesRegex(TypeError, message):
      params.delete("foo")
    with self.assertRaisesRegex(TypeError, message):
      params.foo = 2
    with self.assertRaisesRegex(TypeError, message):
      params["foo"] = 2
    with self.assertRaisesRegex(TypeError, message):
      params._immutable = False
    with self.assertRaises(TypeError) as caught:
      params.set(foo=2)
    self.assertEqual(str(caught.exception), f"This Params instance is immutable: {params}")
    with self.assertRaises(TypeError):
      params.set(**{"nosub.y": 2})
    self.assertEqual(params.foo, 1)

    params.nested.x = 2
    self.assertEqual(params.get("nested.x"), 2)

  def test_frozen_nested_bag_is_not_changed_through_its_parent(self):
    params = _bag(nested=_bag(x=1))
    params.nested.freeze()
    with self.assertRaises(TypeError):
      params.set(**{"nested.x": 2})
    with self.assertRaises(TypeError):
      params.delete("nested.x")
    self.assertEqual(params.nested.x, 1)

  def test_copy_of_frozen_is_frozen(self):
    params = _bag(foo=1)
    params.freeze()
    self.assertTrue(params.copy().is_immutable())
    self.assertTrue(copy.deepcopy(params).is_immutable())

  def test_dotted_names(self):
    innermost = _bag(delta=22, zeta=5)
    inner = _bag(alpha=2, innermost=innermost)
    outer = _bag(beta=1, inner=inner, d={"foo": "bar"})
    self.assertEqual(outer.get("inner.alpha"), 2)
    self.assertEqual(outer.get("inner.innermost.delta"), 22)
    self.assertIs(outer.set(**{"inner.alpha": 3, "inner.innermost.delta": 23}), outer)
    self.assertEqual((inner.alpha, innermost.delta), (3, 23))

    outer.delete("inner.innermost.zeta")
    for access in (outer.get, outer.delete, lambda name: outer.set(**{name: 5})):
      with self.assertRaisesRegex(AttributeError, r"^inner\.innermost\.zeta$"):
        access("inner.innermost.zeta")
      with self.assertRaisesRegex(AttributeError, "^nosub$"):
        access("nosub.y")
      with self.assertRaisesRegex(AttributeError, r"^inner\.nosub$"):
        access("inner.nosub.y")
      with self.assertRaisesRegex(AssertionError, r"^Cannot introspect <class 'dict'> for d$"):
        access("d.foo")

  def test_suggestion_in_nested_bag(self):
    outer = _bag(inner=_bag(learning_rate=1))
    with self.assertRaises(AttributeError) as caught:
      outer.get("inner.learnin_rate")
    self.assertEqual(str(caught.exception), "inner.learnin_rate (did you mean: [learning_rate])")

  def test_dotted_names_through_lists(self):
    params = _bag(lst=[_bag(x=1), _bag(x=2)])
    self.assertEqual(params.get("lst[1].x"), 2)
    params.set(**{"lst[0].x": 5})
    self.assertEqual(params.lst[0].x, 5)
    with self.assertRaises(IndexError):
      params.get("lst[2].x")
    with self.assertRaises(ValueError):
      params.get("lst[a].x")
    with self.assertRaisesRegex(AttributeError, r"^lst\[0\]$"):
      params.get("lst[0]")
    with self.assertRaisesRegex(AttributeError, r"^lst\[0\]$"):
      params.set(**{"lst[0]": 1})

  def test_nested_is_shared_until_copied(self):
    inner = _bag(x=1)
    one, two = _bag(inner=inner), _bag(inner=None)
    two.inner = inner
    separate = one.copy()
    one.set(**{"inner.x": 3})
    self.assertEqual((inner.x, two.inner.x, separate.inner.x), (3, 3, 1))

  def test_did_you_mean(self):
    params = _bag(activation=1, activations=2, cheesecake=None, tofu=None)
    with self.assertRaises(AttributeError) as caught:
      params.set(actuvation=1)
    self.assertEqual(str(caught.exception), "actuvation (did you mean: [activation,activations])")
    with self.assertRaisesRegex(AttributeError, "^tof$"):
      params.get("tof")
    with self.assertRaises(AttributeError) as caught:
      _ = _bag(learning_rate=1).learnin_rate
    self.assertEqual(str(caught.exception), "learnin_rate (did you mean: [learning_rate])")
    self.assertEqual(params._similar_keys("cheesecak"), ["cheesecake"])

  def test_deep_copy_shares_tensors(self):
    tensor = tf.constant(1.0)
    inner = _bag(alpha=2, tensor=tensor)
    outer = _bag(beta=1, inner=inner, lst=[[1], tensor], d={"a": [2], "t": (tensor,)})

    copied = outer.copy()

    self.assertIsNot(copied, outer)
    self.assertEqual(copied, outer)
    self.assertIsNot(copied.inner, inner)
    self.assertIs(copied.inner.tensor, tensor)
    self.assertIs(copied.lst[1], tensor)
    self.assertIs(copied.d["t"][0], tensor)
    copied.lst[0].append(7)
    copied.d["a"].append(7)
    copied.inner.alpha = 9
    self.assertEqual((outer.lst[0], outer.d["a"], inner.alpha), ([1], [2], 2))

  def test_one_nested_bag_held_twice_stays_one_in_a_copy(self):
    inner = _bag(x=1)
    copied = _bag(a=inner, b=inner).copy()
    self.assertIs(copied.a, copied.b)

  def test_pickle(self):
    params = _bag(foo=[1], inner=_bag(x="y"))
    params.freeze()
    restored = pickle.loads(pickle.dumps(params))
    self.assertEqual(restored, params)
    self.assertTrue(restored.is_immutable())
    self.assertEqual(copy.copy(params), params)

  def test_equals(self):
    self.assertEqual(Params(), Params())
    one, two = _bag(x=1, y=[2]), _bag(y=[2], x=1)
    self.assertEqual(one, two)
    two.x = 2
    self.assertNotEqual(one, two)
    self.assertNotEqual(_bag(x=1), _bag(y=1))
    self.assertNotEqual(_bag(x=1), _bag(x=1, y=1))
    self.assertNotEqual(_bag(x=object()), _bag(x=object()))
    self.assertNotEqual(_bag(inner=_bag(x=1)), _bag(inner=_bag(x=2)))
    self.assertFalse(Params() == {})
    self.assertFalse({} == Params())
    with_description = Params()
    with_description.define("x", 1, "other words")
    self.assertEqual(with_description, _bag(x=1))
    with self.assertRaises(TypeError):
      hash(Params())

  def test_equality_of_tensors_and_arrays(self):
    tf.compat.v1.enable_tensor_equality()  # `==` on symbolic tensors would not be a bool
    tensor = tf.constant([1, 2])
    self.assertEqual(_bag(x=tensor), _bag(x=tensor))
    self.assertNotEqual(_bag(x=tensor), _bag(x=tf.constant([1, 2])))
    self.assertNotEqual(_bag(x=tensor), _bag(x=1))
    self.assertEqual(_bag(x=np.arange(3)), _bag(x=np.arange(3)))
    self.assertNotEqual(_bag(x=np.arange(3)), _bag(x=np.zeros(3)))

  def test_dir_len_contains(self):
    params = _bag(b=1, a=2)
    self.assertEqual(dir(params), ["a", "b"])
    self.assertEqual(len(params), 2)
    self.assertIn("a", params)
    self.assertTrue(params.contain("b"))
    self.assertFalse(params.contain("c"))
    self.assertNotIn("x", _bag(inner=_bag(x=1)))

  def test_iter_params(self):
    params = _bag(b=1, a=2)
    self.assertEqual(list(params.iter_params()), [("b", 1), ("a", 2)])

  def test_to_string(self):
    inner = _bag(bar=2)
    outer = _bag(foo=1, inner=inner, list=[1, inner, 2], dict={"b": inner, "a": 1}, enum=TestEnum.B)
    want = "\n".join(
      [
        "{",
        "  dict: {'a': 1, 'b': {'bar': 2}}",
        "  enum: TestEnum.B",
        "  foo: 1",
        "  inner: {",
        "    bar: 2",
        "  }",
        "  list: [1, {'bar': 2}, 2]",
        "}",
      ]
    )
    self.assertEqual(str(outer), want)

  def test_to_string_of_other_values(self):
    class WithRepr:
      def Repr(self):
        return "shown"

    pair = collections.namedtuple("pair", "x y")
    params = _bag(
      text='a "b"',
      none=None,
      pair=pair(1, 2),
      tuple=(1, {"z": 1, "a": 2}),
      obj=WithRepr(),
      mixed={1: "x", "b": 2},
    )
    self.assertEqual(
      str(params).split("\n"),
      [
        "{",
        "  mixed: {1: 'x', 'b': 2}",
        "  none: None",
        "  obj: shown",
        "  pair: pair(x=1, y=2)",
        '  text: "a "b""',
        "  tuple: (1, {'a': 2, 'z': 1})",
        "}",
      ],
    )
    self.assertEqual(str(Params()), "{\n\n}")

  def test_text_does_not_depend_on_definition_order(self):
    self.assertEqual(str(_bag(a=1, b={"x": 1, "y": 2})), str(_bag(b={"y": 2, "x": 1}, a=1)))

  def test_copy_params_to(self):
    source = _bag(a="a", b="b", c="c")
    dest = _bag(a="")
    self.assertIs(hyperparams.copy_params_to(source, dest, skip=["b", "c"]), dest)
    self.assertEqual(dest.a, "a")
    self.assertNotIn("b", dest)
    self.assertNotIn("c", dest)
    with self.assertRaisesRegex(AttributeError, "^b$"):
      hyperparams.copy_params_to(source, dest)

    nested = _bag(inner=_bag(x=1))
    target = hyperparams.copy_params_to(nested, _bag(inner=None))
    self.assertEqual(target, nested)
    self.assertIsNot(target.inner, nested.inner)

  def test_tensorflow_is_not_imported(self):
    code = "import sys, monolith.core.hyperparams; sys.exit('tensorflow' in sys.modules)"
    self.assertEqual(subprocess.run([sys.executable, "-c", code], check=False).returncode, 0)


class TakesParams:
  @classmethod
  def params(cls):
    return InstantiableParams(cls)

  def __init__(self, params):
    self.got = params


class TakesParamsAndMore(TakesParams):
  def __init__(self, params, **kwargs):
    super().__init__(params)


class TakesKeywords:
  def __init__(self, units, act=None, *args, **kw):
    self.got = dict(kw, units=units, act=act)
    assert not args


class Strict:
  def __init__(self, units):
    self.units = units


class InstantiableParamsTest(unittest.TestCase):
  def test_cls_and_copy(self):
    params = InstantiableParams(Strict)
    params.define("units", 3, "")
    self.assertEqual(params.copy().instantiate().units, 3)
    self.assertIsInstance(params.copy(), InstantiableParams)
    params.cls = TakesKeywords
    self.assertIsInstance(params.instantiate(), TakesKeywords)

  def test_no_cls(self):
    with self.assertRaises(AssertionError):
      InstantiableParams().instantiate()

  def test_constructor_that_takes_params_gets_this_very_object(self):
    for cls in (TakesParams, TakesParamsAndMore):
      params = cls.params()
      self.assertIs(params.instantiate().got, params)

  def test_keywords_from_nested_bags(self):
    params = InstantiableParams(TakesKeywords)
    for name, value in {"units": 3, "name": "nm", "zzz": 1, "weights": None}.items():
      params.define(name, value, "")
    params.define("nested", _bag(act="relu", autocast=True), "")
    self.assertEqual(
      params.instantiate().got, {"units": 3, "act": "relu", "autocast": True, "name": "nm"}
    )

  def test_last_writer_wins_but_for_name(self):
    params = InstantiableParams(TakesKeywords)
    params.define("name", "outer", "")
    params.define("units", 1, "")
    params.define("nested", _bag(units=2, name="inner"), "")
    self.assertEqual(params.instantiate().got, {"units": 2, "act": None, "name": "outer"})

  def test_name_not_accepted(self):
    params = InstantiableParams(Strict)
    params.define("units", 3, "")
    params.define("name", "nm", "")
    with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'name'"):
      params.instantiate()
    params.name = None
    self.assertEqual(params.instantiate().units, 3)

  def test_missing_required_argument(self):
    with self.assertRaisesRegex(TypeError, "units"):
      InstantiableParams(Strict).instantiate()

  def test_allowed_kwargs(self):
    self.assertEqual(
      hyperparams.allowed_kwargs,
      {
        "input_dim",
        "input_shape",
        "batch_input_shape",
        "weights",
        "activity_regularizer",
        "autocast",
        "implementation",
        "name",
      },
    )

  def test_update_params(self):
    params = _bag(units=3, nested=_bag(act="relu"))
    args = {"act": "tanh", "units": 1, "nope": 2}
    self.assertIsNone(hyperparams.update_params(params, args))
    self.assertEqual((params.units, params.nested.act), (1, "tanh"))
    self.assertEqual(args, {"nope": 2})

  def test_update_params_is_consumed_by_the_first(self):
    inner_first = _bag(nested=_bag(x=1), x=1)
    hyperparams.update_params(inner_first, {"x": 5})
    self.assertEqual((inner_first.nested.x, inner_first.x), (5, 1))


if __name__ == "__main__":
  unittest.main()
