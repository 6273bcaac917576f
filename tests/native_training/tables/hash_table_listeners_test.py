"""Tables in graphs that are exported and imported, and in checkpoints of a session."""

import os

import tensorflow as tf
from absl.testing import parameterized

from monolith.native_training import (
  basic_restore_hook,
  hash_table_ops,
  hash_table_ops_pb2,
  save_utils,
)
from tests.hash_table_testing import GraphTest, at_step, temp_dir

tf.compat.v1.disable_eager_execution()


class ProtoTest(GraphTest):
  def test_round_trip_in_a_scope(self):
    with tf.name_scope("a"):
      table = hash_table_ops.test_hash_table(
        2, name_suffix="x", learning_rate=0.5, extra_restore_names=["old"]
      )
      table.export_share_embedding = True
    proto = table.to_proto("a")
    self.assertEqual(proto.table_tensor, "MonolithHashTable_x:0")
    self.assertIsNone(table.to_proto("b"))

    copy = hash_table_ops.HashTable.from_proto(proto, "a")

    self.assertEqual(copy.extra_restore_names, ["old"])
    self.assertIs(copy.export_share_embedding, True)
    self.assertEqual(hash_table_ops._all_table_tensor_prefix(copy), ["MonolithHashTable_x", "old"])
    self.assertLen(tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY), 1)
    with self.session() as sess:
      updated = copy.apply_gradients([1], [[1.0, 2.0]], at_step())
      self.assertAllEqual(sess.run(updated.lookup([1])), [[-0.5, -1]])
      saved = updated.save(temp_dir("t")).restore(temp_dir("t"))
      self.assertAllEqual(sess.run(saved.lookup([1])), [[-1, -2]])

  @parameterized.parameters((None, -1), (False, 0), (True, 1))
  def test_export_share_embedding(self, value, number):
    table = hash_table_ops.test_hash_table(1)
    table.export_share_embedding = value
    proto = table.to_proto()
    self.assertEqual(proto.export_share_embedding, number)
    self.assertIs(hash_table_ops.HashTable.from_proto(proto).export_share_embedding, value)

  def test_meta_graph_round_trip(self):
    table = hash_table_ops.test_hash_table(1, name_suffix="x", learning_rate=0.5)
    meta_graph = tf.compat.v1.train.export_meta_graph()
    collection = meta_graph.collection_def[hash_table_ops._HASH_TABLE_GRAPH_KEY].bytes_list.value
    self.assertLen(collection, 1)
    proto = hash_table_ops_pb2.HashTableProto.FromString(collection[0])
    self.assertEqual(proto.shared_name, table.name)

    with tf.Graph().as_default():
      tf.compat.v1.train.import_meta_graph(meta_graph)
      (imported,) = tf.compat.v1.get_collection(hash_table_ops._HASH_TABLE_GRAPH_KEY)
      with self.session() as sess:
        updated = imported.apply_gradients([1], [[1.0]], at_step())
        self.assertAllEqual(sess.run(updated.lookup([1])), [[-0.5]])


