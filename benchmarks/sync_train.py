"""Speed of synchronous training: two ranks on two cores against one rank on one core.

  python benchmarks/sync_train.py [--rounds 3] [--steps 30] [--ranks 2 8]
      [--engine horovod|tensorflow]
  python benchmarks/sync_train.py --exchanges [--engine horovod|tensorflow]

The same global batch: 26 features with ids of a Zipf law over 1M, dimension 16, 4096 examples, one
dense tower. Every rank is bound to a core of its own and has one thread for ops. All processes live
at the same time, and train in turn: two ranks, then one, and again.

Without `--engine` the exchanges are carried out by each in turn, as far as it is installed.

Also where the time of a step goes on rank 0 of the first number of ranks, by what the tracer saw:
exchanges (waiting for the other rank included), the table, what else is on the way of ids and
rows between the ranks, and the model.

`--exchanges` measures single exchanges instead, and how much memory rank 0 has taken after
thousands of them whose sizes change from call to call.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from ratio_table import record

FOLDER = pathlib.Path(__file__).resolve().parent
ENGINES = ("horovod", "tensorflow")
NUM_IDS = 1_000_000
NUM_FEATURES = 26
DIM = 16
GLOBAL_BATCH_SIZE = 4096
# All are seen in the warm-up, so that rows are updated and none is created.
NUM_BATCHES = 8
WARM_UP_STEPS = 16
TRACED_STEPS = 5
WANTED_RATIO = 1.7
WANTED_SHARE = 0.15
# Rows of 64 floats of one exchange.
EXCHANGED_ROWS = (20, 2000, 40_000)
EXCHANGED_DIM = 64
NUM_EXCHANGES = (300, 300, 50)
NUM_GROWTH_CALLS = 10_000
_SCOPE = "exchange"
_OUTSIDE = ("exchange, all else", "reorder in the input pipeline")
_WHOLE_STEP = "step"
_TABLE_OPS = ("FusedLookup", "FusedOptimize")
_POLL_SECS = 0.005


def make_batches(num_ranks: int, rank: int) -> np.ndarray:
  """Returns ids `[batches, features, examples]` of a rank: its part of the same global batches."""
  rng = np.random.default_rng(5)
  shape = (NUM_BATCHES, NUM_FEATURES, GLOBAL_BATCH_SIZE)
  ids = rng.zipf(1.2, size=shape) % NUM_IDS
  size = GLOBAL_BATCH_SIZE // num_ranks
  return ids[:, :, rank * size : (rank + 1) * size].astype(np.int64)


def make_task(tf: Any, ids: np.ndarray) -> Any:
  """Returns the params of the model on a rank's ids."""
  from monolith.native_training import (
    entry,
    feature,
    feature_utils,
    graph_estimator,
    native_task,
  )

  class Task(native_task.NativeTask):
    """A tower on pooled rows."""

    def create_input_fn(self, mode: str) -> Any:
      def parse(batch: Any) -> dict[str, Any]:
        features = {
          f"f{i:02d}": tf.RaggedTensor.from_tensor(
            batch[i][:, None] + (i << 48), row_splits_dtype=tf.int64
          )
          for i in range(NUM_FEATURES)
        }
        features["label"] = tf.cast(batch[0] % 2, tf.float32)
        return features

      def input_fn() -> Any:
        # Parsed once: reading data is not what is measured, sharding ids is.
        return tf.data.Dataset.from_tensor_slices(ids).map(parse).cache().repeat()

      return input_fn

    def create_model_fn(self) -> Any:
      def model_fn(features: Any, mode: str, config: Any) -> Any:
        columns, rows = [], []
        for i in range(NUM_FEATURES):
          slot = self.ctx.create_feature_slot(
            feature.FeatureSlotConfig(
              name=f"f{i:02d}",
              default_vec_optimizer=entry.AdagradOptimizer(0.01, 0.1),
              default_vec_compressor=entry.Fp32Compressor(),
            )
          )
          column = feature.FeatureColumn(slot, f"f{i:02d}")
          columns.append(column)
          rows.append(column.embedding_lookup(slot.add_feature_slice(DIM)))
        units = tf.concat(rows, axis=1)
        for layer, size in enumerate((256, 64, 1)):
          kernel = tf.compat.v1.get_variable(f"kernel_{layer}", [units.shape[1], size])
          units = tf.matmul(units, kernel)
          units = tf.nn.relu(units) if size > 1 else units
        loss = tf.reduce_mean(
          tf.nn.sigmoid_cross_entropy_with_logits(
            labels=features["label"], logits=tf.squeeze(units, axis=1)
          )
        )
        train_op = feature_utils.apply_gradients_with_var_optimizer(
          self.ctx,
          columns,
          tf.compat.v1.train.AdagradOptimizer(0.01),
          loss,
          global_step=tf.compat.v1.train.get_or_create_global_step(),
          use_allreduce=True,
        )
        return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

      return model_fn

  params = Task.params()
  params.name = "sync_benchmark"
  params.metrics.enable_tf2_profiler_hook = False
  params.metrics.enable_throughput_hook = False
  return params


