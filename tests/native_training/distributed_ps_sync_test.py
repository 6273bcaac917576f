"""One rank alone: what the exchange computes, what travels with it, its queues and summaries."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl import flags
from absl.testing import parameterized
from tensorflow.python.framework import kernels

from monolith.native_training import (
  device_utils,
  distributed_ps_factory,
  distributed_ps_sync,
  distribution_ops,
  entry,
  feature_utils,
  hash_filter_ops,
  hash_table_ops,
  hvd_lib,
  learning_rate_functions,
  multi_hash_table_ops,
  multi_type_hash_table,
  prefetch_queue,
  test_utils,
  utils,
)
from monolith.native_training.driver import feature_factories as cpu_feature_factories
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

_BUNDLE_KEYS = {
  "shard_sizes", "fused_embedding_offsets", "emb_offset_sz", "id_flat_t", "id_size_flat_t",
  "embedding_splits", "id_offsets", "emb_offsets", "indices", "recv_emb_splits",
  "recv_embeddings_size",
}  # fmt: skip


def _configs():
  return {
    "1": test_utils.generate_test_hash_table_config(1),
    "2": test_utils.generate_test_hash_table_config(
      2,
      learning_rate=learning_rate_functions.PolynomialDecay(
        initial_learning_rate=1.0, decay_steps=10, end_learning_rate=2.0
      ),
    ),
  }


def _merged_group(_):
  return multi_type_hash_table.MultiTypeHashTable(
    _configs(),
    lambda name, config: hash_table_ops.hash_table_from_config(config, name_suffix=name),
  )


def _native_group(_):
  return multi_hash_table_ops.MultiHashTable.from_configs(_configs())


def _mpi_table(make=_merged_group, **kwargs):
  return distributed_ps_sync.DistributedMultiTypeHashTableMpi(1, make, **kwargs)


def _ids():
  return {"1": tf.constant([1, 1], tf.int64), "2": tf.constant([2], tf.int64)}


def _grads():
  return {"1": tf.constant([[0.5], [0.5]]), "2": tf.constant([[0.5, 1.0]])}


def _pack(ids, req_time=None):
  return (*distribution_ops.fused_reorder_by_indices([ids["1"], ids["2"]], 1, [1, 2]), req_time)


def _scalar(value):
  return tf.constant(value, tf.int64)


class _GraphTest(tf.test.TestCase, parameterized.TestCase):
  def setUp(self):
    super().setUp()
    hvd_lib.init()
    self.enter_context(tf.Graph().as_default())
    tf.compat.v1.train.get_or_create_global_step()


class DistributedMultiTypeHashTableMpiTest(_GraphTest):
  def run_once(self, fetches):
    with tf.compat.v1.train.MonitoredSession() as session:
      return session.run(fetches)

  @parameterized.parameters(_merged_group, _native_group)
  def test_basic(self, make):
    table = _mpi_table(make)
    ids = _ids()
    before, bundle = table.lookup(ids, {}, _pack(ids))
    with tf.control_dependencies(list(before.values())):
      grads = {slot: tf.identity(grad) for slot, grad in _grads().items()}
    updated = table.apply_gradients(
      grads, auxiliary_bundle=bundle, global_step=_scalar(0), req_time=_scalar(0)
    )
    after, _ = updated.lookup(ids, {}, _pack(ids))

    before, after = self.run_once((before, after))

    self.assertAllEqual(before["1"], [[0], [0]])
    self.assertAllEqual(before["2"], [[0, 0]])
    self.assertAllEqual(after["1"], [[-1], [-1]])
    self.assertAllEqual(after["2"], [[-0.5, -1]])

  @parameterized.parameters(_merged_group, _native_group)
  def test_embeddings_move_to_the_gpu_and_tables_do_not(self, make):
    gpu_placement.allow(self)
    table = _mpi_table(make, queue_configs={"embedding_prefetch_capacity": 1})
    ids = _ids()
    embeddings, bundle = table.lookup(ids, {}, _pack(ids))
    updated = table.apply_gradients(_grads(), bundle, _scalar(0))
    with tf.control_dependencies([updated.as_op(), *embeddings.values()]):
      done = tf.no_op()

    for op in ("", "Gradient"):
      name = f"MonolithFusedGatherEmbeddingsByInput{op}"
      self.assertEqual(gpu_placement.devices_of(name), {"GPU"})
    self.assertEqual(gpu_placement.devices_of("FIFOQueueV2"), {"GPU"})
    self.assertEqual(gpu_placement.devices_of("PaddingFIFOQueueV2"), {"CPU"})
    for op in tf.compat.v1.get_default_graph().get_operations():
      if "HashTable" in op.type:
        self.assertNotIn("GPU", op.device, op.name)
    hooks = table.get_queue_hooks()
    config = gpu_placement.SOFT_PLACEMENT
    with tf.compat.v1.train.SingularMonitoredSession(hooks=hooks, config=config) as session:
      self.assertAllEqual(session.run(embeddings)["1"], [[0], [0]])
      session.run(done)
      session.run(done)
      # The lookup that is ahead may have seen one update less.
      self.assertLess(session.run(embeddings)["1"][0, 0], 0)

  @parameterized.parameters(False, True)
  def test_tables_of_a_gpu_stay_there_and_rows_go_where_they_can_be_exchanged(self, native):
    gpu_placement.allow(self)
    configs = {}
    for name, config in _configs().items():
      entry.GpucucoHashTableConfig().mutate_table(config.table_config)
      configs[name] = config
    create = (
      distributed_ps_factory.create_in_worker_native_multi_hash_table
      if native
      else distributed_ps_factory.create_in_worker_multi_type_hash_table
    )
    ids = _ids()
    # As a driver does, whose session has no soft placement.
    with tf.compat.v1.device(device_utils.default_device_fn):
      with tf.device("/device:GPU:0"):
        hash_filter = hash_filter_ops.create_dummy_hash_filter()
      table = create(1, configs, hash_filter)
      pack = _pack(ids)
      kwargs = {}
      if not native:
        merged, sizes = table._merge_tensors(ids)
        names, dims = sorted(merged), table.get_table_dim_sizes()
        pack = distribution_ops.fused_reorder_by_indices([merged[n] for n in names], 1, dims)
        pack, kwargs = (sizes, (*pack, None)), {"skip_merge_id": True}
      _, bundle = table.lookup(ids, {}, pack)
      table.apply_gradients(_grads(), auxiliary_bundle=bundle, global_step=_scalar(0), **kwargs)

    group = "MonolithMultiHashTable" if native else "MonolithHashTable"
    for op in (f"{group}FusedLookup", f"{group}FusedOptimize"):
      self.assertEqual(gpu_placement.devices_of(op), {"GPU"}, op)
    exchanged_on = {"GPU"} if hvd_lib.has_gpu_kernels() else {"CPU"}
    self.assertLessEqual(gpu_placement.devices_of("HorovodAlltoall"), exchanged_on)
    # Every op has a kernel where it is to run.
    for op in tf.compat.v1.get_default_graph().get_operations():
      device = tf.DeviceSpec.from_string(op.device).device_type
      if op.type.startswith(("Monolith", "Horovod", "CreateMonolith")):
        registered = kernels.get_registered_kernels_for_op(op.type).kernel
        self.assertIn(device, {kernel.device_type for kernel in registered}, op.name)

  def test_bundle(self):
    table = _mpi_table()
    ids = _ids()
    _, bundle = table.lookup(ids, {"mine": tf.constant(7)}, _pack(ids))
    self.assertEqual(set(bundle), _BUNDLE_KEYS | {"mine"})

    values = self.run_once(bundle)

    self.assertEqual(values["mine"], 7)
    self.assertAllEqual(values["shard_sizes"], [2])
    self.assertAllEqual(values["fused_embedding_offsets"][0], [0, 0])
    self.assertAllEqual(values["fused_embedding_offsets"][1], [1])
    self.assertAllEqual(values["emb_offset_sz"], [2, 1])
    self.assertAllEqual(values["id_flat_t"], [1, 2])
    self.assertAllEqual(values["id_size_flat_t"], [1, 1])
    self.assertAllEqual(values["embedding_splits"], [3])
    self.assertAllEqual(values["id_offsets"], [0, 1, 2])
    self.assertAllEqual(values["emb_offsets"], [0, 1, 3])
    self.assertAllEqual(values["indices"], [1, 2])
    self.assertAllEqual(values["recv_emb_splits"], [3])
    self.assertEqual(values["recv_embeddings_size"], 3)

  def test_update_takes_its_part_out_of_the_bundle(self):
    table = _mpi_table()
    ids = _ids()
    _, bundle = table.lookup(ids, {"mine": tf.constant(7)}, _pack(ids))
    table.apply_gradients(_grads(), bundle, _scalar(0))
    self.assertEqual(set(bundle), {"mine", "emb_offset_sz"})

  def test_the_callers_bundle_is_left_alone_by_a_lookup(self):
    bundle = {}
    ids = _ids()
    _mpi_table().lookup(ids, bundle, _pack(ids))
    self.assertEqual(bundle, {})

  def test_scale(self):
    table = _mpi_table()
    ids = _ids()
    _, bundle = table.lookup(ids, {}, _pack(ids))
    updated = table.apply_gradients(_grads(), bundle, _scalar(0), scale=tf.constant(0.5))
    rows = self.run_once(updated.lookup(ids, {}, _pack(ids))[0])
    self.assertAllEqual(rows["1"], [[-0.5], [-0.5]])
    self.assertAllEqual(rows["2"], [[-0.25, -0.5]])

  def test_slot_without_gradient(self):
    table = _mpi_table()
    ids = _ids()
    _, bundle = table.lookup(ids, {}, _pack(ids))
    updated = table.apply_gradients({"2": _grads()["2"]}, bundle, _scalar(0))
    rows = self.run_once(updated.lookup(ids, {}, _pack(ids))[0])
    self.assertAllEqual(rows["1"], [[0], [0]])
    self.assertAllEqual(rows["2"], [[-0.5, -1]])

  def test_no_ids(self):
    table = _mpi_table()
    ids = {"1": tf.constant([], tf.int64), "2": tf.constant([], tf.int64)}
    embeddings, bundle = table.lookup(ids, {}, _pack(ids))
    grads = {"1": tf.zeros([0, 1]), "2": tf.zeros([0, 2])}
    update = table.apply_gradients(grads, bundle, _scalar(0)).as_op()
    values, _ = self.run_once((embeddings, update))
    self.assertEqual(values["1"].shape, (0, 1))
    self.assertEqual(values["2"].shape, (0, 2))

  def test_request_time_reaches_the_lookup_and_the_update(self):
    table = _mpi_table()
    ids = _ids()
    times = []
    fused_lookup = table._table.fused_lookup
    fused_apply_gradient = table._table.fused_apply_gradient

    def lookup(ids, sizes, num_shards, req_time):
      times.append(req_time)
      return fused_lookup(ids, sizes, num_shards, req_time)

    def update(*args, **kwargs):
      times.append(args[7])
      return fused_apply_gradient(*args, **kwargs)

    with mock.patch.object(table._table, "fused_lookup", lookup), \
        mock.patch.object(table._table, "fused_apply_gradient", update):  # fmt: skip
      _, bundle = table.lookup(ids, {}, _pack(ids, _scalar(123)))
      table.apply_gradients(_grads(), bundle, _scalar(0), req_time=_scalar(456))
      _, bundle = table.lookup(ids, {}, _pack(ids))
      table.apply_gradients(_grads(), bundle, _scalar(0))
    self.assertTrue(all(time.dtype == tf.int64 for time in times))
    self.assertEqual(self.run_once(times), [123, 456, 0, 0])

  def test_control_ops(self):
    for name, stage in (
      ("control_ops", "MonolithFusedGatherEmbeddingsByInputGradient"),
      ("dense_opt_ops", "MonolithHashTableFusedOptimize"),
    ):
      with tf.Graph().as_default() as graph:
        first = tf.no_op(name="first")
        getattr(feature_utils, name).append(first)
        table = _mpi_table()
        ids = _ids()
        _, bundle = table.lookup(ids, {}, _pack(ids))
        table.apply_gradients(_grads(), bundle, _scalar(0))
        [op] = [op for op in graph.get_operations() if op.type == stage]
        self.assertIn(first, utils.get_needed_ops([op]))

  def test_dim_sizes(self):
    self.assertEqual(_mpi_table().get_table_dim_sizes(), [1, 2])

  def test_it_counts_as_a_group_of_tables(self):
    self.assertIsInstance(_mpi_table(), multi_type_hash_table.BaseMultiTypeHashTable)

  def test_errors(self):
    table = _mpi_table()
    ids = _ids()
    with self.assertRaisesRegex(AssertionError, "reorder_fids_in_data_pipeline=False is dropped"):
      table.lookup(ids, {})
    with self.assertRaisesRegex(ValueError, "slot_to_id has 1 slots, want 2"):
      table.lookup({"1": ids["1"]}, {}, _pack(ids))
    _, bundle = table.lookup(ids, {}, _pack(ids))
    with self.assertRaisesRegex(ValueError, r"the slots \['3'\], want \['1', '2'\]"):
      table.apply_gradients({"3": _grads()["1"]}, bundle, _scalar(0))
    with self.assertRaises(NotImplementedError):
      table.assign({})
    with self.assertRaises(NotImplementedError):
      table.assign_add({})
    with self.assertRaises(NotImplementedError):
      table._update({})
    with self.assertRaisesRegex(NotImplementedError, "dost not support reinitialize!"):
      table.reinitialize("1", ids["1"])
    with self.assertRaisesRegex(AssertionError, "shard_num is 2, but there are 1 ranks"):
      distributed_ps_sync.DistributedMultiTypeHashTableMpi(2, _merged_group)

  @parameterized.parameters(False, True)
  def test_factories(self, native):
    create = (
      distributed_ps_factory.create_in_worker_native_multi_hash_table
      if native
      else distributed_ps_factory.create_in_worker_multi_type_hash_table
    )
    table = create(1, _configs(), None)
    ids = _ids()
    if native:
      pack, kwargs = _pack(ids), {}
    else:
      merged, sizes = table._merge_tensors(ids)
      names = sorted(merged)
      dims = table.get_table_dim_sizes()
      reordered = distribution_ops.fused_reorder_by_indices([merged[n] for n in names], 1, dims)
      pack, kwargs = (sizes, (*reordered, None)), {"skip_merge_id": True}
    _, bundle = table.lookup(ids, {}, pack)
    updated = table.apply_gradients(
      _grads(), auxiliary_bundle=bundle, global_step=_scalar(0), **kwargs
    )
    rows = self.run_once(updated.lookup(ids, {}, pack)[0])
    self.assertAllEqual(rows["1"], [[-1], [-1]])
    self.assertAllEqual(rows["2"], [[-0.5, -1]])

  @parameterized.parameters(False, True)
  def test_feature_without_influence_on_the_loss(self, native):
    """Its rows are asked for in one go with the others', and stay as they are."""
    configs = {name: test_utils.generate_test_hash_table_config(1) for name in ("a", "b")}
    create = (
      distributed_ps_factory.create_in_worker_native_multi_hash_table
      if native
      else distributed_ps_factory.create_in_worker_multi_type_hash_table
    )
    table = create(1, configs, None)
    ids = {"a": tf.constant([1, 2], tf.int64), "b": tf.constant([3], tf.int64)}
    if native:
      reordered = distribution_ops.fused_reorder_by_indices([ids["a"], ids["b"]], 1, [1, 1])
      pack = (*reordered, None)
    else:
      merged, sizes = table._merge_tensors(ids)
      reordered = distribution_ops.fused_reorder_by_indices(list(merged.values()), 1, [1])
      pack = (sizes, (*reordered, None))
    embeddings, bundle = table.lookup(ids, {}, pack)
    factory = cpu_feature_factories._FusedCpuFeatureFactory(
      table, embeddings, {}, None, bundle, use_native_multi_hash_table=native
    )
    update = factory.apply_gradients([(tf.ones([1, 1]), embeddings["b"])])
    with tf.control_dependencies([update]):
      ids = {name: tf.identity(tensor) for name, tensor in ids.items()}
    inner = table._table._table if not native else table._table
    if native:
      with tf.control_dependencies([update]):
        rows = inner.lookup(ids)
    else:
      [group] = inner._hash_tables.values()
      rows = {name: group.lookup(tensor) for name, tensor in ids.items()}
    with tf.compat.v1.train.MonitoredSession(
      session_creator=tf.compat.v1.train.ChiefSessionCreator(
        config=tf.compat.v1.ConfigProto(allow_soft_placement=True)
      )
    ) as session:
      rows = session.run(rows)
    self.assertAllEqual(rows["a"], [[0], [0]])
    self.assertAllEqual(rows["b"], [[-1]])


