"""From serialized examples to layouts and back: parser, sharding, lookup and the fused layout ops.

Everything is compared with a model in NumPy that knows the examples and nothing of offsets.
"""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from idl.matrix.proto import example_pb2
from idl.matrix.proto.example_pb2 import OutType, PoolingType
from monolith.native_training import distribution_ops
from monolith.native_training.data import parsers

tf.compat.v1.disable_v2_behavior()

MAX_LENGTH = 3
INPUT_TYPES = ("examplebatch", "example")
VERSIONS = (2, 3, 4, 5)


def embedding(fids: np.ndarray, width: int) -> np.ndarray:
  """Returns what a table would answer: `[n, width]`, different for every id and column."""
  phase = (np.asarray(fids, np.int64) % 100_003)[:, None] * (1.0 + np.arange(width))
  return np.sin(phase).astype(np.float32)


class Samples:
  """Random examples: per feature and example a list of ids, and their configuration.

  Two tables, in which widths 13 and 21 mix; features are pooled by sum, mean and first n, in turn.
  Half of the features of an example batch are shared. Some rows are empty, some features absent.

  Args:
    seed: the random numbers' seed.
    num_features: how many.
    batch_size: number of examples.
    input_type: `"example"` or `"examplebatch"`.
  """

  def __init__(self, seed: int, num_features: int, batch_size: int, input_type: str):
    rng = np.random.default_rng(seed)
    self.batch_size = batch_size
    self.input_type = input_type
    self.configs = example_pb2.FeatureConfigs()
    self.rows: dict[str, list[list[int]]] = {}
    self.shared: set[str] = set()
    slices = {"bias": [], "ffm": [], "seq": [], "vec": []}
    for i in range(num_features):
      name = f"f{i:03d}"
      config = self.configs.feature_configs[name]
      config.table = "table_two" if i % 5 == 0 else "table_one"
      config.slice_dims.extend([1, 4, 8] if i % 2 else [1, 4, 16])
      config.pooling_type = (PoolingType.SUM, PoolingType.MEAN, PoolingType.FIRSTN)[i % 3]
      width = sum(config.slice_dims)
      if config.pooling_type == PoolingType.FIRSTN:
        config.max_sequence_length = MAX_LENGTH
        slices["seq"].append((name, 0, width))
      else:
        slices["bias"].append((name, 0, 1))
        slices["ffm"].append((name, 1, 5))
        slices["vec"].append((name, 5, width))
      if input_type == "examplebatch" and i % 2 == 0:
        self.shared.add(name)
      if i % 17 == 16:
        continue
      known = (i << 48) + rng.integers(0, 1 << 40, 20)
      self.rows[name] = [
        rng.choice(known, rng.integers(0, 6)).tolist()
        for _ in range(1 if name in self.shared else batch_size)
      ]
    width = sum(end - start for _, start, end in slices["vec"])
    for name, out_type, shapes in (
      ("bias", OutType.ADDN, [[-1, 1]]),
      ("ffm", OutType.STACK, [[-1, len(slices["ffm"]), 4]]),
      ("seq", OutType.NONE, [[-1, MAX_LENGTH, end] for _, _, end in slices["seq"]]),
      ("vec", OutType.CONCAT, [[-1, width]]),
    ):
      out = self.configs.out_configs[name]
      out.out_type = out_type
      for feature, start, end in slices[name]:
        out.slice_configs.add(feature_name=feature, start=start, end=end)
      for shape in shapes:
        out.shape.add(dims=shape)

  def width(self, feature: str) -> int:
    return sum(self.configs.feature_configs[feature].slice_dims)

  def tables(self) -> list[str]:
    return sorted({config.table for config in self.configs.feature_configs.values()})

  def features_of(self, table: str) -> list[str]:
    configs = self.configs.feature_configs
    return sorted(name for name in configs if configs[name].table == table)

  def row(self, feature: str, example: int) -> list[int]:
    rows = self.rows.get(feature, [[]])
    return rows[0] if len(rows) == 1 else rows[example]

  def serialized(self) -> bytes | list[bytes]:
    if self.input_type == "examplebatch":
      batch = example_pb2.ExampleBatch(batch_size=self.batch_size)
      for name, rows in self.rows.items():
        column = batch.named_feature_list.add(name=name)
        if name in self.shared:
          column.type = example_pb2.SHARED
        for row in rows:
          column.feature.add().fid_v2_list.value.extend(row)
      return batch.SerializeToString()
    examples = []
    for b in range(self.batch_size):
      example = example_pb2.Example()
      for name, rows in self.rows.items():
        example.named_feature.add(name=name).feature.fid_v2_list.value.extend(rows[b])
      examples.append(example.SerializeToString())
    return examples

  @functools.cached_property
  def layouts(self) -> list[np.ndarray]:
    """The layouts' tensors, by layout name."""
    outputs = []
    for name in sorted(self.configs.out_configs):
      out = self.configs.out_configs[name]
      slices = [self._pooled(s.feature_name)[..., s.start : s.end] for s in out.slice_configs]
      if out.out_type == OutType.NONE:
        outputs += slices
      elif out.out_type == OutType.CONCAT:
        outputs.append(np.concatenate(slices, axis=-1))
      elif out.out_type == OutType.STACK:
        outputs.append(np.stack(slices, axis=1))
      else:
        outputs.append(np.sum(slices, axis=0))
    return outputs

  def _pooled(self, feature: str) -> np.ndarray:
    """Returns all columns of a feature, `[batch, width]` or `[batch, n, width]`."""
    width = self.width(feature)
    pooling = self.configs.feature_configs[feature].pooling_type
    result = np.zeros(
      [self.batch_size, MAX_LENGTH, width]
      if pooling == PoolingType.FIRSTN
      else [self.batch_size, width]
    )
    for b in range(self.batch_size):
      rows = embedding(self.row(feature, b), width)
      if pooling == PoolingType.FIRSTN:
        result[b, : len(rows)] = rows[:MAX_LENGTH]
      elif len(rows):
        result[b] = rows.sum(axis=0) / (len(rows) if pooling == PoolingType.MEAN else 1)
    return result

  def uses(self) -> dict[tuple[str, int], float]:
    """Returns how often each id of each feature is used by an example."""
    result: dict[tuple[str, int], float] = {}
    for name, config in self.configs.feature_configs.items():
      for b in range(self.batch_size):
        fids = self.row(name, b)
        weight = 1 / len(fids) if config.pooling_type == PoolingType.MEAN and fids else 1.0
        if config.pooling_type == PoolingType.FIRSTN:
          fids = fids[:MAX_LENGTH]
        for fid in fids:
          result[name, fid] = result.get((name, fid), 0.0) + weight
    return result


