"""Lets a model declare sparse features: slots, slices and columns.

A **slot** is one logical table, a **slice** a range of its columns with an optimizer of its own, a
**column** the name of a ragged int64 input bound to the slot:

      columns of slot "user"      0     1 ........ 17 ...... 25
                                  | bias| vector 16 | vector 8 |
      slot = ctx.create_feature_slot(FeatureSlotConfig(name="user", has_bias=True))
      vector = slot.add_feature_slice(16)
      user = FeatureColumn(slot, "user_id")
      pooled = user.embedding_lookup(vector)        # [batch, 16], summed over the example's ids

A model function runs twice. In the dry run `DummyFeatureFactory` records what it declares and hands
out placeholders; in the real run a `FeatureFactoryFromEmbeddings`, or an `EmbeddingLayoutFactory`
for fused layouts, hands out the looked-up embeddings. **The order of `add_feature_slice` calls
defines the columns, so a model function must make the same calls in both runs.**

Differences from ByteDance's Monolith: a learning rate of 0.0 freezes a slice instead of meaning
"default"; binding one feature name twice with different combiners is an error; a slice that the dry
run did not see is reported with the known ones.

The file is long because slots, columns and the factories of both runs refer to one another.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from monolith.native_training import (
  embedding_combiners,
  entry,
  learning_rate_functions,
  prefetch_queue,
)
from monolith.native_training.monolith_export import monolith_export
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.tables import pooling, protocols

# Names that `native_model` offers in turn.
__all__ = [
  "Admission",
  "DEFAULT_EXPIRE_TIME",
  "DummyFeatureEmbTable",
  "DummyFeatureFactory",
  "EmbeddingFeatureEmbTable",
  "EmbeddingLayoutFactory",
  "EmbeddingLayoutFakeTable",
  "FeatureColumn",
  "FeatureColumnV1",
  "FeatureEmbTable",
  "FeatureFactory",
  "FeatureFactoryFromEmbeddings",
  "FeatureSlice",
  "FeatureSlot",
  "FeatureSlotConfig",
  "GradsAndVars",
  "SliceConfig",
  "TableConfig",
  "create_embedding_slices",
  "resolve_admission",
]

# Days after which an unused row expires.
DEFAULT_EXPIRE_TIME = 36500
# Counters of occurrence filters have four bits.
MAX_OCCURRENCE_THRESHOLD = 15

GradsAndVars = Iterable[tuple[tf.Tensor, tf.Tensor]]


class FeatureEmbTable(abc.ABC):
  """Declares the methods of a table that its slot calls."""

  def add_feature_slice(
    self,
    segment: embedding_hash_table_pb2.EntryConfig.Segment,
    learning_rate_fn: entry.LearningRate | None = None,
  ) -> None:
    """Tells the table of a slice; the default does nothing."""

  @abc.abstractmethod
  def embedding_lookup(
    self, feature_name: str, start: int | None, end: int | None
  ) -> tf.Tensor | None:
    """Returns columns `[start, end)` of a feature; `None, None` means all, not pooled."""

  def set_feature_metadata(self, feature_name: str, combiner: embedding_combiners.Combiner) -> None:
    """Tells the table of a column; the default does nothing."""

  def get_slices(self, feature_name: str) -> list[tf.Tensor]:
    """Returns the pooled slices of a feature by their first column, where the table has them."""
    raise NotImplementedError(f"{type(self).__name__} keeps no slices of {feature_name}")


class FeatureSlice(NamedTuple):
  """Columns `[start, end)` of a slot."""

  feature_slot: FeatureSlot
  start: int
  end: int


@monolith_export
@dataclasses.dataclass
class FeatureSlotConfig:
  """Configuration of one slot.

  Attributes:
    name: the slot's name, `str(slot_id)` by default.
    has_bias: adds a column 0 of one value with the `bias_*` settings.
    bias_initializer, bias_optimizer, bias_compressor, bias_learning_rate_fn: for the bias. A bias
      without a learning rate of its own uses `default_vec_learning_rate_fn`.
    default_vec_initializer, default_vec_optimizer, default_vec_compressor,
      default_vec_learning_rate_fn: for slices that do not bring their own.
    hashtable_config: the kind of table.
    slot_id: the slot bits of the feature ids, if they have any.
    occurrence_threshold: the first batches with an id, this many, only count it; the next one makes
      its row. Holds for every id of the slot's columns.
    expire_time: days after which an unused row expires; so does this.
    admit_after: another name of `occurrence_threshold`.
    expire_after: another way to give `expire_time`: days, or a text such as "30d" or "2w".

  Raises:
    ValueError: one of these is out of range, or given in both ways.
  """

  name: str | None = None
  has_bias: bool = False
  bias_initializer: entry.Initializer = entry.ZerosInitializer()
  bias_optimizer: entry.Optimizer = entry.FtrlOptimizer(initial_accumulator_value=1e-6, beta=1.0)
  bias_compressor: entry.Compressor = entry.Fp32Compressor()
  bias_learning_rate_fn: entry.LearningRate | None = None
  default_vec_initializer: entry.Initializer = entry.RandomUniformInitializer()
  default_vec_optimizer: entry.Optimizer = entry.AdagradOptimizer(initial_accumulator_value=1.0)
  default_vec_compressor: entry.Compressor = entry.Fp16Compressor()
  default_vec_learning_rate_fn: entry.LearningRate | None = None
  hashtable_config: entry.HashTableConfig = entry.CuckooHashTableConfig()
  slot_id: int | None = None
  occurrence_threshold: int | None = 0
  expire_time: int = DEFAULT_EXPIRE_TIME
  admit_after: dataclasses.InitVar[int | None] = None
  expire_after: dataclasses.InitVar[int | str | None] = None

  def __post_init__(self, admit_after: int | None, expire_after: int | str | None) -> None:
    if not self.name:
      self.name = str(self.slot_id)
    self.occurrence_threshold, self.expire_time = resolve_admission(
      self.name, self.occurrence_threshold, self.expire_time, admit_after, expire_after
    )


class Admission(NamedTuple):
  """When an id of a slot gets a row, and how long it keeps it.

  Attributes:
    threshold: how often it must have been seen.
    days: after which an unused row expires.
    has_slot_id: whether the slot declares which slot bits its ids have.
  """

  threshold: int = 0
  days: int = DEFAULT_EXPIRE_TIME
  has_slot_id: bool = False

  @property
  def is_default(self) -> bool:
    return self.threshold == 0 and self.days == DEFAULT_EXPIRE_TIME


def resolve_admission(
  name: str,
  occurrence_threshold: int | None,
  expire_time: int,
  admit_after: int | None,
  expire_after: int | str | None,
) -> tuple[int | None, int]:
  """Returns the occurrence threshold and the expiry in days, however they were given.

  Args:
    name: what they are for, for messages.
    occurrence_threshold: `None` and 0 let every id in.
    expire_time: days.
    admit_after: `None`, or another way to give `occurrence_threshold`.
    expire_after: `None`, or another way to give `expire_time`: days, or a whole number with a unit,
      "30d" for days or "4w" for weeks.

  Raises:
    ValueError: a value is out of range, or both ways are used.
  """
  if admit_after is not None:
    if occurrence_threshold:
      raise ValueError(
        f"{name}: admit_after is {admit_after} and occurrence_threshold {occurrence_threshold}: "
        "they mean the same, give one"
      )
    occurrence_threshold = admit_after
  if expire_after is not None:
    if expire_time != DEFAULT_EXPIRE_TIME:
      raise ValueError(
        f"{name}: expire_after is {expire_after!r} and expire_time {expire_time}: they mean the "
        "same, give one"
      )
    expire_time = _to_days(name, expire_after)
  if occurrence_threshold is not None and not 0 <= occurrence_threshold <= MAX_OCCURRENCE_THRESHOLD:
    raise ValueError(
      f"{name}: the occurrence threshold (admit_after) is {occurrence_threshold}, want 0 to "
      f"{MAX_OCCURRENCE_THRESHOLD}, which is how far filters count"
    )
  return occurrence_threshold, expire_time


def _to_days(name: str, duration: int | str) -> int:
  match = re.fullmatch(r"\s*(\d+)\s*([dw]?)\s*", str(duration))
  if match is None:
    raise ValueError(
      f"{name}: expire_after is {duration!r}, want a number of days, or a text as '30d' or '4w'"
    )
  return int(match.group(1)) * (7 if match.group(2) == "w" else 1)


class FeatureSlot:
  """One logical table; made by `NativeContext.create_feature_slot`."""

  def __init__(self, table: FeatureEmbTable, config: FeatureSlotConfig):
    self._table = table
    self._config = config
    self._current_dim = 0
    self._feature_columns: dict[FeatureColumn, None] = {}
    self._bias_slice: FeatureSlice | None = None
    if config.has_bias:
      self._bias_slice = self.add_feature_slice(
        1,
        config.bias_initializer,
        config.bias_optimizer,
        config.bias_compressor,
        config.bias_learning_rate_fn,
      )

  @property
  def slot(self) -> int:
    """The slot id, or the name as a number.

    Raises:
      ValueError: there is no slot id and the name is not a number.
    """
    if self._config.slot_id is not None:
      return self._config.slot_id
    return int(self.name)

  @property
  def occurrence_threshold(self) -> int:
    """The number of times that an id must be seen before it gets a row."""
    return self._config.occurrence_threshold or 0

  @property
  def expire_time(self) -> int:
    """Days after which an unused row expires."""
    return self._config.expire_time

  @property
  def name(self) -> str:
    """The configuration's name, which is never empty."""
    return self._config.name or str(self._config.slot_id)

  def add_feature_slice(
    self,
    dim_size: int,
    initializer: entry.Initializer | None = None,
    optimizer: entry.Optimizer | None = None,
    compressor: entry.Compressor | None = None,
    learning_rate_fn: entry.LearningRate | None = None,
  ) -> FeatureSlice:
    """Appends `dim_size` columns; what is `None` comes from the slot's `default_vec_*`."""

    def default(value: Any, fallback: Any) -> Any:
      return fallback if value is None else value

    config = self._config
    segment = entry.CombineAsSegment(
      dim_size,
      default(initializer, config.default_vec_initializer),
      default(optimizer, config.default_vec_optimizer),
      default(compressor, config.default_vec_compressor),
    )
    self._table.add_feature_slice(
      segment, default(learning_rate_fn, config.default_vec_learning_rate_fn)
    )
    start = self._current_dim
    self._current_dim += dim_size
    return FeatureSlice(self, start, self._current_dim)

  def get_bias_slice(self) -> FeatureSlice:
    """Returns the slice of the bias; the slot must have been configured with one."""
    assert self._bias_slice is not None, f"slot {self.name} has no bias"
    return self._bias_slice

  def get_feature_columns(self) -> set[FeatureColumn]:
    """Returns the columns bound to this slot."""
    return set(self._feature_columns)

  def _add_feature_column(self, column: FeatureColumn) -> None:
    self._table.set_feature_metadata(column.feature_name, column.combiner)
    self._feature_columns[column] = None


