"""Lookup and update of a local group by pooled rows, against those by rows.

Covers `local`, with the check of such gradients in `gradient_checks`.
"""

import os
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import distributed_ps_factory, entry
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.tables import gradient_checks, pooling
from tests.hash_table_testing import config_of, segment

tf.compat.v1.disable_eager_execution()

_DIMS = {"a": 2, "b": 3, "c": 17}
_ROWS = 60


def _config(dim):
  ones, adagrad = entry.ConstantsInitializer(1.0), entry.AdagradOptimizer(0.5, 1.0)
  return config_of(segment(dim, adagrad, ones), learning_rates=[0.5])


def _part(*fields):
  return pooling.PooledPart(*fields)


# All columns of a and c and some of b in one tensor, the rest of b in another.
_PARTS = [
  _part("c", 0, 17, 0, 2),
  _part("a", 0, 2, 0, 0),
  _part("b", 1, 2, 0, 19),
  _part("b", 0, 1, 1, 0),
]
_WIDTHS = [21, 1]


def _ids(one_each):
  rng = np.random.default_rng(0)
  result = {}
  for name in _DIMS:
    lengths = np.ones(_ROWS, np.int64) if one_each else rng.integers(0, 4, _ROWS)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    result[name] = tf.RaggedTensor.from_row_splits(rng.integers(-9, 9, splits[-1]), splits)
  return result


def _local():
  return distributed_ps_factory.create_native_multi_hash_table(
    0, {name: _config(dim) for name, dim in _DIMS.items()}, [None]
  )


class PooledTableOpsTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    tf.compat.v1.reset_default_graph()

  @parameterized.parameters(True, False)
  def test_same_as_by_rows(self, one_each):
    table, ids = _local(), _ids(one_each)
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=[_ROWS, width]).astype(np.float32) for width in _WIDTHS]
    step = tf.constant(3, tf.int64)
    updated = table.apply_pooled_gradients(ids, gradients, _PARTS, step)
    pooled = table.lookup_pooled(ids, _WIDTHS, _PARTS)
    rows = table.lookup({name: ragged.values for name, ragged in ids.items()})

    # The same on rows, in another graph, and so in other tables.
    with tf.Graph().as_default():
      peer, peer_ids = _local(), _ids(one_each)
      by_row = {}
      for name, ragged in peer_ids.items():
        columns = np.zeros([_ROWS, _DIMS[name]], np.float32)
        for part in _PARTS:
          if part.feature == name:
            columns[:, part.column : part.column + part.width] = gradients[part.pooled][
              :, part.pooled_column : part.pooled_column + part.width
            ]
        by_row[name] = (ragged.values, tf.gather(columns, ragged.value_rowids()))
      applied = peer.apply_gradients(by_row, tf.constant(3, tf.int64))
      expected = peer.lookup({name: ragged.values for name, ragged in peer_ids.items()})
      with tf.compat.v1.Session() as session:
        session.run(peer.initializer)
        session.run(applied.as_op())
        expected, splits = session.run(
          (expected, {name: ragged.row_splits for name, ragged in peer_ids.items()})
        )

    with self.session() as session:
      session.run(table.initializer)
      session.run(updated.as_op())
      pooled, rows = session.run((pooled, rows))
    for name in _DIMS:
      self.assertAllEqual(rows[name], expected[name])
      self.assertGreater(np.ptp(expected[name]), 0.1)
      sums = np.stack(
        [
          expected[name][begin:end].sum(axis=0, initial=0)
          for begin, end in zip(splits[name], splits[name][1:])
        ]
      )
      for part in _PARTS:
        if part.feature == name:
          self.assertAllClose(
            pooled[part.pooled][:, part.pooled_column : part.pooled_column + part.width],
            sums[:, part.column : part.column + part.width],
            rtol=1e-6,
          )

  def test_no_rows(self):
    table = _local()
    ids = {
      name: tf.RaggedTensor.from_row_splits(np.zeros([0], np.int64), np.zeros([1], np.int64))
      for name in _DIMS
    }
    pooled = table.lookup_pooled(ids, _WIDTHS, _PARTS)
    gradients = [np.zeros([0, width], np.float32) for width in _WIDTHS]
    updated = table.apply_pooled_gradients(ids, gradients, _PARTS, tf.constant(0, tf.int64))
    with self.session() as session:
      session.run(table.initializer)
      session.run(updated.as_op())
      self.assertEqual([value.shape for value in session.run(pooled)], [(0, 21), (0, 1)])

  @parameterized.named_parameters(
    ("splits_end", {"row_splits": [0, 1, 3]}, r"row_splits\[0\] ends at 3, want 2 values"),
    ("splits_begin", {"row_splits": [1, 2, 2]}, r"row_splits\[0\]\[0\] is 1, want 0"),
    ("no_splits", {"row_splits": np.zeros([0], np.int64)}, "Negative dimension"),
    ("columns", {"parts": [0, 1, 2, 0, 0]}, "dimension 2"),
    ("uncovered", {"widths": [3]}, "cover columns up to 2 once, want 3"),
    ("beyond", {"parts": [0, 0, 2, 1, 0]}, r"want one of 1 inputs, columns, and one of 1 pooled"),
    ("numbers", {"parts": [0, 0, 2, 0, 0, 0]}, "multiple of 5"),
    ("place", {"tables": [3]}, r"want a value in \[0, 3\)"),
  )
  def test_bad_lookups(self, changes, message):
    arguments = {
      "ids": [[7, 9]],
      "row_splits": [0, 1, 2],
      "tables": [0],
      "widths": [2],
      "parts": [0, 0, 2, 0, 0],
      **changes,
    }
    table = _local()
    with self.assertRaisesRegex((tf.errors.InvalidArgumentError, ValueError), message):
      pooled = gen_monolith_ops.monolith_multi_hash_table_lookup_pooled(
        table.handle,
        [tf.constant(ids, tf.int64) for ids in arguments["ids"]],
        [tf.constant(arguments["row_splits"], tf.int64)],
        tables=arguments["tables"],
        widths=arguments["widths"],
        parts=arguments["parts"],
        num_outputs=1,
      )
      with self.session() as session:
        session.run(table.initializer)
        session.run(pooled)

  @parameterized.named_parameters(
    ("rows", {"grads": np.zeros([3, 2], np.float32)}, "want 2 rows"),
    ("columns", {"grads": np.zeros([2, 1], np.float32)}, "columns up to 2"),
    ("vector", {"grads": np.zeros([2], np.float32)}, r"grads\[0\]"),
    ("rates", {"rates": [0.5]}, "learning_rate has 1 elements, want 3"),
    ("splits", {"row_splits": [0, 2, 1]}, "must not decrease"),
    ("twice", {"parts": [0, 0, 2, 0, 0, 0, 1, 1, 0, 0]}, "column 1 of input 0 twice"),
  )
  def test_bad_updates(self, changes, message):
    arguments = {
      "row_splits": [0, 1, 2],
      "grads": np.zeros([2, 2], np.float32),
      "rates": [0.5] * 3,
      "parts": [0, 0, 2, 0, 0],
      **changes,
    }
    table = _local()
    with self.assertRaisesRegex((tf.errors.InvalidArgumentError, ValueError), message):
      updated = gen_monolith_ops.monolith_multi_hash_table_optimize_pooled(
        table.handle,
        [tf.constant([7, 9], tf.int64)],
        [tf.constant(arguments["row_splits"], tf.int64)],
        [tf.constant(arguments["grads"])],
        tf.constant(arguments["rates"]),
        tf.constant(0, tf.int64),
        tf.constant(0, tf.int64),
        tables=[0],
        parts=arguments["parts"],
      )
      with self.session() as session:
        session.run(table.initializer)
        session.run(updated)


class CheckPooledGradientsTest(tf.test.TestCase):
  _PARTS = (0, 0, 2, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0)

  def _check(self):
    grads = [np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)]
    grads[0][1, 0] = np.nan
    grads[1][2, 0] = np.inf
    return grads, gradient_checks.check_pooled_gradients(
      [tf.constant(grad) for grad in grads], ["feature a", "feature b"], self._PARTS
    )

  def test_stop(self):
    _, checked = self._check()
    with self.session() as session:
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError,
        "The gradient of feature b is not finite: it has 1 NaN and 1 infinite values in 2 of 4",
      ):
        session.run(checked)

  def test_skip(self):
    with mock.patch.dict(os.environ, {"MONOLITH_BAD_GRADIENTS": "skip"}):
      grads, checked = self._check()
    expected = [grads[0].copy(), grads[1].copy()]
    expected[0][1:3, 0] = 0
    expected[1][1:3] = 0
    with self.session() as session:
      for value, want in zip(session.run(checked), expected):
        self.assertAllEqual(value, want)

  def test_ignore(self):
    with mock.patch.dict(os.environ, {"MONOLITH_BAD_GRADIENTS": "ignore"}):
      grads, checked = self._check()
    with self.session() as session:
      self.assertAllEqual(session.run(checked)[1], grads[1])


if __name__ == "__main__":
  tf.test.main()
