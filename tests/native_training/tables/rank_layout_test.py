"""Fused layouts whose tables are in the process that trains, or in its ranks."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import distributed_ps_factory
from monolith.native_training.data import parsers
from monolith.native_training.driver import tables as driver_tables
from monolith.native_training.graph import export_context
from monolith.native_training.settings.training_config import CpuTrainingConfig
from tests import gpu_placement, in_process_ranks, layout_testing

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_ROWS = layout_testing.ROWS
_STEPS = 4


class _LayoutTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.ctx = self.enter_context(parsers.ParserCtx(enable_fused_layout=True))

  def build(self, num_ps, native, rows=_ROWS, kind="cuckoo", capacity=0, **kwargs):
    return layout_testing.build(self.ctx, num_ps, native, rows, kind, capacity, **kwargs)

  def train(self, built, steps=_STEPS, config=None):
    return layout_testing.train(built, steps, config or gpu_placement.SOFT_PLACEMENT)


class AloneTest(_LayoutTest):
  @parameterized.product(native=(True, False), shared=(True, False))
  def test_trains_as_with_a_server(self, native, shared):
    shared_tables = {"gid": "id", "cid": "id"} if shared and native else None
    results = []
    for enable_gpu_emb in (False, True):
      with tf.Graph().as_default():
        built = self.build(
          0, native, shared_tables=shared_tables, enable_gpu_emb=enable_gpu_emb, use_gpu=False
        )
        results.append(self.train(built))

    for want, got in zip(*results):
      for name in layout_testing.LAYOUTS:
        self.assertAllClose(got[name], want[name], rtol=1e-6, atol=1e-6)
    self.assertGreater(np.abs(results[1][-1]["vec"]).max(), 0.1)

  @parameterized.product(
    capacity=(0, 2),
    enable_pipelined_fwda2a=(0, 1),
    enable_async_optimize=(0, 1),
    enable_pipelined_bwda2a=(0, 1),
  )
  def test_every_queue_uses_and_updates_every_batch_once(self, capacity, **queue_configs):
    """Batch i has ids of its own, whose rows are zeros before it and fall once."""
    with tf.Graph().as_default():
      built = self.build(
        0, True, capacity=capacity, enable_gpu_emb=True, queue_configs=queue_configs, batches=6
      )
      seen = self.train(built, steps=None)
      self.assertLen(seen, 6)
      for i, layouts in enumerate(seen):
        self.assertAllEqual(layouts["bias"], np.zeros([2, 3]))
        self.assertEqual(layouts["batch"], i)
      self.assertLen(built.table.get_queue_hooks(), bool(capacity) + sum(queue_configs.values()))

  @parameterized.parameters(True, False)
  def test_writes_rows_as_with_a_server(self, native):
    results = []
    for enable_gpu_emb in (False, True):
      with tf.Graph().as_default():
        built = self.build(0, native, enable_gpu_emb=enable_gpu_emb)
        rows = [layout_testing.rows_of_ranks(self.ctx, 1, seed) for seed in (1, 2)]
        table = built.table.assign(rows[0])
        writes = [table.as_op(), built.table.assign_add(rows[1]).as_op()]
        results.append(
          layout_testing.write_and_look_up(built, writes, gpu_placement.SOFT_PLACEMENT)
        )

    for name in layout_testing.LAYOUTS:
      self.assertAllEqual(results[1][name], results[0][name])
    self.assertGreater(np.abs(results[1]["vec"]).max(), 1)

  def test_trains_with_16_bits_as_with_a_server(self):
    results = []
    for enable_gpu_emb, transfer_float16 in ((False, True), (True, True), (True, False)):
      with tf.Graph().as_default() as graph:
        built = self.build(
          0, True, enable_gpu_emb=enable_gpu_emb, transfer_float16=transfer_float16
        )
        results.append(self.train(built))
        casts = {op.name for op in graph.get_operations() if op.name.endswith("CastToFloat16")}
        if enable_gpu_emb:
          want = ("fused_embedding", "fused_embedding_gradient") if transfer_float16 else ()
          self.assertLen(casts, len(want))
          for name in want:
            self.assertTrue([c for c in casts if f"{name}_alltoall_send" in c], casts)

    server, halves, floats = results
    for got, want in zip(halves, server):
      for name in layout_testing.LAYOUTS:
        self.assertAllClose(got[name], want[name], rtol=1e-6, atol=1e-6)
    self.assertAllClose(halves[-1]["vec"], floats[-1]["vec"], rtol=1e-2)
    self.assertGreater(np.abs(halves[-1]["vec"] - floats[-1]["vec"]).max(), 1e-6)

  def test_bundle_holds_tensors_under_the_prefix(self):
    with tf.Graph().as_default():
      built = self.build(0, True, enable_gpu_emb=True)

    prefix = parsers.ParserCtx.sharding_sparse_fids_features_prefix
    self.assertTrue(all(isinstance(value, tf.Tensor) for value in built.bundle.values()))
    self.assertContainsSubset(
      {prefix + name for name in ("fid_offset", "fid_list_emb_row_lenth", "id_flat_t", "indices")},
      built.bundle,
    )
    self.assertNotIn(prefix + "shards_value", built.bundle)

  def test_errors(self):
    with tf.Graph().as_default():
      built = self.build(0, True, enable_gpu_emb=True)
      self.assertEqual(built.table.get_table_dim_sizes(), [13, 13, 5])
      for write in (built.table.assign, built.table.assign_add):
        with self.assertRaisesRegex(ValueError, "rank 1, but there are 1 ranks"):
          write({1: {}})
        with self.assertRaisesRegex(ValueError, r"table 'x', want one of \['cid', 'gid', 'uid'\]"):
          write({0: {"x": ([1], [[1.0]])}})
      grads = [(tf.zeros_like(layout), layout) for layout in built.flat]
      with self.assertRaisesRegex(AssertionError, "enable_async_optimize"):
        built.table.apply_gradients(
          grads, tf.constant(0, tf.int64), auxiliary_bundle=built.bundle, async_push=True
        )
      with self.assertRaisesRegex(ValueError, "__shards_value: were the ids sharded for ranks"):
        built.table.lookup({})
      with self.assertRaisesRegex(ValueError, "enable_gpu_emb is False, but True where"):
        distributed_ps_factory.create_partitioned_hash_table(0, True)
      self.ctx.sharding_sparse_fids_op_params = layout_testing.params(0, True, enable_gpu_emb=True)
      with (
        export_context.enter_export_mode(export_context.ExportMode.STANDALONE),
        self.assertRaisesRegex(ValueError, "while exporting"),
      ):
        distributed_ps_factory.create_partitioned_hash_table(0, True, enable_gpu_emb=True)


class RanksTest(_LayoutTest):
  """Two ranks, each with one of two examples."""

  def train_ranks(self, native, **kwargs):
    """Returns what each of two ranks has seen."""
    ranks = in_process_ranks.Ranks(2)
    graphs, built = ranks.build(
      lambda rank: self.build(
        2,
        native,
        {name: rows[rank : rank + 1] for name, rows in _ROWS.items()},
        enable_gpu_emb=True,
        plain_steps=True,
        **kwargs,
      )
    )
    config = in_process_ranks.session_config(allow_soft_placement=True)
    return ranks.run(lambda rank: self.train(built[rank], config=config), graphs)

  @parameterized.parameters(True, False)
  def test_two_train_as_one_with_both_batches(self, native):
    with tf.Graph().as_default():
      whole = self.train(self.build(0, native, enable_gpu_emb=True, plain_steps=True))

    for rank, steps in enumerate(self.train_ranks(native)):
      for got, want in zip(steps, whole):
        for name in layout_testing.LAYOUTS:
          self.assertAllClose(got[name], want[name][rank : rank + 1], rtol=1e-5, atol=1e-6)
      self.assertGreater(np.abs(steps[-1]["vec"]).max(), 0.1)

  @parameterized.parameters(True, False)
  def test_rows_go_to_their_owners(self, native):
    """Both ranks have rows for both; of those that both assign the second rank's stay."""

    def build(rank):
      rows = {name: ids[rank : rank + 1] for name, ids in _ROWS.items()}
      built = self.build(2, native, rows, enable_gpu_emb=True)
      data = layout_testing.rows_of_ranks(self.ctx, 2, seed=rank)
      more = layout_testing.rows_of_ranks(self.ctx, 2, seed=2 + rank)
      del more[rank]
      writes = [built.table.assign(data).as_op(), built.table.assign_add(more).as_op()]
      return built, writes

    ranks = in_process_ranks.Ranks(2)
    graphs, built = ranks.build(build)
    config = in_process_ranks.session_config(allow_soft_placement=True)
    got = ranks.run(lambda rank: layout_testing.write_and_look_up(*built[rank], config), graphs)
    with tf.Graph().as_default():
      whole = self.build(0, native)
      writes = [whole.table.assign(layout_testing.rows_of_ranks(self.ctx, 1, seed=1)).as_op()]
      for rank in range(2):
        [rows] = layout_testing.rows_of_ranks(self.ctx, 1, seed=2 + rank).values()
        others = {
          name: ([i for i in ids if i % 2 != rank], values[[i % 2 != rank for i in ids]])
          for name, (ids, values) in rows.items()
        }
        writes.append(whole.table.assign_add({0: others}).as_op())
      want = layout_testing.write_and_look_up(whole, writes, gpu_placement.SOFT_PLACEMENT)

    for rank in range(2):
      for name in layout_testing.LAYOUTS:
        self.assertAllClose(got[rank][name], want[name][rank : rank + 1], rtol=1e-6)
      self.assertGreater(np.abs(got[rank]["vec"]).max(), 1)

  def test_two_train_with_16_bits_as_one(self):
    with tf.Graph().as_default():
      built = self.build(0, True, enable_gpu_emb=True, plain_steps=True, transfer_float16=True)
      whole = self.train(built)

    for rank, steps in enumerate(self.train_ranks(True, transfer_float16=True)):
      for got, want in zip(steps, whole):
        for name in layout_testing.LAYOUTS:
          self.assertAllClose(got[name], want[name][rank : rank + 1], rtol=2e-3, atol=1e-3)

  def test_stay_in_step_with_all_queues(self):
    names = ("enable_pipelined_fwda2a", "enable_async_optimize", "enable_pipelined_bwda2a")
    for steps in self.train_ranks(True, capacity=1, queue_configs=dict.fromkeys(names, 1)):
      self.assertLen(steps, _STEPS)
      self.assertAllEqual(steps[0]["vec"], np.zeros([1, 12]))

  def test_there_must_be_as_many_ranks(self):
    with self.assertRaisesRegex(AssertionError, "shard_num is 3, but there are 2 ranks"):
      in_process_ranks.Ranks(2).build(lambda _: self.build(3, True, enable_gpu_emb=True))


