"""Random samples: files to try a reader or model on, and warm-up requests for TensorFlow Serving.

`ParserArgs` says what a sample has, in the words of the functions of `data.parsers`:

    args = ParserArgs(variant_type="example", sparse_features=["user", "item"],
                      dense_features=["label"], dense_feature_shapes=[1])
    gen_random_data_file("/tmp/data", args, num_batch=10)

Numbers come from the module `random`: seed that to get the same samples again.
"""

from __future__ import annotations

import dataclasses
import random
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from google.protobuf.descriptor import FieldDescriptor

from idl.matrix.proto import example_pb2, line_id_pb2, proto_parser_pb2
from monolith.native_training import utils
from monolith.native_training.data import feature_list
from monolith.native_training.model_export import export_context

if TYPE_CHECKING:
  from tensorflow_serving.apis import prediction_log_pb2

_INSTANCE = "instance"
_EXAMPLE = "example"
_EXAMPLE_BATCH = "example_batch"
# The key of the serialized samples in a request, if nothing else is known.
_INPUT_NAMES = {_INSTANCE: "instances", _EXAMPLE: "examples", _EXAMPLE_BATCH: "example_batch"}

_LABEL = "label"
_INSTANCE_WEIGHT = "instance_weight"
_BATCH_LABEL = "__LABEL__"
_BATCH_LINE_ID = "__LINE_ID__"

_V1_SLOTS, _V1_SIGNATURE_BITS = 1 << 10, 54
_V2_SLOTS, _V2_SIGNATURE_BITS = 1 << 15, 48

# Where training configurations look for it by default.
_WARMUP_FILE = "./warmup_file"


@dataclasses.dataclass
class FeatureMeta:
  """One feature of a sample.

  Attributes:
    name: its name.
    slot: slot of its ids; None for a dense feature or a field of `LineId`.
    version: 1 or 2, the layout of its ids.
    shape: number of values of a dense feature or field.
    dtype: of those values.
  """

  name: str
  slot: int | None = None
  version: int = 2
  shape: int = 1
  dtype: tf.DType = tf.float32


@dataclasses.dataclass
class ParserArgs:
  """What samples have: the arguments of a parser, and what a request needs besides.

  Attributes:
    model_name: the model in a request.
    variant_type: `instance`, `example` or `example_batch`.
    fidv1_features: slots, or names of features, with v1 ids.
    fidv2_features: names of features with v2 ids.
    sparse_features: the same, as parsers of examples call them.
    dense_features: names of dense features, `label` and `instance_weight` among them.
    dense_feature_shapes: number of values of each, 1 by default.
    dense_feature_types: dtype of each, float32 by default.
    extra_features: names of fields of `LineId`.
    extra_feature_shapes: number of values of each, 1 by default.
    batch_size: samples in a batch.
    fids_per_feature: ids of each sparse feature of a sample.
    signature_name: signatures of the model that take the samples.
    input_name: the key of the samples in a request; None: `instances`, `examples` or
      `example_batch`.
  """

  model_name: str = ""
  variant_type: str = _INSTANCE
  fidv1_features: Sequence[int | str] = ()
  fidv2_features: Sequence[str] = ()
  sparse_features: Sequence[str] = ()
  dense_features: Sequence[str] = ()
  dense_feature_shapes: Sequence[int] | None = None
  dense_feature_types: Sequence[tf.DType] | None = None
  extra_features: Sequence[str] = ()
  extra_feature_shapes: Sequence[int] | None = None
  batch_size: int = 64
  fids_per_feature: int = 1
  signature_name: Sequence[str] = ("serving_default",)
  input_name: str | None = None

  def __post_init__(self) -> None:
    if self.variant_type == "examplebatch":
      self.variant_type = _EXAMPLE_BATCH
    if self.variant_type not in _INPUT_NAMES:
      raise ValueError(f"variant_type is {self.variant_type!r}, want one of {list(_INPUT_NAMES)}")
    if self.batch_size < 1:
      raise ValueError(f"batch_size is {self.batch_size}, want at least 1")
    _same_size("dense_features", self.dense_features, "shapes", self.dense_feature_shapes)
    _same_size("dense_features", self.dense_features, "types", self.dense_feature_types)
    _same_size("extra_features", self.extra_features, "shapes", self.extra_feature_shapes)
    for name in self.extra_features or ():
      if name not in line_id_pb2.LineId.DESCRIPTOR.fields_by_name:
        raise ValueError(f"extra_features has {name!r}, which is no field of LineId")

  @classmethod
  def from_collections(cls) -> ParserArgs:
    """Reads what the parser of the default graph noted there.

    Raises:
      ValueError: not exactly one parser was called in the graph.
    """
    kinds = utils.get_collection("variant_type") or []
    if len(kinds) != 1:
      raise ValueError(f"The graph has {len(kinds)} parsers of samples ({kinds}), want one")
    noted = {}
    for name in (
      "fidv1_features",
      "fidv2_features",
      "sparse_features",
      "dense_features",
      "dense_feature_shapes",
      "dense_feature_types",
      "extra_features",
      "extra_feature_shapes",
    ):
      values = utils.get_collection(name)
      if values:
        noted[name] = values[0]
    return cls(variant_type=kinds[0], signature_name=_sample_signatures(), **noted)

  @property
  def sparse_metas(self) -> list[FeatureMeta]:
    """The features with ids, v1 first."""
    metas = []
    for feature in self.fidv1_features or ():
      name, slot = feature_list.get_feature_name_and_slot(feature)
      metas.append(FeatureMeta(name, slot, version=1))
    for name in (*(self.fidv2_features or ()), *(self.sparse_features or ())):
      metas.append(FeatureMeta(name, feature_list.get_feature_name_and_slot(name)[1]))
    return metas

  @property
  def dense_metas(self) -> list[FeatureMeta]:
    """The dense features."""
    names = list(self.dense_features or ())
    shapes = self.dense_feature_shapes or [1] * len(names)
    types = self.dense_feature_types or [tf.float32] * len(names)
    return [
      FeatureMeta(name, shape=shape, dtype=tf.as_dtype(dtype))
      for name, shape, dtype in zip(names, shapes, types)
    ]

  @property
  def extra_metas(self) -> list[FeatureMeta]:
    """The fields of `LineId`; their dtype is that of the field."""
    names = list(self.extra_features or ())
    shapes = self.extra_feature_shapes or [1] * len(names)
    return [FeatureMeta(name, shape=shape) for name, shape in zip(names, shapes)]


