"""Calls of ops, made from their definitions and a seed.

A call that is wrong in every argument fails at the first check. So most calls are made from one
that the op accepts: looked for among harmless ones, whose numbers come from a few sizes that all
arguments share and whose arguments are what their names ask for (a table where a table is wanted,
samples where samples are), and then changed in one to three places. The others are random.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from monolith.native_training.runtime.ops import gen_monolith_ops_base as library
from tests.op_fuzzing import messages

# How the call is made: at once; in a graph with constants, which shape functions can read; in a
# graph with placeholders of unknown shape, which shape functions have to let pass.
MODES = ("eager", "constants", "placeholders")

INTS = [-1, 0, 1, 2, 3, 7, 64, 255, 1 << 15, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32]
INTS += [1 << 33, 1 << 40, (1 << 61) + 1, 1 << 62, (1 << 63) - 1]
INTS += [-2, -(1 << 31), -(1 << 62), -(1 << 63)]
SHAPES = [(1 << 40, 0), (0, 1 << 40), (0, 1 << 62), (0,), (), (1,) * 254, (0,) * 200, (1, 1, 1)]
SHAPES += [(1 << 31, 0), (0, 1 << 31, 1 << 30), (255, 0), (1 << 62, 0), (3, 0), (0, 3)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e38, -1e38, float("inf"), float("-inf"), float("nan")]
DTYPES = [tf.float32, tf.int64, tf.int32, tf.string, tf.float16, tf.float64, tf.bool, tf.uint8]
DTYPES += [tf.uint64, tf.int16, tf.complex64, tf.qint8, tf.variant, tf.resource, tf.bfloat16]

# Values of a string attribute, by its name.
WORDS = {
  "variant_type": ["instance", "example", "example_batch", "examplebatch"],
  "input_type": ["instance", "example", "example_batch", "examplebatch"],
  "output_type": ["instance", "example", "example_batch"],
  "input_pb_type": ["instance", "example", "examplebatch", "plaintext"],
  "output_pb_type": ["instance", "example", "plaintext"],
  "compression_type": ["", "GZIP", "ZLIB"],
  "format": ["lines", "tfrecord"],
  "int_type": ["dot", "multiply"],
  "op": ["gt", "ge", "eq", "lt", "le", "neq", "between", "in", "not-in", "all", "any", "diff"]
  + ["startswith", "endswith", "set", "sub", "add", "all-in", "any-in", "subset"],
  "field_type": ["int64", "float", "double", "bytes"],
  "fid_output_type": ["REGULAR", "CONCAT"],
  "norm_methods": ["log", "scale", "repow", "scalelog"],
  "action_priority": ["", "1,2,3", "1,,2", "9999999999999", "1:2"],
  "per_action_drop_rate": ["", "1:0.5,2:0.1", "1", "1:nan"],
  "strategy_conf": ["", "1:0.5", "1:0.5:1.0,2:1", "::", "1:1e99"],
  "head_to_index": ["a:0,b:1", "a:0", "a:1099511627776", "a:-1", "a", ":", "1:0,2:1"],
  "head_field": ["chnid", "cid", "uid", "actions", "nothing"],
  "address": ["127.0.0.1:0", "localhost:0", "", "x", "1.2.3.4:99999", "[::1]:0", "127.0.0.1:-1"],
  "signature_name": ["serving_default", ""],
  "container": [""],
  "shared_name": [""],
  "target": ["t", ""],
  "suffix": ["_s", ""],
  "field_name": messages.NAMES,
  "channel_feature": messages.NAMES,
  "index_feature": messages.NAMES,
}
NAME_LISTS = ("names", "extra_names", "features", "item_features", "data_flow", "datasources")
FILES = ("filename", "model_path", "operand_filepath", "basename", "file_name")
CONFIGS = ("config", "feature_cfgs", "label_config", "slot_expire_time_config", "config_str")
CONFIGS += ("feature_description",)

# The kind of resource an argument wants, by its name.
HANDLES = {
  "table_handle": "table",
  "table_handles": "table",
  "tables": "table",
  "mtable": "multi_table",
  "filter_handle": "filter",
  "sync_client_handle": "sync_client",
  "ipool": "item_pool",
  "pool": "item_pool",
  "value_buffer": "shared_tensor",
  "deep_insight_client_handle": "deep_insight",
  "machine_info_handle": "machine_info",
  "var": "variable",
  "m": "variable",
  "v": "variable",
  "c": "variable",
}
HANDLES_BY_OP = {
  "MonolithTouchedKeySet": "touched_key_set",
  "MonolithWritableFile": "writable_file",
  "MonolithEntryDump": "writable_file",
  "MonolithDummySyncServer": "sync_server",
  "MonolithHashFilter": "filter",
  "MonolithHashTable": "table",
  "IsHashTable": "table",
  "MonolithParameterSync": "sync_client",
  "MonolithFinalizeSharedTensor": "shared_tensor",
  # The last one that fits counts.
  "MonolithRowLog": "row_log_client",
  "MonolithRowLogSeek": "row_log_follower",
  "MonolithRowLogApply": "row_log_follower",
  "MonolithRowLogFollowerDigests": "row_log_follower",
}
# Mostly single numbers or names.
SCALARS = ("learning_rate", "ada_decay", "mom_decay", "epsilon", "weight_decay", "beta1", "beta2")
SCALARS += ("scale", "clip_norm", "global_norm", "req_time", "update_time", "global_step", "limit")
SCALARS += ("batch_size", "basename", "offset", "shard_idx", "num_shards", "file_name")
SCALARS += ("use_snappy", "has_sort_id", "kafka_dump", "kafka_dump_prefix", "buffer_size")
SCALARS += ("lagrangex_header", "compression_type", "skip_rows")
SCALARS += ("input_pb_type", "output_pb_type", "feature_pruning_type", "fused_embeddings_size")
SCALARS += ("config_str", "table_name", "content", "item_id", "bias")
SCALARS += ("header", "full_scan", "digest", "epoch", "seq", "generation")
ID_VECTORS = ("ids", "id", "key", "id_values", "indices", "pos", "shard_ids", "uids", "req_times")
VARIANTS = ["dataset", "samples", "empty", "ragged", "numbers_dataset", "list"]
# Stands for the folder of a call, which has another name in every process.
FOLDER = "@folder@"
# Outputs are counted by these; TensorFlow itself makes a list of that many before we are asked.
MAX_OUTPUTS = 40


def op_names() -> list[str]:
  """Returns every op that the library registers, sorted."""
  names = [n for n in dir(library) if n[:1].isupper() and op_def_registry.get(n) is not None]
  # Names that the wrapper module has from its imports are ops of TensorFlow.
  return sorted(n for n in names if getattr(library, n).__module__ != "typing" and n != "Any")


def output_counts(op: str) -> set[str]:
  """Returns the attributes that count outputs of the op."""
  return {arg.number_attr for arg in op_def_registry.get(op).output_arg if arg.number_attr}


@dataclasses.dataclass
class Tensor:
  """Values in order, the shape they get (numpy's ranks end at 32) and their type."""

  values: np.ndarray
  shape: tuple[int, ...]
  dtype: tf.DType


@dataclasses.dataclass
class Handle:
  """A resource to be made when the call is made."""

  kind: str
  seed: int
  dim: int
  shape: tuple[int, ...] = ()


def tables_of(handle: Handle) -> int:
  """Returns how many tables the group of a handle has."""
  return 1 + handle.seed % 3


@dataclasses.dataclass
class Samples:
  """A variant: samples, a dataset of them, or what is neither."""

  kind: str
  records: list[bytes]
  sample_type: str
  shape: tuple[int, ...] = ()


@dataclasses.dataclass
class Case:
  """One call."""

  op: str
  seed: int
  mode: str
  arguments: dict[str, Any]

  def describe(self) -> str:
    lines = [f"{self.op} seed {self.seed} ({self.mode})"]
    for name, value in self.arguments.items():
      text = repr(value)
      lines.append(f"  {name} = {text if len(text) < 1500 else text[:1500] + '...'}")
    return "\n".join(lines)


# How many different accepted calls of an op are changed, and how long each is looked for.
_BASES = 4
_TRIES = 60
_accepted: dict[tuple[str, int], Case | None] = {}


def make(op: str, seed: int, accepts: Callable[[Case], bool]) -> Case:
  """Returns the call of `op` that belongs to `seed`.

  Args:
    op: its name.
    seed: a number.
    accepts: makes a call and says whether it came to a good end. Where it always answers the same,
      so does this function.
  """
  rng = random.Random(f"{op}/{seed}/change")
  base = None if rng.random() < 0.25 else _accepted_call(op, rng.randrange(_BASES), accepts)
  if base is None:
    return _Maker(op, f"{op}/{seed}", seed).make()
  return changes.change(rng, base, seed)


def _accepted_call(op: str, base: int, accepts: Callable[[Case], bool]) -> Case | None:
  key = (op, base)
  if base > 0 and _accepted_call(op, 0, accepts) is None:
    return None  # it takes more luck than there is time for
  if key not in _accepted:
    _accepted[key] = None
    for i in range(_TRIES):
      maker = _Maker(op, f"{op}/{base}/{i}", base, harmless=True)
      case = recipes.make(maker) if recipes.exists(op) else maker.make()
      case.mode = "eager"
      if accepts(case):
        _accepted[key] = case
        break
  return _accepted[key]


class _Maker:
  def __init__(self, op: str, text: str, seed: int, harmless: bool = False):
    self.op, self.seed, self.harmless = op, seed, harmless
    self.rng = random.Random(text)
    rng = self.rng
    self.n = rng.choice([1, 2, 3, 4, 8] if harmless else [0, 1, 2, 3, 4, 5, 8, 33])
    self.dim = rng.choice([1, 1, 2, 3, 4, 8])
    self.count = rng.choice([1, 1, 2, 3])
    self.hostility = 0.0 if harmless else rng.choice([0.0, 0.02, 0.1, 0.1, 0.3])
    self.sample_type = rng.choice(["instance", "example", "example_batch"])
    takes_batches = any(word in op for word in ("Parse", "Sharding", "StringTo", "Decode"))
    if (harmless or rng.random() < 0.9) and not takes_batches:
      self.sample_type = rng.choice(["instance", "example"])
    self.definition = op_def_registry.get(op)
    self.attributes: dict[str, Any] = {}

  def make(self) -> Case:
    inputs = self.definition.input_arg
    inferred = {a.number_attr for a in inputs} | {a.type_attr for a in inputs}
    inferred |= {a.type_list_attr for a in inputs}
    arguments: dict[str, Any] = {}
    for attr in self.definition.attr:
      value = self._attribute(attr)
      self.attributes[attr.name] = value
      if attr.name not in inferred:
        arguments[attr.name] = value
    for arg in inputs:
      arguments[arg.name] = self._input(arg)
    return Case(self.op, self.seed, self.rng.choice(MODES), arguments)

  def _hostile(self) -> bool:
    return self.rng.random() < self.hostility

  # Attributes.

  def _attribute(self, attr) -> Any:
    counts_inputs = any(a.number_attr == attr.name for a in self.definition.input_arg)
    counts_outputs = any(a.number_attr == attr.name for a in self.definition.output_arg)
    if counts_inputs or counts_outputs:
      low = max(attr.minimum, 0)
      if self.harmless:
        return max(low, self.count)
      return max(low, self.rng.choice([self.count, self.count, self.count, 0, 1, 2, MAX_OUTPUTS]))
    if attr.type.startswith("list("):
      return self._list(attr)
    return self._scalar(attr, attr.type)

  def _list(self, attr) -> list:
    kind = attr.type[5:-1]
    rng = self.rng
    length = rng.choice([self.count, self.count, self.count, self.count, self.n, 0, 1, 2, 3])
    if self.harmless:
      length = rng.choice([self.count, self.count, self.count, self.count + 1, 0])
    if kind == "type" and any(a.type_list_attr == attr.name for a in self.definition.input_arg):
      length = max(length, 1)
    if attr.name == "dtypes" and "shapes" in self.attributes:
      shapes = self.attributes["shapes"]
      if shapes and isinstance(shapes[0], int) and (self.harmless or rng.random() < 0.9):
        sparse = sum(s == -1 for s in shapes)
        dense = [self._dtype(attr) for _ in shapes[sparse:]]
        return [tf.int64] * sparse + dense + [tf.int64] * sparse
    if attr.name == "shapes" and "names" in self.attributes and rng.random() < 0.95:
      names = self.attributes["names"]
      sparse = rng.randint(0, len(names))
      if self.harmless:
        return [-1] * sparse + [rng.choice([1, 1, 2, 3]) for _ in names[sparse:]]
      return [-1] * sparse + [self._int() or 1 for _ in names[sparse:]]
    if attr.name == "extra_names" and "names" in self.attributes and rng.random() < 0.9:
      return [n for n in self.attributes["names"] if n in messages.FIELDS and rng.random() < 0.8]
    if attr.name == "names":
      return rng.sample(messages.NAMES, min(length, len(messages.NAMES)))
    return [self._scalar(attr, kind) for _ in range(length)]

  def _scalar(self, attr, kind: str) -> Any:
    rng = self.rng
    if kind == "int":
      return self._int(attr)
    if kind == "float":
      return rng.choice(FLOATS) if self._hostile() else rng.choice([0.0, 0.5, 1.0, 2.0])
    if kind == "bool":
      return rng.random() < 0.5
    if kind == "type":
      return self._dtype(attr)
    if kind == "shape":
      return self._shape_attribute()
    if kind == "string":
      return self._string(attr.name)
    raise NotImplementedError(f"{self.op}.{attr.name} is a {kind}: say how to make one")

  def _int(self, attr=None) -> int:
    rng = self.rng
    low = attr.minimum if attr is not None and attr.has_minimum else None
    if self.harmless:
      if attr is not None and attr.name in ("method", "nshards", "random_sleep_ms", "K"):
        return rng.choice([0, 1, -1, self.dim])
      return max(low or 0, rng.choice([self.dim, self.dim, self.n, self.count, 1, 1, 0, 2]))
    if attr is not None and attr.name == "random_sleep_ms":
      return rng.choice([-1, 0, 0, 5, 20001, 1 << 31, (1 << 63) - 1])  # others are meant to sleep
    value = rng.choice([self.n, self.dim, self.dim, self.count, 0, 1, 2, rng.randint(-1, 9)])
    if self._hostile() or rng.random() < 0.03:
      value = rng.choice(INTS)
    return value if low is None or rng.random() < 0.02 else max(low, value)

  def _dtype(self, attr) -> tf.DType:
    allowed = [tf.as_dtype(t) for t in attr.allowed_values.list.type]
    if allowed and (self.harmless or self.rng.random() < 0.99):
      return self.rng.choice(allowed)
    if self.harmless:
      return self.rng.choice(DTYPES[:4])
    return self.rng.choice(DTYPES[:4] * 5 + DTYPES)

  def _shape_attribute(self) -> tf.TensorShape | list:
    rng = self.rng
    if rng.random() < 0.1:
      return tf.TensorShape(None)
    rank = rng.choice([0, 1, 1, 2, 2, 3, 254])
    sizes = [None, self.n, self.dim, 0, 1]
    if self._hostile():
      sizes += [1 << 31, 1 << 40, 1 << 62]
    return tf.TensorShape([rng.choice(sizes) for _ in range(rank)])

  def _string(self, name: str) -> Any:
    rng = self.rng
    if name in FILES:
      return self._file()
    if name in CONFIGS:
      return messages.config(rng, self.op, name, self.n, self.dim)
    if name == "variant_type" or name == "input_type":
      if self.harmless or rng.random() < 0.9:
        batch = rng.choice(["example_batch", "examplebatch"])
        return batch if self.sample_type == "example_batch" else self.sample_type
    if name in WORDS and self.harmless:
      return rng.choice(WORDS[name][:2] if name != "op" else WORDS[name])
    if name in WORDS and not self._hostile():
      return rng.choice(WORDS[name])
    if name in NAME_LISTS or name.endswith("_features") or name.endswith("names"):
      return rng.choice(messages.NAMES)
    return rng.choice(messages.NAMES + ["", "\0", "é", "a" * 5000, "%s%n", "-1", "1:2,3:4"])

  def _file(self) -> str:
    rng = self.rng
    names = ["a", "a", "b", "records", "records", "missing/x", "", "a" * 300, ".", "folder"]
    if self.harmless:
      return os.path.join(FOLDER, rng.choice(["a", "records", "b"]))
    if rng.random() < 0.02:
      return rng.choice(["", "\0", "nothing://x", "/proc/self/nothing/x", "relative\n"])
    return os.path.join(FOLDER, rng.choice(names))

  # Inputs.

  def _input(self, arg) -> Any:
    if arg.type_list_attr:
      dtypes = self.attributes[arg.type_list_attr]
      return [self._tensor(arg.name, tf.as_dtype(t)) for t in dtypes]
    dtype = tf.as_dtype(self.attributes[arg.type_attr] if arg.type_attr else arg.type)
    if arg.number_attr:
      return [self._tensor(arg.name, dtype) for _ in range(self.attributes[arg.number_attr])]
    return self._tensor(arg.name, dtype)

  def _tensor(self, name: str, dtype: tf.DType) -> Any:
    rng = self.rng
    if not self.harmless and rng.random() < 0.01:
      dtype = rng.choice(DTYPES)
    if dtype == tf.resource:
      return self._handle(name)
    if dtype == tf.variant:
      return self._samples(name)
    shape = self._shape(name)
    size = int(np.prod([int(d) for d in shape], dtype=object)) if shape else 1
    if dtype == tf.string:
      return Tensor(self._strings(name, size), shape, dtype)
    if dtype == tf.bool:
      return Tensor(np.array([rng.random() < 0.5 for _ in range(size)], bool), shape, dtype)
    if dtype.is_integer or dtype.is_quantized:
      return Tensor(self._integers(name, dtype, size), shape, dtype)
    values = [rng.choice(FLOATS) if self._hostile() else rng.uniform(-1, 1) for _ in range(size)]
    if name in ("scale", "clip_norm", "learning_rate"):
      values = [abs(v) for v in values]
    with np.errstate(all="ignore"):
      return Tensor(np.array(values).astype(dtype.as_numpy_dtype), shape, dtype)

  def _shape(self, name: str) -> tuple[int, ...]:
    rng = self.rng
    n, dim, count = self.n, self.dim, self.count
    if self.harmless:
      return self._harmless_shape(name)
    if rng.random() < 0.03 or self._hostile():
      return rng.choice([*SHAPES, (n, 0), (0, n), (n, 1, dim), (4096,), (255,), (n, dim, 0)])
    if name in SCALARS and rng.random() < 0.85:
      return ()
    rank = rng.choice([0] * 3 + [1] * 9 + [2] * 7 + [3])
    if "split" in name or "offset" in name or name in ("ids", "id", "key", "id_values", "indices"):
      rank = 1 if rng.random() < 0.9 else rank
    if rank == 0:
      return ()
    first = rng.choice([n] * 6 + [n + 1] * 2 + [count, 1, 0, n * dim, count * n, count + 1])
    rest = [rng.choice([dim] * 4 + [n, 1, 0]) for _ in range(rank - 1)]
    return (first, *rest)

  def _harmless_shape(self, name: str) -> tuple[int, ...]:
    rng = self.rng
    n, dim, count = self.n, self.dim, self.count
    if name in SCALARS:
      return ()
    if "split" in name:
      return rng.choice([(n + 1,), (n + 1,), (count + 1,), (2,)])
    if name in ("id_dense_shape", "batch_size"):
      return (1,)
    if name == "messages":
      return (n,)
    vectors = [(n,), (n,), (n,), (n * dim,), (count,)]
    matrices = [(n, dim), (n, dim), (n, 1), (count, dim)]
    if name in ID_VECTORS:
      return rng.choice(vectors[:3] + matrices[2:3])
    return rng.choice([*vectors, *matrices, *matrices, ()])

  def _integers(self, name: str, dtype: tf.DType, size: int) -> np.ndarray:
    rng = self.rng
    style = rng.choice(["small"] * 3 + ["zeros", "range", "sorted", "splits", "splits", "even"])
    if self.harmless and "split" not in name:
      style = rng.choice(["zeros", "zeros", "range", "ones", "small"])
    if "split" in name and rng.random() < 0.6:
      style = "splits"
    if style == "zeros":
      values = [0] * size
    elif style == "ones":
      values = [1] * size
    elif style == "range":
      values = list(range(size))
    elif style == "small":
      values = [rng.randint(0, max(1, self.n)) for _ in range(size)]
    elif style == "sorted":
      values = sorted(rng.randint(0, max(1, self.n)) for _ in range(size))
    elif style == "even":
      values = [self.n if size == 1 else (self.n * i) // max(1, size - 1) for i in range(size)]
    else:
      values = [0] + sorted(rng.randint(0, self.n) for _ in range(size - 1)) if size else []
      if size > 1:
        values[-1] = self.n
    if self._hostile() and size:
      for _ in range(rng.choice([1, 1, size])):
        values[rng.randrange(size)] = rng.choice(INTS)
    numpy = np.int8 if dtype.is_quantized else dtype.as_numpy_dtype
    low, high = np.iinfo(numpy).min, np.iinfo(numpy).max
    return np.array([min(max(v, low), high) for v in values], dtype=object).astype(numpy)

  def _strings(self, name: str, size: int) -> np.ndarray:
    rng = self.rng
    values = np.empty(size, dtype=object)
    for i in range(size):
      if name in FILES:
        values[i] = self._file()
      elif name in CONFIGS:
        values[i] = messages.config(rng, self.op, name, self.n, self.dim)
      elif name in ("header", "messages") and "RowLog" in self.op:
        values[i] = messages.row_batch(rng, self.dim, name == "messages", self._hostile())
      elif name in ("pb_input", "serialized", "input", "message", "entry"):
        values[i] = messages.record(rng, self._record_type(), self._hostile())
      else:
        values[i] = self._string(name)
    return values

  def _record_type(self) -> str:
    if not self.harmless and self.rng.random() < 0.03:
      return "anything"
    if "Instance" in self.op:
      return "instance"
    if "ExampleBatch" in self.op:
      return "example_batch"
    if "ParseExamples" in self.op:
      return "example"
    if "TFExample" in self.op:
      return "tf_example"
    if "FromEntry" in self.op:
      return "entry"
    return self.sample_type

  def _handle(self, name: str) -> Handle:
    rng = self.rng
    kind = HANDLES.get(name)
    if kind is None:
      for prefix, candidate in HANDLES_BY_OP.items():
        if self.op.startswith(prefix):
          kind = candidate
    if kind is None or (not self.harmless and rng.random() < 0.06):
      kind = rng.choice(sorted(set(HANDLES.values()) | set(HANDLES_BY_OP.values())))
      kind = rng.choice([kind, kind, "null", "missing"])
    odd = not self.harmless and rng.random() < 0.02
    shape = rng.choice([(1,), (0,), (2, 2)]) if odd else ()
    return Handle(kind, rng.randrange(1 << 30), self.dim, shape)

  def _samples(self, name: str) -> Samples:
    rng = self.rng
    kind = "dataset" if "Dataset" in self.op else "samples"
    if not self.harmless and rng.random() < 0.05:
      kind = rng.choice(VARIANTS)
    known = self.harmless or rng.random() < 0.95
    record_type = self._record_type() if known else "anything"
    count = rng.choice([0, 1, 3, 20]) if kind == "dataset" else 1
    shape: tuple[int, ...] = ()
    if kind == "samples" and ("Parse" in self.op or "Sharding" in self.op or rng.random() < 0.05):
      shape = rng.choice([(1,), (1,), (self.n,), (0,), (), (1, 1)])
      count = int(np.prod(shape))
    records = [messages.record(rng, record_type, self._hostile()) for _ in range(count)]
    sample_type = record_type if record_type in ("instance", "example", "example_batch") else ""
    return Samples(kind, records, sample_type or self.sample_type, shape)


from tests.op_fuzzing import changes, recipes  # noqa: E402: they need what is above
