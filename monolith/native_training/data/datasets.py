"""Sources of samples, and the datasets between a source and the parser.

Elements are scalar variants, one sample each, until `parsers` turns a batch of them into tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import flags
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training import native_task_context
from monolith.native_training.data import (
  dataservice_flags,  # noqa: F401, defines two flags
  feature_utils,
  file_patterns,
)
from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.data.flow_datasets import MergeFlowDataset, SplitFlowDataset
from monolith.native_training.data.iterator_saving import leave_out_of_checkpoints
from monolith.native_training.data.kafka_dataset import (  # noqa: F401  (part of this module)
  KafkaDataset,
  KafkaGen,
  PyKafkaDataset,
  create_plain_kafka_dataset,
)
from monolith.native_training.data.parquet_dataset import ParquetDataset
from monolith.native_training.data.pb_types import (
  OUTPUT_PB_TYPE_GRAPH_KEY,
  FeaturePruningType,
  PbType,
  default_pb_types,
  element_type,
  record_output_type,
)
from monolith.native_training.distribute import distributed_dataset
from monolith.native_training.runtime.ops import gen_monolith_ops as pb_datasource_ops

flags.DEFINE_string("dataset_input_patterns", None, "files: {DATE(a,b)} and {INT(a,b)} expand")
flags.DEFINE_bool("dataset_input_use_snappy", None, "whether files are compressed with snappy")
flags.DEFINE_string("dataset_input_compression_type", None, "a name of CompressType")
flags.DEFINE_bool("dataset_input_use_parquet", None, "whether files are Parquet")
flags.DEFINE_bool("dataset_input_use_tfrecord", None, "whether files are TFRecord")
flags.DEFINE_integer("dataset_worker_idx", None, "index of this worker among the readers")
flags.DEFINE_integer("dataset_num_workers", None, "number of workers that read")
flags.DEFINE_string("kafka_other_metadata", None, "more key=value settings of the consumer")

POOL_KEY = "TF_ITEMPOOL"
_DATASET_ID_KEY = "registed_dataset_id"
_DEFAULT_BUFFER_SIZE = 64 * 1024 * 1024


class CompressType(enum.Enum):
  """How a file is compressed."""

  UNKNOW = 0
  NO = 1
  SNAPPY = 2
  ZSTD = 3
  ZLIB = 4
  GZIP = 5


def _compression(
  file_name: Any, use_snappy: bool | None, compression_type: CompressType | None
) -> tuple[bool, CompressType]:
  """Returns `use_snappy` and `compression_type` from keywords, flags and the file's suffix."""
  flag = get_flag("dataset_input_compression_type")
  if flag is not None:
    compression_type = CompressType[flag.upper()]
  compression_type = compression_type or CompressType.UNKNOW
  snappy_flag = get_flag("dataset_input_use_snappy")
  if snappy_flag is not None:
    use_snappy = snappy_flag
  if use_snappy is None:
    use_snappy = compression_type == CompressType.UNKNOW and (
      isinstance(file_name, str) and file_name.endswith(".snappy")
    )
  if use_snappy and compression_type not in (CompressType.UNKNOW, CompressType.SNAPPY):
    raise ValueError(f"use_snappy is True, but compression_type is {compression_type.name}")
  return use_snappy, compression_type