def run_rank(folder: pathlib.Path, rounds: int, steps: int) -> None:
  """Plays one rank: trains a round whenever the file of that round appears."""
  # Before TensorFlow counts cores.
  num_ranks, rank = _read_place()
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[rank % len(cores)]})
  import tensorflow as tf

  tf.compat.v1.disable_eager_execution()
  tf.get_logger().setLevel("ERROR")
  from monolith.native_training import cpu_training, distributed_ps_sync, hvd_lib

  hvd_lib.init()
  _put_in_scope(tf, distributed_ps_sync.DistributedMultiTypeHashTableMpi)
  side = f"ranks_{num_ranks}"

  class RoundsHook(tf.compat.v1.train.SessionRunHook):
    """Waits for its turn, and measures."""

    def __init__(self):
      self._num_runs = 0

    def before_run(self, run_context: Any) -> Any:
      done = self._num_runs - WARM_UP_STEPS - TRACED_STEPS
      self._run_start = time.perf_counter()
      if done < 0:
        is_traced = self._num_runs >= WARM_UP_STEPS and num_ranks > 1 and rank == 0
        level = tf.compat.v1.RunOptions.FULL_TRACE if is_traced else 0
        return tf.compat.v1.train.SessionRunArgs(
          None, options=tf.compat.v1.RunOptions(trace_level=level)
        )
      if done % steps == 0:
        if done:
          self._report(f"{time.perf_counter() - self._start}")
        else:
          self._report("ready")
        if done == rounds * steps:
          return None
        _wait_for(folder / f"{side}.{done // steps}")
        self._start = time.perf_counter()
      return None

    def after_run(self, run_context: Any, run_values: Any) -> None:
      self._num_runs += 1
      if run_values.run_metadata is not None and run_values.run_metadata.step_stats.dev_stats:
        # The first one is slower: the tracer starts.
        if self._num_runs > WARM_UP_STEPS + 1:
          breakdown[_WHOLE_STEP] += time.perf_counter() - self._run_start
          _add_stats(breakdown, run_values.run_metadata.step_stats)

    def _report(self, text: str) -> None:
      if rank == 0:
        print(f"{side} {text}", flush=True)

  breakdown: dict[str, float] = collections.defaultdict(float)
  config = cpu_training.DistributedCpuTrainingConfig(
    model_dir=str(folder / side),
    index=rank,
    num_workers=num_ranks,
    enable_sync_training=True,
    reorder_fids_in_data_pipeline=True,
    intra_op_parallelism_threads=1,
    inter_op_parallelism_threads=2,
    save_summary_steps=1 << 40,
    log_step_count_steps=1 << 40,
  )
  params = make_task(tf, make_batches(num_ranks, rank))
  params.train.max_steps = WARM_UP_STEPS + TRACED_STEPS + rounds * steps + 1
  cpu_training.distributed_sync_train(config, params, user_hooks=[RoundsHook()])
  if rank == 0 and num_ranks > 1:
    seconds = _reorder_seconds(tf, num_ranks, make_batches(num_ranks, rank)[0])
    breakdown["reorder in the input pipeline"] += seconds * (TRACED_STEPS - 1)
    for name, total in breakdown.items():
      print(f"breakdown {total / (TRACED_STEPS - 1)} {name}", flush=True)


def _put_in_scope(tf: Any, table_type: type) -> None:
  """Gives the ops between the ranks a name by which the tracer's report can tell them."""
  for name in ("lookup", "apply_gradients"):
    original = getattr(table_type, name)

    def scoped(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
      with tf.name_scope(_SCOPE):
        return original(self, *args, **kwargs)

    setattr(table_type, name, scoped)


def _add_stats(breakdown: dict[str, float], step_stats: Any) -> None:
  """Adds the seconds of one step, by kind of op."""
  for device in step_stats.dev_stats:
    for node in device.node_stats:
      seconds = node.all_end_rel_micros * 1e-6
      op_type = node.timeline_label.split("= ")[-1].split("(")[0]
      if op_type.startswith(("Horovod", "MonolithRankExchange")):
        # The kernel returns at once; the op ends when the other rank has sent its part.
        breakdown["exchanges"] += seconds
      elif any(part in op_type for part in _TABLE_OPS):
        breakdown["table"] += seconds
      elif _SCOPE in node.node_name.split("/")[0]:
        breakdown["exchange, all else"] += seconds
      elif op_type not in ("IteratorGetNext", "_Send", "_Recv", "Dequeue"):
        breakdown["model"] += seconds


def _reorder_seconds(tf: Any, num_ranks: int, ids: np.ndarray) -> float:
  """Returns how long the input pipeline shards the ids of one batch."""
  from monolith.native_training import distribution_ops

  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    inputs = [tf.constant(values) for values in ids]
    outputs = distribution_ops.fused_reorder_by_indices(inputs, num_ranks, [DIM] * len(inputs))
    run = session.make_callable([output.op for output in outputs][0])
    seconds = []
    for _ in range(20):
      start = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)


