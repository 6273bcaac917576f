"""Whatever is fed to the table ops: a right result or a clear error, no crash, no half update.

Thousands of random calls with shapes, sizes, splits and offsets that mostly do not fit. A call that
fails must leave every row as it was; one that succeeds must have done what its arguments say.
"""

import collections
import os
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import entry, hash_filter_ops, hash_table_ops, multi_hash_table_ops
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.hash_table_testing import INT64_MAX, INT64_MIN, config_of, make_table, segment

tf.compat.v1.disable_eager_execution()

_BAD = (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError)
_IDS = np.array([0, 1, -1, INT64_MIN, INT64_MAX, 7, 1 << 48, 3 << 20])


def _shape(rng, at_most=6) -> list[int]:
  return rng.integers(0, at_most, rng.integers(0, 4)).tolist()


def _ids(rng, shape=None) -> np.ndarray:
  shape = _shape(rng) if shape is None else shape
  return rng.choice(_IDS, shape)


def _floats(rng, shape) -> np.ndarray:
  values = rng.integers(-3, 4, shape).astype(np.float32)
  if rng.random() < 0.05 and values.size:
    values.ravel()[rng.integers(values.size)] = rng.choice([np.nan, np.inf, -np.inf])
  return values


def _sized(rng, right: int) -> np.ndarray:
  """Returns floats, half of the time as many as are right."""
  if rng.random() < 0.5:
    return _floats(rng, [right])
  return _floats(rng, _shape(rng))