class FilePBDataset(dataset_ops.DatasetSource):
  """The samples of one file.

  Args:
    file_name: a name or a string scalar; `""` reads standard input.
    buffer_size: bytes to read ahead.
    input_pb_type: what records are, by default the flag `data_type` or INSTANCE.
    output_pb_type: what elements are, by default INSTANCE for Instances, else EXAMPLE.
    feature_pruning_type: what to drop, a constant of `FeaturePruningType`.
    disable_iterator_save_restore: in graph mode, do not checkpoint where reading stands.
    use_snappy: by default true for names that end in `.snappy`.
    compression_type: how the file is compressed; ZSTD needs the system's libzstd.
    **kwargs: the headers of records: `has_sort_id` (default: the flag `sort_id`, else True),
      `kafka_dump`, `kafka_dump_prefix`, `lagrangex_header` (default: the flags, else False).
  """

  def __init__(
    self,
    file_name: str | tf.Tensor = "",
    buffer_size: int | None = None,
    input_pb_type: PbType | None = None,
    output_pb_type: PbType | None = None,
    feature_pruning_type: int = FeaturePruningType.PRUNING_RAW_FEATURE,
    disable_iterator_save_restore: bool = True,
    use_snappy: bool | None = None,
    compression_type: CompressType | None = CompressType.UNKNOW,
    **kwargs: Any,
  ):
    input_pb_type, output_pb_type = default_pb_types(input_pb_type, output_pb_type)
    use_snappy, compression_type = _compression(file_name, use_snappy, compression_type)
    if buffer_size is None:
      factor = 2 if input_pb_type == PbType.EXAMPLEBATCH else 1
      buffer_size = factor * _DEFAULT_BUFFER_SIZE
    out_type = element_type(output_pb_type)
    self._element_spec = tf.TensorSpec([], out_type)
    self.output_pb_type = output_pb_type
    record_output_type(output_pb_type)
    if disable_iterator_save_restore and isinstance(file_name, str):
      leave_out_of_checkpoints()
    header = {
      "has_sort_id": kwargs.pop("has_sort_id", get_flag("sort_id", True)),
      "kafka_dump": kwargs.pop("kafka_dump", get_flag("kafka_dump", False)),
      "kafka_dump_prefix": kwargs.pop("kafka_dump_prefix", get_flag("kafka_dump_prefix", False)),
      "lagrangex_header": kwargs.pop("lagrangex_header", get_flag("lagrangex_header", False)),
    }
    variant = pb_datasource_ops.pb_dataset(
      file_name=file_name,
      use_snappy=use_snappy,
      buffer_size=buffer_size,
      input_pb_type=input_pb_type.to_name(),
      output_pb_type=output_pb_type.to_name(),
      feature_pruning_type=feature_pruning_type,
      feature_name_list=tf.constant([], tf.string),
      feature_id_list=tf.constant([], tf.int32),
      out_type=out_type,
      compression_type=compression_type.value,
      **header,
    )
    super().__init__(variant)

  @property
  def element_spec(self) -> tf.TypeSpec:
    return self._element_spec


def _variant_type(dataset: tf.data.Dataset, variant_type: str | None) -> str:
  """Returns what the elements of a dataset are: the keyword, what its sources or the graph say."""
  if variant_type is not None:
    return variant_type
  pending, found = [dataset], set()
  while pending:
    current = pending.pop()
    if hasattr(current, "output_pb_type"):
      found.add(current.output_pb_type.to_name())
    else:
      pending += current._inputs()
  # The source inside of an interleave is not an input.
  found = found or set(tf.compat.v1.get_collection(OUTPUT_PB_TYPE_GRAPH_KEY))
  assert len(found) == 1 and found <= {
    "instance",
    "example",
  }, f"cannot tell what the samples are ({sorted(found)}): give variant_type"
  return found.pop()


class DynamicMatchingFilesDataset:
  """The names of the files that match any pattern; workers of a data service can share it."""

  def __new__(cls, patterns: list[str]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tf.io.matching_files(patterns))


class TFRecordDatasetWrapper:
  """`tf.data.TFRecordDataset` that takes, and ignores, the keywords of other sources."""

  def __new__(
    cls,
    file_name: Any,
    compression_type: str | None = None,
    buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    **kwargs: Any,
  ) -> tf.data.Dataset:
    if isinstance(compression_type, CompressType):
      names = {
        CompressType.UNKNOW: "", CompressType.NO: "", CompressType.ZLIB: "ZLIB",
        CompressType.GZIP: "GZIP",
      }  # fmt: skip
      if compression_type not in names:
        raise ValueError(
          f"compression_type is {compression_type.name}, but TFRecord files are ZLIB or GZIP"
        )
      compression_type = names[compression_type]
    return tf.data.TFRecordDataset(file_name, compression_type, buffer_size, num_parallel_reads)


