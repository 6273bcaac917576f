import numpy as np
import tensorflow as tf

from monolith.native_training.optimizers import shampoo

tf.compat.v1.disable_eager_execution()


def _inverse_root(mat, p, head, tail, damping):
  """Returns the specified root, in float64, as `(vectors, values, offset)`."""
  values, vectors = np.linalg.eigh(mat.astype(np.float64))
  dim = mat.shape[0]
  above = np.flatnonzero(values > damping)
  zeros = above.min() if above.size else 0
  roots = np.maximum(values, damping) ** (-1.0 / p)
  if head + tail > dim:
    zeros, head, tail = 0, dim, 0
  elif zeros + head + tail > dim:
    zeros = dim - head - tail
  kept = list(range(zeros, zeros + head)) + list(range(dim - tail, dim))
  dropped = values[zeros + head : dim - tail]
  offset = dropped.mean() if dropped.size else 0.0
  return vectors[:, kept], roots[kept] - offset, offset


def _dense(vectors, values, offset):
  """Returns a preconditioner's matrix, which does not depend on the eigenvectors' signs."""
  return (vectors * values) @ vectors.T + offset * np.eye(vectors.shape[0])


class NumpyShampoo:
  """Updates one variable step by step as specified."""

  def __init__(self, var, lr, beta_1, beta_2, warmup, tau_1, tau_2, head, tail, damping):
    self.var = var.astype(np.float64)
    self.lr, self.beta_1, self.beta_2, self.warmup = lr, beta_1, beta_2, warmup
    self.tau_1, self.tau_2, self.head, self.tail, self.damping = tau_1, tau_2, head, tail, damping
    self.d, self.m, self.pm = (np.zeros(var.shape) for _ in range(3))
    self.g = [np.zeros([dim, dim]) for dim in var.shape]
    self.s = [np.zeros([dim, dim]) for dim in var.shape]
    self.precond = [np.zeros([dim, dim]) for dim in var.shape]

  def step(self, grad, global_step):
    grad = grad.astype(np.float64)
    rank = grad.ndim
    warmed_up = global_step > self.warmup
    preconditioned = grad
    for i in range(rank):
      if global_step % self.tau_2 == 0:
        others = [axis for axis in range(rank) if axis != i]
        self.g[i] = np.tensordot(grad, grad, axes=[others, others])
      if self.beta_2 < 1.0:
        self.s[i] = self.beta_2 * self.s[i] + (1 - self.beta_2) * self.g[i]
      else:
        self.s[i] = self.s[i] + self.g[i]
      if warmed_up and global_step % self.tau_1 == 0:
        self.precond[i] = _dense(
          *_inverse_root(self.s[i], 2 * rank, self.head, self.tail, self.damping)
        )
      preconditioned = np.moveaxis(
        np.tensordot(self.precond[i], preconditioned, axes=[[1], [i]]), 0, i
      )
    self.d += grad * grad
    self.m = self.beta_1 * self.m + (1 - self.beta_1) * grad / np.sqrt(self.d + 1e-30)
    self.pm = self.beta_1 * self.pm + (1 - self.beta_1) * preconditioned
    diag = self.lr * self.m
    if warmed_up:
      rate = np.clip(global_step / self.warmup - 1, 0, 1) if self.warmup else 1.0
      second = self.lr * np.linalg.norm(self.m) / (np.linalg.norm(self.pm) + 1e-10) * self.pm
      self.var = self.var - ((1 - rate) * diag + rate * second)
    else:
      self.var = self.var - diag


