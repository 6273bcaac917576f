"""Tests of `monolith.keras.table`, `ids` and `settings`: tables in eager code."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import monolith
from monolith.keras import ids as id_types
from monolith.keras import settings
from monolith.native_training import entry
from monolith.native_training.runtime.ops import gen_monolith_ops


def sgd_table(dim: int = 2, **kwargs) -> monolith.HashTable:
  return monolith.HashTable(dim, "sgd", "zeros", learning_rate=1.0, **kwargs)


class HashTableTest(tf.test.TestCase):
  def test_update_creates_rows_and_makes_one_step_per_id(self):
    table = sgd_table()

    table.update([7, 9, 7], [[1, 2], [3, 4], [10, 20]])

    self.assertAllEqual(table.lookup([7, 9, 11]), [[-11, -22], [-3, -4], [0, 0]])
    self.assertLen(table, 2)
    self.assertAllEqual(table.contains([[7, 11]]), [[True, False]])
    self.assertEqual(repr(table), "HashTable(dim=2, optimizer='sgd') with 2 rows")

  def test_one_id_is_in_a_table_or_not(self):
    table = sgd_table()
    table.assign([7], [[1, 1]])
    table.assign(["tea"], [[1, 1]])

    self.assertIn(7, table)
    self.assertIn(tf.constant(7), table)
    self.assertIn("tea", table)
    self.assertNotIn(8, table)
    self.assertNotIn("coffee", table)
    with self.assertRaisesRegex(TypeError, "several ids.*contains"):
      [7, 8] in table  # noqa: B015
    with self.assertRaisesRegex(TypeError, "ids have dtype float64"):
      7.5 in table  # noqa: B015

  def test_erased_ids_begin_anew(self):
    table = monolith.HashTable(1, "adagrad", "zeros", learning_rate=1.0)
    fresh = monolith.HashTable(1, "adagrad", "zeros", learning_rate=1.0)
    table.update([7, 8, 9], [[1.0], [1.0], [1.0]])

    table.erase([[7, 9], [100, 7]])
    table.erase([])

    self.assertAllEqual(table.items()[0], [8])
    self.assertAllEqual(table.lookup([7]), [[0]])
    for each in (table, fresh):
      each.update([7], [[2.0]])
    self.assertAllEqual(table.lookup([7]), fresh.lookup([7]))
    with self.assertRaisesRegex(TypeError, "ids have dtype float64"):
      table.erase([1.5])

    @tf.function
    def forget(ids):
      before = table.size()
      table.erase(ids)
      return before, table.size()

    self.assertAllEqual(forget(tf.constant([7, 8], tf.int64)), [2, 0])

  def test_lookup_creates_nothing_and_keeps_the_shape_of_its_ids(self):
    table = sgd_table(3)

    self.assertAllEqual(table.lookup([[1, 2], [3, 4]]), np.zeros([2, 2, 3]))
    self.assertAllEqual(table.lookup([]), np.zeros([0, 3]))
    self.assertEmpty(table)
    self.assertTrue(table)

  def test_items_are_numpy_arrays_in_order_of_ids(self):
    table = sgd_table()
    table.assign([5, -3, 2**62], [[1, 2], [3, 4], [5, 6]])

    ids, rows = table.items()

    self.assertIsInstance(ids, np.ndarray)
    self.assertAllEqual(ids, [-3, 5, 2**62])
    self.assertAllEqual(rows, [[3, 4], [1, 2], [5, 6]])
    self.assertEqual([part.shape for part in sgd_table(4).items()], [(0,), (0, 4)])

  def test_strings_have_ids_that_never_change(self):
    table = sgd_table()
    table.assign(["tea", "coffee"], [[1, 2], [3, 4]])

    self.assertAllEqual(table.lookup(np.array(["coffee", "milk"])), [[3, 4], [0, 0]])
    # These are FarmHash's Fingerprint64; a change would lose the rows of every saved table.
    self.assertAllEqual(monolith.keras.hash_strings(["tea", ""]), TEA_AND_EMPTY)

  def test_save_and_load_keep_rows_and_optimizer_state(self):
    path = os.path.join(self.get_temp_dir(), "folder", "table")
    first, second = (monolith.HashTable(2, "adam", "zeros", learning_rate=0.1) for _ in range(2))
    first.update([1, 2], np.ones([2, 2]))
    first.save(path)
    second.load(path)

    first.update([1, 2], np.ones([2, 2]))
    second.update([1, 2], np.ones([2, 2]))

    self.assertAllEqual(first.items()[1], second.items()[1])

  def test_a_table_of_defaults_goes_on_as_if_it_had_not_been_saved(self):
    table, other = monolith.HashTable(2), monolith.HashTable(2)
    gradients = np.random.default_rng(0).normal(size=[6, 2]).astype(np.float32)
    for gradient in gradients[:3]:
      table.update([7, -7], [gradient, -gradient])
    path = os.path.join(self.get_temp_dir(), "checkpoint")
    tf.train.Checkpoint(table=table).write(path)

    tf.train.Checkpoint(table=other).read(path).assert_consumed()
    for gradient in gradients[3:]:
      for one in (table, other):
        one.update([7, -7], [gradient, -gradient])

    self.assertAllEqual(other.lookup([7, -7]), table.lookup([7, -7]))

  def test_rows_of_defaults_that_are_loaded_keep_their_moments(self):
    path = os.path.join(self.get_temp_dir(), "table")
    gradients = np.random.default_rng(0).normal(size=[6, 2]).astype(np.float32)

    def load(table: monolith.HashTable) -> None:
      table.load(path)

    def load_group(table: monolith.HashTable) -> None:
      monolith.keras.save_group({"one": first}, path + "_group")
      monolith.keras.load_group({"one": table}, path + "_group")

    def train(table: monolith.HashTable, update: Callable[..., Any], some: np.ndarray) -> None:
      for gradient in some:
        update(tf.constant([7, -7], tf.int64), tf.stack([gradient, -gradient]))

    for load_into in (load, load_group):
      for wrap in (lambda update: update, tf.function):
        for is_traced_before in (False, True):
          first, second = monolith.HashTable(2), monolith.HashTable(2)
          update = wrap(second.update)
          if is_traced_before:
            train(second, update, gradients[:1])
          train(first, first.update, gradients[:3])
          first.save(path)

          load_into(second)
          train(first, first.update, gradients[3:])
          train(second, update, gradients[3:])

          self.assertAllEqual(first.items()[1], second.items()[1])
          self.assertEqual(second.steps, 6)

  def test_loads_leave_steps_alone_where_rows_count_their_own(self):
    path = os.path.join(self.get_temp_dir(), "table")
    first, second = (monolith.HashTable(2, "adam") for _ in range(2))
    for _ in range(3):
      first.update([1], [[1, 1]])
    first.save(path)

    second.load(path)
    second.update([1], [[1, 1]])

    self.assertEqual(second.steps, 1)

  def test_tables_are_not_copied(self):
    table = monolith.HashTable(2)
    table.assign([1], [[1, 2]])

    for copy_it in (copy.copy, copy.deepcopy, pickle.dumps):
      with self.assertRaisesRegex(TypeError, "save it, and load it into another"):
        copy_it(table)
    gc.collect()

    self.assertAllEqual(table.lookup([1]), [[1, 2]])

  def test_another_optimizer_takes_the_vectors_alone(self):
    path = os.path.join(self.get_temp_dir(), "table")
    first = sgd_table()
    first.update([1], [[1, 1]])
    first.save(path)
    second = monolith.HashTable(2, "adam", "zeros", learning_rate=0.1)
    fresh = monolith.HashTable(2, "adam", "zeros", learning_rate=0.1)

    second.load(path)
    for table in (second, fresh):
      table.update([1], [[1, 1]])

    self.assertAllClose(second.lookup([1]) + 1, fresh.lookup([1]))

  def test_tables_of_another_shape_or_no_files_change_nothing(self):
    path = os.path.join(self.get_temp_dir(), "table")
    sgd_table(3).save(path)
    with_rows = sgd_table(3)
    with_rows.update([1], [[1, 1, 1]])
    with_rows.save(path)
    table = sgd_table(2)
    table.update([5], [[1, 1]])

    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "3 values.*the table has dim 2"):
      table.load(path)
    with self.assertRaisesRegex(tf.errors.OpError, "nowhere"):
      table.load(path + "_nowhere")
    self.assertAllEqual(table.items()[0], [5])

  def test_gradients_name_their_ids(self):
    table = sgd_table()
    table.assign([1, 2], [[1, 1], [2, 2]])
    with tf.GradientTape(persistent=True) as tape:
      square = tf.reduce_sum(table.lookup([1, 2]) ** 2)
      plain = tf.reduce_sum(table.lookup([1]))
      total = square + plain
      unrelated = tf.constant(1.0) * 2

    both = tape.gradient(total, table.rows)
    again = tape.gradient(square, table.rows)

    dense = dict.fromkeys([1, 2], 0)
    for key, value in zip(both.indices.numpy(), both.values.numpy()):
      dense[key] += value
    self.assertAllEqual([dense[1], dense[2]], [[3, 3], [4, 4]])
    self.assertAllEqual(again.indices, [1, 2])
    self.assertAllEqual(again.values, [[2, 2], [4, 4]])
    self.assertIsNone(tape.gradient(unrelated, table.rows))
    # Computing a gradient, however often, changes nothing.
    self.assertAllEqual(table.lookup([1, 2]), [[1, 1], [2, 2]])

  def test_functions_see_writes_in_order(self):
    table = sgd_table()

    @tf.function
    def step(ids):
      before = table.lookup(ids)
      table.update(ids, tf.ones([1, 2]))
      return before, table.lookup(ids), table.size()

    inner = tf.function(table.lookup)
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(inner(tf.constant([3], tf.int64)))
    ids = tf.constant([3], tf.int64)

    self.assertAllEqual(tape.gradient(loss, table.rows).indices, [3])
    for i in range(3):
      before, after, size = step(ids)
      self.assertAllEqual(before, [[-i, -i]])
      self.assertAllEqual(after, [[-i - 1, -i - 1]])
      self.assertEqual(size, 1)

  def test_learning_rates_change_and_follow_schedules(self):
    table = sgd_table(1)
    halving = monolith.HashTable(1, "sgd", "zeros", learning_rate=lambda step: 0.5 ** float(step))

    for i in range(3):
      table.learning_rate.assign(10.0**i)
      table.update([1], [[1]])
      halving.update([1], [[1]])

    self.assertAllEqual(table.lookup([1]), [[-111]])
    self.assertAllEqual(halving.lookup([1]), [[-1.75]])

  def test_ids_are_admitted_after_so_many_writes(self):
    table = sgd_table(1, admit_after=2, admit_capacity=1000)

    sizes = []
    for _ in range(4):
      table.lookup([1])
      table.update([1], [[1]])
      sizes.append(len(table))

    self.assertEqual(sizes, [0, 0, 1, 1])

  def test_counts_begin_again_with_rows_that_were_saved_without_them(self):
    path = os.path.join(self.get_temp_dir(), "table")
    monolith.HashTable(1, "sgd").save(path)
    table = monolith.HashTable(1, "sgd", admit_after=2)
    table.update([7], [[1.0]])
    table.update([7], [[1.0]])

    table.load(path)

    sizes = []
    for _ in range(3):
      table.update([7], [[1.0]])
      sizes.append(len(table))
    self.assertEqual(sizes, [0, 0, 1])

  def test_counts_of_ids_that_have_no_row_yet_are_saved(self):
    path = os.path.join(self.get_temp_dir(), "table")
    first, second = (sgd_table(1, admit_after=2, admit_capacity=1000) for _ in range(2))
    for _ in range(2):
      first.update([1], [[1]])
    first.save(path)
    second.load(path)

    second.update([1], [[1]])

    self.assertLen(second, 1)

  def test_saves_leave_expired_rows_out(self):
    path = os.path.join(self.get_temp_dir(), "table")
    table, loaded = sgd_table(1, expire_after="1d"), sgd_table(1)
    table.update([1], [[1]])
    day = 24 * 3600
    gen_monolith_ops.monolith_hash_table_assign(
      table.resource_handle,
      tf.constant([2], tf.int64),
      tf.ones([1, 1]),
      tf.cast(tf.timestamp(), tf.int64) - 2 * day,
    )

    table.save(path)
    loaded.load(path)

    self.assertAllEqual(loaded.items()[0], [1])

  def test_memory_goes_with_the_object(self):
    table = sgd_table(admit_after=1, admit_capacity=1000)
    handle = table.resource_handle

    del table
    gc.collect()

    with self.assertRaises(tf.errors.NotFoundError):
      gen_monolith_ops.monolith_hash_table_size(handle)

  def test_threads_may_share_a_table(self):
    table = sgd_table(1)

    def train() -> None:
      for _ in range(50):
        table.update([1], [[-1.0]])
        table.lookup([1])

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertAllEqual(table.lookup([1]), [[200]])


class BadInputTest(tf.test.TestCase):
  def test_ids(self):
    table = sgd_table()
    for bad, error, message in (
      ([1.5], TypeError, "ids have dtype float64, want integers or strings.*dtype=tf.int64"),
      ([True], TypeError, "ids have dtype bool"),
      ([2**63], ValueError, "id 9223372036854775808 does not fit into int64"),
      ([-1, 2**64], ValueError, "id 18446744073709551616 does not fit"),
      (np.array([[1, 2], [3]], object), ValueError, "of several lengths: give tf.ragged.constant"),
      (np.array([1, 2**64], object), ValueError, "id 18446744073709551616 does not fit"),
      (np.array(["tea", None], object), TypeError, "objects of NoneType, str, want integers or"),
      (np.array([1], np.uint64), TypeError, r"uint64.*tf.bitcast\(ids, tf.int64\)"),
      (tf.ragged.constant([[1], []]), TypeError, "RaggedTensor, want a dense tensor"),
    ):
      with self.subTest(str(bad)), self.assertRaisesRegex(error, message):
        table.lookup(bad)

  def test_every_small_integer_type_is_an_id(self):
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32):
      self.assertEqual(id_types.as_ids(np.array([1], dtype)).dtype, tf.int64)

  def test_columns_of_objects_are_integers_or_strings(self):
    self.assertAllEqual(id_types.as_ids(np.array([2**62, -3], object)), [2**62, -3])
    texts = id_types.as_ids(np.array(["tea", b"milk"], object))
    self.assertAllEqual(texts, id_types.hash_strings(["tea", "milk"]))

  def test_gradients(self):
    table = sgd_table()
    with self.assertRaisesRegex(ValueError, r"gradients has shape \(3,\), want 2 floats for each"):
      table.update([1, 2], [1.0, 2.0, 3.0])
    with self.assertRaisesRegex(ValueError, r"values has shape \(1, 3\)"):
      table.assign([1], [[1.0, 2.0, 3.0]])
    self.assertEmpty(table)

  def test_arguments(self):
    for arguments, error, message in (
      ({"dim": 0}, ValueError, "dim is 0, want a whole number of at least 1"),
      ({"dim": 2.0}, ValueError, "dim is 2.0"),
      ({"optimizer": "adamw"}, ValueError, "optimizer is 'adamw', want one of .*'adagrad'"),
      ({"optimizer": tf.keras.optimizers.SGD()}, TypeError, "want one of .*monolith.entry"),
      ({"initializer": "ones_like"}, ValueError, "initializer is 'ones_like'"),
      ({"expire_after": "12h"}, ValueError, "expire_after is '12h', want whole days"),
      ({"expire_after": 0}, ValueError, "expire_after is 0"),
      ({"expire_after": 1.5}, TypeError, "expire_after is 1.5"),
      ({"admit_after": 16}, ValueError, "admit_after is 16, want a whole number from 0 to 15"),
      ({"admit_capacity": 0}, ValueError, "admit_capacity is 0"),
    ):
      with self.subTest(str(arguments)), self.assertRaisesRegex(error, message):
        monolith.HashTable(**{"dim": 2, **arguments})

  def test_what_is_not_finite_is_not_written(self):
    def write_bad(table):
      for write in (table.update, table.assign):
        write([5, 6, 7], [[np.nan, 1.0], [1.0, -np.inf], [1.0, 1.0]])

    for policy, message in (
      ("stop", "Table 'users': gradients with NaN or infinity .* those of 2 rows: ids 5, 6"),
      ("what", "MONOLITH_BAD_GRADIENTS is 'what', want stop, skip or ignore"),
    ):
      table = sgd_table(name="users")
      with (
        mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS=policy),
        self.assertRaisesRegex(tf.errors.InvalidArgumentError, message),
      ):
        write_bad(table)
    table = sgd_table(name="users")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Table 'users': values with NaN"):
      table.assign([5], [[np.nan, 1.0]])
    self.assertEmpty(table)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="skip"):
      write_bad(table)
    self.assertAllEqual(table.items()[0], [7])
    self.assertEqual(table.stats()[4], 5)
    with mock.patch.dict(os.environ, MONOLITH_BAD_GRADIENTS="ignore"):
      write_bad(table)
    self.assertLen(table, 3)
    self.assertTrue(np.isnan(table.lookup([5])).any())

  def test_strategies_that_would_copy_a_table(self):
    with (
      tf.distribute.MirroredStrategy(["cpu:0"]).scope(),
      self.assertRaisesRegex(NotImplementedError, "do not work under tf.distribute.Mirrored"),
    ):
      sgd_table()
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
      sgd_table().update([1], [[1.0, 1.0]])

  def test_graph_mode(self):
    with (
      tf.Graph().as_default(),
      self.assertRaisesRegex(RuntimeError, "needs eager execution.*hash_table_from_config"),
    ):
      sgd_table()

  def test_ops_refuse_what_does_not_fit(self):
    table = sgd_table()
    ids, rates = tf.constant([1], tf.int64), tf.ones([1])
    time = step = tf.constant(0, tf.int64)

    def optimize(handles, grads, rates):
      gen_monolith_ops.monolith_hash_table_optimize_list(
        handles, [ids] * len(handles), grads, rates, time, step
      )

    handle = table.resource_handle
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "a table twice"):
      optimize([handle] * 2, [tf.ones([1, 2])] * 2, [rates] * 2)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"grads\[0\] has 3 elements"):
      optimize([handle], [tf.ones([3])], [rates])
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"learning_rates\[0\]"):
      optimize([handle], [tf.ones([2])], [tf.ones([2])])
    for dims in ([3], [2, 2], [-1]):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "dim"):
        gen_monolith_ops.monolith_hash_table_lookup_list([handle], [ids], dims=dims)
    self.assertEmpty(table)


class SettingsTest(tf.test.TestCase):
  def test_lifetimes(self):
    for value in (14, "14d", "2w", datetime.timedelta(weeks=2)):
      self.assertEqual(settings.days(value), 14)
    self.assertIsNone(settings.days(None))

  def test_configurations_survive_json(self):
    wrapped = entry.StochasticRoundingFloat16OptimizerWrapper(entry.AdamOptimizer(0.5))
    for value in (wrapped, entry.FtrlOptimizer(l1_regularization=1.0), settings.initializer(0.25)):
      again = settings.deserialize(settings.serialize(value))
      self.assertEqual(again.as_proto(), value.as_proto())
    with self.assertRaisesRegex(ValueError, "'CombineAsSegment'"):
      settings.deserialize({"class_name": "CombineAsSegment", "config": {}})

  def test_rates_come_from_the_optimizer_or_its_default(self):
    self.assertAllClose(settings.learning_rate(entry.AdagradOptimizer(0.25)), 0.25)
    self.assertAllClose(settings.learning_rate(entry.SgdOptimizer()), 0.01)


TEA_AND_EMPTY = [2146229448339500004, 1936946117179621456]

if __name__ == "__main__":
  tf.test.main()