@monolith_export
class FeatureColumn:
  """A ragged int64 input whose ids are looked up in a slot.

  Args:
    feature_slot: the slot.
    feature_name: key of the input in `features`.
    combiner: how the embeddings of one example's ids become one, `reduce_sum()` by default.
  """

  @classmethod
  def reduce_sum(cls) -> embedding_combiners.Combiner:
    """Sums the embeddings of an example: `[batch, dim]`."""
    return embedding_combiners.ReduceSum()

  @classmethod
  def reduce_mean(cls) -> embedding_combiners.Combiner:
    """Averages the embeddings of an example: `[batch, dim]`."""
    return embedding_combiners.ReduceMean()

  @classmethod
  def first_n(cls, seq_length: int) -> embedding_combiners.Combiner:
    """Keeps the first `seq_length` embeddings of an example: `[batch, seq_length, dim]`."""
    return embedding_combiners.FirstN(seq_length)

  def __init__(
    self,
    feature_slot: FeatureSlot,
    feature_name: str,
    combiner: embedding_combiners.Combiner | None = None,
  ):
    self._feature_slot = feature_slot
    self._feature_name = feature_name
    self._combiner = self.reduce_sum() if combiner is None else combiner
    self._size_tensor: tf.Tensor | None = None
    feature_slot._add_feature_column(self)

  @property
  def feature_name(self) -> str:
    return self._feature_name

  @property
  def feature_slot(self) -> FeatureSlot:
    return self._feature_slot

  @property
  def combiner(self) -> embedding_combiners.Combiner:
    return self._combiner

  def embedding_lookup(self, s: FeatureSlice) -> tf.Tensor:
    """Returns the pooled embedding of slice `s`, which must belong to this column's slot."""
    assert s.feature_slot is self._feature_slot, "Slice must come from the dedicated feature slot."
    return self._feature_slot._table.embedding_lookup(self._feature_name, s.start, s.end)

  def get_all_embeddings_concat(self) -> tf.Tensor:
    """Returns the looked-up embeddings before pooling, `[ids, dim]`: what to differentiate by."""
    return self._feature_slot._table.embedding_lookup(self._feature_name, None, None)

  def get_all_embedding_slices(self) -> list[tf.Tensor]:
    """Returns the pooled embedding of every slice, by its first column."""
    return self._feature_slot._table.get_slices(self._feature_name)

  def get_bias(self) -> tf.Tensor:
    """Returns the pooled bias, `[batch, 1]`."""
    return self.embedding_lookup(self._feature_slot.get_bias_slice())

  def set_size_tensor(self, row_lengths: tf.Tensor) -> None:
    """Remembers which of the `first_n` positions of each example hold an id."""
    assert isinstance(
      self._combiner, embedding_combiners.FirstN
    ), "This function is only supported in a sequence feature."
    mask = tf.sequence_mask(row_lengths, maxlen=self._combiner.max_seq_length)
    self._size_tensor = tf.cast(mask, tf.int32, name="size_tensor")

  def get_size_tensor(self) -> tf.Tensor | None:
    """Returns the int32 0/1 mask `[batch, seq_length]` that `set_size_tensor` made, or `None`."""
    return self._size_tensor


