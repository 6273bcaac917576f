"""Promise: when one of two parameter servers dies, its newcomer gets the checkpoint's values.

The survivor keeps its own, which are newer. The servers are processes, and one is killed.
"""

import os

import pytest
import tensorflow as tf
from absl.testing import absltest
from tensorflow.core.protobuf import cluster_pb2

from monolith.native_training import save_utils, utils
from tests.reliability import trainer

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

v1 = tf.compat.v1


def _serve(send, start) -> None:
  """Serves forever, once asked to."""
  os.read(start, 1)
  server = tf.distribute.Server.create_local_server()
  send(server.target)
  server.join()


class _Server:
  """A process that becomes a parameter server by `start`.

  It must be made before this process runs anything of TensorFlow.
  """

  def __init__(self):
    read_end, self._start = os.pipe()
    self._child = trainer.Child(_serve, read_end, wants_send=True)
    self.target = None

  def start(self) -> None:
    os.write(self._start, b"s")
    self.target = self._child.receive()

  def kill(self) -> None:
    self._child.kill()


class PsReplacementTest(absltest.TestCase):
  def test_survivor_keeps_newer_values_and_newcomer_gets_the_checkpoint(self):
    servers = [_Server() for _ in range(3)]
    self.addCleanup(lambda: [server.kill() for server in servers if server is not servers[1]])
    for server in servers:
      server.start()
    train_op, values, session = self._build_model()

    with session(servers[:2]) as sess:
      sess.run(train_op)
      self.saver_hook.trigger_save(sess)
      sess.run(train_op)
      self.assertEqual(sess.run(values), [2.0, 2.0])
      # This session ends without a save.
      self.saver_hook.timer.update_last_triggered_step(2)
    servers[1].kill()

    with session([servers[0], servers[2]]) as sess:
      self.assertEqual(sess.run(values), [2.0, 1.0])
      sess.run(train_op)
      self.assertEqual(sess.run(values), [3.0, 2.0])
      self.saver_hook.timer.update_last_triggered_step(3)

    # No server died since: nothing is restored.
    with session([servers[0], servers[2]]) as sess:
      self.assertEqual(sess.run(values), [3.0, 2.0])
      self.saver_hook.timer.update_last_triggered_step(3)

  def _build_model(self):
    folder = os.environ["TEST_TMPDIR"]
    variables = []
    for i in range(2):
      with tf.device(utils.ps_device(i)):
        variables.append(v1.get_variable(f"v{i}", initializer=0.0))
    with tf.device(utils.ps_device(0)):
      global_step = v1.train.get_or_create_global_step()
    train_op = tf.group(
      global_step.assign_add(1), *[variable.assign_add(1.0) for variable in variables]
    )
    saver = save_utils.PartialRecoverySaver(sharded=True, ps_monitor=save_utils.PsMonitor(2))
    v1.add_to_collection(v1.GraphKeys.SAVERS, saver)
    self.saver_hook = save_utils.NoFirstSaveCheckpointSaverHook(
      folder, save_steps=1000000, saver=saver
    )
    scaffold = v1.train.Scaffold(saver=saver)

    def session(servers):
      cluster_def = cluster_pb2.ClusterDef()
      job = cluster_def.job.add(name=utils.PS_JOB_NAME)
      for i, server in enumerate(servers):
        job.tasks[i] = server.target[len("grpc://") :]
      config = v1.ConfigProto(cluster_def=cluster_def)
      config.experimental.share_session_state_in_clusterspec_propagation = True
      return v1.train.SingularMonitoredSession(
        hooks=[self.saver_hook],
        scaffold=scaffold,
        master=servers[0].target,
        config=config,
        checkpoint_dir=folder,
      )

    return train_op, variables, session


if __name__ == "__main__":
  absltest.main()
