"""Random protobuf messages: samples and configurations, valid, mutated and made up."""

from __future__ import annotations

import random
import struct
from typing import Any

import tensorflow as tf
from google.protobuf import descriptor, text_format
from google.protobuf.message import Message

from idl.matrix.proto import example_pb2, line_id_pb2, proto_parser_pb2
from monolith import _tensorflow
from monolith.native_training import entry
from monolith.native_training.data import data_op_config_pb2
from monolith.native_training.data.transform import transform_config_pb2
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.parameter_sync import parameter_sync_pb2
from monolith.realtime import row_log_pb2

# Fields of LineId, and features; requests and records draw from the same ones, so that they meet.
FIELDS = ["uid", "req_time", "sample_rate", "actions", "chnid", "item_id", "user_id", "rank"]
NAMES = [*FIELDS, "label", "instance_weight", "__LABEL__", "__LINE_ID__", "f1", "f2", "f3", "f4"]
_INTS = [0, 1, 2, 3, 5, 7, -1, 1 << 20, (1 << 31) - 1, -(1 << 31), 1 << 33]
_INTS += [(1 << 63) - 1, -(1 << 63)]
_FLOATS = [0.0, 1.0, -1.0, 0.5, 1e38, float("inf"), float("nan")]

_F = descriptor.FieldDescriptor
_RANGES = {
  _F.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
  _F.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
  _F.CPPTYPE_UINT32: (0, (1 << 32) - 1),
  _F.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def record(rng: random.Random, kind: str, hostile: bool) -> bytes:
  """Returns a serialized sample of a kind: `instance`, `example`, ...; "anything" is any."""
  if kind == "anything":
    kind = rng.choice(["instance", "example", "example_batch", "bytes", "empty", "tf_example"])
  if kind == "bytes":
    return rng.randbytes(rng.choice([1, 8, 9, 40, 300]))
  if kind == "empty":
    return b""
  data = _sample(rng, kind).SerializeToString()
  if rng.random() < 0.1:
    data = struct.pack("<Q", len(data)) + data
  return mutate(rng, data) if hostile else data


def row_batch(rng: random.Random, dim: int, framed: bool, hostile: bool) -> bytes:
  """Returns a message of the row log; without rows and checksum unless `framed`."""
  batch = row_log_pb2.RowBatch(model="m", num_shards=1, epoch=rng.choice([1, 1, 2]))
  batch.seq = rng.choice([1, 1, 2, 3])
  batch.prev_seq = batch.seq - 1
  batch.saved_step = rng.choice([0, 10])
  batch.sample_positions[rng.choice([0, 1])] = rng.choice(_INTS)
  if framed:
    batch.num_chunks = rng.choice([1, 1, 1, 2])
    batch.chunk = rng.randrange(batch.num_chunks)
    batch.full_scan = rng.random() < 0.2
    for name in rng.sample(["t0", "t1", "t2"], rng.choice([0, 1, 2])):
      n, half = rng.choice([0, 1, 5]), rng.random() < 0.3
      batch.tables.add(
        name=name,
        dim=dim,
        half=half,
        ids=b"".join(struct.pack("<q", rng.choice(_INTS)) for _ in range(n)),
        rows=rng.randbytes(n * dim * (2 if half else 4)),
        deleted_ids=struct.pack("<q", rng.choice(_INTS)) * rng.choice([0, 1]),
      )
    if rng.random() < 0.3:
      batch.digest.seq = batch.seq
      batch.digest.tables["t0"] = 1
  if hostile and rng.random() < 0.5:
    batch = randomize(rng, batch, 4, 0.2)
  data = batch.SerializeToString() if isinstance(batch, Message) else batch
  if hostile:
    data = mutate(rng, data)
  if not framed:
    return data
  crc = _crc32c(data) if rng.random() < 0.97 else rng.randrange(1 << 32)
  return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF) + data


def _crc32c(data: bytes) -> int:
  state = 0xFFFFFFFF
  for byte in data:
    state ^= byte
    for _ in range(8):
      state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
  return state ^ 0xFFFFFFFF


