"""Pools of items to draw negative samples from: make, fill, save, restore and compare them."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ragged_data_ops


def create_item_pool(
  start_num: int, max_item_num_per_channel: int, container: str = "", shared_name: str = ""
) -> tf.Tensor:
  """Returns a handle of a pool of items to draw negatives from.

  Args:
    start_num: a channel is drawn from once it has more items.
    max_item_num_per_channel: the oldest item goes when there are more.
    container: the container of the resource.
    shared_name: nodes of the same name share the pool.
  """
  if not shared_name and tf.executing_eagerly():
    # A graph gives every node a name of its own, eager execution does not.
    shared_name = f"item_pool_{uuid.uuid4().hex}"
  return ragged_data_ops.item_pool_create(
    start_num=start_num,
    max_item_num_per_channel=max_item_num_per_channel,
    container=container,
    shared_name=shared_name,
  )


def item_pool_random_fill(pool: tf.Tensor) -> tf.Tensor:
  """Fills a pool with random items; returns its handle."""
  return ragged_data_ops.item_pool_random_fill(pool)


def _worker() -> dict[str, int]:
  """Returns whose files a pool's are, by TF_CONFIG, as attributes of ops; the chief is number 0."""
  config = json.loads(os.environ.get("TF_CONFIG") or "{}")
  cluster, task = config.get("cluster", {}), config.get("task", {})
  num_workers = max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))
  if task.get("type") != "worker":
    return {"worker_index": 0, "num_workers": num_workers}
  index = int(task.get("index", 0)) + 1
  return {"worker_index": index, "num_workers": max(num_workers, index + 1)}


def item_pool_check(
  pool: tf.Tensor,
  model_path: str,
  global_step: Any,
  nshards: int = 1,
  buffer_size: int = 10485760,
) -> tf.Tensor:
  """Fails with DataLossError when the saved pool is another one; returns the handle."""
  return ragged_data_ops.item_pool_check(
    pool,
    tf.cast(global_step, tf.int64),
    model_path=model_path,
    nshards=nshards,
    buffer_size=buffer_size,
    **_worker(),
  )


def save_item_pool(
  pool: tf.Tensor, global_step: Any, model_path: str, nshards: int = 1
) -> tf.Tensor:
  """Writes `{model_path}/model.ckpt-{step}_item_pool_*`; returns the handle."""
  return ragged_data_ops.item_pool_save(
    pool,
    tf.cast(global_step, tf.int64),
    model_path=model_path,
    nshards=nshards,
    **_worker(),
  )


def restore_item_pool(
  pool: tf.Tensor,
  global_step: Any,
  model_path: str,
  nshards: int = 1,
  buffer_size: int = 10485760,
) -> tf.Tensor:
  """Reads the pool saved at `global_step` or last before, if there is one; returns the handle."""
  return ragged_data_ops.item_pool_restore(
    pool,
    tf.cast(global_step, tf.int64),
    model_path=model_path,
    nshards=nshards,
    buffer_size=buffer_size,
    **_worker(),
  )
