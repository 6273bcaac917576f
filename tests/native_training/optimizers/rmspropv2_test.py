import tensorflow as tf
from tensorflow.python.framework import test_util

from monolith.native_training.optimizers import rmsprop

tf.compat.v1.disable_eager_execution()


def build_graph():
  var = tf.Variable([0.1], name="var")
  loss = 0.12 * var
  opt = rmsprop.RmspropOptimizer(
    learning_rate=0.1, weight_decay=1, beta1=0.9, beta2=0.9, epsilon=0.1, use_v2=True
  )
  return opt.minimize(loss)


class RmspropTest(tf.test.TestCase):
  def _train(self, device_scope, steps=1):
    """Takes steps in a fresh graph; returns the variables' values and devices, by name."""
    with tf.Graph().as_default(), device_scope, self.session() as sess:
      train = build_graph()
      sess.run(tf.compat.v1.global_variables_initializer())
      for _ in range(steps):
        sess.run(train)
      variables = tf.compat.v1.global_variables()
      return {v.name: sess.run(v) for v in variables}, {v.device for v in variables}

  def _check_one_step(self):
    values, devices = self._train(test_util.use_gpu())
    if test_util.is_gpu_available():
      self.assertEqual(devices, {"/device:GPU:0"})
    self.assertLen(values, 3)
    self.assertAllClose(values["var/Rmsprop/m:0"], [0.068750], rtol=0, atol=1e-8)
    self.assertAllClose(values["var/Rmsprop/v:0"], [0.0484], rtol=0, atol=1e-8)
    self.assertAllClose(values["var:0"], [0.031250], rtol=0, atol=1e-8)

    cpu_values, devices = self._train(test_util.force_cpu())
    self.assertEqual(devices, {"/device:CPU:0"})
    self.assertAllEqual(cpu_values, values)

  def testBasic(self):
    self._check_one_step()

  def testWeightDecay(self):
    self._check_one_step()

  def test_second_step(self):
    values, _ = self._train(test_util.force_cpu(), steps=2)
    self.assertAllClose(values["var/Rmsprop/m:0"], [0.10415278332], rtol=1e-6)
    self.assertAllClose(values["var/Rmsprop/v:0"], [0.0664365625], rtol=1e-6)
    self.assertAllClose(values["var:0"], [-0.07290278332], rtol=1e-6)


if __name__ == "__main__":
  tf.test.main()
