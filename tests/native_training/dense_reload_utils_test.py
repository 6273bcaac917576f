"""Restoring variables under other names."""

import os

import numpy as np
import tensorflow as tf

from monolith.native_training import dense_reload_utils, save_utils
from monolith.native_training.graph import export_context

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


class NamesTest(tf.test.TestCase):
  def test_node_name(self):
    for name in ("a/b", " a/b:0 ", "^a/b", "a/b/", "a/b:12"):
      self.assertEqual(dense_reload_utils.node_name(name), "a/b")

  def test_get_new_name(self):
    self.assertEqual(dense_reload_utils.get_new_name("a/a/b"), "a/b")
    self.assertEqual(dense_reload_utils.get_new_name("a/b/b/b:0"), "a/b")
    self.assertEqual(dense_reload_utils.get_new_name("a"), "a")

  def test_get_guess_name(self):
    for name, guess in {
      "c_dot/mlp/dense/kernel": "c_dot/compress_tower/dense/kernel",
      "dcn/kernel_1/Adam": "kernel_1/Adam",
      "dcn/kernel_1/trainable_norm": "kernel_1_trainable_norm",
      "dcn/bias_0": "bias_0",
      "other": "other",
    }.items():
      self.assertEqual(dense_reload_utils.get_guess_name(name), guess)

  def test_add_mapping_rules(self):
    dense_reload_utils.add_mapping_rules({r"tower_(\d+)/(.*)": "net_{}/{}"})

    self.assertEqual(dense_reload_utils.get_guess_name("tower_3/w"), "net_3/w")

  def test_split_name(self):
    self.assertEqual(dense_reload_utils.split_name("dense_12"), ("dense_", 12))
    self.assertEqual(dense_reload_utils.split_name("dense"), ("dense", 0))

  def test_calc_reorder_info(self):
    calc = dense_reload_utils.calc_reorder_info
    self.assertEqual(calc(["dense"]), (False, "dense_"))
    self.assertEqual(calc(["dense_1"]), (False, "dense_"))
    self.assertEqual(calc(["dense_2"]), (True, "dense_"))
    self.assertEqual(calc(["dense", "dense_1"]), (True, "dense_"))
    self.assertEqual(calc(["dense_4", "dense_3"], is_ordered=False), (True, "dense_"))

  def test_infer_variable_name(self):
    names = {f"partition/part_{i}:0" for i in range(20)} | {"small_var:0", "a/part_1/Adam"}

    self.assertEqual(
      dense_reload_utils.infer_variable_name(names), {"partition:0", "small_var:0", "a/Adam"}
    )

  def test_update_var_name_mapping_for_dense(self):
    mapping = {f"mlp/dense_{i}/{v}": f"old_{i}_{v}" for i in (5, 11) for v in ("bias", "kernel")}
    mapping["other/w"] = "w"

    dense_reload_utils.update_var_name_mapping_for_dense(mapping)

    self.assertEqual(mapping["mlp/dense_0/bias"], "old_5_bias")
    self.assertEqual(mapping["mlp/dense/kernel"], "old_5_kernel")
    self.assertEqual(mapping["mlp/dense_1/kernel"], "old_11_kernel")
    self.assertEqual(mapping["mlp/dense_5/kernel"], "old_5_kernel")
    self.assertLen(mapping, 5 + 6)

  def test_get_full_prefix(self):
    prefixes = ["b", "a/b", "x/a/b", "c"]
    self.assertEqual(dense_reload_utils.get_full_prefix("b", prefixes), "x/a/b")
    self.assertEqual(dense_reload_utils.get_full_prefix("d", prefixes), "d")