def lg_header(source: str | None) -> bytes:
  """The 8 bytes of a lagrangex header with the hash of a data source; zeros if there is none."""
  if not source:
    return bytes(8)
  key = 0
  for byte in source.encode("utf-8"):
    key = (31 * key + byte) & 0xFFFFFFFF
  return struct.pack("<Q", (key << 8) & 0xFFFFFFFF)


def sort_header(sort_id: bool, kafka_dump: bool, kafka_dump_prefix: bool) -> bytes:
  """The header of a record with empty sort id and dump fields: zeros.

  Raises:
    Exception: no reader has this combination.
  """
  sizes = {
    (False, False, False): 0,
    (True, False, False): 8,
    (True, True, False): 16,
    (True, False, True): 24,
  }
  flags = (bool(sort_id), bool(kafka_dump), bool(kafka_dump_prefix))
  if flags not in sizes:
    raise Exception(
      f"sort_id={sort_id}, kafka_dump={kafka_dump}, kafka_dump_prefix={kafka_dump_prefix} is not "
      "supported: a dump has a sort id, and either kafka_dump or kafka_dump_prefix"
    )
  return bytes(sizes[flags])


def gen_fids_v1(slot: int, size: int = 1) -> list[int]:
  """`size` random v1 ids of a slot, as unsigned integers."""
  return _gen_fids(slot, size, _V1_SLOTS, _V1_SIGNATURE_BITS)


def gen_fids_v2(slot: int, size: int = 1) -> list[int]:
  """`size` random v2 ids of a slot, as unsigned integers."""
  return _gen_fids(slot, size, _V2_SLOTS, _V2_SIGNATURE_BITS)


def gen_instance(
  args: ParserArgs, actions: Sequence[int] | None = None, drop_rate: float | None = None
) -> proto_parser_pb2.Instance:
  """A random Instance.

  Args:
    args: what it has; `sparse_features` are named features like `fidv2_features`.
    actions: of its `LineId`.
    drop_rate: probability that it lacks a sparse or dense feature; None: it has all.
  """
  instance = proto_parser_pb2.Instance()
  for meta in _kept(args.sparse_metas, drop_rate):
    if meta.version == 1:
      instance.fid.extend(gen_fids_v1(meta.slot, args.fids_per_feature))
    else:
      instance.feature.add(name=meta.name).fid.extend(
        gen_fids_v2(meta.slot, args.fids_per_feature)
      )
  for meta in _kept(args.dense_metas, drop_rate):
    values = _gen_dense(meta)
    if meta.name == _LABEL:
      instance.label.extend(values)
    elif meta.name == _INSTANCE_WEIGHT:
      instance.instance_weight = values[0]
    else:
      feature = instance.feature.add(name=meta.name)
      _pick(meta, feature.float_value, feature.int64_value, feature.bytes_value).extend(values)
  _fill_line_id(instance.line_id, args, actions)
  return instance


