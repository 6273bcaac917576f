"""Throws thousands of random arguments at every op of the layer, loss, file, logging and deep
insight groups. Whatever they are given, they answer with a result or a clean error.

Arguments are mostly of the right kind and then spoilt: a dimension changed, a rank, a dtype, an
attribute, a handle. Each accepted call is also built as a graph of partly unknown shapes, where
shape inference must accept it and agree with the result.
"""

import os
import random
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training.runtime.ops import gen_monolith_ops as ops

pytestmark = pytest.mark.thorough

_CALLS_PER_OP = 2000
_GRAPH_CHECKS_PER_OP = 40
_CLEAN_ERRORS = (
  tf.errors.InvalidArgumentError,
  tf.errors.FailedPreconditionError,
  tf.errors.NotFoundError,
  tf.errors.UnimplementedError,
  ValueError,
  TypeError,
)
_DIMS = (0, 1, 1, 2, 3, 4, 6, 8)
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.string, tf.bool, tf.float16)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e38, -1e38, 1e-40, float("inf"), float("-inf"), float("nan"))
_INTS = (0, 1, 2, 3, -1, -2, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))


class Fuzzer:
  """Random tensors and attributes, and handles of every kind."""

  def __init__(self, op_name: str):
    self.rng = random.Random(op_name)
    folder = os.environ["TEST_TMPDIR"]

    def open_file(name: str) -> tf.Tensor:
      return ops.monolith_writable_file(f"{folder}/{name}", shared_name=f"{op_name}/{name}")

    self.file = open_file("file")
    self.info = ops.monolith_machine_info(mem_limit=0, shared_name=f"{op_name}/info")
    self.client = ops.monolith_create_deep_insight_client(
      filename=f"{folder}/insight", shared_name=f"{op_name}/client"
    )
    self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    self._variable = tf.Variable([1.0])
    destroyed = open_file("destroyed")
    tf.raw_ops.DestroyResourceOp(resource=destroyed, ignore_lookup_error=False)
    closed = open_file("closed")
    ops.monolith_writable_file_close(closed)
    two = tf.stack([self.file, self.file])
    self.wrong_handles = [
      destroyed,
      closed,
      self.file,
      self.info,
      self.client,
      two,
      two[:0],
      two[:1],
      self._table.resource_handle,
      self._variable.handle,
    ]

  def chance(self, probability: float) -> bool:
    return self.rng.random() < probability

  def dim(self) -> int:
    return self.rng.choice(_DIMS)

  def handle(self, right: tf.Tensor) -> tf.Tensor:
    return self.rng.choice(self.wrong_handles) if self.chance(0.15) else right

  def tensor(self, shape: tuple, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns a tensor of this shape and dtype, or of nearly these."""
    shape = list(shape)
    if self.chance(0.08) and shape:
      shape[self.rng.randrange(len(shape))] = self.dim()
    if self.chance(0.04):
      shape = [self.dim() for _ in range(self.rng.randrange(5))]
    if self.chance(0.03):
      dtype = self.rng.choice(_DTYPES)
    count = int(np.prod(shape))
    if dtype.is_floating:
      values = [
        self.rng.choice(_FLOATS) if self.chance(0.1) else self.rng.uniform(-3, 3)
        for _ in range(count)
      ]
    elif dtype == tf.string:
      values = [self.rng.choice([b"", b"text", b'\xff\x00"', b"x" * 300]) for _ in range(count)]
    elif dtype == tf.bool:
      values = [self.chance(0.5) for _ in range(count)]
    else:
      values = [self.rng.choice(_INTS) for _ in range(count)]
      if dtype == tf.int32:
        values = [max(-(2**31), min(2**31 - 1, value)) for value in values]
    if not count:
      return tf.zeros(shape, dtype)
    if dtype == tf.string:
      return tf.reshape(tf.constant(values), shape)
    with np.errstate(over="ignore"):
      return tf.constant(np.array(values, dtype.as_numpy_dtype).reshape(shape))

  def integer(self, right: int) -> int:
    return self.rng.choice(_INTS) if self.chance(0.08) else right

  def name(self) -> str:
    return self.rng.choice(["", "name", "uid", "ctr_head", "dot", 'q"\n', "y" * 300])


def _ffm(f: Fuzzer) -> dict:
  batch, dim = f.dim(), f.rng.choice([1, 2, 3, 4, 8])
  return {
    "left": f.tensor((batch, f.dim() * dim)),
    "right": f.tensor((batch, f.dim() * dim)),
    "dim_size": f.integer(dim),
    "int_type": f.rng.choice(["dot", "multiply", ""]),
  }


def _ffm_grad(f: Fuzzer) -> dict:
  batch, left, right, dim = f.dim(), f.dim(), f.dim(), f.rng.choice([1, 2, 3, 4, 8])
  int_type = f.rng.choice(["dot", "multiply"])
  return {
    "grad": f.tensor((batch, left * right * (1 if int_type == "dot" else dim))),
    "left": f.tensor((batch, left * dim)),
    "right": f.tensor((batch, right * dim)),
    "dim_size": f.integer(dim),
    "int_type": int_type,
  }


def _segments(f: Fuzzer) -> list:
  return [f.dim() for _ in range(f.rng.randrange(5))]


def _feature_insight(f: Fuzzer) -> dict:
  segments = _segments(f)
  return {
    "input": f.tensor((f.dim(), sum(segments))),
    "weight": f.tensor((sum(segments), f.dim())),
    "segment_sizes": [f.integer(size) for size in segments],
  }


def _feature_insight_grad(f: Fuzzer) -> dict:
  batch, segments, columns = f.dim(), _segments(f), f.dim()
  return {
    "grad": f.tensor((batch, len(segments) * columns)),
    "input": f.tensor((batch, sum(segments))),
    "weight": f.tensor((sum(segments), columns)),
    "segment_sizes": [f.integer(size) for size in segments],
    "K": f.integer(columns),
  }


def _fid_counter(f: Fuzzer) -> dict:
  return {
    "counter": f.tensor((f.dim(), 1)),
    "step": f.rng.choice(_FLOATS),
    "counter_threshold": f.rng.choice(_INTS),
  }


def _neg_weight(f: Fuzzer) -> float:
  return f.rng.choice(_FLOATS) if f.chance(0.2) else f.rng.uniform(0.01, 1)


def _auc(f: Fuzzer) -> dict:
  size = f.rng.choice([0, 1, 5, 300])
  return {"label": f.tensor((size,)), "logit": f.tensor((size,)), "neg_weight": _neg_weight(f)}


def _auc_grad(f: Fuzzer) -> dict:
  return {**_auc(f), "grad": f.tensor(())}


def _seq_mask(f: Fuzzer) -> dict:
  dtype = f.rng.choice([tf.int32, tf.int64])
  if f.chance(0.3):
    splits = f.tensor((f.dim(),), dtype)
  else:
    splits = tf.constant(np.cumsum([0] + [f.dim() for _ in range(f.dim())]), dtype)
  # Wide masks of real rows would only test the machine's memory.
  width = -1 if f.chance(0.1) else f.dim()
  return {"splits": splits, "max_seq_length": width}


def _file(f: Fuzzer) -> dict:
  folder = os.environ["TEST_TMPDIR"]
  names = ["", folder, "/", folder + "/file/below", "/dev/null", "unknown://x", folder + "/ok"]
  return {"filename": f.rng.choice(names), "shared_name": str(f.rng.random())}


def _file_append(f: Fuzzer) -> dict:
  return {"handle": f.handle(f.file), "content": f.tensor((), tf.string)}


def _file_close(f: Fuzzer) -> dict:
  path = os.path.join(os.environ["TEST_TMPDIR"], "to_close")
  fresh = ops.monolith_writable_file(path, shared_name=str(f.rng.random()))
  handle = f.rng.choice(f.wrong_handles) if f.chance(0.5) else fresh
  # The file the other ops write to stays open.
  return {"handle": fresh if handle is f.file else handle}


def _entry_dump(f: Fuzzer) -> dict:
  size = f.dim()
  return {
    "handle": f.handle(f.file),
    "item_id": f.tensor((size,), tf.int64),
    "bias": f.tensor((size,)),
    "embedding": f.tensor((size, f.dim())),
  }


def _any_tensors(f: Fuzzer) -> list:
  return [f.tensor((f.dim(),), f.rng.choice(_DTYPES)) for _ in range(f.rng.randrange(4))]


def _timestamp(f: Fuzzer) -> dict:
  return {"tensors_in": _any_tensors(f)}


def _metric(f: Fuzzer) -> dict:
  return {"tensors_in": _any_tensors(f), **_metric_v2(f)}


def _metric_v2(f: Fuzzer) -> dict:
  return {"value": f.tensor(()), "key": f.name(), "tags": f.name()}


def _machine_info(f: Fuzzer) -> dict:
  return {"mem_limit": f.rng.choice(_INTS), "container": f.rng.choice(["", "a", "_", "-"])}


def _health(f: Fuzzer) -> dict:
  return {"machine_info_handle": f.handle(f.info)}


def _create_client(f: Fuzzer) -> dict:
  return {
    "enable_metrics_counter": f.chance(0.5),
    "is_fake": f.chance(0.5),
    **_file(f),
  }


def _write_insight(f: Fuzzer) -> dict:
  size = f.dim()
  return {
    "deep_insight_client_handle": f.handle(f.client),
    "uids": f.tensor((size,), tf.int64),
    "req_times": f.tensor((size,), tf.int64),
    "labels": f.tensor((size,)),
    "preds": f.tensor((size,)),
    "sample_rates": f.tensor((size,)),
    "model_name": f.name(),
    "target": f.name(),
    "sample_ratio": f.rng.choice([0.0, 0.01, 1.0, -1.0, float("nan")]),
    "return_msgs": f.chance(0.5),
    "use_zero_train_time": f.chance(0.5),
  }


def _write_insight_v2(f: Fuzzer) -> dict:
  size, num_targets = f.dim(), f.rng.choice([0, 1, 2, 3])
  keys = [f.name() for _ in range(f.rng.randrange(3))]
  values = [f.tensor((size,), f.rng.choice(_DTYPES)) for _ in keys]
  if f.chance(0.9):
    keys.append("uid")
    values.append(f.tensor((size,), tf.int64))
  if f.chance(0.05):
    keys.append("one_more")
  return {
    "deep_insight_client_handle": f.handle(f.client),
    "req_times": f.tensor((size,), tf.int64),
    "labels": f.tensor((num_targets, size)),
    "preds": f.tensor((num_targets, size)),
    "sample_rates": f.tensor((num_targets, size)),
    "extra_fields_values": values,
    "model_name": f.name(),
    "extra_fields_keys": keys,
    "targets": [f"target_{i}" for i in range(num_targets)],
    "return_msgs": f.chance(0.5),
  }


def _remote_predict(f: Fuzzer) -> dict:
  tensors = [f.tensor((f.dim(),)) for _ in range(f.rng.randrange(1, 4))]
  types = [f.rng.choice(_DTYPES) for _ in range(f.rng.randrange(3))]
  return {
    "input_tensor_aliases": f.tensor((len(tensors),), tf.string),
    "input_tensors": tensors,
    "output_tensor_aliases": f.tensor((len(types),), tf.string),
    "model_name": f.name(),
    "output_types": types,
  }


def _blurred(value: tf.Tensor, rng: random.Random) -> tf.Tensor:
  """Returns a placeholder for the tensor, with some or all of its shape unknown."""
  shape = value.shape.as_list()
  if rng.random() < 0.3:
    shape = None
  else:
    shape = [None if rng.random() < 0.4 else dim for dim in shape]
  return tf.compat.v1.placeholder(value.dtype, shape)


def _tensors_of(result: object) -> list:
  return [t for t in tf.nest.flatten(result) if isinstance(t, tf.Tensor)]


class OpBadInputTest(tf.test.TestCase):
  def _fuzz(self, op_name: str, make_arguments, always_fails: bool = False) -> None:
    fuzzer = Fuzzer(op_name)
    op = getattr(ops, op_name)
    outcomes = Counter()
    graph_checks = 0
    for i in range(_CALLS_PER_OP):
      arguments = make_arguments(fuzzer)
      try:
        result = op(**arguments)
      except _CLEAN_ERRORS as error:
        outcomes["refused"] += 1
        self.assertNotEmpty(str(error), msg=f"call {i}")
        continue
      outcomes["accepted"] += 1
      if graph_checks < _GRAPH_CHECKS_PER_OP:
        graph_checks += 1
        self._check_shape_inference(op, arguments, result, fuzzer.rng)
      for tensor in _tensors_of(result):
        if tensor.dtype == tf.resource:  # or else thousands of open files
          tf.raw_ops.DestroyResourceOp(resource=tensor, ignore_lookup_error=True)

    self.assertGreater(outcomes["refused"], 0, msg=f"{op_name}: {outcomes}")
    if always_fails:
      self.assertEqual(outcomes["accepted"], 0)
    else:
      self.assertGreater(outcomes["accepted"], _CALLS_PER_OP // 20, msg=f"{op_name}: {outcomes}")

  def _check_shape_inference(self, op, arguments: dict, result, rng: random.Random) -> None:
    def blur(value):
      if isinstance(value, tf.Tensor):
        return _blurred(value, rng)
      if isinstance(value, list) and value and isinstance(value[0], tf.Tensor):
        return [_blurred(v, rng) for v in value]
      return value

    with tf.Graph().as_default():
      inferred = op(**{name: blur(value) for name, value in arguments.items()})
      for tensor, value in zip(_tensors_of(inferred), _tensors_of(result)):
        self.assertTrue(
          tensor.shape.is_compatible_with(value.shape), msg=f"{tensor.shape} {value.shape}"
        )

  def test_ffm(self):
    self._fuzz("FFM", _ffm)

  def test_ffm_grad(self):
    self._fuzz("FFMGrad", _ffm_grad)

  def test_feature_insight(self):
    self._fuzz("FeatureInsight", _feature_insight)

  def test_feature_insight_grad(self):
    self._fuzz("FeatureInsightGrad", _feature_insight_grad)

  def test_fid_counter(self):
    self._fuzz("MonolithFidCounter", _fid_counter)

  def test_inbatch_auc_loss(self):
    self._fuzz("InbatchAucLoss", _auc)

  def test_inbatch_auc_loss_grad(self):
    self._fuzz("InbatchAucLossGrad", _auc_grad)

  def test_gen_seq_mask(self):
    self._fuzz("GenSeqMask", _seq_mask)

  def test_writable_file(self):
    self._fuzz("MonolithWritableFile", _file)

  def test_writable_file_append(self):
    self._fuzz("MonolithWritableFileAppend", _file_append)

  def test_writable_file_close(self):
    self._fuzz("MonolithWritableFileClose", _file_close)

  def test_entry_dump_file_append(self):
    self._fuzz("MonolithEntryDumpFileAppend", _entry_dump)

  def test_tensors_timestamp(self):
    self._fuzz("MonolithTensorsTimestamp", _timestamp)

  def test_metric(self):
    self._fuzz("MonolithMetric", _metric)

  def test_metric_v2(self):
    self._fuzz("MonolithMetricV2", _metric_v2)

  def test_machine_info(self):
    self._fuzz("MonolithMachineInfo", _machine_info)

  def test_check_machine_health(self):
    self._fuzz("MonolithCheckMachineHealth", _health)

  def test_create_deep_insight_client(self):
    self._fuzz("MonolithCreateDeepInsightClient", _create_client)

  def test_write_deep_insight(self):
    self._fuzz("MonolithWriteDeepInsight", _write_insight)

  def test_write_deep_insight_v2(self):
    self._fuzz("MonolithWriteDeepInsightV2", _write_insight_v2)

  def test_remote_predict_without_a_transport(self):
    self._fuzz("TfServingRemotePredict", _remote_predict, always_fails=True)


if __name__ == "__main__":
  tf.test.main()