FeatureColumnV1 = FeatureColumn

SliceConfig = collections.namedtuple("SliceConfig", ["segment", "learning_rate_fn"])


class TableConfig(NamedTuple):
  """Holds the facts about a slot that the dry run found.

  Attributes:
    slice_configs: segment and learning rate, adjacent equal ones merged.
    feature_names: the columns, in the order they were bound.
    unmerged_slice_dims: the slices' sizes, in call order.
    hashtable_config: the kind of table.
    feature_to_combiners: the combiner of each column.
  """

  slice_configs: list[SliceConfig]
  feature_names: list[str]
  unmerged_slice_dims: list[int]
  hashtable_config: entry.HashTableConfig
  feature_to_combiners: dict[str, embedding_combiners.Combiner]


class FeatureFactory(abc.ABC):
  """Makes slots, and takes their gradients."""

  def __init__(self) -> None:
    self.slot_to_occurrence_threshold: dict[int, int] = {}
    self.slot_to_expire_time: dict[int, int] = {}
    # By name of the slot.
    self.name_to_admission: dict[str, Admission] = {}

  @abc.abstractmethod
  def create_feature_slot(self, config: FeatureSlotConfig) -> FeatureSlot:
    """Returns a new slot."""

  def apply_gradients(
    self, grads_and_vars: GradsAndVars, req_time: tf.Tensor | None = None, scale: Any = 1
  ) -> tf.Operation:
    """Returns the op that updates the tables."""
    raise NotImplementedError("apply_gradients is not supported in this factory.")


