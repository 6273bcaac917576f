"""Tensors that travel together, also through memory that two processes share."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import test_utils
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.tables import parcels
from tests.native_training.tables.parcel_segments import in_shared_memory, num_segments

tf.compat.v1.disable_eager_execution()

_LARGE = 50_000  # floats, far beyond the bytes that are left in shared memory
_SERVER = "/job:ps/task:1/device:CPU:0"


class ParcelsTest(tf.test.TestCase, parameterized.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def there_and_back(self, tensors):
    return parcels.unpack(parcels.pack(tensors), tensors)

  def test_tensors_of_all_kinds_come_out_as_they_went_in(self):
    values = [
      np.arange(6, dtype=np.float32).reshape(2, 3),
      np.int64(-5),
      np.zeros([0, 4], np.int32),
      np.array([True, False, True]),
      np.array([1.5, -2], np.float16),
      np.arange(24, dtype=np.float64).reshape(1, 2, 3, 4),
    ]
    tensors = [tf.constant(value) for value in values]
    unpacked = self.there_and_back(tensors)
    self.assertEqual([t.dtype for t in unpacked], [t.dtype for t in tensors])
    self.assertEqual([t.shape for t in unpacked], [t.shape for t in tensors])
    with tf.compat.v1.Session() as session:
      for want, found in zip(values, session.run(unpacked)):
        self.assertAllEqual(found, want)

  def test_sizes_may_change_from_run_to_run(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [None])
    [unpacked] = self.there_and_back([tensor])
    with tf.compat.v1.Session() as session:
      for size in (1, _LARGE, 0, 3 * _LARGE, _LARGE, 7):
        value = np.arange(size, dtype=np.float32)
        self.assertAllEqual(session.run(unpacked, {tensor: value}), value)

  def test_large_parcels_are_small_where_memory_is_shared(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [None])
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    size, total = tf.size(parcel), tf.reduce_sum(unpacked)
    with tf.compat.v1.Session() as session:
      feed = {tensor: np.ones(_LARGE, np.float32)}
      sizes = []
      for _ in range(4):
        sizes.append(session.run([size, total], feed)[0])
      # The receiver has answered by reading the first.
      self.assertEqual(sizes, [16 + _LARGE // 2, 16, 16, 16])
      small = session.run([size, total], {tensor: np.ones(100, np.float32)})[0]
      self.assertEqual(small, 16 + 56)
      self.assertEqual(num_segments(), 2)  # the one that asks, and one that is used again

  def test_what_is_still_in_use_is_not_written_over(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    queue = tf.queue.FIFOQueue(10, [tf.float32], [[_LARGE]])
    put = queue.enqueue(self.there_and_back([tensor]))
    get = queue.dequeue()
    with tf.compat.v1.Session() as session:
      for i in range(8):
        session.run(put, {tensor: np.full(_LARGE, i, np.float32)})
      for i in range(8):
        self.assertAllEqual(np.unique(session.run(get)), [i])

  def test_results_are_not_written_in_place(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    [unpacked] = self.there_and_back([tensor])
    negative = -unpacked
    with tf.control_dependencies([negative]):
      again = tf.identity(unpacked)
    with tf.compat.v1.Session() as session:
      feed = {tensor: np.ones(_LARGE, np.float32)}
      for _ in range(3):
        first, second = session.run([negative, again], feed)
        self.assertAllEqual(np.unique(first), [-1])
        self.assertAllEqual(np.unique(second), [1])

  def test_a_parcel_that_nobody_opens_stays_in_one_piece(self):
    """Kernels neither wait for a receiver that is gone, nor take more and more memory for it."""
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    with tf.compat.v1.Session() as session:
      feed = {tensor: np.ones(_LARGE, np.float32)}
      session.run(unpacked, feed)
      lost = [session.run(parcel, feed) for _ in range(40)]
      self.assertLen(lost[0], 16)
      self.assertLen(lost[-1], 16 + _LARGE // 2)
      self.assertLessEqual(num_segments(), 33)
      self.assertAllEqual(session.run(unpacked, feed), feed[tensor])

  def test_no_file_stays_open_for_a_receiver_elsewhere(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    with tf.compat.v1.Session() as session:
      feed = {tensor: np.ones(_LARGE, np.float32)}
      first = session.run(parcel, feed)
      self.assertEqual(num_segments(), 1)
      for _ in range(70):
        self.assertLen(session.run(parcel, feed), 16 + _LARGE // 2)
      self.assertEqual(num_segments(), 0)
      self.assertAllEqual(session.run(unpacked, {parcel: first}), feed[tensor])

  def test_a_parcel_is_opened_once(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    with tf.compat.v1.Session() as session:
      feed = {tensor: np.ones(_LARGE, np.float32)}
      session.run(unpacked, feed)
      kept = session.run(parcel, feed)
      self.assertAllEqual(session.run(unpacked, {parcel: kept}), feed[tensor])
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "opened before"):
        session.run(unpacked, {parcel: kept})

  def test_parcels_of_a_session_that_is_over_cannot_be_opened(self):
    tensor = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    feed = {tensor: np.ones(_LARGE, np.float32)}
    with tf.compat.v1.Session() as session:
      session.run(unpacked, feed)
      kept = session.run(parcel, feed)
    self.assertEqual(num_segments(), 0)
    with tf.compat.v1.Session() as session:
      with self.assertRaisesRegex(tf.errors.AbortedError, "memory /proc/"):
        session.run(unpacked, {parcel: kept})

  def test_what_lies_in_shared_memory_is_not_copied(self):
    fed = tf.compat.v1.placeholder(tf.float32, [None])
    tensor = in_shared_memory(fed)
    parcel = parcels.pack([tensor, tf.constant(5)])
    unpacked = parcels.unpack(parcel, [tensor, tf.constant(5)])
    again = tf.identity(tensor)
    with tf.compat.v1.Session() as session:
      held = []
      for size in (_LARGE, _LARGE, 2 * _LARGE, _LARGE, 2 * _LARGE):
        value = np.arange(size, dtype=np.float32)
        feed = {fed: value}
        kept, same, (found, five) = session.run([parcel, again, unpacked], feed)
        self.assertAllEqual(same, value)
        self.assertAllEqual(found, value)
        self.assertEqual(five, 5)
        held.append(num_segments())
      # A header with a second ticket, and the other tensor.
      self.assertLen(kept, 24 + 8)
      self.assertEqual(held[-1], held[-3])
      small = session.run(unpacked, {fed: np.ones(3, np.float32)})
      self.assertAllEqual(small[0], [1, 1, 1])

  def test_shared_memory_is_used_again_only_when_both_ends_are_done(self):
    fed = tf.compat.v1.placeholder(tf.float32, [_LARGE])
    tensor = in_shared_memory(fed)
    tensor.set_shape([_LARGE])
    [unpacked] = parcels.unpack(parcels.pack([tensor]), [tensor])
    queue = tf.queue.FIFOQueue(10, [tf.float32] * 2, [[_LARGE]] * 2)
    put = queue.enqueue([tensor, unpacked])
    get = queue.dequeue()
    with tf.compat.v1.Session() as session:
      for i in range(8):
        session.run(put, {fed: np.full(_LARGE, i, np.float32)})
      for i in range(8):
        for value in session.run(get):
          self.assertAllEqual(np.unique(value), [i])

  def test_what_is_sent_to_two_receivers_is_copied_for_one(self):
    fed = tf.compat.v1.placeholder(tf.float32, [None])
    tensor = in_shared_memory(fed)
    results = [parcels.unpack(parcels.pack([tensor]), [tensor])[0] for _ in range(2)]
    with tf.compat.v1.Session() as session:
      for i in range(4):
        for found in session.run(results, {fed: np.full(_LARGE, i, np.float32)}):
          self.assertAllEqual(np.unique(found), [i])

  def test_bad_parcels(self):
    like = [tf.constant([[1.0, 2.0]]), tf.constant(3, tf.int64)]
    parcel = tf.compat.v1.placeholder(tf.int64, None)
    unpacked = parcels.unpack(parcel, like)
    with tf.compat.v1.Session() as session:
      good = session.run(parcels.pack(like))
      self.assertAllEqual(session.run(unpacked, {parcel: good})[0], [[1, 2]])

      def check(message, change):
        bad = good.copy()
        bad = change(bad)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
          session.run(unpacked, {parcel: bad})

      def put(index, value):
        def change(bad):
          bad[index] = value
          return bad

        return change

      check("want rank 1", lambda bad: bad[None])
      check("has 7 elements", lambda bad: bad[:7])
      check("has not written", put(0, 1))
      check("number of tensors in parcel is 3, want length of T = 2", put(1, 3))
      check("size of parcel is", lambda bad: bad[:-1])
      check("tensor 0 of parcel is missing", lambda bad: bad[:10])
      check("dtype 2, want 1", put(8, 2))
      for rank in (-1, 9, 2**62):
        check(f"rank of tensor 0 of parcel is {rank}", put(9, rank))
      check("shape", put(10, 2))
      check("want|overflow|negative|size", put(10, -1))
      check("ends within|missing|rank", lambda bad: bad[:13])
      check("ticket has pid", put(2, 1))
      check("ticket has pid", put(15, 1))

  def test_sizes_beyond_all_bounds(self):
    parcel = tf.compat.v1.placeholder(tf.int64, [None])
    unpacked = gen_monolith_ops.monolith_unpack_parcel(
      parcel, T=[tf.float32] * 2, shapes=[tf.TensorShape(None)] * 2
    )
    with tf.compat.v1.Session() as session:
      good = session.run(parcels.pack([tf.zeros([1, 1])] * 2))
      for sizes in ([2**40, 2**40], [2**62, 1], [2**59, 4]):
        bad = good.copy()
        bad[10:12] = sizes
        with self.assertRaises(tf.errors.InvalidArgumentError):
          session.run(unpacked, {parcel: bad})

  def test_types_without_plain_bytes(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "string, want a type"):
      with tf.compat.v1.Session() as session:
        session.run(parcels.pack([tf.constant("a")]))


class ParcelsOfProcessesTest(tf.test.TestCase):
  """Servers of one process see each other as they would those of others."""

  def test_both_ways(self):
    servers, config = test_utils.create_test_ps_cluster(2)
    with tf.Graph().as_default():
      sent = tf.compat.v1.placeholder(tf.float32, [None])
      parcel = parcels.pack([sent, tf.constant(2.0)])
      with tf.device(_SERVER):
        values, factor = parcels.unpack(parcel, [sent, tf.constant(2.0)])
        back = parcels.pack([values * factor])
      [result] = parcels.unpack(back, [sent])
      with tf.compat.v1.Session(servers[0].target, config=config) as session:
        for size in (_LARGE, 3, 2 * _LARGE, _LARGE):
          value = np.arange(size, dtype=np.float32)
          self.assertAllEqual(session.run(result, {sent: value}), 2 * value)


if __name__ == "__main__":
  tf.test.main()
