"""Writes tensor summaries for the `monolith` TensorBoard plugin."""

import json
from collections.abc import Sequence
from typing import Optional

import tensorflow as tf

from monolith.native_training.layers import layer_ops
from monolith.native_training.summary import utils


def nas_data(
  weight: tf.Tensor,
  segment_names: Optional[Sequence[str]] = None,
  segment_sizes: Optional[utils.SegmentSizes] = None,
  group_info: Optional[Sequence[Sequence[str]]] = None,
  raw_tag: Optional[str] = None,
  collections: Optional[Sequence[str]] = None,
  description: Optional[str] = None,
  name: Optional[str] = None,
) -> tf.Tensor:
  """Writes the weights of an architecture search.

  Args:
    weight: any tensor.
    segment_names: the segments.
    segment_sizes: for each segment its number of columns, or the list of the sizes to select from.
    group_info: the segments of each group.
    raw_tag: the kind of data; by default `simple` without segments, `gating` if all sizes are ints,
      else `selecting`.
    collections: collections that the summary is added to, `GraphKeys.SUMMARIES` by default.
    description: shown by TensorBoard, the kind of data by default.
    name: prefix of the scope, which is the kind of data or `<name>_<kind>`.

  Returns:
    A scalar string tensor, the serialised summary with tag `<scope>/monolith_nas_weight`.
  """
  head, summary_type = utils.prepare_head(
    segment_names, segment_sizes, group_info, raw_tag, out_type="bytes"
  )
  return _tensor_summary(
    utils.MONOLITH_NAS_DATA,
    weight,
    head,
    summary_type or utils.SummaryType.SIMPLE,
    collections,
    description,
    name,
  )


def feature_insight_data(
  input_tensor: tf.Tensor,
  segment_names: Sequence[str],
  segment_sizes: Sequence[int],
  weight: Optional[tf.Tensor] = None,
  group_info: Optional[Sequence[Sequence[str]]] = None,
  label: Optional[tf.Tensor] = None,
  collections: Optional[Sequence[str]] = None,
  description: Optional[str] = None,
  name: Optional[str] = None,
) -> tf.Tensor:
  """Writes what each feature contributes to a layer.

  Args:
    input_tensor: `[B, E]`, the embeddings of all features side by side.
    segment_names: names of the F features.
    segment_sizes: widths of the features, E in all.
    weight: `[E, K]`, the first matrix of the layer. Given, the data are the products with it per
      feature: `[B, F * K]`, or without label the sums of their squares, `[B, F]`.
    group_info: the features of each group.
    label: `[B]` or `[B, L]`; appended to the data as float32 columns.
    collections: collections that the summary is added to, `GraphKeys.SUMMARIES` by default.
    description: shown by TensorBoard, the kind of data by default.
    name: prefix of the scope, which is the kind of data or `<name>_<kind>`.

  Returns:
    A scalar string tensor, the serialised summary with tag `<scope>/monolith_feature_insight`.
  """
  assert len(segment_names) == len(
    segment_sizes
  ), f"there are {len(segment_names)} segment_names and {len(segment_sizes)} segment_sizes"
  aggregate = label is None
  data = input_tensor
  if weight is not None:
    data = layer_ops.feature_insight(
      input_embedding=input_tensor,
      weight=weight,
      segment_sizes=list(segment_sizes),
      aggregate=aggregate,
    )
    width = 1 if aggregate else weight.shape.as_list()[-1]
    segment_sizes = [width] * len(segment_sizes)

  raw_tag = utils.SummaryType.FEATURE_INSIGHT_TRAIN
  if aggregate:
    raw_tag = utils.SummaryType.FEATURE_INSIGHT_DIRECT
  head, raw_tag = utils.prepare_head(
    segment_names, segment_sizes, group_info, raw_tag, out_type="json"
  )
  head["label_size"] = 0
  if label is not None:
    label = tf.cast(label, tf.float32)
    if label.shape.rank == 1:
      label = tf.reshape(label, [-1, 1])
    head["label_size"] = label.shape.as_list()[-1]
    data = tf.concat([data, label], axis=1)
  return _tensor_summary(
    utils.MONOLITH_FI_DATA, data, json.dumps(head), raw_tag, collections, description, name
  )


def _tensor_summary(
  tag: str,
  tensor: tf.Tensor,
  head: str,
  summary_type: str,
  collections: Optional[Sequence[str]],
  description: Optional[str],
  name: Optional[str],
) -> tf.Tensor:
  metadata = utils.create_summary_metadata(description or summary_type, head)
  with tf.compat.v1.name_scope(f"{name}_{summary_type}" if name else summary_type):
    return tf.compat.v1.summary.tensor_summary(
      tag, tensor, collections=collections, summary_metadata=metadata
    )
