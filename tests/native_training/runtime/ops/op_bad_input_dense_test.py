"""Thousands of random inputs for the dense ops: each is computed right or refused, never a crash.

Runs eagerly: there no shape function stands between a call and its kernel.
"""

import contextlib
import math

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ops

pytestmark = pytest.mark.thorough

ROUNDS = 1500
DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool, tf.string)
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


def _shape(random, max_rank=3, max_dim=5):
  return tuple(int(d) for d in random.integers(0, max_dim, random.integers(0, max_rank + 1)))


def _floats(random, shape):
  return np.asarray(random.normal(size=shape), np.float32)


class OpBadInputDenseTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.random = np.random.default_rng(2024)
    self.accepted = self.refused = 0

  def tearDown(self):
    super().tearDown()
    # The generators must produce both kinds, or the test checks half of what it says.
    if self.accepted + self.refused:
      self.assertGreater(self.accepted, ROUNDS // 50)
      self.assertGreater(self.refused, ROUNDS // 50)

  @contextlib.contextmanager
  def _call(self, valid: bool, names: str = "", errors=tf.errors.InvalidArgumentError):
    """The body must succeed if `valid`, otherwise fail with a message that matches `names`."""
    if valid:
      self.accepted += 1
      yield
    else:
      self.refused += 1
      with self.assertRaisesRegex(errors, names):
        yield

  def test_fused_value_rowids(self):
    for _ in range(ROUNDS):
      shape = _shape(self.random) if self.random.random() < 0.2 else (self.random.integers(0, 8),)
      splits = self.random.integers(-3, 30, shape)
      if self.random.random() < 0.7:
        splits = np.sort(splits, axis=None).reshape(shape)
      if splits.size and self.random.random() < 0.8:
        splits.flat[0] = 0
      if splits.size and self.random.random() < 0.05:
        splits.flat[self.random.integers(splits.size)] = INT64_MIN
      valid = splits.ndim == 1 and splits.size > 0 and splits[0] == 0
      valid = valid and all(splits[1:] >= splits[:-1])
      with self._call(valid, "splits"):
        rowids = ops.monolith_fused_value_rowids(splits)
        self.assertAllEqual(rowids, np.repeat(np.arange(splits.size - 1), np.diff(splits)))
    with self.assertRaises((tf.errors.ResourceExhaustedError, tf.errors.InvalidArgumentError)):
      ops.monolith_fused_value_rowids(np.array([0, 1 << 62], np.int64))

  def test_static_reshape_n(self):
    for _ in range(ROUNDS):
      n = int(self.random.integers(1, 4))
      inputs, shapes, valid = [], [], True
      for _ in range(n):
        dtype = DTYPES[self.random.integers(len(DTYPES))]
        tensor = tf.fill(
          _shape(self.random), tf.constant("x") if dtype == tf.string else tf.zeros([], dtype)
        )
        inputs.append(tensor)
        size = int(tf.size(tensor))
        if self.random.random() < 0.5:
          # A target that fits: a divisor and the unknown rest.
          divisor = int(self.random.choice([d for d in range(1, size + 1) if size % d == 0] or [1]))
          shapes.append(
            [[None, divisor], [divisor, None], [divisor, size // divisor]][self.random.integers(3)]
          )
          continue
        target = [
          None if self.random.random() < 0.3 else int(self.random.choice([0, 1, 2, 3, 4, 1 << 62]))
          for _ in range(self.random.integers(0, 4))
        ]
        if 0 in target:
          # Whether a shape of no elements may have dimensions that do not multiply out is
          # TensorFlow's business.
          target = [d if d != 1 << 62 else 2 for d in target]
        shapes.append(target)
        known = math.prod(d for d in target if d is not None)
        if None in target:
          fits = known < 1 << 63 and (size % known == 0 if known else size == 0)
          valid &= fits and target.count(None) == 1
        else:
          valid &= known == size
      if self.random.random() < 0.05:
        shapes.append([None])
        valid = False
      elif self.random.random() < 0.05:
        shapes[-1] = None
        valid = False
      with self._call(valid, errors=(tf.errors.InvalidArgumentError, ValueError)):
        outputs, sizes = ops.monolith_static_reshape_n(inputs, shapes=shapes)
        self.assertAllEqual(sizes, [tf.size(t) for t in inputs])
        for output, tensor, shape in zip(outputs, inputs, shapes):
          self.assertTrue(output.shape.is_compatible_with(shape))
          self.assertAllEqual(tf.reshape(output, [-1]), tf.reshape(tensor, [-1]))

  def test_clip(self):
    extremes = [0.0, -1.0, float("nan"), float("inf"), 1e-30, 3e38]
    for _ in range(ROUNDS):
      grads = [_floats(self.random, _shape(self.random)) for _ in range(self.random.integers(1, 4))]
      if self.random.random() < 0.1:
        grads[0] = grads[0] * np.float32("inf")

      def scalar():
        shape = _shape(self.random) if self.random.random() < 0.1 else ()
        if self.random.random() < 0.3:
          return np.full(shape, self.random.choice(extremes), np.float32)
        return np.asarray(np.abs(_floats(self.random, shape)))

      norm, clip_norm = scalar(), scalar()
      clip_ok = clip_norm.ndim == 0 and clip_norm >= 0
      with self._call(clip_ok and norm.ndim == 0, "global_norm|clip_norm"):
        self._check_clipped(
          ops.monolith_clip_by_global_norm(grads, norm, clip_norm), grads, norm, clip_norm
        )
      with self._call(clip_ok, "clip_norm"):
        clipped, fused_norm = ops.monolith_clip_by_global_norm_fused(grads, clip_norm)
        squares = ops.global_l2_reduce(grads)
        self.assertAllClose(fused_norm * fused_norm, squares, rtol=1e-5)
        self._check_clipped(clipped, grads, fused_norm.numpy(), clip_norm)

  def _check_clipped(self, clipped, grads, norm, clip_norm):
    with np.errstate(all="ignore"):
      if not np.isfinite(norm):
        factor = np.float32("nan")
      else:
        factor = clip_norm / norm if norm > clip_norm else np.float32(1)
      for got, grad in zip(clipped, grads):
        self.assertAllClose(got, grad * factor, rtol=1e-5)

  def test_aligned_flat(self):
    for _ in range(ROUNDS):
      n = self.random.integers(1, 5)
      inputs = [_floats(self.random, _shape(self.random)) for _ in range(n)]
      scale = _floats(self.random, _shape(self.random) if self.random.random() < 0.1 else ())
      length = sum(-(-x.size // 16) * 16 for x in inputs)
      with self._call(scale.ndim == 0, "scale"):
        self.assertEqual(ops.monolith_aligned_flat_concat(inputs, scale).shape, [length])
      shape = [(length,), (length + 1,), (max(0, length - 16),), (length, 1), ()][
        self.random.choice(5, p=[0.6, 0.1, 0.1, 0.1, 0.1])
      ]
      flat = _floats(self.random, shape)
      with self._call(flat.shape == (length,), "flat"):
        start = 0
        for piece, x in zip(ops.monolith_aligned_flat_split(inputs, flat), inputs):
          self.assertAllEqual(piece, flat[start : start + x.size].reshape(x.shape))
          start += -(-x.size // 16) * 16

  def test_touched_key_set(self):
    def make_set(name, capacity=50):
      return ops.MonolithTouchedKeySet(capacity=capacity, concurrency_level=4, shared_name=name)

    good = make_set("good")
    destroyed = make_set("destroyed")
    tf.raw_ops.DestroyResourceOp(resource=destroyed)
    variable = tf.Variable([1.0])
    wrong = [destroyed, variable.handle, tf.reshape(good, [1])]
    expected = set()
    for _ in range(ROUNDS):
      ids = self.random.integers(INT64_MIN, INT64_MAX, _shape(self.random), dtype=np.int64)
      ids = ids if self.random.random() < 0.5 else ids % 100
      is_good = self.random.random() < 0.7
      handle = good if is_good else wrong[self.random.integers(len(wrong))]
      steal = self.random.random() < 0.1
      errors = (tf.errors.InvalidArgumentError, tf.errors.NotFoundError)
      with self._call(is_good, "handle", errors):
        if steal:
          self.assertAllEqual(
            np.sort(ops.monolith_touched_key_set_steal(handle)), np.sort(list(expected))
          )
          expected = set()
        else:
          dropped = 0
          for key in ids.reshape(-1).tolist() if is_good else ():
            if len(expected) > 50:
              dropped += len(expected)
              expected = set()
            expected.add(key)
          self.assertAllEqual(ops.monolith_touched_key_set_insert(handle, ids), [dropped])
    for kwargs in ({"capacity": -1}, {"concurrency_level": 0}, {"capacity": INT64_MIN}):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, next(iter(kwargs))):
        ops.MonolithTouchedKeySet(**kwargs)

  def test_optimizers(self):
    destroyed, uninitialized = (
      tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name=name)
      for name in ("destroyed", "never_initialized")
    )
    tf.raw_ops.AssignVariableOp(resource=destroyed, value=[1.0, 2.0])
    tf.raw_ops.DestroyResourceOp(resource=destroyed)
    key_set = ops.MonolithTouchedKeySet(shared_name="not_a_variable")
    wrong_handles = [
      destroyed,
      uninitialized,
      key_set,
      tf.Variable([1, 2]).handle,
      tf.reshape(tf.Variable([1.0, 2.0]).handle, [1]),
    ]
    errors = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)
    for op, slots in ((ops.resource_apply_adamom, 4), (ops.resource_apply_rmsprop, 3)):
      for _ in range(ROUNDS // 2):
        shape = (2,) if self.random.random() < 0.5 else _shape(self.random, 2)
        shapes = [shape] * (slots + 1)
        if self.random.random() < 0.3:
          shapes[self.random.integers(slots + 1)] = _shape(self.random, 2)
        values = [np.float32(0.1) + np.abs(_floats(self.random, s)) for s in shapes[:-1]]
        variables = [tf.Variable(value) for value in values]
        handles = [v.handle for v in variables]
        valid = len(set(shapes)) == 1
        if self.random.random() < 0.2:
          handles[self.random.integers(slots)] = wrong_handles[
            self.random.integers(len(wrong_handles))
          ]
          valid = False
        elif self.random.random() < 0.1:
          handles[0] = handles[1]
          valid = False
        hyper = [np.float32(0.1)] * 5
        if self.random.random() < 0.15:
          hyper[self.random.integers(5)] = np.zeros([self.random.integers(0, 3)], np.float32)
          valid = False
        before = [v.numpy() for v in variables]
        with self._call(valid, errors=errors):
          op(*handles, *hyper, _floats(self.random, shapes[-1]), use_v2=self.random.random() < 0.5)
          if before[0].size:
            self.assertNotAllClose(variables[-1], before[-1])
        if not valid:
          for variable, value in zip(variables, before):
            self.assertAllEqual(variable, value)

  def test_wrong_dtypes(self):
    calls = {
      "rowids": lambda x: ops.monolith_fused_value_rowids(x),
      "clip": lambda x: ops.monolith_clip_by_global_norm([x], 1.0, 1.0),
      "clip_norm": lambda x: ops.monolith_clip_by_global_norm([[1.0]], 1.0, x),
      "fused": lambda x: ops.monolith_clip_by_global_norm_fused([x], 1.0),
      "l2": lambda x: ops.global_l2_reduce([x]),
      "concat": lambda x: ops.monolith_aligned_flat_concat([x], 1.0),
      "split": lambda x: ops.monolith_aligned_flat_split([[1.0]], x),
      "insert": lambda x: ops.monolith_touched_key_set_insert(
        ops.MonolithTouchedKeySet(shared_name="dtypes"), x
      ),
      "steal": lambda x: ops.monolith_touched_key_set_steal(x),
    }
    right = {"rowids": tf.int64, "insert": tf.int64, "steal": tf.resource}
    for name, call in calls.items():
      for dtype in DTYPES:
        if dtype == right.get(name, tf.float32):
          continue
        with self.subTest(op=name, dtype=dtype.name):
          with self.assertRaises((tf.errors.InvalidArgumentError, TypeError, ValueError)):
            call(tf.constant("x") if dtype == tf.string else tf.zeros([], dtype))


if __name__ == "__main__":
  tf.test.main()