def gen_example(
  args: ParserArgs, actions: Sequence[int] | None = None, drop_rate: float | None = None
) -> example_pb2.Example:
  """A random Example. See `gen_instance` for the arguments."""
  example = example_pb2.Example()
  for meta in _kept(args.sparse_metas, drop_rate):
    named = example.named_feature.add(name=meta.name, id=meta.slot)
    _fill_fids(named.feature, meta, args.fids_per_feature)
  for meta in _kept(args.dense_metas, drop_rate):
    values = _gen_dense(meta)
    if meta.name == _LABEL:
      example.label.extend(values)
    elif meta.name == _INSTANCE_WEIGHT:
      example.instance_weight = values[0]
    else:
      _fill_dense(example.named_feature.add(name=meta.name).feature, meta, values)
  _fill_line_id(example.line_id, args, actions)
  return example


def gen_example_batch(
  args: ParserArgs, actions: Sequence[int] | None = None, drop_rate: float | None = None
) -> example_pb2.ExampleBatch:
  """A random ExampleBatch of `args.batch_size` rows. See `gen_instance` for the arguments.

  A feature that is dropped is missing in all rows.
  """
  batch = example_pb2.ExampleBatch(batch_size=args.batch_size)
  for meta in _kept(args.sparse_metas, drop_rate):
    column = batch.named_feature_list.add(name=meta.name, id=meta.slot)
    for _ in range(args.batch_size):
      _fill_fids(column.feature.add(), meta, args.fids_per_feature)
  for meta in _kept(args.dense_metas, drop_rate):
    name = _BATCH_LABEL if meta.name == _LABEL else meta.name
    column = batch.named_feature_list.add(name=name)
    for _ in range(args.batch_size):
      _fill_dense(column.feature.add(), meta, _gen_dense(meta))
  column = batch.named_feature_list.add(name=_BATCH_LINE_ID)
  for _ in range(args.batch_size):
    line_id = line_id_pb2.LineId()
    _fill_line_id(line_id, args, actions)
    column.feature.add().bytes_list.value.append(line_id.SerializeToString())
  return batch


def gen_prediction_log(
  args: ParserArgs, drop_rate: float | None = None
) -> list[prediction_log_pb2.PredictionLog]:
  """Requests with one batch of random samples, one for each of `args.signature_name`.

  Args:
    args: what the samples have.
    drop_rate: see `gen_instance`.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
  """
  try:
    from tensorflow_serving.apis import prediction_log_pb2
  except ImportError as e:
    raise ImportError(
      "Warm-up requests need the protos of TensorFlow Serving: install monolith[serving]"
    ) from e

  logs = []
  for signature_name in args.signature_name:
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name = args.model_name
    request.model_spec.signature_name = signature_name
    samples = list(_gen_batch(args, None, drop_rate))
    name = args.input_name or _INPUT_NAMES[args.variant_type]
    request.inputs[name].CopyFrom(tf.make_tensor_proto(samples, tf.string, [len(samples)]))
    logs.append(log)
  return logs


def gen_warmup_file(
  warmup_file: str | None = None,
  drop_rate: float | None = None,
  args: ParserArgs | None = None,
) -> str:
  """Writes warm-up requests, a TFRecord file of `PredictionLog`.

  Args:
    warmup_file: where to; None: `./warmup_file`.
    drop_rate: see `gen_instance`.
    args: what the samples have; None: what the parser of the default graph reads.

  Returns:
    The path of the file.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
    ValueError: `args` is None and not exactly one parser was called in the default graph.
  """
  warmup_file = warmup_file or _WARMUP_FILE
  logs = gen_prediction_log(args or ParserArgs.from_collections(), drop_rate)
  # A reader never sees half a file.
  temporary = f"{warmup_file}-tmp"
  with tf.io.TFRecordWriter(temporary) as writer:
    for log in logs:
      writer.write(log.SerializeToString())
  tf.io.gfile.rename(temporary, warmup_file, overwrite=True)
  return warmup_file


def gen_random_data_file(
  data_file_name: str,
  args: ParserArgs,
  num_batch: int = 128,
  source: str | None = None,
  sort_id: bool = True,
  kafka_dump: bool = False,
  kafka_dump_prefix: bool = False,
  actions: Sequence[int] | None = None,
) -> None:
  """Writes random samples to a file that `FilePBDataset` reads.

  Args:
    data_file_name: where to.
    args: what the samples have. There are `args.batch_size` Instances or Examples in a batch; an
      ExampleBatch is one.
    num_batch: how many batches.
    source: name of the data source, for the lagrangex header that records without sort id have.
    sort_id: whether records have a sort id.
    kafka_dump: whether they have the field of a Kafka dump.
    kafka_dump_prefix: whether they have the prefix of a Kafka dump.
    actions: of the `LineId` of every sample.

  Raises:
    Exception: no reader has this combination of headers.
  """
  if sort_id or kafka_dump or kafka_dump_prefix:
    header = sort_header(sort_id, kafka_dump, kafka_dump_prefix)
  else:
    header = lg_header(source)
  with tf.io.gfile.GFile(data_file_name, "wb") as stream:
    stream.write(b"")  # Without a write there would be no file.
    for _ in range(num_batch):
      for sample in _gen_batch(args, actions, None):
        stream.write(header + struct.pack("<Q", len(sample)) + sample)