@functools.cache
def make_samples(seed: int, num_features: int, batch_size: int, input_type: str) -> Samples:
  """Returns samples, and what is expected of them, that serve all versions."""
  return Samples(seed, num_features, batch_size, input_type)


class Sharded:
  """Holds what the parser made of samples, and the embeddings that tables would answer."""

  def __init__(self, samples: Samples, ps_num: int, version: int, unique: bool, test):
    self.samples, self.ps_num, self.version = samples, ps_num, version
    with tf.Graph().as_default(), parsers.ParserCtx(enable_fused_layout=True):
      parse = (
        parsers.parse_examples if samples.input_type == "example" else parsers.parse_example_batch
      )
      key = parsers.ParserCtx.sharding_sparse_fids_sparse_features_key
      out = parsers.sharding_sparse_fids(
        parse(samples.serialized(), [], [], [], [], [], [])[key],
        ps_num,
        samples.configs,
        unique,
        samples.input_type,
        parallel_flag=0,
        fid_list_ret_list=True,
        version=version,
      )
      with test.session(use_gpu=False) as session:
        out = session.run([part if part is not None else tf.constant(0) for part in out])
    self.fid_offset, self.feature_offset, self.nfl_offset, self.batch_size = out[1:5]
    self.sizes = out[5:9]
    fid_lists, row_splits, self.emb_row_lenth = out[0], out[9], out[11]
    # (table, server) in the order of the lists.
    self.keys = [(table, ps) for table in samples.tables() for ps in range(ps_num)]
    if version == 4:
      self.keys.sort(key=lambda key: key[1])
      fid_lists = np.split(fid_lists, np.cumsum(out[12])[:-1])
      ends = np.cumsum([len(samples.features_of(table)) + 1 for table, _ in self.keys])
      row_splits = np.split(row_splits, ends[:-1])
    self.row_splits = row_splits
    self.fids = {
      (feature, ps): fids[splits[f] : splits[f + 1]]
      for (table, ps), fids, splits in zip(self.keys, fid_lists, row_splits)
      for f, feature in enumerate(samples.features_of(table))
    }

  def embeddings(self) -> list[np.ndarray]:
    blocks = [
      np.concatenate(
        [
          embedding(self.fids[feature, ps], self.samples.width(feature)).reshape(-1)
          for feature in self.samples.features_of(table)
        ]
      )
      for table, ps in self.keys
    ]
    return [np.concatenate(blocks)] if self.version == 4 else blocks

  def arguments(self) -> dict:
    """Returns what the op and its gradient have in common."""
    version = self.version
    return dict(
      embeddings_list=[tf.constant(block) for block in self.embeddings()],
      fid_list_row_split=[splits.tolist() for splits in self.row_splits] if version == 2 else None,
      fid_offset=self.fid_offset,
      feature_offset=self.feature_offset,
      nfl_offset=self.nfl_offset,
      batch_size=self.batch_size,
      variant_type=self.samples.input_type,
      feature_cfgs=self.samples.configs,
      ps_num=self.ps_num,
      fid_list_emb_row_lenth=self.emb_row_lenth if version == 4 else None,
      version=version,
    )

  def layouts(self) -> list[tf.Tensor]:
    names = ("nfl_size", "feature_size", "fid_size", "emb_size")
    sizes = dict(zip(names, self.sizes)) if self.version == 5 else {}
    return distribution_ops.fused_embedding_to_layout(**self.arguments(), **sizes)

  def grads(self, layout_grads: list[np.ndarray]) -> list[tf.Tensor]:
    return distribution_ops.fused_embedding_to_layout_grad(
      **self.arguments(), layout_tensors_grad=[tf.constant(g, tf.float32) for g in layout_grads]
    )

  def per_feature(self, blocks: list[np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """Cuts arrays like `embeddings` into (feature, server) -> `[ids, width]`."""
    flat, start, result = np.concatenate(blocks), 0, {}
    for table, ps in self.keys:
      for feature in self.samples.features_of(table):
        shape = (len(self.fids[feature, ps]), self.samples.width(feature))
        result[feature, ps] = flat[start : start + shape[0] * shape[1]].reshape(shape)
        start += shape[0] * shape[1]
    assert start == len(flat)
    return result


class ParserToLayoutTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(input_type=INPUT_TYPES, version=VERSIONS)
  def test_forward(self, input_type, version):
    samples = make_samples(1, 199, 256, input_type)
    sharded = Sharded(samples, 5, version, unique=True, test=self)
    want = samples.layouts

    with tf.Graph().as_default(), self.session(use_gpu=False) as session:
      got = session.run(sharded.layouts())
    self.assertEqual(len(got), len(want))
    for tensor, expected in zip(got, want):
      self.assertAllClose(tensor, expected, rtol=1e-4, atol=1e-5)

  @parameterized.product(input_type=INPUT_TYPES, version=VERSIONS)
  def test_backward(self, input_type, version):
    samples = make_samples(2, 29, 64, input_type)
    sharded = Sharded(samples, 3, version, unique=True, test=self)
    ones = [np.ones(layout.shape) for layout in samples.layouts]

    with tf.Graph().as_default(), self.session(use_gpu=False) as session:
      grads = sharded.per_feature(session.run(sharded.grads(ones)))
    uses = samples.uses()
    seen = set()
    for (feature, ps), fids in sharded.fids.items():
      for fid, grad in zip(fids, grads[feature, ps]):
        # The columns of an id are summed in the same order, so not a bit may differ.
        self.assertTrue((grad == grad[0]).all(), (feature, fid, grad))
        self.assertNear(grad[0], uses.get((feature, fid), 0.0), 1e-4 * (1 + grad[0]))
        seen.add((feature, fid))
    self.assertContainsSubset(uses, seen)

  @parameterized.product(input_type=INPUT_TYPES, ps_num=(1, 7))
  def test_repeated_ids_give_the_same_layouts(self, input_type, ps_num):
    samples = make_samples(3, 12, 9, input_type)
    for unique in (False, True):
      for version in VERSIONS:
        sharded = Sharded(samples, ps_num, version, unique, test=self)
        with tf.Graph().as_default(), self.session(use_gpu=False) as session:
          got = session.run(sharded.layouts())
        for tensor, expected in zip(got, samples.layouts):
          self.assertAllClose(tensor, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
  tf.test.main()
