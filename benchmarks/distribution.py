"""Speed of the distribution ops, as ratios against plain TensorFlow measured in the same run.

  python benchmarks/distribution.py [--repeats 15] [--only NAME ...] [--threads 2]

Both sides of a row compute the same tensors, which is checked first.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # The other side of the comparison runs there, too.

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from ratio_table import Row, interleaved_medians, print_rows  # noqa: E402

from idl.matrix.proto.example_pb2 import FeatureConfigs, OutType, PoolingType  # noqa: E402
from monolith.native_training import distribution_ops  # noqa: E402

tf.compat.v1.disable_eager_execution()

NUM_IDS = 1_000_000
NUM_SERVERS = 4


def zipf_ids(rng: np.random.Generator, size: int) -> np.ndarray:
  """Ids as a feature sees them: a few very frequent ones and a long tail, spread over int64."""
  rank = rng.zipf(1.2, size) % 10_000_000
  return (rank.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)).astype(np.int64)


class Bench:
  """A graph whose inputs are variables, run as built on a fixed number of threads."""

  def __init__(self, threads: int):
    config = tf.compat.v1.ConfigProto(
      intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
    )
    # The optimizer would remove ops whose results are not read.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    self._graph = tf.Graph()
    self._context = self._graph.as_default()
    self._context.__enter__()
    self.session = tf.compat.v1.Session(graph=self._graph, config=config)
    self._feeds = {}

  def __enter__(self) -> Bench:
    return self

  def __exit__(self, *args) -> None:
    self.session.close()
    self._context.__exit__(*args)

  def input(self, value: np.ndarray) -> tf.Tensor:
    placeholder = tf.compat.v1.placeholder(value.dtype, value.shape)
    variable = tf.Variable(placeholder)
    self._feeds[placeholder] = value
    return variable.read_value()

  def initialize(self) -> None:
    self.session.run(tf.compat.v1.global_variables_initializer(), self._feeds)

  def check_equal(self, ours, peer, rtol: float = 0.0) -> None:
    for got, want in zip(*self.session.run([ours, peer])):
      np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)

  def medians(self, fetches: list, repeats: int) -> list[float]:
    """Returns the median seconds of computing each of `fetches`, a tensor or a list of them."""
    runs = [self.session.make_callable(tf.group(*tf.nest.flatten(fetch))) for fetch in fetches]
    return interleaved_medians(runs, repeats)


def split(repeats: int, threads: int) -> list[Row]:
  """Sends 1M ids to 4 servers and a row of 8 floats per id back, in the order of the batch."""
  rng = np.random.default_rng(0)
  batch = zipf_ids(rng, NUM_IDS)
  with Bench(threads) as bench:
    ids = bench.input(batch)
    shards = bench.input(batch % NUM_SERVERS)
    shards32 = bench.input((batch % NUM_SERVERS).astype(np.int32))
    rows = np.repeat((batch % 997)[:, None], 8, axis=1).astype(np.float32)
    answers = [bench.input(rows[batch % NUM_SERVERS == s]) for s in range(NUM_SERVERS)]
    shape_like = bench.input(np.zeros([NUM_IDS, 8], np.float32))

    our_parts = distribution_ops.split_by_indices(shards, ids, NUM_SERVERS)
    our_order = distribution_ops.reorder_by_indices(ids, shards32, NUM_SERVERS)
    our_rows = distribution_ops.gen_distribution_ops.monolith_split_by_indices_gradient(
      shards, shape_like, answers
    )

    peer_parts = tf.dynamic_partition(ids, shards32, NUM_SERVERS)
    unique = tf.unique(ids).y
    unique_parts = tf.dynamic_partition(
      unique, tf.cast(distribution_ops.shard_of_ids(unique, NUM_SERVERS), tf.int32), NUM_SERVERS
    )
    peer_order = [
      tf.concat([tf.reverse(part, [0]) for part in unique_parts], 0),
      tf.stack([tf.size(part) for part in unique_parts]),
    ]
    places = tf.dynamic_partition(tf.range(NUM_IDS), shards32, NUM_SERVERS)
    peer_rows = tf.dynamic_stitch(places, answers)

    bench.initialize()
    ours = [our_parts, list(our_order), [our_rows]]
    peers = [peer_parts, peer_order, [peer_rows]]
    for our, peer in zip(ours, peers):
      bench.check_equal(our, peer)
    seconds = bench.medians([ours, peers, *(x for pair in zip(ours, peers) for x in pair)], repeats)
  names = ("split, reorder, restore of 1M ids, 4 servers", "  split", "  reorder", "  restore")
  against = (
    "dynamic_partition, dynamic_stitch",
    "dynamic_partition",
    "unique, dynamic_partition, concat",
    "dynamic_partition, dynamic_stitch",
  )
  return [
    Row(name, peer, seconds[2 * i], seconds[2 * i + 1], 2.0 if i == 0 else None)
    for i, (name, peer) in enumerate(zip(names, against))
  ]


def unique(repeats: int, threads: int) -> list[Row]:
  """Finds unique ids and the places of all occurrences; the peer stops at the index of each id."""
  batch = zipf_ids(np.random.default_rng(1), NUM_IDS)
  with Bench(threads) as bench:
    ids = bench.input(batch)
    row_splits = bench.input(np.array([0, NUM_IDS], np.int64))
    ours = distribution_ops.gen_distribution_ops.monolith_unique_key_with_value_and_offset(
      ids, row_splits, [16], generate_buffer=False
    )
    peer = tf.unique(ids)
    bench.initialize()
    bench.check_equal([ours.unique_key], [peer.y])
    mine, theirs = bench.medians([list(ours), list(peer)], repeats)
  return [Row("unique with mapping, 1M Zipf ids", "tf.unique", mine, theirs, 2.0)]


def reduce(repeats: int, threads: int) -> list[Row]:
  """Reduces 1M embeddings of 32 floats into 100k rows."""
  rng = np.random.default_rng(2)
  with Bench(threads) as bench:
    row_ids = bench.input(np.sort(rng.integers(0, 100_000, NUM_IDS)))
    indices = tf.expand_dims(row_ids, -1)
    values = bench.input(rng.random((NUM_IDS, 32), np.float32))
    upstream = bench.input(rng.random((100_000, 32), np.float32))
    peer_sum = tf.math.unsorted_segment_sum(values, row_ids, 100_000)
    peer_mean = tf.math.unsorted_segment_mean(values, row_ids, 100_000)
    cases = (
      ("sum", "unsorted_segment_sum", distribution_ops.reduce_sum, peer_sum, peer_sum),
      (
        "mean",
        "segment_mean",
        distribution_ops.reduce_mean,
        tf.math.segment_mean(values, row_ids),
        peer_mean,
      ),
    )
    bench.initialize()
    table = []
    for name, peer_name, function, peer, differentiable in cases:
      ours = function(indices, values, [100_000])
      got, want = bench.session.run([ours, peer])
      # segment_mean ends at the last row that has ids.
      np.testing.assert_allclose(got[: len(want)], want, rtol=1e-4)
      mine, theirs = bench.medians([ours, peer], repeats)
      table.append(Row(f"reduce {name}, 1M ids, 100k rows, dim 32", peer_name, mine, theirs, 1.5))
      mine, theirs = bench.medians(
        [tf.gradients(result, values, upstream)[0] for result in (ours, differentiable)], repeats
      )
      table.append(Row("  its gradient", "unsorted_segment gradient", mine, theirs, None))
  return table


def layout(repeats: int, threads: int) -> list[Row]:
  """Pools 26 features side by side, and back: batch 4,096, dim 16, one to four ids each."""
  rng = np.random.default_rng(3)
  num_features, batch_size, dim = 26, 4096, 16
  configs = FeatureConfigs()
  out = configs.out_configs["vec"]
  out.out_type = OutType.CONCAT
  out.shape.add(dims=[-1, num_features * dim])
  with Bench(threads) as bench:
    flat, fid_offset, lengths, peer_inputs = [], [], [], []
    for f in range(num_features):
      name = f"f{f:02d}"
      feature = configs.feature_configs[name]
      feature.table = "table"
      feature.pooling_type = PoolingType.SUM
      feature.slice_dims.append(dim)
      out.slice_configs.add(feature_name=name, start=0, end=dim)
      lengths.append(rng.integers(1, 5, batch_size))
      ids = zipf_ids(rng, lengths[-1].sum())
      unique_ids, where = np.unique(ids, return_inverse=True)
      fid_offset.append((sum(map(len, flat)) + where) * dim)
      flat.append(rng.random((len(unique_ids), dim), np.float32))
      peer_inputs.append((where, np.repeat(np.arange(batch_size), lengths[-1])))
    rows = num_features * batch_size
    feature_offset = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
    nfl_offset = np.append(np.arange(num_features) * batch_size, rows + 1).astype(np.uint32)

    embeddings = bench.input(np.concatenate(flat).reshape(-1))
    upstream = bench.input(rng.random((batch_size, num_features * dim), np.float32))
    ours = distribution_ops.fused_embedding_to_layout(
      [embeddings],
      None,
      bench.input(np.concatenate(fid_offset).astype(np.uint64)),
      bench.input(feature_offset),
      bench.input(nfl_offset),
      bench.input(np.array(batch_size, np.int32)),
      "example",
      configs,
      ps_num=1,
    )[0]
    our_grad = tf.gradients(ours, embeddings, upstream)[0]

    tables = [bench.input(table) for table in flat]
    pooled = [
      tf.math.segment_sum(tf.gather(table, bench.input(where)), bench.input(row_ids))
      for table, (where, row_ids) in zip(tables, peer_inputs)
    ]
    peer = tf.concat(pooled, axis=1)
    # Summed per id, as ours are.
    peer_grads = [tf.convert_to_tensor(grad) for grad in tf.gradients(peer, tables, upstream)]
    bench.initialize()
    bench.check_equal([ours], [peer], rtol=1e-4)
    bench.check_equal(
      [our_grad], [tf.concat([tf.reshape(grad, [-1]) for grad in peer_grads], 0)], rtol=1e-4
    )
    seconds = bench.medians(
      [[ours, our_grad], [peer, peer_grads], ours, peer, our_grad, peer_grads], repeats
    )
  against = "gather, segment_sum, concat per feature"
  names = ("fused layout, 26 features, batch 4096, dim 16", "  forward", "  backward")
  return [
    Row(name, against, seconds[2 * i], seconds[2 * i + 1], 3.0 if i == 0 else None)
    for i, name in enumerate(names)
  ]


BENCHMARKS = {f.__name__: f for f in (split, unique, reduce, layout)}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
  options = parser.parse_args()
  print_rows(
    [row for name in options.only for row in BENCHMARKS[name](options.repeats, options.threads)]
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
