"""Training that looks rows up ahead of a step, row by row against NumPy, in both memories.

Gradients depend on the batch alone, so that rows after each step are known, whatever a lookup has
seen; and each row that a step computes with has to be what it was after one of the steps that it
may have missed.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  cpu_training,
  device_utils,
  entry,
  feature,
  graph_estimator,
  native_task,
)

tf.compat.v1.disable_eager_execution()

_HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
_RATE, _INITIAL = 0.5, 0.25
_DIMS = {"once": 4, "often": 64}  # by feature: one id of each example, or up to three
_NUM_IDS, _BATCH, _STEPS, _LAST = 40, 32, 30, 7
_SEEN = "seen_rows"


def _make_batches() -> list[dict[str, Any]]:
  """Returns ids, row splits and factors of each step; those of the last steps are 0."""
  rng = np.random.default_rng(3)
  batches = []
  for step in range(_STEPS):
    is_last = step >= _STEPS - _LAST
    batch: dict[str, Any] = {}
    # Equal ids come in one batch, and again in the next ones.
    batch["once"] = np.arange(_BATCH) % _NUM_IDS if is_last else rng.zipf(1.3, _BATCH) % _NUM_IDS
    lengths = rng.integers(0, 4, _BATCH)
    batch["often"] = rng.integers(0, _NUM_IDS, lengths.sum())
    batch["splits"] = np.concatenate([[0], np.cumsum(lengths)])
    for name, dim in _DIMS.items():
      factors = rng.uniform(0.5, 1.5, [_BATCH, dim])
      batch[f"{name}_factors"] = (factors * (not is_last)).astype(np.float32)
    batches.append(batch)
  return batches


def _row_histories(batches: list[dict[str, Any]]) -> dict[str, np.ndarray]:
  """Returns NumPy's rows `[steps + 1, ids, dim]` of each feature, before and after each step."""
  histories = {}
  for name, dim in _DIMS.items():
    rows = np.zeros([_NUM_IDS, dim])
    squares = np.full([_NUM_IDS, dim], _INITIAL)
    history = [rows.copy()]
    for batch in batches:
      gradients = np.zeros_like(rows)
      factors = batch[f"{name}_factors"]
      if name == "often":
        factors = np.repeat(factors, np.diff(batch["splits"]), axis=0)
      np.add.at(gradients, batch[name], factors)
      if name == "once":
        squares += gradients**2
        rows -= _RATE * gradients / np.sqrt(squares)
      else:
        rows -= _RATE * gradients
      history.append(rows.copy())
    histories[name] = np.stack(history)
  return histories


def _sums(rows: np.ndarray, batch: dict[str, Any]) -> np.ndarray:
  """Returns the sum of the rows of each example's ids of `often`."""
  examples = np.repeat(np.arange(_BATCH), np.diff(batch["splits"]))
  sums = np.zeros([_BATCH, rows.shape[1]])
  np.add.at(sums, examples, rows[batch["often"]])
  return sums


class _LinearTask(native_task.NativeTask):
  """Sums rows times factors: Adagrad on what has one id for an example, SGD on the other."""

  def create_input_fn(self, mode: str) -> Any:
    def generate() -> Any:
      yield from _make_batches()

    def to_features(batch: dict[str, Any]) -> dict[str, Any]:
      # As of equal row splits, which go to a GPU once.
      ones = tf.range(_BATCH + 1, dtype=tf.int64)
      ragged = tf.RaggedTensor.from_row_splits
      factors = {f"{name}_factors": batch[f"{name}_factors"] for name in _DIMS}
      return {
        "once": ragged(batch["once"], ones),
        "often": ragged(batch["often"], tf.ensure_shape(batch["splits"], [_BATCH + 1])),
        **factors,
      }

    signature: dict[str, Any] = {
      "once": tf.TensorSpec([_BATCH], tf.int64),
      "often": tf.TensorSpec([None], tf.int64),
      "splits": tf.TensorSpec([_BATCH + 1], tf.int64),
    }
    for name, dim in _DIMS.items():
      signature[f"{name}_factors"] = tf.TensorSpec([_BATCH, dim], tf.float32)
    return lambda: tf.data.Dataset.from_generator(generate, output_signature=signature).map(
      to_features
    )

  def create_model_fn(self) -> Any:
    return self._model_fn

  def _model_fn(self, features: Any, mode: str, config: Any) -> Any:
    loss, columns, seen = 0.0, [], []
    for name, dim in _DIMS.items():
      slot = self.ctx.create_feature_slot(
        feature.FeatureSlotConfig(
          name=name,
          default_vec_initializer=entry.ZerosInitializer(),
          default_vec_compressor=entry.Fp32Compressor(),
          default_vec_optimizer=entry.AdagradOptimizer(_RATE, _INITIAL)
          if name == "once"
          else entry.SgdOptimizer(_RATE),
        )
      )
      columns.append(feature.FeatureColumn(slot, name))
      vectors = columns[-1].embedding_lookup(slot.add_feature_slice(dim))
      with device_utils.maybe_device_if_allowed("/device:GPU:0"):
        loss += tf.reduce_sum(vectors * features[f"{name}_factors"])
        seen.append(tf.identity(vectors))
    embeddings = [column.get_all_embeddings_concat() for column in columns]
    for tensor in seen:
      tf.compat.v1.add_to_collection(_SEEN, tensor)
    gradients = tf.gradients(loss, embeddings)
    step = tf.compat.v1.train.get_or_create_global_step()
    train_op = tf.group(
      self.ctx.apply_embedding_gradients(zip(gradients, embeddings)),
      tf.compat.v1.assign_add(step, 1),
      # Parts of the step, which so have its rows. What a hook alone asks for is looked up for it.
      *seen,
    )
    return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class _SeenRows(tf.compat.v1.train.SessionRunHook):
  """Keeps the pooled rows that each step has seen, by feature."""

  def __init__(self) -> None:
    self.rows: list[list[np.ndarray]] = []
    self.queues: set[str] = set()
    self.table_devices: set[str] = set()

  def begin(self) -> None:
    graph = tf.compat.v1.get_default_graph()
    self._tensors = graph.get_collection(_SEEN)
    operations = graph.get_operations()
    self.queues = {op.name for op in operations if op.type.endswith("FIFOQueueV2")}
    self.table_devices = {
      tf.DeviceSpec.from_string(op.device).device_type or "CPU"
      for op in operations
      if "HashTable" in op.type and "Lookup" in op.type
    }

  def before_run(self, run_context: Any) -> Any:
    return tf.compat.v1.train.SessionRunArgs(self._tensors)

  def after_run(self, run_context: Any, run_values: Any) -> None:
    self.rows.append(run_values.results)


