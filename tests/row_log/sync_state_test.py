"""Tests of `sync_state`, `framing` and `dense_sets` without a broker."""

import os
import tempfile
import unittest

import numpy as np
import tensorflow as tf
from absl import flags

from monolith.realtime.row_log_pb2 import DenseSet
from monolith.row_log import dense_sets, framing, sync_state
from monolith.row_log.sync_state import LogEnd, SyncState
from tests.serving import click_example

tf.compat.v1.disable_eager_execution()


class _Ends:
  """A broker that can be away."""

  def __init__(self):
    self.offset = 0
    self.is_away = False

  def __call__(self, topic, num_partitions):
    if self.is_away:
      raise ConnectionError("no broker answers")
    return [LogEnd(self.offset + i, 2, 3) for i in range(num_partitions)]


class SyncStateTest(unittest.TestCase):
  def setUp(self):
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name
    self.ends = _Ends()
    self.listener = self.make_listener()

  def make_listener(self, rows_topic="rows.m"):
    return sync_state.SyncStateListener(
      f"{self.folder}/model.ckpt", self.ends, rows_topic, 2, "dense.m"
    )

  def load(self, step, partition=0):
    return sync_state.load_checkpoint(f"{self.folder}/model.ckpt-{step}", partition)

  def test_positions_of_all_servers_go_with_a_checkpoint_into_its_exports(self):
    self.ends.offset = 7
    self.listener.before_save(None, 10)

    self.assertEqual(self.load(10, 0), SyncState(2, 3, "rows.m", 0, 7))
    self.assertEqual(self.load(10, 1), SyncState(2, 3, "rows.m", 1, 8))
    assets = f"{self.folder}/model.ckpt-10.assets/"
    sync_state.copy_to_export(assets, f"{self.folder}/ps_1", sync_state.SYNC_STATE, 1)
    sync_state.copy_to_export(assets, f"{self.folder}/entry", sync_state.DENSE_STATE)
    self.assertEqual(sync_state.load_export(f"{self.folder}/ps_1"), self.load(10, 1))
    self.assertIsNone(sync_state.load_export(f"{self.folder}/entry"))
    dense = sync_state.load_export(f"{self.folder}/entry", sync_state.DENSE_STATE)
    self.assertEqual(dense, SyncState(2, 3, "dense.m", 0, 7))

  def test_older_position_serves_while_the_broker_is_away(self):
    self.ends.is_away = True
    self.listener.before_save(None, 10)
    # Everything that the log will have, which a replica may see twice.
    self.assertEqual(self.load(10, 1), SyncState(0, 0, "rows.m", 1, 0))

    self.ends.is_away, self.ends.offset = False, 5
    self.listener.before_save(None, 20)
    self.ends.is_away, self.ends.offset = True, 9
    self.listener.before_save(None, 30)

    self.assertEqual(self.load(30).next_offset, 5)

  def test_a_restarted_run_knows_the_position_of_its_checkpoint(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      step = tf.compat.v1.train.get_or_create_global_step()
      session.run(step.initializer)
      self.ends.offset = 5
      self.listener.before_save(None, 10)
      tf.compat.v1.train.Saver().save(session, f"{self.folder}/model.ckpt", 10)
    self.ends.is_away = True
    self.make_listener().before_save(None, 20)

    self.assertEqual(self.load(20, 0), SyncState(2, 3, "rows.m", 0, 5))
    self.assertEqual(self.load(20, 1), SyncState(2, 3, "rows.m", 1, 6))
    with open(f"{self.folder}/model.ckpt-20.assets/dense_state.json") as file:
      self.assertEqual(SyncState.from_json(file.read()), SyncState(2, 3, "dense.m", 0, 5))

    # Positions in another log say nothing, and damaged ones neither.
    self.make_listener("rows.other").before_save(None, 30)
    self.assertEqual(self.load(30, 1), SyncState(0, 0, "rows.other", 1, 0))
    with open(f"{self.folder}/model.ckpt-10.assets/sync_state.0.json", "w") as file:
      file.write("{")
    self.make_listener().before_save(None, 40)
    self.assertEqual(self.load(40, 0), SyncState(0, 0, "rows.m", 0, 0))
    self.assertEqual(self.load(40, 1), SyncState(2, 3, "rows.m", 1, 6))

  def test_what_is_no_state_is_named(self):
    os.makedirs(f"{self.folder}/assets.extra")
    path = f"{self.folder}/assets.extra/{sync_state.SYNC_STATE}"
    good = SyncState(1, 2, "rows.m", 0, 3).to_json()
    for text, message in (
      ("{", "not JSON"),
      ("[]", "is not an object"),
      (good.replace("3", "-3"), "next_offset is -3"),
      (good.replace("3", "true"), "next_offset is True"),
      (good.replace('"epoch": 1', '"epoch": 1e3'), "epoch is 1000.0"),
      (good.replace('"rows.m"', '""'), "topic is ''"),
    ):
      with open(path, "w") as file:
        file.write(text)
      with self.assertRaisesRegex(ValueError, f"{path}: .*{message}"):
        sync_state.load_export(self.folder)


class ExportsTest(unittest.TestCase):
  def test_every_server_and_the_entry_follow_their_own_log(self):
    if not flags.FLAGS.is_parsed():
      flags.FLAGS(["test"])
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    estimator = click_example.load().make_estimator(folder.name, 2)
    estimator.train(steps=3)
    listener = sync_state.SyncStateListener(
      f"{folder.name}/model.ckpt", _Ends(), "rows.m", 2, "dense.m"
    )
    listener.before_save(None, 3)

    exported = click_example._export(estimator)

    for name, rows, dense in (
      ("entry", None, SyncState(2, 3, "dense.m", 0, 0)),
      ("ps_0", SyncState(2, 3, "rows.m", 0, 0), None),
      ("ps_1", SyncState(2, 3, "rows.m", 1, 1), None),
    ):
      self.assertEqual(sync_state.load_export(exported[name]), rows)
      self.assertEqual(sync_state.load_export(exported[name], sync_state.DENSE_STATE), dense)


class FramingTest(unittest.TestCase):
  def test_checksum_is_that_of_a_record_file(self):
    path = os.path.join(tempfile.mkdtemp(), "records")
    rng = np.random.default_rng(1)
    for size in (0, 1, 3, 4, 5, 1000, 4096, 4097, 123_457):
      message = rng.bytes(size)
      with tf.io.TFRecordWriter(path) as writer:
        writer.write(message)
      with open(path, "rb") as file:
        wanted = file.read()[-4:]

      self.assertEqual(framing.frame(message)[:4], wanted)
      self.assertEqual(framing.unframe(framing.frame(message)), message)

  def test_damage_is_noticed(self):
    framed = framing.frame(b"0123456789")
    for damaged in (b"", b"abc", framed[:-1], framed[:-1] + b"x", b"x" + framed[1:]):
      with self.assertRaises(ValueError):
        framing.unframe(damaged)


class DenseSetsTest(unittest.TestCase):
  def test_large_sets_are_cut_into_messages_that_brokers_take(self):
    variables = {"big": np.arange(600_000, dtype=np.float32), "a": np.float32(1), "b": np.zeros(9)}

    messages = dense_sets.make_messages("m", 2, 3, variables)

    self.assertLess(max(map(len, messages)), 900_000)
    chunks = [DenseSet.FromString(framing.unframe(message)) for message in messages]
    self.assertEqual([chunk.chunk for chunk in chunks], list(range(len(chunks))))
    self.assertEqual({(c.epoch, c.version, c.num_chunks) for c in chunks}, {(2, 3, len(chunks))})

  def test_state_of_optimizers_stays_at_home(self):
    with tf.Graph().as_default():
      kernel = tf.compat.v1.get_variable("dense/kernel", [2, 3], use_resource=True)
      mean = tf.compat.v1.get_variable("norm/mean", [3], trainable=False, use_resource=True)
      optimizer = tf.compat.v1.train.AdamOptimizer()
      optimizer.apply_gradients([(tf.ones([2, 3]), kernel)])
      names = {
        variable.op.name
        for variable in dense_sets.select_variables(tf.compat.v1.global_variables())
      }

    self.assertEqual(names, {kernel.op.name, mean.op.name, "beta1_power", "beta2_power"})

  def test_parts_of_a_variable_are_put_together(self):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      tf.compat.v1.get_variable(
        "x",
        [10],
        initializer=tf.compat.v1.random_normal_initializer(),
        partitioner=tf.compat.v1.fixed_size_partitioner(3),
        use_resource=True,
      )
      variables = tf.compat.v1.global_variables()
      session.run(tf.compat.v1.global_variables_initializer())
      values = session.run(variables)

    self.assertEqual(len(variables), 3)
    found = dense_sets.join_partitions(variables, values)
    np.testing.assert_array_equal(found["x"], np.concatenate(values))


if __name__ == "__main__":
  unittest.main()
