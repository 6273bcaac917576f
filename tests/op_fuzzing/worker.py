"""The process that makes random calls of ops, one per line "OP SEED" on its standard input.

It answers each with one line: "ok", or "memory BYTES" for a call that took far more memory than
what came out of it. Errors that TensorFlow raises are what a bad call should end with. With two
arguments, OP and SEED, it prints and makes that one call.

`MONOLITH_FUZZ_GIB` limits the address space, in GiB beyond what the process has at its start; 0 is
no limit (AddressSanitizer needs that).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Every further arena of the allocator reserves address space, of which there is little.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# Flows without a reader are looked for often.
os.environ.setdefault("MONOLITH_FLOW_PATIENCE_SECONDS", "1")

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from monolith.native_training import distributed_serving_ops  # noqa: F401: hosts calls of ops
from monolith.native_training.runtime.ops import gen_monolith_ops_base as library
from tests.op_fuzzing import cases, messages

_GIB = 1 << 30
# A call may hold this much more than its outputs: twice a gigabyte would be a bomb.
_MAX_EXTRA_BYTES = _GIB
_MAX_ELEMENTS = 30  # of a dataset
_PARSING = dict(
  has_header=False,
  has_sort_id=False,
  lagrangex_header=False,
  kafka_dump_prefix=False,
  kafka_dump=False,
  chnids=[],
  datasources=[],
  default_datasource="",
)


def main(arguments: list[str]) -> None:
  """Runs one call or those on standard input."""
  # Random names of files are relative ones, mostly.
  os.chdir(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
  _limit_address_space()
  if arguments:
    case = cases.make(arguments[0], int(arguments[1]), _accepts)
    print(case.describe(), flush=True)
    print(_run(case, print), flush=True)
    return
  # Output of a kernel must not come between the answers, nor may one read the questions.
  answers = os.fdopen(os.dup(1), "w")
  questions = os.fdopen(os.dup(0))
  os.dup2(2, 1)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  answers.write("ready\n")
  answers.flush()
  for line in questions:
    op, seed = line.split()
    if op.startswith("!"):
      answers.write(_misbehave(op) + "\n")
      answers.flush()
      continue
    answers.write(_run(cases.make(op, int(seed), _accepts), lambda _: None) + "\n")
    answers.flush()


def _misbehave(how: str) -> str:
  """Does what a bad op could do, for the test of the driver that watches."""
  if how == "!abort":
    os.abort()
  if how == "!segv":
    os.kill(os.getpid(), signal.SIGSEGV)
  if how == "!hang":
    threading.Event().wait()
  return f"memory {1 << 40}" if how == "!memory" else "ok"


def _limit_address_space() -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  limit = float(os.environ.get("MONOLITH_FUZZ_GIB", "4"))
  # Starts the threads of the runtime, which need address space of their own.
  tf.add(tf.zeros([1 << 20]), 1.0)
  if limit > 0:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + int(limit * _GIB)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@contextlib.contextmanager
def _folder() -> Iterator[str]:
  """A folder with some files in it, so that names of `cases` find something."""
  folder = tempfile.mkdtemp(prefix="fuzz")
  try:
    os.mkdir(os.path.join(folder, "folder"))
    rng = random.Random(0)
    with open(os.path.join(folder, "records"), "wb") as file:
      for kind in ("example", "instance", "example_batch"):
        record = messages.record(rng, kind, False)
        file.write(len(record).to_bytes(8, "little") + record)
    yield folder
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def _accepts(case: cases.Case) -> bool:
  accepted = []
  _run(case, lambda text: accepted.append(text.startswith("returned")))
  return accepted == [True]


def _run(case: cases.Case, report: Any) -> str:
  _reset_peak()
  before = _resident("VmRSS")
  produced = 0
  try:
    with _folder() as folder:
      produced = _call(case, folder)
    report(f"returned {produced} bytes")
  except (tf.errors.OpError, ValueError, TypeError, OverflowError, MemoryError) as error:
    report(f"{type(error).__name__}: {str(error)[:300]} ... {str(error)[-600:]}")
  except (NotImplementedError, AttributeError, tf.errors.UnimplementedError) as error:
    report(f"{type(error).__name__}: {str(error)[:500]}")
  except UnicodeError as error:
    report(f"{type(error).__name__}: {error}")
  grown = _resident("VmHWM") - before
  return f"memory {grown}" if grown > _MAX_EXTRA_BYTES + 4 * produced else "ok"


def _reset_peak() -> None:
  with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _resident(key: str) -> int:
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(key + ":"):
      return int(line.split()[1]) * 1024
  return 0


def _call(case: cases.Case, folder: str) -> int:
  """Makes the call and returns the bytes it produced."""
  if case.mode == "eager" or (case.op.endswith("Dataset") and case.seed % 4):
    return _call_eagerly(case, folder)
  with tf.Graph().as_default():
    feeds: dict[Any, Any] = {}
    build = _Builder(folder, feeds if case.mode == "placeholders" else None)
    outputs = getattr(library, case.op)(**build.arguments(case))
    fetches = [t for t in tf.nest.flatten(outputs) if isinstance(t, (tf.Tensor, tf.Operation))]
    fetches = [
      t.op if t.dtype in (tf.variant, tf.resource) else t
      for t in fetches
      if isinstance(t, tf.Tensor)
    ] + [t for t in fetches if isinstance(t, tf.Operation)]
    with tf.compat.v1.Session() as session:
      session.run(build.initializers)
      return _bytes(session.run(fetches, feeds))


def _call_eagerly(case: cases.Case, folder: str) -> int:
  build = _Builder(folder, None)
  # Kernels of eager calls live on, and so do resources that carry their names.
  tf.compat.v1.reset_default_graph()
  try:
    outputs = getattr(library, case.op)(**build.arguments(case))
    flat = [t for t in tf.nest.flatten(outputs) if isinstance(t, tf.Tensor)]
    if case.op.endswith("Dataset"):
      return sum(_iterate(t) for t in flat)
    build.handles += [t for t in flat if t.dtype == tf.resource]
    return _bytes([t.numpy() for t in flat if t.dtype not in (tf.variant, tf.resource)])
  finally:
    for handle in build.handles:
      with contextlib.suppress(Exception):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
    context.context().clear_kernel_cache()


def _iterate(variant: tf.Tensor) -> int:
  for dtype in (tf.variant, tf.string):
    try:
      dataset = tf.data.experimental.from_variant(variant, tf.TensorSpec([], dtype))
      for _ in dataset.take(_MAX_ELEMENTS):
        pass
      return 0
    except tf.errors.InvalidArgumentError as error:
      if "type" not in str(error):
        raise
  return 0


def _bytes(values: Any) -> int:
  total = 0
  for value in tf.nest.flatten(values):
    if isinstance(value, np.ndarray):
      total += value.nbytes
      if value.dtype == object:
        total += sum(len(v) for v in value.flat if isinstance(v, bytes))
  return total


class _Builder:
  """Makes the tensors of a call, in the graph or eagerly as it finds it."""

  def __init__(self, folder: str, feeds: dict[Any, Any] | None):
    self._folder = folder
    self._feeds = feeds
    self.handles: list[tf.Tensor] = []
    self.initializers: list[Any] = []

  def arguments(self, case: cases.Case) -> dict[str, Any]:
    return {name: self._value(value) for name, value in case.arguments.items()}

  def _value(self, value: Any) -> Any:
    if isinstance(value, list):
      return [self._value(v) for v in value]
    if isinstance(value, cases.Tensor):
      return self._tensor(value)
    if isinstance(value, cases.Handle):
      handle = self._handle(value)
      return handle if value.shape == () else tf.fill(value.shape, handle)
    if isinstance(value, cases.Samples):
      return self._samples(value)
    return value.replace(cases.FOLDER, self._folder) if isinstance(value, str) else value

  def _tensor(self, tensor: cases.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
      values = np.array([self._value(v) for v in tensor.values] or [b""], object)
      tensor = cases.Tensor(values[: tensor.values.size], tensor.shape, tensor.dtype)
    if tensor.values.size == 0:
      return tf.reshape(tf.zeros([0], tensor.dtype), tensor.shape)
    if self._feeds is None:
      return tf.reshape(tf.constant(tensor.values, tensor.dtype), tensor.shape)
    values = tf.compat.v1.placeholder(tensor.dtype)
    shape = tf.compat.v1.placeholder(tf.int64)
    self._feeds[values] = tensor.values
    self._feeds[shape] = np.array(tensor.shape, np.int64)
    return tf.reshape(values, shape)

  def _handle(self, handle: cases.Handle) -> tf.Tensor:
    made = _make_handle(handle, self)
    self.handles.append(made)
    return made

  def _samples(self, samples: cases.Samples) -> tf.Tensor:
    if samples.kind == "empty":
      return _no_variants()
    if samples.kind == "ragged":
      return tf.raw_ops.RaggedTensorToVariant(
        rt_nested_splits=[tf.constant([0, 1], tf.int64)], rt_dense_values=[1.0], batched_input=False
      )
    if samples.kind == "list":
      return tf.raw_ops.EmptyTensorList(
        element_shape=[1], max_num_elements=1, element_dtype=tf.float32
      )
    if samples.kind == "numbers_dataset":
      return tf.data.Dataset.range(3)._variant_tensor
    if samples.kind == "dataset":
      if not samples.records:
        return (
          tf.data.Dataset.from_tensor_slices([b"x"])
          .take(0)
          .map(lambda r: _variant(r, "example"))
          ._variant_tensor
        )
      return (
        tf.data.Dataset.from_tensor_slices(samples.records)
        .map(lambda r: _variant(r, samples.sample_type))
        ._variant_tensor
      )
    variants = [_variant(r, samples.sample_type) for r in samples.records]
    if not variants:
      return _no_variants()
    return variants[0] if samples.shape == () else tf.reshape(tf.stack(variants), samples.shape)


def _variant(record: Any, sample_type: str) -> tf.Tensor:
  return library.StringToVariant(input=record, variant_type=sample_type, **_PARSING)


def _no_variants() -> tf.Tensor:
  return tf.stack([_variant(b"", "example")])[:0]


def _make_handle(handle: cases.Handle, build: _Builder) -> tf.Tensor:
  rng = random.Random(handle.seed)
  name = f"{handle.kind}_{handle.seed}"
  kind = handle.kind
  dim = handle.dim
  if kind == "filter":
    return library.MonolithHashFilter(
      capacity=64, split_num=3, config=b"", container="", shared_name=name
    )
  if kind == "sync_client":
    return library.MonolithDummySyncClient(config="", container="", shared_name=name)
  if kind == "row_log_client":
    return library.MonolithRowLogClient(capacity=16, container="", shared_name=name)
  if kind == "row_log_follower":
    return library.MonolithRowLogFollower(container="", shared_name=name)
  if kind in ("table", "multi_table"):
    filters = library.MonolithDummyHashFilter(container="", shared_name=f"f{name}")
    client = library.MonolithDummySyncClient(config="", container="", shared_name=f"c{name}")
    build.handles += [filters, client]
    if kind == "table":
      return library.MonolithHashTable(
        filter_handle=filters,
        sync_client_handle=client,
        container="",
        shared_name=name,
        config=messages.table_config(rng, dim).SerializeToString(),
      )
    return library.CreateMonolithMultiHashTable(
      config=messages.multi_table_config(rng, dim, cases.tables_of(handle)).SerializeToString(),
      filter_handle=filters,
      sync_client_handle=client,
      container="",
      shared_name=name,
    )
  if kind == "item_pool":
    return library.ItemPoolCreate(
      start_num=1, max_item_num_per_channel=rng.choice([1, 5]), container="", shared_name=name
    )
  if kind == "shared_tensor":
    return library.MonolithUniqueKeyWithValueAndOffset(
      key=tf.constant([1, 2, 1], tf.int64),
      key_split=tf.constant([0, 1, 3], tf.int64),
      dims=[1, dim],
      generate_buffer=True,
    ).value_buffer
  if kind == "deep_insight":
    return library.MonolithCreateDeepInsightClient(
      enable_metrics_counter=False, is_fake=True, filename="", container="", shared_name=name
    )
  if kind == "machine_info":
    return library.MonolithMachineInfo(mem_limit=1 << 30, container="", shared_name=name)
  if kind == "touched_key_set":
    return library.MonolithTouchedKeySet(
      capacity=100, concurrency_level=2, container="", shared_name=name
    )
  if kind == "writable_file":
    path = os.path.join(tempfile.gettempdir(), f"fuzz_{os.getpid()}_file")
    return library.MonolithWritableFile(filename=path, container="", shared_name=name)
  if kind == "sync_server":
    return library.MonolithDummySyncServer(address="127.0.0.1:0", container="", shared_name=name)
  if kind == "variable":
    dtype = rng.choice([tf.float32] * 8 + [tf.float64, tf.int64])
    shape = rng.choice([[2, 3], [3], [], [0], [4, 2]]) if rng.random() < 0.3 else [handle.dim]
    var = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
    if rng.random() < 0.95:
      assign = tf.raw_ops.AssignVariableOp(resource=var, value=tf.ones(shape, dtype))
      if assign is not None:
        build.initializers.append(assign)
    return var
  if kind == "missing":
    made = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"gone{name}")
    return made
  # A handle of nothing.
  return library.MonolithUniqueKeyWithValueAndOffset(
    key=tf.constant([1], tf.int64),
    key_split=tf.constant([0, 1], tf.int64),
    dims=[1],
    generate_buffer=False,
  ).value_buffer


if __name__ == "__main__":
  main(sys.argv[1:])
