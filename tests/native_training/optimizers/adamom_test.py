import threading

import numpy as np
import tensorflow as tf

from monolith.native_training.optimizers import adamom
from monolith.native_training.runtime.ops import gen_monolith_ops

tf.compat.v1.disable_eager_execution()


def _variables(*arrays):
  return [tf.Variable(np.array(a, np.float32)) for a in arrays]


def _apply(variables, grad, lr=0.1, ada=0.99, mom=0.9, epsilon=1e-6, weight_decay=0.01, **kwargs):
  return gen_monolith_ops.resource_apply_adamom(
    *(v.handle for v in variables), lr, ada, mom, epsilon, weight_decay, grad, **kwargs
  )


def _expected(w, m, v, c, g, lr, ada, mom, epsilon, weight_decay, use_v2):
  w, m, v, c, g = (np.asarray(x, np.float64) for x in (w, m, v, c, g))
  g = weight_decay * w + g
  m = mom * m + (1 - mom) * g
  v = ada * v + g * g
  c = ada * c + 1
  root = np.sqrt(v / c) + epsilon if use_v2 else np.sqrt(v / c + epsilon)
  return w - lr * m / root, m, v, c


class AdamomTest(tf.test.TestCase):
  def testBasic(self):
    with self.session() as sess:
      var = tf.Variable([0.1], name="var")
      loss = 0.12 * var
      opt = adamom.AdamomOptimizer(
        learning_rate=0.1, weight_decay=0.01, ada_decay=0.99, mom_decay=0.9
      )
      train = opt.minimize(loss)
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      values = {v.name: sess.run(v) for v in tf.compat.v1.global_variables()}

      self.assertLen(values, 4)
      self.assertAllClose(values["var/Adamom/m:0"], [0.0121], rtol=0, atol=1e-8)
      self.assertAllClose(values["var/Adamom/c:0"], [1.0], rtol=0, atol=1e-8)
      self.assertAllClose(values["var/Adamom/v:0"], [0.014641], rtol=0, atol=1e-8)
      self.assertAllClose(values["var:0"], [0.090000336], rtol=0, atol=1e-8)

  def test_three_steps(self):
    with self.session() as sess:
      var = tf.Variable([0.1], name="three")
      opt = adamom.AdamomOptimizer(0.1, weight_decay=0.01, ada_decay=0.99, mom_decay=0.9)
      train = opt.minimize(0.12 * var)
      sess.run(tf.compat.v1.global_variables_initializer())
      for m, v, c, w in (
        (0.0121, 0.014641, 1, 0.09000034149),
        (0.02298000034, 0.02911140083, 1.99, 0.07100136638),
        (0.03275300167, 0.04339119422, 2.9701, 0.04390438089),
      ):
        sess.run(train)
        slots = [opt.get_slot(var, name) for name in ("m", "v", "c")]
        self.assertAllClose(sess.run([*slots, var]), [[m], [v], [c], [w]], rtol=1e-6, atol=1e-8)

  def test_defaults_and_names(self):
    opt = adamom.AdamomOptimizer()
    self.assertEqual(opt.get_name(), "Adamom")
    self.assertEqual(
      (opt._learning_rate, opt._ada_decay, opt._mom_decay, opt._epsilon, opt._weight_decay),
      (5e-6, 0.9999, 0.99, 1e-6, 0.0),
    )
    self.assertIsNone(opt._learning_rate_tensor)
    self.assertIs(adamom.training_ops, gen_monolith_ops)

  def test_callable_learning_rate(self):
    with self.session() as sess:
      var = tf.Variable([0.1])
      opt = adamom.AdamomOptimizer(lambda: 0.1, 0.99, 0.9, weight_decay=0.01)
      train = opt.minimize(0.12 * var)
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      self.assertAllClose(sess.run(var), [0.09000034], rtol=0, atol=1e-8)

  def test_use_v2(self):
    with self.session() as sess:
      variables = _variables([0.1], [0.0], [0.0], [0.0])
      train = _apply(variables, [0.12], use_v2=True)
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      self.assertAllClose(
        sess.run(variables), [[0.09000008264], [0.0121], [0.014641], [1.0]], rtol=1e-6, atol=1e-8
      )

  def test_random_against_numpy(self):
    random = np.random.default_rng(0)
    for shape in ((), (0, 3), (1,), (7,), (33, 17), (200_003,)):
      for use_v2 in (False, True):
        with self.subTest(shape=shape, use_v2=use_v2), self.session() as sess:
          w, m, g = (random.normal(size=shape).astype(np.float32) for _ in range(3))
          v, c = (random.uniform(0.5, 3, size=shape).astype(np.float32) for _ in range(2))
          variables = _variables(w, m, v, c)
          train = _apply(variables, g, 0.03, 0.9, 0.8, 1e-3, 0.1, use_v2=use_v2)
          sess.run(tf.compat.v1.global_variables_initializer())
          sess.run(train)
          want = _expected(w, m, v, c, g, 0.03, 0.9, 0.8, 1e-3, 0.1, use_v2)
          for got, expected in zip(sess.run(variables), want):
            self.assertAllClose(got, expected, rtol=2e-6, atol=1e-6)

  def test_update_slots_false_moves_only_the_variable(self):
    with self.session() as sess:
      variables = _variables([1.0], [0.5], [0.08], [2.0])
      train = _apply(variables, [0.12], update_slots=False, epsilon=0.0)
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train)
      self.assertAllClose(sess.run(variables), [[0.75], [0.5], [0.08], [2.0]])

  def test_update_slots_false_on_fresh_slots_is_an_error(self):
    with self.session() as sess:
      variables = _variables([1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0])
      train = _apply(variables, [0.12, 0.12], update_slots=False)
      sess.run(tf.compat.v1.global_variables_initializer())
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "update_slots"):
        sess.run(train)
      self.assertAllEqual(sess.run(variables[0]), [1.0, 2.0])

  def test_reader_keeps_the_old_value(self):
    with self.session() as sess:
      variables = _variables([1.0] * 100, [0.0] * 100, [0.0] * 100, [0.0] * 100)
      before = variables[0].read_value()
      with tf.control_dependencies([before]):
        train = _apply(variables, [1.0] * 100)
      with tf.control_dependencies([train]):
        kept, after = tf.identity(before), variables[0].read_value()
      sess.run(tf.compat.v1.global_variables_initializer())
      kept, after = sess.run((kept, after))
      self.assertAllEqual(kept, [1.0] * 100)
      self.assertAllLess(after, 1.0)

  def test_steps_are_atomic_under_concurrency(self):
    with self.session() as sess:
      variables = _variables(*[np.zeros(1000)] * 4)
      # With decay 1, c counts the steps.
      train = _apply(variables, np.ones(1000), ada=1.0)
      sess.run(tf.compat.v1.global_variables_initializer())

      def steps():
        for _ in range(50):
          sess.run(train)

      threads = [threading.Thread(target=steps) for _ in range(4)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      self.assertAllEqual(sess.run(variables[3]), [200.0] * 1000)

  def test_sparse_gradient_is_not_implemented(self):
    var = tf.Variable([[0.1], [0.2]])
    loss = tf.reduce_sum(tf.gather(var, [0]))
    with self.assertRaises(NotImplementedError):
      adamom.AdamomOptimizer().minimize(loss)

  def test_errors(self):
    with self.session() as sess:
      ones = [1.0, 1.0]
      variables = _variables(ones, ones, ones, ones)
      uninitialized = tf.Variable(ones)
      sess.run([v.initializer for v in variables])
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, "Attempting to use uninitialized variables: "
      ):
        sess.run(_apply([*variables[:3], uninitialized], ones))
      grad = tf.compat.v1.placeholder(tf.float32)
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        r"var and grad do not have the same shape\[2\] \[3\]",
      ):
        sess.run(_apply(variables, grad), {grad: [1.0, 2.0, 3.0]})
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"lr is not a scalar: \[2\]"):
        sess.run(_apply(variables, ones, lr=grad), {grad: ones})
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "m and var are the same"):
        sess.run(_apply([variables[0], *variables[:3]], ones))
      with self.assertRaises(ValueError):
        _apply(variables, [1.0, 2.0, 3.0])
      with self.assertRaises(ValueError):
        _apply(variables, ones, lr=[0.1, 0.1])


if __name__ == "__main__":
  tf.test.main()
