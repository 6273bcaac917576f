"""Trains a Keras model with the drivers: in this process, on parameter servers, on ranks.

  monolith.keras.train(model, dataset, "model_dir", num_ps=2)

Which of them it is says the environment: `TF_CONFIG` describes servers and workers, a launcher, or
a `TF_CONFIG` without servers, makes ranks, and without either tables are in this process, or on
servers inside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from monolith import _quiet
from monolith.keras import _keras, devices, groups
from monolith.keras import task as keras_task
from monolith.native_training import estimator
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import restored, topology
from monolith.native_training.service_discovery import ServiceDiscoveryType
from monolith.native_training.settings import rank_environment as ranks

_TF_CONFIG = "TF_CONFIG"
_GLOBAL_STEP = tf.compat.v1.GraphKeys.GLOBAL_STEP
# Names of a group's files: without servers, and on a single server.
_GROUPS = ("MonolithMultiHashTable_", "MonolithMultiHashTable_0")


def train(
  model: tf.keras.Model,
  dataset: keras_task.Data,
  model_dir: str,
  *,
  max_steps: int | None = None,
  num_ps: int = 0,
  save_checkpoints_steps: int | None = None,
  hooks: Sequence[tf.compat.v1.train.SessionRunHook] | None = None,
  load: bool | None = None,
  config: estimator.RunnerConfig | None = None,
) -> str | None:
  """Trains a compiled model until its data ends, or a step is reached.

  Every process of a cluster calls it with the same model. Parameter servers serve and return when
  training is over. Tables begin with their rows and variables with their values if `model_dir` has
  no checkpoint; else training goes on from the newest one there.

  Args:
    model: a compiled model that looks up `monolith.keras` tables. Its loss, its optimizer (with the
      limits of its gradients) and the tables' own train it; metrics and callbacks do nothing here.
    dataset: batches as `fit` takes them: a `tf.data.Dataset`, of which a worker gets every n-th
      batch, or a function of a worker's number and the number of workers that makes its share.
    model_dir: folder of the checkpoints and curves; processes of a cluster see the same.
    max_steps: the global step to stop at, over all workers; by default the end of the data.
    num_ps: without a cluster, how many parameter servers to start inside this process.
    save_checkpoints_steps: steps between checkpoints; by default one every few minutes. There is
      always one at the end.
    hooks: for the session.
    load: whether the model gets what was trained: rows and variables, not the optimizer's state. By
      default if there is no cluster, whose rows may be more than one process holds.
    config: what to run with instead of what the environment says.

  Returns:
    The newest checkpoint; `None` for servers, and workers and ranks other than the first.

  Raises:
    ValueError: the model is not compiled, has no table, or computes ids from what it learns; the
      dataset cannot be moved into a graph; there is a cluster and `num_ps` is given; some tables
      are on a GPU and some are not, or are there while servers hold rows; or `model_dir` has
      checkpoints, but lost the file `checkpoint`.
    TypeError: `dataset` is something else.
    RuntimeError: eager execution is off.
  """
  if not tf.executing_eagerly():
    raise RuntimeError("train needs eager execution, which is off here, as Keras models do")
  _quiet.filter_tensorflow()
  is_own_config = config is None
  if config is None:
    config = _make_config(num_ps)
  elif num_ps:
    raise ValueError(f"num_ps is {num_ps}, but config says how many servers there are")
  is_cluster = not config.is_local
  config.model_dir = model_dir
  if save_checkpoints_steps is not None:
    config.save_checkpoints_steps = save_checkpoints_steps
  task = keras_task.KerasTask(model, dataset, is_rank=config.enable_full_sync_training)
  if task.table_device == devices.GPU:
    _place_on_gpu(task, config, is_own_config)
  is_first = _is_first(config)
  if is_first and tf.train.latest_checkpoint(model_dir) is None:
    lost = checkpoint_files.unrecorded_checkpoints(model_dir)
    if lost:
      raise ValueError(checkpoint_files.how_to_record(model_dir, lost))
    _save_rows(task, model_dir)
  with tf.Graph().as_default():
    estimator.Estimator(task, config).train(
      max_steps=max_steps, hooks=None if hooks is None else list(hooks)
    )
  if not is_first:
    return None
  if load or (load is None and not is_cluster):
    _load(task, model_dir)
  return tf.train.latest_checkpoint(model_dir)


def load_trained(model: tf.keras.Model, dataset: keras_task.Data, model_dir: str) -> None:
  """Gives a model the rows and variables of the newest checkpoint that `train` has saved.

  Args:
    model: the model that was trained, or one that is built in the same way, compiled.
    dataset: batches of the form that it was trained on; none is read.
    model_dir: the folder that `train` was given. The rows of all its servers must fit into memory.

  Raises:
    ValueError: there is no checkpoint, or it is that of another model.
    tf.errors.OpError: its files are damaged, or hold rows of another dimension.
  """
  _load(keras_task.KerasTask(model, dataset), model_dir)


def _place_on_gpu(
  task: keras_task.KerasTask, config: estimator.RunnerConfig, is_own_config: bool
) -> None:
  """Lets the driver keep tables on the GPU.

  Raises:
    ValueError: there are servers, which keep rows in main memory.
  """
  if config.num_ps:
    raise ValueError(
      f"tables {sorted(task.slots)} are on a GPU, but {config.num_ps} parameter servers keep rows "
      "in main memory: leave the servers or device='gpu' out"
    )
  config.enable_gpu_training = True
  task.p.train.use_gpu_emb_table = True
  if is_own_config:
    # Worth it where lookups and updates use other cores than the dense part.
    config.embedding_prefetch_capacity = 0
    config.enable_embedding_postpush = False


def _make_config(num_ps: int) -> estimator.RunnerConfig:
  # Workers without servers are ranks.
  tf_config = None if ranks.read_worker_cluster() is not None else os.environ.get(_TF_CONFIG)
  is_rank = not tf_config and ranks.is_under_mpi()
  if (tf_config or is_rank) and num_ps:
    where = _TF_CONFIG if tf_config else "the ranks' launcher"
    raise ValueError(
      f"num_ps is {num_ps}, but {where} says which processes there are: leave it out"
    )
  config = estimator.RunConfig(
    is_local=not (tf_config or is_rank), num_ps=num_ps
  ).to_runner_config()
  if tf_config:
    cluster = json.loads(tf_config).get("cluster", {})
    config.discovery_type = ServiceDiscoveryType.PRIMUS
    config.tf_config = tf_config
    config.num_ps = len(cluster.get("ps", []))
    config.num_workers = len(cluster.get("chief", [])) + len(cluster.get("worker", []))
  elif is_rank:
    config.enable_sync_training = True
    config.num_workers = ranks.get_mpi_size()
    config.index = ranks.get_mpi_rank()
  return config


def _is_first(config: estimator.RunnerConfig) -> bool:
  """Returns whether this process is the one that saves."""
  if config.is_local:
    return True
  if config.discovery_type == ServiceDiscoveryType.PRIMUS and config.tf_config:
    task = json.loads(config.tf_config)["task"]
    has_chief = bool(json.loads(config.tf_config)["cluster"].get("chief"))
    return task["type"] == ("chief" if has_chief else "worker") and int(task["index"]) == 0
  return config.server_type == "worker" and config.index == 0


def _save_rows(task: keras_task.KerasTask, model_dir: str) -> None:
  """Writes a checkpoint of step 0 to begin with, if the tables of the model have rows."""
  if not any(len(table) for table in task.slots.values()):
    return
  prefix = os.path.join(os.path.abspath(model_dir), "model.ckpt-0")
  groups.save_group(task.slots, os.path.join(f"{prefix}.assets", _GROUPS[0]))
  values = {_GLOBAL_STEP: tf.constant(0, tf.int64)}
  values.update(
    {name: _keras.variable_of(weight).read_value() for name, weight in task.weights.items()}
  )
  tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=list(values),
    shape_and_slices=[""] * len(values),
    tensors=list(values.values()),
  )
  tf.compat.v1.train.update_checkpoint_state(model_dir, prefix, [prefix])
  rows = {name: len(table) for name, table in task.slots.items()}
  logging.info("Training begins with the rows of the model: %s", rows)


def _load(task: keras_task.KerasTask, model_dir: str) -> None:
  # A run may save there meanwhile: rows and variables come from one checkpoint.
  restored.with_newest(model_dir, lambda prefix: _load_checkpoint(task, prefix))


def _load_checkpoint(task: keras_task.KerasTask, checkpoint: str) -> None:
  reader = tf.train.load_checkpoint(checkpoint)
  shapes = reader.get_variable_to_shape_map()
  wrong = {
    name: f"{shapes.get(name, 'missing')}, want {weight.shape.as_list()}"
    for name, weight in task.weights.items()
    if shapes.get(name) != weight.shape.as_list()
  }
  if wrong:
    raise ValueError(f"{checkpoint} is a checkpoint of another model: {wrong}")
  values = {name: reader.get_tensor(name) for name in task.weights}
  copy = topology.copy_checkpoint_if_needed(checkpoint, 0)
  try:
    prefix = checkpoint if copy is None else checkpoint_files.require_newest(copy.name)
    groups.load_group(task.slots, _find_group(f"{prefix}.assets"))
  finally:
    if copy is not None:
      copy.cleanup()
  for name, weight in task.weights.items():
    weight.assign(values[name])


def _find_group(assets: str) -> str:
  for name in _GROUPS:
    if tf.io.gfile.glob(os.path.join(assets, f"{name}-?????-of-?????")):
      return os.path.join(assets, name)
  raise ValueError(f"{assets} has no rows of a model that train has trained")
