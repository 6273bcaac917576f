"""Restoring after parameter servers were lost, with tables and variables on two of them."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2

from monolith.native_training import basic_restore_hook, hash_table_ops, save_utils, utils

tf.compat.v1.disable_eager_execution()


def _generate_config(servers, job_name=utils.PS_JOB_NAME):
  """Returns the configuration of a session on some servers, each a task of one job."""
  cluster_def = cluster_pb2.ClusterDef()
  job = cluster_def.job.add(name=job_name)
  for i, server in enumerate(servers):
    job.tasks[i] = server.target[len("grpc://") :]
  config = tf.compat.v1.ConfigProto(cluster_def=cluster_def)
  config.experimental.share_session_state_in_clusterspec_propagation = True
  return config


def _get_id_tensor(x):
  return tf.constant(x, dtype=tf.int64)


class PartialRestoreTest(tf.test.TestCase):
  def build_graph(self):
    with tf.device(utils.ps_device(0)):
      global_step = tf.compat.v1.train.get_or_create_global_step()
      global_step_increment = tf.compat.v1.assign_add(global_step, 1)
      v0 = tf.compat.v1.get_variable("v0", shape=[], initializer=tf.zeros_initializer())
      op0 = v0.assign_add(1)
      table0 = hash_table_ops.test_hash_table(1, name_suffix="0")
      add0 = table0.assign_add(_get_id_tensor([0]), tf.constant([[1.0]]))
      lookup0 = table0.lookup(_get_id_tensor([0]))
    with tf.device(utils.ps_device(1)):
      v1 = tf.compat.v1.get_variable("v1", shape=[], initializer=tf.zeros_initializer())
      op1 = v1.assign_add(1)
      table1 = hash_table_ops.test_hash_table(1, name_suffix="1")
      add1 = table1.assign_add(_get_id_tensor([0]), tf.constant([[1.0]]))
      lookup1 = table1.lookup(_get_id_tensor([0]))
    train_op = tf.group([global_step_increment, op0, add0.as_op(), op1, add1.as_op()])
    return train_op, v0, v1, lookup0, lookup1

  def _setup(self, ps_monitor):
    """Builds the graph and returns what a session needs."""
    folder = tempfile.mkdtemp(dir=os.environ["TEST_TMPDIR"])
    basename = os.path.join(folder, "model.ckpt")
    train_op, *values = self.build_graph()
    saver = save_utils.PartialRecoverySaver(
      sharded=True, max_to_keep=10, keep_checkpoint_every_n_hours=12, ps_monitor=ps_monitor
    )
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVERS, saver)
    saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
      folder,
      save_steps=1000,
      saver=saver,
      listeners=[hash_table_ops.HashTableCheckpointSaverListener(basename)],
    )
    restore_hook = basic_restore_hook.CheckpointRestorerHook(
      [hash_table_ops.HashTableCheckpointRestorerListener(basename, ps_monitor)]
    )
    scaffold = tf.compat.v1.train.Scaffold(saver=saver)

    def session(servers):
      return tf.compat.v1.train.SingularMonitoredSession(
        hooks=[restore_hook, saver_hook],
        scaffold=scaffold,
        master=servers[0].target,
        config=_generate_config(servers),
        checkpoint_dir=folder,
      )

    return train_op, values, session

  def _create_servers(self):
    return [tf.distribute.Server.create_local_server() for _ in range(2)]

  def assertValues(self, sess, values, expected):
    self.assertAllEqual([float(np.squeeze(v)) for v in sess.run(values)], expected)

  def _mutate(self, servers, train_op, values):
    """Trains one step in a plain session, which shows that state lives on in the servers."""
    with tf.compat.v1.Session(servers[0].target, config=_generate_config(servers)) as sess:
      self.assertValues(sess, values, [1, 1, 1, 1])
      sess.run(train_op)
      self.assertValues(sess, values, [2, 2, 2, 2])

  def test_restore_with_ps_monitor(self):
    with tf.Graph().as_default():
      train_op, values, session = self._setup(save_utils.PsMonitor(2))
      servers = self._create_servers()
      with session(servers) as sess:
        sess.run(train_op)
      self._mutate(servers, train_op, values)

      new_servers = self._create_servers()
      with session(new_servers) as sess:
        self.assertValues(sess, values, [1, 1, 1, 1])

      with session([servers[0], self._create_servers()[0]]) as sess:
        # v0, v1, lookup0, lookup1: the first server has kept its values.
        self.assertValues(sess, values, [2, 1, 2, 1])

  def test_restore_without_ps_monitor(self):
    with tf.Graph().as_default():
      train_op, values, session = self._setup(None)
      servers = self._create_servers()
      with session(servers) as sess:
        sess.run(train_op)
      self._mutate(servers, train_op, values)

      with session(servers) as sess:
        self.assertValues(sess, values, [1, 1, 1, 1])


if __name__ == "__main__":
  tf.compat.v1.disable_eager_execution()
  tf.test.main()
