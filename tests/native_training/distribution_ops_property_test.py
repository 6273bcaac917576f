"""Random batches: every fused op equals the plain composition it replaces, every gradient equals
finite differences, and an id has one home on every path."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from monolith.native_training import distribution_ops

SHARDS = (1, 2, 3, 4, 5, 7, 64)
EXTREME_IDS = [
  base + delta
  for base in (-(2**63), -(2**62), -(2**32), -(2**31), 0, 2**31, 2**32, 2**48, 2**62, 2**63 - 1)
  for delta in (-3, -2, -1, 0, 1, 2, 3)
  if -(2**63) <= base + delta < 2**63
]


def random_ids(rng: np.random.Generator, size: int) -> np.ndarray:
  """Returns ids with repetitions, negative ones and the extremes of int64 among them."""
  kinds = [
    rng.integers(-20, 20, size),
    rng.integers(-(2**63), 2**63 - 1, size, dtype=np.int64, endpoint=True),
    rng.choice(np.array(EXTREME_IDS), size),
  ]
  return np.choose(rng.integers(0, 3, size), kinds).astype(np.int64)


def random_splits(rng: np.random.Generator, rows: int, max_length: int) -> np.ndarray:
  """Returns row splits with many empty rows."""
  lengths = rng.integers(0, max_length + 1, rows) * rng.integers(0, 2, rows)
  return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def home(value: int, num_shards: int) -> int:
  """Computes floor modulo with Python's exact integers: the reference for all paths."""
  return int(value) % num_shards


def first_unique(ids: np.ndarray) -> np.ndarray:
  return np.array(list(dict.fromkeys(ids.tolist())), np.int64)


class OneHomeTest(tf.test.TestCase):
  """Every path that maps an id to a server agrees."""

  def assert_home(self, ids: np.ndarray, num_shards: int):
    want = [home(value, num_shards) for value in ids.tolist()]
    shards = distribution_ops.shard_of_ids(ids, num_shards)
    self.assertAllEqual(shards, want)

    for rank0_empty in (False, True) if num_shards > 1 else (False,):
      result = distribution_ops.gen_distribution_ops.fused_reorder_by_indices(
        [ids], num_shards, slot_embedding_dims=[1], rank0_empty=rank0_empty
      )
      owner = np.repeat(np.arange(num_shards), result.shard_sizes)
      modulus = num_shards - 1 if rank0_empty else num_shards
      for value, shard in zip(result.output.numpy().tolist(), owner.tolist()):
        self.assertEqual(shard, home(value, modulus) + (1 if rank0_empty else 0))
      # The offset of each input id leads back to that id.
      self.assertAllEqual(tf.gather(result.output, result.fused_emb_offset), ids)

    parts = distribution_ops.split_by_indices(shards, ids, num_shards)
    for s, part in enumerate(parts):
      self.assertAllEqual(part, [v for v, h in zip(ids.tolist(), want) if h == s])

  def test_extreme_ids(self):
    ids = np.array(EXTREME_IDS, np.int64)
    for num_shards in (*SHARDS, 6, 10, 12, 97, 127, 128, 129, 1000, 1023, 1024, 1025):
      self.assert_home(ids, num_shards)

  def test_random_ids(self):
    rng = np.random.default_rng(0)
    for num_shards in SHARDS:
      self.assert_home(random_ids(rng, 500), num_shards)

  def test_no_ids(self):
    for num_shards in SHARDS:
      self.assert_home(np.array([], np.int64), num_shards)


