"""Tables on a GPU inside TensorFlow, against tables in main memory: values, files, errors."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import random_seed

from monolith.native_training import (
  cpu_training,
  device_utils,
  distributed_ps_factory,
  distributed_ps_sync,
  distribution_ops,
  entry,
  feature,
  hash_filter_ops,
  hash_table_ops,
  hvd_lib,
  multi_hash_table_ops,
  multi_type_hash_table,
)
from monolith.native_training.demos import data, models
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests import gpu_placement

tf.compat.v1.disable_eager_execution()

pytestmark = pytest.mark.skipif(
  not tf.config.list_physical_devices("GPU"), reason="TensorFlow finds no GPU here"
)

# Soft placement would hide an op that has no kernel where its table is.
_SESSION = tf.compat.v1.ConfigProto(allow_soft_placement=False)
_SESSION.gpu_options.allow_growth = True

_PLACES = {"cpu": entry.CuckooHashTableConfig, "gpu": entry.GpucucoHashTableConfig}
_EXTREME_IDS = [0, 1, -1, 2**63 - 1, -(2**63), 5 << 48, 7]

_SGD = entry.SgdOptimizer(learning_rate=0.1)
_ADAGRAD = entry.AdagradOptimizer(learning_rate=0.1, initial_accumulator_value=0.1)
_FTRL = entry.FtrlOptimizer(learning_rate=0.1, initial_accumulator_value=0.1)


def _config(place, *segments, expire_days=36500, threshold=None, initial_capacity=1):
  """`segments` are pairs of a dimension and an optimizer."""
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  for dim, optimizer in segments:
    config.entry_config.segments.append(
      entry.CombineAsSegment(dim, entry.ZerosInitializer(), optimizer, entry.Fp32Compressor())
    )
  config.slot_expire_time_config.default_expire_time = expire_days
  if threshold is not None:
    config.occurrence_threshold = threshold
  _PLACES[place](initial_capacity=initial_capacity).mutate_table(config)
  return entry.HashTableConfigInstance(config, [0.1] * len(segments))


def _entries(serialized):
  """The entries of `save_as_tensor`, by id."""
  dumps = [embedding_hash_table_pb2.EntryDump.FromString(bytes(entry)) for entry in serialized]
  return {dump.id: dump for dump in dumps}


class _TableTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.rng = np.random.default_rng(3)
    self.folder = self.create_tempdir().full_path
    graph = tf.Graph()
    self.enter_context(graph.as_default())
    self.session_ = self.enter_context(tf.compat.v1.Session(graph=graph, config=_SESSION))

  def floats(self, *shape):
    return self.rng.standard_normal(shape).astype(np.float32)

  def run_(self, *fetches):
    return self.session_.run(fetches[0] if len(fetches) == 1 else list(fetches))

  def table(self, place, *segments, name="table", **settings):
    return hash_table_ops.hash_table_from_config(
      _config(place, *segments, **settings), name_suffix=f"{name}_{place}"
    )

  def group(self, place, tables, name="", filter_fn=None, **settings):
    configs = {key: _config(place, *segments, **settings) for key, segments in tables.items()}
    hash_filter = None
    if filter_fn is not None:
      with tf.device("/device:GPU:0" if place == "gpu" else "/device:CPU:0"):
        hash_filter = filter_fn()
    group = multi_hash_table_ops.MultiHashTable.from_configs(
      configs, hash_filter, name_suffix=f"{name}{place}"
    )
    self.run_(group.initializer)
    return group


class SingleTableTest(_TableTest):
  def test_is_on_the_gpu(self):
    table = self.table("gpu", (4, _SGD))

    self.assertIn("GPU:0", table.lookup(tf.constant([1], tf.int64)).device)
    np.testing.assert_array_equal(self.run_(table.lookup([1, 2])), np.zeros([2, 4]))
    self.assertEqual(self.run_(table.size()), 0)

  def test_leaves_out_what_is_not_finite_and_tells_later(self):
    table = self.table("gpu", (4, _SGD))
    values = np.ones([3, 4], np.float32)
    values[1, 2] = np.nan
    assigned = table.assign([1, 2, 3], values, req_time=tf.constant(100, tf.int64))
    stepped = table.apply_gradients(
      tf.constant([1, 2, 3], tf.int64), values, global_step=tf.constant(1, tf.int64)
    )
    told = "values or gradients with NaN or infinity were not written, those of 1 row: id 2"

    self.assertEqual(self.run_(assigned.size()), 2)  # waits for the device
    for later in (stepped, assigned):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"Table '.*table_gpu.*': {told}"):
        self.run_(later.size())
      self.assertEqual(self.run_(later.size()), 2)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, told):
      self.run_(table.save(tf.constant(os.path.join(self.folder, "table"))).as_op())
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
      for _ in range(2):
        self.assertEqual(self.run_(stepped.size()), 2)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
      self.assertEqual(self.run_(stepped.size()), 3)

  def test_does_what_the_table_in_main_memory_does(self):
    for segments in (
      [(1, _SGD)],
      [(5, _ADAGRAD)],
      [(1, _FTRL), (4, _ADAGRAD)],
      [(16, entry.AdamOptimizer(learning_rate=0.1))],
      [(3, _SGD), (13, entry.MomentumOptimizer(learning_rate=0.1))],
    ):
      with self.subTest(segments):
        name = f"t{len(tf.compat.v1.get_default_graph().get_operations())}"
        dim = sum(dim for dim, _ in segments)
        ids = np.array([*range(50), *_EXTREME_IDS, *range(20)], np.int64)
        assigned, added = self.floats(40, dim), self.floats(60, dim)
        grads = self.floats(len(ids), dim)
        results = {}
        for place in _PLACES:
          table = self.table(place, *segments, name=name)
          table = table.assign(ids[:40], assigned, req_time=tf.constant(100, tf.int64))
          table = table.assign_add(ids[10:70], added, req_time=tf.constant(200, tf.int64))
          for step, dedup in enumerate((False, True, False)):
            table = table.apply_gradients(
              ids,
              grads,
              global_step=tf.constant(step, tf.int64),
              enable_dedup=dedup,
              req_time=tf.constant(300 + step, tf.int64),
            )
          looked_up = table.lookup(np.append(ids, 10**6))
          with tf.control_dependencies([looked_up]):
            results[place] = self.run_(
              looked_up, table.size(), table.lookup_entry(ids[:60]), table.stats()[0]
            )

        np.testing.assert_allclose(results["gpu"][0], results["cpu"][0], rtol=1e-5, atol=1e-6)
        self.assertEqual(results["gpu"][1], results["cpu"][1])
        self.assertEqual(results["gpu"][1], results["gpu"][3])
        for got, want in zip(results["gpu"][2], results["cpu"][2]):
          got, want = (
            embedding_hash_table_pb2.EntryDump.FromString(bytes(dump)) for dump in (got, want)
          )
          np.testing.assert_allclose(got.num, want.num, rtol=1e-5, atol=1e-6)
          self.assertEqual(got.last_update_ts_sec, want.last_update_ts_sec)
          self.assertEqual(len(got.opt.dump), len(want.opt.dump))

  def test_pages_hold_every_row_once(self):
    table = self.table("gpu", (2, _ADAGRAD))
    ids, values = np.arange(1000, dtype=np.int64), self.floats(1000, 2)
    self.run_(table.assign(ids, values).as_op())

    offset = tf.compat.v1.placeholder(tf.int64, [])
    page = table.save_as_tensor(1, 3, 7, offset)
    pages = [table.save_as_tensor(part, 3, 10**6, 0)[1] for part in (0, 2)]
    entries, at = list(self.run_(pages[0])) + list(self.run_(pages[1])), 0
    while True:
      at, found = self.session_.run(page, {offset: at})
      entries.extend(found)
      if len(found) < 7:
        break

    self.assertLen(entries, 1000)
    by_id = _entries(entries)
    np.testing.assert_array_equal([by_id[id_].num for id_ in range(1000)], values)

  def test_the_initial_values_are_those_of_main_memory(self):
    config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
    config.entry_config.segments.append(
      entry.CombineAsSegment(
        8, entry.RandomUniformInitializer(-1, 1), entry.SgdOptimizer(), entry.Fp32Compressor()
      )
    )
    rows = {}
    with tf.compat.v1.test.mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="5"):
      for place, kind in _PLACES.items():
        kind().mutate_table(config)
        table = hash_table_ops.hash_table_from_config(
          entry.HashTableConfigInstance(config, [1.0]), name_suffix=f"random_{place}"
        )
        ids = tf.constant(_EXTREME_IDS, tf.int64)
        grown = table.assign_add(ids, tf.zeros([len(_EXTREME_IDS), 8]))
        rows[place] = self.run_(grown.lookup(ids))

    np.testing.assert_array_equal(rows["gpu"], rows["cpu"])

  def test_refuses_bad_input_and_keeps_its_rows(self):
    table = self.table("gpu", (2, _SGD))
    ids = tf.constant([1, 2], tf.int64)
    self.run_(table.assign(ids, [[1.0, 2.0], [3.0, 4.0]]).as_op())
    step = tf.constant(0, tf.int64)
    wide = gen_monolith_ops.monolith_hash_table_lookup
    with tf.device("/device:GPU:0"):
      for call in (
        table.assign(ids, [[1.0, 2.0]]).as_op(),
        table.apply_gradients(ids, tf.zeros([3, 2]), global_step=step).as_op(),
        wide(table.table, ids, 3),
        *hash_table_ops.fused_lookup([table], ids, [3], 1),
        *hash_table_ops.fused_lookup([table], ids, [-1], 1),
      ):
        with self.assertRaises(tf.errors.InvalidArgumentError):
          self.run_(call)

    np.testing.assert_array_equal(self.run_(table.lookup(ids)), [[1, 2], [3, 4]])
    self.assertEqual(self.run_(table.size()), 2)

  def test_a_table_of_main_memory_stays_there(self):
    config = _config("cpu", (2, _SGD)).table_config
    with tf.device("/device:GPU:0"):
      handle = gen_monolith_ops.monolith_hash_table(
        gen_monolith_ops.MonolithDummyHashFilter(),
        gen_monolith_ops.MonolithDummySyncClient(),
        config=config.SerializeToString(),
      )
      with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "use GpucucoHashTableConfig"):
        self.run_(gen_monolith_ops.monolith_hash_table_size(handle))

  def test_out_of_memory_names_the_table_and_changes_nothing(self):
    table = self.table("gpu", (64, _ADAGRAD), name="full")
    ids, values = np.arange(1000, dtype=np.int64), self.floats(1000, 64)
    self.run_(table.assign(ids, values).as_op())
    path = pathlib.Path(gen_monolith_ops.__file__).with_name("libmonolith_cuda.so")
    library = ctypes.CDLL(os.environ.get("MONOLITH_CUDA_LIBRARY") or str(path))
    library.mono_gpu_table_set_budget(ctypes.c_int64(64 << 20))
    self.addCleanup(library.mono_gpu_table_set_budget, ctypes.c_int64(0))

    many = tf.range(10**6, 2 * 10**6, dtype=tf.int64)
    with self.assertRaisesRegex(
      tf.errors.ResourceExhaustedError,
      "table MonolithHashTable_full_gpu: .*bytes.*it has 1000 rows in",
    ):
      self.run_(table.assign(many, tf.ones([10**6, 64])).as_op())

    self.assertEqual(self.run_(table.size()), 1000)
    np.testing.assert_array_equal(self.run_(table.lookup(ids)), values)


class FilesTest(_TableTest):
  _SEGMENTS = ((1, _FTRL), (7, _ADAGRAD))

  def _train(self, table, ids, grads):
    return table.apply_gradients(
      ids, grads, tf.constant(1, tf.int64), req_time=tf.constant(10**9, tf.int64)
    )

  def test_a_table_goes_both_ways(self):
    ids = np.array([*_EXTREME_IDS, *range(100, 5100)], np.int64)
    grads = self.floats(len(ids), 8)
    for source, target in (("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")):
      with self.subTest(source=source, target=target):
        name = f"{source}_{target}"
        saved = self.table(source, *self._SEGMENTS, name=f"{name}_from")
        restored = self.table(target, *self._SEGMENTS, name=f"{name}_to")
        basename = os.path.join(self.folder, name)
        self.run_(self._train(saved, ids, grads).save(basename).as_op())
        # Earlier rows go.
        self.run_(restored.assign([10**7], self.floats(1, 8)).as_op())
        self.run_(restored.restore(basename).as_op())

        self.assertEqual(self.run_(restored.size()), len(ids))
        np.testing.assert_array_equal(self.run_(restored.lookup(ids)), self.run_(saved.lookup(ids)))
        # The state of the optimizers came along.
        both = self.run_(
          self._train(restored, ids, grads).lookup(ids), self._train(saved, ids, grads).lookup(ids)
        )
        np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)

  def test_a_group_goes_both_ways(self):
    tables = {"a": [(1, _FTRL), (4, _ADAGRAD)], "b": [(3, _SGD)], "empty": [(2, _SGD)]}
    ids = {"a": np.arange(300, dtype=np.int64), "b": np.arange(-50, 50, dtype=np.int64)}
    grads = {"a": self.floats(300, 5), "b": self.floats(100, 3)}
    for source, target in (("gpu", "cpu"), ("cpu", "gpu")):
      with self.subTest(source=source, target=target):
        saved = self.group(source, tables, f"{source}_{target}_from")
        restored = self.group(target, tables, f"{source}_{target}_to")
        basename = os.path.join(self.folder, f"{source}_{target}")
        updated = saved.apply_gradients(
          {key: (ids[key], grads[key]) for key in ids}, tf.constant(0, tf.int64)
        )
        self.run_(updated.save(basename).as_op())
        self.run_(restored.restore(basename).as_op())

        np.testing.assert_array_equal(self.run_(restored.sizes()), [300, 100, 0])
        want, got = self.run_(saved.lookup(ids), restored.lookup(ids))
        for key in ids:
          np.testing.assert_array_equal(got[key], want[key])
        names, counts = self.run_(*saved.feature_stat(basename))
        self.assertEqual(dict(zip(names, counts)), {b"a": 300, b"b": 100, b"empty": 0})

  def test_expired_rows_are_left_out(self):
    table = self.table("gpu", (2, _SGD), name="old", expire_days=2)
    day = 24 * 3600
    for id_, days in ((1, 100), (2, 101), (3, 103)):
      time = tf.constant(days * day, tf.int64)
      self.run_(table.assign([id_], [[1.0, 1.0]], req_time=time).as_op())
    basename = os.path.join(self.folder, "old")
    self.run_(table.save(basename).as_op())
    other = self.table("cpu", (2, _SGD), name="new")
    self.run_(other.restore(basename).as_op())

    self.assertEqual(self.run_(other.size()), 1)
    np.testing.assert_array_equal(self.run_(other.lookup([1, 2, 3])), [[0, 0], [0, 0], [1, 1]])

  def test_a_damaged_file_changes_nothing(self):
    table = self.table("gpu", (2, _SGD), name="damaged")
    ids, values = np.arange(100, dtype=np.int64), self.floats(100, 2)
    basename = os.path.join(self.folder, "damaged")
    self.run_(table.assign(ids, values).save(basename).as_op())
    (path,) = pathlib.Path(self.folder).glob("damaged-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    self.run_(table.assign([7], [[5.0, 6.0]]).as_op())

    with self.assertRaises(tf.errors.OpError):
      self.run_(table.restore(basename).as_op())

    self.assertEqual(self.run_(table.size()), 100)
    np.testing.assert_array_equal(self.run_(table.lookup([7, 8])), [[5, 6], values[8]])

  def test_rows_of_another_dimension_change_nothing(self):
    saved = self.table("cpu", (3, _SGD), name="three")
    basename = os.path.join(self.folder, "three")
    self.run_(saved.assign([1], [[1.0, 2.0, 3.0]]).save(basename).as_op())
    table = self.table("gpu", (2, _SGD), name="two")
    self.run_(table.assign([9], [[5.0, 6.0]]).as_op())

    with self.assertRaises(tf.errors.InvalidArgumentError):
      self.run_(table.restore(basename).as_op())

    np.testing.assert_array_equal(self.run_(table.lookup([9])), [[5, 6]])


class GroupTest(_TableTest):
  # As in the acceptance test: the first segment has Ftrl, the others Adagrad.
  _TABLES = {
    "uid": [(1, _FTRL), (4, _ADAGRAD)],
    "gid": [(1, _FTRL), (4, _ADAGRAD), (8, _ADAGRAD)],
    "cid": [(1, _FTRL), (4, _ADAGRAD), (8, _ADAGRAD)],
  }

  def test_two_rounds_are_those_of_main_memory(self):
    for shards in (1, 3):
      for accumulate in (False, True):
        with self.subTest(shards=shards, accumulate=accumulate):
          groups = {
            place: self.group(place, self._TABLES, f"round{shards}{accumulate}")
            for place in _PLACES
          }
          sizes = self.rng.integers(0, 40, 3 * shards).astype(np.int32)
          ids = self.rng.integers(-30, 30, sizes.sum())
          dims = np.tile([13, 13, 5], shards)  # cid, gid, uid
          for step in range(2):
            grads = self.floats(int((sizes * dims).sum()))
            results = {}
            for place, group in groups.items():
              embeddings, splits, id_offsets, offsets, indices = group.fused_lookup(
                tf.constant(ids, tf.int64), tf.constant(sizes), shards
              )
              with tf.control_dependencies([embeddings]):
                updated = group.fused_apply_gradient(
                  tf.constant(ids, tf.int64),
                  indices,
                  tf.constant(sizes),
                  tf.constant(grads),
                  id_offsets,
                  offsets,
                  tf.constant(step, tf.int64),
                  tf.constant(1000 + step, tf.int64),
                  shards,
                  enable_grad_accumulation=accumulate,
                )
              results[place] = self.run_(
                embeddings, splits, id_offsets, offsets, indices, updated.as_op()
              )
            np.testing.assert_allclose(results["gpu"][0], results["cpu"][0], atol=1e-6)
            for got, want in zip(results["gpu"][1:5], results["cpu"][1:5]):
              np.testing.assert_array_equal(got, want)
          got, want = self.run_(groups["gpu"].sizes(), groups["cpu"].sizes())
          np.testing.assert_array_equal(got, want)
          slot_to_id = {key: tf.range(-30, 30, dtype=tf.int64) for key in self._TABLES}
          got, want = self.run_(groups["gpu"].lookup(slot_to_id), groups["cpu"].lookup(slot_to_id))
          for key in got:
            np.testing.assert_allclose(got[key], want[key], atol=1e-6)

  def test_every_call_does_what_it_does_in_main_memory(self):
    ids = {"uid": [1, 2, 2, -5], "gid": [7], "cid": [3, 3]}
    values = {key: self.floats(len(ids[key]), dim)
              for key, dim in (("uid", 5), ("gid", 13), ("cid", 13))}  # fmt: skip
    pairs = {key: (ids[key], values[key]) for key in ids}
    results = {}
    for place in _PLACES:
      group = self.group(place, self._TABLES, "calls")
      updated = group.assign(pairs).assign_add(pairs)
      updated = updated.apply_gradients(pairs, tf.constant(3, tf.int64))
      first = self.run_(updated.lookup(ids))
      reset, status = group.reinitialize("uid", tf.constant([2, 77], tf.int64))
      with tf.control_dependencies([reset.handle]):
        results[place] = [*(first[key] for key in ids), *self.run_(status, group.sizes())]
      _, status = group.reinitialize("unknown", tf.constant([2], tf.int64))
      results[place].append(self.run_(status))
      results[place].append(self.run_(group.lookup({"uid": [1, 2, 77]}))["uid"])

    for got, want in zip(results["gpu"], results["cpu"]):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

  def test_filters_admit_what_they_admit_in_main_memory(self):
    thresholds = embedding_hash_table_pb2.SlotOccurrenceThresholdConfig(
      default_occurrence_threshold=2
    ).SerializeToString()
    sizes = {}
    for place in _PLACES:
      group = self.group(
        place,
        {"a": [(2, _SGD)]},
        "filtered",
        lambda place=place: hash_filter_ops.create_hash_filter(10000, 7, thresholds, place),
      )
      sizes[place] = []
      for _ in range(4):
        updated = group.apply_gradients(
          {"a": (np.arange(10), self.floats(10, 2))}, tf.constant(0, tf.int64)
        )
        self.run_(updated.as_op())
        sizes[place].append(int(self.run_(group.sizes())[0]))

    self.assertEqual(sizes["gpu"], sizes["cpu"])
    self.assertEqual(sizes["gpu"][0], 0)
    self.assertEqual(sizes["gpu"][-1], 10)


class RanksTest(tf.test.TestCase):
  """Synchronous training, with one rank."""

  _TABLES = {"a": [(1, _FTRL), (4, _ADAGRAD)], "b": [(3, _SGD)]}

  def test_a_rank_trains_as_with_tables_in_main_memory(self):
    gpu_placement.allow(self)
    hvd_lib.init()
    for native in (True, False):
      with self.subTest(native=native):
        rows = {place: self._train(place, native) for place in _PLACES}

        self.assertLen(rows["gpu"], 3)
        for got, want in zip(rows["gpu"], rows["cpu"]):
          for slot in self._TABLES:
            np.testing.assert_allclose(got[slot], want[slot], atol=1e-6)
        self.assertGreater(np.abs(rows["gpu"][-1]["a"]).max(), 0)

  def _train(self, place, native):
    """Returns what three steps have looked up."""
    rng = np.random.default_rng(5)
    ids = {"a": rng.integers(-20, 20, 60), "b": rng.integers(0, 9, 30)}
    dims = {"a": 5, "b": 3}
    grads = {slot: rng.standard_normal((len(ids[slot]), dims[slot])) for slot in ids}
    configs = {slot: _config(place, *segments) for slot, segments in self._TABLES.items()}
    device = "/device:GPU:0" if place == "gpu" else "/device:CPU:0"

    def make_tables(_):
      return multi_type_hash_table.MultiTypeHashTable(
        configs, lambda name, config: hash_table_ops.hash_table_from_config(config, None, name)
      )

    with tf.Graph().as_default(), tf.compat.v1.device(device_utils.default_device_fn):
      step = tf.compat.v1.train.get_or_create_global_step()
      if native:
        with tf.device(device):
          hash_filter = hash_filter_ops.create_dummy_hash_filter()
        table = distributed_ps_factory.create_in_worker_native_multi_hash_table(
          1, configs, hash_filter
        )
      else:
        table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(1, make_tables)
      tensors = {slot: tf.constant(ids[slot], tf.int64) for slot in ids}
      pack = distribution_ops.fused_reorder_by_indices([tensors["a"], tensors["b"]], 1, [5, 3])
      rows, bundle = table.lookup(tensors, {}, (*pack, None))
      with tf.control_dependencies(list(rows.values())):
        updates = {slot: tf.constant(grads[slot], tf.float32) + 0 * rows[slot] for slot in ids}
      updated = table.apply_gradients(updates, bundle, step, tf.constant(7, tf.int64)).as_op()
      lookups = [op for op in tf.compat.v1.get_default_graph().get_operations()
                 if "FusedLookup" in op.type]  # fmt: skip
      self.assertEqual({op.device for op in lookups}, {device})
      creator = tf.compat.v1.train.ChiefSessionCreator(config=_SESSION)
      with tf.compat.v1.train.MonitoredSession(creator) as session:
        return [session.run((rows, updated))[0] for _ in range(3)]


class _SgdTask(models.RankingTask):
  """The demo's ranking model, whose tables take plain steps."""

  def _slot_config(self, slot_id: int, name: str) -> feature.FeatureSlotConfig:
    config = super()._slot_config(slot_id, name)
    config.bias_optimizer = entry.SgdOptimizer(learning_rate=0.05)
    config.default_vec_optimizer = entry.SgdOptimizer(learning_rate=0.05)
    return config


