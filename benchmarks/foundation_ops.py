"""Speed of the foundation ops, as ratios against a peer measured in the same run.

  python benchmarks/foundation_ops.py [--repeats 9] [--only NAME ...]

Each row is the peer's median time over ours; both are measured alternately, so that whatever else
the machine does hits both. A ratio above 1 means ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # The other side of the comparison runs there, too.

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")]

import native_build  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from ratio_table import Row, interleaved_medians, print_rows  # noqa: E402
from tensorflow.core.protobuf import config_pb2  # noqa: E402

from monolith.native_training import clip_ops, ragged_utils, static_reshape_op  # noqa: E402
from monolith.native_training.runtime.ops import gen_monolith_ops  # noqa: E402

tf.compat.v1.disable_eager_execution()

OPTIMIZER_FLOATS = 10_000_000
CLIP_TENSORS, CLIP_FLOATS = 100, 50_000_000


def _session() -> tf.compat.v1.Session:
  """Returns a session that runs the graph as built.

  The benchmarks run ops for their time, not their results; the graph optimizer would remove those
  whose results are not read.
  """
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return tf.compat.v1.Session(config=config)


def optimizers(repeats: int) -> list[Row]:
  """Makes a step of each dense optimizer on 10M floats."""
  with tf.Graph().as_default(), _session() as sess:
    init = tf.random.normal([OPTIMIZER_FLOATS])

    def variables(n: int) -> list:
      return [tf.Variable(init if i == 0 else tf.zeros_like(init)).handle for i in range(n)]

    grad = tf.Variable(init)
    # One read for all: reading a variable does not copy it.
    g = grad.read_value()
    adam = tf.raw_ops.ResourceApplyAdam
    var, m, v = variables(3)
    steps = [
      adam(
        var=var,
        m=m,
        v=v,
        beta1_power=0.9,
        beta2_power=0.999,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        grad=g,
      ),
      gen_monolith_ops.resource_apply_adamom(*variables(4), 1e-3, 0.9999, 0.99, 1e-6, 0.01, g),
      gen_monolith_ops.resource_apply_rmsprop(*variables(3), 1e-3, 0.99, 0.999, 1e-8, 0.01, g),
      gen_monolith_ops.resource_apply_rmsprop(
        *variables(3), 1e-3, 0.99, 0.999, 1e-8, 0.01, g, use_v2=True
      ),
    ]
    sess.run(tf.compat.v1.global_variables_initializer())
    runs = [sess.make_callable(step) for step in steps]
    peer, *ours = interleaved_medians(runs, repeats)
  names = ("resource_apply_adamom", "resource_apply_rmsprop", "resource_apply_rmsprop v2")
  return [
    Row(f"{name}, 10M floats", "ResourceApplyAdam", seconds, peer, 1.0)
    for name, seconds in zip(names, ours)
  ]


def value_rowids(repeats: int) -> list[Row]:
  """Computes the row ids of 10M values in 1M rows."""
  lengths = np.random.default_rng(0).multinomial(10_000_000, np.full(1_000_000, 1e-6))
  splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  with tf.Graph().as_default(), _session() as sess:
    row_splits = tf.Variable(splits)
    values = tf.Variable(np.zeros(10_000_000, np.float32))

    def ragged() -> tf.RaggedTensor:
      return tf.RaggedTensor.from_row_splits(values, row_splits.read_value(), validate=False)

    fetches = [ragged().value_rowids(), ragged_utils.fused_value_rowids(ragged())]
    sess.run(tf.compat.v1.global_variables_initializer())
    peer_rowids, our_rowids = sess.run(fetches)
    np.testing.assert_array_equal(our_rowids, peer_rowids)
    peer, ours = interleaved_medians([sess.make_callable(f.op) for f in fetches], repeats)
  name = "fused_value_rowids, 1M rows, 10M values"
  return [Row(name, "RaggedTensor.value_rowids", ours, peer, 5.0)]


def static_reshape(repeats: int) -> list[Row]:
  """Reshapes 200 small tensors in one session run.

  The tensors lie in a staging area, the cheapest source of 200 that TensorFlow has. The run itself
  and getting them out is paid by both sides alike; the second row leaves that out: it is measured
  too, and subtracted. The third is the limit: no op that takes and gives 200 tensors does less than
  `identity_n`.
  """
  with tf.Graph().as_default(), _session() as sess:
    values = [tf.constant(np.full([16], i, np.float32)) for i in range(200)]
    stage = tf.raw_ops.Stage(values=values, shared_name="reshape")
    tensors = tf.raw_ops.StagePeek(index=0, dtypes=[tf.float32] * 200, shared_name="reshape")
    peer = [tf.reshape(tensor, [-1, 4]) for tensor in tensors]
    ours = static_reshape_op.static_reshape(tensors, [(None, 4)] * 200).outputs
    sess.run(stage)
    for peer_result, our_result in zip(*sess.run([peer, ours])):
      np.testing.assert_array_equal(our_result, peer_result)
    ops = (tensors[0].op, tf.group(*peer), ours[0].op, tf.identity_n(tensors)[0].op)
    runs = [_run_op(sess, op) for op in ops]
    inputs, peer_s, ours_s, identity_s = interleaved_medians(runs, repeats * 20, inner=20)
  name = "static_reshape_n, 200 tensors"
  return [
    Row(name, "200 tf.reshape", ours_s, peer_s, 3.0),
    Row(f"{name}, the ops alone", "200 tf.reshape", ours_s - inputs, peer_s - inputs, None),
    Row(f"{name}, the ops alone", "tf.identity_n", ours_s - inputs, identity_s - inputs, None),
  ]


def _run_op(sess: tf.compat.v1.Session, op: tf.Operation) -> Callable[[], object]:
  """Returns a run of `op` with the least that Python adds to it, for ops of microseconds."""
  options = config_pb2.CallableOptions()
  options.target.append(op.name)
  return sess._make_callable_from_options(options)


def touched_key_set(repeats: int) -> list[Row]:
  """Inserts 10M random ids by two threads, in batches of 10,000."""
  programs = native_build.build_cpp_programs("benchmarks")
  program = next(p for p in programs if p.endswith("/touched_key_set_benchmark"))
  output = subprocess.run(
    [ROOT / program, "10000000", "10000", str(min(repeats, 5))],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  result = json.loads(output)
  name = "touched-key insert, 2 threads, 10M ids"
  return [
    Row(name, "flat_hash_set, mutex per id", result["ours_s"], result["mutex_per_id_s"], 2.0),
    Row(name, "flat_hash_set, mutex per batch", result["ours_s"], result["mutex_per_batch_s"], 2.0),
  ]


def clip(repeats: int) -> list[Row]:
  """Clips 100 tensors of 50M floats together, above and below the limit."""
  with tf.Graph().as_default(), _session() as sess:
    shape = [CLIP_FLOATS // CLIP_TENSORS]
    variables = [tf.Variable(tf.random.normal(shape)) for _ in range(CLIP_TENSORS)]
    tensors = [v.read_value() for v in variables]
    # The norm is about 7071.
    ops = []
    for clip_norm in (10.0, 1e6):
      for clip_fn in (tf.clip_by_global_norm, clip_ops.clip_by_global_norm):
        clipped, norm = clip_fn(tensors, clip_norm)
        # All clipped tensors exist at once, as they do for an optimizer that comes after.
        ops.append(tf.identity_n([*clipped, norm])[0].op)
    sess.run(tf.compat.v1.global_variables_initializer())
    above_peer, above, below_peer, below = interleaved_medians(
      [sess.make_callable(op) for op in ops], repeats
    )
  name = "clip_by_global_norm, 100 tensors, 50M floats"
  return [
    Row(f"{name}, above the limit", "tf.clip_by_global_norm", above, above_peer, 1.0),
    Row(f"{name}, below the limit", "tf.clip_by_global_norm", below, below_peer, 2.0),
  ]


BENCHMARKS = {
  f.__name__: f for f in (optimizers, value_rowids, static_reshape, touched_key_set, clip)
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--repeats", type=int, default=9)
  parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
  options = parser.parse_args()
  rows = [row for name in options.only for row in BENCHMARKS[name](options.repeats)]
  print_rows(rows)
  return 0


if __name__ == "__main__":
  sys.exit(main())