class QueueTest(_GraphTest):
  """Batch i holds id i + 10 alone; its row goes from 0 to -1 in one update."""

  def build(self, num_batches, **queue_configs):
    self.table = _mpi_table(queue_configs=queue_configs)

    def reorder(i):
      ids = tf.reshape(i + 10, [1])
      return i, distribution_ops.fused_reorder_by_indices([ids, ids], 1, [1, 2])

    dataset = tf.data.Dataset.range(num_batches).map(reorder)
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    batch, pack = iterator.get_next()
    embeddings, bundle = self.table.lookup({"1": None, "2": None}, {"batch": batch}, (*pack, None))
    grads = {slot: tf.ones_like(rows) for slot, rows in embeddings.items()}
    batch = bundle.pop("batch")
    table = self.table.apply_gradients(grads, bundle, _scalar(0))
    return batch, embeddings, table.as_op()

  def rows_of(self, session, ids):
    raw = session if isinstance(session, tf.compat.v1.Session) else session._tf_sess()
    return raw.run(self.read, {self.read_ids: ids})

  def build_reader(self):
    self.read_ids = tf.compat.v1.placeholder(tf.int64, [None])
    self.read = self.table._table._hash_tables["1"].lookup(self.read_ids)

  @parameterized.product(
    enable_pipelined_fwda2a=(0, 1),
    embedding_prefetch_capacity=(0, 2),
    enable_async_optimize=(0, 1),
    enable_pipelined_bwda2a=(0, 1),
  )
  def test_every_batch_is_used_and_updated_once(self, **queue_configs):
    batch, embeddings, train_op = self.build(6, **queue_configs)
    self.build_reader()
    hooks = self.table.get_queue_hooks()
    self.assertLen(hooks, sum(bool(capacity) for capacity in queue_configs.values()))
    rows = []

    class Read(tf.compat.v1.train.SessionRunHook):
      def end(_, session):
        rows.append(self.rows_of(session, list(range(10, 17))))

    batches = []
    with tf.compat.v1.train.MonitoredSession(hooks=[*hooks, Read()]) as session:
      while not session.should_stop():
        value, looked_up, _ = session.run((batch, embeddings, train_op))
        batches.append(value)
        # This id has not been updated before its only batch.
        self.assertAllEqual(looked_up["1"], [[0]])

    self.assertEqual(batches, list(range(6)))
    self.assertAllEqual(rows[0], [[-1]] * 6 + [[0]])

  def test_hook_kinds(self):
    self.build(
      1, enable_pipelined_fwda2a=1, embedding_prefetch_capacity=1, enable_async_optimize=1,
      enable_pipelined_bwda2a=1,
    )  # fmt: skip
    enqueue, push = prefetch_queue.EnqueueHook, prefetch_queue.AsyncPushHook
    for hook, kind in zip(self.table.get_queue_hooks(), (enqueue, enqueue, push, push)):
      self.assertIsInstance(hook, kind)

  def test_prefetch_is_exactly_as_far_ahead_as_it_says(self):
    batch, _, train_op = self.build(100, enable_pipelined_fwda2a=1, embedding_prefetch_capacity=2)
    hooks = self.table.get_queue_hooks()
    runs = [0, 0]
    for i, hook in enumerate(hooks):

      def count(run=hook._enqueue, i=i):
        runs[i] += 1
        return run()

      hook._enqueue = count

    with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
      for _ in range(5):
        session.run((batch, train_op))

    # Q1 is filled 1 + 2 ahead of 5 steps, Q2 2 ahead, on every machine and at every speed.
    self.assertEqual(runs, [5 + 3, 5 + 2])

  def test_runs_that_use_no_batch_take_none(self):
    batch, _, train_op = self.build(
      4, embedding_prefetch_capacity=1, enable_async_optimize=1, enable_pipelined_bwda2a=1
    )
    other = tf.constant(1)
    batches = []
    with tf.compat.v1.train.MonitoredSession(hooks=self.table.get_queue_hooks()) as session:
      while not session.should_stop():
        session.run(other)
        session.run(other)
        batches.append(session.run((batch, train_op))[0])
    self.assertEqual(batches, [0, 1, 2, 3])

  @parameterized.parameters(
    "enable_pipelined_fwda2a", "embedding_prefetch_capacity", "enable_async_optimize",
    "enable_pipelined_bwda2a",
  )  # fmt: skip
  def test_an_error_in_a_thread_stops_the_training(self, queue):
    _, _, train_op = self.build(100, **{queue: 1})
    hooks = self.table.get_queue_hooks()
    name = "_push" if hasattr(hooks[0], "_push") else "_enqueue"
    run = getattr(hooks[0], name)
    calls = []

    def fail(*args):
      calls.append(args)
      if len(calls) == 3:
        raise ValueError("broken on purpose")
      return run(*args)

    setattr(hooks[0], name, fail)
    with self.assertRaisesRegex(ValueError, "broken on purpose"):
      with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
        for _ in range(100):
          session.run(train_op)


