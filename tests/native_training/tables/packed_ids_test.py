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
        set(features),
        {
          "label",
          "other",
          packed_ids.PACKED_KEY,
          packed_ids.PLACES_KEY,
          packed_ids.ONE_EACH_KEY,
        },
      )
      self.assertAllEqual(features[packed_ids.ONE_EACH_KEY], [False, False, False])
      ragged, others = packed_ids.unpack(features, rows, "/device:CPU:0")

    self.assertEqual({name: one.to_list() for name, one in ragged.items()}, _IDS)
    self.assertEqual(set(others), {"label", packed_ids.ONE_EACH_KEY})
    has_one_each = packed_ids.take_has_one_each(others, list(_IDS))
    self.assertEqual(
      {name: bool(one) for name, one in has_one_each.items()}, dict.fromkeys(_IDS, False)
    )
    self.assertEqual(list(others), ["label"])
    self.assertIsNone(packed_ids.take_has_one_each(others, list(_IDS)))

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
    packed, places = gen_monolith_ops.monolith_pack_ids(vectors)

    self.assertAllEqual(places, [[0, 3], [8, 0], [8, 8], [16, 9]])
    padding = [0] * 5, [], [], [0] * 7
    self.assertAllEqual(packed, np.concatenate([np.append(*two) for two in zip(vectors, padding)]))
    for got, vector in zip(gen_monolith_ops.monolith_unpack_ids(packed, places, N=4), vectors):
      self.assertAllEqual(got, vector)

  def test_equal_vectors_lie_in_one_place(self):
    splits = np.arange(1001, dtype=np.int64)
    vectors = [splits, splits.copy(), splits.copy(), splits[:5], splits[:5]]
    vectors[1][300] = 301  # neither at an end nor in the middle
    packed, places = gen_monolith_ops.monolith_pack_ids(vectors)

    self.assertAllEqual(places, [[0, 1001], [1008, 1001], [0, 1001], [2016, 5], [2016, 5]])
    self.assertAllEqual(packed.shape, [2024])
    for got, vector in zip(gen_monolith_ops.monolith_unpack_ids(packed, places, N=5), vectors):
      self.assertAllEqual(got, vector)

  def test_places_have_to_fit(self):
    packed, _ = gen_monolith_ops.monolith_pack_ids([tf.constant([1, 2], tf.int64)])
    most = np.iinfo(np.int64).max
    for place in ([0, 9], [0, -1], [8, 1], [16, 0], [-8, 2], [1, 2], [8, most], [most - 7, 8]):
      with self.assertRaisesRegex(
        tf.errors.InvalidArgumentError, rf"places\[0\] is {place[0]} and {place[1]}, want"
      ):
        gen_monolith_ops.monolith_unpack_ids(packed, tf.constant([place], tf.int64), N=1)
    for shape in ([1], [1, 3], [2, 2], [0, 2]):
      with self.assertRaises(tf.errors.InvalidArgumentError):
        gen_monolith_ops.monolith_unpack_ids(packed, tf.zeros(shape, tf.int64), N=1)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"vectors\[0\]"):
      gen_monolith_ops.monolith_pack_ids([tf.zeros([2, 1], tf.int64)])

  def test_the_host_finds_rows_of_one_id_and_bad_splits(self):
    ids = [tf.zeros([3], tf.int64), tf.zeros([3], tf.int64), tf.zeros([0], tf.int64)]
    splits = [[0, 1, 2, 3], [0, 2, 2, 3], [0]]

    self.assertAllEqual(gen_monolith_ops.monolith_has_one_each(ids, splits), [True, False, True])
    for bad, message in (
      ([0, 2, 1, 3], r"row_splits\[1\] must not decrease"),
      ([0, 1, 2], r"row_splits\[1\] ends at 2|row_splits\[1\]"),
      ([1, 2, 3], r"row_splits\[1\]\[0\] is 1, want 0"),
      ([], r"row_splits\[1\] is empty"),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        gen_monolith_ops.monolith_has_one_each(
          ids, [splits[0], tf.constant(bad, tf.int64), splits[2]]
        )

  def test_pooling_of_packed_ids_gives_the_same_sums_and_gradients(self):
    splits = [tf.constant([0, 1, 2], tf.int64), tf.constant([0, 0, 3], tf.int64)]
    tables = [tf.reshape(tf.range(n, dtype=tf.float32), [-1, 3]) for n in (6, 9)]
    dims = [[3], [1, 2]]
    results = []
    for flags in (None, tf.constant([True, False])):
      with tf.GradientTape() as tape:
        tape.watch(tables)
        slices = distribution_ops.fused_reduce_and_split_gpu(
          splits, tables, dims, has_one_each=flags
        )
        loss = tf.add_n([tf.reduce_sum(one * one) for one in slices])
      results.append([*slices, *tape.gradient(loss, tables)])

    self.assertEqual(len(results[0]), len(results[1]))
    for want, got in zip(*results):
      self.assertAllEqual(got, want)

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
