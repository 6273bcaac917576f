import tensorflow as tf

from monolith import _tensorflow
from monolith.native_training import graph_utils

keras = _tensorflow.import_keras()

tf.compat.v1.disable_eager_execution()


class GraphUtilsTest(tf.test.TestCase):
  def _update_ops(self):
    return tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)

  def test_adds_moving_average_updates(self):
    x = tf.constant([[1.0], [3.0]])
    layer = keras.layers.BatchNormalization(momentum=0.5, fused=False)
    layer(x, training=True)
    self.assertEmpty(self._update_ops())

    graph_utils.add_batch_norm_into_update_ops()

    self.assertLen(self._update_ops(), 2)
    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(self._update_ops())
      self.assertAllClose(sess.run(layer.moving_mean), [1.0])

  def test_second_call_adds_nothing(self):
    keras.layers.BatchNormalization(fused=False)(tf.ones([2, 1]), training=True)

    graph_utils.add_batch_norm_into_update_ops()
    first = self._update_ops()
    graph_utils.add_batch_norm_into_update_ops()

    self.assertEqual(self._update_ops(), first)

  def test_other_ops_stay_out(self):
    variable = tf.Variable(1.0)
    variable.assign_sub(1.0, name="AnotherName")
    variable.assign_add(1.0, name="AssignMovingAvg")
    tf.constant(1.0, name="AssignMovingAvg_constant")

    graph_utils.add_batch_norm_into_update_ops()

    self.assertEmpty(self._update_ops())

  def test_empty_graph(self):
    with tf.Graph().as_default():
      graph_utils.add_batch_norm_into_update_ops()

      self.assertEmpty(self._update_ops())


if __name__ == "__main__":
  tf.test.main()