class EigenInverseRootTest(tf.test.TestCase):
  def _check(self, mat, p, head, tail, damping=1e-3):
    root = shampoo.eigen_inverse_root(tf.constant(mat, tf.float32), p, head, tail, damping)
    expected = _inverse_root(mat, p, head, tail, damping)
    with self.session() as sess:
      vectors, values, offset = sess.run(root)
    self.assertEqual(vectors.shape, expected[0].shape)
    self.assertEqual(values.shape, expected[1].shape)
    self.assertAllClose(offset, expected[2], rtol=1e-4, atol=1e-5)
    self.assertAllClose(_dense(vectors, values, offset), _dense(*expected), rtol=1e-3, atol=1e-3)
    return vectors, values, offset

  def _matrix(self, eigenvalues, seed=0):
    dim = len(eigenvalues)
    q, _ = np.linalg.qr(np.random.RandomState(seed).randn(dim, dim))
    return (q * np.array(eigenvalues)) @ q.T

  def test_all_eigenvalues(self):
    mat = self._matrix([0.5, 1.0, 4.0, 16.0])

    vectors, values, offset = self._check(mat, 2, 100, 100)

    self.assertEqual(offset, 0.0)
    root = _dense(vectors, values, offset)
    self.assertAllClose(root @ mat @ root, np.eye(4), atol=1e-4)

  def test_as_many_as_there_are(self):
    self._check(self._matrix([0.5, 1.0, 4.0, 16.0]), 4, 2, 2)

  def test_head_and_tail(self):
    _, values, offset = self._check(self._matrix([1.0, 2.0, 3.0, 4.0, 16.0]), 2, 1, 1)

    self.assertAllClose(offset, 3.0)
    self.assertAllClose(values, [1.0 - 3.0, 0.25 - 3.0])

  def test_head_starts_above_damping(self):
    # The two zeros are skipped: 4 and 100 are kept, 9 and 16 are dropped.
    _, values, offset = self._check(self._matrix([0.0, 0.0, 4.0, 9.0, 16.0, 100.0]), 2, 1, 1)

    self.assertAllClose(offset, 12.5)
    self.assertAllClose(values, [0.5 - 12.5, 0.1 - 12.5])

  def test_too_many_zeros_to_skip(self):
    # Only one eigenvalue exceeds damping, so two smaller ones must be kept.
    self._check(self._matrix([0.1, 0.2, 0.3, 0.4, 4.0]), 2, 2, 1, damping=0.5)

  def test_only_head_or_only_tail(self):
    mat = self._matrix([1.0, 2.0, 3.0, 4.0])
    self._check(mat, 2, 2, 0)
    self._check(mat, 2, 0, 2)

  def test_zero_matrix_is_damped(self):
    _, values, _ = self._check(np.zeros([3, 3]), 2, 100, 100, damping=0.25)

    self.assertAllClose(values, [2.0, 2.0, 2.0])

  def test_zero_matrix_with_few_eigenvalues(self):
    self._check(np.zeros([5, 5]), 2, 1, 1, damping=0.25)

  def test_one_by_one(self):
    self._check(np.array([[4.0]]), 2, 1, 1)
    self._check(np.array([[4.0]]), 2, 1, 0)


class ApplySparsePrecondTest(tf.test.TestCase):
  def test_applied_to_every_dimension(self):
    rng = np.random.RandomState(0)
    tensor = rng.randn(2, 3, 4)
    preconds = [(rng.randn(dim, 2), rng.randn(2), rng.randn()) for dim in tensor.shape]

    result = tf.constant(tensor)
    for precond in preconds:
      result = shampoo.apply_sparse_precond(result, *[tf.constant(x, tf.float64) for x in precond])

    matrices = [_dense(*precond) for precond in preconds]
    expected = np.einsum("abc,ax,by,cz->xyz", tensor, *matrices)
    with self.session() as sess:
      self.assertAllClose(sess.run(result), expected)

  def test_rotates_dimensions(self):
    tensor = np.arange(24.0).reshape([2, 3, 4])

    result = shampoo.apply_sparse_precond(
      tf.constant(tensor), tf.zeros([2, 1], tf.float64), tf.zeros([1], tf.float64), 1.0
    )

    with self.session() as sess:
      self.assertAllClose(sess.run(result), np.transpose(tensor, [1, 2, 0]))