class BadInputTest(tf.test.TestCase, parameterized.TestCase):
  def run(self, result=None):
    with tf.Graph().as_default():
      return super().run(result)

  def setUp(self):
    super().setUp()
    # Rows beside those that are refused are written.
    self.enter_context(mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"))
    self.p = {}

  def placeholder(self, name: str, dtype: tf.DType) -> tf.Tensor:
    self.p[name] = tf.compat.v1.placeholder(dtype, name=name)
    return self.p[name]

  def feed(self, **values) -> dict:
    return {self.p[name]: value for name, value in values.items()}

  @parameterized.parameters((1, (1,)), (2, (3,)), (3, (1, 2)), (4, (2, 1, 3, 1, 1, 2, 1, 1)))
  def test_single_table_ops(self, seed, dims):
    rng = np.random.default_rng(seed)
    dim = sum(dims)
    table = make_table(*[segment(d) for d in dims])
    ids, values = self.placeholder("ids", tf.int64), self.placeholder("values", tf.float32)
    rates, time = self.placeholder("rates", tf.float32), self.placeholder("time", tf.int64)
    step = self.placeholder("step", tf.int64)
    assign = gen_monolith_ops.monolith_hash_table_assign(table.table, ids, values, time)
    add = gen_monolith_ops.monolith_hash_table_assign_add(table.table, ids, values, time)
    optimize = [
      gen_monolith_ops.monolith_hash_table_optimize(
        table.table, ids, values, rates, time, step, use_multi_threads=mt, enable_dedup=dedup
      )
      for mt in (False, True)
      for dedup in (False, True)
    ]
    lookup, everything = table.lookup(ids), table.lookup(_IDS)
    outcomes = collections.Counter()
    model = np.zeros((len(_IDS), dim), np.float32)
    place = {fid: i for i, fid in enumerate(_IDS.tolist())}
    with self.session() as sess, np.errstate(invalid="ignore"):
      for _ in range(500):
        kind = rng.choice(["assign", "add", "optimize", "lookup"])
        fed_ids = _ids(rng)
        n = fed_ids.size
        fed = _sized(rng, n * dim)
        fed_time = rng.choice([0, 5, -1, INT64_MAX]) if rng.random() < 0.9 else [1, 2]
        fed_rates = np.ones(len(dims) if rng.random() < 0.8 else rng.integers(0, 10), np.float32)
        feed = self.feed(ids=fed_ids, values=fed, time=fed_time, rates=fed_rates, step=0)
        # Rows beyond the ids are allowed in writes, if they are rows of the table.
        padded = kind != "optimize" and (fed.ndim < 2 or fed.shape[-1] == dim)
        enough = fed.size == n * dim or (padded and fed.size > n * dim)
        legal = enough and np.ndim(fed_time) == 0
        if kind == "optimize":
          legal = legal and len(fed_rates) == len(dims)
        if kind == "lookup":
          want = model[[place[i] for i in fed_ids.ravel().tolist()]].reshape(-1, dim)
          self.assertAllEqual(sess.run(lookup, feed), want)
          continue
        fetch = {"assign": assign, "add": add}.get(kind)
        if fetch is None:
          fetch = optimize[rng.integers(4)]
        if not legal:
          with self.assertRaises(tf.errors.InvalidArgumentError):
            sess.run(fetch, feed)
          outcomes[f"{kind} refused"] += 1
        else:
          sess.run(fetch, feed)
          outcomes[kind] += 1
          rows = fed.ravel()[: n * dim].reshape(n, dim)
          for fid, row in zip(fed_ids.ravel().tolist(), rows):
            i = place[fid]
            if kind == "assign":
              model[i] = row
            else:
              model[i] += row if kind == "add" else -row
        self.assertAllEqual(sess.run(everything), model)
    self.assertLen(outcomes, 6, outcomes)

  @parameterized.parameters(1, 2)
  def test_fused_ops(self, seed):
    rng = np.random.default_rng(seed)
    dims, shards = [1, 3, 2], 2
    tables = [make_table(segment(dim)) for dim in dims]
    handles = [table.table for table in tables]
    ids, sizes = self.placeholder("ids", tf.int64), self.placeholder("sizes", tf.int32)
    grads, rates = self.placeholder("grads", tf.float32), self.placeholder("rates", tf.float32)
    id_offsets = self.placeholder("id_offsets", tf.int32)
    offsets = self.placeholder("offsets", tf.int32)
    lookup = hash_table_ops.fused_lookup(handles, ids, sizes, shards)
    update = [
      hash_table_ops.fused_apply_gradient(
        handles, ids, ids, sizes, grads, id_offsets, offsets, rates, 0, 0, shards, accumulate
      )
      for accumulate in (False, True)
    ]
    everything = [table.lookup(_IDS) for table in tables]
    model = [np.zeros((len(_IDS), dim), np.float32) for dim in dims]
    place = {fid: i for i, fid in enumerate(_IDS.tolist())}
    refused = accepted = 0
    with self.session() as sess, np.errstate(invalid="ignore"):
      for _ in range(400):
        fed_sizes = rng.integers(0, 4, 6)
        n = int(fed_sizes.sum())
        widths = fed_sizes * np.tile(dims, shards)
        fed = {
          "ids": _ids(rng, [n]),
          "sizes": fed_sizes,
          "grads": _floats(rng, [int(widths.sum())]),
          "rates": np.ones(3),
          "id_offsets": np.concatenate([[0], fed_sizes.cumsum()]),
          "offsets": np.concatenate([[0], widths.cumsum()]),
        }
        damage = rng.choice([None, None, *fed])
        if damage is not None:
          fed[damage] = self._damaged(rng, damage, fed[damage])
        feed = self.feed(**fed)
        if damage is None:
          got = sess.run(lookup, feed)
          self.assertAllEqual(got[2], fed["id_offsets"])
          self.assertAllEqual(got[3], fed["offsets"])
          sess.run(update[rng.integers(2)], feed)
          accepted += 1
          for s in range(shards):
            for k, dim in enumerate(dims):
              i = s * 3 + k
              part = fed["ids"][fed["id_offsets"][i] : fed["id_offsets"][i + 1]]
              rows = fed["grads"][fed["offsets"][i] : fed["offsets"][i + 1]].reshape(-1, dim)
              for fid, row in zip(part.tolist(), rows):
                model[k][place[fid]] -= row
        else:
          with self.assertRaises(tf.errors.InvalidArgumentError):
            sess.run(update[rng.integers(2)], feed)
          refused += 1
        for got, want in zip(sess.run(everything), model):
          self.assertAllEqual(got, want)
    self.assertGreater(min(refused, accepted), 50)

  def _damaged(self, rng, name, array):
    """Returns another length, rank or, where values are checked, another value."""
    array = np.asarray(array)
    kinds = ["longer"]
    if name not in ("grads", "rates"):  # these may have any shape
      kinds.append("deeper")
    if array.size:
      kinds.append("shorter")
    if name in ("sizes", "id_offsets", "offsets"):
      kinds.append("other")
    kind = rng.choice(kinds)
    if kind == "longer":
      return np.concatenate([array, np.ones(1, array.dtype)])
    if kind == "shorter":
      return array[:-1]
    if kind == "deeper":
      return array[None, :]
    changed = array.copy()
    changed[rng.integers(len(changed))] += rng.choice([-1000000, -1, 1, 2**31 - 2000000])
    return changed

  @parameterized.parameters(1, 2)
  def test_group_ops(self, seed):
    rng = np.random.default_rng(seed)
    group = multi_hash_table_ops.MultiHashTable.from_configs(
      {
        "a": config_of(segment(1)),
        "b": config_of(segment(2), segment(1)),
        "c": config_of(segment(2)),
      }
    )
    dims = [1, 3, 2]
    ids, splits = self.placeholder("ids", tf.int64), self.placeholder("splits", tf.int64)
    values, rates = self.placeholder("values", tf.float32), self.placeholder("rates", tf.float32)
    zero = tf.constant(0, tf.int64)
    ops = gen_monolith_ops
    lookup = ops.monolith_multi_hash_table_lookup(group.handle, ids, splits)
    entries = ops.monolith_multi_hash_table_lookup_entry(group.handle, ids, splits)
    writes = {
      "assign": ops.monolith_multi_hash_table_assign(group.handle, ids, splits, values, zero),
      "add": ops.monolith_multi_hash_table_assign_add(group.handle, ids, splits, values, zero),
      "optimize": ops.monolith_multi_hash_table_optimize(
        group.handle, ids, splits, values, rates, zero, zero
      ),
    }
    everything = group.lookup({name: _IDS for name in "abc"})
    outcomes = collections.Counter()
    with self.session() as sess:
      sess.run(group.initializer)
      before = sess.run(everything)
      for _ in range(500):
        n = int(rng.integers(0, 8))
        cuts = np.sort(rng.integers(0, n + 1, 2))
        fed_splits = np.array([0, *cuts, n])
        if rng.random() < 0.5:
          fed_splits = rng.integers(-2, n + 2, rng.integers(0, 9))
        good = (
          len(fed_splits) == 4
          and fed_splits[0] == 0
          and fed_splits[-1] == n
          and np.all(np.diff(fed_splits) >= 0)
        )
        want = int(np.dot(np.diff(fed_splits), dims)) if good else 0
        fed = _sized(rng, max(want, 0)) if rng.random() < 0.7 else _floats(rng, [want])
        fed_rates = np.ones(4 if rng.random() < 0.8 else rng.integers(0, 8))
        feed = self.feed(ids=_ids(rng, [n]), splits=fed_splits, values=fed, rates=fed_rates)
        kind = rng.choice(list(writes))
        legal = good and (fed.size == want if kind == "optimize" else fed.size >= want)
        if kind == "optimize":
          legal = legal and len(fed_rates) == 4
        if legal:
          sess.run(writes[kind], feed)
          self.assertEqual(sess.run(lookup, feed).size, want)
          self.assertEqual(sess.run(entries, feed).size, n)
          before = sess.run(everything)
        else:
          with self.assertRaises(tf.errors.InvalidArgumentError):
            sess.run(writes[kind], feed)
          for name, rows in sess.run(everything).items():
            self.assertAllEqual(rows, before[name])
        outcomes[kind, bool(legal)] += 1
    self.assertLen(outcomes, 6)

  def test_paging_and_pure_ops(self):
    rng = np.random.default_rng(5)
    table = make_table(segment(1))
    part, parts = self.placeholder("part", tf.int32), self.placeholder("parts", tf.int32)
    limit, offset = self.placeholder("limit", tf.int64), self.placeholder("offset", tf.int64)
    page = table.save_as_tensor(part, parts, limit, offset)
    indices, ids = self.placeholder("indices", tf.int64), self.placeholder("ids", tf.int64)
    grads = self.placeholder("grads", tf.float32)
    gradient = gen_monolith_ops.monolith_hash_table_lookup_gradient(indices, ids, grads)
    outcomes = collections.Counter()
    with self.session() as sess:
      sess.run(table.assign(np.arange(1000), np.ones((1000, 1), np.float32)).as_op())
      for _ in range(500):
        numbers = rng.choice([-1, 0, 1, 2, 64, 100, 1000, INT64_MAX, INT64_MIN], 4)
        small = np.clip(numbers[:2], -(2**31), 2**31 - 1)
        feed = self.feed(part=small[0], parts=small[1], limit=numbers[2], offset=numbers[3])
        try:
          at, entries = sess.run(page, feed)
          self.assertGreater(at, 0)
          self.assertLessEqual(len(entries), numbers[2])
          outcomes["page"] += 1
        except tf.errors.InvalidArgumentError:
          outcomes["no page"] += 1
        shape = rng.integers(0, 4, 2)
        feed = self.feed(
          indices=rng.integers(-1, 3, [*shape, *rng.integers(0, 2, rng.integers(0, 2))]),
          ids=np.zeros(shape[0] if rng.random() < 0.7 else shape),
          grads=np.ones(rng.integers(0, 4, rng.integers(1, 4))),
        )
        try:
          got_ids, got = sess.run(gradient, feed)
          self.assertLen(got, len(got_ids))
          outcomes["gradient"] += 1
        except tf.errors.InvalidArgumentError:
          outcomes["no gradient"] += 1
    self.assertLen(outcomes, 4)

  def test_foreign_and_destroyed_resources(self):
    table = make_table(segment(1), name="t")
    group = multi_hash_table_ops.MultiHashTable.from_configs({"a": config_of(segment(1))})
    filter_handle = hash_filter_ops.create_dummy_hash_filter()
    variable = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=True)
    ids = tf.constant([1], tf.int64)
    zero = tf.constant(0, tf.int64)
    base = os.path.join(os.environ["TEST_TMPDIR"], "x")
    ops = gen_monolith_ops

    def single(handle):
      rate, value = tf.constant([1.0]), tf.constant([[1.0]])
      return [
        ops.monolith_hash_table_lookup(handle, ids, 1),
        ops.monolith_hash_table_lookup_entry(handle, ids),
        ops.monolith_hash_table_assign(handle, ids, value, zero),
        ops.monolith_hash_table_assign_add(handle, ids, value, zero),
        ops.monolith_hash_table_optimize(handle, ids, value, rate, zero, zero),
        ops.monolith_hash_table_erase(handle, ids),
        ops.monolith_hash_table_size(handle),
        ops.monolith_hash_table_stats(handle),
        ops.monolith_hash_table_save_as_tensor(handle, 0, 1, 1, 0)[1],
        ops.monolith_hash_table_save(handle, base),
        ops.monolith_hash_table_restore(handle, base),
        hash_table_ops.fused_lookup([table.table, handle], ids, [0, 1], 1)[0],
        hash_table_ops.fused_apply_gradient(
          [table.table, handle],
          ids,
          ids,
          [0, 1],
          [1.0],
          [0, 0, 1],
          [0, 0, 1],
          [1.0, 1.0],
          None,
          zero,
          1,
        ),
      ]

    def many(handle):
      splits, value = tf.constant([0, 1], tf.int64), tf.constant([1.0])
      return [
        ops.monolith_multi_hash_table_lookup(handle, ids, splits),
        ops.monolith_multi_hash_table_lookup_entry(handle, ids, splits),
        ops.monolith_multi_hash_table_fused_lookup(handle, ids, [1], zero, 1)[0],
        ops.monolith_multi_hash_table_assign(handle, ids, splits, value, zero),
        ops.monolith_multi_hash_table_assign_add(handle, ids, splits, value, zero),
        ops.monolith_multi_hash_table_reinitialize(handle, "a", ids)[1],
        ops.monolith_multi_hash_table_optimize(handle, ids, splits, value, value, zero, zero),
        ops.monolith_multi_hash_table_save(handle, base),
        ops.monolith_multi_hash_table_restore(handle, base),
      ]

    def filters(handle):
      return [
        ops.monolith_hash_filter_save(handle, base),
        ops.monolith_hash_filter_restore(handle, base),
        ops.monolith_hash_filter_intercept_gradient_gradient(handle, ids, [1.0]),
        make_table(segment(1), hash_filter=handle).size(),
      ]

    with self.session() as sess:
      sess.run([variable.initializer, group.initializer, table.size(), filter_handle])
      foreign = [
        *single(variable.handle), *single(group.handle), *single(filter_handle),
        *many(variable.handle), *many(table.table), *many(filter_handle),
        *filters(variable.handle), *filters(table.table),
      ]  # fmt: skip
      for fetch in foreign:
        with self.assertRaises(tf.errors.InvalidArgumentError):
          sess.run(fetch)
      destroy = tf.raw_ops.DestroyResourceOp
      sess.run(destroy(resource=group.handle))
      for call in many(group.handle):
        with self.assertRaises(tf.errors.NotFoundError):
          sess.run(call)
      # A single table is created again by the node that names it.
      sess.run(table.assign([1], [[5.0]]).as_op())
      sess.run(destroy(resource=table.table))
      self.assertAllEqual(sess.run(table.lookup([1])), [[0]])
      # Destroyed between the handle and its use.
      with tf.control_dependencies([destroy(resource=table.table)]):
        late = tf.identity(table.table)
      for call in single(late):
        with self.assertRaises(tf.errors.NotFoundError):
          sess.run(call)

  def test_serving_tables(self):
    serving = make_table(segment(2), serving=True)
    training = make_table(segment(2))
    ids = tf.constant([1, 2], tf.int64)
    grads = tf.ones([4])
    with self.session() as sess:
      sess.run(training.assign(ids, [[1.0, 1], [1, 1]]).as_op())
      sess.run(serving.assign(ids, [[2.0, 2], [2, 2]]).as_op())
      handles = [training.table, serving.table]
      fused = hash_table_ops.fused_apply_gradient(
        handles, ids, ids, [1, 1], grads, [0, 1, 2], [0, 2, 4], [1.0, 1.0], None, 0, 1
      )
      # The training table comes first, yet nothing of it may change.
      with self.assertRaisesRegex(_BAD, "ServingEntryAccessor"):
        sess.run(fused)
      lookup = hash_table_ops.fused_lookup(handles, ids, [1, 1], 1)[0]
      self.assertAllEqual(sess.run(lookup), [1, 1, 2, 2])

  def test_the_same_table_twice_in_a_fused_call(self):
    table = make_table(segment(1))
    ids = np.arange(1000)
    both = np.concatenate([ids, ids])
    with self.session() as sess:
      fused = hash_table_ops.fused_apply_gradient(
        [table, table], both, both, [1000, 1000], -np.ones(2000, np.float32), [0, 1000, 2000],
        [0, 1000, 2000], [1.0, 10.0], None, 0, 1,
      )  # fmt: skip
      sess.run(fused)
      self.assertAllEqual(sess.run(table.lookup(ids)), np.full((1000, 1), 11))

  @parameterized.parameters(1, 1024)
  def test_extreme_dimensions(self, dim):
    table = make_table(segment(dim, entry.AdagradOptimizer()))
    rng = np.random.default_rng(0)
    ids = rng.integers(INT64_MIN, INT64_MAX, 500)
    values = rng.standard_normal((500, dim)).astype(np.float32)
    base = os.path.join(os.environ["TEST_TMPDIR"], "wide")
    with self.session() as sess:
      saved = table.assign(ids, values).save(base).restore(base)
      self.assertAllEqual(sess.run(saved.lookup(ids)), values)
      updated = table.apply_gradients(ids, values, 0, use_multi_threads=True, enable_dedup=True)
      want = values - values / np.sqrt(np.float32(0.1) + values * values)
      self.assertAllClose(sess.run(updated.lookup(ids)), want, atol=1e-5)

  def test_hundreds_of_segments(self):
    n = 300
    dims = [1 + i % 3 for i in range(n)]
    optimizer = entry.AdagradOptimizer(initial_accumulator_value=1.0)
    table = make_table(
      *[segment(dim, optimizer) for dim in dims], learning_rates=[float(i) for i in range(n)]
    )
    with self.session() as sess:
      updated = table.apply_gradients([5], np.ones(sum(dims), np.float32), 0)
      want = -np.repeat(np.arange(n), dims) / np.sqrt(2)
      self.assertAllClose(sess.run(updated.lookup([5]))[0], want)

  def test_wrong_types_are_refused_when_the_graph_is_built(self):
    table = make_table(segment(1))
    for call in (
      lambda: table.lookup([1.5]),
      lambda: table.lookup(tf.constant([1], tf.int32)),
      lambda: table.assign([1], ["x"]),
      lambda: table.assign([1], tf.constant([1.0], tf.float64)),
    ):
      with self.assertRaises((TypeError, ValueError)):
        call()

  def test_huge_request_is_refused(self):
    # 2^31 floats do not fit into the int32 offsets of the fused ops.
    table = make_table(segment(1024))
    n = 2**21
    with self.session() as sess:
      ids = self.placeholder("ids", tf.int64)
      lookup = hash_table_ops.fused_lookup([table], ids, [n], 1)[1]
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "2147483648 floats"):
        sess.run(lookup, {ids: np.zeros(n, np.int64)})


if __name__ == "__main__":
  tf.test.main()
