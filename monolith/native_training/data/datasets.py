"""Sources of samples, and the datasets between a source and the parser.

Elements are scalar variants, one sample each, until `parsers` turns a batch of them into tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import flags
from tensorflow.python.data.ops import dataset_ops

from monolith.native_training import native_task_context
from monolith.native_training.data import file_patterns
from monolith.native_training.data.data_flags import get_flag
from monolith.native_training.data.dataset_service import (  # noqa: F401  (part of this module)
  distribute,
  from_dataset_id,
  merged_window,
  register_dataset,
)
from monolith.native_training.data.file_rows import tfrecord_dataset
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
from monolith.native_training.data.sample_datasets import (  # noqa: F401  (part of this module)
  POOL_KEY,
  CacheOneDataset,
  InstanceReweightDataset,
  NegativeGenDataset,
  TransformDataset,
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

_DEFAULT_BUFFER_SIZE = 64 * 1024 * 1024


class CompressType(enum.Enum):
  """Names the compression of a file."""

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


class DynamicMatchingFilesDataset(dataset_ops.DatasetSource):
  """The sorted names of the files that match any pattern when reading begins.

  Workers of a data service can share it.
  """

  def __init__(self, patterns: list[str]):
    super().__init__(
      pb_datasource_ops.dynamic_matching_files_dataset(tf.constant(patterns, tf.string))
    )

  @property
  def element_spec(self) -> tf.TensorSpec:
    return tf.TensorSpec([], tf.string)


class TFRecordDatasetWrapper:
  """`tf.data.TFRecordDataset` that takes, and ignores, the keywords of other sources.

  A file that is torn or corrupt is a `DataLossError` with its name and the record's number.
  """

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
    return tfrecord_dataset(file_name, compression_type, buffer_size, num_parallel_reads)


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


class DistributedFilePBDataset(dataset_ops.UnaryUnchangedStructureDataset):
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

  def __init__(
    self,
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
  ):
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
      self.output_pb_type = output_pb_type
    super().__init__(dataset, dataset._variant_tensor)


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
    stream_timeout: Kafka: end when no message came for this many milliseconds; -1: never.
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
  kwargs["variant_type"] = _variant_type(self, variant_type)
  return NegativeGenDataset(self, neg_num, *args, **kwargs)


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
