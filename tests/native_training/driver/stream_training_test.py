"""Training from Kafka with the positions in the checkpoint; the brokers are librdkafka's own.

Covers `data/stream_positions.py`, `data/stream_status.py`, `hooks/stream_hook.py` and
`graph/idle.py`; tests/realtime kills real processes.
"""

import os
import threading
import types
import uuid
from unittest import mock

import confluent_kafka
import numpy as np
import pytest
import tensorflow as tf

from monolith.native_training import graph_estimator, native_task_context
from monolith.native_training.data import stream_positions, stream_status
from monolith.native_training.driver import local
from monolith.native_training.hooks import interrupt
from monolith.native_training.settings.training_config import CpuTrainingConfig
from tests import counting_task
from tests.native_training.data.mock_kafka import MockKafka
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()


class _StopAfterHook(tf.compat.v1.train.SessionRunHook):
  """Fails after some steps, as a process that is killed would: nothing is saved."""

  def __init__(self, steps):
    self.left = steps

  def after_run(self, run_context, run_values):
    self.left -= 1
    if not self.left:
      raise ValueError("killed")


class StreamTrainingTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.kafka = MockKafka()
    cls.addClassCleanup(cls.kafka.close)

  def setUp(self):
    super().setUp()
    self.topic = self.kafka.create_topic(uuid.uuid4().hex, 2)
    self.params = counting_task.CountingTask.params()
    self.params.name = "counting"
    stream = self.params.stream
    stream.topics = [self.topic]
    stream.servers = self.kafka.servers
    stream.group = "counting"
    stream.batch_size = 4
    # Silence counts from the start, so that this has to do for connecting on a busy machine, too.
    stream.stream_timeout = 5000
    self.model_dir = os.path.join(self.get_temp_dir(), uuid.uuid4().hex)

  def send(self, numbers, partition=0):
    self.kafka.send(
      self.topic, [counting_task.make_sample(i) for i in numbers], partition=partition
    )

  def train(self, hooks=(), postpush=False, prefetch=0, resume_data=None, **config):
    conf = CpuTrainingConfig(
      embedding_prefetch_capacity=prefetch, enable_embedding_postpush=postpush, **config
    )
    local.local_train_internal(
      self.params,
      conf,
      self.model_dir,
      steps=None,
      user_hooks=list(hooks),
      resume_data=resume_data,
    )

  def counts(self, ids):
    return counting_task.read_counts(self.params, CpuTrainingConfig(), self.model_dir, list(ids))

  def saved_positions(self):
    newest = tf.train.latest_checkpoint(self.model_dir)
    value = tf.train.load_variable(newest, f"stream_positions/{self.topic}")
    return dict(enumerate(value[: value.argmin()]))

  def committed(self):
    partitions = [confluent_kafka.TopicPartition(self.topic, i) for i in range(2)]
    consumer = confluent_kafka.Consumer(
      {"bootstrap.servers": self.kafka.servers, "group.id": "counting"}
    )
    try:
      return {found.partition: found.offset for found in consumer.committed(partitions, 60)}
    finally:
      consumer.close()

  def test_a_run_goes_on_where_the_checkpoint_is_and_repeats_what_came_after(self):
    self.send(range(20))
    self.send(range(20, 30), partition=1)
    self.train(save_checkpoints_steps=1000)
    self.assertEqual(self.saved_positions(), {0: 20, 1: 10})
    self.assertAllEqual(self.counts(range(30)), np.ones(30))
    self.assertEqual(self.committed(), {0: 20, 1: 10})

    # One that dies has saved nothing; one that follows trains the same again, and all of it once.
    self.send(range(30, 60))
    with self.assertRaisesRegex(ValueError, "killed"):
      self.train([_StopAfterHook(4)], save_checkpoints_steps=1000, postpush=True, prefetch=2)
    self.assertEqual(self.saved_positions(), {0: 20, 1: 10})
    self.train(save_checkpoints_steps=3, postpush=True, prefetch=2)
    self.assertEqual(self.saved_positions(), {0: 50, 1: 10})
    self.assertAllEqual(self.counts(range(60)), np.ones(60))

  def test_topics_may_be_named_in_another_order_and_new_ones_added(self):
    other, new = (self.kafka.create_topic(uuid.uuid4().hex, 1) for _ in range(2))
    self.send(range(20))
    self.kafka.send(other, [counting_task.make_sample(i) for i in range(20, 30)])
    self.params.stream.topics = [self.topic, other]
    self.train(save_checkpoints_steps=1000)

    # The group was told the same positions; here it forgets them.
    self.params.stream.group = uuid.uuid4().hex
    self.kafka.send(new, [counting_task.make_sample(i) for i in range(30, 35)])
    self.kafka.send(other, [counting_task.make_sample(i) for i in range(35, 40)])
    self.params.stream.topics = [other, new, self.topic]
    self.train(save_checkpoints_steps=1000)

    self.assertAllEqual(self.counts(range(40)), np.ones(40))

  def test_workers_read_the_partitions_that_are_theirs(self):
    topics = [self.topic, self.kafka.create_topic(uuid.uuid4().hex, 3)]
    for i, topic in enumerate(topics):
      for partition in range(2 + i):
        number = 10 * i + partition
        self.kafka.send(topic, [counting_task.make_sample(number)], partition=partition)
    self.params.stream.topics = topics
    read = []
    for worker in range(2):
      context = native_task_context.get()._replace(num_workers=2, worker_index=worker)
      with native_task_context.with_ctx(context), tf.Graph().as_default():
        task = self.params.instantiate()
        dataset = task.create_input_fn(graph_estimator.ModeKeys.TRAIN)()
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        features = iterator.get_next()
        ids = features["id"].values - counting_task.fid(0)
        positions = features[stream_positions.POSITIONS_FEATURE]
        with tf.compat.v1.Session() as session:
          session.run(tf.compat.v1.global_variables_initializer())
          session.run(iterator.initializer)
          found = []
          with self.assertRaises(tf.errors.OutOfRangeError):
            while True:
              values, last = session.run((ids, positions))
              found.extend(values)
      read.append((sorted(found), last.tolist()))

    size = stream_positions.MAX_PARTITIONS
    self.assertEqual(
      [(ids, sorted(last)) for ids, last in read],
      [
        ([0, 10, 12], [[0, 1], [size, 1], [size + 2, 1]]),
        ([1, 11], [[1, 1], [size + 1, 1]]),
      ],
    )

  def test_no_batch_mixes_messages_that_a_server_has_with_others(self):
    self.send(range(10))
    self.send(range(100, 105), partition=1)
    servers = np.full([2, 1, stream_positions.MAX_PARTITIONS], -1, np.int64)
    servers[:, 0, :2] = [[5, 2], [3, 2]]  # the first one has applied 3 and 4 of partition 0
    batches = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      positions = types.SimpleNamespace(start=tf.constant(servers))
      with mock.patch.object(stream_positions, "create", return_value=positions):
        dataset = self.params.instantiate().create_input_fn(graph_estimator.ModeKeys.TRAIN)()
      iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
      features = iterator.get_next()
      ids = features["id"].values - counting_task.fid(0)
      session.run(iterator.initializer)
      with self.assertRaises(tf.errors.OutOfRangeError):
        while True:
          values, after = session.run((ids, features[stream_positions.POSITIONS_FEATURE]))
          batches.append((values.tolist(), dict(after.tolist())))

    read = [number for numbers, _ in batches for number in numbers]
    self.assertCountEqual(read, [*range(3, 10), 102, 103, 104])
    of_both = [(numbers, after) for numbers, after in batches if {3, 4} & set(numbers)]
    self.assertEqual([number for numbers, _ in of_both for number in numbers], [3, 4])
    self.assertEqual(of_both[-1][1][0], 5)
    for numbers, after in batches:
      for partition, base in ((0, 0), (1, 100)):
        mine = [number - base for number in numbers if number // 100 == partition]
        if mine:
          self.assertEqual(after[partition], mine[-1] + 1)
    self.assertEqual(batches[-1][1], {0: 10, 1: 5})

  def test_bad_and_repeated_messages_are_left_out_and_counted(self):
    self.send(range(4))
    self.kafka.send(self.topic, [b"\xff poison", counting_task.make_sample(2)])
    self.train()
    self.send([3, 4])
    self.train()

    self.assertAllEqual(self.counts(range(5)), np.ones(5))
    counts = tf.train.load_variable(tf.train.latest_checkpoint(self.model_dir), "stream_counts")
    self.assertAllEqual(counts, [5, 1, 2, 1700000004])

  def test_a_silent_stream_saves_and_can_be_stopped(self):
    self.params.stream.stream_timeout = -1
    self.send(range(6))
    stopper = interrupt.StopOnInterruptHook()
    saved = {}

    def stop_when_saved():
      wait_until(lambda: tf.train.latest_checkpoint(self.model_dir) is not None)
      wait_until(lambda: self.saved_positions().get(0) == 6)
      saved.update(self.saved_positions())
      stopper.request()

    watcher = threading.Thread(target=stop_when_saved, daemon=True)
    watcher.start()
    self.train([stopper], save_checkpoints_secs=2, postpush=True, prefetch=1)
    watcher.join()

    self.assertEqual(saved[0], 6)
    self.assertAllEqual(self.counts(range(6)), np.ones(6))

  def test_an_input_that_loses_positions_is_refused(self):
    with tf.Graph().as_default():
      positions = stream_positions.create([self.topic], ["group.id=g"])
      with self.assertRaisesRegex(ValueError, "already"):
        stream_positions.create([self.topic], ["group.id=g"])
      with self.assertRaisesRegex(ValueError, "no __stream_positions__"):
        stream_positions.take({"id": tf.constant(1)})
      self.assertEqual(positions.topics, [self.topic])
    with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, "each topic once"):
      stream_positions.create(["a", "a"], [])
    with self.assertRaisesRegex(ValueError, "resume_data=False"):
      self.train(resume_data=False)

  def test_lag_is_what_is_in_the_topics_and_not_trained(self):
    self.send(range(7))
    self.send(range(5), partition=1)
    settings = [f"bootstrap.servers={self.kafka.servers}", "group.id=lag"]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      positions = stream_positions.create([self.topic], settings)
      pairs = tf.compat.v1.placeholder(tf.int64, [None, 2])
      counts = tf.constant([3, 0, 1, 1000], tf.int64)
      move = positions.move_after(None, stream_positions.StreamBatch(pairs, counts))
      session.run(tf.compat.v1.global_variables_initializer())
      monitor = stream_status.StreamMonitor(positions)
      self.addCleanup(monitor.close)

      before = monitor.read(session)
      session.run(move, {pairs: [[0, 4], [1, 5]]})
      # A broker has a second to answer, which may be short on a busy machine.
      found = []
      wait_until(lambda: found.append(monitor.read(session)) or found[-1].lag is not None)
      after = found[-1]
      session.run(move, {pairs: [[0, 100]]})  # somebody made the topic anew
      wait_until(lambda: monitor.read(session).lag == 0)
      monitor.close()
      monitor.close()
      with mock.patch.object(stream_positions, "make_client", side_effect=OSError("away")):
        away = monitor.read(session)

    self.assertIsNone(before.lag)
    self.assertEqual(before.describe(), "lag unknown")
    self.assertEqual(after.state.positions, {(self.topic, 0): 4, (self.topic, 1): 5})
    self.assertEqual(after.lag, 3)
    self.assertEqual(after.describe(now=3000), "lag 3   newest event 2,000 s ago   1 repeated")
    self.assertIn("newest event 0 s ago", after.describe(now=500))  # a clock that is behind
    self.assertIsNone(away.lag)


if __name__ == "__main__":
  tf.test.main()