def mutate(rng: random.Random, data: bytes) -> bytes:
  """Returns `data` with some bytes changed, cut, repeated or added."""
  data = bytearray(data)
  for _ in range(rng.choice([1, 1, 2, 5])):
    kind = rng.randrange(5)
    at = rng.randrange(len(data) + 1)
    if kind == 0 and data:
      data[at % len(data)] = rng.randrange(256)
    elif kind == 1:
      del data[at:]
    elif kind == 2:
      data[at:at] = rng.randbytes(rng.choice([1, 4, 9]))
    elif kind == 3:
      data[at:at] = b"\xff" * rng.choice([1, 4, 9, 10]) + b"\x01"
    elif data:
      begin = rng.randrange(len(data))
      data[at:at] = data[begin : begin + 20] * rng.choice([1, 3])
  return bytes(data)


def config(rng: random.Random, op: str, name: str, n: int, dim: int) -> Any:
  """Returns a configuration as the attribute `name` wants it, now and then another, or none."""
  message = _config(rng, op, name, n, dim)
  data = message.SerializePartialToString()
  choice = rng.random()
  if choice < 0.05:
    return mutate(rng, data)
  if choice < 0.07:
    return text_format.MessageToString(message)
  if choice < 0.09:
    return rng.choice([b"", b"\0", b"x" * 1000, rng.randbytes(30)])
  return data


def table_config(rng: random.Random, dim: int) -> embedding_hash_table_pb2.EmbeddingHashTableConfig:
  """Returns a table with `dim` floats per row in one or two segments."""
  proto = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  proto.cuckoo.SetInParent()
  first = dim if rng.random() < 0.7 or dim < 2 else 1
  optimizers = [entry.SgdOptimizer(), entry.AdagradOptimizer(), entry.AdamOptimizer()]
  for size in [first, dim - first] if first < dim else [first]:
    segment = entry.CombineAsSegment(
      size, entry.ZerosInitializer(), rng.choice(optimizers), entry.Fp32Compressor()
    )
    proto.entry_config.segments.append(segment)
  return proto


def multi_table_config(rng: random.Random, dim: int, tables: int):
  """Returns a group of tables of `dim` floats."""
  proto = embedding_hash_table_pb2.MultiEmbeddingHashTableConfig()
  for i in range(tables):
    proto.names.append(f"t{i}")
    proto.configs.append(table_config(rng, dim))
  return proto


def _sample(rng: random.Random, kind: str) -> Message:
  if kind == "instance":
    return randomize(rng, proto_parser_pb2.Instance(), 3)
  if kind == "example":
    return randomize(rng, example_pb2.Example(), 4)
  if kind == "tf_example":
    return randomize(rng, tf.train.Example(), 5)
  if kind == "entry":
    return randomize(rng, embedding_hash_table_pb2.EntryDump(), 3)
  batch = randomize(rng, example_pb2.ExampleBatch(), 4)
  if rng.random() < 0.7:
    batch.batch_size = size = rng.choice([0, 1, 2, 3])
    for features in batch.named_feature_list:
      wanted = 1 if features.type == example_pb2.SHARED else size
      del features.feature[wanted:]
      while len(features.feature) < wanted:
        features.feature.append(randomize(rng, example_pb2.Feature(), 2))
  return batch


def _config(rng: random.Random, op: str, name: str, n: int, dim: int) -> Message:
  if name == "feature_cfgs":
    return _layout(rng, dim)
  if name == "slot_expire_time_config":
    return randomize(rng, embedding_hash_table_pb2.SlotExpireTimeConfig(), 3)
  if name == "feature_description":
    return randomize(rng, data_op_config_pb2.TFRecordFeatureDescription(), 3)
  if "MultiHashTable" in op:
    multi = multi_table_config(rng, dim, rng.choice([0, 1, 2, 3]))
    return randomize(rng, multi, 4, 0.1) if rng.random() < 0.3 else multi
  if op == "MonolithHashTable":
    table = table_config(rng, dim)
    return randomize(rng, table, 4, 0.2) if rng.random() < 0.5 else table
  if "Filter" in op:
    return randomize(rng, embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(), 3)
  if "Sync" in op:
    return randomize(rng, parameter_sync_pb2.ClientConfig(), 3)
  if "Transform" in op:
    return randomize(rng, transform_config_pb2.TransformConfig(), 6)
  return randomize(rng, data_op_config_pb2.LabelConf(), 3)