class _Checkpoint(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = os.environ["TEST_TMPDIR"]

  def save(self, build):
    with self.session(graph=tf.Graph()) as sess:
      v1.train.get_or_create_global_step()
      build()
      sess.run(v1.global_variables_initializer())
      path = save_utils.PartialRecoverySaver().save(sess, os.path.join(self.dir, "m"), 7)
      return path, {v.op.name: sess.run(v) for v in v1.global_variables()}


class CalcFeedDictTest(_Checkpoint):
  def _build_old(self):
    v1.get_variable("small_var", shape=[3])
    v1.get_variable("partition", shape=[1280, 512])

  def _placeholder(self, shape, name, dtype=tf.float32):
    placeholder = v1.placeholder(dtype, shape)
    placeholder.origin_name = name
    return placeholder

  def test_calc_feed_dict(self):
    path, values = self.save(self._build_old)
    alias_map = {"small_var2": "small_var", "global_step": "global_step"}
    alias_map.update({f"partition2/part_{i}": "partition" for i in range(20)})
    placeholders = [
      self._placeholder([3], "small_var2"),
      self._placeholder([], "global_step", tf.int64),
    ]
    parts = [self._placeholder([64, 512], f"partition2/part_{i}") for i in range(20)]

    feed_dict = dense_reload_utils.calc_feed_dict(
      tf.train.load_checkpoint(path), alias_map, placeholders + parts[::-1]
    )

    self.assertLen(feed_dict, 22)
    for i, part in enumerate(parts):
      self.assertEqual(feed_dict[part].shape, (64, 512))
      self.assertAllEqual(feed_dict[part], values["partition"][64 * i : 64 * (i + 1)])
    self.assertAllEqual(feed_dict[placeholders[0]], values["small_var"])

  def test_no_feed_dict_if_all_names_are_there(self):
    path, _ = self.save(self._build_old)
    alias_map = {"small_var": "x", "partition/part_0": "y", "partition/part_1": "y"}
    self.assertIsNone(
      dense_reload_utils.calc_feed_dict(tf.train.load_checkpoint(path), alias_map, [])
    )

  def test_errors(self):
    path, _ = self.save(self._build_old)
    reader = tf.train.load_checkpoint(path)
    with self.assertRaisesRegex(Exception, "has no attribute origin_name"):
      dense_reload_utils.calc_feed_dict(reader, {"a": "b"}, [v1.placeholder(tf.float32)])
    with self.assertRaisesRegex(ValueError, "variable gone, wanted for a, is not in"):
      dense_reload_utils.calc_feed_dict(reader, {"a": "gone"}, [self._placeholder([], "a")])
    with self.assertRaisesRegex(ValueError, "1280 rows in the checkpoint, its 2 parts have 3"):
      dense_reload_utils.calc_feed_dict(
        reader,
        {"a/part_0": "partition", "a/part_1": "partition"},
        [self._placeholder([1, 512], "a/part_0"), self._placeholder([2, 512], "a/part_1")],
      )

  def test_lowest_numbered_dense_layer_is_fed(self):
    def build():
      v1.get_variable("dense_9/kernel", shape=[2])

    path, values = self.save(build)
    alias_map = {"m/dense_3/kernel": "dense_9/kernel", "m/dense_12/kernel": "dense_9/kernel"}
    low, high = (self._placeholder([2], name) for name in alias_map)

    feed_dict = dense_reload_utils.calc_feed_dict(
      tf.train.load_checkpoint(path), alias_map, [low, high]
    )

    self.assertEqual(list(feed_dict), [low])
    self.assertAllEqual(feed_dict[low], values["dense_9/kernel"])


class CustomRestoreListenerTest(_Checkpoint):
  def restore(self, build, **kwargs):
    """Returns the values of the new model after a restore, by name."""
    with self.session(graph=tf.Graph()) as sess:
      v1.train.get_or_create_global_step()
      build()
      listener = dense_reload_utils.CustomRestoreListener(model_dir=self.dir, **kwargs)
      listener.begin()
      self.custom = bool(v1.get_collection(dense_reload_utils.CUSTOM_RESTORE_OP))
      save_utils.PartialRecoverySaver().restore(sess, tf.train.latest_checkpoint(self.dir))
      return {v.op.name: sess.run(v) for v in v1.global_variables()}

  def _dense(self, prefix, numbers, rows=4):
    def build():
      for number in numbers:
        layer = f"{prefix}/dense_{number}" if number else f"{prefix}/dense"
        v1.get_variable(f"{layer}/kernel", shape=[rows, 2])
        v1.get_variable(f"{layer}/bias", shape=[2])

    return build

  def test_same_names_need_nothing(self):
    _, values = self.save(self._dense("a", [1, 2]))

    restored = self.restore(self._dense("a", [1, 2]))

    self.assertFalse(self.custom)
    self.assertAllClose(restored, values)

  def test_layers_are_matched_in_order(self):
    _, values = self.save(self._dense("a", [1, 2, 10]))

    restored = self.restore(self._dense("a", [0, 1, 2]))

    self.assertTrue(self.custom)
    for new, old in (("dense", "dense_1"), ("dense_1", "dense_2"), ("dense_2", "dense_10")):
      self.assertAllEqual(restored[f"a/{new}/kernel"], values[f"a/{old}/kernel"])
      self.assertAllEqual(restored[f"a/{new}/bias"], values[f"a/{old}/bias"])

  def test_repeated_scope(self):
    _, values = self.save(self._dense("a/a", [0]))

    restored = self.restore(self._dense("a", [0]))

    self.assertAllEqual(restored["a/dense/kernel"], values["a/a/dense/kernel"])

  def test_partitioned(self):
    def build_old():
      v1.get_variable("net/net/w", shape=[10, 2])

    def build_new():
      with v1.variable_scope("net", partitioner=v1.fixed_size_partitioner(3)):
        v1.get_variable("w", shape=[10, 2])

    _, values = self.save(build_old)

    restored = self.restore(build_new)

    parts = [restored[f"net/w/part_{i}"] for i in range(3)]
    self.assertAllEqual(np.concatenate(parts), values["net/net/w"])

  def test_unknown_variable_falls_back_to_the_normal_restore(self):
    self.save(self._dense("a", [1]))

    with self.assertRaisesRegex(tf.errors.NotFoundError, "not found in checkpoint"):
      self.restore(self._dense("b", [1, 2]))
    self.assertFalse(self.custom)

  def test_other_shape_is_not_matched(self):
    self.save(self._dense("a", [3], rows=4))

    with self.assertRaises(tf.errors.NotFoundError):
      self.restore(self._dense("a", [0], rows=5))
    self.assertFalse(self.custom)

  def test_auto_gen_can_be_switched_off(self):
    self.save(self._dense("a", [3]))

    with self.assertRaises(tf.errors.NotFoundError):
      self.restore(self._dense("a", [0]), enable_alias_map_auto_gen=False)

  def test_nothing_to_do(self):
    with tf.Graph().as_default():
      v1.get_variable("v", shape=[])
      dense_reload_utils.CustomRestoreListener(clear_nn=True, model_dir=self.dir).begin()
      self.save(lambda: v1.get_variable("w", shape=[]))
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE):
        dense_reload_utils.CustomRestoreListener(clear_nn=True, model_dir=self.dir).begin()
      self.assertEqual(v1.get_collection(dense_reload_utils.CUSTOM_RESTORE_OP), [])

  def test_clear_nn_with_alias_map(self):
    with self.assertRaisesRegex(ValueError, "alias_map must be None"):
      dense_reload_utils.CustomRestoreListener(alias_map={}, clear_nn=True)

  def test_clear_nn_tuple(self):
    self.save(lambda: v1.get_variable("w", shape=[]))
    with tf.Graph().as_default():
      v1.train.get_or_create_global_step()
      dense_reload_utils.CustomRestoreListener(
        clear_nn=True, continue_training=True, model_dir=self.dir
      ).begin()
      [(ops, placeholders, alias_map)] = v1.get_collection(dense_reload_utils.CUSTOM_RESTORE_OP)

    self.assertLen(ops, 2)
    self.assertLen(placeholders, 1)
    self.assertIsNone(alias_map)
    self.assertEqual(ops[0].model_dir, self.dir)


if __name__ == "__main__":
  tf.test.main()
