"""Lookup and update of a local group with one tensor per table, against the packed ops.

Covers `local`.
"""

import numpy as np
import tensorflow as tf

from monolith.native_training import distributed_ps_factory, entry, multi_hash_table_ops
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import config_of, segment

tf.compat.v1.disable_eager_execution()

_STEP = tf.int64


def _config(dim):
  ones, adagrad = entry.ConstantsInitializer(1.0), entry.AdagradOptimizer(0.5, 1.0)
  return config_of(segment(dim, adagrad, ones), learning_rates=[0.5])


def _configs():
  return {"a": _config(2), "b": _config(3), "c": _config(17)}


class MultiHashTableListOpsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    tf.compat.v1.reset_default_graph()

  def _local(self, **kwargs):
    return distributed_ps_factory.create_native_multi_hash_table(0, _configs(), [None], **kwargs)

  def _run(self, fetches, group):
    with self.session() as sess:
      sess.run(group.initializer)
      return sess.run(fetches)

  def test_same_as_the_packed_ops(self):
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(-9, 9, n) for name, n in (("c", 500), ("a", 3000), ("b", 1))}
    grads = {
      name: rng.normal(size=(len(values), dim)).astype(np.float32)
      for (name, values), dim in zip(ids.items(), (17, 2, 3))
    }
    local = self._local()
    packed = multi_hash_table_ops.MultiHashTable.from_configs(_configs(), name_suffix="packed")
    step = tf.constant(3, _STEP)

    updated = local.apply_gradients({n: (ids[n], grads[n]) for n in ids}, step)
    summed = {}
    for name, values in ids.items():
      unique, inverse = np.unique(values, return_inverse=True)
      total = np.zeros([len(unique), grads[name].shape[1]], np.float32)
      np.add.at(total, inverse, grads[name])
      summed[name] = (unique, total)
    expected = packed.apply_gradients(summed, step)
    with self.session() as sess:
      sess.run([local.initializer, packed.initializer])
      got, want = sess.run([updated.lookup(ids), expected.lookup(ids)])

    for name in ids:
      self.assertAllClose(got[name], want[name], rtol=1e-5)

  def test_some_tables_only(self):
    group = self._local()
    updated = group.apply_gradients({"b": ([7], [[1.0, 1.0, 1.0]])}, tf.constant(0, _STEP))

    got = self._run(updated.lookup({"b": [7, 8], "a": [7]}), group)

    self.assertEqual(list(got), ["b", "a"])
    self.assertAllClose(got["b"][0], [1 - 0.5 / np.sqrt(2.0)] * 3)
    self.assertAllEqual(got["b"][1], [0.0] * 3)
    self.assertAllEqual(got["a"], [[0.0, 0.0]])

  def test_empty_ids(self):
    group = self._local()
    empty = tf.constant([], tf.int64)
    updated = group.apply_gradients(
      {"a": (empty, tf.zeros([0, 2])), "b": ([1], [[0.0] * 3])}, tf.constant(0, _STEP)
    )

    got = self._run(updated.lookup({"a": empty, "b": [1]}), group)

    self.assertEqual(got["a"].shape, (0, 2))
    self.assertAllEqual(got["b"], [[1.0] * 3])

  def test_extreme_ids(self):
    group = self._local()
    ids = np.array([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max, -1])
    updated = group.apply_gradients({"a": (ids, np.ones([5, 2]))}, tf.constant(0, _STEP))

    got = self._run(updated.lookup({"a": ids})["a"], group)

    once, twice = 1 - 0.5 / np.sqrt(2.0), 1 - 0.5 * 2 / np.sqrt(5.0)
    self.assertAllClose(got[:, 0], [once, twice, once, once, twice])

  def test_static_shapes(self):
    embeddings = self._local().lookup({"a": tf.constant([1, 2], tf.int64), "c": [4]})

    self.assertEqual(embeddings["a"].shape, [2, 2])
    self.assertEqual(embeddings["c"].shape, [1, 17])

  def test_unknown_tables_are_ignored(self):
    group = self._local()
    step = tf.constant(0, _STEP)
    updated = group.apply_gradients({"x": ([1], [[1.0]]), "a": ([7], [[0.0, 0.0]])}, step)
    updated = updated.apply_gradients({"x": ([1], [[1.0]])}, step)

    got = self._run(updated.lookup({"x": [1], "a": [7]}), group)

    self.assertEqual(list(got), ["a"])
    self.assertAllEqual(got["a"], [[1.0, 1.0]])
    self.assertEqual(updated.lookup({"x": [1]}), {})

  def _optimize(self, group, ids, grads, tables, rates=None):
    rates = group._learning_rate_tensor if rates is None else rates
    return gen_monolith_ops.monolith_multi_hash_table_optimize_list(
      group.handle, ids, grads, rates, tf.constant(0, _STEP), tf.constant(0, _STEP), tables=tables
    )

  def test_bad_input(self):
    group = self._local()
    ids, grad = tf.constant([1, 2], tf.int64), tf.zeros([2, 2])
    lookup = gen_monolith_ops.monolith_multi_hash_table_lookup_list
    cases = (
      (self._optimize(group, [ids], [tf.zeros([2, 3])], [0]), r"grads\[0\] has 6 elements"),
      (self._optimize(group, [ids], [grad], [3]), r"tables has 3, want a value in \[0, 3\)"),
      (self._optimize(group, [ids], [grad], [-1]), r"tables has -1"),
      (self._optimize(group, [ids, ids], [grad, grad], [0, 0]), "tables has 0 twice"),
      (self._optimize(group, [ids], [grad], [0, 1]), "tables has 2 elements, want 1"),
      (
        self._optimize(group, [ids], [grad], [0], rates=tf.zeros([2])),
        "learning_rate has 2 elements, want 3",
      ),
      (lookup(group.handle, [ids], tables=[0], dims=[5]), r"dims\[0\] is 5, but .* dimension 2"),
      (lookup(group.handle, [ids], tables=[7], dims=[2]), "tables has 7"),
    )
    with self.session() as sess:
      sess.run(group.initializer)
      for op, message in cases:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          sess.run(op.op if isinstance(op, tf.Tensor) else op)
      matrix = tf.compat.v1.placeholder_with_default(tf.zeros([1, 2], tf.int64), None)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"ids\[0\]"):
        sess.run(lookup(group.handle, [matrix], tables=[0], dims=[2]))

  def test_bad_dimensions_fail_while_the_graph_is_built(self):
    group = self._local()
    ids = tf.constant([1], tf.int64)
    lookup = gen_monolith_ops.monolith_multi_hash_table_lookup_list

    with self.assertRaisesRegex(ValueError, r"dims\[0\] is -2, want at least 0"):
      lookup(group.handle, [ids], tables=[0], dims=[-2])
    with self.assertRaisesRegex(ValueError, "dims has 2 elements, want 1"):
      lookup(group.handle, [ids], tables=[0], dims=[2, 2])


