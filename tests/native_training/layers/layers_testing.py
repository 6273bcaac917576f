"""What the tests of layers share."""

import tensorflow as tf


class LayerTestCase(tf.test.TestCase):
  """Tests in graph mode; the test file switches eager execution off."""

  def value(self, tensors):
    """Initializes variables and returns values."""
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      return sess.run(tensors)

  def round_trip(self, layer):
    """Returns the layer that is made of the configuration of another one."""
    config = layer.get_config()
    before = repr(config)
    copy = type(layer).from_config(config)
    self.assertEqual(repr(config), before)
    self.assertEqual(repr(copy.get_config()), before)
    return copy

  def from_template(self, cls, **values):
    """Returns the layer that is made of a params template."""
    params = cls.params()
    self.assertEqual(params.name, cls.__name__)
    return params.set(**values).instantiate()

  def variable_names(self):
    return sorted(v.name.partition(":")[0] for v in tf.compat.v1.global_variables())