def _layout(rng: random.Random, dim: int) -> example_pb2.FeatureConfigs:
  proto = example_pb2.FeatureConfigs()
  names = rng.sample(NAMES[-4:], rng.choice([1, 1, 2, 3]))
  for i, name in enumerate(names):
    feature = proto.feature_configs[name]
    feature.table = rng.choice(["t0", "t0", "t1", ""])
    feature.slice_dims.extend([dim] if rng.random() < 0.7 else [1, dim])
    if rng.random() < 0.3:
      feature.max_sequence_length = rng.choice([1, 3, -1, (1 << 31) - 1])
      feature.pooling_type = rng.choice([0, 1, 3])
    out = proto.out_configs[f"o{i}"]
    out.out_type = rng.choice([0, 1, 2, 3])
    piece = out.slice_configs.add()
    piece.feature_name, piece.start, piece.end = name, 0, dim
    out.shape.add().dims.extend([-1, dim])
  if rng.random() < 0.4:
    randomize(rng, proto, 4, 0.1)
  return proto


def randomize(rng: random.Random, message: Message, depth: int, density: float = 0.5) -> Message:
  """Sets about `density` of the fields, and of those of the messages within, to random values."""
  for field in message.DESCRIPTOR.fields:
    if rng.random() > density:
      continue
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
      if depth > 0:
        _randomize_submessage(rng, message, field, depth, density)
    elif _tensorflow.is_repeated(field):
      count = rng.choice([0, 1, 2, 3, 5])
      getattr(message, field.name).extend(_value(rng, field) for _ in range(count))
    else:
      setattr(message, field.name, _value(rng, field))
  return message


def _randomize_submessage(rng, message: Message, field, depth: int, density: float) -> None:
  if field.message_type.GetOptions().map_entry:
    values = field.message_type.fields_by_name["value"]
    keys = field.message_type.fields_by_name["key"]
    for _ in range(rng.choice([1, 2])):
      key = rng.choice(NAMES) if keys.cpp_type == _F.CPPTYPE_STRING else _value(rng, keys)
      if values.cpp_type == _F.CPPTYPE_MESSAGE:
        randomize(rng, getattr(message, field.name)[key], depth - 1, density)
      else:
        getattr(message, field.name)[key] = _value(rng, values)
  elif _tensorflow.is_repeated(field):
    for _ in range(rng.choice([0, 1, 2, 3])):
      randomize(rng, getattr(message, field.name).add(), depth - 1, density)
  else:
    submessage = getattr(message, field.name)
    submessage.SetInParent()
    randomize(rng, submessage, depth - 1, density)


def _value(rng: random.Random, field) -> Any:
  if field.cpp_type in _RANGES:
    low, high = _RANGES[field.cpp_type]
    value = rng.choice(_INTS) if rng.random() < 0.15 else rng.randint(0, 4)
    return min(max(value, low), high)
  if field.cpp_type in (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE):
    return rng.choice(_FLOATS)
  if field.cpp_type == _F.CPPTYPE_BOOL:
    return rng.random() < 0.5
  if field.cpp_type == _F.CPPTYPE_ENUM:
    return rng.choice(field.enum_type.values).number
  if field.type == _F.TYPE_BYTES and rng.random() < 0.3:
    return randomize(rng, line_id_pb2.LineId(), 1).SerializePartialToString()
  text = rng.choice(NAMES)
  return text.encode() if field.type == _F.TYPE_BYTES else text
