"""Makes random samples from descriptions of their features.

`data_gen_utils` publishes these names. Random numbers come from the module `random`.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, Union

import tensorflow as tf
from google.protobuf.descriptor import FieldDescriptor

from idl.matrix.proto import example_pb2, feature_pb2, line_id_pb2, proto_parser_pb2
from monolith import _tensorflow
from monolith.native_training.data import feature_list as feature_list_lib
from monolith.native_training.data import parsers

LABEL = "label"
INSTANCE_WEIGHT = "instance_weight"
_BATCH_LABEL = "__LABEL__"
_BATCH_LINE_ID = "__LINE_ID__"
LINE_ID_FIELDS = line_id_pb2.LineId.DESCRIPTOR.fields_by_name

_V1_SLOTS, _V1_SIGNATURE_BITS = 1 << 10, 54
_V2_SLOTS, _V2_SIGNATURE_BITS = 1 << 15, 48
# The most values for a feature that may have any number of them.
_MAX_VALUES = 4

FeatureList = feature_list_lib.FeatureList


@dataclasses.dataclass
class FeatureMeta:
  """Describes a feature of a sample.

  Attributes:
    name: its name.
    slot: slot of its ids; None for a dense feature or a field of `LineId`.
    shape: number of values; -1 for any. By default 1 without a slot, -1 with one.
    dtype: type of the values. By default that of the field, if it is one of `LineId`; else float32
      without a slot, int64 with one: ids.
    extra: whether it is a field of `LineId`; by default if there is one of that name.

  Raises:
    ValueError: `LineId` has no such field, or `shape` is not a number of values.
  """

  name: str
  slot: int | None = None
  shape: int | None = None
  dtype: tf.DType | None = None
  extra: bool | None = None

  def __post_init__(self) -> None:
    field = LINE_ID_FIELDS.get(self.name)
    if self.extra is None:
      self.extra = field is not None
    if self.extra and field is None:
      raise ValueError(f"{self.name!r} is no field of LineId")
    if self.shape is None:
      self.shape = 1 if self.slot is None else -1
    if self.shape < -1:
      raise ValueError(f"shape of {self.name!r} is {self.shape}, want -1 or a number of values")
    if self.dtype is not None:
      self.dtype = tf.as_dtype(self.dtype)
    elif not self.extra:
      self.dtype = tf.float32 if self.slot is None else tf.int64
    elif field.type == FieldDescriptor.TYPE_BOOL:
      self.dtype = tf.bool
    else:
      self.dtype = parsers.ProtoType.get_tf_type(field.type)


# A feature, given by slot, by name, or by its full description.
Feature = Union[int, str, FeatureMeta]


def gen_fids_v1(slot: int, size: int = 1) -> list[int]:
  """Returns `size` random v1 ids of a slot, as unsigned integers."""
  return _gen_fids(slot, size, _V1_SLOTS, _V1_SIGNATURE_BITS)


def gen_fids_v2(slot: int, size: int = 1) -> list[int]:
  """Returns `size` random v2 ids of a slot, as unsigned integers."""
  return _gen_fids(slot, size, _V2_SLOTS, _V2_SIGNATURE_BITS)


def fill_features(
  feature: feature_pb2.Feature | example_pb2.Feature, meta: FeatureMeta, drop_rate: float = 0
) -> None:
  """Fills a feature with random values: ids of its slot, or numbers or text of its dtype.

  Args:
    feature: a feature of an Instance, or of an Example or ExampleBatch.
    meta: the description of the feature.
    drop_rate: probability that the feature is left as it is.

  Raises:
    ValueError: there is no such slot.
  """
  if _is_dropped(drop_rate):
    return
  if meta.slot is not None and meta.dtype == tf.int64:
    values, kind = gen_fids_v2(meta.slot, _count(meta)), "fid"
  else:
    values = _gen_dense(meta)
    dtype = tf.as_dtype(meta.dtype)
    if dtype.is_floating or meta.name in (LABEL, INSTANCE_WEIGHT):
      kind = "float"
    else:
      kind = "int64" if dtype.is_integer or dtype.is_bool else "bytes"
  if isinstance(feature, example_pb2.Feature):
    # Only one of the fields may be set: they are alternatives.
    field = "fid_v2_list" if kind == "fid" else f"{kind}_list"
    getattr(feature, field).value.extend(values)
  else:
    getattr(feature, "fid" if kind == "fid" else f"{kind}_value").extend(values)


def fill_line_id(
  line_id: line_id_pb2.LineId,
  features: Iterable[FeatureMeta | str] | None = None,
  hash_len: int = _V2_SIGNATURE_BITS,
  actions: Sequence[int] | None = None,
) -> None:
  """Fills fields with random values.

  Args:
    line_id: the message to fill.
    features: the fields. One that has a slot gets an id of it.
    hash_len: bits of an id below its slot: 48 for v2 ids, 54 for v1 ids.
    actions: the actions; they win over other settings.

  Raises:
    ValueError: `LineId` has no such field, no id has so many bits, or there is no such slot.
  """
  gens = {_V1_SIGNATURE_BITS: gen_fids_v1, _V2_SIGNATURE_BITS: gen_fids_v2}
  if hash_len not in gens:
    raise ValueError(f"hash_len is {hash_len}, want one of {sorted(gens)}")
  for meta in map(_to_extra_meta, features or ()):
    field = LINE_ID_FIELDS[meta.name]

    def gen(meta: FeatureMeta = meta, field: FieldDescriptor = field) -> Any:
      if meta.slot is None:
        return _gen_field(field)
      (fid,) = gens[hash_len](meta.slot)
      return _to_field(field, fid)

    if _tensorflow.is_repeated(field):
      del getattr(line_id, meta.name)[:]
      getattr(line_id, meta.name).extend(gen() for _ in range(_count(meta)))
    else:
      setattr(line_id, meta.name, gen())
  if actions is not None:
    del line_id.actions[:]
    line_id.actions.extend(actions)


def gen_instance(
  fidv1_features: Sequence[Feature] | None = None,
  fidv2_features: Sequence[Feature] | None = None,
  dense_features: Sequence[FeatureMeta | str] | None = None,
  extra_features: Sequence[FeatureMeta | str] | None = None,
  feature_list: FeatureList | None = None,
  drop_rate: float = 0,
  actions: Sequence[int] | None = None,
) -> proto_parser_pb2.Instance:
  """Returns a random Instance.

  Args:
    fidv1_features: features with v1 ids.
    fidv2_features: features with v2 ids.
    dense_features: dense features; `label` and `instance_weight` become those of the sample.
    extra_features: fields of `LineId`. Ids in them are v1 if there are `fidv1_features`.
    feature_list: where slots are looked up first.
    drop_rate: probability that the sample lacks a sparse or dense feature. It always has label,
      weight and `LineId`.
    actions: actions in its `LineId`.

  Raises:
    AssertionError: no feature is named, one has no name, or two have the same.
    ValueError: a slot or a field of `LineId` does not exist.
  """
  v1_metas = [_to_sparse_meta(feature, feature_list) for feature in fidv1_features or ()]
  v2_metas = [_to_sparse_meta(feature, feature_list) for feature in fidv2_features or ()]
  dense_metas, extra_metas = _to_metas(dense_features, extra_features)
  _check_names([*v1_metas, *v2_metas, *dense_metas, *extra_metas])
  instance = proto_parser_pb2.Instance()
  for meta in v1_metas:
    if not _is_dropped(drop_rate):
      assert meta.slot is not None
      instance.fid.extend(gen_fids_v1(meta.slot, _count(meta)))
  for meta in (*v2_metas, *dense_metas):
    if meta.name == LABEL:
      instance.label.extend(_gen_dense(meta))
    elif meta.name == INSTANCE_WEIGHT:
      instance.instance_weight = _gen_dense(meta)[0]
    elif not _is_dropped(drop_rate):
      fill_features(instance.feature.add(name=meta.name), meta)
  hash_len = _V1_SIGNATURE_BITS if v1_metas else _V2_SIGNATURE_BITS
  fill_line_id(instance.line_id, extra_metas, hash_len, actions)
  return instance


def gen_example(
  sparse_features: Sequence[Feature],
  dense_features: Sequence[FeatureMeta | str] | None = None,
  extra_features: Sequence[FeatureMeta | str] | None = None,
  feature_list: FeatureList | None = None,
  drop_rate: float = 0,
  actions: Sequence[int] | None = None,
) -> example_pb2.Example:
  """Returns a random Example; other arguments and errors are those of `gen_instance`.

  Args:
    sparse_features: features with v2 ids.
  """
  sparse_metas = [_to_sparse_meta(feature, feature_list) for feature in sparse_features or ()]
  dense_metas, extra_metas = _to_metas(dense_features, extra_features)
  _check_names([*sparse_metas, *dense_metas, *extra_metas])
  example = example_pb2.Example()
  for meta in (*sparse_metas, *dense_metas):
    if meta.name == LABEL:
      example.label.extend(_gen_dense(meta))
    elif meta.name == INSTANCE_WEIGHT:
      example.instance_weight = _gen_dense(meta)[0]
    elif not _is_dropped(drop_rate):
      named = example.named_feature.add(name=meta.name, id=meta.slot or 0)
      fill_features(named.feature, meta)
  fill_line_id(example.line_id, extra_metas, actions=actions)
  return example


def gen_example_batch(
  sparse_features: Sequence[Feature],
  dense_features: Sequence[FeatureMeta | str] | None = None,
  extra_features: Sequence[FeatureMeta | str] | None = None,
  feature_list: FeatureList | None = None,
  batch_size: int = 64,
  drop_rate: float = 0,
  actions: Sequence[int] | None = None,
) -> example_pb2.ExampleBatch:
  """Returns a random ExampleBatch; arguments and rows are like those of `gen_example`.

  A feature that is dropped is missing in all rows.

  Args:
    batch_size: number of rows.
  """
  sparse_metas = [_to_sparse_meta(feature, feature_list) for feature in sparse_features or ()]
  dense_metas, extra_metas = _to_metas(dense_features, extra_features)
  _check_names([*sparse_metas, *dense_metas, *extra_metas])
  batch = example_pb2.ExampleBatch(batch_size=batch_size)
  for meta in (*sparse_metas, *dense_metas):
    if meta.name not in (LABEL, INSTANCE_WEIGHT) and _is_dropped(drop_rate):
      continue
    name = _BATCH_LABEL if meta.name == LABEL else meta.name
    column = batch.named_feature_list.add(name=name, id=meta.slot or 0)
    for _ in range(batch_size):
      fill_features(column.feature.add(), meta)
  column = batch.named_feature_list.add(name=_BATCH_LINE_ID)
  for _ in range(batch_size):
    line_id = line_id_pb2.LineId()
    fill_line_id(line_id, extra_metas, actions=actions)
    column.feature.add().bytes_list.value.append(line_id.SerializeToString())
  return batch


def _gen_fids(slot: int, size: int, slots: int, bits: int) -> list[int]:
  if not 0 <= slot < slots:
    raise ValueError(f"slot should be less than {slots}, while got {slot}")
  return [(slot << bits) | random.getrandbits(bits) for _ in range(size)]


def _to_sparse_meta(feature: Feature, features: FeatureList | None) -> FeatureMeta:
  """Sets the slot of a feature: its own, the one in the list, or the one that parsers use."""
  if isinstance(feature, FeatureMeta):
    if feature.slot is not None:
      return feature
    slot = _to_sparse_meta(feature.name, features).slot
    return FeatureMeta(feature.name, slot, feature.shape, tf.int64, extra=False)
  known = features.get(feature) if features is not None else None
  if known is not None and known.slot is not None:
    name = (known.feature_name or known.name) if isinstance(feature, int) else feature
    return FeatureMeta(name, known.slot, extra=False)
  name, slot = feature_list_lib.get_feature_name_and_slot(feature)
  return FeatureMeta(name, slot, extra=False)


def _to_metas(
  dense_features: Sequence[FeatureMeta | str] | None,
  extra_features: Sequence[FeatureMeta | str] | None,
) -> tuple[list[FeatureMeta], list[FeatureMeta]]:
  dense_metas = [
    feature if isinstance(feature, FeatureMeta) else FeatureMeta(feature)
    for feature in dense_features or ()
  ]
  return dense_metas, [_to_extra_meta(feature) for feature in extra_features or ()]


def _to_extra_meta(feature: FeatureMeta | str) -> FeatureMeta:
  meta = feature if isinstance(feature, FeatureMeta) else FeatureMeta(feature, extra=True)
  if meta.name not in LINE_ID_FIELDS:
    raise ValueError(f"extra_features has {meta.name!r}, which is no field of LineId")
  return meta


def _check_names(metas: Sequence[FeatureMeta]) -> None:
  counts = collections.Counter(meta.name for meta in metas)
  if not counts:
    raise AssertionError("no features are named, want at least one")
  if not all(counts):
    raise AssertionError(f"a feature has no name, the others are {[n for n in counts if n]}")
  duplicates = sorted(name for name, count in counts.items() if count > 1)
  if duplicates:
    raise AssertionError(f"names must be unique, but there are several features {duplicates}")


def _is_dropped(drop_rate: float) -> bool:
  return random.random() < drop_rate


def _count(meta: FeatureMeta) -> int:
  assert meta.shape is not None  # filled in when it was made
  return random.randint(1, _MAX_VALUES) if meta.shape == -1 else meta.shape


def _gen_dense(meta: FeatureMeta) -> list[Any]:
  count = _count(meta)
  if meta.name == LABEL:
    return [float(random.getrandbits(1)) for _ in range(count)]
  if meta.name == INSTANCE_WEIGHT:
    return [1.0]
  dtype = tf.as_dtype(meta.dtype)
  if dtype.is_floating:
    return [random.random() for _ in range(count)]
  if dtype.is_integer:
    return [random.getrandbits(31) for _ in range(count)]
  if dtype.is_bool:
    return [random.getrandbits(1) for _ in range(count)]
  return [f"{random.getrandbits(32):08x}".encode() for _ in range(count)]


def _to_field(field: FieldDescriptor, fid: int) -> Any:
  """Returns an id converted to the type of a field."""
  if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
    return fid
  if field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
    return fid - (1 << 64) if fid >> 63 else fid
  if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
    return str(fid)
  raise ValueError(f"the field {field.name!r} of LineId is too small for an id")


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