class SummaryTest(_GraphTest):
  def setUp(self):
    super().setUp()
    flags.FLAGS.enable_alltoall_metrics = True
    self.addCleanup(setattr, flags.FLAGS, "enable_alltoall_metrics", False)
    self.addCleanup(setattr, flags.FLAGS, "enable_alltoall_metrics_for_slot", None)

  def summaries(self, **queue_configs):
    table = _mpi_table(queue_configs=queue_configs)
    ids = _ids()
    _, bundle = table.lookup(ids, {}, _pack(ids))
    self.assertEqual(set(bundle), _BUNDLE_KEYS)
    merged = tf.compat.v1.summary.merge_all()
    with tf.compat.v1.train.MonitoredSession(hooks=table.get_queue_hooks()) as session:
      proto = tf.compat.v1.Summary.FromString(session.run(merged))
    return {value.tag: value for value in proto.value}

  @parameterized.parameters(0, 1)
  def test_summaries(self, capacity):
    flags.FLAGS.enable_alltoall_metrics_for_slot = "1"
    values = self.summaries(embedding_prefetch_capacity=capacity)
    self.assertCountEqual(
      values,
      ["all_fids_size", "shard_sizes", "sharded_slot_sizes", "fused_embedding_splits", "1_size"],
    )
    self.assertEqual(values["all_fids_size"].simple_value, 2)
    self.assertEqual(values["1_size"].simple_value, 2)
    self.assertEqual(values["shard_sizes"].histo.sum, 2)
    self.assertEqual(values["sharded_slot_sizes"].histo.num, 2)
    self.assertEqual(values["fused_embedding_splits"].histo.sum, 3)

  def test_without_a_slot(self):
    self.assertNotIn("1_size", self.summaries())

  def test_off(self):
    flags.FLAGS.enable_alltoall_metrics = False
    table = _mpi_table()
    ids = _ids()
    table.lookup(ids, {}, _pack(ids))
    self.assertIsNone(tf.compat.v1.summary.merge_all())


