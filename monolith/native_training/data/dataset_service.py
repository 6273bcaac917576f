"""Datasets that workers share through a tf.data service."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import data_service_ops

from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.settings import dataservice_flags  # noqa: F401, defines two flags

_DATASET_ID_KEY = "registed_dataset_id"


def register_dataset(service: str, dataset: tf.data.Dataset, buffer_size: int = 32) -> tf.Tensor:
  """Registers a dataset with a tf.data service and returns its id.

  Args:
    service: `grpc://host:port` of the dispatcher.
    dataset: the dataset.
    buffer_size: elements that workers of the service prefetch; 0: none.
  """
  if buffer_size:
    dataset = dataset.prefetch(buffer_size)
  dataset_id = tf.data.experimental.service.register_dataset(service, dataset)
  if not tf.executing_eagerly():
    tf.compat.v1.add_to_collection(_DATASET_ID_KEY, dataset_id)
  return dataset_id


def from_dataset_id(
  processing_mode: Any,
  service: str,
  dataset_id: Any,
  element_spec: Any,
  job_name: str | None = None,
  max_outstanding_requests: int | None = None,
  task_refresh_interval_hint_ms: int | None = None,
  buffer_size: int = 16,
) -> tf.data.Dataset:
  """Reads a registered dataset.

  Args:
    processing_mode: a `tf.data.experimental.service.ShardingPolicy`, or its older name.
    service: `grpc://host:port` of the dispatcher.
    dataset_id: what `register_dataset` returned.
    element_spec: the specification of its elements.
    job_name: readers of the same job share the elements.
    max_outstanding_requests: most elements asked for at once.
    task_refresh_interval_hint_ms: how often to look for new workers of the service.
    buffer_size: elements to prefetch; 0: none.
  """
  # The public function has no task_refresh_interval_hint_ms.
  dataset = data_service_ops._from_dataset_id(
    processing_mode,
    service,
    dataset_id,
    element_spec,
    job_name=job_name,
    max_outstanding_requests=max_outstanding_requests,
    task_refresh_interval_hint_ms=task_refresh_interval_hint_ms,
  )
  return dataset.prefetch(buffer_size) if buffer_size else dataset


def merged_window(
  ds: tf.data.Dataset, size: int = 2, drop_remainder: bool = True
) -> tf.data.Dataset:
  """Joins each `size` consecutive batches into one.

  Args:
    ds: batches of equal size; ragged tensors are joined row by row.
    size: number of batches.
    drop_remainder: drop a last group of fewer batches.
  """

  def merge(tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
      return tensor.merge_dims(0, 1)
    shape = tensor.shape.as_list()
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0)) if shape else tensor

  def merge_all(*elements: Any) -> Any:
    merged = tf.nest.map_structure(merge, elements)
    return merged[0] if len(merged) == 1 else merged

  return ds.batch(size, drop_remainder=drop_remainder).map(merge_all)


def distribute(
  dataset: tf.data.Dataset,
  target: str | None = None,
  job_name: str | None = None,
  num_worker: int = 1,
  worker_idx: int = 0,
  queue_device: str | None = None,
  max_outstanding_requests: int | None = None,
  window_size: int = 1,
  buffer_size: int = 32,
) -> tf.data.Dataset:
  """Reads a dataset through a tf.data service, which the workers of a cluster share.

  Args:
    dataset: the dataset.
    target: `grpc://host:port` of the dispatcher, by default the flag `data_service_dispatcher`.
    job_name: workers of the same job share the elements.
    num_worker: number of workers that read.
    worker_idx: the index of this one.
    queue_device: a device that the sessions of all workers reach. Worker 0 registers the dataset,
      and the others get its id from a queue there. None: each worker registers its own.
    max_outstanding_requests: most elements asked for at once.
    window_size: how many batches the service joins into one, as `merged_window` does. Those that
      are left at the end are joined too.
    buffer_size: elements that workers of the service prefetch; 0: none.

  Raises:
    ValueError: there is no dispatcher, the index is not one of a worker, `window_size` is less than
      1, or there is a queue but no graph.
  """
  target = target or get_flag("data_service_dispatcher")
  if not target:
    raise ValueError("target is empty and the flag data_service_dispatcher is not set")
  if num_worker and not 0 <= worker_idx < num_worker:
    raise ValueError(f"worker_idx is {worker_idx}, want 0 to num_worker {num_worker} - 1")
  if window_size < 1:
    raise ValueError(f"window_size is {window_size}, want at least 1")
  if "://" not in target:
    target = f"grpc://{target}"
  job_name = job_name or "monolith"
  if window_size > 1:
    dataset = merged_window(dataset, window_size, drop_remainder=False)
  if queue_device is None or num_worker <= 1:
    dataset_id = register_dataset(target, dataset, buffer_size)
  elif tf.executing_eagerly():
    raise ValueError(f"queue_device is {queue_device}, but workers share a queue in graphs only")
  else:
    registered = register_dataset(target, dataset, buffer_size) if worker_idx == 0 else None
    with tf.device(queue_device):
      queue = tf.queue.FIFOQueue(
        num_worker, [tf.string], shapes=[[]], shared_name=f"dataset_id_of_{job_name}"
      )
      dataset_id = _look_at(queue) if registered is None else _offer(queue, registered)
  return from_dataset_id(
    tf.data.experimental.service.ShardingPolicy.DYNAMIC,
    target,
    dataset_id,
    dataset.element_spec,
    job_name=job_name,
    max_outstanding_requests=max_outstanding_requests,
  )


def _offer(queue: tf.queue.QueueBase, value: tf.Tensor) -> tf.Tensor:
  """Returns the value, after putting it into a queue in the place of an earlier one."""
  old = tf.cond(queue.size() > 0, queue.dequeue, lambda: tf.constant(""))
  with tf.control_dependencies([old, value]):
    offered = queue.enqueue(value)
  with tf.control_dependencies([offered]):
    return tf.identity(value)


def _look_at(queue: tf.queue.QueueBase) -> tf.Tensor:
  """Returns the value in a queue as soon as there is one; it stays, for workers that restart."""
  value = queue.dequeue()
  with tf.control_dependencies([queue.enqueue(value)]):
    return tf.identity(value)
