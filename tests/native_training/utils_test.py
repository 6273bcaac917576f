import inspect
import os
import socket
import threading
from unittest import mock

import tensorflow as tf

from monolith.core import base_layer, hyperparams
from monolith.native_training import utils
from tests import keras_versions

tf.compat.v1.disable_eager_execution()


class UtilsTest(tf.test.TestCase):
  def test_ps_device(self):
    self.assertEqual(utils.PS_JOB_NAME, "ps")
    self.assertEqual(utils.ps_device(3), "/job:ps/task:3/device:CPU:0")

  def test_propagate_back_dict_gradients(self):
    x = tf.Variable(8.0)
    y = 2 * x
    grad_y = 3 * y
    valid_vars = {y}

    grouped = utils.propagate_back_dict_gradients(zip([grad_y], [y]), {x: "group1"}, valid_vars)

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      self.assertEqual(sess.run(grouped["group1"]), [(96, 8)])

  def test_propagate_back_gradients_aligns_with_xs(self):
    x1, x2, x3 = tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)
    y1, y2 = 2 * x1, x1 * x2

    grads = utils.propagate_back_gradients(
      [(tf.constant(1.0), y1), (tf.constant(10.0), y2)], (x2, x1, x3)
    )

    self.assertIsNone(grads[2])
    with self.session() as sess:
      self.assertEqual(sess.run(grads[:2]), [10.0, 22.0])

  def test_propagate_back_gradients_refuses_other_variables(self):
    x = tf.constant(1.0)
    y, z = 2 * x, 3 * x

    with self.assertRaisesRegex(RuntimeError, "Invalid variables in the input"):
      utils.propagate_back_gradients([(y, y)], [x], {z})

  def test_propagate_back_dict_gradients_groups_in_order(self):
    xs = [tf.constant(float(i)) for i in range(3)]
    y = xs[0] + 2 * xs[1] + 3 * xs[2]

    grouped = utils.propagate_back_dict_gradients(
      [(tf.constant(1.0), y)], {xs[2]: "b", xs[0]: "a", xs[1]: "b"}
    )

    self.assertEqual([id(x) for _, x in grouped["b"]], [id(xs[2]), id(xs[1])])
    with self.session() as sess:
      self.assertEqual(sess.run([dx for dx, _ in grouped["b"]]), [3.0, 2.0])

  def test_check_ops_dependence(self):
    v = tf.Variable(0)
    add = v.assign_add(1)
    with tf.control_dependencies([add]):
      t1 = tf.constant(1)
      t2 = tf.constant(2)

    with self.assertRaisesRegex(Exception, "to be run twice"):
      utils.check_ops_dependence(t1.op.name, add.name)
    utils.check_ops_dependence(t1.op.name, t2.op.name)

  def test_check_ops_dependence_of_lists(self):
    a = tf.constant(1, name="a")
    b = tf.add(a, 1, name="b")
    c = tf.add(b, 1, name="c")
    d = tf.constant(1, name="d")

    utils.check_ops_dependence([a.op.name, d.op.name], [b.op.name, c.op.name])
    with self.assertRaisesWithLiteralMatch(
      Exception,
      "Checking ops dependence, the ops [d, c] depend on ops [b, a], "
      "which may cause ops [b, a] to be run twice.",
    ):
      utils.check_ops_dependence(["d", "c"], ["b", "a"])

  def test_check_ops_dependence_follows_loops(self):
    source = tf.constant(1, name="source")
    out = tf.while_loop(lambda i: i < 10, lambda i: i + source, [tf.constant(0)])[0]

    with self.assertRaisesRegex(Exception, "to be run twice"):
      utils.check_ops_dependence(out.op.name, "source")

  def test_check_ops_dependence_of_an_unknown_op(self):
    with self.assertRaisesRegex(KeyError, "no_such_op"):
      utils.check_ops_dependence("no_such_op", "another")

  def test_collections(self):
    for value in (1, 2):
      utils.add_to_collections("int", value)
    utils.add_to_collections("str", "str")
    utils.add_to_collections("bool", True)
    for value in ([1, 2, 3], [4, 5, 6], [], None):
      utils.add_to_collections("int_list", value)
    utils.add_to_collections("str_list", ["hello", "world"])
    utils.add_to_collections("bool_list", [False])

    self.assertEqual(utils.get_collection("int")[-1], 2)
    self.assertEqual(utils.get_collection("str")[-1], "str")
    self.assertEqual(utils.get_collection("bool")[-1], True)
    self.assertEqual(utils.get_collection("int_list")[-1], [4, 5, 6])
    self.assertEqual(utils.get_collection("str_list")[-1], ["hello", "world"])
    self.assertEqual(utils.get_collection("bool_list")[-1], [False])

  def test_collections_keep_false_scalars(self):
    for value in (0, "", False, 0.0):
      utils.add_to_collections("falsy", value)

    self.assertEqual(utils.get_collection("falsy"), [0, "", False, 0.0])
    self.assertIsNone(utils.get_collection("missing"))

  def test_collections_take_tensors_and_several_names(self):
    tensor = tf.constant(0)

    utils.add_to_collections(["one", "two"], tensor)

    self.assertIs(utils.get_collection("one")[0], tensor)
    self.assertIs(utils.get_collection("two")[0], tensor)

  def test_skipped_value_is_logged(self):
    with self.assertLogs(level="INFO") as logs:
      utils.add_to_collections("x", [])

    self.assertIn("value is [], skip", logs.output[0])

  def test_shapes(self):
    known = tf.zeros([2, 0, 3])
    partly = tf.compat.v1.placeholder(tf.float32, [None, 4])
    unknown = tf.compat.v1.placeholder(tf.float32)

    self.assertEqual([utils.get_ndim(x) for x in (known, partly, unknown)], [3, 2, None])
    self.assertEqual(utils.get_ndim(tf.constant(1)), 0)
    self.assertEqual(utils.int_shape(known), [2, 0, 3])
    self.assertEqual(utils.int_shape(partly), [-1, 4])
    self.assertIsNone(utils.int_shape(unknown))

  def test_int_shape_of_dimensions(self):
    class Shape:
      def __init__(self, dims):
        self._dims = dims

      def get_shape(self):
        return self

      def as_list(self):
        return self._dims

    dims = [tf.compat.v1.Dimension(7), tf.compat.v1.Dimension(None), None]
    self.assertEqual(utils.int_shape(Shape(dims)), [7, -1, -1])
    self.assertIsNone(utils.int_shape(Shape(["x"])))

  def test_extend_as_list(self):
    long, tuple_ = [1, 2, 3], (1, 2)

    self.assertIs(utils.extend_as_list(long, 2), long)
    self.assertIs(utils.extend_as_list(tuple_, 2), tuple_)
    self.assertEqual(utils.extend_as_list([1], 3), [1, None, None])
    self.assertEqual(utils.extend_as_list((1,), 3), [1, None, None])
    self.assertEqual(utils.extend_as_list("ab", 2), ["ab", "ab"])
    self.assertEqual(utils.extend_as_list("ab", 0), [])

  def test_extend_as_list_copies_where_it_can(self):
    copied = utils.extend_as_list({"a": []}, 2)
    lock = threading.Lock()
    shared = utils.extend_as_list(lock, 3)

    self.assertEqual(copied[0], copied[1])
    self.assertIsNot(copied[0], copied[1])
    self.assertTrue(all(x is lock for x in shared))

  def test_check_list(self):
    candidate = [1, 2]

    self.assertIs(utils.check_list(candidate, lambda n: n == 2), candidate)
    self.assertIsNone(utils.check_list(None, lambda n: False, could_be_none=True))
    with self.assertRaisesWithLiteralMatch(TypeError, "ListChecker cannot accept None candidate"):
      utils.check_list(None, lambda n: True)
    with self.assertRaisesWithLiteralMatch(
      TypeError, "ListChecker got candidate in the wrong type[<class 'tuple'>]"
    ):
      utils.check_list((1,), lambda n: True)
    with self.assertRaisesWithLiteralMatch(
      ValueError, "ListChecker got candidate beyonds the range"
    ):
      utils.check_list([1], lambda n: n > 1)

  def test_to_snake_case(self):
    for name, expected in (
      ("Dense", "dense"),
      ("DeepFMLayer", "deep_fm_layer"),
      ("camelCase", "camel_case"),
      ("already_snake", "already_snake"),
      ("Conv2D", "conv2d"),
      ("_Hidden", "private__hidden"),
      ("", ""),
    ):
      self.assertEqual(utils.to_snake_case(name), expected)

  def test_to_list(self):
    x = [1]

    self.assertIs(utils.to_list(x), x)
    self.assertEqual(utils.to_list((1, 2)), [(1, 2)])
    self.assertEqual(utils.to_list(None), [None])

  def test_paths_and_environment(self):
    with mock.patch.dict(os.environ, {"TEST_TMPDIR": "/some/folder"}):
      self.assertEqual(utils.get_test_tmp_dir(), "/some/folder")
    with mock.patch.dict(os.environ):
      os.environ.pop("TEST_TMPDIR", None)
      self.assertEqual(utils.get_test_tmp_dir(), "/tmp")
    self.assertEqual(utils.get_debugging_info_file_name("/m"), "/m/debugging_info.pb")
    self.assertEqual(utils.get_meta_graph_file_name("/m"), "/m/meta_graph_for_debugging.pb")

  def test_metric_prefix(self):
    with mock.patch.dict(os.environ):
      os.environ.pop("MONOLITH_METRIC_PREFIX", None)
      self.assertEqual(utils.get_metric_prefix(), "monolith.training")

      utils.set_metric_prefix("my.prefix")

      self.assertEqual(utils.get_metric_prefix(), "my.prefix")
      self.assertEqual(os.environ["MONOLITH_METRIC_PREFIX"], "my.prefix")

  def test_local_host(self):
    with (
      mock.patch.object(socket, "gethostname", return_value="host"),
      mock.patch.object(socket, "gethostbyname", side_effect=lambda name: f"ip of {name}"),
    ):
      with mock.patch.object(utils.platform, "system", return_value="Linux"):
        self.assertEqual(utils.get_local_host(), "ip of host")
      with mock.patch.object(utils.platform, "system", return_value="Darwin"):
        self.assertEqual(utils.get_local_host(), "ip of host.local")


