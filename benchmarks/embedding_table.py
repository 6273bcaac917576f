"""Speed and memory of the embedding table, as ratios against TensorFlow's ops in the same run.

  python benchmarks/embedding_table.py [--rows 1e6,1e7] [--dims 16,64] [--threads 1,2]
      [--repeats 15] [--cpu-time] [--only dense grow scale fused fused_eager adversarial]

  dense        lookup and Adagrad update of existing ids against tf.gather and
               ResourceSparseApplyAdagradV2 on a tf.Variable of the same size; 2 threads against
               1; bytes per row
  grow         insert from empty, with Adagrad state, against DenseHashTable.insert (values only);
               the slowest batch against the median
  scale        cost of a lookup per id as the table grows, dimension 8
  fused        one lookup of 26 tables against 26 lookups, in a graph and fetched from it
  fused_eager  the same, called eagerly
  adversarial  ids that collide in low or high bits against random ones

Batches of 100,000 ids. Ours and the peer run in turn and medians are compared, so that whatever
else the machine does hits both. A ratio above 1 means ours is faster. Every case runs in a process
of its own: TensorFlow fixes the number of threads for a process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # The other side of the comparison runs there, too.

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from ratio_table import record  # noqa: E402

BATCH = 100_000
NUM_FUSED_TABLES = 26
NUM_BATCHES = 16  # different ones, so that no cache remembers a batch
RUN_BATCHES = 4  # in one session run, which costs as much as a small op
_CPU_TIME = "MONOLITH_BENCHMARK_CPU_TIME"
# For mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, and M_ARENA_MAX, for other arenas unmap too.
_KEEP_MEMORY = {-1: 2**30, -3: 2**30, -8: 1}

# The ratio that each row has to reach.
WANTED = {
  ("lookup", 10**7, 16): 1.3,
  ("lookup", 10**6, 64): 0.8,
  ("update", 10**7, 16): 2.8,
  ("update", 10**6, 64): 1.8,
}


class Bench:
  """A session on a fixed number of threads, and callables that run ops without fetching results."""

  def __init__(self, threads: int):
    import tensorflow as tf

    # Else large results, ours and the peer's alike, may come from fresh pages every time, or not:
    # malloc decides anew in every process, and the page faults take longer than the lookup.
    libc = ctypes.CDLL(None)
    for option, value in _KEEP_MEMORY.items():
      libc.mallopt(option, value)
    tf.compat.v1.disable_eager_execution()
    config = tf.compat.v1.ConfigProto(
      intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
    )
    # The optimizer would remove ops whose results are never read.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    self.tf = tf
    self.session = tf.compat.v1.Session(config=config)

  def placeholder(self, dtype: Any, shape: list[int | None]) -> Any:
    return self.tf.compat.v1.placeholder(dtype, shape)

  def callable(self, op: Any, *feeds: Any) -> Callable[..., Any]:
    return self.session.make_callable(getattr(op, "op", op), feed_list=list(feeds))

  def variables(self, name: str, batches: Any) -> list[Any]:
    """Batches that are there already: feeding them would take longer than some ops do."""
    made = [
      self.tf.compat.v1.get_variable(f"{name}_{i}", initializer=batch, use_resource=True)
      for i, batch in enumerate(batches)
    ]
    self.session.run([batch.initializer for batch in made])
    return made

  def in_a_row(self, op: Callable[[Any], Any], batches: list[Any]) -> Callable[[], Any]:
    """Runs `op` on one batch after the other, in one session run."""
    previous: list[Any] = []
    for batch in batches:
      with self.tf.control_dependencies(previous):
        previous = [op(batch.read_value())]
    return self.callable(self.tf.group(previous))


def adagrad_table(dim: int, name: str) -> Any:
  """A table whose rows hold a vector and as much Adagrad state."""
  from monolith.native_training import entry, hash_table_ops
  from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  entry.CuckooHashTableConfig().mutate_table(config)
  config.entry_config.segments.append(
    entry.CombineAsSegment(
      dim, entry.ZerosInitializer(), entry.AdagradOptimizer(0.01, 0.1), entry.Fp32Compressor()
    )
  )
  instance = entry.HashTableConfigInstance(config, [0.01])
  return hash_table_ops.hash_table_from_config(instance, name_suffix=name)


def mixed(indices: Any) -> Any:
  """Ids that look random, one for each index: what hashed features are."""
  import numpy as np

  x = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
  return (x ^ (x >> np.uint64(31))).astype(np.int64)


def sample(rng: Any, distribution: str, rows: int) -> Any:
  """A batch of row indices: uniform, or Zipf(1.05) with the popular rows spread over the table."""
  import numpy as np

  if distribution == "uniform":
    return rng.integers(0, rows, BATCH)
  # Ranks by inverting the distribution function of the continuous law, which is that of the
  # discrete one but for the first few ranks.
  exponent = 1.05 - 1
  top = 1 - float(rows + 1) ** -exponent
  ranks = np.floor((1 - rng.random(BATCH) * top) ** (-1 / exponent)).astype(np.int64) - 1
  # Multiplying by an odd number that shares no factor with `rows` is a permutation.
  return np.clip(ranks, 0, rows - 1) * 1_000_000_007 % rows


def clock() -> float:
  return time.process_time() if os.environ.get(_CPU_TIME) else time.perf_counter()


def rss_bytes() -> int:
  """Resident memory, without what malloc keeps of freed tensors."""
  ctypes.CDLL(None).malloc_trim(0)
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def interleaved(runs: list[Callable[[int], Any]], repeats: int, warm_up: int = 2) -> list[float]:
  """Median seconds of each run, called in turn with the number of the batch to use.

  Runs of one turn get different batches: what one has read is in the cache for the next.
  """
  times: list[list[float]] = [[] for _ in runs]
  for repeat in range(-warm_up, repeats):
    for number, (run, seconds) in enumerate(zip(runs, times)):
      start = clock()
      run((repeat + number * NUM_BATCHES // len(runs)) % NUM_BATCHES)
      if repeat >= 0:
        seconds.append(clock() - start)
  return [statistics.median(seconds) for seconds in times]


def fill(bench: Bench, table: Any, rows: int, dim: int, ids_of: Callable[[Any], Any]) -> None:
  import numpy as np

  ids = bench.placeholder("int64", [None])
  zeros = bench.tf.zeros([bench.tf.size(ids), dim])
  assign = bench.callable(table.assign(ids, zeros).as_op(), ids)
  for begin in range(0, rows, BATCH):
    assign(ids_of(np.arange(begin, min(begin + BATCH, rows))))


def run_dense(rows: int, dim: int, threads: int, repeats: int) -> list[dict]:
  import numpy as np

  bench = Bench(threads)
  tf = bench.tf
  rng = np.random.default_rng(0)
  # Several batches of the same ids: until malloc has all the memory that batches need.
  fill(bench, adagrad_table(dim, "warm_up"), 8 * BATCH, dim, lambda i: mixed(i % BATCH))
  before = rss_bytes()
  table = adagrad_table(dim, "table")
  fill(bench, table, rows, dim, mixed)
  bytes_per_row = (rss_bytes() - before) / rows
  variable = tf.compat.v1.get_variable(
    "dense", [rows, dim], initializer=tf.zeros_initializer(), use_resource=True
  )
  accumulator = tf.compat.v1.get_variable(
    "acc", [rows, dim], initializer=tf.constant_initializer(0.1), use_resource=True
  )
  bench.session.run([variable.initializer, accumulator.initializer])

  gradient = tf.compat.v1.get_variable("gradient", [BATCH, dim], use_resource=True)
  bench.session.run(gradient.initializer)
  step = tf.constant(0, tf.int64)
  many = threads > 1

  def gather(ids: Any) -> Any:
    return tf.gather(variable, ids)

  def dense_update(ids: Any) -> Any:
    return tf.raw_ops.ResourceSparseApplyAdagradV2(
      var=variable.handle,
      accum=accumulator.handle,
      lr=0.01,
      epsilon=0.0,
      grad=gradient,
      indices=ids,
    )

  def lookup(ids: Any, multi: bool = many) -> Any:
    return table.lookup(ids, use_multi_threads=multi)

  def update(ids: Any, multi: bool = many) -> Any:
    return table.apply_gradients(ids, gradient, step, use_multi_threads=multi).as_op()

  def chosen(op: Callable[[Any], Any], batches: list[Any]) -> Callable[[int], Any]:
    starts = range(0, NUM_BATCHES, RUN_BATCHES)
    runs = [bench.in_a_row(op, batches[i : i + RUN_BATCHES]) for i in starts]
    return lambda i: runs[i % len(runs)]()

  results = []
  for distribution in ("uniform", "zipf"):
    samples = [sample(rng, distribution, rows) for _ in range(NUM_BATCHES)]
    indices = bench.variables(f"indices_{distribution}", samples)
    keys = bench.variables(f"keys_{distribution}", [mixed(batch) for batch in samples])
    for op, ours, peer, peer_name in (
      ("lookup", lookup, gather, "tf.gather"),
      ("update", update, dense_update, "ResourceSparseApplyAdagradV2"),
    ):
      runs = [chosen(ours, keys), chosen(peer, indices)]
      if many:
        runs.append(chosen(lambda ids, ours=ours: ours(ids, False), keys))
      seconds = [second / RUN_BATCHES for second in interleaved(runs, repeats)]
      wanted = WANTED.get((op, rows, dim)) if distribution == "uniform" and not many else None
      name = f"{op} {rows:.0e} x {dim}, {distribution}, {threads} thread{'s'[: threads - 1]}"
      results.append(_ratio(name, peer_name, seconds[0], seconds[1], wanted))
      if many:
        wanted_threads = 1.9 if distribution == "uniform" else None
        results.append(_ratio(name, "1 thread", seconds[0], seconds[2], wanted_threads))
  if threads == 1:
    payload = 8 * dim
    limit = 1.2 if dim == 16 and rows >= 10**7 else None
    results.append(
      _limit(
        f"bytes per row, {rows:.0e} x {dim} + state: {bytes_per_row:.0f}",
        f"payload {payload} B",
        bytes_per_row / payload,
        limit,
      )
    )
  return results


def run_grow(rows: int, dim: int, repeats: int) -> list[dict]:
  del repeats
  import numpy as np

  bench = Bench(1)
  tf = bench.tf
  table = adagrad_table(dim, "table")
  peer = tf.lookup.experimental.DenseHashTable(
    tf.int64, tf.float32, default_value=tf.zeros([dim]), empty_key=-1, deleted_key=-2
  )
  ids = bench.placeholder("int64", [BATCH])
  values = tf.compat.v1.get_variable("values", [BATCH, dim], use_resource=True)
  bench.session.run(values.initializer)
  insert = bench.callable(table.assign(ids, values).as_op(), ids)
  peer_insert = bench.callable(peer.insert(ids, values), ids)
  ours, theirs = [], []
  for begin in range(0, rows, BATCH):
    batch = mixed(np.arange(begin, begin + BATCH))
    for run, seconds in ((insert, ours), (peer_insert, theirs)):
      start = clock()
      run(batch)
      seconds.append(clock() - start)
  batches = len(ours)
  return [
    _ratio(
      f"insert of new ids up to {rows:.0e} x {dim}, mean",
      "DenseHashTable.insert",
      sum(ours) / batches,
      sum(theirs) / batches,
      1.8,
    ),
    _limit(
      f"slowest batch while growing: {max(ours) * 1e3:.1f} ms",
      "its median",
      max(ours) / statistics.median(ours),
      4.0,
    ),
  ]


def run_scale(rows: int, dim: int, repeats: int) -> list[dict]:
  import numpy as np

  bench = Bench(1)
  rng = np.random.default_rng(0)
  table = adagrad_table(dim, "table")
  ids = bench.placeholder("int64", [BATCH])
  lookup = bench.callable(table.lookup(ids), ids)
  insert_ids = bench.placeholder("int64", [None])
  zeros = bench.tf.zeros([bench.tf.size(insert_ids), dim])
  assign = bench.callable(table.assign(insert_ids, zeros).as_op(), insert_ids)
  results, first, filled = [], None, 0
  for size in sorted({10**6, min(10**7, rows), rows}):
    for begin in range(filled, size, BATCH):
      assign(mixed(np.arange(begin, min(begin + BATCH, size))))
    filled = size
    keys = [mixed(sample(rng, "uniform", size)) for _ in range(NUM_BATCHES)]
    (seconds,) = interleaved([lambda i, keys=keys: lookup(keys[i])], repeats)
    first = first or seconds
    results.append(
      _limit(
        f"lookup of {size:.0e} x {dim}: {seconds / BATCH * 1e9:.0f} ns per id",
        "itself at 1e+06",
        seconds / first,
        2.5,
      )
    )
  return results


def run_fused(rows: int, dim: int, per_table: int, threads: int, repeats: int) -> list[dict]:
  import numpy as np

  from monolith.native_training import hash_table_ops

  bench = Bench(threads)
  tf = bench.tf
  rng = np.random.default_rng(0)
  tables = [adagrad_table(dim, f"t{i}") for i in range(NUM_FUSED_TABLES)]
  for table in tables:
    fill(bench, table, rows, dim, mixed)
  # Many steps in one session run, one after the other, and ids that are there already: neither the
  # cost of a session run nor that of feeding it is compared.
  step_ids = NUM_FUSED_TABLES * per_table
  num_steps = 4 * BATCH // step_ids
  ids = bench.variables("ids", mixed(rng.integers(0, rows, [num_steps, step_ids])))

  def look_up_fused(step_ids: Any) -> Any:
    return hash_table_ops.fused_lookup(tables, step_ids, [per_table] * NUM_FUSED_TABLES, 1)[0]

  def look_up_each(step_ids: Any) -> list[Any]:
    parts = tf.split(step_ids, NUM_FUSED_TABLES)
    # On one thread each: TensorFlow runs several at a time, which is faster than to share each.
    return [table.lookup(part) for table, part in zip(tables, parts)]

  def look_up_singly(step_ids: Any) -> Any:
    # Kept until all are there, as a model needs them.
    return tf.group(tf.identity_n(look_up_each(step_ids)))

  run_fused_op, run_single = bench.in_a_row(look_up_fused, ids), bench.in_a_row(look_up_singly, ids)
  # TensorFlow takes a new kernel for an expensive one and lets another thread run it, until some
  # hundred runs have taught it better; training takes more steps than that.
  seconds = interleaved([lambda _: run_fused_op(), lambda _: run_single()], repeats, warm_up=120)
  scale = BATCH / (num_steps * step_ids)
  name = _fused_name("fused lookup", rows, dim, per_table, threads)
  results = [_ratio(name, "single lookups", seconds[0] * scale, seconds[1] * scale, 1.3)]

  fed_ids = bench.placeholder("int64", [step_ids])
  batches = mixed(rng.integers(0, rows, [NUM_BATCHES, step_ids]))
  fetch = [
    bench.session.make_callable(look_up(fed_ids), feed_list=[fed_ids])
    for look_up in (look_up_fused, look_up_each)
  ]
  seconds = interleaved(
    [lambda i, run=run: run(batches[i % NUM_BATCHES]) for run in fetch], 10 * repeats, warm_up=120
  )
  scale = BATCH / step_ids
  name = "  the same, results fetched"
  results.append(_ratio(name, "single lookups", seconds[0] * scale, seconds[1] * scale, 1.3))
  return results


def run_fused_eager(rows: int, dim: int, per_table: int, threads: int, repeats: int) -> list[dict]:
  import numpy as np
  import tensorflow as tf

  from monolith.native_training import hash_table_ops

  tf.config.threading.set_intra_op_parallelism_threads(threads)
  tf.config.threading.set_inter_op_parallelism_threads(threads)
  rng = np.random.default_rng(0)
  tables = [adagrad_table(dim, f"t{i}") for i in range(NUM_FUSED_TABLES)]
  for table in tables:
    table.assign(mixed(np.arange(rows)), np.zeros([rows, dim], np.float32))
  indices = rng.integers(0, rows, [NUM_BATCHES, NUM_FUSED_TABLES, per_table])
  batches = [[tf.constant(part) for part in mixed(batch)] for batch in indices]
  fused_batches = [tf.concat(batch, 0) for batch in batches]

  def look_up_fused(i: int) -> None:
    ids = fused_batches[i % NUM_BATCHES]
    hash_table_ops.fused_lookup(tables, ids, [per_table] * NUM_FUSED_TABLES, 1)

  def look_up_singly(i: int) -> list[Any]:
    # One after the other, so each may use all threads.
    return [
      table.lookup(part, use_multi_threads=threads > 1)
      for table, part in zip(tables, batches[i % NUM_BATCHES])
    ]

  seconds = interleaved([look_up_fused, look_up_singly], 10 * repeats, warm_up=20)
  scale = BATCH / (NUM_FUSED_TABLES * per_table)
  name = _fused_name("fused, eager", rows, dim, per_table, threads)
  return [_ratio(name, "single lookups", seconds[0] * scale, seconds[1] * scale, 1.3)]


def _fused_name(what: str, rows: int, dim: int, per_table: int, threads: int) -> str:
  return (
    f"{what}, {NUM_FUSED_TABLES} tables of {rows:.0e} x {dim}, {per_table} ids each, "
    f"{threads} thread{'s'[: threads - 1]}"
  )


def run_adversarial(rows: int, dim: int, repeats: int) -> list[dict]:
  import numpy as np

  def bit_reversed(indices: Any) -> Any:
    bits = np.unpackbits(indices.astype(">i8").view(np.uint8).reshape(-1, 8), axis=1)
    return np.packbits(bits[:, ::-1], axis=1).reshape(-1).view(">i8").astype(np.int64)

  patterns: dict[str, Callable[[Any], Any]] = {
    "random": mixed,
    "sequential": lambda indices: indices,
    "multiples of 2^20": lambda indices: indices << 20,
    "multiples of 2^32": lambda indices: indices << 32,
    "bit-reversed": bit_reversed,
  }
  bench = Bench(1)
  rng = np.random.default_rng(0)
  ids = bench.placeholder("int64", [None])
  zeros = bench.tf.zeros([bench.tf.size(ids), dim])
  # Ids whose multiples of 2^32 are distinct: fewer than 2^32 of them.
  inserts, lookups = {}, {}
  for i, name in enumerate(patterns):
    table = adagrad_table(dim, f"t{i}")
    inserts[name] = bench.callable(table.assign(ids, zeros).as_op(), ids)
    lookups[name] = bench.callable(table.lookup(ids), ids)
  insert_seconds = dict.fromkeys(patterns, 0.0)
  for begin in range(0, rows, BATCH):
    indices = np.arange(begin, begin + BATCH)
    for name, pattern in patterns.items():
      keys = pattern(indices)
      start = clock()
      inserts[name](keys)
      insert_seconds[name] += clock() - start
  batches = [sample(rng, "uniform", rows) for _ in range(NUM_BATCHES)]
  keys_of = {name: [pattern(batch) for batch in batches] for name, pattern in patterns.items()}
  seconds = interleaved(
    [lambda i, name=name: lookups[name](keys_of[name][i]) for name in patterns], repeats
  )
  lookup_seconds = dict(zip(patterns, seconds))
  results = []
  for name in list(patterns)[1:]:
    for op, of in (("lookup", lookup_seconds), ("insert", insert_seconds)):
      scale = 1 if op == "lookup" else BATCH / rows
      results.append(
        _ratio(
          f"{op} of {name} ids, {rows:.0e} x {dim}",
          "random ids",
          of[name] * scale,
          of["random"] * scale,
          0.5,
        )
      )
  return results


def _ratio(name: str, peer: str, ours: float, theirs: float, wanted: float | None) -> dict:
  return {
    "name": name,
    "peer": peer,
    "ours": BATCH / ours / 1e6,
    "theirs": BATCH / theirs / 1e6,
    "ratio": theirs / ours,
    "wanted": wanted,
    "below": wanted is not None and theirs / ours < wanted,
  }


def _limit(name: str, peer: str, ratio: float, limit: float | None) -> dict:
  return {
    "name": name,
    "peer": peer,
    "ratio": ratio,
    "limit": limit,
    "below": limit is not None and ratio > limit,
  }


CASES = {
  "dense": run_dense,
  "grow": run_grow,
  "scale": run_scale,
  "fused": run_fused,
  "fused_eager": run_fused_eager,
  "adversarial": run_adversarial,
}


def _print(row: dict) -> None:
  numbers = ""
  if "ours" in row:
    numbers = f"{row['ours']:>8.2f} {row['theirs']:>8.2f}"
  wanted = ""
  if row.get("wanted") is not None:
    wanted = f">= {row['wanted']:.1f}"
  elif row.get("limit") is not None:
    wanted = f"< {row['limit']:.1f}"
  missed = "  MISSED" if row["below"] else ""
  print(
    f"{row['name']:<66} {row['peer']:<29} {numbers:>17} {row['ratio']:>6.2f}x {wanted:>7}{missed}",
    flush=True,
  )


def _numbers(text: str) -> list[int]:
  return [int(float(part)) for part in text.split(",")]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rows", type=_numbers, default=[10**6, 10**7])
  parser.add_argument("--dims", type=_numbers, default=[16, 64])
  parser.add_argument("--threads", type=_numbers, default=[1, 2])
  parser.add_argument("--repeats", type=int, default=15)
  parser.add_argument("--scale-rows", type=lambda text: int(float(text)), default=40_000_000)
  parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
  parser.add_argument(
    "--cpu-time",
    action="store_true",
    help="compare CPU seconds: steadier on a busy machine, means nothing for more than 1 thread",
  )
  parser.add_argument("--json", help="also write the rows to this file")
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    case, kwargs = json.loads(args.worker)
    print(json.dumps(CASES[case](**kwargs)))
    return

  if args.cpu_time:
    os.environ[_CPU_TIME] = "1"
  largest = max(args.rows)
  plan: list[tuple[str, dict]] = []
  for rows in args.rows:
    for dim in args.dims:
      plan += [("dense", {"rows": rows, "dim": dim, "threads": t}) for t in args.threads]
  plan.append(("grow", {"rows": largest, "dim": 16}))
  plan.append(("scale", {"rows": args.scale_rows, "dim": 8}))
  for per_table in (128, 512, BATCH // NUM_FUSED_TABLES):  # unique ids of three sizes of batch
    sizes = {"rows": 100_000, "dim": 16, "per_table": per_table}
    for case in ("fused", "fused_eager"):
      plan += [(case, {**sizes, "threads": t}) for t in args.threads]
  plan.append(("adversarial", {"rows": min(largest, 10**6), "dim": 16}))

  print(f"{'':<66} {'against':<29} {'M ids/s':>8} {'peer':>8} {'ratio':>7} {'want':>7}")
  rows_printed = []
  for case, kwargs in plan:
    if case not in args.only:
      continue
    kwargs["repeats"] = args.repeats
    command = [sys.executable, __file__, "--worker", json.dumps([case, kwargs])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for row in json.loads(done.stdout.splitlines()[-1]):
      _print(row)
      rows_printed.append(row)
  record([(row["name"], row["peer"], row["ratio"]) for row in rows_printed])
  if args.json:
    pathlib.Path(args.json).write_text(json.dumps(rows_printed, indent=2))
  missed = sum(row["below"] for row in rows_printed)
  print(f"{missed} of {sum('wanted' in r or 'limit' in r for r in rows_printed)} rows missed")


if __name__ == "__main__":
  main()
