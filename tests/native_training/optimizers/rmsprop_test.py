import numpy as np
import tensorflow as tf
from tensorflow.python.framework import test_util

from monolith.native_training.optimizers import rmsprop
from monolith.native_training.runtime.ops import gen_monolith_ops

tf.compat.v1.disable_eager_execution()


def build_graph():
  var = tf.Variable([0.1], name="var")
  loss = 0.12 * var
  opt = rmsprop.RmspropOptimizer(
    learning_rate=0.1, weight_decay=1, beta1=0.9, beta2=0.9, epsilon=0.1
  )
  return opt.minimize(loss)


def _variables(*arrays):
  return [tf.Variable(np.array(a, np.float32)) for a in arrays]


def _apply(variables, grad, lr=0.1, beta1=0.9, beta2=0.9, epsilon=0.1, weight_decay=1.0, **kwargs):
  return gen_monolith_ops.resource_apply_rmsprop(
    *(v.handle for v in variables), lr, beta1, beta2, epsilon, weight_decay, grad, **kwargs
  )


def _expected(w, m, v, g, lr, beta1, beta2, epsilon, weight_decay, use_v2):
  w, m, v, g = (np.asarray(x, np.float64) for x in (w, m, v, g))
  g = weight_decay * w + g
  if use_v2:
    v = beta2 * v + g * g
    m = beta1 * m + lr * g / (np.sqrt(v) + epsilon)
  else:
    v = v + (g * g - v) * (1 - beta2)
    m = beta1 * m + lr * g / np.sqrt(v + epsilon)
  return w - m, m, v


class RmspropTest(tf.test.TestCase):
  def _train_once(self, device_scope):
    """Takes one step in a fresh graph; returns the variables' values and devices, by name."""
    with tf.Graph().as_default(), device_scope, self.session() as sess:
      train = build_graph()
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      variables = tf.compat.v1.global_variables()
      return {v.name: sess.run(v) for v in variables}, {v.device for v in variables}

  def testBasic(self):
    values, devices = self._train_once(test_util.use_gpu())
    if test_util.is_gpu_available():
      self.assertEqual(devices, {"/device:GPU:0"})
    self.assertLen(values, 3)
    self.assertAllClose(values["var/Rmsprop/m:0"], [0.06794526153774846], rtol=0, atol=1e-8)
    self.assertAllClose(values["var/Rmsprop/v:0"], [0.00484], rtol=0, atol=1e-8)
    self.assertAllClose(values["var:0"], [0.03205473846225154], rtol=0, atol=1e-8)

    cpu_values, devices = self._train_once(test_util.force_cpu())
    self.assertEqual(devices, {"/device:CPU:0"})
    self.assertAllEqual(cpu_values, values)

  def test_second_step(self):
    with self.session() as sess:
      variables = _variables([0.1], [0.0], [0.0])
      train = _apply(variables, [0.12])
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      sess.run(train)
      self.assertAllClose(
        sess.run(variables), [[-0.07565275718], [0.10770749564], [0.00666806435]], rtol=1e-6
      )

  def test_defaults_and_names(self):
    opt = rmsprop.RmspropOptimizer()
    self.assertEqual(opt.get_name(), "Rmsprop")
    self.assertEqual(
      (opt._learning_rate, opt._beta1, opt._beta2, opt._epsilon, opt._weight_decay, opt._use_v2),
      (5e-6, 0.99, 0.999, 1e-8, 0.0, False),
    )
    self.assertIs(rmsprop.training_ops, gen_monolith_ops)

  def test_random_against_numpy(self):
    random = np.random.default_rng(0)
    for shape in ((), (0, 3), (1,), (7,), (33, 17), (200_003,)):
      for use_v2 in (False, True):
        with self.subTest(shape=shape, use_v2=use_v2), self.session() as sess:
          w, m, g = (random.normal(size=shape).astype(np.float32) for _ in range(3))
          v = random.uniform(0.5, 3, size=shape).astype(np.float32)
          variables = _variables(w, m, v)
          train = _apply(variables, g, 0.03, 0.8, 0.9, 1e-3, 0.1, use_v2=use_v2)
          sess.run(tf.compat.v1.global_variables_initializer())
          sess.run(train)
          want = _expected(w, m, v, g, 0.03, 0.8, 0.9, 1e-3, 0.1, use_v2)
          for got, expected in zip(sess.run(variables), want):
            self.assertAllClose(got, expected, rtol=2e-6, atol=1e-6)

  def test_update_slots_false_does_nothing(self):
    with self.session() as sess:
      variables = _variables([1.0], [0.5], [0.25])
      train = _apply(variables, [0.12], update_slots=False)
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      self.assertAllEqual(sess.run(variables), [[1.0], [0.5], [0.25]])

  def test_ref_variables_are_refused(self):
    var = tf.compat.v1.get_variable("ref", initializer=[1.0], use_resource=False)
    with self.assertRaisesRegex(NotImplementedError, "disable_eager_execution"):
      rmsprop.RmspropOptimizer().minimize(0.12 * var)

  def test_sparse_gradient_is_not_implemented(self):
    var = tf.Variable([[0.1], [0.2]])
    loss = tf.reduce_sum(tf.gather(var, [0]))
    with self.assertRaises(NotImplementedError):
      rmsprop.RmspropOptimizer().minimize(loss)

  def test_errors(self):
    with self.session() as sess:
      ones = [1.0, 1.0]
      variables = _variables(ones, ones, ones)
      uninitialized = tf.Variable(ones)
      sess.run([v.initializer for v in variables])
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "Attempting to use uninitialized variables: "
      ):
        sess.run(_apply([*variables[:2], uninitialized], ones))
      grad = tf.compat.v1.placeholder(tf.float32)
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, r"var and grad do not have the same shape\[2\] \[1\]"
      ):
        sess.run(_apply(variables, grad), {grad: [1.0]})
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"beta2 is not a scalar: \[2\]"):
        sess.run(_apply(variables, ones, beta2=grad), {grad: ones})
      with self.assertRaises(ValueError):
        _apply(variables, [[1.0, 2.0]])
      # TensorFlow keeps integer variables on the CPU, also where there is a GPU.
      with tf.device("/CPU:0"):
        mixed = [tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0]), tf.Variable([1, 2])]
        sess.run([variable.initializer for variable in mixed])
        with self.assertRaisesRegex(
          (ValueError, tf.errors.InvalidArgumentError), "v has dtype int32, want float"
        ):
          sess.run(_apply(mixed, ones))


if __name__ == "__main__":
  tf.test.main()
