"""The ops of `ops/layout_ops.py`: the worked example in every version, random batches against a
NumPy model, gradients, several requests, FIRSTN in every layout, and bad input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from idl.matrix.proto.example_pb2 import FeatureConfigs, OutType, PoolingType
from monolith.native_training import distribution_ops

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_v2_behavior()

SHARED = 1 << 31
VERSIONS = (1, 2, 3, 4, 5)


def add_feature(configs: FeatureConfigs, name: str, table: str, pooling, dims, length: int = 0):
  config = configs.feature_configs[name]
  config.table = table
  config.pooling_type = pooling
  config.slice_dims.extend(dims)
  config.max_sequence_length = length


def add_layout(configs: FeatureConfigs, name: str, out_type, slices, shapes):
  config = configs.out_configs[name]
  config.out_type = out_type
  for feature, start, end in slices:
    config.slice_configs.add(feature_name=feature, start=start, end=end)
  for shape in shapes:
    config.shape.add(dims=shape)


@dataclasses.dataclass
class Batch:
  """Ids of one request: `rows[feature][example]` lists positions in `lists[(feature, ps)]`.

  A shared feature has a single row; `lists` holds [count, width] embeddings.
  """

  configs: FeatureConfigs
  ps_num: int
  batch_size: int
  rows: dict[str, list[list[tuple[int, int]]]]
  lists: dict[tuple[str, int], np.ndarray]
  shared: set[str]

  @property
  def features(self) -> list[str]:
    return sorted(self.configs.feature_configs)

  @property
  def tables(self) -> list[str]:
    return sorted({config.table for config in self.configs.feature_configs.values()})

  def features_of(self, table: str) -> list[str]:
    return [f for f in self.features if self.configs.feature_configs[f].table == table]

  def block(self, table: str, ps: int) -> np.ndarray:
    return np.concatenate([self.lists[f, ps].reshape(-1) for f in self.features_of(table)]).astype(
      np.float32
    )

  def fid_offset(self, version: int) -> np.ndarray:
    offsets = []
    for f in self.features:
      table = self.configs.feature_configs[f].table
      t, in_table = self.tables.index(table), self.features_of(table)
      before = in_table[: in_table.index(f)]
      for row in self.rows[f]:
        for ps, position in row:
          high = t * self.ps_num + ps
          low = sum(self.lists[g, ps].size for g in before) + position * self.lists[f, ps].shape[1]
          if version == 2:
            high = sum(len(self.features_of(u)) for u in self.tables[:t]) * self.ps_num
            high += ps * len(in_table) + in_table.index(f)
            low = position
          if version == 1:
            # One matrix per (feature, ps).
            high, low = self.features.index(f) * self.ps_num + ps, position
          offsets.append(high << 32 | low)
    return np.array(offsets, np.uint64)

  def feature_offset(self) -> np.ndarray:
    lengths = [len(row) for f in self.features for row in self.rows[f]]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

  def nfl_offset(self, parser_like: bool = True) -> np.ndarray:
    starts, total = [], 0
    for f in self.features:
      starts.append(total | (SHARED if f in self.shared else 0))
      total += len(self.rows[f])
    return np.array([*starts, total + (1 if parser_like else 0)], np.uint32)

  def blocks(self) -> list[np.ndarray]:
    return [self.block(table, ps) for table in self.tables for ps in range(self.ps_num)]

  def arguments(self, version: int) -> dict:
    """Returns the arguments of `fused_embedding_to_layout` except feature_cfgs and version."""
    args = dict(
      embeddings_list=[tf.constant(block) for block in self.blocks()],
      fid_list_row_split=None,
      fid_offset=self.fid_offset(version),
      feature_offset=self.feature_offset(),
      nfl_offset=self.nfl_offset(),
      batch_size=np.array(self.batch_size, np.int32),
      variant_type="example",
      ps_num=self.ps_num,
    )
    if version == 1:
      args["ps_num"] = -1
      args["embeddings_list"] = [
        tf.constant(self.lists[f, ps], tf.float32)
        for f in self.features
        for ps in range(self.ps_num)
      ]
    if version == 2:
      args["fid_list_row_split"] = [
        np.cumsum([0] + [len(self.lists[f, ps]) for f in self.features_of(table)]).tolist()
        for table in self.tables
        for ps in range(self.ps_num)
      ]
    if version == 4:
      blocks = [self.block(table, ps) for ps in range(self.ps_num) for table in self.tables]
      args["embeddings_list"] = [tf.constant(np.concatenate(blocks))]
      args["fid_list_emb_row_lenth"] = np.array([len(block) for block in blocks], np.int32)
    if version == 5:
      args.update(
        batch_size=np.array([self.batch_size], np.int32),
        nfl_size=np.array([len(self.nfl_offset())], np.int32),
        feature_size=np.array([len(self.feature_offset())], np.int32),
        fid_size=np.array([len(self.fid_offset(version))], np.int32),
        emb_size=np.array([len(block) for block in self.blocks()], np.int32),
      )
    return args

  def per_feature(self, version: int, arrays: list[np.ndarray]) -> dict:
    """Cuts arrays like `embeddings_list` back into {(feature, ps): [count, width]}."""
    result = {}
    if version == 1:
      flat = iter(arrays)
      return {(f, ps): next(flat) for f in self.features for ps in range(self.ps_num)}
    if version == 4:
      sizes = [self.block(t, ps).size for ps in range(self.ps_num) for t in self.tables]
      parts = np.split(arrays[0], np.cumsum(sizes)[:-1])
      order = [(t, ps) for ps in range(self.ps_num) for t in self.tables]
    else:
      parts = arrays
      order = [(t, ps) for t in self.tables for ps in range(self.ps_num)]
    for (table, ps), part in zip(order, parts):
      start = 0
      for f in self.features_of(table):
        shape = self.lists[f, ps].shape
        result[f, ps] = part[start : start + np.prod(shape, dtype=int)].reshape(shape)
        start += np.prod(shape, dtype=int)
    return result

  def row(self, feature: str, example: int) -> list[tuple[int, int]]:
    rows = self.rows[feature]
    if not rows:
      return []
    return rows[0] if feature in self.shared else rows[example]

  def pooled(self, feature: str, start: int, end: int, example: int) -> np.ndarray:
    config = self.configs.feature_configs[feature]
    ids = [self.lists[feature, ps][p, start:end] for ps, p in self.row(feature, example)]
    if config.pooling_type == PoolingType.FIRSTN:
      out = np.zeros([config.max_sequence_length, end - start])
      for position, embedding in enumerate(ids[: config.max_sequence_length]):
        out[position] = embedding
      return out
    total = np.sum(ids, axis=0) if ids else np.zeros(end - start)
    return total / max(1, len(ids)) if config.pooling_type == PoolingType.MEAN else total

  def layouts(self) -> list[np.ndarray]:
    """Returns what the op has to return, computed example by example."""
    outputs = []
    for name in sorted(self.configs.out_configs):
      out = self.configs.out_configs[name]
      slices = [
        np.array([self.pooled(s.feature_name, s.start, s.end, b) for b in range(self.batch_size)])
        for s in out.slice_configs
      ]
      if out.out_type == OutType.NONE:
        outputs += slices
      elif out.out_type == OutType.CONCAT:
        outputs.append(np.concatenate(slices, axis=-1))
      elif out.out_type == OutType.STACK:
        outputs.append(np.stack(slices, axis=1))
      else:
        outputs.append(np.sum(slices, axis=0))
    return outputs

  def uses(self) -> dict:
    """Returns the gradient of ones: how often, by weight, each column of each id is used."""
    grads = {key: np.zeros(value.shape) for key, value in self.lists.items()}
    for out in self.configs.out_configs.values():
      for s in out.slice_configs:
        config = self.configs.feature_configs[s.feature_name]
        for b in range(self.batch_size):
          ids = self.row(s.feature_name, b)
          weight = 1.0 / len(ids) if config.pooling_type == PoolingType.MEAN and ids else 1.0
          if config.pooling_type == PoolingType.FIRSTN:
            ids = ids[: config.max_sequence_length]
          for ps, position in ids:
            grads[s.feature_name, ps][position, s.start : s.end] += weight
    return grads


def worked_example() -> Batch:
  configs = FeatureConfigs()
  add_feature(configs, "fa", "table", PoolingType.SUM, [1, 2])
  add_feature(configs, "fb", "table", PoolingType.MEAN, [1, 2])
  add_feature(configs, "fs", "table", PoolingType.FIRSTN, [2], 2)
  add_layout(configs, "bias", OutType.ADDN, [("fa", 0, 1), ("fb", 0, 1)], [[-1, 1]])
  add_layout(configs, "none", OutType.NONE, [("fb", 1, 3), ("fa", 0, 1)], [[-1, 2], [-1, 1]])
  add_layout(configs, "seq", OutType.NONE, [("fs", 0, 2)], [[-1, 2, 2]])
  add_layout(configs, "stk", OutType.STACK, [("fa", 1, 3), ("fb", 1, 3)], [[-1, 2, 2]])
  add_layout(configs, "vec", OutType.CONCAT, [("fa", 1, 3), ("fb", 1, 3)], [[-1, 4]])
  return Batch(
    configs,
    ps_num=1,
    batch_size=2,
    rows={
      "fa": [[(0, 0), (0, 1)], [(0, 1)]],
      "fb": [[(0, 0), (0, 1)]],
      "fs": [[(0, 0), (0, 1), (0, 2)], [(0, 2)]],
    },
    lists={
      ("fa", 0): np.array([[1, 10, 11], [2, 20, 21]], np.float32),
      ("fb", 0): np.array([[4, 40, 41], [6, 60, 61]], np.float32),
      ("fs", 0): np.array([[100, 101], [200, 201], [300, 301]], np.float32),
    },
    shared={"fb"},
  )


WORKED_LAYOUTS = [
  [[8], [7]],
  [[50, 51], [50, 51]],
  [[3], [2]],
  [[[100, 101], [200, 201]], [[300, 301], [0, 0]]],
  [[[30, 32], [50, 51]], [[20, 21], [50, 51]]],
  [[30, 32, 50, 51], [20, 21, 50, 51]],
]
WORKED_GRADIENT = [2, 2, 2, 4, 4, 4, 1, 3, 3, 1, 3, 3, 1, 1, 1, 1, 1, 1]


def random_batch(
  seed: int, ps_num: int, num_features: int, batch_size: int, max_ids: int = 5
) -> Batch:
  """Two tables; features of different widths, pooling and sharing; empty rows, absent features."""
  rng = np.random.default_rng(seed)
  configs = FeatureConfigs()
  slices = {"bias": [], "vec": [], "ffm": [], "seq": []}
  rows, lists, shared = {}, {}, set()
  for i in range(num_features):
    name = f"f{i:03d}"
    pooling = [PoolingType.SUM, PoolingType.MEAN, PoolingType.FIRSTN][i % 3]
    dims = [1, 4, 8] if i % 2 else [1, 4, 16]
    table = ["table_one", "table_two"][i % 5 == 0]
    add_feature(configs, name, table, pooling, dims, 3 if pooling == PoolingType.FIRSTN else 0)
    if pooling == PoolingType.FIRSTN:
      slices["seq"].append((name, 0, sum(dims)))
    else:
      slices["bias"].append((name, 0, 1))
      slices["vec"].append((name, 5, sum(dims)))
      slices["ffm"].append((name, 1, 5))
    if rng.integers(0, 2):
      shared.add(name)
    for ps in range(ps_num):
      # A server may get no id.
      lists[name, ps] = rng.normal(size=(rng.integers(0, 5), sum(dims))).astype(np.float32)
    known = [(ps, p) for ps in range(ps_num) for p in range(len(lists[name, ps]))]
    num_rows = 1 if name in shared else batch_size
    rows[name] = [
      [known[k] for k in rng.integers(0, len(known), rng.integers(0, max_ids + 1))] if known else []
      for _ in range(num_rows)
    ]
  width = sum(end - start for _, start, end in slices["vec"])
  add_layout(configs, "bias", OutType.ADDN, slices["bias"], [[-1, 1]])
  add_layout(configs, "vec", OutType.CONCAT, slices["vec"], [[-1, width]])
  add_layout(configs, "ffm", OutType.STACK, slices["ffm"], [[-1, len(slices["ffm"]), 4]])
  add_layout(
    configs, "seq", OutType.NONE, slices["seq"], [[-1, 3, end] for _, _, end in slices["seq"]]
  )
  return Batch(configs, ps_num, batch_size, rows, lists, shared)


class LayoutTestCase(tf.test.TestCase):
  def run_tensors(self, tensors, num_threads: int = 2):
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=num_threads)
    with self.session(use_gpu=False, config=config) as sess:
      return sess.run(tensors)

  def forward(self, batch: Batch, version: int, **changes) -> list[tf.Tensor]:
    args = {**batch.arguments(version), **changes}
    return distribution_ops.fused_embedding_to_layout(
      feature_cfgs=batch.configs, version=version, **args
    )

  def backward(self, batch: Batch, version: int, grads, **changes) -> list[tf.Tensor]:
    args = {**batch.arguments(version), **changes}
    for name in ("nfl_size", "feature_size", "fid_size", "emb_size"):
      args.pop(name, None)
    return distribution_ops.fused_embedding_to_layout_grad(
      feature_cfgs=batch.configs, layout_tensors_grad=grads, version=version, **args
    )

  def assert_invalid(self, tensors, *words: str):
    with self.assertRaises(tf.errors.InvalidArgumentError) as caught:
      self.run_tensors(tensors)
    for word in words:
      self.assertIn(word, caught.exception.message)


class WorkedExampleTest(LayoutTestCase):
  def test_offsets_are_those_of_the_example(self):
    batch = worked_example()
    self.assertAllEqual(batch.fid_offset(3), [0, 3, 3, 6, 9, 12, 14, 16, 16])
    self.assertAllEqual(batch.feature_offset(), [0, 2, 3, 5, 8, 9])
    self.assertAllEqual(batch.nfl_offset(parser_like=False), [0, 2 | SHARED, 3, 5])
    pairs = [(0, 0), (0, 1), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 2)]
    self.assertAllEqual(batch.fid_offset(2), [high << 32 | low for high, low in pairs])
    self.assertEqual(batch.arguments(2)["fid_list_row_split"], [[0, 2, 4, 7]])

  def test_forward(self):
    batch = worked_example()
    for version in VERSIONS:
      outputs = self.forward(batch, version)
      self.assertEqual(
        [out.shape.as_list() for out in outputs],
        [[None, 1], [None, 2], [None, 1], [None, 2, 2], [None, 2, 2], [None, 4]],
      )
      for got, want in zip(self.run_tensors(outputs), WORKED_LAYOUTS):
        self.assertAllEqual(got, want)

  def test_backward(self):
    batch = worked_example()
    ones = [tf.ones(np.shape(want)) for want in WORKED_LAYOUTS]
    for version in VERSIONS:
      explicit = self.backward(batch, version, ones)
      args = batch.arguments(version)
      registered = tf.gradients(self.forward(batch, version, **args), args["embeddings_list"])
      for grads in self.run_tensors([explicit, registered]):
        self.assertEqual(len(grads), len(args["embeddings_list"]))
        flat = np.concatenate([grad.reshape(-1) for grad in grads])
        self.assertAllEqual(flat, WORKED_GRADIENT)

  def test_offsets_without_end_entries(self):
    batch = worked_example()
    full_rows, full_starts = batch.feature_offset(), batch.nfl_offset(parser_like=False)
    for rows in (full_rows, full_rows[:-1]):
      for starts in (full_starts, full_starts[:-1], batch.nfl_offset()):
        if starts[-1] > len(rows):
          continue
        outputs = self.forward(batch, 3, feature_offset=rows, nfl_offset=starts)
        for got, want in zip(self.run_tensors(outputs), WORKED_LAYOUTS):
          self.assertAllEqual(got, want)

  def test_batch_size_of_any_rank(self):
    batch = worked_example()
    for size in (2, [2], [[2]]):
      outputs = self.forward(batch, 3, batch_size=np.array(size, np.int32))
      self.assertAllEqual(self.run_tensors(outputs[0]), WORKED_LAYOUTS[0])

  def test_variant_types(self):
    batch = worked_example()
    for variant_type in ("example", "example_batch", "examplebatch", "instance"):
      outputs = self.forward(batch, 3, variant_type=variant_type)
      attr = outputs[0].op.get_attr("variant_type").decode()
      self.assertEqual(attr, variant_type.replace("examplebatch", "example_batch"))
    with self.assertRaises(AssertionError):
      self.forward(batch, 3, variant_type="tfrecord")

  def test_row_length_belongs_to_version_4(self):
    batch = worked_example()
    length = np.array([18], np.int32)
    for function in (self.forward, lambda b, v, **kw: self.backward(b, v, [], **kw)):
      with self.assertRaises(AssertionError):
        function(batch, 3, fid_list_emb_row_lenth=length)
      with self.assertRaises(AssertionError):
        function(batch, 4, fid_list_emb_row_lenth=None)

  def test_gradient_scale(self):
    batch = worked_example()
    ones = [tf.ones(np.shape(want)) for want in WORKED_LAYOUTS]
    grads = self.backward(batch, 3, ones, layout_tensors_grad_scale=tf.constant(0.5))
    self.assertAllEqual(self.run_tensors(grads)[0], np.array(WORKED_GRADIENT) / 2)

  def test_embeddings_may_have_any_rank(self):
    batch = worked_example()
    flat = batch.blocks()[0]
    matrix = tf.constant(flat.reshape(9, 2))
    outputs = self.forward(batch, 3, embeddings_list=[matrix])
    grad = tf.gradients(outputs, matrix)[0]
    self.assertAllEqual(self.run_tensors(outputs[0]), WORKED_LAYOUTS[0])
    self.assertAllEqual(self.run_tensors(grad), np.reshape(WORKED_GRADIENT, [9, 2]))


class RandomBatchTest(LayoutTestCase):
  def check_forward(self, batch: Batch, version: int, **changes):
    outputs = self.run_tensors(self.forward(batch, version, **changes))
    wants = batch.layouts()
    self.assertEqual(len(outputs), len(wants))
    for got, want in zip(outputs, wants):
      self.assertAllClose(got, want, rtol=1e-4, atol=1e-5)

  def test_forward(self):
    for seed, (ps_num, num_features, batch_size) in enumerate(
      [(1, 3, 1), (2, 6, 4), (7, 12, 17), (5, 45, 256)]
    ):
      batch = random_batch(seed, ps_num, num_features, batch_size)
      for version in VERSIONS:
        self.check_forward(batch, version)

  def test_forward_large(self):
    self.check_forward(random_batch(10, 5, 199, 256), 3)

  def test_empty_batch(self):
    batch = random_batch(11, 2, 6, 0)
    shapes = [[0, 1], [0, 4, 4], [0, 3, 21], [0, 3, 13], [0, 48]]
    for version in VERSIONS:
      outputs = self.run_tensors(self.forward(batch, version))
      self.assertEqual([list(out.shape) for out in outputs], shapes)

  def test_feature_without_rows(self):
    batch = random_batch(12, 2, 9, 5)
    batch.shared = set()
    for i, f in enumerate(batch.features):
      batch.rows[f] = [] if i in (0, 4, 8) else (batch.rows[f] * 5)[:5]
    # Behind the last feature the end entry would look like a row.
    self.check_forward(batch, 3, nfl_offset=batch.nfl_offset(parser_like=False))
    self.check_forward(batch, 3)

  def test_parallel_flag_and_threads_do_not_change_a_bit(self):
    batch = random_batch(13, 3, 30, 2000, max_ids=9)
    forward = [
      self.run_tensors(self.forward(batch, 3, parallel_flag=flag), threads)
      for flag, threads in ((0, 1), (1, 1), (0, 4), (1, 4))
    ]
    upstream = [tf.random.stateless_normal(out.shape, [1, i]) for i, out in enumerate(forward[0])]
    backward = [
      self.run_tensors(self.backward(batch, 3, upstream, parallel_flag=flag), threads)
      for flag, threads in ((0, 1), (1, 1), (0, 4), (1, 4))
    ]
    for results in (forward, backward):
      for other in results[1:]:
        for got, want in zip(other, results[0]):
          self.assertAllEqual(got, want)

  def test_gradient_counts_the_uses_of_every_id(self):
    for seed, (ps_num, num_features, batch_size) in enumerate([(1, 3, 2), (3, 29, 64), (7, 9, 5)]):
      batch = random_batch(20 + seed, ps_num, num_features, batch_size)
      want = batch.uses()
      for version in VERSIONS:
        args = batch.arguments(version)
        outputs = self.forward(batch, version, **args)
        grads = self.run_tensors(tf.gradients(outputs, args["embeddings_list"]))
        for key, grad in batch.per_feature(version, grads).items():
          self.assertAllClose(grad, want[key], rtol=1e-4)
          # Every column is used by exactly one slice, so all columns of an id are the same bits.
          if grad.size:
            self.assertAllEqual(grad, np.repeat(grad[:, :1], grad.shape[1], axis=1))

  def test_two_features_on_one_embedding(self):
    # Not what the parser emits, but allowed: both read and update the same floats.
    configs = FeatureConfigs()
    add_feature(configs, "a", "t", PoolingType.SUM, [2])
    add_feature(configs, "b", "t", PoolingType.SUM, [2])
    add_layout(configs, "v", OutType.CONCAT, [("a", 0, 2), ("b", 0, 2)], [[-1, 4]])
    embedding = tf.constant([1.0, 2.0, 3.0])
    outputs = distribution_ops.fused_embedding_to_layout(
      [embedding],
      None,
      fid_offset=np.array([0, 1], np.uint64),
      feature_offset=np.array([0, 1, 2], np.int32),
      nfl_offset=np.array([0, 1, 2], np.uint32),
      batch_size=1,
      variant_type="instance",
      feature_cfgs=configs,
      ps_num=1,
    )
    grad = tf.gradients(outputs, embedding)[0]
    self.assertAllEqual(self.run_tensors(outputs[0]), [[1, 2, 2, 3]])
    self.assertAllEqual(self.run_tensors(grad), [1, 2, 1])

  def test_gradient_against_finite_differences(self):
    batch = random_batch(30, 2, 6, 3)
    weights = [
      np.random.default_rng(i).normal(size=want.shape) for i, want in enumerate(batch.layouts())
    ]
    for version in VERSIONS:
      args = batch.arguments(version)
      embeddings = args.pop("embeddings_list")
      outputs = self.forward(batch, version, embeddings_list=embeddings)
      loss = tf.add_n([tf.reduce_sum(out * weight) for out, weight in zip(outputs, weights)])
      with self.session(use_gpu=False) as sess, self.subTest(version=version):
        values, grads = sess.run([embeddings, tf.gradients(loss, embeddings)])
        places = [(j, i) for j, value in enumerate(values) for i in np.ndindex(value.shape)]
        for j, i in np.random.default_rng(version).permutation(np.array(places, object))[:40]:
          step = np.zeros_like(values[j])
          step[i] = 0.5
          plus = sess.run(loss, {embeddings[j]: values[j] + step})
          minus = sess.run(loss, {embeddings[j]: values[j] - step})
          self.assertAllClose(plus - minus, grads[j][i], rtol=1e-3, atol=1e-3)


class RequestsTest(LayoutTestCase):
  def merged(self, batches: list[Batch]) -> dict:
    parts = [batch.arguments(5) for batch in batches]
    args = {
      name: np.concatenate([part[name] for part in parts])
      for name in (
        "fid_offset",
        "feature_offset",
        "nfl_offset",
        "batch_size",
        "nfl_size",
        "feature_size",
        "fid_size",
        "emb_size",
      )
    }
    args["embeddings_list"] = [
      tf.constant(np.concatenate(blocks)) for blocks in zip(*(b.blocks() for b in batches))
    ]
    return args

  def batches(self) -> list[Batch]:
    configs = random_batch(40, 2, 6, 1).configs
    batches = [random_batch(40 + i, 2, 6, size) for i, size in enumerate((3, 1, 0, 40))]
    for batch in batches:
      self.assertEqual(batch.configs, configs)
    return batches

  def test_requests_are_concatenated(self):
    batches = self.batches()
    outputs = self.run_tensors(self.forward(batches[0], 5, **self.merged(batches)))
    for i, got in enumerate(outputs):
      want = np.concatenate([batch.layouts()[i].reshape(-1, *got.shape[1:]) for batch in batches])
      self.assertAllClose(got, want, rtol=1e-4, atol=1e-5)

  def test_sizes_must_add_up(self):
    batches = self.batches()
    for name in ("nfl_size", "feature_size", "fid_size", "emb_size"):
      args = self.merged(batches)
      args[name] = args[name] + np.eye(1, len(args[name]), dtype=np.int32)[0]
      self.assert_invalid(self.forward(batches[0], 5, **args), name, "adds up to")
      args[name] = args[name] * 0 - 1
      self.assert_invalid(self.forward(batches[0], 5, **args), name, "-1")
      args[name] = args[name][1:]
      self.assert_invalid(self.forward(batches[0], 5, **args), name)

  def test_an_error_names_its_request(self):
    batches = self.batches()
    args = self.merged(batches)
    args["batch_size"] = args["batch_size"] + np.array([0, 0, 0, -30], np.int32)
    self.assert_invalid(self.forward(batches[0], 5, **args), "request 3", "batch_size = 10")
    args["batch_size"] = args["batch_size"] * np.array([1, -100, 1, 1], np.int32)
    self.assert_invalid(self.forward(batches[0], 5, **args), "request 1: batch_size is -")

  def test_gradient_takes_one_request(self):
    batches = self.batches()
    args = self.merged(batches)
    grads = tf.gradients(self.forward(batches[0], 5, **args), args["embeddings_list"])
    self.assert_invalid(grads, "batch_size", "4", "1")


class FirstNTest(LayoutTestCase):
  def check(self, out_type, shape, slices):
    batch = random_batch(50, 2, 9, 4)
    batch.configs.ClearField("out_configs")
    add_layout(batch.configs, "out", out_type, slices, [shape])
    args = batch.arguments(3)
    outputs = self.forward(batch, 3, **args)
    grads = self.run_tensors(tf.gradients(outputs, args["embeddings_list"]))
    got = self.run_tensors(outputs[0])
    self.assertAllClose(got, batch.layouts()[0], rtol=1e-5)
    want = batch.uses()
    for key, grad in batch.per_feature(3, grads).items():
      self.assertAllClose(grad, want[key])

  def test_concat(self):
    self.check(OutType.CONCAT, [-1, 3, 7], [("f002", 0, 2), ("f005", 1, 5), ("f008", 3, 4)])

  def test_stack(self):
    self.check(OutType.STACK, [-1, 3, 3, 2], [("f002", 0, 2), ("f005", 1, 3), ("f008", 3, 5)])


class BadInputTest(LayoutTestCase):
  def test_offsets(self):
    batch = worked_example()
    fid = batch.fid_offset(3)
    rows, starts = batch.feature_offset(), batch.nfl_offset()

    def fids(position: int, value: int) -> np.ndarray:
      changed = fid.copy()
      changed[position] = value
      return changed

    for changes, words in (
      (dict(fid_offset=fids(0, 1 << 32)), ("fid_offset[0] = (1, 0)", "beyond the last of 1")),
      (dict(fid_offset=fids(0, 2**64 - 1)), ("fid_offset[0]",)),
      (dict(fid_offset=fids(0, 16)), ("fid_offset[0]", "16 to 19", "18 floats")),
      (dict(fid_offset=fids(8, 17)), ("fid_offset[8]", "17 to 19")),
      (dict(fid_offset=fids(0, 2**32 - 1)), ("fid_offset[0]",)),
      (dict(fid_offset=fid[:-1]), ("feature_offset[5] is 9", "8")),
      (dict(feature_offset=np.array([0, 3, 2, 5, 8, 9], np.int32)), ("feature_offset[2] is 2",)),
      (dict(feature_offset=np.array([-1, 2, 3, 5, 8, 9], np.int32)), ("feature_offset[0] is -1",)),
      (dict(nfl_offset=np.array([0, 3 | SHARED, 2, 5], np.uint32)), ("nfl_offset[2] is 2",)),
      (dict(nfl_offset=np.array([0, 2 | SHARED, 3, 9], np.uint32)), ("nfl_offset[3] is 9", "6")),
      (dict(nfl_offset=starts[:2]), ("nfl_offset has 2 entries", "3 features")),
      (dict(nfl_offset=np.array([0, 1, 3, 6], np.uint32)), ("'fa' has 1 rows", "batch_size = 2")),
      (dict(batch_size=-1), ("batch_size is -1",)),
      (dict(batch_size=1), ("'fa' has 2 rows", "batch_size = 1")),
      (dict(batch_size=np.array([2, 2], np.int32)), ("batch_size", "2", "1")),
      (dict(ps_num=2), ("embeddings_list is 1", "= 2")),
      (dict(ps_num=0), ("ps_num is 0",)),
      (dict(embeddings_list=[tf.zeros([17])]), ("17 floats",)),
      (dict(fid_offset=fid.reshape(3, 3)), ("fid_offset",)),
      (dict(feature_offset=rows.reshape(2, 3)), ("feature_offset",)),
    ):
      self.assert_invalid(self.forward(batch, 3, **changes), *words)
      # Gradients of the batch that is asked for: a GPU looks at their shapes first.
      num_rows = 1 if np.array_equal(changes.get("batch_size"), 1) else 2
      ones = [tf.ones(np.shape(want[:num_rows])) for want in WORKED_LAYOUTS]
      self.assert_invalid(self.backward(batch, 3, ones, **changes), *words)

  def test_unused_ids_are_not_followed(self):
    # Ids behind the last row belong to no example; whatever they hold, nothing reads there.
    batch = worked_example()
    fid = np.concatenate([batch.fid_offset(3), np.full(8, 2**64 - 1, np.uint64)])
    outputs = self.forward(batch, 3, fid_offset=fid, nfl_offset=batch.nfl_offset(parser_like=False))
    for got, want in zip(self.run_tensors(outputs), WORKED_LAYOUTS):
      self.assertAllEqual(got, want)

  def test_version_1(self):
    batch = worked_example()
    fid = batch.fid_offset(1)
    fid[0] = 2
    self.assert_invalid(self.forward(batch, 1, fid_offset=fid), "fid_offset[0]", "6 floats")
    fid[0] = 2 << 32
    self.assert_invalid(self.forward(batch, 1, fid_offset=fid), "rows of 2")
    flat = [tf.zeros([6]), tf.zeros([6]), tf.zeros([6])]
    self.assert_invalid(self.forward(batch, 1, embeddings_list=flat), "embeddings_list")

  def test_version_2(self):
    batch = worked_example()
    for split, words in (
      ([0, 2, 4], ("is 3", "= 4")),
      ([0, 2, 4, 8], ("'fs' has 4 rows", "6")),
      ([0, 2, 4, 6], ("is 18", "= 16")),
      ([0, 4, 2, 7], ("decrease",)),
      ([0, 2, 4, 2**62], ("'fs'",)),
    ):
      self.assert_invalid(self.forward(batch, 2, fid_list_row_split=[split]), *words)
    fid = batch.fid_offset(2)
    fid[0] = 1 << 32
    self.assert_invalid(
      self.forward(batch, 2, fid_offset=fid), "feature 'fa'", "block of feature 'fb'"
    )

  def test_version_4(self):
    batch = worked_example()
    for length, words in (
      ([17], ("17", "18")),
      ([9, 9], ("is 2", "= 1")),
      ([-18], ("-18",)),
    ):
      lengths = np.array(length, np.int32)
      self.assert_invalid(self.forward(batch, 4, fid_list_emb_row_lenth=lengths), *words)
    two = [tf.zeros([9]), tf.zeros([9])]
    self.assert_invalid(self.forward(batch, 4, embeddings_list=two), "is 2", "= 1")

  def test_gradient_shapes(self):
    batch = worked_example()
    ones = [tf.ones(np.shape(want)) for want in WORKED_LAYOUTS]
    self.assert_invalid(self.backward(batch, 3, ones[:-1]), "is 5", "= 6")
    ones[1] = tf.ones([2, 3])
    self.assert_invalid(self.backward(batch, 3, ones), "tensors_grad[1]", "[2,3]", "[2,2]")

  def test_configuration(self):
    def change(edit) -> Batch:
      batch = worked_example()
      edit(batch.configs)
      return batch

    def shape(layout: str, *dims: int):
      def edit(configs):
        configs.out_configs[layout].shape[0].dims[:] = dims

      return edit

    def slice_end(configs):
      configs.out_configs["vec"].slice_configs[0].end = 4

    def slice_feature(configs):
      configs.out_configs["vec"].slice_configs[0].feature_name = "fx"

    def add_n_of_first_n(configs):
      configs.out_configs["bias"].slice_configs[0].feature_name = "fs"

    def mixed(configs):
      configs.out_configs["vec"].slice_configs[0].feature_name = "fs"
      configs.out_configs["vec"].slice_configs[0].start = 0
      configs.out_configs["vec"].slice_configs[0].end = 2

    def stack_width(configs):
      configs.out_configs["stk"].slice_configs[0].start = 0

    def pooling(configs):
      configs.feature_configs["fa"].pooling_type = 2

    def no_length(configs):
      configs.feature_configs["fs"].max_sequence_length = 0

    def no_width(configs):
      configs.feature_configs["fa"].slice_dims[:] = [0, 3]

    def one_shape_less(configs):
      del configs.out_configs["none"].shape[1]

    for edit, words in (
      (shape("vec", -1, 5), "'vec'.*5.*4"),
      (shape("vec", -1, 0), "'vec'.*0"),
      (shape("vec", -2, 4), "'vec'.*-2"),
      (shape("seq", -1, 3, 2), "'seq'.*6.*4"),
      (slice_end, r"\[1, 4\).*'fa'.*3"),
      (slice_feature, "unknown feature 'fx'"),
      (add_n_of_first_n, "ADDN cannot hold FIRSTN feature 'fs'"),
      (mixed, "'fb' has 0 FIRSTN positions, 'fs' has 2"),
      (stack_width, "width 2, want 3"),
      (pooling, "pooling_type of feature 'fa' is 2"),
      (no_length, "max_sequence_length.*'fs' is 0"),
      (no_width, "slice_dims of feature 'fa'"),
      (one_shape_less, "1 shapes, want 2"),
    ):
      with self.assertRaisesRegex(ValueError, words):
        self.forward(change(edit), 3)

  def test_fixed_batch(self):
    batch = worked_example()
    batch.configs.out_configs["vec"].shape[0].dims[0] = 2
    self.assertAllEqual(self.run_tensors(self.forward(batch, 3))[5], WORKED_LAYOUTS[5])
    batch.configs.out_configs["vec"].shape[0].dims[0] = 3
    self.assert_invalid(self.forward(batch, 3), "'vec'", "3", "2")

  def test_configuration_that_is_no_proto(self):
    batch = worked_example()
    args = batch.arguments(3)
    with self.assertRaisesRegex(ValueError, "no serialized FeatureConfigs"):
      distribution_ops.gen_distribution_ops.monolith_embedding_to_layout_v3(
        args["embeddings_list"],
        args["fid_offset"],
        args["feature_offset"],
        args["nfl_offset"],
        args["batch_size"],
        num_out=1,
        variant_type="example",
        feature_cfgs=b"\xff\xff\xff",
        ps_num=1,
      )


if __name__ == "__main__":
  tf.test.main()