def _default_learning_rate(
  segment: embedding_hash_table_pb2.EntryConfig.Segment,
) -> entry.LearningRate:
  """Returns the rate in the segment's optimizer, after a linear warm-up where it asks for one."""
  optimizer = getattr(segment.opt_config, segment.opt_config.WhichOneof("type"))
  learning_rate = getattr(optimizer, "learning_rate", 0.0)
  warmup_steps = getattr(optimizer, "warmup_steps", 0)
  if warmup_steps > 0:
    return learning_rate_functions.PolynomialDecay(
      initial_learning_rate=0.0, decay_steps=warmup_steps, end_learning_rate=learning_rate
    )
  return learning_rate


def _merge_adjacent(slices: Sequence[SliceConfig]) -> list[SliceConfig]:
  """Merges neighbours that differ only in their size."""
  merged: list[SliceConfig] = []
  previous_key = None
  for segment, learning_rate_fn in slices:
    without_dim = embedding_hash_table_pb2.EntryConfig.Segment()
    without_dim.CopyFrom(segment)
    without_dim.ClearField("dim_size")
    key = (without_dim.SerializeToString(deterministic=True), str(learning_rate_fn))
    if key == previous_key:
      merged[-1].segment.dim_size += segment.dim_size
    else:
      copy = embedding_hash_table_pb2.EntryConfig.Segment()
      copy.CopyFrom(segment)
      merged.append(SliceConfig(copy, learning_rate_fn))
    previous_key = key
  return merged


