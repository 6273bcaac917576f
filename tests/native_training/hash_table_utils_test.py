"""Paging through a table in a function, and small helpers."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry, hash_table_ops, hash_table_utils
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from tests.hash_table_testing import config_of, segment

tf.compat.v1.disable_eager_execution()


class HashTableUtilsTest(tf.test.TestCase, parameterized.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def _count(self, sess, table, **kwargs) -> tuple[int, int]:
    """Returns the entries that `apply_fn` saw, and what the call returned."""
    counter = tf.compat.v1.get_variable("count", initializer=tf.constant(0, tf.int64))

    def count(entries: tf.Tensor) -> None:
      counter.assign_add(tf.size(entries, out_type=tf.int64))

    visited = hash_table_utils.iterate_table_and_apply(table, count, **kwargs)
    sess.run(counter.initializer)
    returned = sess.run(visited)
    return sess.run(counter), returned

  def test_iterate_table_and_apply(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign_add(list(range(100)), tf.ones([100, 1])).as_op())
      self.assertEqual(self._count(sess, table, limit=2, nshards=10), (100, 100))

  @parameterized.parameters(
    (0, 1000, 4),
    (1, 1, 1),
    (100, 1, 1),
    (100, 100, 1),
    (100, 101, 1),
    (5000, 1000, 4),
    (5000, 7, 100),
  )
  def test_every_entry_once(self, rows, limit, nshards):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      sess.run(table.assign(np.arange(rows), np.ones((rows, 1), np.float32)).as_op())
      self.assertEqual(self._count(sess, table, limit=limit, nshards=nshards), (rows, rows))

  def test_pages_hold_entries_with_ids(self):
    table = hash_table_ops.test_hash_table(2)
    total = tf.compat.v1.get_variable("total", initializer=tf.constant(0, tf.int64))

    def ids(entries):
      return np.array([pb.EntryDump.FromString(e).id for e in entries.ravel()], np.int64)

    def add(entries: tf.Tensor) -> None:
      total.assign_add(tf.reduce_sum(tf.numpy_function(ids, [entries], tf.int64)))

    with self.session() as sess:
      sess.run(total.initializer)
      filled = table.assign(np.arange(50), np.ones((50, 2), np.float32))
      sess.run(hash_table_utils.iterate_table_and_apply(filled, add, limit=3, nshards=2))
      self.assertEqual(sess.run(total), 49 * 25)

  def test_result_can_be_grouped(self):
    table = hash_table_ops.test_hash_table(1)
    with self.session() as sess:
      done = tf.group([hash_table_utils.iterate_table_and_apply(table, lambda entries: None)])
      sess.run(done)

  def test_seeded_tables_begin_alike(self):
    self.addCleanup(hash_table_utils.set_table_seed, None)

    def begin(seed):
      hash_table_utils.set_table_seed(seed)
      with tf.Graph().as_default(), self.session() as sess:
        table = hash_table_ops.create_hash_table(dim=3)
        update = table.apply_gradients([1, 2], tf.zeros([2, 3]), tf.constant(0, tf.int64))
        sess.run(update.as_op())
        return sess.run(table.lookup([1, 2]))

    first = begin(7)
    self.assertAllEqual(begin(7), first)
    self.assertNotAllClose(begin(8), first)
    self.assertNotAllClose(begin(None), begin(None))
    self.assertNotAllClose(first[0], first[1])
    for seed in (0, -1, 1 << 64):
      with self.assertRaisesRegex(ValueError, f"seed is {seed}, want more than 0"):
        hash_table_utils.set_table_seed(seed)

  def test_create_hash_table(self):
    table = hash_table_ops.create_hash_table(
      2,
      optimizer=entry.SgdOptimizer(learning_rate=0.5),
      initializer=entry.ZerosInitializer(),
      admit_after=1,
    )
    update = table.apply_gradients([5], tf.ones([1, 2]), tf.constant(0, tf.int64)).as_op()
    with self.session() as sess:
      sess.run(update)
      self.assertEqual(sess.run(table.size()), 0)
      sess.run(update)
      self.assertAllEqual(sess.run(table.lookup([5])), [[-0.5, -0.5]])
    with self.assertRaisesRegex(ValueError, "dim is 0"):
      hash_table_ops.create_hash_table(0)

  def test_infer_dim_size(self):
    config = config_of(segment(1), segment(32), segment(3)).table_config
    self.assertEqual(hash_table_utils.infer_dim_size(config), 36)
    self.assertEqual(hash_table_utils.infer_dim_size(pb.EmbeddingHashTableConfig()), 0)


if __name__ == "__main__":
  tf.test.main()
