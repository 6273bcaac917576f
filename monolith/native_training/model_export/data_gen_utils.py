"""Random samples: files to try a reader or model on, and warm-up requests for TensorFlow Serving.

    gen_example(["user", "item"], [FeatureMeta("label"), FeatureMeta("age", dtype=tf.int64)])

makes one sample. `ParserArgs` says what many of them have, in the words of the functions of
`data.parsers`:

    args = ParserArgs(variant_type="example", sparse_features=["user", "item"],
                      dense_features=["label"], dense_feature_shapes=[1], drop_rate=0)
    gen_random_data_file("/tmp/data", args, num_batch=10)

Numbers come from the module `random`: seed that to get the same samples again.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from monolith import _install
from monolith.native_training import utils
from monolith.native_training.data import feature_list as feature_list_lib
from monolith.native_training.graph import export_context
from monolith.native_training.model_export.random_samples import (
  LINE_ID_FIELDS,
  FeatureMeta,
  fill_features,
  fill_line_id,
  gen_example,
  gen_example_batch,
  gen_fids_v1,
  gen_fids_v2,
  gen_instance,
)

if TYPE_CHECKING:
  from tensorflow_serving.apis import prediction_log_pb2

__all__ = [
  "FeatureMeta",
  "ParserArgs",
  "fill_features",
  "fill_line_id",
  "gen_example",
  "gen_example_batch",
  "gen_fids_v1",
  "gen_fids_v2",
  "gen_instance",
  "gen_prediction_log",
  "gen_random_data_file",
  "gen_warmup_file",
  "lg_header",
  "sort_header",
  "write_warmup_file",
]

_INSTANCE = "instance"
_EXAMPLE = "example"
_EXAMPLE_BATCH = "example_batch"
# The key of the serialized samples in a request, if nothing else is known.
_INPUT_NAMES = {_INSTANCE: "instances", _EXAMPLE: "examples", _EXAMPLE_BATCH: "example_batch"}

# Where training configurations look for it by default.
_WARMUP_FILE = "./warmup_file"
_DEFAULT_SIGNATURE = "serving_default"

FeatureList = feature_list_lib.FeatureList


def has_parser(graph: tf.Graph) -> bool:
  """Tells whether a parser of samples was called in a graph."""
  return bool(graph.get_collection("variant_type"))


@dataclasses.dataclass
class ParserArgs:
  """Describes samples: the arguments of a parser, and what a request needs besides.

  Attributes:
    model_name: the model in a request.
    sparse_features: names of features with ids, as parsers of examples call them.
    dense_features: names of dense features, `label` and `instance_weight` among them.
    dense_feature_shapes: number of values of each, 1 by default.
    dense_feature_types: dtype of each, float32 by default.
    extra_features: names of fields of `LineId`.
    extra_feature_shapes: number of values of each, 1 by default.
    feature_list: where slots are looked up first.
    batch_size: samples in a batch.
    max_records: most requests in a warm-up file; TensorFlow Serving refuses more than 1000.
    signature_name: signatures of the model that take the samples, by default `serving_default`.
    variant_type: `instance`, `example` or `example_batch`; by default `example` if there are
      `sparse_features`, else `instance`.
    warmup_file: where warm-up requests go, by default `./warmup_file`.
    drop_rate: probability that a sample lacks a feature.
    fidv1_features: slots, or names of features, with v1 ids; of instances only.
    fidv2_features: names of features with v2 ids; of instances only.
    input_name: the key of the samples in a request; None: `instances`, `examples` or
      `example_batch`.

  Raises:
    ValueError: what is said cannot be.
  """

  model_name: str = "entry"
  sparse_features: Sequence[int | str] | None = None
  dense_features: Sequence[str] | None = None
  dense_feature_shapes: Sequence[int] | None = None
  dense_feature_types: Sequence[tf.DType] | None = None
  extra_features: Sequence[str] | None = None
  extra_feature_shapes: Sequence[int] | None = None
  feature_list: FeatureList | None = None
  batch_size: int = 64
  max_records: int = 1000
  signature_name: str | Sequence[str] | None = None
  variant_type: str | None = None
  warmup_file: str | None = None
  drop_rate: float = 0.5
  fidv1_features: Sequence[int | str] | None = None
  fidv2_features: Sequence[int | str] | None = None
  input_name: str | None = None

  def __post_init__(self) -> None:
    if self.variant_type is None:
      self.variant_type = _EXAMPLE if self.sparse_features else _INSTANCE
    if self.variant_type == "examplebatch":
      self.variant_type = _EXAMPLE_BATCH
    if self.variant_type not in _INPUT_NAMES:
      raise ValueError(f"variant_type is {self.variant_type!r}, want one of {list(_INPUT_NAMES)}")
    for name in ("fidv1_features", "fidv2_features"):
      if getattr(self, name) and self.variant_type != _INSTANCE:
        raise ValueError(
          f"{name} is {getattr(self, name)}: a sample of type {self.variant_type} has "
          "sparse_features instead"
        )
    for name in ("batch_size", "max_records"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}, want at least 1")
    if not 0 <= self.drop_rate <= 1:
      raise ValueError(f"drop_rate is {self.drop_rate}, want 0 to 1")
    _same_size("dense_features", self.dense_features, "shapes", self.dense_feature_shapes)
    _same_size("dense_features", self.dense_features, "types", self.dense_feature_types)
    _same_size("extra_features", self.extra_features, "shapes", self.extra_feature_shapes)
    for name in self.extra_features or ():
      if name not in LINE_ID_FIELDS:
        raise ValueError(f"extra_features has {name!r}, which is no field of LineId")
    if self.signature_name is None:
      self.signature_name = [_DEFAULT_SIGNATURE]
    elif isinstance(self.signature_name, str):
      self.signature_name = [self.signature_name]
    self.warmup_file = self.warmup_file or _WARMUP_FILE

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
  def dense_metas(self) -> list[FeatureMeta]:
    """Returns the dense features."""
    names = list(self.dense_features or ())
    shapes = self.dense_feature_shapes or [1] * len(names)
    types = self.dense_feature_types or [tf.float32] * len(names)
    return [
      FeatureMeta(name, shape=shape, dtype=dtype, extra=False)
      for name, shape, dtype in zip(names, shapes, types)
    ]

  @property
  def extra_metas(self) -> list[FeatureMeta]:
    """Returns the fields of `LineId`."""
    names = list(self.extra_features or ())
    shapes = self.extra_feature_shapes or [1] * len(names)
    return [FeatureMeta(name, shape=shape, extra=True) for name, shape in zip(names, shapes)]


def lg_header(source: str | None) -> bytes:
  """Returns the 8 bytes of a lagrangex header: the hash of a data source, zeros without one."""
  if not source:
    return bytes(8)
  key = 0
  for byte in source.encode("utf-8"):
    key = (31 * key + byte) & 0xFFFFFFFF
  return struct.pack("<Q", (key << 8) & 0xFFFFFFFF)


def sort_header(sort_id: bool, kafka_dump: bool, kafka_dump_prefix: bool) -> bytes:
  """Returns the header of a record with empty sort id and dump fields: zeros.

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