class DummyFeatureEmbTable(FeatureEmbTable):
  """The table of the dry run: records slices and columns, and hands out placeholders.

  Args:
    batch_size: static first dimension of what lookups return; unknown if falsy.
    hashtable_config: passed on to the `TableConfig`.
  """

  def __init__(self, batch_size: int | None, hashtable_config: entry.HashTableConfig):
    self._batch_size = batch_size or None
    self._hashtable_config = hashtable_config
    self._slices: list[SliceConfig] = []
    self._feature_to_combiner: dict[str, embedding_combiners.Combiner] = {}

  def add_feature_slice(
    self,
    segment: embedding_hash_table_pb2.EntryConfig.Segment,
    learning_rate_fn: entry.LearningRate | None = None,
  ) -> None:
    if learning_rate_fn is None:
      learning_rate_fn = _default_learning_rate(segment)
    self._slices.append(SliceConfig(segment, learning_rate_fn))

  def set_feature_metadata(self, feature_name: str, combiner: embedding_combiners.Combiner) -> None:
    known = self._feature_to_combiner.get(feature_name, combiner)
    if (type(known), known.max_seq_length) != (type(combiner), combiner.max_seq_length):
      raise ValueError(
        f"Feature {feature_name} is bound twice with different combiners: "
        f"{type(known).__name__}({known.max_seq_length}) and "
        f"{type(combiner).__name__}({combiner.max_seq_length})"
      )
    self._feature_to_combiner[feature_name] = combiner

  def embedding_lookup(self, feature_name: str, start: int | None, end: int | None) -> tf.Tensor:
    if start is None and end is None:
      start, end = 0, sum(segment.dim_size for segment, _ in self._slices)
    assert start is not None and end is not None, f"columns [{start}, {end}), want both or none"
    shape = [self._batch_size]
    combiner = self._feature_to_combiner[feature_name]
    if isinstance(combiner, embedding_combiners.FirstN):
      shape.append(combiner.max_seq_length)
    return tf.compat.v1.placeholder(tf.float32, [*shape, end - start])

  def get_slices(self, feature_name: str) -> list[tf.Tensor]:
    slices, start = [], 0
    for segment, _ in self._slices:
      slices.append(self.embedding_lookup(feature_name, start, start + segment.dim_size))
      start += segment.dim_size
    return slices

  def get_feature_names(self) -> list[str]:
    """Returns the columns in the order they were bound."""
    return list(self._feature_to_combiner)

  def get_table_config(self) -> TableConfig:
    """Returns what was declared; the protos in it are copies."""
    return TableConfig(
      slice_configs=_merge_adjacent(self._slices),
      feature_names=self.get_feature_names(),
      unmerged_slice_dims=[segment.dim_size for segment, _ in self._slices],
      hashtable_config=self._hashtable_config,
      feature_to_combiners=dict(self._feature_to_combiner),
    )