def _parquet_dataset(**options: Any) -> tf.data.Dataset:
  """Makes a `ParquetDataset` from the keywords of any source.

  Raises:
    ValueError: there is nothing to read.
  """
  for name in ("file_name", "select_columns", "select_columns_type"):
    if options.get(name) is None or (isinstance(options[name], str) and not options[name]):
      raise ValueError(f"use_parquet needs {name}")
  options["output_pb_type"] = options.get("output_pb_type") or PbType.EXAMPLE
  return ParquetDataset(**options)


class DistributedFilePBDataset:
  """The samples in the files that this worker reads.

  Args:
    patterns: patterns of file names.
    buffer_size: bytes to read ahead in each file.
    input_pb_type: what records are, by default the flag `data_type` or INSTANCE.
    output_pb_type: what elements are, by default INSTANCE for Instances, else EXAMPLE.
    feature_pruning_type: what to drop, a constant of `FeaturePruningType`.
    exclude_fn: a function of a file name that is true for files to leave out.
    cycle_length: files that are read at once, by default the flag `max_task_num_per_worker` or 4.
    block_length: consecutive samples of a file, by default the flag `block_length` or 1.
    num_parallel_calls: threads that read.
    deterministic: whether the order of samples must be the same every time.
    use_parquet: whether files are Parquet.
    use_tfrecord: whether files are TFRecord.
    **kwargs: `shard_num` and `shard_index` instead of the worker's place in the cluster;
      `enable_dynamic_sharding` (default: the flag) to take files from a queue that all workers
      share, one after the other; and keywords of `FilePBDataset` or `ParquetDataset`.
  """

  def __new__(
    cls,
    patterns: str | Sequence[str],
    buffer_size: int | None = None,
    input_pb_type: PbType | None = None,
    output_pb_type: PbType | None = None,
    feature_pruning_type: int = FeaturePruningType.PRUNING_RAW_FEATURE,
    exclude_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
    cycle_length: int | None = None,
    block_length: int | None = None,
    num_parallel_calls: int | None = tf.data.AUTOTUNE,
    deterministic: bool | None = None,
    use_parquet: bool = False,
    use_tfrecord: bool = False,
    **kwargs: Any,
  ) -> tf.data.Dataset:
    assert not (use_parquet and use_tfrecord), "use_parquet and use_tfrecord are both set"
    is_dynamic = kwargs.pop("enable_dynamic_sharding", get_flag("enable_dynamic_sharding", False))
    patterns = sorted([patterns] if isinstance(patterns, str) else patterns)
    shard_num = kwargs.pop("shard_num", None)
    shard_index = kwargs.pop("shard_index", None)
    # Workers of a data service share files already.
    is_dynamic = is_dynamic and not get_flag("data_service_dispatcher")
    if is_dynamic:
      files = distributed_dataset.create_dynamic_sharding_dataset(patterns)
    else:
      files = DynamicMatchingFilesDataset(patterns)
    if exclude_fn is not None:
      files = files.filter(lambda name: tf.logical_not(exclude_fn(name)))
    if not is_dynamic and not get_flag("data_service_dispatcher"):
      ctx = native_task_context.get()
      files = files.shard(
        ctx.num_workers if shard_num is None else shard_num,
        ctx.worker_index if shard_index is None else shard_index,
      )

    if use_parquet:
      output_pb_type = output_pb_type or PbType.EXAMPLE
    input_pb_type, output_pb_type = default_pb_types(input_pb_type, output_pb_type)

    def read(file_name: tf.Tensor) -> tf.data.Dataset:
      if use_parquet:
        return _parquet_dataset(file_name=file_name, output_pb_type=output_pb_type, **kwargs)
      if use_tfrecord:
        return TFRecordDatasetWrapper(file_name, buffer_size=buffer_size, **kwargs)
      return FilePBDataset(
        file_name,
        buffer_size,
        input_pb_type,
        output_pb_type,
        feature_pruning_type,
        **kwargs,
      )

    if not use_tfrecord:
      record_output_type(output_pb_type)
    if is_dynamic:
      dataset = files.flat_map(read)
    else:
      dataset = files.interleave(
        read,
        cycle_length=cycle_length or get_flag("max_task_num_per_worker", 4),
        block_length=block_length or get_flag("block_length", 1),
        num_parallel_calls=num_parallel_calls,
        deterministic=bool(deterministic),
      )
    if not use_tfrecord:
      dataset.output_pb_type = output_pb_type
    return dataset


