"""A rank that exchanges rows with others, for tests: `python -m tests.sync_exchange <folder>`.

What it saw is in `<folder>/<rank>_of_<size>.pickle`. Everything is done in one process, because a
rank takes long to start.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from monolith.native_training import (
  cpu_training,
  distributed_ps_sync,
  distribution_ops,
  distribution_utils,
  entry,
  feature,
  feature_utils,
  graph_estimator,
  hash_table_ops,
  hvd_lib,
  multi_hash_table_ops,
  multi_type_hash_table,
  native_task,
  test_utils,
)
from tests import hash_table_testing

DIMS = (1, 2, 5)
INT64_MIN, INT64_MAX = hash_table_testing.INT64_MIN, hash_table_testing.INT64_MAX
MANY = 20000


# ---- the table alone ----


class Step(NamedTuple):
  """Holds what a rank looks up and sends back.

  Attributes:
    ids: int64 vector of each table.
    grads: float32 `[ids, dim]` of each table.
  """

  ids: list[np.ndarray]
  grads: list[np.ndarray]


def make_steps(rank: int) -> dict[str, Step]:
  """Returns the steps of a rank, in order."""
  rng = np.random.default_rng([7, rank])

  def step(*ids):
    ids = [np.array(table_ids, np.int64) for table_ids in ids]
    grads = [rng.normal(size=(len(i), dim)).astype(np.float32) for i, dim in zip(ids, DIMS)]
    return Step(ids, grads)

  def random_step(size):
    return step(*(rng.integers(-9, 9, size=rng.integers(size)) for _ in DIMS))

  extreme = [
    ([INT64_MIN, -1, INT64_MAX, -1, 0], [INT64_MIN + 1], [-2, -3, INT64_MAX - 1]),
    ([INT64_MAX, -2, INT64_MIN], [-1, INT64_MAX, -1], [-3, -3, INT64_MIN]),
  ]
  steps = {
    "extreme": step(*extreme[rank % 2]),
    "extreme_again": step(*extreme[(rank + 1) % 2]),
    "one_rank_has_no_ids": step([], [], []) if rank == 1 else step([3, 4], [5], [6, 6, 7]),
    "other_rank_has_no_ids": step([], [], []) if rank == 0 else step([3, 4], [5], [6, 6, 7]),
    "nobody_has_ids": step([], [], []),
    "one_table_is_empty": step([], [4, 4], [5]),
    "unequal": step(*([np.arange(MANY) % 7777 - 100] * 3)) if rank == 1 else step([1], [], [-1]),
    "all_ids_of_one_owner": step([2, 4, 6, 2], [8, 10], [12]),
  }
  steps.update({f"random_{i}": random_step(40) for i in range(8)})
  return steps


def all_ids(size: int) -> list[np.ndarray]:
  """Returns every id that some rank sends, of each table."""
  steps = [step for rank in range(size) for step in make_steps(rank).values()]
  return [np.unique(np.concatenate([step.ids[k] for step in steps])) for k in range(len(DIMS))]


def _make_group(configs):
  return multi_type_hash_table.MultiTypeHashTable(
    configs, lambda name, config: hash_table_ops.hash_table_from_config(config, name_suffix=name)
  )


def run_steps(native: bool) -> dict[str, Any]:
  """Runs the steps; returns what each looked up, and the rows of this rank's shard at the end."""
  size = hvd_lib.size()
  names = [str(k) for k in range(len(DIMS))]
  configs = {
    name: test_utils.generate_test_hash_table_config(dim, learning_rate=0.5)
    for name, dim in zip(names, DIMS)
  }

  def make(_):
    if native:
      return multi_hash_table_ops.MultiHashTable.from_configs(configs)
    return _make_group(configs)

  table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(size, make)
  ids = [tf.compat.v1.placeholder(tf.int64, [None]) for _ in DIMS]
  grads = [tf.compat.v1.placeholder(tf.float32, [None, dim]) for dim in DIMS]
  pack = (*distribution_ops.fused_reorder_by_indices(ids, size, DIMS), None)
  embeddings, bundle = table.lookup(dict(zip(names, ids)), {}, pack)
  update = table.apply_gradients(dict(zip(names, grads)), bundle, tf.constant(0, tf.int64)).as_op()
  everything = all_ids(size)
  if native:
    shard = table._table.lookup(dict(zip(names, everything)))
    stored = None
  else:
    tables = [table._table._hash_tables[name] for name in names]
    shard = {name: t.lookup(i) for name, t, i in zip(names, tables, everything)}
    stored = {name: t.lookup_entry(i) for name, t, i in zip(names, tables, everything)}
  looked_up = {}
  with tf.compat.v1.train.MonitoredSession() as session:
    for step_name, step in make_steps(hvd_lib.rank()).items():
      feed = dict(zip([*ids, *grads], [*step.ids, *step.grads]))
      values, _ = session.run((embeddings, update), feed)
      looked_up[step_name] = [values[name] for name in names]
    # All ranks have sent their gradients when one has got those of the last step.
    shard = session.run(shard)
    if stored is not None:
      stored = {name: [bool(e) for e in dump] for name, dump in session.run(stored).items()}
  return {
    "looked_up": looked_up,
    "shard": [shard[name] for name in names],
    "stored": stored and [stored[name] for name in names],
  }


