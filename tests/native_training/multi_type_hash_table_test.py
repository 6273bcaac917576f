"""Groups of tables in one process, and slots that share a table."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  entry,
  hash_table_ops,
  learning_rate_functions,
  multi_type_hash_table,
  test_utils,
)

tf.compat.v1.disable_eager_execution()


def _factory(name, config):
  return hash_table_ops.hash_table_from_config(config, name_suffix=name)


def _config(dim, **kwargs):
  return test_utils.generate_test_hash_table_config(dim, **kwargs)


def _three_slots():
  return {"slot0": _config(1), "slot1": _config(2), "slot2": _config(2)}


def _step():
  return tf.constant(0, tf.int64)


class MultiTypeHashTableTest(tf.test.TestCase):
  def _table(self, configs=None):
    return multi_type_hash_table.MultiTypeHashTable(configs or _three_slots(), _factory)

  def test_basic(self):
    with self.session() as session:
      table = self._table({**_three_slots(), "unused": _config(2)})
      table = table.assign_add(
        {
          "slot0": ([0], [[1]]),
          "slot1": ([1], [[2, 2]]),
          "slot2": ([2, 3], [[4, 4], [8, 8]]),
        }
      )
      rows = session.run(table.lookup({"slot0": [0], "slot1": [1], "slot2": [2, 3]}))

    self.assertAllEqual(rows["slot0"], [[1]])
    self.assertAllEqual(rows["slot1"], [[2, 2]])
    self.assertAllEqual(rows["slot2"], [[4, 4], [8, 8]])
    self.assertNotIn("unused", rows)

  def test_apply_gradients(self):
    with self.session() as session:
      table = self._table()
      table = table.apply_gradients(
        {"slot0": ([0], 2.0), "slot1": ([1, 2], [[1, 3], [2, 4]])}, _step()
      )
      rows = session.run(table.lookup({"slot0": [0], "slot1": [1, 2]}))

    self.assertAllEqual(rows["slot0"], [[-2]])
    self.assertAllEqual(rows["slot1"], [[-1, -3], [-2, -4]])

  def test_apply_gradients_with_learning_rate_function(self):
    with self.session() as session:
      rate = learning_rate_functions.PolynomialDecay(0.1, 10, 1.1)
      step = tf.compat.v1.train.get_or_create_global_step()
      table = self._table({"slot0": _config(1, learning_rate=rate),
                           "slot1": _config(2, learning_rate=rate)})  # fmt: skip
      table = table.apply_gradients(
        {"slot0": ([0], 2.0), "slot1": ([1, 2], [[1, 3], [2, 4]])}, step
      )
      session.run(tf.compat.v1.global_variables_initializer())
      rows = session.run(table.lookup({"slot0": [0], "slot1": [1, 2]}))

    self.assertAllClose(rows["slot0"], [[-0.2]])
    self.assertAllClose(rows["slot1"], [[-0.1, -0.3], [-0.2, -0.4]])

  def test_apply_gradients_with_duplicates(self):
    with self.session() as session:
      table = self._table()
      table = table.apply_gradients({"slot1": ([2, 2], [[1.1, 3.1], [2.2, 4.2]])}, _step())
      rows = session.run(table.lookup({"slot1": [1, 2]}))

    self.assertAllClose(rows["slot1"], [[0, 0], [-3.3, -7.3]])

  def test_fused_lookup(self):
    with self.session() as session:
      table = self._table().assign_add(
        {"slot0": ([0], [[1]]), "slot1": ([1], [[2, 2]]), "slot2": ([2, 3], [[4, 4], [8, 8]])}
      )
      result = session.run(table.fused_lookup([0, 1, 2, 3], [1, 1, 2], 1))

    self.assertAllEqual(result[0], [1, 2, 2, 4, 4, 8, 8])
    self.assertAllEqual(result[1], [7])
    self.assertAllEqual(result[2], [0, 1, 2, 4])
    self.assertAllEqual(result[3], [0, 1, 3, 7])

  def test_fused_lookup_wants_tables_of_this_process(self):
    with tf.Graph().as_default():
      table = multi_type_hash_table.MultiTypeHashTable(
        {"slot0": _config(1)},
        lambda name, config: mock.create_autospec(hash_table_ops.BaseHashTable, instance=True),
      )

      with self.assertRaisesRegex(TypeError, "the table of slot slot0 is a .*, want a HashTable"):
        table.fused_lookup([0], [1], 1)

  def test_fused_lookup_multi_shards(self):
    with self.session() as session:
      table = self._table().assign_add(
        {"slot0": ([0], [[1]]), "slot1": ([1], [[2, 2]]), "slot2": ([2, 3], [[4, 4], [8, 8]])}
      )
      result = session.run(table.fused_lookup([0, 2, 1, 3], [1, 0, 1, 0, 1, 1], 2))
      empty = session.run(table.fused_lookup([], [0] * 6, 2))

    self.assertAllEqual(result[0], [1, 4, 4, 2, 2, 8, 8])
    self.assertAllEqual(result[1], [3, 4])
    self.assertAllEqual(result[2], [0, 1, 1, 2, 2, 3, 4])
    self.assertAllEqual(result[3], [0, 1, 1, 3, 3, 5, 7])
    self.assertAllEqual(empty[0], [])
    self.assertAllEqual(empty[1], [0, 0])

  def test_fused_apply_gradient(self):
    with self.session() as session:
      table = self._table({"slot0": _config(1), "slot1": _config(2)})
      sizes = [1, 2]
      _, _, id_offsets, emb_offsets, indices = table.fused_lookup([0, 1, 2], sizes, 1)
      table = table.fused_apply_gradient(
        [0, 1, 2], indices, sizes, [2.0, 1, 3, 2, 4], id_offsets, emb_offsets, _step(), None, 1
      )
      result, rows = session.run(
        [table.fused_lookup([0, 1, 2], sizes, 1), table.lookup({"slot0": [0]})]
      )

    self.assertAllEqual(result[0], [-2, -1, -3, -2, -4])
    self.assertAllEqual(result[1], [5])
    self.assertAllEqual(result[2], [0, 1, 3])
    self.assertAllEqual(result[3], [0, 1, 5])
    self.assertAllEqual(rows["slot0"], [[-2]])

  def test_fused_apply_gradient_missing_tables(self):
    with self.session() as session:
      table = self._table({"slot0": _config(1), "slot1": _config(1)})
      sizes = [1, 0, 1, 0]
      _, _, id_offsets, emb_offsets, indices = table.fused_lookup([1, 1], sizes, 2)
      table = table.fused_apply_gradient(
        [1, 1], indices, sizes, [1.0, 2], id_offsets, emb_offsets, _step(), None, 2
      )
      result = session.run(table.fused_lookup([1, 1], sizes, 2))

    self.assertAllEqual(result[0], [-3, -3])
    self.assertAllEqual(result[1], [1, 1])
    self.assertAllEqual(result[2], [0, 1, 1, 2, 2])
    self.assertAllEqual(result[3], [0, 1, 1, 2, 2])

  def test_names_dims_and_what_is_not_there(self):
    with tf.Graph().as_default():
      order = []

      def factory(name, config):
        order.append(name)
        return _factory(name, config)

      table = multi_type_hash_table.MultiTypeHashTable(
        {"z": _config(3), "a": _config(1), "m": _config(2)}, factory
      )
      self.assertEqual(order, ["a", "m", "z"])
      self.assertEqual(table.get_table_dim_sizes(), [1, 2, 3])
      self.assertEqual(table.as_op().name, "mtht_ao/done")
      with self.assertRaisesRegex(
        NotImplementedError, "MultiTypeHashTable dost not support reinitialize!"
      ):
        table.reinitialize("a", [1])
      with self.assertRaises(KeyError):
        table.lookup({"unknown": [1]})


class MergedMultiTypeHashTableTest(tf.test.TestCase, parameterized.TestCase):
  def _table(self, configs):
    return multi_type_hash_table.MergedMultiTypeHashTable(
      configs, lambda merged: multi_type_hash_table.MultiTypeHashTable(merged, _factory)
    )

  def test_basic(self):
    with self.session() as session:
      table = self._table(_three_slots())
      table = table.assign_add(
        {"slot0": ([1], [[1]]), "slot1": ([1], [[2, 2]]), "slot2": ([1], [[4, 4]])}
      )
      ids = {slot: tf.constant([1], tf.int64) for slot in ("slot2", "slot0", "slot1")}
      before = table.lookup(ids)
      before_rows = session.run(before)
      table = table.apply_gradients(
        {"slot0": ([1], [[-1]]), "slot1": ([1], [[1, 1]]), "slot2": ([1], [[1, 1]])}, _step()
      )
      session.run(table.as_op())

    self.assertEqual(list(before), list(ids))
    self.assertAllEqual(before_rows["slot1"], [[6, 6]])
    self.assertAllEqual(before_rows["slot2"], [[6, 6]])

  def test_update(self):
    with self.session() as session:
      table = self._table(_three_slots())
      table = table.assign({"slot0": ([1], [[1]]), "slot1": ([1], [[6, 6]])})
      table = table.apply_gradients(
        {"slot0": ([1], [[-1]]), "slot1": ([1], [[1, 1]]), "slot2": ([1], [[1, 1]])}, _step()
      )
      rows = session.run(table.lookup({"slot0": [1], "slot1": [1], "slot2": [1]}))

    self.assertAllEqual(rows["slot0"], [[2]])
    self.assertAllEqual(rows["slot1"], [[4, 4]])
    self.assertAllEqual(rows["slot2"], [[4, 4]])

  def test_pairs_may_be_sets(self):
    with self.session() as session:
      table = self._table(_three_slots())
      pair = {tf.constant([1], tf.int64), tf.constant([[1.0, 1.0]])}
      table = table.assign_add({"slot1": pair}).apply_gradients({"slot1": pair}, _step())
      rows = session.run(table.lookup({"slot1": [1]}))

    self.assertAllEqual(rows["slot1"], [[0, 0]])

  def test_sizes_of_ids_that_were_reordered_beforehand(self):
    inner = mock.MagicMock()
    table = multi_type_hash_table.MergedMultiTypeHashTable(
      {"a": _config(1), "b": _config(1)}, lambda merged: inner
    )
    (merged,) = table._merging.merged_to_config
    inner.lookup.return_value = ({merged: tf.constant([[1.0], [2.0], [3.0]])}, {})
    pack = ({merged: tf.constant([2, 1])}, "reordered")

    rows = table.lookup({"a": None, "b": None}, early_reorder_indicies_res_pack=pack)

    with self.session() as session:
      rows = session.run(rows)
    self.assertAllEqual(rows["a"], [[1], [2]])
    self.assertAllEqual(rows["b"], [[3]])

  def test_one_value_may_be_a_scalar(self):
    with self.session() as session:
      table = self._table({"a": _config(1), "b": _config(1), "c": _config(2)})
      table = table.assign({"a": ([1], 3.0), "c": ([1], [5.0, 6.0])})
      table = table.apply_gradients({"a": ([1], -1.0), "b": ([2], tf.constant(2.0))}, _step())
      rows = session.run(table.lookup({"a": [1], "b": [2], "c": [1]}))

    self.assertAllEqual(rows["a"], [[4]])
    self.assertAllEqual(rows["b"], [[-2]])
    self.assertAllEqual(rows["c"], [[5, 6]])

  def test_names(self):
    factory = mock.MagicMock()
    table = multi_type_hash_table.MergedMultiTypeHashTable(
      {"slot1": _config(2), "slot0": _config(2), "fc_slot_0": _config(1)}, factory
    )
    (merged,) = factory.call_args[0]

    self.assertEqual(
      table.slot_mapping,
      {
        "slot0": "e21904dd414d1780e5fc904866dc69c2",
        "slot1": "e21904dd414d1780e5fc904866dc69c2",
        "fc_slot_0": multi_type_hash_table.merged_name(["fc_slot_0"]),
      },
    )
    self.assertEqual(
      merged[table.slot_mapping["fc_slot_0"]].extra_restore_names,
      ["cde3ba88ba62b682f84241b273f8100c"],
    )
    self.assertEmpty(merged["e21904dd414d1780e5fc904866dc69c2"].extra_restore_names)

  def test_restore_names_do_not_accumulate(self):
    config = _config(1)
    for _ in range(3):
      factory = mock.MagicMock()
      multi_type_hash_table.MergedMultiTypeHashTable({"fc_slot_0": config}, factory)
      (merged,) = factory.call_args[0]
      self.assertLen(next(iter(merged.values())).extra_restore_names, 1)
    self.assertEmpty(config.extra_restore_names)

  def test_different_learning_rates_do_not_merge(self):
    factory = mock.MagicMock()
    table = multi_type_hash_table.MergedMultiTypeHashTable(
      {"a": _config(1, learning_rate=1.0), "b": _config(1, learning_rate=0.5)}, factory
    )
    self.assertNotEqual(table.slot_mapping["a"], table.slot_mapping["b"])

  def test_ragged_lengths_and_empty_slots(self):
    with self.session() as session:
      table = self._table({name: _config(1) for name in "abc"})
      table = table.assign({"a": ([1, 2, 3], [[1], [2], [3]])})
      rows = session.run(
        table.lookup({"c": tf.constant([], tf.int64), "a": [3, 3], "b": [2, 9, 1]})
      )
    self.assertAllEqual(rows["a"], [[3], [3]])
    self.assertAllEqual(rows["b"], [[2], [0], [1]])
    self.assertAllEqual(rows["c"], np.zeros([0, 1]))

  def test_skip_merge_id(self):
    inner = mock.MagicMock()
    table = multi_type_hash_table.MergedMultiTypeHashTable(
      {"a": _config(1), "b": _config(1)}, lambda merged: inner
    )
    table.apply_gradients(
      {"a": tf.ones([2, 1]), "b": tf.ones([1, 1])}, _step(), skip_merge_id=True, extra=5
    )
    (grads, _), kwargs = inner.apply_gradients.call_args
    self.assertEqual(kwargs, {"extra": 5})
    (grad,) = grads.values()
    self.assertEqual(grad.shape.as_list(), [3, 1])

  def test_reinitialize(self):
    table = multi_type_hash_table.MergedMultiTypeHashTable({"a": _config(1)}, mock.MagicMock())
    with self.assertRaisesRegex(
      NotImplementedError, "MergedMultiTypeHashTable dost not support reinitialize!"
    ):
      table.reinitialize("a", [1])

  def test_dims(self):
    table = multi_type_hash_table.MergedMultiTypeHashTable(_three_slots(), mock.MagicMock())
    names = sorted(set(table.slot_mapping.values()))
    expected = [1 if name == table.slot_mapping["slot0"] else 2 for name in names]
    self.assertEqual(table.get_table_dim_sizes(), expected)

  def test_queue_hooks_of_nested_tables(self):
    with tf.Graph().as_default():
      inner = multi_type_hash_table.MultiTypeHashTable({"a": _config(1)}, _factory)
      outer = multi_type_hash_table.MergedMultiTypeHashTable({"a": _config(1)}, lambda _: inner)
      inner.add_queue_hook("inner")
      outer.add_queue_hook("outer")
      self.assertEqual(outer.get_queue_hooks(), ["outer", "inner"])

  def test_config_instance_text_is_the_merge_key(self):
    self.assertEqual(str(_config(2)), str(_config(2)))
    self.assertNotEqual(str(_config(2)), str(_config(3)))
    self.assertIsInstance(_config(2), entry.HashTableConfigInstance)


if __name__ == "__main__":
  tf.test.main()
