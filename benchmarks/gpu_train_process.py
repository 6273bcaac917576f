"""One process of `gpu_train.py`: trains one model, in rounds that the parent asks for.

A process says that it is ready by its first line of standard output; for every line of standard
input it trains one round and answers with the seconds it took. The model:

    26 ids -> 26 rows of 64 -> [batch, 1664] -> dense 512 -> dense 256 -> 1 -> log loss

trained with Adagrad, rows and dense layers alike. Matrix products are in TF32 everywhere, which is
TensorFlow's default; PyTorch gets their batches on the GPU, TensorFlow reads them from files.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several processes share the card.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

from gpu_train_data import (  # noqa: E402
  DIM,
  IDS_OF_A_FEATURE,
  INITIAL_ACCUMULATOR,
  LEARNING_RATE,
  NUM_BATCHES,
  NUM_FEATURES,
  UNITS,
  read,
)

# A step of this model, and what waits until the GPU has done all steps.
Step = Callable[[int], None]


class Rounds:
  """Trains one round of steps for every line of standard input, until it ends.

  Args:
    steps: of a round.
    wait: returns when the GPU has done all steps.
  """

  def __init__(self, steps: int, wait: Callable[[], None] = lambda: None):
    self._steps = steps
    self._wait = wait
    self._left = 2 * NUM_BATCHES
    self._start: float | None = None

  def step_done(self) -> bool:
    """Counts a step, after which it is to be called; returns whether training goes on."""
    self._left -= 1
    if self._left > 0:
      return True
    self._wait()
    print("ready" if self._start is None else time.perf_counter() - self._start, flush=True)
    goes_on = bool(sys.stdin.readline())
    self._left = self._steps
    self._start = time.perf_counter()
    return goes_on


def torch_step(
  role: str, folder: str, batch_size: int, graph_dense: bool = False
) -> tuple[Step, Callable[[], None]]:
  """Returns the step of a model in PyTorch, and what waits for the GPU.

  Args:
    role: `torch`, `torch_one` or `fbgemm`; `dense` has no tables, and so tells what those cost.
    folder: with the batches.
    batch_size: of them.
    graph_dense: the dense layers and the loss are captured into CUDA graphs, there and back.
  """
  import torch

  torch.set_float32_matmul_precision("high")
  all_ids, all_labels = read(folder, batch_size)
  ids = torch.from_numpy(all_ids).cuda()
  labels = torch.from_numpy(all_labels).cuda()
  if role == "fbgemm":
    look_up, to_features = _fbgemm(batch_size)
  elif role == "dense":
    look_up, to_features = _no_tables(batch_size)
  else:
    look_up, to_features = _collection(role == "torch_one")
  # As a data loader would hand them over.
  features = [to_features(one) for one in ids]
  layers: list[Any] = []
  width = NUM_FEATURES * DIM
  for size in UNITS:
    layers += [torch.nn.Linear(width, size), torch.nn.ReLU()]
    width = size

  class Dense(torch.nn.Module):
    def __init__(self) -> None:
      super().__init__()
      self.tower = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    def forward(self, vectors: Any, labels: Any) -> Any:
      logits = self.tower(vectors)[:, 0]
      return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

  dense: Any = Dense().cuda()
  optimizer = torch.optim.Adagrad(
    dense.parameters(), LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR
  )
  if graph_dense:
    like = torch.zeros(batch_size, NUM_FEATURES * DIM, device="cuda", requires_grad=True)
    dense = torch.cuda.make_graphed_callables(dense, (like, labels[0]))

  def step(number: int) -> None:
    batch = number % NUM_BATCHES
    optimizer.zero_grad()
    dense(look_up(features[batch]), labels[batch]).backward()
    optimizer.step()

  return step, torch.cuda.synchronize


def _collection(is_one_table: bool) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
  """Returns what looks features up, and what makes features of ids `[features, batch]`."""
  import monolith.torch as mt
  from monolith.table import Optimizer

  names = [f"f{i}" for i in range(NUM_FEATURES)]
  tables = mt.EmbeddingBagCollection(
    [
      mt.EmbeddingBagConfig(
        f"t{i}",
        DIM,
        features,
        optimizer=Optimizer("adagrad", initial_accumulator_value=INITIAL_ACCUMULATOR),
        learning_rate=LEARNING_RATE,
      )
      for i, features in enumerate([names] if is_one_table else [[name] for name in names])
    ],
    device="cuda",
  )
  return lambda features: tables(features).values(), lambda ids: dict(zip(names, ids))


def _fbgemm(batch_size: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
  import torch
  from fbgemm_gpu.split_embedding_configs import EmbOptimType
  from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
  from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
  )

  place = (IDS_OF_A_FEATURE, DIM, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
  tables = SplitTableBatchedEmbeddingBagsCodegen(
    [place] * NUM_FEATURES, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=LEARNING_RATE
  )
  offsets = torch.arange(NUM_FEATURES * batch_size + 1, device="cuda")
  return lambda ids: tables(ids, offsets), lambda ids: ids.reshape(-1)


def _no_tables(batch_size: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
  """Returns what gives the same vectors to all batches, and takes their gradients."""
  import torch

  vectors = torch.randn(batch_size, NUM_FEATURES * DIM, device="cuda", requires_grad=True)

  def look_up(features: Any) -> Any:
    del features
    vectors.grad = None  # kept, it would be added to
    return vectors

  return look_up, lambda ids: None


def train_torch(
  role: str, folder: str, batch_size: int, steps: int, graph_dense: bool = False
) -> None:
  """Trains a model in PyTorch."""
  step, wait = torch_step(role, folder, batch_size, graph_dense)
  rounds = Rounds(steps, wait)
  number = 0
  while True:
    step(number)
    number += 1
    if not rounds.step_done():
      return


def batches(folder: str, batch_size: int) -> Any:
  """Returns an endless `tf.data.Dataset` of ids `[features, batch]` and labels `[batch]`."""
  import tensorflow as tf

  def from_file(name: str, dtype: Any, shape: list[int]) -> Any:
    size = dtype.size
    for dim in shape:
      size *= dim
    records = tf.data.FixedLengthRecordDataset(os.path.join(folder, name), size)
    return records.map(lambda record: tf.reshape(tf.io.decode_raw(record, dtype), shape))

  ids = from_file("ids", tf.int64, [NUM_FEATURES, batch_size])
  return tf.data.Dataset.zip((ids, from_file("labels", tf.float32, [batch_size]))).repeat()


def import_with_keras_2() -> Any:
  """Returns TensorFlow, not imported before, with Keras 2, whose optimizers step rows alone.

  Those of Keras 3 would write all of 4M rows in each step.
  """
  if importlib.metadata.version("keras").startswith("3"):
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
  import tensorflow as tf

  try:
    if not hasattr(tf.keras.optimizers, "legacy"):
      raise ImportError("tf.keras is that of Keras 3")
  except ImportError as error:
    raise RuntimeError(
      "TensorFlow brings Keras 3, and Keras 2 is missing: pip install tf_keras"
    ) from error
  return tf


def train_keras(folder: str, batch_size: int, steps: int) -> None:
  """Trains the model with an `Embedding` for each feature, in a `tf.function`."""
  tf = import_with_keras_2()
  _require_gpu(tf)
  layers = tf.keras.layers
  embeddings = [layers.Embedding(IDS_OF_A_FEATURE, DIM) for _ in range(NUM_FEATURES)]
  tower = tf.keras.Sequential([layers.Dense(size, "relu") for size in UNITS] + [layers.Dense(1)])
  optimizer = tf.keras.optimizers.legacy.Adagrad(LEARNING_RATE, INITIAL_ACCUMULATOR)

  @tf.function
  def step(ids: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
      vectors = [embed(one) for embed, one in zip(embeddings, tf.unstack(ids))]
      logits = tower(tf.concat(vectors, 1))[:, 0]
      loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
    variables = [*tower.trainable_variables]
    for embed in embeddings:
      variables += embed.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

  losses: list[Any] = []

  def wait() -> None:
    losses[-1].numpy()

  rounds = Rounds(steps, wait)
  for ids, labels in batches(folder, batch_size).prefetch(tf.data.AUTOTUNE):
    losses[:] = [step(ids, labels)]
    if not rounds.step_done():
      return


def create_params(folder: str, batch_size: int) -> Any:
  """Returns the params of the model as a task of ours."""
  import graph_layers
  import tensorflow as tf

  from monolith.native_training import device_utils, entry, feature, graph_estimator, native_task

  class BenchmarkTask(native_task.NativeTask):
    def create_input_fn(self, mode: str) -> Callable[[], Any]:
      def to_features(ids: Any, labels: Any) -> dict[str, Any]:
        splits = tf.range(batch_size + 1, dtype=tf.int64)
        features: dict[str, Any] = {
          f"f{i}": tf.RaggedTensor.from_row_splits(row, splits, validate=False)
          for i, row in enumerate(tf.unstack(ids))
        }
        return {**features, "label": labels}

      return lambda: batches(folder, batch_size).map(to_features)

    def create_model_fn(self) -> Callable[..., Any]:
      return self._model_fn

    def _model_fn(self, features: Any, mode: str, config: Any) -> Any:
      columns, vectors = [], []
      for i in range(NUM_FEATURES):
        slot = self.ctx.create_feature_slot(
          feature.FeatureSlotConfig(
            name=f"f{i}",
            default_vec_optimizer=entry.AdagradOptimizer(LEARNING_RATE, INITIAL_ACCUMULATOR),
          )
        )
        columns.append(feature.FeatureColumn(slot, f"f{i}"))
        vectors.append(columns[-1].embedding_lookup(slot.add_feature_slice(DIM)))
      with device_utils.maybe_device_if_allowed("/device:GPU:0"):
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
        dense = optimizer.apply_gradients(
          zip(gradients[len(embeddings) :], variables),
          tf.compat.v1.train.get_or_create_global_step(),
        )
      rows = self.ctx.apply_embedding_gradients(zip(gradients, embeddings))
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(rows, dense))

  params = BenchmarkTask.params()
  params.name = "gpu_train_benchmark"
  params.train.per_replica_batch_size = batch_size
  params.train.use_gpu_emb_table = True
  return params


def train_driver(
  folder: str,
  batch_size: int,
  hooks: list[Any],
  steps: int | None = None,
  is_on_gpu: bool = True,
  looks_ahead: bool = False,
) -> None:
  """Trains the task through the driver, for as long as the hooks let it."""
  import tensorflow as tf

  from monolith.native_training import cpu_training

  if is_on_gpu:
    _require_gpu(tf)
  tf.compat.v1.disable_eager_execution()
  params = create_params(folder, batch_size)
  params.train.use_gpu_emb_table = is_on_gpu
  config = cpu_training.CpuTrainingConfig(
    enable_gpu_training=is_on_gpu,
    embedding_prefetch_capacity=int(looks_ahead),
    save_checkpoints_steps=1 << 40,
  )
  cpu_training.local_train_internal(
    params, config, os.path.join(folder, "model"), steps, user_hooks=hooks
  )


def _train_driver_in_rounds(folder: str, batch_size: int, steps: int, looks_ahead: bool) -> None:
  import tensorflow as tf

  class Hook(tf.compat.v1.train.SessionRunHook):
    def __init__(self) -> None:
      self._rounds = Rounds(steps)

    def after_run(self, run_context: Any, run_values: Any) -> None:
      if not self._rounds.step_done():
        os._exit(0)  # nobody wants a checkpoint

  train_driver(folder, batch_size, [Hook()], looks_ahead=looks_ahead)


def _require_gpu(tf: Any) -> None:
  if not tf.config.list_physical_devices("GPU"):
    raise RuntimeError("TensorFlow finds no GPU")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "role",
    choices=["driver", "driver_ahead", "keras", "torch", "torch_one", "fbgemm", "dense"],
  )
  parser.add_argument("folder")
  parser.add_argument("--batch_size", type=int, required=True)
  parser.add_argument("--steps", type=int, required=True, help="of a round")
  parser.add_argument("--graph_dense", action="store_true", help="see gpu_train.py")
  options = parser.parse_args()
  arguments = options.folder, options.batch_size, options.steps
  if options.role in ("driver", "driver_ahead"):
    _train_driver_in_rounds(*arguments, looks_ahead=options.role == "driver_ahead")
  elif options.role == "keras":
    train_keras(*arguments)
  else:
    train_torch(options.role, *arguments, options.graph_dense)


if __name__ == "__main__":
  main()