def run_worked_example() -> dict[str, Any]:
  """Slots "1" and "2", of dimension 1 and 2: every rank sends ids 1, 1 and 2."""
  size = hvd_lib.size()
  configs = {name: test_utils.generate_test_hash_table_config(int(name)) for name in ("1", "2")}
  table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(size, lambda _: _make_group(configs))
  ids = {"1": tf.constant([1, 1], tf.int64), "2": tf.constant([2], tf.int64)}
  reordered = distribution_ops.fused_reorder_by_indices([ids["1"], ids["2"]], size, [1, 2])
  exchanged = {}
  alltoall = hvd_lib.alltoall

  def record(tensor, splits=None, name=None):
    received = alltoall(tensor, splits, name)
    exchanged[name] = (tensor, received)
    return received

  hvd_lib.alltoall = record
  try:
    before, bundle = table.lookup(ids, {}, (*reordered, None))
    seen = dict(bundle)
    updated = table.apply_gradients(
      {"1": tf.constant([[0.5], [0.5]]), "2": tf.constant([[0.5, 1.0]])},
      bundle,
      tf.constant(0, tf.int64),
    ).as_op()
  finally:
    del hvd_lib.alltoall
  with tf.compat.v1.train.MonitoredSession() as session:
    values = session.run((tuple(reordered), before, seen, exchanged, updated))
    after = session.run(before)
  return dict(zip(("reordered", "before", "bundle", "exchanged"), values[:4]), after=after)


def run_accumulation() -> dict[str, np.ndarray]:
  """Sends gradient 1 for one id from every rank, to an optimizer that minds how often."""
  result = {}
  for accumulate in (False, True):
    with tf.Graph().as_default():
      configs = {
        "a": hash_table_testing.config_of(
          hash_table_testing.segment(
            1, entry.AdagradOptimizer(learning_rate=1.0, initial_accumulator_value=1.0)
          )
        )
      }
      table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(
        hvd_lib.size(),
        lambda _, configs=configs: _make_group(configs),
        enable_grad_accumulation=accumulate,
      )
      ids = tf.constant([8], tf.int64)
      pack = (*distribution_ops.fused_reorder_by_indices([ids], hvd_lib.size(), [1]), None)
      rows, bundle = table.lookup({"a": ids}, {}, pack)
      update = table.apply_gradients(
        {"a": tf.ones([1, 1])}, bundle, tf.constant(0, tf.int64)
      ).as_op()
      with tf.compat.v1.train.MonitoredSession() as session:
        session.run(update)
        result["summed" if accumulate else "per_rank"] = session.run(rows["a"])
  return result


# ---- dense gradients ----


