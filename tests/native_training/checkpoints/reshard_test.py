"""Rows go into the right files when the number of servers changes; tests/reliability restores."""

import os

import tensorflow as tf
from absl.testing import absltest

from monolith.native_training.checkpoints import reshard
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2 as pb
from tests import written_checkpoint


class ReshardTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(os.environ["TEST_TMPDIR"], "model")

  def _write(self, **content):
    return written_checkpoint.write_checkpoint(self._dir, **content)

  def test_rows_of_a_table_go_where_their_id_belongs(self):
    # Floor modulo: a negative id has the same home as everywhere else.
    old = self._write(tables={"user_0": [0, 4, -2], "user_1": [1, 3, -1]})

    new = reshard.reshard_checkpoint(old, 2, 3)

    self.assertEqual(
      written_checkpoint.read_ids(new), {"user_0": [0, 3], "user_1": [4, -2, 1], "user_2": [-1]}
    )

  def test_without_servers_names_have_no_index(self):
    old = self._write(
      tables={"user_0": [2], "user_1": [1]},
      groups={"MonolithMultiHashTable_0": {"a": [4]}, "MonolithMultiHashTable_1": {"a": [5]}},
      filters={"hash_filter_0": b"even", "hash_filter_1": b"odd"},
    )

    new = reshard.reshard_checkpoint(old, 2, 0)

    self.assertEqual(
      written_checkpoint.read_ids(new), {"user": [2, 1], "MonolithMultiHashTable_": [4, 5]}
    )
    self.assertIn("hash_filter_0-00000-of-00001", os.listdir(new + ".assets"))
    self.assertNotIn("hash_filter_1-00000-of-00001", os.listdir(new + ".assets"))

  def test_tables_of_a_group_are_counted_on_each_server(self):
    old = self._write(groups={"MonolithMultiHashTable_": {"a": [1, 2, 3], "b": [-1]}})

    new = reshard.reshard_checkpoint(old, 0, 2)

    self.assertEqual(
      written_checkpoint.read_ids(new),
      {"MonolithMultiHashTable_0": [2], "MonolithMultiHashTable_1": [1, 3, -1]},
    )
    # A table without rows on a server is there all the same.
    counts = [
      written_checkpoint.read_counts(new, f"MonolithMultiHashTable_{server}") for server in range(2)
    ]
    self.assertEqual(counts, [{"a": 1, "b": 0}, {"a": 2, "b": 1}])

  def test_a_filter_is_taken_over_from_the_server_that_held_most_ids(self):
    old = self._write(filters={"hash_filter_0": b"even", "hash_filter_1": b"odd"})

    new = reshard.reshard_checkpoint(old, 2, 4)

    contents = [
      next(iter(tf.compat.v1.io.tf_record_iterator(f"{new}.assets/hash_filter_{i}-00000-of-00001")))
      for i in range(4)
    ]
    self.assertEqual(contents, [b"even", b"odd", b"even", b"odd"])

  def test_an_id_that_is_not_the_first_field_is_found(self):
    old = self._write(tables={"user": []})
    row = pb.EntryDump(id=3).SerializeToString()
    time = pb.EntryDump(last_update_ts_sec=9).SerializeToString()
    written_checkpoint.write_records(f"{old}.assets/user-00000-of-00001", [time + row])

    new = reshard.reshard_checkpoint(old, 0, 2)

    self.assertEqual(written_checkpoint.read_ids(new), {"user_0": [], "user_1": [3]})

  def test_new_checkpoint_is_the_newest_and_the_old_one_stays(self):
    old = self._write(tables={"user": [1]})

    new = reshard.reshard_checkpoint(old, 0, 1)

    state = tf.train.get_checkpoint_state(self._dir)
    self.assertEqual(state.model_checkpoint_path, new)
    self.assertEqual(list(state.all_model_checkpoint_paths), [old, new])
    self.assertEqual(written_checkpoint.read_ids(old), {"user": [1]})
    with open(new + ".data-00000-of-00001") as f:
      self.assertEqual(f.read(), "variables.data-00000-of-00001")
    self.assertFalse(os.path.exists(new + ".unfinished"))

  def test_wrong_number_of_servers_names_what_is_there(self):
    old = self._write(tables={"user_0": [0], "user_1": [1], "user_2": [2]})
    for wrong in (2, 4):
      with self.assertRaisesRegex(ValueError, f"not look like a table on {wrong} .*user_2"):
        reshard.reshard_checkpoint(old, wrong, 1)
    with self.assertRaisesRegex(ValueError, "new_num_ps is -1"):
      reshard.reshard_checkpoint(old, 3, -1)
    # The next start sweeps up what was begun.
    self.assertEqual(tf.train.latest_checkpoint(self._dir), old)

  def test_file_with_fewer_rows_than_counted_is_named(self):
    old = self._write(groups={"MonolithMultiHashTable_": {"a": [1, 2]}})
    path = f"{old}.assets/MonolithMultiHashTable_-00000-of-00001"
    written_checkpoint.write_records(path, [written_checkpoint.entry(1)], "SNAPPY")

    with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}: 1 entries of a, want 2"):
      reshard.reshard_checkpoint(old, 0, 2)

  def test_cut_file_is_named(self):
    old = self._write(tables={"user": [1, 2]})
    path = f"{old}.assets/user-00000-of-00001"
    os.truncate(path, os.path.getsize(path) - 1)

    with self.assertRaisesRegex(tf.errors.DataLossError, path):
      reshard.reshard_checkpoint(old, 0, 2)


class CountServersTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._dir = os.path.join(os.environ["TEST_TMPDIR"], "model")

  def _write(self, *tables, filters=(), groups=()):
    return written_checkpoint.write_checkpoint(
      self._dir,
      tables={name: [] for name in tables},
      groups={name: {} for name in groups},
      filters={name: b"" for name in filters},
    )

  def test_counts_indices(self):
    self.assertEqual(reshard.count_servers(self._write("user_0", "user_1", "item_0", "item_1")), 2)

  def test_filters_do_not_count(self):
    self.assertEqual(reshard.count_servers(self._write("user", filters=["hash_filter_0"])), 0)

  def test_nothing_was_saved_on_no_server(self):
    self.assertEqual(reshard.count_servers(self._write()), 0)

  def test_tables_that_disagree(self):
    prefix = self._write("user_0", "user_1", "item_0")
    with self.assertRaisesRegex(ValueError, "not all on as many servers.*item_0.*user_1"):
      reshard.count_servers(prefix)

  def test_one_group_fits_with_and_without_a_server(self):
    prefix = self._write(groups=["MonolithMultiHashTable_0"])
    self.assertEqual([reshard.fits(prefix, n) for n in range(3)], [True, True, False])

  def test_one_table_fits_its_own_number_only(self):
    prefix = self._write("user_0")
    self.assertEqual([reshard.fits(prefix, n) for n in range(3)], [False, True, False])


if __name__ == "__main__":
  absltest.main()