class _Losses(tf.compat.v1.train.SessionRunHook):
  def __init__(self):
    self.values = []
    self.tables = set()

  def begin(self):
    graph = tf.compat.v1.get_default_graph()
    (self._loss,) = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[:1]
    self.tables = {
      op.device
      for op in graph.get_operations()
      # It reads files, of no table in particular.
      if "MultiHashTable" in op.type and op.type != "MonolithMultiHashTableFeatureStat"
    }

  def before_run(self, run_context):
    return tf.compat.v1.train.SessionRunArgs(self._loss)

  def after_run(self, run_context, run_values):
    self.values.append(float(run_values.results))


_PLAIN_SESSION_FIRST = """
import ctypes
import sys
import tensorflow as tf
from monolith.native_training import cpu_training
from monolith.native_training.demos import data, models

tf.compat.v1.disable_eager_execution()
with tf.device("/device:GPU:0"):
  product = tf.matmul(tf.ones([64, 64]), tf.ones([64, 64]))
with tf.compat.v1.Session() as session:
  session.run(product)
  free, total = ctypes.c_size_t(), ctypes.c_size_t()
  assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(free.value / total.value)

params = models.RankingTask.params()
params.name = "ranking"
params.data_dir = data.generate(sys.argv[1] + "/data", 5000, 100, 50).folder
params.show_progress = False
params.train.per_replica_batch_size = 256
params.train.use_gpu_emb_table = True
config = cpu_training.CpuTrainingConfig(
  model_name="ranking", enable_gpu_training=True, use_native_multi_hash_table=True
)
cpu_training.local_train_internal(params, config, sys.argv[1] + "/model", steps=5)
print(tf.train.latest_checkpoint(sys.argv[1] + "/model"))
"""