def _wait_for(path: pathlib.Path) -> None:
  while not path.exists():
    time.sleep(_POLL_SECS)


class Side:
  """The ranks of one side of the comparison."""

  def __init__(
    self,
    stack: contextlib.ExitStack,
    folder: pathlib.Path,
    count: int,
    args: argparse.Namespace,
    engine: str,
  ):
    from monolith.native_training.ranks import local as local_ranks

    self.name = f"ranks_{count}"
    self._folder = folder
    self._log = stack.enter_context(open(folder / f"{self.name}.log", "w+"))
    command = [str(FOLDER / "sync_train.py"), f"--rank_in={folder}"]
    command += [f"--rounds={args.rounds}", f"--steps={args.steps}"]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(FOLDER.parent)}
    outputs = [self._log, *[open(os.devnull, "wb") for _ in range(count - 1)]]
    self._ranks = stack.enter_context(local_ranks.LocalRanks(count, command, env, outputs, engine))

  def lines(self) -> list[list[str]]:
    """Returns what rank 0 has reported, split into words."""
    self._log.flush()
    text = pathlib.Path(self._log.name).read_text()
    return [
      line.split(" ", 2)
      for line in text.splitlines()
      if line.startswith((self.name + " ", "breakdown "))
    ]

  def wait_for(self, count: int) -> None:
    """Waits until this many lines are reported."""
    while len(self.lines()) < count:
      if any(process.poll() not in (None, 0) for process in self._ranks.processes):
        print(pathlib.Path(self._log.name).read_text()[-5000:], file=sys.stderr)
        raise RuntimeError(f"a rank of {self.name} failed")
      time.sleep(0.05)

  def run_round(self, index: int) -> float:
    (self._folder / f"{self.name}.{index}").touch()
    self.wait_for(index + 2)
    return float(self.lines()[index + 1][1])

  def breakdown(self) -> dict[str, float]:
    for process in self._ranks.processes:
      process.wait()
    return {line[2]: float(line[1]) for line in self.lines() if line[0] == "breakdown"}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=30)
  parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks, in turn")
  parser.add_argument("--engine", choices=ENGINES)
  parser.add_argument("--exchanges", action="store_true")
  parser.add_argument("--rank_in", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.rank_in and args.exchanges:
    run_exchanges()
    return 0
  if args.rank_in:
    run_rank(pathlib.Path(args.rank_in), args.rounds, args.steps)
    return 0
  if min(args.ranks) < 2:
    parser.error("--ranks takes numbers of 2 and more: one rank is what they are compared with")
  if len(os.sched_getaffinity(0)) < max(args.ranks):
    print(f"needs {max(args.ranks)} cores", file=sys.stderr)
    return 1
  for engine in [args.engine] if args.engine else ENGINES:
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
      print("horovod is left out: it needs make horovod", file=sys.stderr)
      continue
    print(f"--- {engine}", flush=True)
    if args.exchanges:
      _measure_exchanges(engine)
    else:
      _measure(args, engine)
  return 0


def _measure(args: argparse.Namespace, engine: str) -> None:
  with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
    sides = [Side(stack, pathlib.Path(name), count, args, engine) for count in (*args.ranks, 1)]
    for side in sides:
      side.wait_for(1)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for index in range(args.rounds):
      for side in sides:
        seconds[side.name].append(side.run_round(index) / args.steps)
    breakdown = sides[0].breakdown()
  _report(seconds, breakdown, engine)


def _measure_exchanges(engine: str) -> None:
  from monolith.native_training.ranks import local as local_ranks

  command = [str(FOLDER / "sync_train.py"), "--rank_in=.", "--exchanges"]
  env = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(FOLDER.parent)}
  outputs = [None, subprocess.DEVNULL]
  with local_ranks.LocalRanks(2, command, env, outputs, engine) as ranks:
    statuses = [process.wait() for process in ranks.processes]
  if any(statuses):
    raise RuntimeError(f"the ranks ended with {statuses}")