def _sample_signatures() -> list[str]:
  """Signatures of the default graph that take samples: the model's own and its extra outputs."""
  names = dict.fromkeys(["serving_default", *(utils.get_collection("signature_name") or [])])
  if export_context.is_exporting():
    # Those that the export context keeps have inputs of their own.
    for other in export_context.get_current_export_ctx().signatures(
      tf.compat.v1.get_default_graph()
    ):
      names.pop(other.name, None)
  return list(names)


def _same_size(
  names: str, features: Sequence[str] | None, what: str, values: Sequence[Any] | None
) -> None:
  count = len(features or ())
  if values is not None and len(values) != count:
    raise ValueError(f"{names} has {count} names, but there are {len(values)} {what}")


def _gen_fids(slot: int, size: int, slots: int, bits: int) -> list[int]:
  if not 0 <= slot < slots:
    raise ValueError(f"slot should be less than {slots}, while got {slot}")
  return [(slot << bits) | random.getrandbits(bits) for _ in range(size)]


def _kept(metas: Sequence[FeatureMeta], drop_rate: float | None) -> Iterator[FeatureMeta]:
  return (meta for meta in metas if not drop_rate or random.random() >= drop_rate)


def _gen_batch(
  args: ParserArgs, actions: Sequence[int] | None, drop_rate: float | None
) -> Iterator[bytes]:
  """Serialized samples of one batch."""
  if args.variant_type == _EXAMPLE_BATCH:
    yield gen_example_batch(args, actions, drop_rate).SerializeToString()
    return
  gen = gen_instance if args.variant_type == _INSTANCE else gen_example
  for _ in range(args.batch_size):
    yield gen(args, actions, drop_rate).SerializeToString()


def _fill_fids(feature: example_pb2.Feature, meta: FeatureMeta, size: int) -> None:
  if meta.version == 1:
    feature.fid_v1_list.value.extend(gen_fids_v1(meta.slot, size))
  else:
    feature.fid_v2_list.value.extend(gen_fids_v2(meta.slot, size))


def _fill_dense(feature: example_pb2.Feature, meta: FeatureMeta, values: Sequence[Any]) -> None:
  # Only the one that is picked may be touched: the fields are alternatives.
  field = _pick(meta, "float_list", "int64_list", "bytes_list")
  getattr(feature, field).value.extend(values)


def _pick(meta: FeatureMeta, of_float: Any, of_int: Any, of_bytes: Any) -> Any:
  if meta.dtype.is_floating:
    return of_float
  return of_int if meta.dtype.is_integer else of_bytes


def _gen_dense(meta: FeatureMeta) -> list[Any]:
  if meta.name == _LABEL:
    return [float(random.getrandbits(1)) for _ in range(meta.shape)]
  if meta.name == _INSTANCE_WEIGHT:
    return [1.0]
  if meta.dtype.is_floating:
    return [random.random() for _ in range(meta.shape)]
  if meta.dtype.is_integer:
    return [random.getrandbits(31) for _ in range(meta.shape)]
  return [f"{random.getrandbits(32):08x}".encode() for _ in range(meta.shape)]


def _fill_line_id(
  line_id: line_id_pb2.LineId, args: ParserArgs, actions: Sequence[int] | None
) -> None:
  for meta in args.extra_metas:
    field = line_id_pb2.LineId.DESCRIPTOR.fields_by_name[meta.name]
    if field.label == FieldDescriptor.LABEL_REPEATED:
      getattr(line_id, meta.name).extend(_gen_field(field) for _ in range(meta.shape))
    else:
      setattr(line_id, meta.name, _gen_field(field))
  if actions is not None:
    del line_id.actions[:]
    line_id.actions.extend(actions)


def _gen_field(field: FieldDescriptor) -> Any:
  if field.name == "req_time":
    return int(time.time())
  kind = field.cpp_type
  if kind == FieldDescriptor.CPPTYPE_STRING:
    return f"{random.getrandbits(32):08x}"
  if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
    return random.random()
  if kind == FieldDescriptor.CPPTYPE_BOOL:
    return bool(random.getrandbits(1))
  if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
    return random.getrandbits(63)
  return random.getrandbits(10)