class ListenersTest(GraphTest):
  def setUp(self):
    super().setUp()
    self.basename = temp_dir("model.ckpt")

  def _saver_hook(self, *listeners):
    return tf.compat.v1.train.CheckpointSaverHook(
      temp_dir(),
      save_steps=10000,
      saver=tf.compat.v1.train.Saver(save_relative_paths=True),
      listeners=list(listeners),
    )

  def test_save_then_restore(self):
    step = tf.compat.v1.train.create_global_step()
    table = hash_table_ops.test_hash_table(1, name_suffix="x")
    first = [table.assign_add([0, 1], [[1.0], [2.0]]).as_op(), step.assign_add(1)]
    second = table.assign_add([1, 2], [[5.0], [5.0]]).as_op()
    values = table.lookup([0, 1, 2])
    saver = self._saver_hook(hash_table_ops.HashTableCheckpointSaverListener(self.basename))
    restorer = basic_restore_hook.CheckpointRestorerHook(
      listeners=[hash_table_ops.HashTableCheckpointRestorerListener(self.basename)]
    )
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[saver]) as sess:
      sess.run(first)
    self.assertIn("MonolithHashTable_x-00000-of-00001", os.listdir(self.basename + "-1.assets"))
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[restorer]) as sess:
      self.assertAllEqual(sess.run(values), [[1], [2], [0]])
      sess.run(second)
      restorer.after_create_session(sess.raw_session(), None)
      self.assertAllEqual(sess.run(values), [[1], [2], [0]])

  def test_restore_saver_listener_drops_expired_and_later_writes(self):
    tf.compat.v1.train.create_global_step()
    table = hash_table_ops.test_hash_table(1, expire_time=1)
    at = lambda time: tf.constant(time, tf.int64)  # noqa: E731
    write = table.assign([1], [[1.0]], req_time=at(0))
    write = write.assign([2], [[2.0]], req_time=at(86400)).as_op()
    values = table.lookup([1, 2, 3])
    later = table.assign([3], [[3.0]], req_time=at(86400)).as_op()

    class WriteAfterSave(tf.compat.v1.train.CheckpointSaverListener):
      def after_save(self, session, global_step_value):
        session.run(later)

    hook = self._saver_hook(
      hash_table_ops.HashTableCheckpointSaverListener(self.basename),
      WriteAfterSave(),
      hash_table_ops.HashTableRestorerSaverListener(self.basename),
    )
    with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as sess:
      sess.run(write)
      self.assertAllEqual(sess.run(values), [[1], [2], [0]])
      hook._save(sess.raw_session(), 1)
      self.assertAllEqual(sess.run(values), [[0], [2], [0]])

  def test_extra_restore_names_are_tried_in_order(self):
    table = hash_table_ops.test_hash_table(1, name_suffix="old/name")
    prefix = hash_table_ops._table_tensor_prefix(table)
    with self.session() as sess:
      saved = table.assign([1], [[1.0]]).save(os.path.join(temp_dir("x.assets"), prefix))
      sess.run(saved.as_op())
    with tf.Graph().as_default():
      new = hash_table_ops.test_hash_table(
        1, name_suffix="new", extra_restore_names=["nothing", "MonolithHashTable_old/name"]
      )
      listener = hash_table_ops.HashTableCheckpointRestorerListener(self.basename)
      with self.session() as sess:
        # No checkpoint file: the only folder of assets is used.
        listener.before_restore(sess)
        self.assertAllEqual(sess.run(new.lookup([1])), [[1]])
        os.mkdir(temp_dir("y.assets"))
        sess.run(new.assign([1], [[7.0]]).as_op())
        listener.before_restore(sess)
        self.assertAllEqual(sess.run(new.lookup([1])), [[7]])

  def test_missing_table(self):
    table = hash_table_ops.test_hash_table(1, name_suffix="t1", extra_restore_names=["u/v"])
    other = hash_table_ops.test_hash_table(1, name_suffix="t10")
    listener = hash_table_ops.HashTableCheckpointRestorerListener(self.basename)
    prefix = temp_dir("x.assets") + "/"
    with self.session() as sess:
      sess.run(other.save(prefix + hash_table_ops._table_tensor_prefix(other)).as_op())
      with self.assertRaisesWithLiteralMatch(
        ValueError,
        f"Unable to find table checkpoint in '{prefix}' for table: "
        "['MonolithHashTable_t1', 'u-v']. Maybe the model structure has been changed.",
      ):
        listener._restore_from_path_prefix(sess, prefix)
      self.assertEqual(table.name, "MonolithHashTable_t1")

  def test_only_uninitialized_servers_are_restored(self):
    servers = [tf.distribute.Server.create_local_server() for _ in range(2)]
    cluster = tf.train.ClusterSpec({"ps": [s.target[len("grpc://") :] for s in servers]})
    tables = []
    for i in range(2):
      with tf.device(f"/job:ps/task:{i}"):
        tables.append(hash_table_ops.test_hash_table(1, name_suffix=f"t{i}"))
    write = [table.assign([1], [[1.0]]).as_op() for table in tables]
    overwrite = [table.assign([1], [[2.0]]).as_op() for table in tables]
    values = [table.lookup([1]) for table in tables]

    class OnlyTheSecond(save_utils.PsMonitor):
      def __init__(self):
        pass

      def is_ps_uninitialized(self, sess, device):
        return "task:1" in device

    listener = hash_table_ops.HashTableCheckpointRestorerListener(self.basename, OnlyTheSecond())
    saver = hash_table_ops.HashTableCheckpointSaverListener(self.basename)
    tf.compat.v1.get_default_graph().finalize()
    config = tf.compat.v1.ConfigProto(cluster_def=cluster.as_cluster_def())
    with tf.compat.v1.Session(servers[0].target, config=config) as sess:
      sess.run(write)
      saver.before_save(sess, 3)
      sess.run(overwrite)
      listener._restore_from_path_prefix(sess, self.basename + "-3.assets/")
      self.assertAllEqual(sess.run(values), [[[2]], [[1]]])

  def test_listeners_without_tables(self):
    with self.session() as sess:
      hash_table_ops.HashTableCheckpointSaverListener(self.basename).before_save(sess, 0)
      hash_table_ops.HashTableCheckpointRestorerListener(self.basename).before_restore(sess)


if __name__ == "__main__":
  tf.test.main()
