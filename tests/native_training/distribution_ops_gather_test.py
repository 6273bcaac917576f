"""Ops that make ids unique, and gather and sum rows: worked examples, gradients and bad inputs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from monolith.native_training import distribution_ops
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.distribution_testing import (
  INT64_MAX,
  INT64_MIN,
  DistributionTestCase,
  int64,
  ragged,
)

tf.compat.v1.disable_eager_execution()


class UniqueMapTest(DistributionTestCase):
  DIMS = (1, 2, 3, 4)

  def unique(self, **kwargs):
    key = ragged([[], [0, 1, 2, 1, 0], [0, 1, 0], []])
    return distribution_ops.unique_key_with_value_and_offset(key, self.DIMS, **kwargs)

  def fill(self, unique, value, pos=None):
    pos = ragged([[], [0, 1, 2], [3, 4], []]) if pos is None else pos
    return distribution_ops.fill_with_offset_map(
      pos, value, unique.value_offset, unique.value_buffer, self.DIMS
    )

  def test_unique_key_with_value_and_offset(self):
    unique = self.unique(generate_buffer=False)
    key, offset = self.run_tensors([unique.unique_key, unique.value_offset])
    self.assertEqual(key.to_list(), [[], [0, 1, 2], [0, 1], []])
    self.assertEqual(offset.to_list(), [[], [[0, 8], [2, 6], [4]], [[10, 16], [13]], []])

  def test_unique_key_of_nothing(self):
    unique = distribution_ops.unique_key_with_value_and_offset(ragged([[], [], []]), [1, 2, 3])
    tensor = distribution_ops.finalize_shared_tensor([unique.value_buffer], tf.float32, [None])
    key, offset, value = self.run_tensors([unique.unique_key, unique.value_offset, tensor])
    self.assertEqual(key.to_list(), [[], [], []])
    self.assertEqual(offset.to_list(), [[], [], []])
    self.assertEqual(value.shape, (0,))

  def test_fill_and_finalize(self):
    value = tf.range(12, dtype=tf.float32)
    filled = self.fill(self.unique(), value)
    tensor = distribution_ops.finalize_shared_tensor([filled], tf.float32, [None])
    grad = tf.gradients(tensor, value, tf.range(19, dtype=tf.float32))[0]

    self.assertEqual(tensor.shape.as_list(), [None])
    got, got_grad = self.run_tensors([tensor, grad])
    self.assertAllEqual(got, [0, 1, 2, 3, 4, 5, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7, 8])
    self.assertAllEqual(got_grad, [8, 10, 8, 10, 4, 5, 26, 28, 30, 13, 14, 15])

  def test_two_fills_share_the_buffer_and_both_get_gradients(self):
    unique = self.unique()
    first, second = tf.constant([1.0, 2.0]), tf.range(10, dtype=tf.float32)
    handles = [
      self.fill(unique, first, ragged([[], [1], [], []])),
      self.fill(unique, second, ragged([[], [0, 2], [3, 4], []])),
    ]
    tensor = distribution_ops.finalize_shared_tensor(handles, tf.float32, [None])
    grads = tf.gradients(tensor, [first, second], tf.range(19, dtype=tf.float32))

    got, (first_grad, second_grad) = self.run_tensors([tensor, grads])
    self.assertAllEqual(got, [0, 1, 1, 2, 2, 3, 1, 2, 0, 1, 4, 5, 6, 7, 8, 9, 4, 5, 6])
    self.assertAllEqual(first_grad, [8, 10])
    self.assertAllEqual(second_grad, [8, 10, 4, 5, 26, 28, 30, 13, 14, 15])

  def test_gradient_function(self):
    grad = distribution_ops.fill_with_offset_map_gradient(
      ragged([[], [0, 1, 2], [3, 4], []]),
      tf.range(19, dtype=tf.float32),
      self.unique(generate_buffer=False).value_offset,
      self.DIMS,
    )
    self.assertAllEqual(self.run_tensors(grad), [8, 10, 8, 10, 4, 5, 26, 28, 30, 13, 14, 15])

  def test_value_may_be_longer_but_not_shorter(self):
    longer = self.fill(self.unique(), tf.range(20, dtype=tf.float32))
    tensor = distribution_ops.finalize_shared_tensor([longer], tf.float32, [None])
    self.assertEqual(self.run_tensors(tensor)[15], 11)
    shorter = self.fill(self.unique(), tf.range(10, dtype=tf.float32))
    tensor = distribution_ops.finalize_shared_tensor([shorter], tf.float32, [None])
    self.assert_invalid(tensor, "Value size doesn't match expected size. expected: 12, actual: 10.")

  def test_finalized_buffer_is_gone(self):
    unique = self.unique()
    tensor = distribution_ops.finalize_shared_tensor([unique.value_buffer], tf.float32, [None])
    with tf.control_dependencies([tensor]):
      again = distribution_ops.finalize_shared_tensor([unique.value_buffer], tf.float32, [None])
      fill = self.fill(unique, tf.range(12, dtype=tf.float32))
    for late in (again, fill):
      with self.assertRaises(tf.errors.NotFoundError):
        self.run_tensors(tf.raw_ops.Identity(input=late).op)

  def test_buffer_is_private_to_a_loop_iteration_and_a_step(self):
    def body(i, total):
      unique = distribution_ops.unique_key_with_value_and_offset(ragged([[5, 5]]), [1])
      filled = distribution_ops.fill_with_offset_map(
        ragged([[0]]), tf.reshape(i, [1]), unique.value_offset, unique.value_buffer, [1]
      )
      value = distribution_ops.finalize_shared_tensor([filled], tf.float32, [None])
      return i + 1.0, total + tf.reduce_sum(value)

    total = tf.while_loop(lambda i, _: i < 4.0, body, [tf.constant(0.0), tf.constant(0.0)])[1]
    with self.session(use_gpu=False) as sess:
      self.assertEqual(sess.run(total), 12.0)
      self.assertEqual(sess.run(total), 12.0)

  def test_finalize_checks_dtype_and_shape(self):
    finalize = distribution_ops.finalize_shared_tensor
    self.assert_invalid(finalize([self.unique().value_buffer], tf.int64, [None]), "dtype")
    self.assert_invalid(finalize([self.unique().value_buffer], tf.float32, [18]), "[19]", "[18]")

  def test_unique_bad_input(self):
    op = distribution_ops.gen_distribution_ops.monolith_unique_key_with_value_and_offset
    key = int64([1, 2])
    self.assert_invalid(op(key, int64([0, 2]), [1, 2], False), "RaggedKey should have 2", "1")
    self.assert_invalid(op(key, int64([0, 3]), [1], False), "key_split", "3")
    self.assert_invalid(op(key, int64([0, 2, 1, 2]), [1, 1, 1], False), "key_split", "decrease")
    self.assert_invalid(op(key, int64([1, 2]), [1], False), "key_split[0] is 1")
    self.assert_invalid(op(key, int64([0, 2]), [], False), "dims is empty")
    self.assert_invalid(op(key, int64([0, 2]), [0], False), "dims[0] is 0")
    self.assert_invalid(op(key, int64([0, 2]), [-3], False), "dims[0] is -3")

  def test_fill_bad_input(self):
    ops = distribution_ops.gen_distribution_ops
    buffer = distribution_ops.unique_key_with_value_and_offset(ragged([[1, 2]]), [2]).value_buffer

    def fill(pos, pos_split, offsets, offset_split, dims=(2,)):
      return ops.monolith_fill_with_offset_map(
        int64(pos),
        int64(pos_split),
        tf.ones([8]),
        int64(offsets),
        int64(offset_split),
        buffer,
        list(dims),
      )

    def gradient(pos, pos_split, offsets, offset_split, dims=(2,)):
      return ops.monolith_fill_with_offset_map_gradient(
        int64(pos), int64(pos_split), tf.ones([4]), int64(offsets), int64(offset_split), list(dims)
      )

    for op in (fill, gradient):
      good = ([0, 1], [0, 2], [0, 2], [0, 1, 2])
      bad = [
        (([0, 1], [0, 1, 2], [0, 2], [0, 1, 2]), "should have 1 rows"),
        # As many offsets as pos allows, but only one key.
        (([0, 1], [0, 2], [0, 2], [0, 2]), "pos is bigger than offset size."),
        (([0, -1], [0, 2], [0, 2], [0, 1, 2]), "pos[1] is -1"),
        (([0, 1], [0, 2], [0, 3], [0, 1, 2]), "value_offset_map[1] is 3"),
        (([0, 1], [0, 2], [0, -1], [0, 1, 2]), "value_offset_map[1] is -1"),
        (([0, 1], [0, 2], [0, INT64_MAX], [0, 1, 2]), "value_offset_map[1]"),
        (([0, 1], [0, 2], [0, 2], [0, 1, 3]), "value_offset_map_split"),
        (([0, 1], [0, 2], [0, 2], [0, 2, 1, 2]), "decrease"),
        (([0, 1], [0, 1], [0, 2], [0, 1, 2]), "pos_split"),
      ]
      self.run_tensors(op(*good).op)
      for args, message in bad:
        self.assert_invalid(op(*args).op, message)
      self.assert_invalid(op(*good, dims=()).op, "dims is empty")


class MapAndGatherTest(DistributionTestCase):
  def test_map_id_to_embedding(self):
    ids = [int64([1]), int64([2])]
    embeddings = [tf.constant([[1.0, 1.0]]), tf.constant([[2.0, 2.0]])]
    for use_multi_threads in (True, False):
      result = distribution_ops.map_id_to_embedding(
        ids, embeddings, int64([[1], [2]]), use_multi_threads
      )
      self.assertEqual(result.shape.as_list(), [2, 1, 2])
      self.assertAllEqual(self.run_tensors(result), [[[1, 1]], [[2, 2]]])

  def test_map_id_to_embedding_gradient(self):
    ids = [int64([1]), int64([2])]
    embeddings = [tf.constant([[1.0, 1.0]]), tf.constant([[2.0, 2.0]])]
    result = distribution_ops.map_id_to_embedding(ids, embeddings, int64([1, 1, 2]))
    grads = tf.gradients(result, embeddings, -tf.ones([3, 2]))
    explicit = distribution_ops.map_id_to_embedding_gradient_back_prop(
      ids, int64([1, 1, 2]), -tf.ones([3, 2])
    )
    for got in self.run_tensors([grads, explicit]):
      self.assertAllEqual(got[0], [[-2, -2]])
      self.assertAllEqual(got[1], [[-1, -1]])

  def test_the_first_occurrence_of_an_id_counts(self):
    ids = [int64([5, 5]), int64([5])]
    embeddings = [tf.constant([[1.0], [2.0]]), tf.constant([[3.0]])]
    result = distribution_ops.map_id_to_embedding(ids, embeddings, int64([5, 5]))
    got, grads = self.run_tensors([result, tf.gradients(result, embeddings)])
    self.assertAllEqual(got, [[1], [1]])
    self.assertAllEqual(grads[0], [[2], [0]])
    self.assertAllEqual(grads[1], [[0]])

  def test_map_of_nothing_and_of_extreme_ids(self):
    ids = [int64([INT64_MIN, INT64_MAX, 0]), int64([])]
    embeddings = [tf.constant([[1.0], [2.0], [3.0]]), tf.zeros([0, 1])]
    result = distribution_ops.map_id_to_embedding(ids, embeddings, int64([0, INT64_MIN, INT64_MAX]))
    self.assertAllEqual(self.run_tensors(result), [[3], [1], [2]])
    empty = distribution_ops.map_id_to_embedding(ids, embeddings, tf.zeros([0, 4], tf.int64))
    self.assertEqual(self.run_tensors(empty).shape, (0, 4, 1))

  def test_map_bad_input(self):
    with self.assertRaisesRegex(ValueError, "ids length and embeddings lenght must match. 1 vs 2"):
      distribution_ops.map_id_to_embedding([int64([1])], [tf.ones([1, 1])] * 2, int64([1]))
    mapped = distribution_ops.map_id_to_embedding
    ids = [int64([1]), int64([2])]
    self.assert_invalid(mapped(ids, [tf.ones([1, 2])] * 2, int64([1, 3])), "Unable to map id 3")
    self.assert_invalid(
      mapped(ids, [tf.ones([1, 2]), tf.ones([2, 2])], int64([1])),
      "embeddings[1] has 2 rows",
      "1 ids",
    )
    self.assert_invalid(
      mapped(ids, [tf.ones([1, 2]), tf.ones([1, 3])], int64([1])), "width 3", "has 2"
    )
    back = distribution_ops.map_id_to_embedding_gradient_back_prop
    self.assert_invalid(back(ids, int64([3]), tf.ones([1, 2])), "Unable to map id 3")
    self.assert_invalid(back(ids, int64([1, 2]), tf.ones([3, 2])), "[3,2]", "2 elements")

  def test_gather_embeddings_by_input(self):
    embeddings = tf.constant([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    for use_multi_threads in (False, True):
      output, mapping = distribution_ops.gather_embeddings_by_input(
        int64([1, 2, 3]), embeddings, int64([[2], [1], [2]]), use_multi_threads
      )
      self.assertEqual(output.shape.as_list(), [3, 1, 2])
      got, rows, grad = self.run_tensors([output, mapping, tf.gradients(output, embeddings)[0]])
      self.assertAllEqual(got, [[[2, 2]], [[1, 1]], [[2, 2]]])
      self.assertAllEqual(rows, [[1], [0], [1]])
      self.assertAllEqual(grad, [[1, 1], [2, 2], [0, 0]])

  def test_gather_embeddings_by_ids_gradient_back_prop(self):
    grads = tf.constant([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
    result = distribution_ops.gather_embeddings_by_ids_gradient_back_prop(
      int64([2, 3, 1]), grads, int64([1, 0, 1, 2])
    )
    self.assertEqual(result.shape.as_list(), [3, 2])
    self.assertAllEqual(self.run_tensors(result), [[2, 2], [5, 5], [8, 8]])

  def test_gather_bad_input(self):
    gather = distribution_ops.gather_embeddings_by_input
    self.assert_invalid(
      gather(int64([1, 2]), tf.ones([3, 2]), int64([1]))[0],
      "See unmatched embedding dim 3 and id dim 2",
    )
    self.assert_invalid(gather(int64([1, 2]), tf.ones([2, 2]), int64([4]))[0], "id 4")
    back = distribution_ops.gather_embeddings_by_ids_gradient_back_prop
    self.assert_invalid(back(int64([1]), tf.ones([1, 2]), int64([1])), "index_mapping[0] is 1")
    self.assert_invalid(back(int64([1]), tf.ones([1, 2]), int64([-1])), "index_mapping[0] is -1")
    self.assert_invalid(back(int64([1]), tf.ones([2, 2]), int64([0])), "[2,2]", "1 elements")

  def test_fused_gather_embeddings_by_input(self):
    offsets = [tf.constant([0, 6, 0]), tf.constant([7, 1, 7])]
    result = distribution_ops.fused_gather_embeddings_by_input(
      tf.range(9, dtype=tf.float32), offsets, [1, 2]
    )
    self.assertEqual([r.shape.as_list() for r in result], [[3, 1], [3, 2]])
    first, second = self.run_tensors(result)
    self.assertAllEqual(first, [[0], [6], [0]])
    self.assertAllEqual(second, [[7, 8], [1, 2], [7, 8]])

  def test_fused_gather_embeddings_by_input_gradient(self):
    offsets = [tf.constant([0, 6, 0]), tf.constant([7, 1, 7])]
    grads = [
      tf.constant([[1.0], [2.0], [3.0]]),
      tf.constant([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
    ]
    want = np.array([4, 2, 2, 0, 0, 0, 2, 4, 4])
    for scale, factor in ((1, 1), (2, 2), (0.5, 0.5), (tf.constant(2.0), 2)):
      result = distribution_ops.fused_gather_embeddings_by_input_gradient(
        9, grads, offsets, [1, 2], scale
      )
      self.assertEqual(result.shape.as_list(), [9])
      self.assertAllEqual(self.run_tensors(result), want * factor)

  def test_fused_gather_gradient_of_unknown_size(self):
    size = tf.size(tf.compat.v1.placeholder_with_default(tf.zeros([3]), [None]))
    result = distribution_ops.fused_gather_embeddings_by_input_gradient(
      size, [tf.ones([0, 2])], [tf.constant([], tf.int32)], [2]
    )
    self.assertEqual(result.shape.as_list(), [None])
    self.assertAllEqual(self.run_tensors(result), [0, 0, 0])

  def test_fused_gather_bad_input(self):
    gather = distribution_ops.fused_gather_embeddings_by_input
    flat = tf.ones([4])
    for offset in (-1, 3, 2**31 - 1):
      self.assert_invalid(
        gather(flat, [tf.constant([0, offset])], [2]), f"embedding_offsets[0][1] is {offset}"
      )
      self.assert_invalid(
        distribution_ops.fused_gather_embeddings_by_input_gradient(
          4, [tf.ones([2, 2])], [tf.constant([0, offset])], [2]
        ),
        f"embedding_offsets[0][1] is {offset}",
      )
    gradient = distribution_ops.fused_gather_embeddings_by_input_gradient
    zero = [tf.constant([0])]
    self.assert_invalid(gradient(4, [tf.ones([1, 3])], zero, [2]), "[1,3]", "[1,2]")
    self.assert_invalid(gradient(4, [tf.ones([2, 2])], zero, [2]), "[2,2]", "[1,2]")
    self.assert_invalid(gradient(-4, [tf.ones([1, 2])], zero, [2]), "-4")
    self.assert_invalid(gradient(4, [tf.ones([1, 2])], zero, [2, 2]), "embedding_dims is 2", "1")
    with self.assertRaisesRegex(ValueError, "embedding_dims"):
      gather(flat, zero, [2, 2])
    with self.assertRaisesRegex(ValueError, "embedding_dims"):
      gather(flat, zero, [0])


class ReduceTest(DistributionTestCase):
  def test_reduce_sum(self):
    result = distribution_ops.reduce_sum(
      int64([[0], [0], [2]]), tf.constant([[4.0, 4.0], [2.0, 2.0], [1.0, 1.0]]), [3]
    )
    self.assertEqual(result.shape.as_list(), [3, 2])
    self.assertAllEqual(self.run_tensors(result), [[6, 6], [0, 0], [1, 1]])

  def test_reduce_mean_of_no_ids_is_zero(self):
    values = tf.constant([[4.0, 4.0], [2.0, 2.0], [1.0, 1.0]])
    result = distribution_ops.reduce_mean(int64([[0], [0], [2]]), values, [3])
    got, grad = self.run_tensors([result, tf.gradients(result, values)[0]])
    self.assertAllEqual(got, [[3, 3], [0, 0], [1, 1]])
    self.assertAllEqual(grad, [[0.5, 0.5], [0.5, 0.5], [1, 1]])

  def test_reduce_sqrtn(self):
    result = distribution_ops.reduce_sqrtn(
      int64([[0], [0], [1]]), tf.constant([[3.0, 3.0], [4.0, 4.0], [4.0, 4.0]]), [2]
    )
    self.assertAllEqual(self.run_tensors(result), [[5, 5], [4, 4]])

  def test_reduce_sum_gradient(self):
    values = tf.ones([3, 2])
    result = distribution_ops.reduce_sum(int64([[2], [0], [2]]), values, [3])
    grad = tf.gradients(result, values, [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])[0]
    self.assertEqual(grad.shape.as_list(), [3, 2])
    self.assertAllEqual(self.run_tensors(grad), [[5, 6], [1, 2], [5, 6]])

  def test_reduce_mean_gradient(self):
    values = tf.ones([2, 2])
    result = distribution_ops.reduce_mean(int64([[0], [0]]), values, [1])
    grad = tf.gradients(result, values, [[[-2.0, -2.0]]])[0]
    self.assertAllEqual(self.run_tensors(grad), [[-1, -1], [-1, -1]])

  def test_reduce_mean_gradient_of_a_batch_larger_than_the_width(self):
    values = tf.ones([100, 1])
    rows = np.arange(100).reshape(100, 1) * 10
    result = distribution_ops.reduce_mean(int64(rows), values, [1000])
    self.assertAllEqual(self.run_tensors(tf.gradients(result, values)[0]), np.ones([100, 1]))

  def test_reduce_sqrtn_gradient(self):
    values = tf.constant([[3.0, 4.0], [4.0, 3.0]])
    result = distribution_ops.reduce_sqrtn(int64([[0], [0]]), values, [1])
    grad = tf.gradients(result, values, -tf.ones([1, 2]))[0]
    self.assertAllClose(self.run_tensors(grad), [[-0.6, -0.8], [-0.8, -0.6]])

  def test_reduce_sqrtn_gradient_of_zeros(self):
    values = tf.zeros([2, 2])
    result = distribution_ops.reduce_sqrtn(int64([[0], [0]]), values, [1])
    self.assertAllEqual(self.run_tensors(tf.gradients(result, values)[0]), np.zeros([2, 2]))

  def test_fused_reduce_sum_and_split(self):
    values = tf.constant([[1.0, 1.0, 1.0], [2.0, 2.0, 1.0], [4.0, 4.0, 2.0]])
    result = distribution_ops.fused_reduce_sum_and_split(int64([0, 0, 2]), values, 4, [1, 2])
    self.assertEqual([r.shape.as_list() for r in result], [[4, 1], [4, 2]])
    upstream = [
      tf.reshape(tf.range(4, dtype=tf.float32), [4, 1]),
      tf.reshape(tf.range(8, dtype=tf.float32), [4, 2]),
    ]
    (first, second), grad = self.run_tensors([result, tf.gradients(result, values, upstream)[0]])
    self.assertAllEqual(first, [[3], [0], [4], [0]])
    self.assertAllEqual(second, [[3, 2], [0, 0], [4, 2], [0, 0]])
    self.assertAllEqual(grad, [[0, 0, 1], [0, 0, 1], [2, 4, 5]])

  def test_fused_reduce_sum_and_split_of_lists(self):
    rows = [[1.0, 2.0], [3.0, 4.0]]
    result = distribution_ops.fused_reduce_sum_and_split([0, 2], rows, 3, [1, 1])
    self.assertAllEqual(self.run_tensors(result), [[[1], [0], [3]], [[2], [0], [4]]])

  def test_reductions_of_nothing(self):
    indices = tf.zeros([0, 1], tf.int64)
    for op in (
      distribution_ops.reduce_sum,
      distribution_ops.reduce_mean,
      distribution_ops.reduce_sqrtn,
    ):
      self.assertAllEqual(self.run_tensors(op(indices, tf.zeros([0, 3]), [2])), np.zeros([2, 3]))
      self.assertEqual(self.run_tensors(op(indices, tf.zeros([0, 3]), [0])).shape, (0, 3))

  def test_reduce_bad_input(self):
    values = tf.ones([2, 3])
    for op in (
      distribution_ops.reduce_sum,
      distribution_ops.reduce_mean,
      distribution_ops.reduce_sqrtn,
    ):
      self.assert_invalid(op(int64([[0], [2]]), values, [2]), "id_indices[1] is 2", "[0, 2)")
      self.assert_invalid(op(int64([[0], [-1]]), values, [2]), "id_indices[1] is -1")
      self.assert_invalid(op(int64([[0]]), values, [2]), "is 2", "= 1")
      self.assert_invalid(op(int64([[0, 1], [0, 1]]), values, [2]), "[2,2]")
      self.assert_invalid(op(int64([[0], [1]]), values, int64([-2])), "-2")
      self.assert_invalid(op(int64([[0], [1]]), values, int64([])), "id_dense_shape")
      self.assert_invalid(op(int64([[0], [1]]), tf.ones([2]), [2]), "id_values")
    ops = distribution_ops.gen_distribution_ops
    for op in (ops.monolith_reduce_sum_gradient, ops.monolith_reduce_mean_gradient):
      self.assert_invalid(op(int64([[2]]), tf.ones([2, 3])), "id_indices[0] is 2")
    square = ops.monolith_reduce_square_norm_gradient
    self.assert_invalid(square(int64([[2]]), tf.ones([1, 3]), tf.ones([2, 3])), "is 2")
    self.assert_invalid(square(int64([[0]]), tf.ones([1, 2]), tf.ones([2, 3])), "is 2", "= 3")
    fused = distribution_ops.fused_reduce_sum_and_split
    self.assert_invalid(fused(int64([0, 1]), values, 2, [1, 1]), "is 3", "= 2")
    self.assert_invalid(fused(int64([0, 5]), values, 2, [1, 2]), "id_indices[1] is 5")
    with self.assertRaisesRegex(ValueError, "split_dims"):
      fused(int64([0, 1]), values, 2, [0, 3])

  def test_fused_sorted_segment_sum(self):
    values = tf.constant(
      [[1.0, 1, 1, 1, 1], [2.0, 2, 1, 1, 1], [4.0, 4, 2, 2, 2], [4.0, 4, 2, 2, 2]]
    )
    want = [[3, 3, 2, 2, 2], [0] * 5, [8, 8, 4, 4, 4], [0] * 5]
    for dtype in (tf.int32, tf.int64):
      indices = tf.constant([0, 0, 2, 2], dtype)
      shape = tf.constant([4, 5], dtype)
      result = distribution_ops.fused_sorted_segment_sum(
        [indices, indices], [values, 2 * values], [shape, shape]
      )
      self.assertEqual(result[0].shape.as_list(), [4, 5])
      grad = tf.gradients(result[0], values, tf.reshape(tf.range(20, dtype=tf.float32), [4, 5]))[0]
      (first, second), grad = self.run_tensors([result, grad])
      self.assertAllEqual(first, want)
      self.assertAllEqual(second, 2 * np.array(want))
      self.assertAllEqual(grad, np.arange(20).reshape(4, 5)[[0, 0, 2, 2]])

  def test_fused_sorted_segment_sum_of_nothing(self):
    result = distribution_ops.fused_sorted_segment_sum(
      [int64([])], [tf.zeros([0, 2])], [int64([3, 2])]
    )
    self.assertAllEqual(self.run_tensors(result[0]), np.zeros([3, 2]))

  def test_fused_sorted_segment_sum_bad_input(self):
    def run(indices, values, shape):
      # Hidden behind placeholders, so that the kernel has to find the fault.
      hide = tf.compat.v1.placeholder_with_default
      return distribution_ops.fused_sorted_segment_sum(
        [hide(indices, None)], [hide(values, None)], [hide(shape, None)]
      )

    self.assert_invalid(run(int64([0, 3]), tf.ones([2, 2]), int64([3, 2])), "is 3", "[0, 3)")
    self.assert_invalid(run(int64([-1, 0]), tf.ones([2, 2]), int64([3, 2])), "is -1")
    self.assert_invalid(run(int64([0]), tf.ones([2, 2]), int64([3, 2])), "[2,2]", "[1,2]")
    self.assert_invalid(run(int64([0]), tf.ones([1, 3]), int64([3, 2])), "[1,3]", "[1,2]")
    self.assert_invalid(run(int64([]), tf.ones([1, 2]), int64([3, 2])), "0 elements", "has 2")
    self.assert_invalid(run(int64([0]), tf.ones([0, 2]), int64([3, 2])), "1 elements", "has 0")
    self.assert_invalid(run(int64(0), tf.ones([1, 2]), int64([3, 2])), "indices[0]")
    self.assert_invalid(run(int64([0]), tf.constant(1.0), int64([3, 2])), "updates[0]")
    self.assert_invalid(run(int64([0]), tf.ones([1, 2]), int64(3)), "vector")
    self.assert_invalid(run(int64([0]), tf.ones([1, 2]), int64([-3, 2])), "-3")

  def test_fused_reduce_and_split_gpu(self):
    splits = [tf.constant([0, 2, 2, 3]), int64([0, 0, 1, 2])]
    embeddings = [
      tf.constant([[1.0, 2, 3], [4.0, 5, 6], [7.0, 8, 9]]),
      tf.constant([[1.0, 2], [3.0, 4]]),
    ]
    result = distribution_ops.fused_reduce_and_split_gpu(splits, embeddings, [[1, 2], [2]])
    self.assertEqual([r.shape.as_list() for r in result], [[3, 1], [3, 2], [3, 2]])
    upstream = [
      tf.constant([[1.0], [2.0], [3.0]]),
      tf.constant([[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]),
      tf.constant([[10.0, 11.0], [12.0, 13.0], [14.0, 15.0]]),
    ]
    got, grads = self.run_tensors([result, tf.gradients(result, embeddings, upstream)])
    self.assertAllEqual(got[0], [[5], [0], [7]])
    self.assertAllEqual(got[1], [[7, 9], [0, 0], [8, 9]])
    self.assertAllEqual(got[2], [[0, 0], [1, 2], [3, 4]])
    self.assertAllEqual(grads[0], [[1, 4, 5], [1, 4, 5], [3, 8, 9]])
    self.assertAllEqual(grads[1], [[12, 13], [14, 15]])

  def test_fused_reduce_and_split_gpu_bad_input(self):
    fused = distribution_ops.fused_reduce_and_split_gpu
    one = tf.ones([2, 3])
    self.assert_invalid(fused([tf.constant([0, 3])], [one], [[1, 2]]), "ends at 3", "2")
    self.assert_invalid(fused([tf.constant([0, 2, 1, 2])], [one], [[3]]), "decrease")
    self.assert_invalid(fused([tf.constant([0, 2])], [one], [[1, 1]]), "width 3", "2")
    self.assert_invalid(fused([tf.constant([0, 2])], [one], [[1, 2, 1]]), "is 3", "= 2")
    with self.assertRaisesRegex(ValueError, "row splits"):
      fused([tf.constant([0, 2]), tf.constant([0, 1, 2])], [one, one], [[3], [3]])
    unknown = tf.compat.v1.placeholder_with_default(tf.constant([0, 2]), [None])
    with self.assertRaisesRegex(ValueError, "static length"):
      fused([unknown], [one], [[3]])


class SumRaggedRowsTest(DistributionTestCase):
  def test_bits_are_those_of_scatter_nd(self):
    rng = np.random.default_rng(3)
    splits, values, wanted = [], [], []
    for rows, width in ((7, 16), (1, 1), (300, 5), (0, 3)):
      lengths = rng.integers(0, 5, rows)
      value = rng.normal(size=[lengths.sum(), width]).astype(np.float32)
      value[rng.random(value.shape) < 0.3] = -0.0
      row_ids = np.repeat(np.arange(rows), lengths)[:, None]
      splits.append(int64(np.concatenate([[0], np.cumsum(lengths)])))
      values.append(tf.constant(value))
      with tf.device("/device:CPU:0"):  # a GPU adds in any order
        wanted.append(tf.scatter_nd(int64(row_ids), values[-1], int64([rows, width])))

    sums, wanted = self.run_tensors(
      [gen_monolith_ops.monolith_sum_ragged_rows(splits, values), wanted]
    )

    for left, right in zip(sums, wanted):
      self.assertEqual((left.shape, left.tobytes()), (right.shape, right.tobytes()))

  def test_bad_inputs(self):
    values = tf.ones([3, 2])
    for splits, words in (
      ([0, 2], ("splits", "2", "3")),
      ([0, 2, 1, 3], ("splits", "decrease")),
      ([1, 3], ("splits", "1")),
      ([], ("splits", "empty")),
    ):
      with self.subTest(splits):
        splits = tf.compat.v1.placeholder_with_default(int64(splits), [None])
        self.assert_invalid(gen_monolith_ops.monolith_sum_ragged_rows([splits], [values]), *words)
    hidden = tf.compat.v1.placeholder_with_default(values, None)
    for left, right, word in (
      (int64([0, 3]), tf.reshape(hidden, [-1]), "values"),
      (tf.compat.v1.placeholder_with_default(int64([[0, 3]]), None), hidden, "splits"),
    ):
      right = tf.compat.v1.placeholder_with_default(right, None)
      self.assert_invalid(gen_monolith_ops.monolith_sum_ragged_rows([left], [right]), word)


if __name__ == "__main__":
  tf.test.main()