class DummyFeatureFactory(FeatureFactory):
  """The factory of the dry run.

  Args:
    batch_size: static batch size of the placeholders; unknown if falsy.
  """

  def __init__(self, batch_size: int | None):
    super().__init__()
    self._batch_size = batch_size
    self._tables: dict[str, DummyFeatureEmbTable] = {}

  def create_feature_slot(self, config: FeatureSlotConfig) -> FeatureSlot:
    """Returns a recording slot.

    Raises:
      NameError: a slot of that name exists.
    """
    name = config.name or str(config.slot_id)
    if name in self._tables:
      raise NameError(f"Duplicate names for the table. Name: {name}")
    self.name_to_admission[name] = Admission(
      config.occurrence_threshold or 0, config.expire_time, config.slot_id is not None
    )
    if config.slot_id is not None:
      self.slot_to_occurrence_threshold[config.slot_id] = config.occurrence_threshold or 0
      self.slot_to_expire_time[config.slot_id] = config.expire_time
    table = DummyFeatureEmbTable(self._batch_size, config.hashtable_config)
    self._tables[name] = table
    return FeatureSlot(table, config)

  def apply_gradients(self, *args: Any, **kwargs: Any) -> tf.Operation:
    """Returns a no-op, whatever the arguments."""
    return tf.no_op()

  def get_table_name_to_table_config(self) -> dict[str, TableConfig]:
    """Returns what each slot declared.

    Raises:
      RuntimeError: a slot has no slice.
    """
    configs = {name: table.get_table_config() for name, table in self._tables.items()}
    for name, config in configs.items():
      if not config.slice_configs:
        raise RuntimeError(f"{name} has no slice, pls. check!")
    return configs


class EmbeddingFeatureEmbTable(FeatureEmbTable):
  """Serves lookups from embeddings that have been looked up and pooled already.

  Args:
    embeddings: feature name -> `[ids, dim]`.
    embedding_slices: pooled slices, by the keys that `create_embedding_slices` gives them.
  """

  def __init__(
    self,
    embeddings: dict[str, tf.Tensor],
    embedding_slices: dict[pooling.SliceKey, tf.Tensor],
  ):
    self._embeddings = embeddings
    self._embedding_slices = embedding_slices

  def embedding_lookup(self, feature_name: str, start: int | None, end: int | None) -> tf.Tensor:
    if start is None and end is None:
      return self._embeddings[feature_name]
    assert start is not None and end is not None, f"columns [{start}, {end}), want both or none"
    key = pooling.SliceKey(feature_name, start, end)
    if key not in self._embedding_slices:
      raise KeyError(
        f"Feature {feature_name} has no columns [{start}, {end}), only "
        f"{[f'[{k.start}, {k.end})' for k in self._keys(feature_name)]}: a model function must add "
        "its feature slices in the same order every time it is called"
      )
    return self._embedding_slices[key]

  def get_slices(self, feature_name: str) -> list[tf.Tensor]:
    return [self._embedding_slices[key] for key in self._keys(feature_name)]

  def _keys(self, feature_name: str) -> list[pooling.SliceKey]:
    keys = [key for key in self._embedding_slices if key.feature == feature_name]
    return sorted(keys, key=lambda key: key.start)


