"""Speed of the foundation ops, as ratios against a peer measured in the same run.

  python benchmarks/foundation_ops.py [--repeats 9] [--only NAME ...]

Each row is the peer's median time over ours; both are measured alternately, so that whatever else
the machine does hits both. A ratio above 1 means ours is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import native_build  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from monolith.native_training import clip_ops, ragged_utils, static_reshape_op  # noqa: E402
from monolith.native_training.runtime.ops import gen_monolith_ops  # noqa: E402

tf.compat.v1.disable_eager_execution()

OPTIMIZER_FLOATS = 10_000_000
CLIP_TENSORS, CLIP_FLOATS = 100, 50_000_000


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: seconds of ours and of the peer, and the ratio wanted, if any."""

  name: str
  peer_name: str
  ours: float
  peer: float
  wanted: float | None

  @property
  def ratio(self) -> float:
    return self.peer / self.ours


def interleaved_medians(
  runs: list[Callable[[], object]], repeats: int, warm_up: int = 2, inner: int = 1
) -> list[float]:
  """Median seconds of each of `runs`, called in turn `repeats` times, `inner` calls at a time."""
  times: list[list[float]] = [[] for _ in runs]
  for repeat in range(-warm_up, repeats):
    for run, seconds in zip(runs, times):
      start = time.perf_counter()
      for _ in range(inner):
        run()
      if repeat >= 0:
        seconds.append((time.perf_counter() - start) / inner)
  return [statistics.median(seconds) for seconds in times]


def _session() -> tf.compat.v1.Session:
  """A session that runs the graph as built.

  The benchmarks run ops for their time, not their results; the graph optimizer would remove those
  whose results nobody reads.
  """
  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return tf.compat.v1.Session(config=config)


def optimizers(repeats: int) -> list[Row]:
  """A step of each dense optimizer on 10M floats."""
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
        var=var, m=m, v=v, beta1_power=0.9, beta2_power=0.999, lr=1e-3, beta1=0.9, beta2=0.999,
        epsilon=1e-8, grad=g,
      ),
      gen_monolith_ops.resource_apply_adamom(
        *variables(4), 1e-3, 0.9999, 0.99, 1e-6, 0.01, g
      ),
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
  """Row ids of 10M values in 1M rows."""
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
  """200 small tensors reshaped in one session run, once and 20 times over.

  A session run itself and making 200 tensors cost more than one round of reshapes of either kind,
  and both sides pay that alike: 20 rounds show the ops, one round what a small graph sees of them.
  """
  rows = []
  with tf.Graph().as_default(), _session() as sess:
    tensors = tf.unstack(tf.Variable(np.zeros([200, 16], np.float32)).read_value())
    ops = [tensors[0].op]
    for rounds in (20, 1):
      peer, ours = tensors, tensors
      for i in range(rounds):
        # Never the shape there is already: the peer's reshapes are not identities.
        width = 4 if i % 2 == 0 else 8
        peer = [tf.reshape(tensor, [-1, width]) for tensor in peer]
        ours = static_reshape_op.static_reshape(ours, [(None, width)] * 200).outputs
      ops += [tf.group(*peer), ours[0].op]
    sess.run(tf.compat.v1.global_variables_initializer())
    runs = [sess.make_callable(op) for op in ops]
    inputs, *times = interleaved_medians(runs, repeats, inner=20)
  for rounds, peer, ours, wanted in ((20, *times[:2], 3.0), (1, *times[2:], None)):
    name = f"static_reshape_n, 200 tensors, {rounds} x"
    rows.append(Row(name, "200 tf.reshape", ours, peer, wanted))
  print(f"static reshape: making the 200 tensors alone takes {inputs * 1e3:.3f} ms")
  return rows


def touched_key_set(repeats: int) -> list[Row]:
  """10M random ids by two threads, in batches of 10,000."""
  programs = native_build.build_cpp_programs("benchmarks")
  program = next(p for p in programs if p.endswith("/touched_key_set_benchmark"))
  output = subprocess.run(
    [ROOT / program, "10000000", "10000", str(min(repeats, 5))],
    check=True, capture_output=True, text=True,
  ).stdout
  result = json.loads(output)
  name = "touched-key insert, 2 threads, 10M ids"
  return [
    Row(name, "flat_hash_set, mutex per id", result["ours_s"], result["mutex_per_id_s"], 2.0),
    Row(name, "flat_hash_set, mutex per batch", result["ours_s"], result["mutex_per_batch_s"], 2.0),
  ]


def clip(repeats: int) -> list[Row]:
  """Clipping 100 tensors of 50M floats together, above and below the limit."""
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
  print(f"\n{'op':<60} {'against':<32} {'ours ms':>10} {'peer ms':>10} {'ratio':>7} {'want':>6}")
  for row in rows:
    wanted = "" if row.wanted is None else f"{row.wanted:.1f}x"
    missed = row.wanted is not None and row.ratio < row.wanted
    print(
      f"{row.name:<60} {row.peer_name:<32} {row.ours * 1e3:>10.3f} {row.peer * 1e3:>10.3f} "
      f"{row.ratio:>6.2f}x {wanted:>6}{'  BELOW' if missed else ''}"
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