class PlacementTest(_LayoutTest):
  @parameterized.parameters(True, False)
  def test_nothing_leaves_the_gpu_between_lookup_and_update(self, native):
    gpu_placement.allow(self)
    with tf.Graph().as_default():
      self.build(0, native, kind="gpucuco", enable_gpu_emb=True, use_gpu=True, capacity=1)
      group = "MonolithMultiHashTable" if native else "MonolithHashTable"
      for op in (
        f"{group}FusedLookup",
        f"{group}FusedOptimize",
        "MonolithEmbeddingToLayoutV4",
        "MonolithEmbeddingToLayoutGradV4",
      ):
        self.assertEqual(gpu_placement.devices_of(op), {"GPU"}, op)
      operations = tf.compat.v1.get_default_graph().get_operations()
      [layout] = [op for op in operations if op.type == "MonolithEmbeddingToLayoutV4"]
      on_host = {"batch_size", "fid_list_emb_row_lenth"}
      for name, tensor in zip(_LAYOUT_INPUTS, layout.inputs):
        self.assertIn("CPU" if name in on_host else "GPU", tensor.device, name)
      [update] = [op for op in operations if op.type == f"{group}FusedOptimize"]
      grads = [t for t in update.inputs if t.dtype == tf.float32 and "GradV4" in t.op.type]
      self.assertLen(grads, 1)
      self.assertIn("GPU", grads[0].device)

  def test_without_a_gpu_everything_is_on_the_host(self):
    with tf.Graph().as_default() as graph, tf.compat.v1.device("/device:CPU:0"):
      self.build(0, True, enable_gpu_emb=True, use_gpu=True)
      self.assertFalse([op.name for op in graph.get_operations() if "GPU" in op.device])


