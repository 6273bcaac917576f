"""Parcels in shared memory that nobody opens: their segments are kept for a while."""

import numpy as np
import tensorflow as tf

from monolith.native_training.tables import parcels
from tests.native_training.tables.parcel_segments import in_shared_memory, num_segments

tf.compat.v1.disable_eager_execution()

_LARGE = 50_000  # floats, far beyond the bytes that are left in shared memory


class LostParcelsTest(tf.test.TestCase):
  def test_they_cost_no_more_than_their_share(self):
    fed = tf.compat.v1.placeholder(tf.float32, [None])
    tensor = in_shared_memory(fed)
    parcel = parcels.pack([tensor])
    [unpacked] = parcels.unpack(parcel, [tensor])
    feed = {fed: np.ones(_LARGE, np.float32)}
    with tf.compat.v1.Session() as session:
      session.run(unpacked, feed)
      for _ in range(120):
        session.run(parcel, feed)
      # Those of all kernels, of which none is free, and those of the kernel.
      self.assertLessEqual(num_segments(), 64 + 33)
      self.assertAllEqual(session.run(unpacked, feed), feed[fed])


if __name__ == "__main__":
  tf.test.main()
