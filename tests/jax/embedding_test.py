"""`monolith.jax`: rows in JAX, outside `jit` and inside it.

Tests `jax/ids.py` as well.
"""

import os
import pathlib
import subprocess
import sys
import unittest

try:
  import jax
except ImportError:
  raise unittest.SkipTest("needs JAX") from None

import jax.numpy as jnp
import numpy as np

import monolith.jax as mj
from monolith import table as tables
from monolith.jax import ids as id_types

_LEAST, _MOST = -(2**63), 2**63 - 1
_SGD = {"optimizer": "sgd", "initializer": "zeros", "learning_rate": 1.0}


class EmbeddingTest(unittest.TestCase):
  def test_a_gradient_is_a_step(self):
    for wrap in (lambda f: f, jax.jit):
      one = mj.Embedding(2, **_SGD)
      ids = mj.pack_ids([[7, _LEAST], [7, _MOST]])
      factors = jnp.arange(8.0).reshape(2, 2, 2)

      def loss(rows, ids, factors, one=one):
        return (one(rows, ids) * factors).sum()

      step = wrap(jax.value_and_grad(loss))
      value, gradient = step(one.init(), ids, factors)
      self.assertEqual((float(value), gradient.shape, len(one)), (0.0, (0, 2), 3))
      expected = [[[-4, -6], [-2, -3]], [[-4, -6], [-6, -7]]]
      self.assertEqual(wrap(one.lookup)(ids).tolist(), expected)
      value, _ = step(one.init(), ids, factors)
      self.assertEqual(float(value), float((np.array(expected) * factors).sum()))

  def test_steps_of_a_jitted_function_are_in_order(self):
    one = mj.Embedding(4, **_SGD)
    ids = mj.pack_ids(np.arange(3000))

    @jax.jit
    def step(rows, ids):
      # Doubles each row and adds 1: the result is right in one order only.
      return jax.grad(lambda r: -((one(r, ids) + 1.0) ** 2).sum() / 2)(rows)

    for _ in range(12):
      step(one.init(), ids)
    self.assertEqual(one.lookup(ids).tolist(), [[2.0**12 - 1] * 4] * 3000)

  def test_a_step_depends_on_the_lookup_before_it(self):
    one = mj.Embedding(2, **_SGD)
    # The gradient itself needs no vectors, and callbacks run in any order that data allows.
    function = jax.value_and_grad(lambda rows, ids: one(rows, ids).sum())
    jaxpr = jax.make_jaxpr(function)(one.init(), mj.pack_ids([1, 2])).jaxpr
    behind = set()
    steps = 0
    for equation in jaxpr.eqns:
      inputs = {value for value in equation.invars if not hasattr(value, "val")}
      if equation.primitive.name == "io_callback":
        steps += 1
        self.assertTrue(inputs & behind, jaxpr)
      if equation.primitive.name == "pure_callback" or inputs & behind:
        behind.update(equation.outvars)
    self.assertEqual(steps, 1)
    for wrap in (lambda f: f, jax.jit):
      gradient = wrap(jax.grad(lambda rows, ids: one(rows, ids).sum()))
      self.assertEqual(gradient(one.init(), mj.pack_ids(np.zeros([0], np.int64))).shape, (0, 2))
    self.assertEqual(len(one), 0)

  def test_many_tables_in_one_function(self):
    embeddings = [mj.Embedding(16, "adagrad", "zeros") for _ in range(8)]
    ids = [mj.pack_ids(np.arange(4096) * (i + 1)) for i in range(8)]
    params = [one.init() for one in embeddings]

    @jax.jit
    def step(params, ids):
      return jax.value_and_grad(
        lambda p: sum(((one(r, i) - 1) ** 2).mean() for one, r, i in zip(embeddings, p, ids))
      )(params)

    losses = [float(step(params, ids)[0]) for _ in range(5)]
    self.assertEqual([len(one) for one in embeddings], [4096] * 8)
    self.assertEqual(losses, sorted(losses, reverse=True))

  def test_a_model_learns_beside_dense_parameters(self):
    users, items = (mj.Embedding(8, "adagrad", learning_rate=0.2, seed=i) for i in (1, 2))
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 100, [2, 4096])
    labels = ((user + item) % 2).astype(np.float32)
    params = {"users": users.init(), "items": items.init(), "scale": jnp.ones(8)}

    @jax.jit
    def step(params, user, item, labels):
      def loss(params):
        product = users(params["users"], user) * items(params["items"], item)
        logits = (product * params["scale"]).sum(-1)
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

      value, gradients = jax.value_and_grad(loss)(params)
      return value, jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, gradients)

    losses = []
    for _ in range(60):
      value, params = step(params, mj.pack_ids(user), mj.pack_ids(item), labels)
      losses.append(float(value))
    self.assertLess(losses[-1], 0.5 * losses[0])

  def test_update_and_lookup_inside_jit(self):
    one = mj.Embedding(1, **_SGD)

    @jax.jit
    def both(ids, gradients):
      one.update(ids, gradients)
      return one.lookup(mj.Ids(ids.low + 1, ids.high))

    ids = mj.pack_ids(np.array([2**40, -5]))
    self.assertEqual(both(ids, jnp.array([[1.0], [2.0]])).shape, (2, 1))
    self.assertEqual(one.lookup(np.array([2**40, -5, 0])).tolist(), [[-1], [-2], [0]])
    one.update([3], [[1.0]])
    self.assertEqual(len(one), 3)
    vmapped = jax.vmap(one.lookup)(mj.pack_ids(np.array([[3, 2**40], [-5, 9]])))
    self.assertEqual(vmapped[..., 0].tolist(), [[-1, -1], [-2, 0]])

  def test_ids_that_jax_may_have_cut_off_are_refused(self):
    one = mj.Embedding(1, **_SGD)
    for call in (one.lookup, jax.jit(one.lookup)):
      with self.assertRaisesRegex(TypeError, "int32, to which JAX cuts 64 bits"):
        call(jnp.array([1]))
    with self.assertRaisesRegex(TypeError, "int32, to which JAX cuts"):
      jax.jit(one.lookup)(np.array([2**40]))
    for ids, error, text in (
      ([1.5], TypeError, "float64"),
      (jnp.array([1.5]), TypeError, "float32"),
      ([2**63], ValueError, "does not fit"),
    ):
      with self.subTest(text), self.assertRaisesRegex(error, text):
        one.lookup(ids)
    with self.assertRaisesRegex(ValueError, r"gradients has shape \(2, 1\)"):
      one.update([1], np.ones([2, 1]))
    with self.assertRaisesRegex(ValueError, "what init"):
      one(jnp.zeros([1, 1]), [1])
    self.assertEqual(len(one), 0)

  def test_ids_keep_all_their_bits(self):
    values = np.array([_LEAST, -(2**32), -1, 0, 2**31, 2**32, _MOST])
    unpacked = id_types.unpack_ids
    np.testing.assert_array_equal(unpacked(mj.pack_ids(values)), values)
    np.testing.assert_array_equal(unpacked(mj.pack_ids(values[::2])), values[::2])
    small = jnp.array([-3, 4], jnp.int16)
    np.testing.assert_array_equal(unpacked(mj.pack_ids(small)), [-3, 4])
    jax.config.update("jax_enable_x64", True)
    self.addCleanup(jax.config.update, "jax_enable_x64", False)
    np.testing.assert_array_equal(unpacked(jax.jit(mj.pack_ids)(jnp.asarray(values))), values)
    np.testing.assert_array_equal(unpacked(mj.pack_ids(jnp.array([-7], jnp.int32))), [-7])
    large = jnp.array([2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(unpacked(mj.pack_ids(large)), [2**32 - 1])

  def test_gradients_that_are_not_finite_are_refused(self):
    one = mj.Embedding(1, **_SGD)
    with self.assertRaisesRegex(ValueError, "NaN"):
      jax.grad(lambda r: (one(r, [8]) * jnp.nan).sum())(one.init())

  def test_files_are_those_of_other_tables(self):
    path = pathlib.Path(os.environ["TEST_TMPDIR"]) / "rows"
    one = mj.Embedding(4, "adam")
    ids = np.random.default_rng(1).integers(_LEAST, _MOST, 500)
    jax.jit(lambda ids: one.update(ids, jnp.ones([500, 4])))(mj.pack_ids(ids))
    self.assertEqual(one.save(path), 500)
    table, other = tables.HashTable(4, "adam"), mj.Embedding(4, "adam")
    table.load(path)
    self.assertEqual(other.load(path), 500)
    np.testing.assert_array_equal(table.lookup(ids), one.lookup(ids))
    self.assertEqual(other.table.entries(), table.entries())

  def test_no_tensorflow_is_loaded(self):
    program = "import sys, monolith.jax; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    self.assertEqual(done.stdout, "False\n", done.stderr)


if __name__ == "__main__":
  unittest.main()