class SharedMemoryTest(tf.test.TestCase):
  def test_tables_train_after_a_plain_session_and_have_memory(self):
    folder = self.create_tempdir().full_path
    environment = {k: v for k, v in os.environ.items() if k != "TF_FORCE_GPU_ALLOW_GROWTH"}

    ended = subprocess.run(
      [sys.executable, "-c", _PLAIN_SESSION_FIRST, folder],
      capture_output=True,
      text=True,
      env=environment,
    )

    self.assertEqual(ended.returncode, 0, ended.stderr)
    free, checkpoint = ended.stdout.split()[:1] + ended.stdout.split()[-1:]
    self.assertGreater(float(free), 0.5)
    self.assertEqual(checkpoint, f"{folder}/model/model.ckpt-5")


class TrainingTest(tf.test.TestCase):
  def test_the_demo_trains_as_with_tables_in_main_memory(self):
    folder = self.create_tempdir().full_path
    info = data.generate(folder, 20000, 100, 50)
    for task in (models.RankingTask, _SgdTask):
      with self.subTest(task.__name__):
        losses, tables = {}, {}
        for place in _PLACES:
          with tf.compat.v1.test.mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="11"):
            losses[place], tables[place] = self._train(task, info, place)

        self.assertTrue(all("GPU" in device for device in tables["gpu"]), tables["gpu"])
        self.assertFalse(any("GPU" in device for device in tables["cpu"]), tables["cpu"])
        self.assertLen(losses["gpu"], 30)
        np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=1e-5, atol=1e-5)

  def _train(self, task, info, place):
    params = task.params()
    params.name = "ranking"
    params.data_dir = info.folder
    params.show_progress = False
    params.train.per_replica_batch_size = 256
    params.train.use_gpu_emb_table = place == "gpu"
    hook = _Losses()
    config = cpu_training.CpuTrainingConfig(
      model_name="ranking", enable_gpu_training=True, use_native_multi_hash_table=True
    )
    # Dense variables begin alike, however many ops a graph has before them.
    with tf.compat.v1.test.mock.patch.object(random_seed, "get_seed", lambda _: (1, 2)):
      cpu_training.local_train_internal(
        params, config, self.create_tempdir().full_path, steps=30, user_hooks=[hook]
      )
    return hook.values, hook.tables


if __name__ == "__main__":
  tf.test.main()