def run_allreduce() -> dict[str, Any]:
  """Averages rank-dependent gradients of all kinds, by every strategy."""
  rank = float(hvd_lib.rank())
  result = {}
  for fusion in ("one", "grouped", "none"):
    with tf.Graph().as_default():
      os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"] = fusion
      grads = [
        tf.constant([[1.0, 2.0]]) + rank,
        None,
        tf.IndexedSlices(
          tf.constant([[1.0 + rank]]),
          tf.constant([int(rank)], tf.int64),
          tf.constant([3, 1], tf.int64),
        ),
        tf.constant(10.0 * rank),
      ]
      reduced = feature_utils.allreduce_cond(grads, scale=0.5)
      with tf.compat.v1.Session() as session:
        result[fusion] = session.run([tf.convert_to_tensor(g) for g in reduced if g is not None])
  del os.environ["MONOLITH_WITH_ALLREDUCE_FUSION"]
  return result


# ---- whole training runs ----

BATCH_SIZE = 8
NUM_EXACT_STEPS = 6
NUM_STEPS = NUM_EXACT_STEPS + 30
_PLANTED_IDS = np.arange(-6, 6)

# The switches of a training run; the last one is about the kind of table.
SWITCHES = (
  "enable_pipelined_fwda2a",
  "enable_pipelined_bwda2a",
  "enable_embedding_postpush",
  "use_native_multi_hash_table",
)
TRAININGS = [(*switches, False) for switches in itertools.product((False, True), repeat=3)]
TRAININGS.append((False, False, False, True))
TRAININGS.append((True, True, False, True))


