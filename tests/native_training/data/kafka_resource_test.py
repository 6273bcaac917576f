"""Tests of Kafka messages as tensors: what is in them, and when a stream ends."""

import unittest

import tensorflow as tf

from monolith.native_training.data import feature_utils, kafka_resource, kafka_settings
from monolith.native_training.data.pb_types import PbType
from tests.native_training.data.data_test_utils import frame, make_example
from tests.native_training.data.mock_kafka import MockKafka


class MessageFormatTest(unittest.TestCase):
  def test_what_can_become_what(self):
    for input_type, output_type in (
      (PbType.INSTANCE, PbType.EXAMPLE),
      (PbType.EXAMPLEBATCH, PbType.INSTANCE),
      (PbType.EXAMPLE, PbType.PLAINTEXT),
      (PbType.EXAMPLEBATCH, PbType.EXAMPLEBATCH),
    ):
      kafka_resource.MessageFormat(input_type, output_type)
    for input_type, output_type in (
      (PbType.PLAINTEXT, PbType.EXAMPLE),
      (PbType.EXAMPLE, PbType.EXAMPLEBATCH),
    ):
      with self.assertRaisesRegex(
        ValueError, f"{input_type.to_name()} cannot become {output_type.to_name()}"
      ):
        kafka_resource.MessageFormat(input_type, output_type)

  def test_a_message_with_header_has_several_samples(self):
    payloads = [make_example(uid=i).SerializeToString() for i in (1, 2, 3)]
    message = b"".join(frame(payload, bytes(8)) for payload in payloads)
    plain = kafka_resource.MessageFormat(PbType.EXAMPLE, PbType.PLAINTEXT, has_sort_id=True)

    samples = plain.decode(tf.constant([message, message]), tf.constant(["a", "b"]))

    self.assertEqual(plain.element_type, tf.string)
    self.assertEqual(samples.numpy().tolist(), payloads * 2)

  def test_a_message_without_header_is_one_sample(self):
    payload = make_example(uid=1).SerializeToString()
    bare = kafka_resource.MessageFormat(PbType.EXAMPLE, PbType.EXAMPLE, has_header=False)

    samples = bare.decode(tf.constant([payload]), tf.constant(["a"]))

    self.assertEqual((samples.dtype, samples.shape), (tf.variant, [1]))

  def test_a_torn_message_is_named(self):
    plain = kafka_resource.MessageFormat(PbType.EXAMPLE, PbType.PLAINTEXT)
    with self.assertRaisesRegex(tf.errors.OpError, "t/0@17"):
      plain.decode(tf.constant([b"\x09"]), tf.constant(["t/0@17"]))


class StreamTimeoutTest(unittest.TestCase):
  def read(self, message_poll_timeout, stream_timeout):
    """Returns `continue_fetch` of the fetches after the last message."""
    with MockKafka() as kafka:
      kafka.send(kafka.create_topic("t"), [b"a"])
      settings = ["conf.topic.auto.offset.reset=earliest", "enable.partition.eof=false"]
      resource = feature_utils.kafka_resource_init(
        ["t"], kafka_settings.make_metadata("g", kafka.servers, 1, settings)
      )
      first = feature_utils.kafka_read_next(resource, 0, 60000, -1)
      self.assertEqual(first.message.numpy().tolist(), [b"a"])
      result = []
      while len(result) < 5 and all(result):
        fetch = feature_utils.kafka_read_next(resource, 1, message_poll_timeout, stream_timeout)
        self.assertEqual(fetch.message.numpy().tolist(), [])
        result.append(bool(fetch.continue_fetch))
      del resource
      return result

  def test_ends_after_so_many_polls(self):
    self.assertEqual(self.read(50, 120), [True, True, False])

  def test_one_poll(self):
    self.assertEqual(self.read(50, 50), [False])

  def test_endless(self):
    self.assertEqual(self.read(20, -1), [True] * 5)


if __name__ == "__main__":
  unittest.main()
