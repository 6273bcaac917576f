"""Helpers that the tests of layers share."""

import tensorflow as tf


class LayerTestCase(tf.test.TestCase):
  """Tests in graph mode; the test file switches eager execution off."""

  def value(self, tensors):
    """Initializes variables and returns values."""
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      return sess.run(tensors)

  def round_trip(self, layer):
    """Returns a layer built from another one's configuration."""
    config = layer.get_config()
    before = repr(config)
    copy = type(layer).from_config(config)
    self.assertEqual(repr(config), before)
    self.assertEqual(repr(copy.get_config()), before)
    return copy

  def from_template(self, cls, **values):
    """Returns the layer that a params template builds."""
    params = cls.params()
    self.assertEqual(params.name, cls.__name__)
    return params.set(**values).instantiate()

  def variable_names(self):
    return sorted(v.name.partition(":")[0] for v in tf.compat.v1.global_variables())