class LookAheadTest(tf.test.TestCase, parameterized.TestCase):
  @parameterized.product(place=("cpu", "gpu"), ahead=(0, 1, 3), postpush=(False, True))
  def test_rows_miss_no_more_steps_than_they_may(self, place, ahead, postpush):
    if place == "gpu" and not _HAS_GPU:
      self.skipTest("TensorFlow finds no GPU here")
    params = _LinearTask.params()
    params.name = "look_ahead"
    params.train.per_replica_batch_size = _BATCH
    params.train.use_gpu_emb_table = place == "gpu"
    params.metrics.enable_tf2_profiler_hook = False
    params.serving.export_when_saving = False
    config = cpu_training.CpuTrainingConfig(
      enable_gpu_training=place == "gpu",
      embedding_prefetch_capacity=ahead,
      enable_embedding_postpush=postpush,
      save_checkpoints_steps=1 << 40,
    )
    seen = _SeenRows()
    with mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="11"):
      cpu_training.local_train_internal(
        params, config, self.create_tempdir().full_path, steps=_STEPS, user_hooks=[seen]
      )

    self.assertLen(seen.rows, _STEPS)
    self.assertEqual(any("prefetch_queue" in name for name in seen.queues), ahead > 0)
    self.assertEqual(seen.table_devices, {place.upper()})
    batches = _make_batches()
    histories = _row_histories(batches)
    # A queue of n batches, one that waits for room in it, and a push during the next step.
    most = (ahead + 1 if ahead else 0) + postpush
    missed = []
    for step, (once, often) in enumerate(seen.rows):
      missed.append(self._steps_missed(once, batches[step]["once"], histories["once"], step, most))
      # Rows of one example may have missed different steps. All of them only become smaller.
      newest, oldest = (
        _sums(histories["often"][max(0, step - late)], batches[step]) for late in (0, most)
      )
      self.assertTrue(np.all((newest - 1e-3 < often) & (often < oldest + 1e-3)), step)
    self.assertLessEqual(max(missed), most)
    # After the last gradients every row is what it has to be.
    once, often = seen.rows[-1]
    wanted = histories["once"][-1][batches[-1]["once"]]
    np.testing.assert_allclose(once, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
      often, _sums(histories["often"][-1], batches[-1]), rtol=2e-5, atol=2e-5
    )

  def _steps_missed(self, rows, ids, history, step, most):
    """Returns how many steps the row of an id has missed, at most; fails where none explains it."""
    left = np.ones(len(ids), bool)
    for missed in range(min(most, step) + 1):
      wanted = history[step - missed][ids]
      left &= ~np.isclose(rows, wanted, rtol=2e-5, atol=2e-5).all(axis=1)
      if not left.any():
        return missed
    which = np.flatnonzero(left)[0]
    self.fail(
      f"step {step}: the row of id {ids[which]} is {rows[which]}, after the steps before it "
      f"{[history[step - missed][ids[which]] for missed in range(min(most, step) + 1)]}"
    )


if __name__ == "__main__":
  tf.test.main()
