import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.tables import id_pairs

tf.compat.v1.disable_eager_execution()  # Tensors that a set can hold.


class IdPairsTest(tf.test.TestCase):
  def test_pairs_in_any_form(self):
    ids, values = tf.constant([1], tf.int64), tf.constant([0.5])
    for pair in ((ids, values), [ids, values], {ids, values}, frozenset([values, ids])):
      first, second = id_pairs.split_pair(pair)
      self.assertEqual((first.dtype, second.dtype), (tf.int64, tf.float32))

  def test_ids_become_int64(self):
    ids, values = id_pairs.split_pair(([2**40], "as it is"))
    self.assertEqual(ids.dtype, tf.int64)
    self.assertEqual(values, "as it is")

  def test_no_pair(self):
    with self.assertRaises(ValueError):
      id_pairs.split_pair((tf.constant([1]),))


if __name__ == "__main__":
  absltest.main()
