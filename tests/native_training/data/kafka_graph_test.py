"""Tests of datasets and resources that read a Kafka broker, in graph mode."""

import struct
import threading

import tensorflow as tf

from monolith.native_training import graph_estimator
from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.data import datasets, feature_utils, parsers
from tests.native_training.data.data_test_utils import fid_v2, frame, make_example
from tests.native_training.data.kafka_testing import KafkaTestCase
from tests.native_training.data.mock_kafka import TIMEOUT_SECS

tf.compat.v1.disable_eager_execution()

PbType = datasets.PbType
SETTINGS = ["conf.topic.auto.offset.reset=earliest", "fetch.wait.max.ms=50"]


def framed(*uids):
  records = [make_example({"a": [fid_v2(7, uid)]}, [1.0], uid=uid) for uid in uids]
  return b"".join(frame(record.SerializeToString()) for record in records)


class KafkaGraphTest(KafkaTestCase):
  def setUp(self):
    super().setUp()
    self.metadata = [
      *SETTINGS,
      f"group.id={self.group}",
      f"bootstrap.servers={self.kafka.servers}",
    ]

  def samples(self, **kwargs):
    return datasets.PBDataset(
      [self.topic],
      self.group,
      self.kafka.servers,
      variant_type="example",
      has_sort_id=False,
      configuration=SETTINGS,
      **kwargs,
    )

  def batches(self, **kwargs):
    return (
      self.samples(**kwargs)
      .batch(2)
      .map(lambda batch: parsers.parse_examples(batch, ["a"], extra_features=["uid"]))
    )

  def test_one_shot_iterator(self):
    self.kafka.send(self.topic, [framed(1, 2, 3), framed(4)])
    with tf.Graph().as_default(), self.session() as session:
      dataset = self.batches()
      element = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
      read = [session.run([element["uid"], element["a"].values]) for _ in range(2)]
    self.assertAllEqual(read[0][0], [[1], [2]])
    self.assertAllEqual(read[1][0], [[3], [4]])
    self.assertAllEqual(read[1][1], [fid_v2(7, 3), fid_v2(7, 4)])

  def test_initializable_iterator_ends(self):
    self.kafka.send(self.topic, [framed(1, 2, 3)])
    with tf.Graph().as_default(), self.session() as session:
      iterator = tf.compat.v1.data.make_initializable_iterator(
        self.batches(stream_timeout=8000, message_poll_timeout=8000)
      )
      uid = iterator.get_next()["uid"]
      session.run(iterator.initializer)
      self.assertAllEqual(session.run(uid), [[1], [2]])
      self.assertAllEqual(session.run(uid), [[3]])
      with self.assertRaises(tf.errors.OutOfRangeError):
        session.run(uid)

  def test_iterators_are_checkpointed_when_asked_for(self):
    with tf.Graph().as_default():
      self.samples(disable_iterator_save_restore=False)
      self.assertTrue(ckpt_hooks._get_meta().enable_iter_save_restore)
    with tf.Graph().as_default():
      self.samples(disable_iterator_save_restore=False, shared_name="shared")
      self.assertFalse(ckpt_hooks._get_meta().enable_iter_save_restore)
    with tf.Graph().as_default():
      self.samples()
      self.assertFalse(ckpt_hooks._get_meta().enable_iter_save_restore)
    with tf.Graph().as_default():
      datasets.create_plain_kafka_dataset("t", "g", "s")
      self.assertFalse(ckpt_hooks._get_meta().enable_iter_save_restore)

  def test_estimator(self):
    self.kafka.send(self.topic, [framed(*range(8))])

    def model_fn(features, labels, mode):
      del labels
      loss = tf.reduce_mean(tf.cast(features["uid"], tf.float32))
      step = tf.compat.v1.train.get_or_create_global_step()
      train_op = tf.compat.v1.assign_add(step, 1)
      return graph_estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = graph_estimator.Estimator(model_fn, self.get_temp_dir())
    estimator.train(self.batches, steps=3)
    self.assertEqual(estimator.get_variable_value("global_step"), 3)

  def test_closing_the_session_ends_a_read(self):
    self.kafka.send(self.topic, [framed(1)])
    with tf.Graph().as_default():
      session = tf.compat.v1.Session()
      iterator = tf.compat.v1.data.make_initializable_iterator(self.samples())
      number = feature_utils.variant_to_zeros(iterator.get_next())
      session.run(iterator.initializer)
      session.run(number)
      errors = []

      def read():
        try:
          session.run(number)
        except (tf.errors.OpError, RuntimeError) as error:  # maybe closed before it began
          errors.append(error)

      thread = threading.Thread(target=read)
      thread.start()
      session.close()
      thread.join(TIMEOUT_SECS)
      self.assertFalse(thread.is_alive())
      self.assertLen(errors, 1)

  def test_resource(self):
    self.kafka.send(self.topic, [b"a", b"b\0", b"c"], [b"x", b"y", b"z"])
    metadata = [*self.metadata, "batch.num.messages=2", "enable.partition.eof=false"]
    with tf.Graph().as_default(), self.session() as session:
      resource = feature_utils.kafka_resource_init([self.topic], metadata)
      first = session.run(feature_utils.kafka_read_next(resource, 0, 60000, -1))
      self.assertEqual(first.message.tolist(), [b"a", b"b\0"])
      self.assertEqual(first.key.tolist(), [b"x", b"y"])
      self.assertEqual(first.continue_fetch, 1)
      # Messages may be late on a slow machine; silence counts from their arrival.
      read = feature_utils.kafka_read_next(resource, 1, 500, 1000)
      messages, flags = [], []
      while not messages or flags[-1]:
        fetch = session.run(read)
        messages += fetch.message.tolist()
        flags.append(fetch.continue_fetch)
      self.assertEqual(messages, [b"c"])
      # The stream ends only after two polls without a message.
      self.assertGreaterEqual(len(flags), 2)

  def test_resource_of_samples_in_a_dataset(self):
    self.kafka.send(self.topic, [framed(1, 2), framed(3)])
    with tf.Graph().as_default(), self.session() as session:
      resource = feature_utils.kafka_resource_init(
        tf.constant([self.topic]), self.metadata, "example", "example"
      )
      dataset = tf.data.Dataset.range(10).map(
        lambda i: feature_utils.kafka_read_next_v2(resource, i, 10000, -1)
      )
      dataset = dataset.map(lambda x: x.message).unbatch().batch(3)
      iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
      uid = parsers.parse_examples(iterator.get_next(), [], extra_features=["uid"])["uid"]
      session.run(iterator.initializer)
      self.assertAllEqual(session.run(uid), [[1], [2], [3]])

  def test_resource_of_plaintext(self):
    self.kafka.send(self.topic, [frame(b"a")])
    with tf.Graph().as_default(), self.session() as session:
      resource = feature_utils.kafka_resource_init(
        [self.topic], self.metadata, "plaintext", "plaintext"
      )
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "plaintext, which is no sample"):
        session.run(feature_utils.kafka_read_next_v2(resource, 0, 10000, -1).continue_fetch)
      read = session.run(feature_utils.kafka_read_next(resource, 0, 10000, -1))
      self.assertEqual(read.message.tolist(), [frame(b"a")])

  def test_resource_with_bad_arguments(self):
    init = feature_utils.kafka_resource_init
    for topics, metadata, text in (
      ([], self.metadata, "topics is empty"),
      (["a"], ["b"], "'b', want key=value"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        init(topics, metadata)
    with tf.Graph().as_default(), self.session() as session:
      topics = tf.compat.v1.placeholder(tf.string)
      read = feature_utils.kafka_read_next(init(topics, self.metadata), 0, 1, -1)
      for value, text in (([], "topics is empty"), ("a", "topics has shape")):
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
          session.run(read, {topics: value})
      for number, text in (
        ((0, 0, -1), "message_poll_timeout is 0"),
        ((0, 1, -2), "stream_timeout is -2"),
      ):
        bad = feature_utils.kafka_read_next(init([self.topic], self.metadata), *number)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
          session.run(bad)
    with self.assertRaisesRegex(ValueError, "want one of"):
      init(["a"], self.metadata, "no type")


class DecodeTest(tf.test.TestCase):
  def test_bad_arguments(self):
    decode = feature_utils.ragged_data_ops.monolith_decode_messages
    for kwargs, text in (
      ({"output_pb_type": "examplebatch"}, "output_pb_type"),
      ({"input_pb_type": "none"}, "input_pb_type is 'none'"),
      ({"feature_pruning_type": 3}, "feature_pruning_type is 3"),
      ({"out_type": tf.string}, "out_type is string"),
      ({"chnids": [1]}, "length of datasources is 0"),
      ({"origin": ["a", "b"]}, "origin has shape"),
    ):
      options = {
        "message": [struct.pack("<Q", 0)],
        "origin": ["a"],
        "out_type": tf.variant,
        "input_pb_type": "example",
        "output_pb_type": "example",
        **kwargs,
      }
      with tf.Graph().as_default(), self.session() as session:
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
          session.run(
            feature_utils.variant_to_zeros(decode(**options))
            if options["out_type"] == tf.variant
            else decode(**options)
          )


if __name__ == "__main__":
  tf.test.main()