class EqualityTest(tf.test.TestCase):
  """Fused ops against compositions of TensorFlow's own."""

  # Small enough to be sequential, and large enough for the thread pool.
  SIZES = (0, 1, 10, 300, 70000)

  def test_split_equals_dynamic_partition(self):
    rng = np.random.default_rng(1)
    for n in self.SIZES:
      for num_shards in (1, 7):
        ids = random_ids(rng, n)
        # The upper servers get nothing.
        indices = tf.math.floormod(distribution_ops.shard_of_ids(ids, num_shards), 5)
        values = tf.constant(rng.random((n, 3)), tf.float32)
        with tf.GradientTape() as tape:
          tape.watch(values)
          parts = distribution_ops.split_by_indices(indices, values, num_shards)
        want = tf.dynamic_partition(values, tf.cast(indices, tf.int32), num_shards)
        for got_part, want_part in zip(parts, want):
          self.assertAllEqual(got_part, want_part)
        upstream = [part * (s + 2.0) for s, part in enumerate(parts)]
        grad = tape.gradient(parts, values, upstream)
        self.assertAllEqual(grad, values * (tf.cast(indices, tf.float32)[:, None] + 2.0))

  def test_ragged_split_equals_a_split_per_row(self):
    rng = np.random.default_rng(2)
    for rows in (0, 1, 20):
      splits = random_splits(rng, rows, 6)
      n = int(splits[-1])
      num, indices = rng.integers(-9, 9, n), rng.integers(0, 7, n)
      parts, positions = distribution_ops.ragged_split_by_indices(
        tf.constant(indices), tf.RaggedTensor.from_row_splits(tf.constant(num), splits), 7
      )
      for s in range(7):
        where = [
          [i for i in range(splits[r], splits[r + 1]) if indices[i] == s] for r in range(rows)
        ]
        self.assertEqual(positions[s].to_list(), where)
        self.assertEqual(parts[s].to_list(), [[num[i] for i in row] for row in where])

  def test_reorder_equals_unique_then_partition(self):
    rng = np.random.default_rng(3)
    for n in self.SIZES:
      for num_shards in (1, 7):
        ids = random_ids(rng, n)
        shards = tf.cast(distribution_ops.shard_of_ids(ids, num_shards), tf.int32)
        out, sizes = distribution_ops.reorder_by_indices(ids, shards, num_shards)
        unique = first_unique(ids)
        parts = [
          [v for v in unique.tolist() if home(v, num_shards) == s][::-1] for s in range(num_shards)
        ]
        self.assertAllEqual(out, [v for part in parts for v in part])
        self.assertAllEqual(sizes, [len(part) for part in parts])

  def test_fused_reorder_then_gather_restores_every_table(self):
    rng = np.random.default_rng(4)
    for n in self.SIZES:
      for num_shards in (1, 3, 7):
        tables = [random_ids(rng, n), random_ids(rng, n // 2), np.array([], np.int64)]
        dims = [1, 3, 2]
        ids, shard_sizes, slot_sizes, lengths, offsets = distribution_ops.fused_reorder_by_indices(
          tables, num_shards, dims
        )
        self.assertEqual(tf.reduce_sum(shard_sizes), len(ids))
        self.assertAllEqual(tf.reduce_sum(tf.reshape(slot_sizes, [num_shards, 3]), 1), shard_sizes)
        # "Look up" the ids: the embedding repeats the low bits of the id.
        widths = np.repeat(np.tile(dims, num_shards), slot_sizes)
        flat = np.repeat(ids.numpy() & 0xFFFF, widths).astype(np.float32)
        gathered = distribution_ops.fused_gather_embeddings_by_input(
          flat, tf.split(offsets, lengths), dims
        )
        for table, dim, rows in zip(tables, dims, gathered):
          self.assertAllEqual(rows, np.repeat((table & 0xFFFF)[:, None], dim, 1))

  def test_unique_map_equals_unique_per_row(self):
    rng = np.random.default_rng(5)
    for rows, max_length in ((1, 0), (4, 5), (30, 40), (3, 60000)):
      splits = random_splits(rng, rows, max_length)
      keys = random_ids(rng, int(splits[-1]))
      dims = rng.integers(1, 5, rows).tolist()
      key = tf.RaggedTensor.from_row_splits(keys, splits)
      unique = distribution_ops.unique_key_with_value_and_offset(key, dims, generate_buffer=False)

      starts = np.concatenate([[0], np.cumsum(np.repeat(dims, np.diff(splits)))])
      want_keys, want_offsets = [], []
      for r in range(rows):
        places: dict[int, list[int]] = {}
        for i in range(splits[r], splits[r + 1]):
          places.setdefault(int(keys[i]), []).append(int(starts[i]))
        want_keys.append(list(places))
        want_offsets.append(list(places.values()))
      self.assertEqual(unique.unique_key.to_list(), want_keys)
      self.assertEqual(unique.value_offset.to_list(), want_offsets)

  def test_fill_over_servers_equals_a_gather(self):
    rng = np.random.default_rng(6)
    for rows, max_length, num_shards in ((1, 0, 1), (3, 8, 7), (4, 40000, 3)):
      splits = random_splits(rng, rows, max_length)
      keys = rng.integers(-50, 50, int(splits[-1]))
      dims = rng.integers(1, 5, rows).tolist()
      unique = distribution_ops.unique_key_with_value_and_offset(
        tf.RaggedTensor.from_row_splits(tf.constant(keys), splits), dims
      )
      indices = distribution_ops.shard_of_ids(unique.unique_key.values, num_shards)
      parts, positions = distribution_ops.ragged_split_by_indices(
        indices, unique.unique_key, num_shards
      )
      values = [
        tf.repeat(
          tf.cast(part.values, tf.float32), tf.gather(tf.constant(dims), part.value_rowids())
        )
        for part in parts
      ]
      with tf.GradientTape() as tape:
        tape.watch(values)
        handles = [
          distribution_ops.fill_with_offset_map(
            pos, value, unique.value_offset, unique.value_buffer, dims
          )
          for pos, value in zip(positions, values)
        ]
        buffer = distribution_ops.finalize_shared_tensor(handles, tf.float32, [None])
      want = np.repeat(keys, np.repeat(dims, np.diff(splits)))
      self.assertAllEqual(buffer, want)

      upstream = tf.constant(rng.integers(-8, 8, len(want)), tf.float32)
      registered = tape.gradient(buffer, values, upstream)
      total = 0.0
      for position, value, grad in zip(positions, values, registered):
        explicit = distribution_ops.fill_with_offset_map_gradient(
          position, upstream, unique.value_offset, dims
        )
        self.assertAllEqual(grad, explicit)
        total += float(tf.tensordot(explicit, value, 1))
      # The fill is linear: <upstream, fill(value)> = <gradient, value>, summed over the servers.
      self.assertAllClose(total, float(np.dot(upstream, want)))

  def test_map_and_gather_equal_a_lookup(self):
    rng = np.random.default_rng(7)
    for n in self.SIZES:
      for num_shards in (1, 7):
        batch = random_ids(rng, n)
        unique = first_unique(batch)
        table = {int(v): rng.random(4).astype(np.float32) for v in unique}
        ids = distribution_ops.split_by_indices(
          distribution_ops.shard_of_ids(unique, num_shards), unique, num_shards
        )
        embeddings = [
          tf.constant(
            np.array([table[v] for v in part.numpy().tolist()], np.float32).reshape(-1, 4)
          )
          for part in ids
        ]
        want = np.array([table[v] for v in batch.tolist()], np.float32).reshape(-1, 4)
        upstream = tf.constant(rng.random((n, 4)), tf.float32)
        with tf.GradientTape(persistent=True) as tape:
          tape.watch(embeddings)
          mapped = distribution_ops.map_id_to_embedding(ids, embeddings, batch)
          all_ids, all_embeddings = tf.concat(ids, 0), tf.concat(embeddings, 0)
          gathered, rows = distribution_ops.gather_embeddings_by_input(
            all_ids, all_embeddings, batch
          )
          plain = tf.gather(all_embeddings, rows)
        self.assertAllEqual(mapped, want)
        self.assertAllEqual(gathered, want)
        self.assertAllEqual(plain, want)
        want_grads = tape.gradient(plain, embeddings, upstream)
        for result in (mapped, gathered):
          for got, want_grad in zip(tape.gradient(result, embeddings, upstream), want_grads):
            self.assertAllClose(got, tf.convert_to_tensor(want_grad))

  def test_fused_gather_gradient_equals_scatter_add(self):
    rng = np.random.default_rng(8)
    for n in self.SIZES:
      dims, size = [1, 3, 8], 4096
      # Offsets overlap freely.
      offsets = [rng.integers(0, size - dim + 1, n).astype(np.int32) for dim in dims]
      grads = [rng.integers(-4, 5, (n, dim)).astype(np.float32) for dim in dims]
      want = np.zeros(size, np.float32)
      for offset, grad, dim in zip(offsets, grads, dims):
        np.add.at(want, offset[:, None] + np.arange(dim), 3 * grad)
      got = distribution_ops.fused_gather_embeddings_by_input_gradient(
        size, grads, offsets, dims, scale=3
      )
      self.assertAllEqual(got, want)

  def test_reductions_equal_unsorted_segments(self):
    rng = np.random.default_rng(9)
    for n, rows, dim in ((0, 3, 2), (1, 1, 1), (40, 17, 5), (300, 400, 19), (50000, 4000, 33)):
      for is_sorted in (True, False):
        index = rng.integers(0, rows, n)
        index = np.sort(index) if is_sorted else index
        values = tf.constant(rng.normal(size=(n, dim)), tf.float32)
        square = tf.math.unsorted_segment_sum(values**2, index, rows)
        for op, want in (
          (distribution_ops.reduce_sum, tf.math.unsorted_segment_sum(values, index, rows)),
          (distribution_ops.reduce_mean, tf.math.unsorted_segment_mean(values, index, rows)),
          (distribution_ops.reduce_sqrtn, tf.sqrt(square)),
        ):
          self.assertAllClose(op(index[:, None], values, [rows]), want, rtol=1e-5, atol=1e-5)
        dims = [dim] if dim == 1 else [1, dim - 1]
        parts = distribution_ops.fused_reduce_sum_and_split(index, values, rows, dims)
        whole = distribution_ops.reduce_sum(index[:, None], values, [rows])
        self.assertAllEqual(tf.concat(parts, 1), whole)
        for dtype in (np.int32, np.int64):
          fused = (
            distribution_ops.fused_sorted_segment_sum(
              [index.astype(dtype)], [values], [np.array([rows, dim], dtype)]
            )
            if n > 0
            else [whole]
          )
          self.assertAllEqual(fused[0], whole)

  def test_fused_reduce_and_split_equals_a_reduction_per_table(self):
    rng = np.random.default_rng(10)
    for batch, max_length in ((0, 1), (1, 3), (50, 6), (3000, 20)):
      slice_dims = [[3], [1, 2, 17], [2, 2]]
      splits = [random_splits(rng, batch, max_length) for _ in slice_dims]
      embeddings = [
        tf.constant(rng.normal(size=(split[-1], sum(dims))), tf.float32)
        for split, dims in zip(splits, slice_dims)
      ]
      with tf.GradientTape(persistent=True) as tape:
        tape.watch(embeddings)
        got = distribution_ops.fused_reduce_and_split_gpu(splits, embeddings, slice_dims)
        want = []
        for split, embedding, dims in zip(splits, embeddings, slice_dims):
          row_ids = np.repeat(np.arange(batch), np.diff(split))
          want += tf.split(tf.math.unsorted_segment_sum(embedding, row_ids, batch), dims, axis=1)
      upstream = [tf.constant(rng.normal(size=part.shape), tf.float32) for part in want]
      for got_part, want_part in zip(got, want):
        self.assertAllClose(got_part, want_part, rtol=1e-5, atol=1e-5)
      for got_grad, want_grad in zip(
        tape.gradient(got, embeddings, upstream), tape.gradient(want, embeddings, upstream)
      ):
        self.assertAllClose(got_grad, want_grad)

  def test_normalized_splits_equal_the_concatenated_ragged_tensor(self):
    rng = np.random.default_rng(11)
    for requests in (1, 2, 9):
      parts = [random_splits(rng, int(rng.integers(0, 6)), 4) for _ in range(requests)]
      lengths = np.concatenate([np.diff(part) for part in parts])
      got = distribution_ops.normalize_merged_split(
        np.concatenate(parts), np.array([len(part) for part in parts], np.int32)
      )
      self.assertAllEqual(got, np.concatenate([[0], np.cumsum(lengths)]))


class FiniteDifferenceTest(tf.test.TestCase):
  """Registered gradients against central differences."""

  def check(self, function, *values: np.ndarray):
    theoretical, numerical = tf.test.compute_gradient(
      function, [tf.constant(value, tf.float32) for value in values], delta=2.0**-6
    )
    for want, got in zip(numerical, theoretical):
      self.assertAllClose(got, want, rtol=2e-2, atol=2e-2)

  def values(self, *shape: int) -> np.ndarray:
    # Away from 0, where the square norm has no derivative.
    rng = np.random.default_rng(12)
    return rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1], shape)

  def test_split(self):
    indices = np.array([2, 0, 2, 1, 0])
    self.check(
      lambda x: tf.concat(
        [p * (s + 1.0) for s, p in enumerate(distribution_ops.split_by_indices(indices, x, 4))], 0
      ),
      self.values(5, 2),
    )

  def test_fill_over_two_servers(self):
    key = tf.ragged.constant([[], [0, 1, 2, 1, 0], [5, 1, 5]], tf.int64, row_splits_dtype=tf.int64)
    dims = [3, 2, 1]

    def fill(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
      # A buffer serves once, so every evaluation makes its own.
      unique = distribution_ops.unique_key_with_value_and_offset(key, dims)
      _, positions = distribution_ops.ragged_split_by_indices(
        distribution_ops.shard_of_ids(unique.unique_key.values, 2), unique.unique_key, 2
      )
      handles = [
        distribution_ops.fill_with_offset_map(
          position, value, unique.value_offset, unique.value_buffer, dims
        )
        for position, value in zip(positions, (first, second))
      ]
      return distribution_ops.finalize_shared_tensor(handles, tf.float32, [None])

    # Even ids 0 and 2 with 2 floats each; odd ones 1 with 2 floats, 5 and 1 with one each.
    self.check(fill, self.values(4), self.values(4))

  def test_map_and_gather(self):
    ids = [np.array([7, -1]), np.array([3, 7]), np.array([], np.int64)]
    batch = np.array([[3, 7], [7, -1]])
    self.check(
      lambda a, b: distribution_ops.map_id_to_embedding(ids, [a, b, tf.zeros([0, 2])], batch),
      self.values(2, 2),
      self.values(2, 2),
    )
    self.check(
      lambda x: distribution_ops.gather_embeddings_by_input(np.array([7, -1, 3]), x, batch)[0],
      self.values(3, 2),
    )

  def test_reductions(self):
    for index in (np.array([[0], [0], [2], [4]]), np.array([[4], [0], [2], [0]])):
      for op in (
        distribution_ops.reduce_sum,
        distribution_ops.reduce_mean,
        distribution_ops.reduce_sqrtn,
      ):
        self.check(lambda x, op=op, index=index: op(index, x, [6]), self.values(4, 3))

  def test_fused_reductions(self):
    index = np.array([0, 0, 2, 4])
    self.check(
      lambda x: tf.concat(distribution_ops.fused_reduce_sum_and_split(index, x, 6, [1, 2]), 1),
      self.values(4, 3),
    )
    self.check(
      lambda x, y: tf.concat(
        distribution_ops.fused_sorted_segment_sum(
          [index, index], [x, y], [np.array([6, 3]), np.array([5, 3])]
        ),
        0,
      ),
      self.values(4, 3),
      self.values(4, 3),
    )
    self.check(
      lambda x, y: tf.concat(
        distribution_ops.fused_reduce_and_split_gpu(
          [np.array([0, 3, 3, 4]), np.array([0, 0, 2, 2])], [x, y], [[1, 2], [2]]
        ),
        1,
      ),
      self.values(4, 3),
      self.values(2, 2),
    )

  def test_fused_gather(self):
    # Its gradient is an op of its own, so the differences are taken by hand.
    offsets = [np.array([0, 6, 0], np.int32), np.array([7, 1, 7], np.int32)]
    flat = self.values(9).astype(np.float32)
    upstream = [self.values(3, 1).astype(np.float32), self.values(3, 2).astype(np.float32)]

    def loss(x: np.ndarray) -> float:
      parts = distribution_ops.fused_gather_embeddings_by_input(
        x.astype(np.float32), offsets, [1, 2]
      )
      return sum(float(np.sum(part * up)) for part, up in zip(parts, upstream))

    grad = distribution_ops.fused_gather_embeddings_by_input_gradient(9, upstream, offsets, [1, 2])
    for i, step in enumerate(np.eye(9) * 0.25):
      self.assertAllClose((loss(flat + step) - loss(flat - step)) / 0.5, grad[i], atol=1e-4)


if __name__ == "__main__":
  tf.test.main()
