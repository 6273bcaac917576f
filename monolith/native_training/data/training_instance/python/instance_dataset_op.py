"""Datasets of serialized Instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training import native_task_context
from monolith.native_training.distribute import distributed_dataset
from monolith.native_training.runtime.ops import gen_monolith_ops


class PBInstanceDatasetV2(dataset_ops.DatasetSource):
  """The serialized Instances of a file.

  Args:
    file_name: a name or a string scalar; `""` reads standard input.
    use_snappy: whether the file is compressed with snappy.
    **kwargs: the headers of records: `has_sort_id=True`, `kafka_dump=False`,
      `kafka_dump_prefix=False`.
  """

  def __init__(self, file_name: str | tf.Tensor, use_snappy: bool = False, **kwargs: Any):
    variant = gen_monolith_ops.instance_dataset(
      file_name=file_name,
      use_snappy=use_snappy,
      has_sort_id=kwargs.get("has_sort_id", True),
      kafka_dump=kwargs.get("kafka_dump", False),
      kafka_dump_prefix=kwargs.get("kafka_dump_prefix", False),
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> tf.TypeSpec:
    return tf.TensorSpec([], tf.string)


PBInstanceDataset = PBInstanceDatasetV2


def create_instance_dataset(
  files_list: Sequence[str] | None = None,
  use_snappy: bool = False,
  expand_glob_path: bool = False,
  cycle_length: int = 4,
  num_parallel_calls: int = 4,
  block_length: int = 1,
  enable_sharding: bool = False,
  shard_index: int | None = None,
  shard_num: int | None = None,
  enable_dynamic_sharding: bool = False,
  **kwargs: Any,
) -> tf.data.Dataset:
  """Reads the serialized Instances of files.

  Args:
    files_list: files; `None` reads standard input.
    use_snappy: whether files are compressed with snappy.
    expand_glob_path: names are patterns.
    cycle_length: files that are read at once.
    num_parallel_calls: threads that read.
    block_length: consecutive Instances of a file.
    enable_sharding: read only the files of this worker; needs one pattern, implies snappy.
    shard_index: the worker's index, by default that of the task context.
    shard_num: number of workers, by default that of the task context.
    enable_dynamic_sharding: take files, of patterns, from a queue that all workers share.
    **kwargs: the headers of records, as in `PBInstanceDatasetV2`.

  Raises:
    ValueError: sharding is asked for without exactly one pattern.
  """
  if files_list is None:
    return PBInstanceDatasetV2("", use_snappy, **kwargs)
  files_list = list(files_list)
  if enable_dynamic_sharding:
    return distributed_dataset.create_dynamic_sharding_dataset(files_list).flat_map(
      lambda name: PBInstanceDatasetV2(name, use_snappy, **kwargs)
    )
  if enable_sharding and len(files_list) != 1:
    raise ValueError(f"files_list has {len(files_list)} entries, sharding needs one pattern")
  if enable_sharding or expand_glob_path:
    files = tf.data.Dataset.from_tensor_slices(tf.io.matching_files(files_list))
  else:
    files = tf.data.Dataset.from_tensor_slices(files_list)
  if enable_sharding:
    ctx = native_task_context.get()
    files = files.shard(
      ctx.num_workers if shard_num is None else shard_num,
      ctx.worker_index if shard_index is None else shard_index,
    )
    use_snappy = True
  return files.interleave(
    lambda name: PBInstanceDatasetV2(name, use_snappy, **kwargs),
    cycle_length=cycle_length,
    block_length=block_length,
    num_parallel_calls=num_parallel_calls,
    deterministic=False,
  )
