"""One process of `train.py`: trains one model, in rounds that the parent asks for.

A process says that it is ready by its first line of standard output; for every line of standard
input it trains one round and answers with the seconds it took. A line that names a folder asks for
a trace of the round there; the answer then has two more numbers, nanoseconds of the monotonic clock
when the round began and ended. The model has one id per example and feature:

    26 ids -> 26 rows of 16 -> [batch, 416] -> dense 64 -> dense 32 -> 1 -> log loss

trained with Adagrad, rows and dense layers alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # The other side of the comparison runs there, too.
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

import graph_layers  # noqa: E402
import step_parts  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402

from monolith.native_training import graph_estimator  # noqa: E402

DIM = 16
UNITS = (64, 32)
LEARNING_RATE = 0.01
INITIAL_ACCUMULATOR = 0.1
ROLES = ("keras", "tuned_keras", "monolith_keras", "local", "ps", "worker")
IDS_FILE, LABELS_FILE = "ids", "labels"
_NO_STEP = 1 << 40  # the driver's own profile would be in the way of ours
# A dense table of 10M rows and its accumulator would take 1.3 GB per feature.
KERAS_BUCKETS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Data:
  """Describes what a model is trained on.

  Attributes:
    folder: of the files.
    features: how many there are, with an id per example each.
    batch: examples of a batch.
    job: name of the processes that train together, below whose folder checkpoints go.
  """

  folder: str
  features: int = 26
  batch: int = 4096
  job: str = "job"

  def folder_of(self, name: str) -> str:
    """Returns a folder that processes of one job share."""
    return os.path.join(self.folder, self.job, name)


class Rounds:
  """Trains one round of steps for every line of standard input, until it ends."""

  def __init__(self, warm_up: int, steps: int):
    self._steps = steps
    self._left = warm_up
    self._start: float | None = None
    self._trace_start: int | None = None

  def step_done(self, steps: int = 1) -> bool:
    """Counts steps, after which it is to be called; returns whether training goes on."""
    self._left -= steps
    if self._left > 0:
      return True
    if self._start is None:
      print("ready", flush=True)
    elif self._trace_start is None:
      print(time.perf_counter() - self._start, flush=True)
    else:
      seconds, end = time.perf_counter() - self._start, time.monotonic_ns()
      tf.profiler.experimental.stop()
      print(seconds, self._trace_start, end, flush=True)
    line = sys.stdin.readline()
    self._left += self._steps
    self._trace_start = _start_trace(line.strip()) if line.strip() else None
    self._start = time.perf_counter()
    return bool(line)


def _start_trace(folder: str) -> int:
  """Starts the profiler; returns the time of an event that it has seen, by the monotonic clock."""
  tf.profiler.experimental.start(
    folder, tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
  )
  start = time.monotonic_ns()
  with tf.profiler.experimental.Trace(step_parts.CLOCK):
    return start


def batches(data: Data) -> tf.data.Dataset:
  """Endless batches of ids `[features, batch]` and labels `[batch]`, read from files."""

  def read(name: str, dtype: tf.DType, shape: list[int]) -> tf.data.Dataset:
    size = dtype.size
    for dim in shape:
      size *= dim
    records = tf.data.FixedLengthRecordDataset(os.path.join(data.folder, name), size)
    return records.map(lambda record: tf.reshape(tf.io.decode_raw(record, dtype), shape))

  ids = read(IDS_FILE, tf.int64, [data.features, data.batch])
  return tf.data.Dataset.zip((ids, read(LABELS_FILE, tf.float32, [data.batch]))).repeat()


def train_keras(data: Data, rounds: Rounds, tuned: bool, steps_per_execution: int = 1) -> None:
  """Trains the model with hashed `Embedding` tables, in the graph that `fit` makes.

  Args:
    data: to train on.
    rounds: how long.
    tuned: the fastest way we found instead of the usual one: a plain modulo, as the ids are
      scrambled, for the `Hashing` layer, and the legacy optimizer, which has a fused op for rows.
    steps_per_execution: how many steps `fit` makes between two looks at callbacks.
  """
  layers, optimizers = tf.keras.layers, tf.keras.optimizers

  def to_inputs(ids: tf.Tensor, labels: tf.Tensor) -> Any:
    if tuned:
      ids = tf.cast(ids % KERAS_BUCKETS, tf.int32)
    return tuple(tf.unstack(ids)), labels

  dtype = tf.int32 if tuned else tf.int64
  inputs = [tf.keras.Input([], dtype=dtype) for _ in range(data.features)]
  buckets = inputs if tuned else [layers.Hashing(KERAS_BUCKETS)(ids) for ids in inputs]
  units = layers.Concatenate()([layers.Embedding(KERAS_BUCKETS, DIM)(ids) for ids in buckets])
  for size in UNITS:
    units = layers.Dense(size, "relu")(units)
  model = tf.keras.Model(inputs, layers.Dense(1)(units))
  # Keras 3 has no legacy optimizers.
  has_legacy = issubclass(layers.Layer, tf.Module)
  adagrad = optimizers.legacy.Adagrad if tuned and has_legacy else optimizers.Adagrad
  model.compile(
    adagrad(LEARNING_RATE, INITIAL_ACCUMULATOR),
    tf.keras.losses.BinaryCrossentropy(from_logits=True),
    steps_per_execution=steps_per_execution,
  )

  dataset = batches(data).map(to_inputs).prefetch(tf.data.AUTOTUNE)
  _fit(model, dataset, rounds, steps_per_execution)


def train_monolith_keras(data: Data, rounds: Rounds, steps_per_execution: int = 1) -> None:
  """Trains the model with our tables as a Keras layer, in the graph that `fit` makes."""
  import monolith.keras
  from monolith.native_training import entry

  layers = tf.keras.layers
  names = [f"f{i}" for i in range(data.features)]

  def to_inputs(ids: tf.Tensor, labels: tf.Tensor) -> Any:
    return dict(zip(names, tf.unstack(ids))), labels

  adagrad = entry.AdagradOptimizer(LEARNING_RATE, INITIAL_ACCUMULATOR)
  inputs = {name: tf.keras.Input([], dtype=tf.int64, name=name) for name in names}
  group = monolith.keras.layers.EmbeddingGroup(
    {name: monolith.keras.layers.Feature(DIM, adagrad) for name in names}, concatenate=True
  )
  units = group(inputs)
  for size in UNITS:
    units = layers.Dense(size, "relu")(units)
  model = tf.keras.Model(inputs, layers.Dense(1)(units))
  model.compile(
    tf.keras.optimizers.Adagrad(LEARNING_RATE, INITIAL_ACCUMULATOR),
    tf.keras.losses.BinaryCrossentropy(from_logits=True),
    steps_per_execution=steps_per_execution,
  )
  dataset = batches(data).map(to_inputs).prefetch(tf.data.AUTOTUNE)
  _fit(model, dataset, rounds, steps_per_execution)


def _fit(
  model: tf.keras.Model, dataset: tf.data.Dataset, rounds: Rounds, steps_per_execution: int
) -> None:
  class Callback(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      if not rounds.step_done(steps_per_execution):
        self.model.stop_training = True

  model.fit(dataset, steps_per_epoch=1 << 40, verbose=0, callbacks=[Callback()])


def create_params(data: Data) -> Any:
  """Returns the params of the same model as a task of ours."""
  from monolith.native_training import entry, feature, native_task

  class BenchmarkTask(native_task.NativeTask):
    def create_input_fn(self, mode: str) -> Callable[[], tf.data.Dataset]:
      def to_features(ids: tf.Tensor, labels: tf.Tensor) -> dict[str, Any]:
        splits = tf.range(data.batch + 1, dtype=tf.int64)
        features: dict[str, Any] = {
          f"f{i}": tf.RaggedTensor.from_row_splits(row, splits, validate=False)
          for i, row in enumerate(tf.unstack(ids))
        }
        return {**features, "label": labels}

      return lambda: batches(data).map(to_features)

    def create_model_fn(self) -> Callable[..., graph_estimator.EstimatorSpec]:
      return self._model_fn

    def _model_fn(self, features: Any, mode: str, config: Any) -> graph_estimator.EstimatorSpec:
      columns, vectors = [], []
      for i in range(data.features):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=f"f{i}",
            default_vec_optimizer=entry.AdagradOptimizer(LEARNING_RATE, INITIAL_ACCUMULATOR),
          )
        )
        columns.append(feature.FeatureColumn(slot, f"f{i}"))
        vectors.append(columns[-1].embedding_lookup(slot.add_feature_slice(DIM)))
      units = tf.concat(vectors, axis=1)
      for size in UNITS:
        units = graph_layers.dense(units, size, tf.nn.relu)
      logits = tf.squeeze(graph_layers.dense(units, 1), axis=1)
      losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=features["label"], logits=logits)
      loss = tf.reduce_mean(losses)
      embeddings = [column.get_all_embeddings_concat() for column in columns]
      variables = tf.compat.v1.trainable_variables()
      gradients = tf.gradients(loss, embeddings + variables)
      optimizer = tf.compat.v1.train.AdagradOptimizer(LEARNING_RATE, INITIAL_ACCUMULATOR)
      train_op = tf.group(
        self.ctx.apply_embedding_gradients(zip(gradients, embeddings)),
        optimizer.apply_gradients(
          zip(gradients[len(embeddings) :], variables),
          tf.compat.v1.train.get_or_create_global_step(),
        ),
      )
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

  params = BenchmarkTask.params()
  params.name = "train_benchmark"
  params.train.per_replica_batch_size = data.batch
  return params


def create_hook(rounds: Rounds, steps_in_flight: int = 1) -> tf.compat.v1.train.SessionRunHook:
  class Hook(tf.compat.v1.train.SessionRunHook):
    _steps = 1  # the first one is alone: it leaves the second its gradients

    def before_run(self, run_context: Any) -> Any:
      # Only runs that train are steps.
      return tf.compat.v1.train.SessionRunArgs(tf.compat.v1.train.get_global_step())

    def after_run(self, run_context: Any, run_values: Any) -> None:
      if not rounds.step_done(self._steps):
        run_context.request_stop()
      self._steps = steps_in_flight

  return Hook()


def train_locally(data: Data, rounds: Rounds, steps_in_flight: int = 1) -> None:
  """Trains as `cpu_training.local_train` does; that has no argument for hooks."""
  from monolith.native_training import cpu_training

  tf.compat.v1.disable_eager_execution()
  conf = cpu_training.CpuTrainingConfig(
    embedding_prefetch_capacity=steps_in_flight,
    enable_embedding_postpush=True,
    steps_in_flight=steps_in_flight,
    profile_some_steps_from=_NO_STEP,
  )
  cpu_training.local_train_internal(
    create_params(data),
    conf,
    data.folder_of("local_model"),
    steps=None,
    user_hooks=[create_hook(rounds, steps_in_flight)],
  )


def play_role(
  data: Data, server_type: str, rounds: Rounds, index: int, num_ps: int, num_workers: int
) -> None:
  """Plays a server or a worker of a training run on processes."""
  from monolith.native_training import cpu_training, service_discovery

  tf.compat.v1.disable_eager_execution()
  config = cpu_training.DistributedCpuTrainingConfig(
    server_type=server_type,
    index=index,
    num_ps=num_ps,
    num_workers=num_workers,
    model_dir=data.folder_of("distributed_model"),
    session_creation_timeout_secs=120,
    intra_op_parallelism_threads=0,  # all cores, as local training has them, instead of eight
    embedding_prefetch_capacity=1,
    enable_embedding_postpush=True,
    profile_some_steps_from=_NO_STEP,
  )
  cpu_training.distributed_train(
    config,
    service_discovery.HostServiceDiscovery(data.folder_of("discovery")),
    create_params(data),
    user_hooks=[create_hook(rounds)],
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("role", choices=ROLES)
  parser.add_argument("folder", help="of the data; checkpoints go below it")
  parser.add_argument("--features", type=int, default=Data.features)
  parser.add_argument("--batch", type=int, default=Data.batch)
  parser.add_argument("--job", default=Data.job, help="processes of one name train together")
  parser.add_argument("--index", type=int, default=0, help="of a server or worker")
  parser.add_argument("--num_ps", type=int, default=1)
  parser.add_argument("--num_workers", type=int, default=1)
  parser.add_argument("--in_flight", type=int, default=1, help="steps at the same time, of `local`")
  parser.add_argument(
    "--steps_per_execution", type=int, default=1, help="steps between callbacks, of Keras"
  )
  parser.add_argument("--warm_up", type=int, default=48, help="steps before the first round")
  parser.add_argument("--steps", type=int, default=20, help="of a round")
  args = parser.parse_args()
  flags.FLAGS(sys.argv[:1])
  tf.get_logger().setLevel("ERROR")
  rounds = Rounds(args.warm_up, args.steps)
  data = Data(args.folder, args.features, args.batch, args.job)
  if args.role == "monolith_keras":
    train_monolith_keras(data, rounds, args.steps_per_execution)
  elif args.role.endswith("keras"):
    train_keras(data, rounds, args.role.startswith("tuned"), args.steps_per_execution)
  elif args.role == "local":
    train_locally(data, rounds, args.in_flight)
  else:
    play_role(data, args.role, rounds, args.index, args.num_ps, args.num_workers)


if __name__ == "__main__":
  main()
