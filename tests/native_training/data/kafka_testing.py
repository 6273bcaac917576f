"""Helps the tests of Kafka datasets: settings, samples, and a broker for each class."""

import glob
import struct
import uuid
from unittest import mock

import tensorflow as tf

from idl.matrix.proto import example_pb2
from monolith.native_training import runner_utils  # noqa: F401  (defines the flags of Kafka)
from monolith.native_training.data import datasets, kafka_dataset, parsers
from tests.native_training.data.data_test_utils import (
  fid_v2,
  frame,
  make_example,
  make_line_id,
)
from tests.native_training.data.mock_kafka import MockKafka

PbType = datasets.PbType
ZERO = struct.pack("<Q", 0)
CONFIGURATION = [
  "conf.topic.auto.offset.reset=earliest",
  "session.timeout.ms=6000",
  "heartbeat.interval.ms=200",
  "fetch.wait.max.ms=50",
]
# No broker listens at this address.
NOBODY = "127.0.0.1:1"


def uids(dataset, parse=parsers.parse_examples):
  """Reads `LineId.uid` of all samples, two at a time."""
  if parse is parsers.parse_instances:
    batches = dataset.batch(2).map(lambda x: parse(x, extra_features=["uid"]))
  else:
    batches = dataset.batch(2).map(lambda x: parse(x, [], extra_features=["uid"]))
  return [int(uid) for batch in batches for uid in batch["uid"].numpy().flatten()]


def framed_examples(*uids, header=ZERO):
  return b"".join(frame(make_example(uid=uid).SerializeToString(), header) for uid in uids)


def make_batch(*uids):
  batch = example_pb2.ExampleBatch(batch_size=len(uids))
  line_ids = batch.named_feature_list.add(name="__LINE_ID__")
  ids = batch.named_feature_list.add(name="a")
  for uid in uids:
    line_id = make_line_id(uid=uid).SerializeToString()
    line_ids.feature.add().bytes_list.value.append(line_id)
    ids.feature.add().fid_v2_list.value.append(fid_v2(7, uid))
  return batch


def count_consumers():
  """Counts this process's clients by the name of the thread that each of them runs."""
  count = 0
  for path in glob.glob("/proc/self/task/*/comm"):
    try:
      with open(path, encoding="utf-8") as stream:
        count += stream.read().strip() == "rdk:main"
    except FileNotFoundError:  # the thread has just ended
      pass
  return count


def record_ops():
  """Records the arguments of the op behind the datasets."""
  return mock.patch.object(
    kafka_dataset.gen_monolith_ops,
    "monolith_kafka_dataset",
    wraps=kafka_dataset.gen_monolith_ops.monolith_kafka_dataset,
  )


class KafkaTestCase(tf.test.TestCase):
  """Has a broker, and in each test a topic and a group of its own."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.kafka = MockKafka()
    cls.addClassCleanup(cls.kafka.close)

  def setUp(self):
    super().setUp()
    self.topic = self.kafka.create_topic(f"topic-{uuid.uuid4().hex}")
    self.group = f"group-{uuid.uuid4().hex}"

  def plain(self, *, topics=None, **kwargs):
    kwargs.setdefault("configuration", CONFIGURATION)
    return datasets.create_plain_kafka_dataset(
      topics or self.topic, self.group, self.kafka.servers, **kwargs
    )

  def framed(self, *, input_pb_type=PbType.EXAMPLE, **kwargs):
    kwargs.setdefault("configuration", CONFIGURATION)
    return datasets.KafkaDataset(
      self.topic, self.group, self.kafka.servers, input_pb_type=input_pb_type, **kwargs
    )
