"""Tests of `monolith.core.base_layer` and `monolith.core.base_task`."""

import gc
import unittest
import weakref

import tensorflow as tf

from monolith.core import base_layer, base_model_params, base_task, py_utils
from monolith.core.base_layer import BaseLayer, add_layer_loss, get_layer_loss

tf.compat.v1.disable_eager_execution()


class Doubler(BaseLayer):
  def __init__(self, params):
    super().__init__(params)
    self.p = params

  def fprop(self, x, plus=0):
    return 2 * x + plus

  @property
  def broken(self):
    return self.no_such_thing_inside


def _layer(cls=BaseLayer, name="test"):
  return cls.params().set(name=name).instantiate()


class BaseLayerTest(unittest.TestCase):
  def test_create_child(self):
    layer = _layer()
    layer._disable_create_child = False
    layer_p = BaseLayer.params().set(name="a")

    layer.create_child("a", layer_p)

    self.assertIn("a", layer.children)
    self.assertIs(layer.a, layer.children.a)

  def test_create_children(self):
    layer = _layer()
    layer._disable_create_child = False
    layer_p = BaseLayer.params().set(name="a")

    layer.create_children("a", [layer_p, layer_p])

    self.assertEqual(len(layer.a), 2)

  def test_params(self):
    params = Doubler.params()
    self.assertEqual((params.name, params.cls), ("Doubler", Doubler))
    self.assertEqual(base_layer.get_uname("x"), "x")
    self.assertEqual(base_layer.get_uname("x"), "x")

  def test_name_is_needed(self):
    for name in (None, ""):
      with self.assertRaises(AssertionError) as caught:
        _layer(Doubler, name)
      self.assertEqual(str(caught.exception), 'Layer params for Doubler must have a "name"')

  def test_base_does_not_keep_params(self):
    self.assertFalse(hasattr(_layer(), "p"))
    self.assertIsInstance(_layer().children, py_utils.NestedMap)

  def test_unknown_attribute(self):
    layer = _layer()
    with self.assertRaises(AttributeError) as caught:
      _ = layer.foo
    self.assertEqual(str(caught.exception), f"foo is not a sub-layer of {layer}.")

  def test_error_of_a_property_is_not_hidden(self):
    with self.assertRaisesRegex(AttributeError, "^no_such_thing_inside is not a sub-layer"):
      _ = _layer(Doubler).broken

  def test_access_before_construction(self):
    with self.assertRaises(AttributeError):
      _ = BaseLayer.__new__(BaseLayer).anything

  def test_call_forwards_to_fprop(self):
    self.assertEqual(_layer(Doubler)(3, plus=1), 7)
    layer = _layer()
    with self.assertRaises(NotImplementedError) as caught:
      layer(1)
    self.assertEqual(str(caught.exception), f"Abstract method of {layer}")

  def test_nameless_children(self):
    layer = _layer(Doubler)
    nameless = Doubler.params().set(name=None)
    layer.create_child("one", nameless)
    layer.create_children("many", [nameless, nameless])
    self.assertEqual(layer.one.p.name, "test")
    self.assertEqual([child.p.name for child in layer.many], ["many_0", "many_1"])
    self.assertIsNone(nameless.name)

  def test_illegal_child_names(self):
    layer = _layer()
    with self.assertRaisesRegex(AssertionError, "^copy is a reserved key$"):
      layer.create_child("copy", BaseLayer.params())
    with self.assertRaisesRegex(ValueError, "^Invalid NestedMap key '1a'$"):
      layer.create_child("1a", BaseLayer.params())
    with self.assertRaisesRegex(ValueError, "^Invalid NestedMap key '1a'$"):
      layer.create_children("1a", [BaseLayer.params()])


class LayerLossTest(unittest.TestCase):
  def test_losses_add_up_per_graph(self):
    with tf.Graph().as_default():
      self.assertEqual(get_layer_loss(), {})
      add_layer_loss("a", tf.constant(1.0))
      add_layer_loss("a", tf.constant(2.0))
      add_layer_loss("b", 2.0)
      with tf.compat.v1.Session() as session:
        a = session.run(get_layer_loss()["a"])
      self.assertEqual({**get_layer_loss(), "a": a}, {"a": 3.0, "b": 2.0})
    with tf.Graph().as_default():
      self.assertEqual(get_layer_loss(), {})

  def test_graph_with_losses_is_freed(self):
    graph = tf.Graph()
    with graph.as_default():
      add_layer_loss("a", tf.constant(1.0))
    freed = weakref.ref(graph)
    del graph
    gc.collect()
    self.assertIsNone(freed())


class BaseTaskTest(unittest.TestCase):
  def test_params(self):
    params = base_task.BaseTask.params()
    flat = {
      f"{group}.{name}": value
      for group in ("input", "eval", "train")
      for name, value in params[group].iter_params()
    }
    self.assertEqual(
      {name: value for name, value in flat.items() if value is not None},
      {"eval.steps_per_eval": 10000, "train.repeat": False, "train.label_key": "label"},
    )
    self.assertEqual(
      {name for name, value in flat.items() if value is None},
      {
        "input.eval_examples",
        "input.train_examples",
        "eval.per_replica_batch_size",
        "eval.steps",
        "train.steps",
        "train.max_steps",
        "train.per_replica_batch_size",
        "train.file_pattern",
        "train.save_checkpoints_steps",
        "train.save_checkpoints_secs",
        "train.dense_only_save_checkpoints_secs",
        "train.dense_only_save_checkpoints_steps",
      },
    )
    self.assertIsNone(params.accelerator)

  def test_abstract_methods(self):
    task = base_task.BaseTask.params().instantiate()
    with self.assertRaisesRegex(NotImplementedError, r"^Abstract method\.$"):
      task.create_input_fn("train")
    with self.assertRaisesRegex(NotImplementedError, r"^Abstract method\.$"):
      task.create_model_fn()
    with self.assertRaisesRegex(NotImplementedError, "^Abstract method$"):
      base_model_params.SingleTaskModelParams().task()


if __name__ == "__main__":
  unittest.main()
