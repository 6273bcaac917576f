"""The dataset that reads a topic, where its iterator resumes, and what ends with it."""

import os
import subprocess
import sys
import threading
import uuid

import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from idl.matrix.proto import example_pb2
from monolith.native_training import runner_utils  # noqa: F401  (defines the flags of Kafka)
from monolith.native_training.data import datasets, feature_utils
from tests.native_training.data.data_test_utils import (
  proto_of,
)
from tests.native_training.data.kafka_testing import (
  CONFIGURATION,
  NOBODY,
  KafkaTestCase,
  PbType,
  count_consumers,
  framed_examples,
  record_ops,
  uids,
)
from tests.native_training.data.mock_kafka import TIMEOUT_SECS, MockKafka
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough


class DispatchTest(KafkaTestCase):
  """Tests how `PBDataset` translates its arguments, without any broker."""

  def assert_reads(self, dataset, topics, group_id, servers):
    self.assertIsInstance(dataset, datasets.KafkaDataset)
    options = self.op.call_args.kwargs
    self.assertEqual(options["topics"], topics)
    self.assertIn(f"group.id={group_id}", options["metadata"])
    self.assertIn(f"bootstrap.servers={servers}", options["metadata"])
    self.assertLessEqual(count_consumers(), self.consumers, "construction must not connect")

  def setUp(self):
    super().setUp()
    recorder = record_ops()
    self.op = recorder.start()
    self.addCleanup(recorder.stop)
    self.kafka.send(self.topic, [b""])  # so that the broker's own clients exist
    self.consumers = count_consumers()

  def test_arguments(self):
    make = datasets.PBDataset
    self.assert_reads(make(["ab"], group_id="c", servers="d"), ["ab"], "c", "d")
    self.assert_reads(make(["a", "b"], "c", "d"), ["a", "b"], "c", "d")
    self.assert_reads(make(["a"], "c", ["d", "e"]), ["a"], "c", "d,e")
    self.assert_reads(make(topics=["a"], group_id="c", servers="d"), ["a"], "c", "d")
    self.assert_reads(
      make(patterns=["x"], topics=["a"], group_id="c", servers="d"), ["a"], "c", "d"
    )

  def test_flags(self):
    with flagsaver.flagsaver(kafka_topics="a,b", kafka_group_id="c", kafka_servers="d"):
      self.assert_reads(datasets.PBDataset(), ["a", "b"], "c", "d")
      self.assert_reads(datasets.PBDataset("file"), ["a", "b"], "c", "d")
      self.assert_reads(datasets.PBDataset(["x"]), ["x"], "c", "d")
      self.assert_reads(datasets.PBDataset(group_id="y", servers="z"), ["a", "b"], "y", "z")
      self.assert_reads(datasets.PBDataset(topics=["x"]), ["x"], "c", "d")
    with flagsaver.flagsaver(kafka_group_id="c", kafka_servers="d"):
      self.assertIsInstance(datasets.PBDataset(""), datasets.FilePBDataset)
      self.assert_reads(datasets.PBDataset(topics=["x"]), ["x"], "c", "d")

  def test_files(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "data")
    with open(path, "wb") as stream:
      stream.write(framed_examples(1))
    for dataset in (
      datasets.PBDataset(path, input_pb_type=PbType.EXAMPLE),
      datasets.PBDataset([path], 1024, PbType.EXAMPLE),
      datasets.PBDataset([path], input_pb_type=PbType.EXAMPLE, cycle_length=1, has_header=False),
      datasets.PBDataset(patterns=[path], group_id="c", input_pb_type=PbType.EXAMPLE),
    ):
      self.assertNotIsInstance(dataset, datasets.KafkaDataset)
      self.assertEqual(uids(dataset), [1])
    self.assertIsInstance(datasets.PBDataset(""), datasets.FilePBDataset)

  def test_incomplete(self):
    for args, kwargs, text in (
      ((["a"], "c"), {}, "empty: servers"),
      ((["a"],), {"servers": "d"}, "empty: group_id"),
      ((), {"topics": ["a"]}, "empty: group_id, servers"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        datasets.PBDataset(*args, **kwargs)

  def test_keywords_reach_the_dataset(self):
    dataset = datasets.PBDataset(
      ["a"],
      "c",
      "d",
      PbType.PLAINTEXT,
      variant_type="example",
      poll_batch_size=7,
      configuration=["k=v"],
      container="x",
      shared_name="y",
      kafka_other_metadata="o=p",
    )
    self.assertEqual(dataset.output_pb_type, PbType.PLAINTEXT)
    options = self.op.call_args.kwargs
    self.assertEqual((options["container"], options["shared_name"]), ("x", "y"))
    self.assertEqual(options["metadata"][0], "k=v")
    self.assertEqual(options["metadata"][-2:], ["batch.num.messages=7", "o=p"])
    for timeouts in ({"stream_timeout": -2}, {"message_poll_timeout": 0}):
      with self.assertRaises(ValueError):
        datasets.PBDataset(["a"], "c", "d", **timeouts)

  def test_flag_is_defined(self):
    self.assertIsNone(flags.FLAGS["kafka_other_metadata"].default)


class CheckpointTest(KafkaTestCase):
  """Tests that iterators resume where they were saved, whatever the group has committed."""

  def save(self, iterator):
    path = os.path.join(os.environ["TEST_TMPDIR"], uuid.uuid4().hex)
    return tf.train.Checkpoint(iterator=iterator).save(path)

  def restore(self, dataset, path):
    iterator = iter(dataset)
    tf.train.Checkpoint(iterator=iterator).restore(path).assert_consumed()
    return iterator

  def uid(self, iterator):
    return proto_of(next(iterator), example_pb2.Example).line_id.uid

  def test_messages(self):
    self.kafka.send(self.topic, [b"%d" % i for i in range(10)])
    dataset = self.plain(poll_batch_size=2)
    iterator = iter(dataset)
    next(iterator)
    path = self.save(iterator)
    rest = [next(iterator).message.numpy().tolist() for _ in range(4)]
    self.assertEqual(rest[0], [b"2", b"3"])
    del iterator  # commits

    restored = self.restore(dataset, path)

    self.assertEqual([next(restored).message.numpy().tolist() for _ in range(4)], rest)
    self.kafka.send(self.topic, [b"new"])
    self.assertEqual(next(restored).message.numpy().tolist(), [b"new"])

  def test_samples_in_the_middle_of_a_message(self):
    self.kafka.send(
      self.topic, [framed_examples(1, 2, 3), framed_examples(4, 5), framed_examples(6)]
    )
    dataset = self.framed()
    iterator = iter(dataset)
    for expected in (1, 2):
      self.assertEqual(self.uid(iterator), expected)
    path = self.save(iterator)
    self.assertEqual([self.uid(iterator) for _ in range(4)], [3, 4, 5, 6])
    del iterator

    restored = self.restore(dataset, path)

    self.assertEqual([self.uid(restored) for _ in range(4)], [3, 4, 5, 6])

  def test_partition_that_was_silent_when_saved(self):
    topic = self.kafka.create_topic(f"two-{uuid.uuid4().hex}", partitions=2)
    self.kafka.send(topic, [b"a"], partition=0)
    dataset = self.plain(topics=topic)
    iterator = iter(dataset)
    self.assertEqual(next(iterator).message.numpy().tolist(), [b"a"])
    path = self.save(iterator)
    self.kafka.send(topic, [b"b"], partition=1)
    self.assertEqual(next(iterator).message.numpy().tolist(), [b"b"])
    del iterator  # commits the position of both

    restored = self.restore(dataset, path)

    self.assertEqual(next(restored).message.numpy().tolist(), [b"b"])

  def test_saved_before_the_first_message(self):
    self.kafka.send(self.topic, [b"a"])
    dataset = self.plain()
    path = self.save(iter(dataset))
    self.assertEqual(next(self.restore(dataset, path)).message.numpy().tolist(), [b"a"])

  def test_saved_again_without_reading(self):
    self.kafka.send(self.topic, [b"a", b"b", b"c"])
    dataset = self.plain(poll_batch_size=1)
    iterator = iter(dataset)
    next(iterator)
    path = self.save(iterator)
    del iterator
    path = self.save(self.restore(dataset, path))
    self.assertEqual(next(self.restore(dataset, path)).message.numpy().tolist(), [b"b"])

  def test_saved_at_the_end(self):
    self.kafka.send(self.topic, [b"a"])
    dataset = self.plain(stream_timeout=8000, message_poll_timeout=8000)
    iterator = iter(dataset)
    self.assertLen(list(iterator), 1)
    self.assertEmpty(list(self.restore(dataset, self.save(iterator))))

  def test_messages_that_are_gone(self):
    self.kafka.send(self.topic, [b"%d" % i for i in range(6)])
    iterator = iter(self.plain(poll_batch_size=4))
    next(iterator)
    path = self.save(iterator)
    with MockKafka() as kafka:
      kafka.send(kafka.create_topic(self.topic), [b"other"])
      dataset = datasets.create_plain_kafka_dataset(
        self.topic, self.group, kafka.servers, configuration=CONFIGURATION
      )
      restored = self.restore(dataset, path)
      with self.assertRaisesRegex(
        tf.errors.DataLossError,
        f"cannot resume topic {self.topic}, partition 0 at offset 4: the broker has 0 to 1",
      ):
        next(restored)

  def test_shared_consumers_have_no_position(self):
    iterator = iter(self.plain(shared_name="no position"))
    with self.assertRaisesRegex(tf.errors.UnimplementedError, "several iterators share it"):
      self.save(iterator)


class LifecycleTest(KafkaTestCase):
  def setUp(self):
    super().setUp()
    # Counts the broker and its producer; clients of other tests may still be ending.
    self.before = 2
    wait_until(lambda: count_consumers() == self.before)

  def test_closed_at_the_end(self):
    dataset = self.plain(stream_timeout=200, message_poll_timeout=100)
    iterator = iter(dataset)
    self.assertEqual(count_consumers(), self.before)
    self.assertEmpty(list(iterator))
    wait_until(lambda: count_consumers() == self.before)

  def test_closed_when_the_iterator_is_destroyed(self):
    self.kafka.send(self.topic, [b"a", b"b", b"c"])
    # The second iterator waits in its own thread for messages that never come.
    for poll_batch_size, prefetch in ((1, 0), (3, 2)):
      self.group = uuid.uuid4().hex
      iterator = iter(self.plain(poll_batch_size=poll_batch_size).prefetch(prefetch))
      next(iterator)
      self.assertEqual(count_consumers(), self.before + 1)
      del iterator
      self.assertEqual(count_consumers(), self.before)

  def test_iterators_connect_when_first_used(self):
    self.kafka.send(self.topic, [b"a"])
    dataset = self.plain(poll_batch_size=1, shared_name="")
    first, second = iter(dataset), iter(dataset)
    self.assertEqual(next(first).message.numpy().tolist(), [b"a"])
    self.assertEqual(count_consumers(), self.before + 1)
    del second

  def test_resource_is_closed_with_its_handle(self):
    self.kafka.send(self.topic, [b"a"])
    metadata = [f"group.id={self.group}", f"bootstrap.servers={self.kafka.servers}"]
    resources = [
      feature_utils.kafka_resource_init([self.topic], [*CONFIGURATION, *metadata]) for _ in range(2)
    ]
    self.assertEqual(count_consumers(), self.before)
    fetch = feature_utils.kafka_read_next(resources[0], 0, 60000, -1)
    self.assertEqual(fetch.message.numpy().tolist(), [b"a"])
    self.assertEqual(count_consumers(), self.before + 1)
    resources.clear()
    self.assertEqual(count_consumers(), self.before)

  def test_silence_of_a_missing_broker_is_an_error(self):
    dataset = datasets.create_plain_kafka_dataset(
      self.topic, self.group, NOBODY, stream_timeout=200, message_poll_timeout=100
    )
    with self.assertRaisesRegex(tf.errors.UnknownError, f"servers {NOBODY}.*brokers are down"):
      list(dataset)

  def test_endless_stream_survives_a_broker_that_is_away(self):
    with MockKafka() as kafka:
      topic = kafka.create_topic("away")
      kafka.send(topic, [b"before"])
      settings = [*CONFIGURATION, "reconnect.backoff.max.ms=200"]
      iterator = iter(
        datasets.create_plain_kafka_dataset(
          topic, self.group, kafka.servers, message_poll_timeout=50, configuration=settings
        )
      )
      self.assertEqual(next(iterator).message.numpy().tolist(), [b"before"])
      kafka.set_down(True)
      read = []
      thread = threading.Thread(
        target=lambda iterator: read.append(next(iterator).message.numpy()), args=(iterator,)
      )
      thread.start()
      # A reader that does not wait endlessly fails meanwhile.
      with self.assertRaisesRegex(tf.errors.UnknownError, "brokers are down"):
        list(
          datasets.create_plain_kafka_dataset(
            topic, self.group, kafka.servers, stream_timeout=200, message_poll_timeout=100
          )
        )
      kafka.set_down(False)
      kafka.send(topic, [b"after"])
      thread.join(TIMEOUT_SECS)
      self.assertEqual([message.tolist() for message in read], [[b"after"]])

  def test_missing_client(self):
    script = (
      "from monolith.native_training.data import datasets\n"
      "dataset = datasets.create_plain_kafka_dataset('t', 'g', '127.0.0.1:1')\n"
      "print('made')\n"
      "next(iter(dataset))"
    )
    process = subprocess.run(
      [sys.executable, "-c", script],
      capture_output=True,
      text=True,
      env={**os.environ, "MONOLITH_LIBRDKAFKA": "/no/such/librdkafka.so"},
    )
    self.assertNotEqual(process.returncode, 0)
    self.assertEqual(process.stdout, "made\n")
    self.assertRegex(process.stderr, r"FailedPreconditionError.*pip install .*\[kafka\]")
    self.assertIn("/no/such/librdkafka.so", process.stderr)

  def test_interpreter_ends_while_iterators_wait(self):
    self.kafka.send(self.topic, [b"a"])
    script = f"""
import tensorflow as tf
from monolith.native_training.data import datasets

def read(servers, group):
  return iter(datasets.create_plain_kafka_dataset(
      {self.topic!r}, group, servers, configuration={CONFIGURATION!r}).prefetch(1))

waiting = read({self.kafka.servers!r}, {self.group!r})
print(next(waiting).message.numpy())
unreachable = read({NOBODY!r}, "other")
idle = read({self.kafka.servers!r}, "idle")
print("end")
"""
    process = subprocess.run(
      [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_SECS
    )
    self.assertEqual(process.returncode, 0, process.stderr)
    self.assertEqual(process.stdout, "[b'a']\nend\n")


if __name__ == "__main__":
  tf.test.main()