class ParamsTest(tf.test.TestCase):
  def test_constructor_parameters_become_params(self):
    @utils.with_params
    class Layer:
      def __init__(self, units, act="relu", *args, **kwargs):
        self.units, self.act, self.kwargs = units, act, kwargs

    ips = Layer.params()

    self.assertIs(ips.cls, Layer)
    self.assertEqual(ips.name, "Layer")
    self.assertIsNone(ips.units)
    self.assertEqual(ips.act, "relu")
    self.assertTrue(all(name in ips for name in hyperparams.allowed_kwargs))
    self.assertIsNone(ips.weights)

    ips.units = 3
    layer = ips.instantiate()
    self.assertEqual((layer.units, layer.act, layer.kwargs), (3, "relu", {"name": "Layer"}))

  def test_every_call_returns_a_new_bag(self):
    @utils.with_params
    class Layer:
      def __init__(self, units=1):
        pass

    Layer.params().units = 2

    self.assertEqual(Layer.params().units, 1)

  def test_bases_first_and_later_defaults_win(self):
    class Base:
      def __init__(self, units, act="relu", bias=True):
        pass

    @utils.with_params
    class Derived(Base):
      def __init__(self, units=7, act=None, extra=()):
        pass

    ips = Derived.params()

    self.assertEqual((ips.units, ips.act, ips.bias, ips.extra), (7, None, True, ()))

  def test_starts_from_the_params_of_the_nearest_base(self):
    class Base(base_layer.BaseLayer):
      @classmethod
      def params(cls):
        p = super().params()
        p.define("depth", 2, "depth")
        return p

    @utils.with_params
    class Derived(Base):
      def __init__(self, units=5, depth=4):
        pass

    ips = Derived.params()

    self.assertIs(ips.cls, Derived)
    self.assertEqual((ips.name, ips.units, ips.depth), ("Derived", 5, 4))

  def test_parameter_of_a_nested_bag_gets_its_default_there(self):
    class Base(base_layer.BaseLayer):
      @classmethod
      def params(cls):
        p = super().params()
        inner = hyperparams.Params()
        inner.define("rate", 0.1, "rate")
        p.define("inner", inner, "inner")
        return p

    @utils.with_params
    class Derived(Base):
      def __init__(self, rate=0.5):
        pass

    ips = Derived.params()

    self.assertEqual(ips.inner.rate, 0.5)
    self.assertNotIn("rate", ips)

  def test_undecorated_subclass_gets_its_own_params(self):
    @utils.with_params
    class Base:
      def __init__(self, units=1):
        pass

    class Derived(Base):
      def __init__(self, units=2, more=3):
        pass

    ips = Derived.params()

    self.assertIs(ips.cls, Derived)
    self.assertEqual((ips.name, ips.units, ips.more), ("Derived", 2, 3))
    self.assertEqual(Base.params().units, 1)

  def test_keras_layer(self):
    @utils.with_params
    class MyDense(tf.keras.layers.Layer):
      def __init__(self, units, use_bias=True, **kwargs):
        super().__init__(**kwargs)
        self.units, self.use_bias = units, use_bias

    ips = MyDense.params()

    # The `name=None` of Keras does not take the name away.
    self.assertEqual(ips.name, "MyDense")
    self.assertEqual((ips.trainable, ips.dtype), (True, None))
    if not keras_versions.IS_KERAS_3:
      self.assertIs(ips.dynamic, False)
    ips.units = 4
    layer = ips.instantiate()
    self.assertIsInstance(layer, MyDense)
    self.assertEqual((layer.units, layer.use_bias, layer.name), (4, True, "MyDense"))

  def test_parameters_that_params_cannot_hold(self):
    @utils.with_params
    class Layer:
      def __init__(self, _hidden=1, K=2, good=3):
        pass

    ips = Layer.params()

    self.assertEqual(ips.good, 3)
    self.assertNotIn("_hidden", ips)
    self.assertNotIn("K", ips)

  def test_get_parameters(self):
    class Base:
      def __init__(self, a, b=1, *args, **kwargs):
        pass

    class Derived(Base):
      def __init__(self, b=2, *, c):
        pass

    own, everything = {}, {}
    utils._get_parameters(Derived, own)
    utils._get_all_parameters(Derived, everything)

    self.assertEqual(list(own), ["b", "c"])
    self.assertEqual(list(everything), ["a", "b", "c"])
    self.assertEqual(everything["b"].default, 2)
    self.assertIs(everything["a"].default, inspect.Parameter.empty)

  def test_inverted_index(self):
    inner = hyperparams.Params()
    inner.define("x", 1, "")
    inner.define("name", "inner", "")
    outer = hyperparams.Params()
    outer.define("inner", inner, "")
    outer.define("name", "outer", "")

    index = {}
    utils._inverted_index(outer, index)

    self.assertIs(index["x"], inner)
    self.assertIs(index["name"], outer)


if __name__ == "__main__":
  tf.test.main()