def gen_prediction_log(args: ParserArgs) -> list[prediction_log_pb2.PredictionLog]:
  """Makes requests with a batch of random samples, one for each signature up to `args.max_records`.

  Args:
    args: what the samples have.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
  """
  try:
    from tensorflow_serving.apis import prediction_log_pb2
  except ImportError as e:
    raise ImportError(
      "Warm-up requests need the protos of TensorFlow Serving: " + _install.install_line("serving")
    ) from e

  logs = []
  assert args.signature_name is not None and args.variant_type is not None  # filled in when made
  for signature_name in args.signature_name[: args.max_records]:
    log = prediction_log_pb2.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name = args.model_name
    request.model_spec.signature_name = signature_name
    samples = list(_gen_batch(args, None))
    name = args.input_name or _INPUT_NAMES[args.variant_type]
    request.inputs[name].CopyFrom(tf.make_tensor_proto(samples, tf.string, [len(samples)]))
    logs.append(log)
  return logs


def write_warmup_file(args: ParserArgs) -> str:
  """Writes warm-up requests to `args.warmup_file`, a TFRecord file of `PredictionLog`.

  Returns:
    The path of the file.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
  """
  assert args.warmup_file is not None  # filled in when made
  logs = gen_prediction_log(args)
  # A reader never sees half a file.
  temporary = f"{args.warmup_file}-tmp"
  with tf.io.TFRecordWriter(temporary) as writer:
    for log in logs:
      writer.write(log.SerializeToString())
  tf.io.gfile.rename(temporary, args.warmup_file, overwrite=True)
  return args.warmup_file


def gen_warmup_file(warmup_file: str | None = None, drop_rate: float | None = None) -> str:
  """Writes warm-up requests with samples such as the parser of the default graph reads.

  Args:
    warmup_file: where to; None: `./warmup_file`.
    drop_rate: probability that a sample lacks a feature, that of `ParserArgs` by default.

  Returns:
    The path of the file.

  Raises:
    ImportError: the protos of TensorFlow Serving are not installed.
    ValueError: not exactly one parser was called in the default graph.
  """
  args = ParserArgs.from_collections()
  if warmup_file is not None:
    args = dataclasses.replace(args, warmup_file=warmup_file)
  if drop_rate is not None:
    args = dataclasses.replace(args, drop_rate=drop_rate)
  return write_warmup_file(args)


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
    actions: actions in the `LineId` of every sample.

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
      for sample in _gen_batch(args, actions):
        stream.write(header + struct.pack("<Q", len(sample)) + sample)


def _gen_batch(args: ParserArgs, actions: Sequence[int] | None) -> Iterator[bytes]:
  """Returns the serialized samples of one batch."""
  shared: dict[str, Any] = {
    "dense_features": args.dense_metas,
    "extra_features": args.extra_metas,
    "feature_list": args.feature_list,
    "drop_rate": args.drop_rate,
    "actions": actions,
  }
  sparse = args.sparse_features or ()
  if args.variant_type == _EXAMPLE_BATCH:
    yield gen_example_batch(sparse, batch_size=args.batch_size, **shared).SerializeToString()
    return
  for _ in range(args.batch_size):
    if args.variant_type == _EXAMPLE:
      sample = gen_example(sparse, **shared)
    else:
      # Ids that an Instance has by name are v2, whatever the arguments call them.
      sample = gen_instance(args.fidv1_features, [*(args.fidv2_features or ()), *sparse], **shared)
    yield sample.SerializeToString()


def _sample_signatures() -> list[str]:
  """Returns signatures of the default graph that take samples: the model's, its extra outputs."""
  names = dict.fromkeys([_DEFAULT_SIGNATURE, *(utils.get_collection("signature_name") or [])])
  exporting = export_context.get_current_export_ctx()
  if exporting is not None:
    # Those that the export context keeps have inputs of their own.
    for other in exporting.signatures(tf.compat.v1.get_default_graph()):
      names.pop(other.name, None)
  return list(names)


def _same_size(
  names: str, features: Sequence[str] | None, what: str, values: Sequence[Any] | None
) -> None:
  count = len(features or ())
  if values is not None and len(values) != count:
    raise ValueError(f"{names} has {count} names, but there are {len(values)} {what}")
