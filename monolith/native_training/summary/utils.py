"""Builds what summaries for the `monolith` TensorBoard plugin carry besides their tensor.

The head of a summary is JSON: the kind of data (`tag_type`), the names of the segments (features)
that the columns belong to, how many columns each has, and the group of each.
"""

import json
from collections.abc import Sequence
from typing import Any, Optional, Union

import tensorflow as tf

from monolith import _tensorflow

summary_pb2: Any = _tensorflow.import_summary_pb2()

PLUGIN_NAME = "monolith"
MONOLITH_NAS_DATA = "monolith_nas_weight"
MONOLITH_FI_DATA = "monolith_feature_insight"
KTYPE = "tag_type"
KMETA = "meta"
KDATA = "data"

# The variable of architecture weights in a checkpoint.
ARCH_TENSOR_PREFIX = "arch_embedding_weights"

SegmentSizes = Union[Sequence[int], Sequence[Sequence[int]]]


class SummaryType:
  """The kinds of data."""

  GATING = "gating"
  SELECTING = "selecting"
  MIXED = "mixed"
  SIMPLE = "simple"
  FEATURE_INSIGHT_DIRECT = "fi_direct"
  FEATURE_INSIGHT_TRAIN = "fi_train"


def create_summary_metadata(
  description: Optional[str] = None, meta_content: Union[bytes, str] = b""
) -> Any:
  """Returns the metadata of a tensor summary of the plugin.

  Args:
    description: shown by TensorBoard.
    meta_content: the head; text is encoded as UTF-8.
  """
  if isinstance(meta_content, str):
    meta_content = meta_content.encode("utf-8")
  return summary_pb2.SummaryMetadata(
    summary_description=description,
    plugin_data=summary_pb2.SummaryMetadata.PluginData(
      plugin_name=PLUGIN_NAME, content=meta_content
    ),
    data_class=summary_pb2.DATA_CLASS_TENSOR,
  )


def _name_to_group_id(
  segment_names: Sequence[str], group_info: Optional[Sequence[Sequence[str]]]
) -> dict[str, int]:
  """Returns the group of each segment, renumbered 0, 1, ... over the groups that occur.

  Args:
    segment_names: the segments.
    group_info: the segments of each group; without it every segment is a group.
  """
  if group_info is None:
    return {name: i for i, name in enumerate(segment_names)}
  group_of = {name: i for i, group in enumerate(group_info) for name in group}
  for name in segment_names:
    assert name in group_of, f"segment {name} is in none of the groups {group_info}"
  used_groups = sorted({group_of[name] for name in segment_names})
  new_ids = {group: i for i, group in enumerate(used_groups)}
  return {name: new_ids[group_of[name]] for name in segment_names}


def prepare_head(
  segment_names: Optional[Sequence[str]],
  segment_sizes: Optional[SegmentSizes],
  group_info: Optional[Sequence[Sequence[str]]] = None,
  raw_tag: Optional[str] = None,
  out_type: str = "tensor",
) -> tuple[Any, Optional[str]]:
  """Builds the head of a summary.

  Args:
    segment_names: the segments.
    segment_sizes: for each segment its number of columns, or the list of the sizes to select from.
    group_info: the segments of each group.
    raw_tag: the kind of data; by default `gating` if all sizes are ints, else `selecting`.
    out_type: `bytes` for the JSON text (a `str`), `tensor` for a scalar string tensor of it, `json`
      for the dict.

  Returns:
    The head and the kind of data. Without segments the head is empty, and `raw_tag` is returned as
    is.
  """
  assert out_type in (
    "bytes",
    "tensor",
    "json",
  ), f"out_type is {out_type!r}, want bytes, tensor or json"
  if not segment_names or not segment_sizes:
    return (tf.constant(b"") if out_type == "tensor" else b""), raw_tag
  if raw_tag is None:
    all_ints = all(isinstance(size, int) for size in segment_sizes)
    raw_tag = SummaryType.GATING if all_ints else SummaryType.SELECTING
  head = {
    KTYPE: raw_tag,
    "segment_names": list(segment_names),
    "segment_sizes": list(segment_sizes),
  }
  if raw_tag in (SummaryType.GATING, SummaryType.FEATURE_INSIGHT_TRAIN):
    name_to_group_id = _name_to_group_id(segment_names, group_info)
    head["group_index"] = [name_to_group_id[name] for name in segment_names]
  if out_type == "json":
    return head, raw_tag
  text = json.dumps(head)
  return (tf.constant(text) if out_type == "tensor" else text), raw_tag


def get_nas_weight_json(ckpt_dir_or_file: str, prefix: Optional[str] = None) -> list[str]:
  """Reads the architecture weights from a checkpoint.

  Args:
    ckpt_dir_or_file: folder of checkpoints, whose latest is read, or the prefix of one.
    prefix: what the name of the variable contains, `ARCH_TENSOR_PREFIX` by default. Of several such
      variables (optimizer slots contain the name of their variable) the shortest name counts.

  Returns:
    The values, flattened, as text.

  Raises:
    Exception: there is no such variable.
  """
  prefix = prefix or ARCH_TENSOR_PREFIX
  reader = tf.train.load_checkpoint(ckpt_dir_or_file)
  names = [name for name in reader.get_variable_to_shape_map() if prefix in name]
  if not names:
    raise Exception("not arch_weights in ckpt")
  name = min(names, key=lambda candidate: (len(candidate), candidate))
  return [str(value) for value in reader.get_tensor(name).flatten()]