def make_batches() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Returns ids of feature `a` and `b`, each `[batch, 2]`, and labels of all steps.

  In the first steps no id is there in two of them: it does not matter how much later an update
  comes. Then the same few ids come again and again, and the label is a function of them.
  """
  rng = np.random.default_rng(3)
  planted = rng.normal(size=len(_PLANTED_IDS))
  batches = []
  for step in range(NUM_STEPS):
    if step < NUM_EXACT_STEPS:
      ids = 100 * (step + 1) + rng.integers(6, size=(2, BATCH_SIZE, 2))
      labels = rng.normal(size=BATCH_SIZE)
    else:
      positions = rng.integers(len(_PLANTED_IDS), size=(2, BATCH_SIZE, 2))
      ids = _PLANTED_IDS[positions]
      labels = planted[positions].sum(axis=(0, 2))
    batches.append((*ids.astype(np.int64), labels.astype(np.float32)))
  return batches


def trained_ids() -> np.ndarray:
  return np.unique(np.concatenate([np.ravel(ids) for batch in make_batches() for ids in batch[:2]]))


class ExchangeTask(native_task.NativeTask):
  """A linear model of two features; a rank sees its part of each batch."""

  @classmethod
  def params(cls):
    p = super().params()
    p.define("recorder", None, "The hook.")
    return p

  def create_input_fn(self, mode):
    def input_fn():
      part = BATCH_SIZE // hvd_lib.size()
      rows = slice(hvd_lib.rank() * part, (hvd_lib.rank() + 1) * part)
      arrays = [np.stack([batch[i][rows] for batch in make_batches()]) for i in range(3)]

      def to_features(a, b, label):
        return {
          "a": tf.RaggedTensor.from_tensor(a, row_splits_dtype=tf.int64),
          "b": tf.RaggedTensor.from_tensor(b, row_splits_dtype=tf.int64),
          "label": label,
        }

      return tf.data.Dataset.from_tensor_slices(tuple(arrays)).map(to_features)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      del config
      columns, embeddings = [], []
      for name, dim in (("a", 3), ("b", 2)):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=name,
            default_vec_initializer=entry.ZerosInitializer(),
            # An update per rank, of a loss that is a mean over that rank's part of the batch.
            default_vec_optimizer=entry.SgdOptimizer(0.4 / hvd_lib.size()),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        columns.append(feature.FeatureColumn(slot, name))
        embeddings.append(columns[-1].embedding_lookup(slot.add_feature_slice(dim)))
      # Different on each rank, until rank 0's values are broadcast.
      initial = np.linspace(0.5, 1.0, 5).reshape([5, 1]) * (1 + hvd_lib.rank())
      kernel = tf.compat.v1.get_variable(
        "kernel", [5, 1], initializer=tf.constant_initializer(initial)
      )
      outputs = tf.squeeze(tf.matmul(tf.concat(embeddings, axis=1), kernel), axis=1)
      loss = tf.reduce_mean(tf.square(outputs - features["label"]))
      train_op = feature_utils.apply_gradients_with_var_optimizer(
        self.ctx,
        columns,
        tf.compat.v1.train.GradientDescentOptimizer(0.02),
        loss,
        global_step=tf.compat.v1.train.get_or_create_global_step(),
        use_allreduce=True,
      )
      self.p.recorder.watch(loss, kernel)
      return graph_estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=[self.p.recorder]
      )

    return model_fn


class _Recorder(tf.compat.v1.train.SessionRunHook):
  """Records loss, kernel and the rows of this rank after every step, and the rows at the end."""

  def __init__(self):
    self.losses: list[float] = []
    self.kernels: list[np.ndarray] = []
    self.rows: list[list[np.ndarray]] = []

  def watch(self, loss: tf.Tensor, kernel: tf.Variable) -> None:
    self._loss, self._kernel = loss, kernel

  def begin(self):
    self._kernel_value = self._kernel.read_value()
    ids = trained_ids()
    tables = tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY)
    if tables:
      rows = [t.lookup(ids) for t in sorted(tables, key=lambda t: -t.dim_size)]
    else:
      [group] = tf.compat.v1.get_collection(multi_hash_table_ops._MULTI_HASH_TABLE_GRAPH_KEY)
      rows = group.lookup({"a": ids, "b": ids})
      rows = [rows["a"], rows["b"]]
    self._rows = rows

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._loss)

  def after_run(self, run_context, run_values):
    kernel, rows = run_context.session.run((self._kernel_value, self._rows))
    self.losses.append(float(run_values.results))
    self.kernels.append(kernel)
    self.rows.append(rows)

  def end(self, session):
    self.final_rows = session.run(self._rows)


def run_training(folder: str, switches: tuple[bool, ...]) -> dict[str, Any]:
  """Trains as the driver does; returns what the recorder saw."""
  name = "".join(str(int(switch)) for switch in switches)
  config = cpu_training.DistributedCpuTrainingConfig(
    model_dir=os.path.join(folder, f"model_{hvd_lib.size()}_{name}"),
    enable_sync_training=True,
    intra_op_parallelism_threads=1,
    inter_op_parallelism_threads=4,
    **dict(zip(SWITCHES, switches)),
  )
  distribution_utils.init_sync_train_and_update_conf(config)
  recorder = _Recorder()
  params = ExchangeTask.params()
  params.name = "exchange_task"
  params.recorder = recorder
  params.metrics.enable_tf2_profiler_hook = False
  cpu_training.distributed_sync_train(config, params)
  return {
    "losses": recorder.losses,
    "kernels": recorder.kernels,
    "rows": recorder.rows,
    "final_rows": recorder.final_rows,
  }


def main(folder: str) -> None:
  tf.compat.v1.disable_eager_execution()
  hvd_lib.init()
  result: dict[str, Any] = {"trainings": {}}
  for name, run in (
    ("worked_example", run_worked_example),
    ("steps", lambda: run_steps(native=False)),
    ("native_steps", lambda: run_steps(native=True)),
    ("accumulation", run_accumulation),
    ("allreduce", run_allreduce),
  ):
    print(f"{name} ...", flush=True)
    with tf.Graph().as_default():
      result[name] = run()
  for switches in TRAININGS:
    if hvd_lib.size() == 1 and any(switches):
      continue
    print(f"training {switches} ...", flush=True)
    result["trainings"][switches] = run_training(folder, switches)
  with open(os.path.join(folder, f"{hvd_lib.rank()}_of_{hvd_lib.size()}.pickle"), "wb") as f:
    pickle.dump(result, f)
  print("done", flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