class ShampooOptimizerTest(tf.test.TestCase):
  def _compare(self, shape, steps, **overrides):
    """Runs both implementations on random gradients and compares all state after every step."""
    config = dict(
      lr=0.1, beta_1=0.9, beta_2=1.0, warmup=3, tau_1=2, tau_2=1, head=100, tail=100, damping=1e-3
    )
    config.update(overrides)
    rng = np.random.RandomState(1)
    initial = np.asarray(rng.randn(*shape), np.float32)
    reference = NumpyShampoo(initial, **config)

    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      global_step = tf.compat.v1.train.get_or_create_global_step()
      var = tf.Variable(initial)
      grad_ph = tf.compat.v1.placeholder(tf.float32, shape)
      optimizer = shampoo.ShampooOptimizer(
        learning_rate=config["lr"],
        beta_1=config["beta_1"],
        beta_2=config["beta_2"],
        warmup=config["warmup"],
        tau_1=config["tau_1"],
        tau_2=config["tau_2"],
        eigen_head=config["head"],
        eigen_tail=config["tail"],
        damping_epsilon=config["damping"],
      )
      train_op = optimizer.apply_gradients([(grad_ph, var)], global_step=global_step)
      sess.run(tf.compat.v1.global_variables_initializer())
      for step in range(steps):
        grad = np.asarray(rng.randn(*shape), np.float32)
        sess.run(train_op, {grad_ph: grad})
        reference.step(grad, step)

        def slot(name):
          return sess.run(optimizer.get_slot(var, name))

        close = dict(rtol=2e-3, atol=2e-4, msg=f"step {step}")
        self.assertAllClose(sess.run(var), reference.var, **close)
        for name in ("d", "m", "pm"):
          self.assertAllClose(slot(name), getattr(reference, name), **close)
        for i in range(len(shape)):
          self.assertAllClose(slot(f"g{i}"), reference.g[i], **close)
          self.assertAllClose(slot(f"s{i}"), reference.s[i], **close)
          precond = _dense(slot(f"pvec{i}"), slot(f"pval{i}"), slot(f"o{i}"))
          self.assertAllClose(precond, reference.precond[i], **close)
      return reference

  def test_one_update_before_warm_up(self):
    """Computes by hand the first step of a diagonal AdaGrad with momentum."""
    tf.compat.v1.train.get_or_create_global_step()
    var = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    grad = np.array([[0.1, -0.2], [0.4, 0.0]], np.float32)
    optimizer = shampoo.ShampooOptimizer(learning_rate=0.5)
    train_op = optimizer.apply_gradients([(tf.constant(grad), var)])

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train_op)

      # m = (1 - 0.9) * g / sqrt(g^2), and 0 where there is no gradient.
      m = np.array([[0.1, -0.1], [0.1, 0.0]])
      self.assertAllClose(sess.run(var), np.array([[1.0, 2.0], [3.0, 4.0]]) - 0.5 * m)
      self.assertAllClose(sess.run(optimizer.get_slot(var, "m")), m)
      self.assertAllClose(sess.run(optimizer.get_slot(var, "d")), grad**2)
      self.assertAllClose(sess.run(optimizer.get_slot(var, "pm")), np.zeros([2, 2]))
      self.assertAllClose(sess.run(optimizer.get_slot(var, "s0")), grad @ grad.T)
      self.assertAllClose(sess.run(optimizer.get_slot(var, "s1")), grad.T @ grad)
      self.assertAllClose(sess.run(optimizer.get_slot(var, "pvec0")), np.zeros([2, 2]))

  def test_one_update_after_warm_up(self):
    """Computes by hand one step at twice the warm-up, which is purely preconditioned."""
    global_step = tf.compat.v1.train.get_or_create_global_step()
    var = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    grad = np.array([[0.3, -0.2], [0.4, 0.5]], np.float32)
    optimizer = shampoo.ShampooOptimizer(learning_rate=0.5, warmup=10, tau_1=5, tau_2=5)
    train_op = optimizer.apply_gradients([(tf.constant(grad), var)])

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(global_step.assign(20))
      sess.run(train_op)

      def root(mat):  # mat^(-1/4)
        values, vectors = np.linalg.eigh(mat)
        return (vectors * np.maximum(values, 1e-3) ** -0.25) @ vectors.T

      pm = 0.1 * root(grad @ grad.T) @ grad @ root(grad.T @ grad)
      m = 0.1 * np.sign(grad)
      expected = np.linalg.norm(m) / np.linalg.norm(pm) * pm
      self.assertAllClose(sess.run(optimizer.get_slot(var, "pm")), pm, atol=1e-5)
      self.assertAllClose(
        sess.run(var), np.array([[1.0, 2.0], [3.0, 4.0]]) - 0.5 * expected, atol=1e-5
      )

  def test_matrix_step_by_step(self):
    # Steps 0 to 3 warm up, 4 and 5 blend, later ones are purely preconditioned.
    reference = self._compare([3, 4], steps=9)

    self.assertGreater(np.linalg.norm(reference.pm), 0)

  def test_statistics_are_renewed_every_tau_2_steps(self):
    self._compare([2, 3], steps=8, tau_2=3)

  def test_preconditioners_are_renewed_every_tau_1_steps(self):
    self._compare([2, 3], steps=10, tau_1=4)

  def test_decaying_statistics(self):
    self._compare([3, 2], steps=8, beta_2=0.9)

  def test_few_eigenvalues(self):
    self._compare([6, 2], steps=8, head=1, tail=2)

  def test_vector_and_rank_three(self):
    self._compare([5], steps=8)
    self._compare([2, 3, 4], steps=7)

  def test_scalar(self):
    self._compare([], steps=6)

  def test_without_warm_up(self):
    self._compare([2, 2], steps=4, warmup=0, tau_1=1)

  def test_slots(self):
    tf.compat.v1.train.get_or_create_global_step()
    var = tf.compat.v1.get_variable("w", [5, 3])
    optimizer = shampoo.ShampooOptimizer(eigen_head=1, eigen_tail=1)
    optimizer.apply_gradients([(tf.zeros([5, 3]), var)])

    expected = {
      "s0": [5, 5], "g0": [5, 5], "pvec0": [5, 2], "pval0": [2], "o0": [],
      "s1": [3, 3], "g1": [3, 3], "pvec1": [3, 2], "pval1": [2], "o1": [],
      "d": [5, 3], "m": [5, 3], "pm": [5, 3],
    }  # fmt: skip
    self.assertCountEqual(optimizer.get_slot_names(), expected)
    for name, shape in expected.items():
      slot = optimizer.get_slot(var, name)
      self.assertEqual(slot.shape.as_list(), shape)
      self.assertEqual(slot.dtype, tf.float32)
      self.assertEqual(slot.op.name, f"w/Shampoo/{name}")

  def test_learning_rate_function_and_global_step(self):
    global_step = tf.compat.v1.train.get_or_create_global_step()
    var = tf.Variable([1.0])
    optimizer = shampoo.ShampooOptimizer(
      learning_rate=lambda: 1.0 / tf.cast(1 + global_step, tf.float32), beta_1=0.0
    )
    train_op = optimizer.apply_gradients([(tf.constant([2.0]), var)], global_step=global_step)

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train_op)
      sess.run(train_op)

      self.assertEqual(sess.run(global_step), 2)
      self.assertAllClose(sess.run(var), [1.0 - 1.0 - 0.5 / np.sqrt(2)])

  def test_double_precision_variable(self):
    tf.compat.v1.train.get_or_create_global_step()
    var = tf.Variable(np.ones([2, 2]))
    optimizer = shampoo.ShampooOptimizer(learning_rate=0.5)
    train_op = optimizer.apply_gradients([(tf.ones([2, 2], tf.float64), var)])

    with self.session() as sess:
      sess.run(tf.compat.v1.global_variables_initializer())
      sess.run(train_op)
      self.assertAllClose(sess.run(var), np.full([2, 2], 0.95))

  def test_sparse_gradient(self):
    tf.compat.v1.train.get_or_create_global_step()
    var = tf.Variable(tf.ones([4, 2]))
    loss = tf.reduce_sum(tf.gather(var, [0, 2, 2]))

    with self.assertRaisesRegex(TypeError, "does not support sparse gradients"):
      shampoo.ShampooOptimizer().minimize(loss)

  def test_missing_global_step(self):
    with tf.Graph().as_default():
      var = tf.Variable([1.0])
      with self.assertRaisesRegex(ValueError, "needs a global step"):
        shampoo.ShampooOptimizer().apply_gradients([(tf.constant([1.0]), var)])

  def test_bad_arguments(self):
    for kwargs in ({"warmup": -1}, {"tau_1": 0}, {"tau_2": 0}):
      ((name, value),) = kwargs.items()
      with self.assertRaisesRegex(ValueError, f"{name} is {value}, want at least"):
        shampoo.ShampooOptimizer(**kwargs)
    with self.assertRaises(TypeError):
      shampoo.ShampooOptimizer(unknown=1)

  def test_beats_adagrad_on_ill_conditioned_least_squares(self):
    """min |A W B - Y|^2 where A and B have condition 100 and mix all coordinates.

    Both optimizers get the best of the same learning rates.
    """
    rng = np.random.RandomState(0)
    dim, steps = 8, 300

    def ill_conditioned():
      left, _ = np.linalg.qr(rng.randn(dim, dim))
      right, _ = np.linalg.qr(rng.randn(dim, dim))
      return ((left * np.logspace(0, -2, dim)) @ right).astype(np.float32)

    a, b = ill_conditioned(), ill_conditioned()
    y = (a @ rng.randn(dim, dim) @ b).astype(np.float32)

    def best_loss(make_optimizer):
      return min(self._train(a, b, y, make_optimizer, lr, steps) for lr in (0.03, 0.1, 0.3, 1.0))

    adagrad = best_loss(tf.compat.v1.train.AdagradOptimizer)
    shampoo_loss = best_loss(
      lambda lr: shampoo.ShampooOptimizer(lr, warmup=10, tau_1=1, tau_2=1, damping_epsilon=1e-8)
    )

    self.assertLess(shampoo_loss, 0.2 * adagrad)

  def _train(self, a, b, y, make_optimizer, lr, steps):
    """Returns the loss after some steps from zero."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
      w = tf.Variable(tf.zeros(y.shape))
      loss = tf.reduce_sum(tf.square(tf.matmul(tf.matmul(a, w), b) - y))
      global_step = tf.compat.v1.train.get_or_create_global_step()
      train_op = make_optimizer(lr).minimize(loss, global_step=global_step)
      sess.run(tf.compat.v1.global_variables_initializer())
      for _ in range(steps):
        sess.run(train_op)
      return sess.run(loss)


if __name__ == "__main__":
  tf.test.main()