create_embedding_slices = pooling.create_embedding_slices


class FeatureFactoryFromEmbeddings(FeatureFactory):
  """The factory of the real run; subclasses add `apply_gradients`.

  Args:
    name_to_embeddings: feature name -> looked-up embeddings `[ids, dim]`.
    name_to_embedding_slices: what `create_embedding_slices` returned.
  """

  def __init__(
    self,
    name_to_embeddings: dict[str, tf.Tensor],
    name_to_embedding_slices: dict[pooling.SliceKey, tf.Tensor],
  ):
    super().__init__()
    self._table = EmbeddingFeatureEmbTable(name_to_embeddings, name_to_embedding_slices)

  def create_feature_slot(self, config: FeatureSlotConfig) -> FeatureSlot:
    return FeatureSlot(self._table, config)


class EmbeddingLayoutFakeTable(FeatureEmbTable):
  """Stands behind the slots of a fused-layout run, in which models read whole layouts instead."""

  def embedding_lookup(self, feature_name: str, start: int | None, end: int | None) -> None:
    return None


class EmbeddingLayoutFactory(FeatureFactory):
  """The factory of a fused-layout run: embeddings come as ready-made layouts.

  Args:
    hash_table: the tables that were looked up; `None` where nothing is trained.
    layout_embeddings: layout name -> tensor, or list of tensors.
    auxiliary_bundle: what the lookup left for the update.
    async_function_mgr: runs the update, if `async_push`.
    async_push: whether the update of a step runs during the next one.
  """

  def __init__(
    self,
    hash_table: protocols.LayoutGroup | None,
    layout_embeddings: dict[str, tf.Tensor | list[tf.Tensor]],
    auxiliary_bundle: dict[str, tf.Tensor] | None = None,
    async_function_mgr: prefetch_queue.AsyncFunctionMgr | None = None,
    async_push: bool = False,
  ):
    super().__init__()
    self._hash_table = hash_table
    self._layout_embeddings = layout_embeddings
    self._auxiliary_bundle = auxiliary_bundle
    self._async_function_mgr = async_function_mgr
    self._async_push = async_push

  def create_feature_slot(self, config: FeatureSlotConfig) -> FeatureSlot:
    return FeatureSlot(EmbeddingLayoutFakeTable(), config)

  def apply_gradients(
    self,
    grads_and_vars: GradsAndVars,
    req_time: tf.Tensor | None = None,
    grad_scale: tf.Tensor | None = None,
  ) -> tf.Operation:
    """Returns the op that updates the tables from the gradients of all layout tensors."""
    if req_time is None and self._auxiliary_bundle is not None:
      req_time = self._auxiliary_bundle.get("req_time")
    return self._group().apply_gradients(
      layout_grads_and_vars=grads_and_vars,
      global_step=tf.compat.v1.train.get_or_create_global_step(),
      req_time=req_time,
      auxiliary_bundle=self._auxiliary_bundle,
      async_function_mgr=self._async_function_mgr,
      async_push=self._async_push,
      grad_scale=grad_scale,
    )

  def get_layout(self, layout: str) -> tf.Tensor | list[tf.Tensor]:
    """Returns one layout, which must exist."""
    assert (
      layout in self._layout_embeddings
    ), f"There is no layout {layout}, only {sorted(self._layout_embeddings)}"
    return self._layout_embeddings[layout]

  def flattened_layout(self) -> list[tf.Tensor]:
    """Returns all layout tensors in the order that `apply_gradients` wants them."""
    return self._group().flatten_layout(self._layout_embeddings)

  def _group(self) -> protocols.LayoutGroup:
    if self._hash_table is None:
      raise ValueError("hash_table is None: this graph has layouts, but no tables behind them")
    return self._hash_table
