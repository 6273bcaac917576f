"""Messages to a Kafka broker that really listens."""

from __future__ import annotations

import os
from unittest import mock

import confluent_kafka
import tensorflow as tf

from monolith.native_training.metric import kafka_utils, metric_hook
from tests.native_training.data import mock_kafka
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()


class KafkaTestCase(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.kafka = mock_kafka.MockKafka()
    self.addCleanup(self.kafka.close)
    self.topic = self.kafka.create_topic("metrics")

  def received(self, count):
    """Returns the first `count` messages of the topic."""
    consumer = confluent_kafka.Consumer(
      {
        "bootstrap.servers": self.kafka.servers,
        "group.id": "test",
        "auto.offset.reset": "earliest",
      }
    )
    self.addCleanup(consumer.close)
    consumer.subscribe([self.topic])
    messages = []

    def is_complete():
      message = consumer.poll(0.1)
      if message is not None and message.error() is None:
        messages.append(message.value())
      return len(messages) >= count

    wait_until(is_complete, timeout_secs=mock_kafka.TIMEOUT_SECS)
    return messages


class KProducerTest(KafkaTestCase):
  def test_sends_in_order(self):
    producer = kafka_utils.KProducer(self.kafka.servers, self.topic)
    producer.send("text")
    producer.send(b"bytes")
    producer.send([b"one", None, "", "two"])
    producer.send(None)
    wait_until(lambda: producer.success() == 4, timeout_secs=mock_kafka.TIMEOUT_SECS)
    producer.close()

    self.assertEqual((producer.total(), producer.success(), producer.failed()), (4, 4, 0))
    self.assertEqual(self.received(4), [b"text", b"bytes", b"one", b"two"])

  def test_close_sends_what_waits(self):
    producer = kafka_utils.KProducer(self.kafka.servers, self.topic)
    producer.send([f"message {i}" for i in range(100)])
    # A second is short for a busy machine to connect and send in.
    with mock.patch.object(kafka_utils, "_CLOSE_TIMEOUT_SECS", mock_kafka.TIMEOUT_SECS):
      producer.close()

    self.assertEqual(producer.total(), 100)
    self.assertEqual(self.received(100), [f"message {i}".encode() for i in range(100)])

  def test_messages_too_large_are_counted(self):
    producer = kafka_utils.KProducer(self.kafka.servers, self.topic)
    producer.send(b"x" * (2 << 20))
    producer.send("small")
    wait_until(lambda: producer.success() == 1, timeout_secs=mock_kafka.TIMEOUT_SECS)
    producer.close()

    self.assertEqual((producer.total(), producer.success(), producer.failed()), (2, 1, 1))
    self.assertEqual(self.received(1), [b"small"])


class KafkaMetricHookTest(KafkaTestCase):
  def test_messages_of_every_step(self):
    environment = {"KAFKA_BROKER_LIST": self.kafka.servers, "KAFKA_TOPIC_NAME": self.topic}
    with tf.Graph().as_default(), mock.patch.dict(os.environ, environment):
      step = tf.compat.v1.train.get_or_create_global_step()
      advance = tf.compat.v1.assign_add(step, 1)
      with tf.control_dependencies([advance]):
        message = tf.strings.as_string(step.read_value())
      hook = metric_hook.KafkaMetricHook(tf.reshape(message, [1]))
      with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as session:
        for _ in range(3):
          session.run(advance)
          wait_until(
            lambda: hook._producer.success() == hook._producer.total(),
            timeout_secs=mock_kafka.TIMEOUT_SECS,
          )

    self.assertEqual(self.received(3), [b"1", b"2", b"3"])


if __name__ == "__main__":
  tf.test.main()
