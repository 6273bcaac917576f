"""Slots that share a table, and the way of tensors there and back."""

import tensorflow as tf

from monolith.native_training import entry
from monolith.native_training.runtime.hash_table import embedding_hash_table_pb2
from monolith.native_training.tables import merging


def _config(dim: int) -> entry.HashTableConfigInstance:
  config = embedding_hash_table_pb2.EmbeddingHashTableConfig()
  config.cuckoo.SetInParent()
  config.entry_config.segments.add(dim_size=dim).opt_config.sgd.SetInParent()
  return entry.HashTableConfigInstance(config, [0.1])


class MergingTest(tf.test.TestCase):
  def test_slots_of_equal_configuration_share_a_table(self):
    slot_merging = merging.SlotMerging.by_config(
      {"b": _config(2), "a": _config(2), "c": _config(3)}
    )

    shared, alone = merging.merged_name(["a", "b"]), merging.merged_name(["c"])
    self.assertEqual(slot_merging.slot_to_merged, {"a": shared, "b": shared, "c": alone})
    self.assertCountEqual(slot_merging.merged_to_config, [shared, alone])

  def test_named_tables_are_shared(self):
    configs = {"a": _config(2), "b": _config(3), "c": _config(2)}

    slot_merging = merging.SlotMerging.by_name(configs, {"a": "s", "c": "s"})

    self.assertEqual(slot_merging.slot_to_merged, {"a": "s", "b": "b", "c": "s"})
    self.assertIs(slot_merging.merged_to_config["b"], configs["b"])
    self.assertCountEqual(slot_merging.merged_to_config, ["s", "b"])

  def test_a_merged_table_restores_from_its_old_name(self):
    configs, _ = merging.merge_slots({"fc_slot_0": _config(1)})

    config = configs[merging.merged_name(["fc_slot_0"])]
    self.assertEqual(config.extra_restore_names, [merging.merged_name(["slot_0"])])

  def test_split_undoes_merge(self):
    slot_merging = merging.SlotMerging.by_name(
      {slot: _config(1) for slot in "abc"}, {"a": "s", "c": "s"}
    )
    tensors = {"c": tf.constant([1]), "b": tf.constant([3]), "a": tf.constant([1, 2])}

    merged, sizes = slot_merging.merge(tensors)
    parts = slot_merging.split(list(tensors), merged, sizes)

    self.assertAllEqual(merged["s"], [1, 2, 1])
    self.assertAllEqual(sizes["s"], [2, 1])
    self.assertEqual(list(parts), ["c", "b", "a"])
    for slot, tensor in tensors.items():
      self.assertAllEqual(parts[slot], tensor)

  def test_scalars_can_be_merged(self):
    slot_merging = merging.SlotMerging.by_name({"a": _config(1), "b": _config(1)}, {"b": "a"})

    merged, sizes = slot_merging.merge({"a": 1.5, "b": 2.5}, tf.float32)

    self.assertAllEqual(merged["a"], [1.5, 2.5])
    self.assertAllEqual(sizes["a"], [1, 1])

  def test_unknown_slots_are_left_out(self):
    self.assertEqual(merging.known_slots({"a": 1, "x": 2}, ["a", "b"]), {"a": 1})


if __name__ == "__main__":
  tf.test.main()