_LAYOUT_INPUTS = (
  "embeddings_list", "fid_list_emb_row_lenth", "fid_offset", "feature_offset", "nfl_offset",
  "batch_size",
)  # fmt: skip


class DriverTest(_LayoutTest):
  def test_who_holds_the_tables(self):
    sync = dict(enable_sync_training=True, enable_fused_layout=True)
    for config, use_gpu, want in (
      (CpuTrainingConfig(), True, None),
      (CpuTrainingConfig(enable_fused_layout=True), False, None),
      (CpuTrainingConfig(enable_fused_layout=True), True, 0),
      (CpuTrainingConfig(num_workers=1, **sync), False, None),
      (CpuTrainingConfig(num_workers=1, **sync), True, 1),
      (CpuTrainingConfig(num_workers=2, **sync), False, 2),
    ):
      self.assertEqual(driver_tables.layout_ranks(config, use_gpu), want, config)

  def test_makes_tables_of_a_gpu(self):
    gpu_placement.allow(self)
    config = CpuTrainingConfig(enable_fused_layout=True, use_native_multi_hash_table=True)
    params = layout_testing.params(0, True, enable_gpu_emb=True, use_gpu=True)
    self.ctx.sharding_sparse_fids_op_params = params
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    with (
      tf.Graph().as_default(),
      mock.patch.object(tf.config, "list_physical_devices", return_value=gpus),
    ):
      tables = driver_tables.create(config, True, params.sub_table_name_to_config, {1: 3}, {})
      group = tables.hash_table._ranks.table._table
      config.enable_embedding_postpush = True
      with self.assertRaisesRegex(ValueError, "enable_embedding_postpush"):
        driver_tables.create(config, True, params.sub_table_name_to_config, {}, {})

    self.assertEqual(group.handle.device, "/device:GPU:0")
    self.assertEqual(group.shared_name, "MonolithMultiHashTable_0")
    self.assertEqual({handle.device for handle in tables.hash_filters}, {"/device:GPU:0"})


if __name__ == "__main__":
  tf.test.main()
