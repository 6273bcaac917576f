"""Says which tables and layouts a fused-layout run has, as the `FeatureConfigs` of its ops."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Union

import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import embedding_combiners, entry
from monolith.native_training.graph import export_context

# One tensor, or one for each slice with `OutType.NONE`.
Layout = Union[tf.Tensor, list[tf.Tensor]]

# Name of the one table that stands for the whole group of a native table.
NATIVE_FAKE_TABLE = "native_multi_hash_table_fake_table"


@dataclasses.dataclass
class ShardingSparseFidsOpParams:
  """Says how `PartitionedHashTable` wants ids to be sharded.

  Attributes:
    num_ps: number of parameter servers.
    use_native_multi_hash_table: whether tables are one native multi table.
    unique: returns whether an id is listed once per feature.
    transfer_float16: whether embeddings travel as float16.
    sub_table_name_to_config: merged table -> its configuration.
    feature_configs: features, tables and layouts.
    enable_gpu_emb: whether embeddings live on GPUs.
    use_gpu: whether the dense part runs on a GPU.
    shared_tables: feature -> table, for native tables that several features share.
  """

  num_ps: int
  use_native_multi_hash_table: bool
  unique: Callable[[], bool]
  transfer_float16: bool
  sub_table_name_to_config: Mapping[str, entry.HashTableConfigInstance]
  feature_configs: example_pb2.FeatureConfigs
  enable_gpu_emb: bool
  use_gpu: bool
  shared_tables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def get_sub_table_name(strs: Iterable[str]) -> tuple[str, str]:
  """Returns the comma-joined names and the md5 of that text, in hex."""
  joined = ",".join(strs)
  return joined, hashlib.md5(joined.encode()).hexdigest()


def pooling_type(combiner: embedding_combiners.Combiner) -> example_pb2.PoolingType:
  """Returns the `PoolingType` of a combiner.

  Raises:
    Exception: the layout ops have none.
  """
  if isinstance(combiner, embedding_combiners.ReduceSum):
    return example_pb2.SUM
  if isinstance(combiner, embedding_combiners.ReduceMean):
    return example_pb2.MEAN
  if isinstance(combiner, embedding_combiners.FirstN):
    return example_pb2.FIRSTN
  raise Exception("pooling_type error!")


def no_merge_feature_config(
  feature_name_to_config: Mapping[str, entry.HashTableConfigInstance], use_same_table: bool = True
) -> tuple[Mapping[str, entry.HashTableConfigInstance], dict[str, str]]:
  """Lets every feature keep its table.

  Returns:
    The dict as it is, and feature -> the name under which its ids travel: one for all if
    `use_same_table`, else its own.
  """
  return feature_name_to_config, {
    name: NATIVE_FAKE_TABLE if use_same_table else name for name in feature_name_to_config
  }


def share_tables(
  feature_name_to_config: Mapping[str, entry.HashTableConfigInstance],
  shared_tables: Mapping[str, str],
) -> dict[str, entry.HashTableConfigInstance]:
  """Returns table -> configuration, with one table for the features that share it."""
  return {
    shared_tables.get(name, name): feature_name_to_config[name]
    for name in sorted(feature_name_to_config)
  }


class FeatureRows:
  """Turns rows of features into rows of tables that some features share, and back.

      features  a: [1, 2]  b: [3]  c: [1]      tables  s: [1, 2, 1]  (a and c)  t: [3]  (b)

  Args:
    feature_to_dim: the width of each feature's embeddings.
    shared_tables: feature -> table; the others have a table of their own name.
  """

  def __init__(self, feature_to_dim: Mapping[str, int], shared_tables: Mapping[str, str]):
    features = sorted(feature_to_dim)
    tables = [shared_tables.get(name, name) for name in features]
    self._dims = [feature_to_dim[name] for name in features]
    # By table, and then by name, as tables are.
    self._order = sorted(range(len(features)), key=lambda i: (tables[i], i))
    self._inverse = sorted(range(len(features)), key=lambda i: self._order[i])
    ordered = [tables[i] for i in self._order]
    self._starts = [i for i, name in enumerate(ordered) if i == 0 or name != ordered[i - 1]]
    self._is_identity = ordered == features

  def ids_of_tables(self, ids: tf.RaggedTensor) -> tf.RaggedTensor:
    """Returns the ids, a row per feature before, with a row per table."""
    if self._is_identity:
      return ids
    ordered = tf.gather(ids, self._order)
    row_splits = tf.gather(ordered.row_splits, [*self._starts, len(self._order)])
    return tf.RaggedTensor.from_row_splits(ordered.values, row_splits, validate=False)

  def values_of_tables(self, ids: tf.RaggedTensor, flat: tf.Tensor) -> tf.Tensor:
    """Returns the floats that belong to `ids` (a row per feature), in the order of tables."""
    if self._is_identity:
      return flat
    return tf.gather(_cut(flat, self._sizes(ids)), self._order).values

  def values_of_features(self, ids: tf.RaggedTensor, flat: tf.Tensor) -> tf.Tensor:
    """Undoes `values_of_tables`."""
    if self._is_identity:
      return flat
    sizes = tf.gather(self._sizes(ids), self._order)
    return tf.gather(_cut(flat, sizes), self._inverse).values

  def _sizes(self, ids: tf.RaggedTensor) -> tf.Tensor:
    return ids.row_lengths() * tf.constant(self._dims, tf.int64)


def _cut(flat: tf.Tensor, sizes: tf.Tensor) -> tf.RaggedTensor:
  return tf.RaggedTensor.from_row_lengths(tf.reshape(flat, [-1]), sizes, validate=False)


def make_op_params(
  *,
  num_ps: int,
  sub_table_name_to_config: Mapping[str, entry.HashTableConfigInstance],
  feature_to_sub_table: Mapping[str, str],
  layout_configs: Mapping[str, example_pb2.OutConfig],
  feature_to_unmerged_slice_dims: Mapping[str, Sequence[int]],
  feature_to_combiner: Mapping[str, embedding_combiners.Combiner],
  use_native_multi_hash_table: bool,
  transfer_float16: bool,
  unique: Callable[[], bool] | None,
  enable_gpu_emb: bool,
  use_gpu: bool,
  shared_tables: Mapping[str, str],
) -> ShardingSparseFidsOpParams:
  """Returns what the input pipeline and the tables must agree on.

  Raises:
    ValueError: a layout has a slice that no feature has.
  """
  feature_configs = example_pb2.FeatureConfigs()
  for name, sub_table in feature_to_sub_table.items():
    combiner = feature_to_combiner[name]
    config = feature_configs.feature_configs[name]
    config.table = sub_table
    config.slice_dims.extend(feature_to_unmerged_slice_dims[name])
    config.pooling_type = pooling_type(combiner)
    config.max_sequence_length = combiner.max_seq_length
  for layout, out_config in layout_configs.items():
    _check_slices(layout, out_config, feature_configs)
    feature_configs.out_configs[layout].CopyFrom(out_config)
  return ShardingSparseFidsOpParams(
    num_ps=max(num_ps, 1),
    use_native_multi_hash_table=use_native_multi_hash_table,
    unique=unique or (lambda: not export_context.is_exporting()),
    transfer_float16=transfer_float16,
    sub_table_name_to_config=sub_table_name_to_config,
    feature_configs=feature_configs,
    enable_gpu_emb=enable_gpu_emb,
    use_gpu=use_gpu,
    shared_tables=shared_tables,
  )


def _check_slices(
  layout: str, out_config: example_pb2.OutConfig, feature_configs: example_pb2.FeatureConfigs
) -> None:
  for part in out_config.slice_configs:
    if part.feature_name not in feature_configs.feature_configs:
      raise ValueError(
        f"layout {layout} has a slice of {part.feature_name}, which is none of the features "
        f"{sorted(feature_configs.feature_configs)}"
      )
    dim = sum(feature_configs.feature_configs[part.feature_name].slice_dims)
    if not 0 <= part.start < part.end <= dim:
      raise ValueError(
        f"layout {layout} has the slice [{part.start}, {part.end}) of {part.feature_name}, whose "
        f"embeddings have length {dim}"
      )


def nest_layout(
  tensors: Sequence[tf.Tensor], out_configs: Mapping[str, example_pb2.OutConfig]
) -> dict[str, Layout]:
  """Returns layout -> tensor, or list of tensors for `OutType.NONE`; the order is by name.

  Raises:
    ValueError: not as many tensors as the layouts have.
  """
  sizes = {
    name: len(config.slice_configs) if config.out_type == example_pb2.NONE else 1
    for name, config in out_configs.items()
  }
  if sum(sizes.values()) != len(tensors):
    raise ValueError(f"there are {len(tensors)} tensors, want {sum(sizes.values())} for {sizes}")
  nested: dict[str, Layout] = {}
  start = 0
  for name in sorted(out_configs):
    part = list(tensors[start : start + sizes[name]])
    start += sizes[name]
    nested[name] = part if out_configs[name].out_type == example_pb2.NONE else part[0]
  return nested


def flatten_layout(nested: Mapping[str, Layout]) -> list[tf.Tensor]:
  """Undoes `nest_layout`: tensors by layout name, lists expanded in place."""
  tensors: list[tf.Tensor] = []
  for name in sorted(nested):
    value = nested[name]
    tensors.extend(value if isinstance(value, (list, tuple)) else [value])
  return tensors
