import numpy as np
import tensorflow as tf

from monolith.native_training import distribution_ops
from monolith.native_training.runtime.ops import gen_monolith_ops
from monolith.native_training.tables import packed_ids

_IDS = {"a": [[7, 9], [7]], "b": [[], [2**62]], "c": [[], []]}


def _features():
  ragged = {name: tf.ragged.constant(rows, tf.int64) for name, rows in _IDS.items()}
  return {**ragged, "label": tf.constant([0.0, 1.0]), "other": tf.ragged.constant([["x"], []])}


class PackedIdsTest(tf.test.TestCase):
  def test_a_dataset_of_packed_batches_gives_the_ids_back(self):
    dataset = tf.data.Dataset.from_tensors(_features())
    rows = packed_ids.static_rows(dataset.element_spec, list(_IDS))
    self.assertEqual(rows, {"a": 2, "b": 2, "c": 2})

    for features in dataset.map(lambda features: packed_ids.pack(features, list(_IDS))):
      self.assertEqual(
        set(features), {"label", "other", packed_ids.PACKED_KEY, packed_ids.SIZES_KEY}
      )
      ragged, others = packed_ids.unpack(features, rows, "/device:CPU:0")

    self.assertEqual({name: one.to_list() for name, one in ragged.items()}, _IDS)
    self.assertEqual(list(others), ["label"])

  def test_static_shapes_are_kept(self):
    rows = {"a": 2, "b": None, "c": 2}
    with tf.Graph().as_default():
      features = packed_ids.pack(_features(), list(_IDS))
      ragged, _ = packed_ids.unpack(features, rows, "/device:CPU:0")

    self.assertEqual(ragged["a"].row_splits.shape, [3])
    self.assertEqual(ragged["b"].row_splits.shape.as_list(), [None])

  def test_what_cannot_be_packed_is_left_alone(self):
    spec = tf.data.Dataset.from_tensors(_features()).element_spec
    for names in (["a", "label"], ["a", "other"], ["a", "missing"]):
      self.assertIsNone(packed_ids.static_rows(spec, names))
    self.assertIsNone(packed_ids.static_rows((spec, spec), ["a"]))

  def test_every_vector_starts_on_64_bytes(self):
    vectors = [np.arange(n, dtype=np.int64) for n in (3, 0, 8, 9)]
    packed, sizes = gen_monolith_ops.monolith_pack_ids(vectors)

    self.assertAllEqual(sizes, [3, 0, 8, 9])
    padding = [0] * 5, [], [], [0] * 7
    self.assertAllEqual(packed, np.concatenate([np.append(*two) for two in zip(vectors, padding)]))
    for got, vector in zip(gen_monolith_ops.monolith_unpack_ids(packed, sizes, N=4), vectors):
      self.assertAllEqual(got, vector)

  def test_sizes_have_to_fit(self):
    packed, _ = gen_monolith_ops.monolith_pack_ids([tf.constant([1, 2], tf.int64)])
    for sizes, message in (
      ([9], r"sizes\[0\] is 9, but packed has 8 elements left"),
      ([-1], r"sizes\[0\] is -1"),
      ([2, 1], r"sizes\[1\] is 1, but packed has 0 elements left"),
      ([0], "size of packed is 8, want the padded sizes together = 0"),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        gen_monolith_ops.monolith_unpack_ids(packed, tf.constant(sizes, tf.int64), N=len(sizes))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "size of sizes is 1"):
      gen_monolith_ops.monolith_unpack_ids(packed, tf.constant([2], tf.int64), N=2)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"vectors\[0\]"):
      gen_monolith_ops.monolith_pack_ids([tf.zeros([2, 1], tf.int64)])

  def test_splits_on_a_gpu_are_joined_there(self):
    with tf.Graph().as_default() as graph:
      with tf.device("/device:GPU:0"):
        splits = [tf.identity(tf.constant([0, 1, 2], tf.int64)) for _ in range(2)]
      distribution_ops.fused_reduce_and_split_gpu(splits, [tf.zeros([2, 3])] * 2, [[1, 2], [3]])
      (pool,) = (op for op in graph.get_operations() if op.type == "MonolithFusedReduceAndSplitGPU")

      self.assertEqual(pool.inputs[0].op.type, "Cast")
      self.assertEqual(pool.inputs[0].device, "/device:GPU:0")


if __name__ == "__main__":
  tf.test.main()
