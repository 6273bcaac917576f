"""Loads Kafka's client library, an extra; the error of this import says how to install it."""

from monolith import _install

with _install.naming_extra("realtime"):
  import confluent_kafka
  from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
  from confluent_kafka.admin import AdminClient, NewTopic

__all__ = [
  "AdminClient",
  "KafkaError",
  "KafkaException",
  "Message",
  "NewTopic",
  "TopicPartition",
  "confluent_kafka",
]
