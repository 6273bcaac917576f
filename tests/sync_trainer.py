"""A rank of synchronous training, for tests: `python -m tests.sync_trainer <folder> <job>...`.

Each job is a file `<folder>/<job>.json` with the settings of `Job`; the jobs are done one after
another in the same process. What came of a job is in `<folder>/<job>.<rank>.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from monolith.native_training import (
  cpu_training,
  entry,
  feature,
  feature_utils,
  graph_estimator,
  hvd_lib,
  multi_hash_table_ops,
  native_task,
)
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import reshard as checkpoint_reshard
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2

_TRAIN = graph_estimator.ModeKeys.TRAIN
BATCH_SIZE = 8
VOCABULARY = 40
# Ids that only one rank sees in one step, so that what was trained can be told from the tables.
_OWN_ID_BASE = 1000


@dataclasses.dataclass
class Job:
  """One training run.

  Attributes:
    model_dir: where checkpoints go; `{rank}` in it becomes the rank.
    num_elements: how much data there is, by rank.
    config: fields of the training configuration.
    export: export when saving.
    max_steps: where training ends.
    learning_rate: the rate for rows and variables.
    slices: sizes of those of the first table.
    is_shared: whether that table is the second one too.
    env: environment variables meanwhile.
    files: step -> (name, content) of a file that rank 0 writes into the model folder.
    fail_saves: rank -> name of an error that its first save of rows ends with.
    die_at: rank -> step after which its process is killed.
    raise_at: rank -> step after which it raises.
  """

  model_dir: str
  num_elements: list[int]
  config: dict[str, Any] = dataclasses.field(default_factory=dict)
  export: bool = False
  max_steps: int | None = None
  learning_rate: float = 0.05
  slices: Sequence[int] = (4,)
  is_shared: bool = False
  env: dict[str, str] = dataclasses.field(default_factory=dict)
  files: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
  fail_saves: dict[str, str] = dataclasses.field(default_factory=dict)
  die_at: dict[str, int] = dataclasses.field(default_factory=dict)
  raise_at: dict[str, int] = dataclasses.field(default_factory=dict)

  def write(self, folder: str, name: str) -> None:
    with open(os.path.join(folder, f"{name}.json"), "w") as f:
      json.dump(dataclasses.asdict(self), f)


def own_id(rank: int, element: int) -> int:
  return _OWN_ID_BASE * (rank + 1) + element


def elements(rank: int, count: int):
  """Yields ids `[batch, 3]` and labels; the label is a planted function of the first two ids."""
  weights = np.random.default_rng(1).normal(size=VOCABULARY)
  for i in range(count):
    rng = np.random.default_rng([rank, i])
    ids = rng.integers(VOCABULARY, size=(BATCH_SIZE, 3))
    labels = weights[ids[:, 0]] + weights[ids[:, 1]]
    # Negative ids too: every id has one home.
    ids[:, 1] -= VOCABULARY
    ids[:, 2] = own_id(rank, i)
    yield ids.astype(np.int64), labels.astype(np.float32)


class SyncTask(native_task.NativeTask):
  """Learns the planted function with two tables and a dense layer."""

  @classmethod
  def params(cls):
    p = super().params()
    p.define("num_elements", 0, "Of the data.")
    p.define("rank", 0, "Whose data.")
    p.define("learning_rate", 0.1, "Of rows and variables.")
    p.define("slices", (4,), "Sizes of those of the first table.")
    p.define("is_shared", False, "Whether that table is the second one too.")
    return p

  def create_input_fn(self, mode):
    def input_fn():
      dataset = tf.data.Dataset.from_generator(
        lambda: elements(self.p.rank, self.p.num_elements),
        output_signature=(
          tf.TensorSpec([BATCH_SIZE, 3], tf.int64),
          tf.TensorSpec([BATCH_SIZE], tf.float32),
        ),
      )
      return dataset.map(_to_features)

    return input_fn

  def create_model_fn(self):
    def model_fn(features, mode, config):
      del config
      columns, embeddings = [], []
      slots = {"first": (["first"], self.p.slices), "second": (["second"], (2,))}
      if self.p.is_shared:
        slots = {"both": (["first", "second"], self.p.slices)}
      for slot_name, (names, dims) in slots.items():
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=slot_name,
            default_vec_initializer=entry.ZerosInitializer(),
            default_vec_optimizer=entry.SgdOptimizer(self.p.learning_rate),
            default_vec_compressor=entry.Fp32Compressor(),
          )
        )
        slices = [slot.add_feature_slice(dim) for dim in dims]
        for name in names:
          columns.append(feature.FeatureColumn(slot, name))
          embeddings += [columns[-1].embedding_lookup(s) for s in slices]
      inputs = tf.concat(embeddings, axis=1)
      kernel = tf.compat.v1.get_variable(
        "kernel",
        [inputs.shape[1], 1],
        initializer=tf.random_normal_initializer(seed=hvd_lib.rank()),
      )
      outputs = tf.squeeze(tf.matmul(inputs, kernel), axis=1)
      if mode == graph_estimator.ModeKeys.PREDICT:
        return graph_estimator.EstimatorSpec(mode, predictions=outputs)
      loss = tf.reduce_mean(tf.square(outputs - features["label"]))
      tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.LOSSES, loss)
      if "req_time" in features:
        tf.compat.v1.add_to_collection("req_time", features["req_time"])
      train_op = feature_utils.apply_gradients_with_var_optimizer(
        self.ctx,
        columns,
        tf.compat.v1.train.GradientDescentOptimizer(self.p.learning_rate),
        loss,
        global_step=tf.compat.v1.train.get_or_create_global_step(),
        use_allreduce=True,
      )
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn

  def create_serving_input_receiver_fn(self):
    def receiver_fn():
      serialized = tf.compat.v1.placeholder(tf.string, [None], name="instances")
      ids = tf.io.decode_raw(serialized, tf.int64)
      features = _to_features(ids, tf.zeros([tf.shape(ids)[0]]))
      return graph_estimator.ServingInputReceiver(features, {"instances": serialized})

    return receiver_fn


def _to_features(ids, labels):
  def ragged(values):
    return tf.RaggedTensor.from_tensor(values, row_splits_dtype=tf.int64)

  # The request time is the number of the element.
  element = tf.math.floormod(ids[0, 2], _OWN_ID_BASE)
  return {
    "first": ragged(tf.concat([ids[:, :1], ids[:, 2:]], axis=1)),
    "second": ragged(ids[:, 1:2]),
    "label": labels,
    "req_time": tf.fill([BATCH_SIZE], element),
  }


class _JobHook(tf.compat.v1.train.SessionRunHook):
  """Does to the training run what the job says, and records it."""

  def __init__(self, job: Job, rank: int):
    self._job = job
    self._rank = rank
    self.steps: list[int] = []
    self.kernel: np.ndarray | None = None

  def begin(self):
    self._global_step = tf.compat.v1.train.get_or_create_global_step()
    kernels = [v for v in tf.compat.v1.global_variables() if v.op.name == "kernel"]
    self._kernel = kernels[0].read_value()

  def after_run(self, run_context, run_values):
    step, self.kernel = run_context.session.run([self._global_step, self._kernel])
    step = int(step)
    self.steps.append(step)
    rank = str(self._rank)
    if self._rank == 0 and str(step) in self._job.files:
      name, content = self._job.files[str(step)]
      with open(os.path.join(self._job.model_dir, name), "w") as f:
        f.write(content)
    if self._job.die_at.get(rank) == step:
      os.kill(os.getpid(), signal.SIGKILL)
    if self._job.raise_at.get(rank) == step:
      raise RuntimeError("as the job says")


def _fail_first_save(error_name: str) -> None:
  """Lets the next save of rows of this process fail."""
  error = {
    "op": tf.errors.InternalError(None, None, "as the job says"),
    "os": OSError("as the job says"),
  }[error_name]
  listener = multi_hash_table_ops.MultiHashTableCheckpointSaverListener
  original = listener.before_save

  def before_save(*unused_args):
    listener.before_save = original
    raise error

  listener.before_save = before_save


def run_job(job: Job) -> dict[str, Any]:
  """Does a job as the rank that this process is; returns what came of it."""
  rank, size = hvd_lib.rank(), hvd_lib.size()
  config = cpu_training.DistributedCpuTrainingConfig(
    model_dir=job.model_dir.format(rank=rank),
    index=rank,
    num_workers=size,
    enable_sync_training=True,
    reorder_fids_in_data_pipeline=True,
    intra_op_parallelism_threads=1,
    inter_op_parallelism_threads=4,
    **job.config,
  )
  params = SyncTask.params()
  params.name = "sync_task"
  params.num_elements = job.num_elements[rank]
  params.rank = rank
  params.learning_rate = job.learning_rate
  params.slices = job.slices
  params.is_shared = job.is_shared
  params.train.max_steps = job.max_steps
  params.serving.export_when_saving = job.export
  params.metrics.enable_tf2_profiler_hook = False
  hook, losses = _JobHook(job, rank), []
  original_env = {name: os.environ.get(name) for name in job.env}
  os.environ.update(job.env)
  if str(rank) in job.fail_saves:
    _fail_first_save(job.fail_saves[str(rank)])
  result: dict[str, Any] = {"error": ""}
  start = time.monotonic()
  try:
    with tf.Graph().as_default():
      cpu_training.distributed_sync_train(config, params, user_hooks=[hook, _LossHook(losses)])
  except Exception as e:
    result["error"] = f"{type(e).__name__}: {e}"
  finally:
    for name, value in original_env.items():
      if value is None:
        del os.environ[name]
      else:
        os.environ[name] = value
  result.update(
    steps=hook.steps,
    losses=losses,
    kernel=None if hook.kernel is None else np.asarray(hook.kernel).ravel().tolist(),
    seconds=time.monotonic() - start,
  )
  return result


class _LossHook(tf.compat.v1.train.SessionRunHook):
  """Remembers the loss of every step, which Estimator fetches."""

  def __init__(self, losses: list[float]):
    self._losses = losses

  def begin(self):
    self._loss = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1]

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._loss)

  def after_run(self, run_context, run_values):
    self._losses.append(float(run_values.results))


def read_result(folder: str, name: str, rank: int) -> dict[str, Any]:
  with open(os.path.join(folder, f"{name}.{rank}.json")) as f:
    return json.load(f)


def read_rows(prefix: str) -> dict[tuple[str, int], tuple[int, list[float]]]:
  """Returns (table, id) -> (shard, vector) of a checkpoint.

  Raises:
    AssertionError: a row is there twice.
  """
  rows: dict[tuple[str, int], tuple[int, list[float]]] = {}
  assets = prefix + ".assets/"
  for name in sorted(checkpoint_files.list_dir(assets)):
    match = re.match(r"(.*?)_(\d+)-\d{5}-of-\d{5}$", name)
    if match is None:
      continue
    shard = int(match.group(2))
    if match.group(1) == "MonolithMultiHashTable":
      group = checkpoint_reshard._GroupFile(assets, name)
      records = [(table, record) for table in sorted(group.counts) for record in group.read(table)]
    else:
      records = [(match.group(1), record) for record in checkpoint_reshard._read(assets + name)]
    for table, record in records:
      dump = embedding_hash_table_pb2.EntryDump.FromString(record)
      assert (table, dump.id) not in rows, (table, dump.id)
      rows[table, dump.id] = (shard, list(dump.num))
  return rows


def main(folder: str, names: list[str]) -> None:
  tf.compat.v1.disable_eager_execution()
  hvd_lib.init()
  for name in names:
    with open(os.path.join(folder, f"{name}.json")) as f:
      job = Job(**json.load(f))
    print(f"job {name}", flush=True)
    result = run_job(job)
    print(f"job {name}: {result['error'] or 'done'} {result['seconds']:.1f} s", flush=True)
    with open(os.path.join(folder, f"{name}.{hvd_lib.rank()}.json"), "w") as f:
      json.dump(result, f)
    if result["error"]:
      print(result["error"], file=sys.stderr, flush=True)
      sys.exit(1)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2:])