class PBDataset:
  """Makes the dataset that fits the arguments and flags.

  Args:
    topics_or_files: a file name, or a list of patterns or of Kafka topics.
    buffer_size_or_group_id: a buffer size, or a consumer group of Kafka.
    input_pb_type_or_servers: what records are, or the brokers of Kafka.
    output_pb_type: what elements are.
    feature_pruning_type: what to drop, a constant of `FeaturePruningType`.
    disable_iterator_save_restore: in graph mode, do not checkpoint where reading stands.
    has_header: Kafka: a message is a sequence of framed records, not one serialized record.
    variant_type: Kafka: what records are, by name; the same as `input_pb_type`.
    stream_timeout: Kafka: end when no message came for so many milliseconds; -1: never.
    message_poll_timeout: Kafka: milliseconds to wait before the messages that came are handed on.
    poll_batch_size: Kafka: most messages to read at once.
    filter_empty: Kafka: leave out samples that have no content.
    configuration: Kafka: `key=value` settings of the consumer.
    container: Kafka: part of the consumer's name.
    shared_name: Kafka: iterators with the same name share one consumer.
    cycle_length: patterns: files that are read at once.
    block_length: patterns: consecutive samples of a file.
    num_parallel_calls: patterns: threads that read.
    deterministic: patterns: whether the order of samples must be the same every time.
    **kwargs: `file_name`, `patterns`, `topics`, `group_id`, `servers`, `input_pb_type`,
      `use_parquet`, `use_tfrecord` and other keywords of the dataset that is made.

  Returns:
    A `KafkaDataset` when the flags `kafka_topics`, `kafka_group_id` and `kafka_servers` are all
    set, or topics are given with a group or brokers; a `FilePBDataset` or `ParquetDataset` for a
    file name; or what `DistributedFilePBDataset` and `TFRecordDatasetWrapper` make.

  Raises:
    ValueError: Kafka is asked for, but topics, group or brokers are missing; or Parquet, but the
      file or the columns are.
  """

  def __new__(
    cls,
    topics_or_files: str | Sequence[str] | None = "",
    buffer_size_or_group_id: int | str | None = None,
    input_pb_type_or_servers: PbType | str | Sequence[str] | None = None,
    output_pb_type: PbType | None = None,
    feature_pruning_type: int = FeaturePruningType.PRUNING_RAW_FEATURE,
    disable_iterator_save_restore: bool = True,
    *,
    has_header: bool = True,
    variant_type: str | None = None,
    stream_timeout: int = -1,
    message_poll_timeout: int = 10000,
    poll_batch_size: int | None = None,
    filter_empty: bool = False,
    configuration: Sequence[str] | None = None,
    container: str = "",
    shared_name: str = "",
    cycle_length: int | None = None,
    block_length: int | None = None,
    num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
  ) -> tf.data.Dataset:
    options: dict[str, Any] = {
      "output_pb_type": output_pb_type,
      "feature_pruning_type": feature_pruning_type,
      "disable_iterator_save_restore": disable_iterator_save_restore,
    }
    if isinstance(topics_or_files, str):
      options["file_name"] = topics_or_files
    elif topics_or_files:
      options["patterns"] = list(topics_or_files)
    if isinstance(buffer_size_or_group_id, int):
      options["buffer_size"] = buffer_size_or_group_id
    elif buffer_size_or_group_id is not None:
      options["group_id"] = buffer_size_or_group_id
    if isinstance(input_pb_type_or_servers, (str, list, tuple)):
      options["servers"] = input_pb_type_or_servers
    elif input_pb_type_or_servers is not None:
      options["input_pb_type"] = input_pb_type_or_servers
    options.update(kwargs)
    pattern_flag = get_flag("dataset_input_patterns")
    if pattern_flag:
      options["patterns"] = file_patterns.match_patterns(pattern_flag)
      options.pop("file_name", None)
    for name in ("use_parquet", "use_tfrecord"):
      options[name] = get_flag("dataset_input_" + name, options.get(name, False))
    assert not (
      options["use_parquet"] and options["use_tfrecord"]
    ), "use_parquet and use_tfrecord are both set"
    listed = None if isinstance(topics_or_files, str) else topics_or_files
    kafka_source = cls._kafka_source(options, listed)
    if kafka_source is not None:
      return KafkaDataset(
        **kafka_source,
        has_header=has_header,
        variant_type=variant_type,
        stream_timeout=stream_timeout,
        message_poll_timeout=message_poll_timeout,
        poll_batch_size=poll_batch_size,
        filter_empty=filter_empty,
        configuration=configuration,
        container=container,
        shared_name=shared_name,
        **options,
      )
    interleaving = {
      "cycle_length": cycle_length,
      "block_length": block_length,
      "num_parallel_calls": num_parallel_calls,
      "deterministic": deterministic,
    }
    if options.get("patterns"):
      options.update({name: value for name, value in interleaving.items() if value is not None})
    return cls._create(options)

  @staticmethod
  def _kafka_source(options: dict[str, Any], listed: Sequence[str] | None) -> dict[str, Any] | None:
    """Takes topics, group and brokers out of the options; returns None if files are meant.

    Args:
      options: the keywords.
      listed: patterns or topics, whichever it turns out to be.
    """
    names = ("topics", "group_id", "servers")
    given = {name: options.pop(name, None) for name in names}
    from_flags = {name: get_flag("kafka_" + name) for name in names}
    has_broker = given["group_id"] or given["servers"]
    if not (all(from_flags.values()) or given["topics"] or (listed and has_broker)):
      return None
    given["topics"] = given["topics"] or listed
    source = {name: given[name] or from_flags[name] for name in names}
    missing = [name for name in names if not source[name]]
    if missing:
      raise ValueError(f"Kafka needs topics, group_id and servers; empty: {', '.join(missing)}")
    return source

  @classmethod
  def _create(cls, options: dict[str, Any]) -> tf.data.Dataset:
    if options.get("patterns"):
      options.pop("file_name", None)
      # Iterators over several files are checkpointed like any other.
      options.pop("disable_iterator_save_restore", None)
      return DistributedFilePBDataset(**options)
    options.pop("patterns", None)
    if options.pop("use_parquet"):
      return _parquet_dataset(**options)
    if options.pop("use_tfrecord"):
      names = ("file_name", "compression_type", "buffer_size", "num_parallel_reads")
      return TFRecordDatasetWrapper(**{name: options[name] for name in names if name in options})
    return FilePBDataset(**options)

  @classmethod
  def gen_patterns(
    cls,
    input_path: str | None = None,
    start_date: str | None = None,
    start_hour: int | None = None,
    end_date: str | None = None,
    end_hour: int | None = None,
    is_hourly: bool = False,
    wildcard: str = "*",
  ) -> list[str]:
    """Calls `file_patterns.gen_patterns`; flags of the same names as the arguments are defaults."""
    return file_patterns.gen_patterns(
      input_path or get_flag("input_path"),
      start_date or get_flag("start_date"),
      get_flag("start_hour") if start_hour is None else start_hour,
      end_date or get_flag("end_date"),
      get_flag("end_hour") if end_hour is None else end_hour,
      is_hourly or get_flag("is_hourly", False),
      wildcard if wildcard != "*" else get_flag("wildcard", "*"),
    )