class GradientAccumulationTest(_GraphTest):
  def test_is_handed_on(self):
    for enabled in (False, True):
      with tf.Graph().as_default() as graph, \
          mock.patch.dict("os.environ", MONOLITH_SYNC_SUM_GRADIENTS=str(int(enabled))):  # fmt: skip
        table = distributed_ps_factory.create_in_worker_native_multi_hash_table(1, _configs(), None)
        ids = _ids()
        _, bundle = table.lookup(ids, {}, _pack(ids))
        table.apply_gradients(_grads(), bundle, _scalar(0))
        [op] = [
          op for op in graph.get_operations() if op.type == "MonolithMultiHashTableFusedOptimize"
        ]
        self.assertEqual(op.get_attr("enable_grad_accumulation"), enabled)


class ReorderTest(tf.test.TestCase, parameterized.TestCase):
  """The sharding rule, with more ranks than a test can start."""

  @parameterized.parameters(
    dict(
      inputs=[[0, 1, 0], [3, 2, 3], [5, 6, 7]], shards=2, dims=[1, 2, 3],
      expected=(
        [0, 2, 6, 1, 3, 5, 7], [3, 4], [1, 1, 1, 1, 1, 2], [3, 3, 3], [0, 6, 0, 7, 1, 7, 9, 3, 12],
      ),
    ),
    dict(
      inputs=[[2, 3, 1, 2, 7, 2], [5, 8, 4, 4, 5, 11, 6]], shards=3, dims=[3, 2],
      expected=(
        [3, 6, 1, 7, 4, 2, 5, 8, 11], [2, 3, 4], [1, 1, 2, 1, 1, 3], [6, 7],
        [13, 0, 5, 13, 8, 13, 16, 18, 11, 11, 16, 20, 3],
      ),
    ),
    dict(
      inputs=[[0, 1, 2, 2, 3, 5], []], shards=3, dims=[1, 1],
      expected=([0, 3, 1, 2, 5], [2, 1, 2], [2, 0, 1, 0, 2, 0], [6, 0], [0, 2, 3, 3, 1, 4]),
    ),
    dict(inputs=[[], []], shards=2, dims=[1, 1], expected=([], [0, 0], [0, 0, 0, 0], [0, 0], [])),
    dict(
      inputs=[[0, 1, 2, 3, 4, 5, 6, 7]], shards=5, dims=[2],
      expected=(
        [0, 4, 1, 5, 2, 6, 3, 7], [0, 2, 2, 2, 2], [0, 2, 2, 2, 2], [8],
        [0, 4, 8, 12, 2, 6, 10, 14],
      ),
    ),
  )  # fmt: skip
  def test_examples(self, inputs, shards, dims, expected):
    with self.session() as session:
      outputs = session.run(
        distribution_ops.fused_reorder_by_indices(
          [np.array(ids, np.int64) for ids in inputs], shards, dims
        )
      )
    for output, values in zip(outputs, expected):
      self.assertAllEqual(output, values)

  def test_rank_0_is_used_when_asked_to(self):
    with mock.patch.dict("os.environ", MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD="0"):
      with self.session() as session:
        _, sizes, *_ = session.run(
          distribution_ops.fused_reorder_by_indices([np.arange(10, dtype=np.int64)], 5, [1])
        )
    self.assertAllEqual(sizes, [2, 2, 2, 2, 2])

  def test_argument_wins_over_the_environment(self):
    ids = np.arange(10, dtype=np.int64)
    with self.session() as session:
      for shards, rank0_empty, expected in (
        (5, False, [2, 2, 2, 2, 2]), (2, True, [0, 10]), (5, True, [0, 3, 3, 2, 2])
      ):  # fmt: skip
        _, sizes, *_ = session.run(
          distribution_ops.fused_reorder_by_indices([ids], shards, [1], rank0_empty)
        )
        self.assertAllEqual(sizes, expected)

  def test_negative_and_extreme_ids_have_a_home(self):
    ids = np.array([-1, -2, -3, -(2**63), 2**63 - 1], np.int64)
    with self.session() as session:
      output, sizes, *_ = session.run(distribution_ops.fused_reorder_by_indices([ids], 3, [1]))
    homes = np.repeat(np.arange(3), sizes)
    self.assertEqual(
      {int(i): int(home) for i, home in zip(output, homes)}, {int(i): int(i) % 3 for i in ids}
    )


if __name__ == "__main__":
  tf.test.main()