def run_exchanges() -> None:
  """Plays one rank that exchanges, and prints as rank 0 how long it took."""
  import tensorflow as tf

  tf.compat.v1.disable_eager_execution()
  from monolith.native_training import hvd_lib

  hvd_lib.init()

  def say(text: str) -> None:
    if hvd_lib.rank() == 0:
      print(text, flush=True)

  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    for rows, count in zip(EXCHANGED_ROWS, NUM_EXCHANGES):
      values = tf.Variable(tf.zeros([rows, EXCHANGED_DIM]))
      session.run(values.initializer)
      ops = {
        "allreduce": hvd_lib.allreduce(values, name=f"allreduce_{rows}"),
        "alltoall": hvd_lib.alltoall(values, [rows // 2, rows // 2], name=f"alltoall_{rows}"),
        "allgather": hvd_lib.allgather(values, name=f"allgather_{rows}"),
      }
      for name, op in ops.items():
        run = session.make_callable(op.op)
        for _ in range(5):
          run()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(count):
          run()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        say(
          f"{name:10} {rows:6} x {EXCHANGED_DIM} floats {wall / count * 1e3:8.2f} ms, "
          f"{cpu / count * 1e3:6.2f} ms of CPU on each rank"
        )
    _measure_growth(tf, session, say)


def _measure_growth(tf: Any, session: Any, say: Any) -> None:
  """Prints how the memory of a rank grows with calls of changing sizes."""
  from monolith.native_training import hvd_lib

  rng = np.random.default_rng(hvd_lib.rank())
  rows = tf.compat.v1.placeholder(tf.float32, [None, EXCHANGED_DIM])
  splits = tf.compat.v1.placeholder(tf.int32, [2])
  received = hvd_lib.alltoall(rows, splits, name="growing")
  kib = []
  for i in range(NUM_GROWTH_CALLS + 1):
    if i % (NUM_GROWTH_CALLS // 10) == 0:
      kib.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4)
    size = int(rng.integers(300))
    first = int(rng.integers(size + 1))
    session.run(received.op, {rows: np.zeros([size, EXCHANGED_DIM]), splits: [first, size - first]})
  # The first calls fill pools of memory and meet new sizes.
  say(
    f"memory: {kib[1]:,} KiB after {NUM_GROWTH_CALLS // 10:,} calls, {kib[-1]:,} KiB after "
    f"{NUM_GROWTH_CALLS:,}: {(kib[-1] - kib[1]) / (NUM_GROWTH_CALLS * 0.9):.3f} KiB per call"
  )


def _read_place() -> tuple[int, int]:
  """Returns the number of ranks and the number of this one; imports nothing for it."""
  env = os.environ
  return (
    int(env.get("HOROVOD_SIZE") or env.get("WORLD_SIZE", "1")),
    int(env.get("HOROVOD_RANK") or env.get("RANK", "0")),
  )


def _report(seconds: dict[str, list[float]], breakdown: dict[str, float], engine: str) -> None:
  medians = {name: statistics.median(values) for name, values in seconds.items()}
  for name, median in medians.items():
    speed = GLOBAL_BATCH_SIZE / median
    print(f"{name:10} {median * 1e3:8.1f} ms per step, {speed:10,.0f} examples/s")
  for name, median in medians.items():
    ratio, count = medians["ranks_1"] / median, int(name.rpartition("_")[2])
    if count == 2:
      below = "  BELOW" if ratio < WANTED_RATIO else ""
      print(f"two ranks on two cores against one on one: {ratio:.2f}x, want {WANTED_RATIO}x{below}")
      what = "two ranks on two cores" + ("" if engine == "horovod" else f", {engine}")
      record([(what, "one on one", ratio)])
    elif count > 2:
      print(f"{count} ranks on {count} cores against one on one: {ratio:.2f}x")
  step = breakdown.pop(_WHOLE_STEP)
  print(f"\nOps of traced steps, {step * 1e3:.1f} ms each, on rank 0; some run at the same time:")
  for name, value in sorted(breakdown.items(), key=lambda item: -item[1]):
    print(f"  {name:32} {value * 1e3:8.2f} ms {value / step:6.1%}")
  outside = sum(breakdown.get(name, 0) for name in _OUTSIDE) / step
  above = "  ABOVE" if outside > WANTED_SHARE else ""
  print(f"outside exchanges and table: {outside:.1%}, want under {WANTED_SHARE:.0%}{above}")


if __name__ == "__main__":
  sys.exit(main())
