"""Splits samples by data source into flows, and merges flows into one dataset."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints
from monolith.native_training.runtime.ops import gen_monolith_ops as pb_datasource_ops

# Flows of the same input find each other by this name. Numbers, because programs that build the
# same datasets must build the same graphs: a tf.data service compares them.
_numbers = itertools.count()
_shared_names: weakref.WeakKeyDictionary[tf.data.Dataset, str] = weakref.WeakKeyDictionary()


class SplitFlowDataset(dataset_ops.UnaryUnchangedStructureDataset):
  """The samples of one data source.

  One thread reads the input for all flows, and belongs to the iterator over index 0: flows of the
  same `input_dataset` are read together, in one pipeline or by iterators of their own. Samples wait
  in queues; while the queue of a flow is full, all flows wait. The samples of a flow whose iterator
  is gone are dropped. An error of the input, and a sample of no flow, is an error of every flow.
  When the input ends, all flows end; a flow that is opened again waits for the next pass over the
  input, which index 0 opens. Positions are not saved in checkpoints.

  Args:
    input_dataset: samples with a `data_source_key`.
    data_flow: names of data sources.
    index: the position of the one to read.
    max_queue_size: samples that may wait.
    variant_type: `"example"` or `"instance"`.

  Raises:
    InvalidArgumentError: `index` is not one of `data_flow`, or two names have the same key.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    data_flow: Sequence[str],
    index: int,
    max_queue_size: int = 1024,
    variant_type: str = "example",
  ):
    self.data_flow = list(data_flow)
    self.index = index
    if input_dataset not in _shared_names:
      _shared_names[input_dataset] = f"split_flow_{next(_numbers)}"
    leave_out_of_checkpoints()
    variant = pb_datasource_ops.split_flow_dataset(
      input_dataset._variant_tensor,
      data_flow=self.data_flow,
      index=index,
      max_queue_size=max_queue_size,
      variant_type=variant_type,
      shared_name=_shared_names[input_dataset],
    )
    super().__init__(input_dataset, variant)


class MergeFlowDataset(dataset_ops.DatasetV2):
  """The samples of several datasets, read at the same time.

  Takes turns among the datasets that have a sample ready and ends when all have ended. Sets
  `LineId.data_source_name` of each sample to `data_source<data_source_key>`. An error of one
  dataset is an error of this one. Positions are not saved in checkpoints.

  Args:
    input_dataset: samples.
    dataset_to_merge: more samples, one dataset or several.
    max_queue_size: samples of each dataset that may wait.
    variant_type: `"example"` or `"instance"`.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    dataset_to_merge: tf.data.Dataset | Sequence[tf.data.Dataset],
    max_queue_size: int = 1024,
    variant_type: str = "example",
  ):
    if isinstance(dataset_to_merge, dataset_ops.DatasetV2):
      dataset_to_merge = [dataset_to_merge]
    self._input_datasets = [input_dataset, *dataset_to_merge]
    for i, dataset in enumerate(self._input_datasets):
      if dataset.element_spec != input_dataset.element_spec:
        raise ValueError(
          f"dataset_to_merge[{i - 1}] has elements {dataset.element_spec}, "
          f"input_dataset {input_dataset.element_spec}"
        )
    leave_out_of_checkpoints()
    variant = pb_datasource_ops.merge_flow_dataset(
      [dataset._variant_tensor for dataset in self._input_datasets],
      data_flow=[
        _flow_name(dataset) or f"input_{i}" for i, dataset in enumerate(self._input_datasets)
      ],
      max_queue_size=max_queue_size,
      variant_type=variant_type,
    )
    super().__init__(variant)

  def _inputs(self) -> list[tf.data.Dataset]:
    return self._input_datasets

  @property
  def element_spec(self) -> Any:
    return self._input_datasets[0].element_spec


def _flow_name(dataset: tf.data.Dataset) -> str | None:
  """Returns the name of the flow that a dataset is made from, if it is made from one."""
  while True:
    if isinstance(dataset, SplitFlowDataset):
      return dataset.data_flow[dataset.index]
    inputs = dataset._inputs()
    if len(inputs) != 1:
      return None
    dataset = inputs[0]
