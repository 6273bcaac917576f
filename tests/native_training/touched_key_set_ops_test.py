import threading

import numpy as np
import tensorflow as tf

from monolith.native_training import touched_key_set_ops
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.touched_key_set_ops import TouchedKeySet

tf.compat.v1.disable_eager_execution()

INT64_MIN = np.iinfo(np.int64).min
INT64_MAX = np.iinfo(np.int64).max


class TouchedKeySetOpsTest(tf.test.TestCase):
  def test_touched_key_set_basic(self):
    with self.session() as sess:
      key_set = TouchedKeySet(1000, 1)
      ids = list(range(1000))

      dropped = sess.run(key_set.insert(ids))
      stolen = sess.run(key_set.steal())

      self.assertEqual(dropped, 0)
      self.assertAllEqual(sorted(stolen), ids)

  def test_touched_key_set_overflow(self):
    with self.session() as sess:
      key_set = TouchedKeySet(1000, 1)

      dropped = sess.run(key_set.insert(list(range(1005))))
      stolen = sess.run(key_set.steal())

      self.assertEqual(dropped, 1001)
      self.assertAllEqual(sorted(stolen), [1001, 1002, 1003, 1004])

  def test_constants_and_declared_shapes(self):
    self.assertEqual(touched_key_set_ops.TOUCHED_KEY_SET_CAPACITY, 2097152)
    self.assertEqual(touched_key_set_ops.TOUCHED_KEY_SET_CONCURRENCY_LEVEL, 1024)
    self.assertIs(touched_key_set_ops.touched_key_set_ops, gen_monolith_ops)
    key_set = TouchedKeySet()
    self.assertEqual(key_set.capacity, 2097152)
    self.assertEqual(key_set.concurrency_level, 1024)
    self.assertEqual(key_set.insert([1]).shape.as_list(), [1])
    self.assertEqual(key_set.steal().shape.as_list(), [None])

  def test_handle(self):
    with self.session() as sess:
      key_set = TouchedKeySet(7, 2, name_suffix="_handle")
      self.assertEqual((key_set.capacity, key_set.concurrency_level), (7, 2))
      self.assertEqual(key_set.handle.dtype, tf.resource)

      sess.run(key_set.insert([5]))

      stolen = gen_monolith_ops.monolith_touched_key_set_steal(key_set.handle)
      self.assertAllEqual(sess.run(stolen), [5])

  def test_steal_of_untouched_set_is_empty(self):
    with self.session() as sess:
      stolen = sess.run(TouchedKeySet(name_suffix="_untouched").steal())

      self.assertEqual(stolen.shape, (0,))
      self.assertEqual(stolen.dtype, np.int64)

  def test_steal_empties_the_set(self):
    with self.session() as sess:
      key_set = TouchedKeySet(1000, 4)
      sess.run(key_set.insert([3, 1, 2]))

      self.assertAllEqual(sorted(sess.run(key_set.steal())), [1, 2, 3])
      self.assertAllEqual(sess.run(key_set.steal()), [])
      sess.run(key_set.insert([4]))
      self.assertAllEqual(sess.run(key_set.steal()), [4])

  def test_ids_of_any_shape_extremes_and_duplicates(self):
    with self.session() as sess:
      key_set = TouchedKeySet(1000, 16)
      sess.run(key_set.insert(tf.constant(7, tf.int64)))
      sess.run(key_set.insert(tf.constant([[0, -1], [INT64_MIN, INT64_MAX]], tf.int64)))
      sess.run(key_set.insert(tf.constant([7, 0, 0, INT64_MIN], tf.int64)))
      sess.run(key_set.insert(tf.zeros([0, 3], tf.int64)))

      self.assertAllEqual(sorted(sess.run(key_set.steal())), [INT64_MIN, -1, 0, 7, INT64_MAX])

  def test_duplicate_triggers_the_clear(self):
    with self.session() as sess:
      key_set = TouchedKeySet(2, 1)

      self.assertEqual(sess.run(key_set.insert([1, 2, 3])), 0)
      self.assertEqual(sess.run(key_set.insert([3])), 3)
      self.assertAllEqual(sess.run(key_set.steal()), [3])

  def test_capacity_zero_holds_one_id(self):
    with self.session() as sess:
      key_set = TouchedKeySet(0, 1)

      self.assertEqual(sess.run(key_set.insert([5, 6, 7])), 2)
      self.assertAllEqual(sess.run(key_set.steal()), [7])

  def test_overflow_several_times_in_one_batch(self):
    with self.session() as sess:
      key_set = TouchedKeySet(99, 8)

      # 100 ids fit: 1000 distinct ones fill the set ten times, the last time without a clear.
      self.assertEqual(sess.run(key_set.insert(list(range(1000)))), 900)
      self.assertAllEqual(sorted(sess.run(key_set.steal())), list(range(900, 1000)))

  def test_name_suffix_tells_sets_apart(self):
    with self.session() as sess:
      a, b = TouchedKeySet(10, 1, name_suffix="_a"), TouchedKeySet(10, 1, name_suffix="_b")
      same_as_a = TouchedKeySet(10, 1, name_suffix="_a")
      sess.run([a.insert([1]), b.insert([2])])

      self.assertAllEqual(sess.run(b.steal()), [2])
      self.assertAllEqual(sess.run(same_as_a.steal()), [1])

  def test_no_key_lost_by_concurrent_inserts_and_steals(self):
    ids = np.random.default_rng(1).integers(INT64_MIN, INT64_MAX, 400_000, dtype=np.int64)
    with self.session() as sess:
      key_set = TouchedKeySet(1_000_000, 1024)
      batch = tf.compat.v1.placeholder(tf.int64, [None])
      insert, steal = key_set.insert(batch), key_set.steal()
      seen, failures = [], []

      def insert_part(part):
        try:
          for chunk in np.array_split(part, 50):
            if sess.run(insert, {batch: chunk})[0] != 0:
              failures.append("dropped keys")
        except tf.errors.OpError as error:
          failures.append(error)

      threads = [threading.Thread(target=insert_part, args=(p,)) for p in np.array_split(ids, 4)]
      for thread in threads:
        thread.start()
      while any(thread.is_alive() for thread in threads):
        seen.append(sess.run(steal))
      for thread in threads:
        thread.join()
      seen.append(sess.run(steal))

      self.assertEqual(failures, [])
      self.assertAllEqual(np.unique(np.concatenate(seen)), np.unique(ids))

  def test_full_set_of_random_keys_loses_none(self):
    # A hopscotch set of this capacity loses keys when filled with this many.
    ids = np.unique(np.random.default_rng(2).integers(INT64_MIN, INT64_MAX, 1_700_000, np.int64))
    with self.session() as sess:
      key_set = TouchedKeySet(1_700_000, 1024)

      self.assertEqual(sess.run(key_set.insert(ids)), 0)
      self.assertAllEqual(np.sort(sess.run(key_set.steal())), ids)

  def test_bad_attributes(self):
    with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "capacity"):
      TouchedKeySet(-1, 1)
    with self.assertRaisesRegex((ValueError, tf.errors.InvalidArgumentError), "concurrency_level"):
      TouchedKeySet(1, 0)

  def test_wrong_kind_and_destroyed_set(self):
    with self.session() as sess:
      variable = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=True)
      sess.run(variable.initializer)
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "handle"):
        sess.run(gen_monolith_ops.monolith_touched_key_set_steal(variable.handle))

      handle = touched_key_set_ops.create_touched_key_set(10, 1, "_destroyed")
      with tf.control_dependencies([tf.raw_ops.DestroyResourceOp(resource=handle)]):
        insert = gen_monolith_ops.monolith_touched_key_set_insert(handle, [1])
      with self.assertRaisesRegex(tf.errors.NotFoundError, "handle"):
        sess.run(insert)


if __name__ == "__main__":
  tf.test.main()