class CacheOneDataset(dataset_ops.UnaryDataset):
  """Elements `(x, is_last)`, where `is_last` is true for the last element of the input."""

  def __init__(self, input_dataset: tf.data.Dataset):
    self._input = input_dataset
    variant = pb_datasource_ops.monolith_cache_one_dataset(input_dataset._variant_tensor)
    super().__init__(input_dataset, variant)

  @property
  def element_spec(self) -> Any:
    return (self._input.element_spec, tf.TensorSpec([], tf.bool))


class _SampleDataset(dataset_ops.UnaryUnchangedStructureDataset):
  """Samples made from samples."""


class InstanceReweightDataset(_SampleDataset):
  """Repeats each sample as often as its actions weigh.

  Args:
    input_dataset: samples.
    action_priority: `"2,7,..."`, the best action first.
    reweight: `"action:weight:label,..."`.
    variant_type: `"example"` or `"instance"`.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    action_priority: str | None = None,
    reweight: str | None = None,
    variant_type: str = "example",
  ):
    priorities = [int(action) for action in (action_priority or "").split(",") if action.strip()]
    actions, weights, labels = [], [], []
    for part in filter(None, (part.strip() for part in (reweight or "").split(","))):
      fields = part.split(":")
      if len(fields) != 3:
        raise ValueError(f"reweight has {part!r}, want action:weight:label")
      actions.append(int(fields[0]))
      weights.append(int(fields[1]))
      labels.append(int(fields[2]))
    variant = pb_datasource_ops.instance_reweight_dataset(
      input_dataset._variant_tensor,
      method=0,
      actions=actions,
      weights=weights,
      labels=labels,
      priorities=priorities,
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)


class NegativeGenDataset(_SampleDataset):
  """Puts sampled negatives before each positive sample.

  Args:
    input_dataset: samples.
    neg_num: most negatives per positive.
    per_channel: draw from the channel of the positive.
    channel_feature: the feature, or slot, whose id is the channel; default slot 3.
    item_features: features, or slots, that describe the item.
    start_num: a channel is drawn from once it has more items.
    max_item_num: most items of a channel.
    positive_label: the label of positives, when no positive actions are given.
    negative_label: the label of generated negatives.
    negative_action: their action; -99999 keeps the actions of the positive.
    positive_actions: a sample is positive if its best action is one of them.
    label_index: the label that counts.
    action_priority: `"2,7,..."`, the best action first.
    index_feature: the feature, or slot, whose id is the item id; default `LineId.item_id`.
    throw_origin: drop all original samples.
    throw_origin_neg: drop original negatives.
    cache_only_pos: cache the items of positives only.
    cache_negative_actions: cache the items of negatives with such an action too.
    real_neg_instance_weight: weight of original negatives.
    sampled_neg_instance_weight: weight of generated ones, if positive.
    unbias_sampled_neg: otherwise weigh them by how rarely they were drawn.
    origin_neg_in_pool_proba: share of the cacheable negatives that are cached.
    neg_sample_declay_factor: how the age of an item counts in that weight.
    easy_hard_ratio: share of negatives drawn from any channel.
    variant_type: `"example"` or `"instance"`.
  """

  def __init__(
    self,
    input_dataset: tf.data.Dataset,
    neg_num: int,
    per_channel: bool = False,
    channel_feature: str | int = "",
    item_features: Sequence[str | int] = (),
    start_num: int = 500,
    max_item_num: int = 100000,
    positive_label: int = 1,
    negative_label: int = -1,
    negative_action: int = -99999,
    positive_actions: Sequence[int] = (),
    label_index: int = 0,
    action_priority: str = "",
    index_feature: str | int = "",
    throw_origin: bool = False,
    throw_origin_neg: bool = False,
    cache_only_pos: bool = True,
    cache_negative_actions: Sequence[int] = (),
    real_neg_instance_weight: float = 1.0,
    sampled_neg_instance_weight: float = -1.0,
    unbias_sampled_neg: bool = True,
    origin_neg_in_pool_proba: float = 1.0,
    neg_sample_declay_factor: float = 1.0,
    easy_hard_ratio: float = 0.0,
    variant_type: str = "example",
  ):
    self.pool = feature_utils.create_item_pool(start_num, max_item_num)
    tf.compat.v1.add_to_collection(POOL_KEY, self.pool)
    variant = pb_datasource_ops.instance_negative_gen_dataset(
      input_dataset._variant_tensor,
      self.pool,
      neg_num=neg_num,
      per_channel=per_channel,
      channel_feature=str(channel_feature),
      item_features=[str(feature) for feature in item_features],
      positive_label=positive_label,
      negative_label=negative_label,
      negative_action=negative_action,
      positive_actions=list(positive_actions),
      label_index=label_index,
      action_priority=action_priority,
      index_feature=str(index_feature),
      throw_origin=throw_origin,
      throw_origin_neg=throw_origin_neg,
      cache_only_pos=cache_only_pos,
      cache_negative_actions=list(cache_negative_actions),
      real_neg_instance_weight=real_neg_instance_weight,
      sampled_neg_instance_weight=sampled_neg_instance_weight,
      unbias_sampled_neg=unbias_sampled_neg,
      origin_neg_in_pool_proba=origin_neg_in_pool_proba,
      neg_sample_declay_factor=neg_sample_declay_factor,
      easy_hard_ratio=easy_hard_ratio,
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)


class TransformDataset(_SampleDataset):
  """Filters and changes samples as a `data.transform.transforms.Transform` says."""

  def __init__(self, input_dataset: tf.data.Dataset, transform: Any, variant_type: str):
    variant = pb_datasource_ops.transform_dataset(
      input_dataset._variant_tensor,
      config=transform.as_proto().SerializeToString(),
      variant_type=variant_type,
    )
    super().__init__(input_dataset, variant)


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


def _instance_reweight(
  self: tf.data.Dataset, action_priority: str, reweight: str, variant_type: str | None = None
) -> tf.data.Dataset:
  """Makes an `InstanceReweightDataset` from the dataset."""
  return InstanceReweightDataset(self, action_priority, reweight, _variant_type(self, variant_type))


def _negative_gen(
  self: tf.data.Dataset,
  neg_num: int,
  *args: Any,
  variant_type: str | None = None,
  **kwargs: Any,
) -> tf.data.Dataset:
  """Makes a `NegativeGenDataset`; items of negatives are cached too unless told otherwise."""
  if len(args) <= _CACHE_ONLY_POS:
    kwargs.setdefault("cache_only_pos", False)
  return NegativeGenDataset(
    self, neg_num, *args, variant_type=_variant_type(self, variant_type), **kwargs
  )


# Position of cache_only_pos among the arguments of negative_gen after neg_num.
_CACHE_ONLY_POS = 14


def _transform(self: tf.data.Dataset, t: Any, variant_type: str | None = None) -> tf.data.Dataset:
  """Makes a `TransformDataset` from the dataset."""
  return TransformDataset(self, t, _variant_type(self, variant_type))


def _split_flow(
  self: tf.data.Dataset,
  data_flow: Sequence[str],
  index: int,
  max_queue_size: int = 1024,
  variant_type: str | None = None,
) -> tf.data.Dataset:
  """Makes a `SplitFlowDataset` from the dataset."""
  return SplitFlowDataset(self, data_flow, index, max_queue_size, _variant_type(self, variant_type))


def _merge_flow(
  self: tf.data.Dataset,
  dataset_to_merge: tf.data.Dataset | Sequence[tf.data.Dataset],
  max_queue_size: int = 1024,
  variant_type: str | None = None,
) -> tf.data.Dataset:
  """Makes a `MergeFlowDataset` from the dataset and others."""
  return MergeFlowDataset(self, dataset_to_merge, max_queue_size, _variant_type(self, variant_type))


def _identity(self: tf.data.Dataset, *args: Any, **kwargs: Any) -> tf.data.Dataset:
  """Returns the dataset itself: the driver decides whether a data service is used."""
  return self


for _cls in (tf.data.Dataset, tf.compat.v1.data.Dataset):
  _cls.instance_reweight = _instance_reweight
  _cls.negative_gen = _negative_gen
  _cls.split_flow = _split_flow
  _cls.merge_flow = _merge_flow
  _cls.transform = _transform
  _cls.merged_window = merged_window
  _cls.distribute = _identity