class CheckGradientsTest(tf.test.TestCase):
  def _check(self, gradients, skip=False):
    names = [f"f{i}" for i in range(len(gradients))]
    checked = gen_monolith_ops.monolith_check_gradients(gradients, names=names, skip=skip)
    with self.session() as sess:
      return sess.run(checked)

  def test_good_gradients_pass(self):
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=shape).astype(np.float32) for shape in ([0, 4], [3], [70, 9])]
    gradients.append(np.array([[3e38, -3e38, 1e-45]], np.float32))

    for got, want in zip(self._check(gradients), gradients):
      self.assertAllEqual(got, want)

  def test_every_place_is_looked_at(self):
    for n in (1, 15, 16, 17, 33):
      for at in range(n):
        for bad in (np.nan, np.inf, -np.inf):
          gradient = np.zeros([n], np.float32)
          gradient[at] = bad
          with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, "The gradient of f1 is not finite"
          ):
            self._check([np.zeros([4], np.float32), gradient])

  def test_message_counts(self):
    gradient = np.array([[np.nan, 1, np.inf], [0, 0, 0], [np.nan, 2, 3]], np.float32)
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "2 NaN and 1 infinite values in 2 of 3 rows"
    ):
      self._check([gradient])

  def test_skip_zeroes_bad_rows(self):
    gradient = np.array([[np.nan, 1], [5, 6], [-np.inf, 2]], np.float32)

    got = self._check([gradient, np.ones([2, 2], np.float32)], skip=True)

    self.assertAllEqual(got[0], [[0, 0], [5, 6], [0, 0]])
    self.assertAllEqual(got[1], np.ones([2, 2]))

  def test_names_must_fit(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "names has 1 elements, want 2"):
      with self.session() as sess:
        sess.run(gen_monolith_ops.monolith_check_gradients([[1.0], [2.0]], names=["f"]))


if __name__ == "__main__":
  tf.test.main()
