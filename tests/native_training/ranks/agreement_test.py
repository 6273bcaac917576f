"""Agreements of a rank that is alone; tests of several ranks are in processes of their own."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from monolith.native_training import hvd_lib
from monolith.native_training.ranks import agreement

tf.compat.v1.disable_eager_execution()


class AgreementTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    hvd_lib.init()

  def test_gather(self):
    for value in (0, -2, 2**62):
      np.testing.assert_array_equal(agreement.gather(f"gathered_{value}", value), [value])

  def test_broadcast_is_what_rank_0_feeds(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      broadcast = agreement.Broadcast("decision", [2], tf.int32)

      np.testing.assert_array_equal(broadcast.run(session, [3, 4]), [3, 4])
      np.testing.assert_array_equal(broadcast.run(session, [5, 6]), [5, 6])

  def test_votes_are_int64_by_rank(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      votes = agreement.Votes("votes").run(session, 7)

    self.assertEqual((votes.dtype, votes.tolist()), (np.int64, [7]))


if __name__ == "__main__":
  absltest.main()
