"""Tests of datasets that read a Kafka broker, in eager mode."""

import glob
import os
import struct
import subprocess
import sys
import threading
import time
import uuid
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith.native_training import runner_utils  # noqa: F401  (defines the flags of Kafka)
from monolith.native_training.data import datasets, feature_utils, kafka_dataset, parsers
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  frame,
  make_example,
  make_instance,
  make_line_id,
  proto_of,
)
from tests.native_training.data.mock_kafka import TIMEOUT_SECS, MockKafka
from tests.wait_until import wait_until

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


class _KafkaTest(tf.test.TestCase):
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


class PlainTest(_KafkaTest):
  def test_messages_and_keys(self):
    self.kafka.send(self.topic, [b"a\0", b"", None, b"\xff"], [b"k", b"\0", b"", b"\xfe"])

    (element,) = self.plain().take(1)

    self.assertEqual(element._fields, ("message", "key", "continue_fetch"))
    self.assertEqual(element.message.numpy().tolist(), [b"a\0", b"", b"", b"\xff"])
    self.assertEqual(element.key.numpy().tolist(), [b"k", b"\0", b"", b"\xfe"])
    self.assertEqual(element.continue_fetch.numpy(), 1)

  def test_element_spec(self):
    spec = self.plain().element_spec
    self.assertEqual(spec.message, tf.TensorSpec([None], tf.string))
    self.assertEqual(spec.key, tf.TensorSpec([None], tf.string))
    self.assertEqual(spec.continue_fetch, tf.TensorSpec([], tf.int64))

  def test_partial_last_batch_is_kept(self):
    messages = [b"%d" % i for i in range(10)]
    self.kafka.send(self.topic, messages)

    batches = [
      element.message.numpy().tolist()
      for element in self.plain(poll_batch_size=4, stream_timeout=8000, message_poll_timeout=8000)
    ]

    self.assertEqual(sum(batches, []), messages)
    self.assertEqual(batches[:2], [messages[:4], messages[4:8]])

  def test_maps_the_message_through_a_parse_function(self):
    examples = [
      tf.train.Example(
        features=tf.train.Features(
          feature={"mov": tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))}
        )
      )
      for i in range(5)
    ]
    self.kafka.send(self.topic, [example.SerializeToString() for example in examples])
    features = {"mov": tf.io.FixedLenFeature([], tf.int64)}

    dataset = self.plain(poll_batch_size=16).map(lambda x: tf.io.parse_example(x.message, features))

    self.assertEqual(next(iter(dataset))["mov"].numpy().tolist(), [0, 1, 2, 3, 4])

  def test_topics_and_partitions(self):
    other = self.kafka.create_topic(f"other-{uuid.uuid4().hex}", partitions=3)
    sent = {(self.topic, 0): [b"t0", b"t1"]}
    for partition in range(3):
      sent[(other, partition)] = [b"p%d-%d" % (partition, i) for i in range(4)]
    for (topic, partition), messages in sent.items():
      self.kafka.send(topic, messages, partition=partition)
    flat = sum(sent.values(), [])

    for topics in ([self.topic, other], f"{self.topic}, {other}"):
      self.group = uuid.uuid4().hex
      dataset = self.plain(topics=topics, poll_batch_size=3).map(lambda x: x.message).unbatch()
      read = [message.numpy() for message in dataset.take(len(flat))]
      self.assertCountEqual(read, flat)
      for messages in sent.values():
        self.assertEqual([message for message in read if message in messages], messages)

  def test_empty_topic_ends(self):
    dataset = self.plain(stream_timeout=200, message_poll_timeout=100)
    self.assertEqual(list(dataset), [])

  def test_endless_stream_waits_for_messages(self):
    iterator = iter(self.plain(message_poll_timeout=20, stream_timeout=-1))
    self.kafka.send(self.topic, [b"first"])
    self.assertEqual(next(iterator).message.numpy().tolist(), [b"first"])
    read = []
    thread = threading.Thread(target=lambda: read.append(next(iterator).message.numpy().tolist()))
    thread.start()
    # Another consumer sees the same silence.
    silent = feature_utils.kafka_resource_init(
      [self.topic], [f"group.id={uuid.uuid4().hex}", f"bootstrap.servers={self.kafka.servers}"]
    )
    for i in range(10):
      fetch = feature_utils.kafka_read_next(silent, i, 20, -1)
      self.assertEqual(fetch.message.shape, [0])
      self.assertEqual(fetch.continue_fetch, 1)

    self.kafka.send(self.topic, [b"second"])
    thread.join(TIMEOUT_SECS)
    self.assertEqual(read, [[b"second"]])

  def test_starts_where_the_group_left_off(self):
    self.kafka.send(self.topic, [b"a", b"b"])
    (element,) = self.plain().take(1)
    self.assertEqual(element.message.numpy().tolist(), [b"a", b"b"])
    self.kafka.send(self.topic, [b"c"])
    self.assertEqual(next(iter(self.plain())).message.numpy().tolist(), [b"c"])

  def test_members_of_a_group_share_the_partitions(self):
    topic = self.kafka.create_topic(f"shared-{uuid.uuid4().hex}", partitions=2)
    read = [[], []]

    def consume(i):
      dataset = self.plain(topics=topic).map(lambda x: x.message).unbatch()
      for message in dataset:
        read[i].append(message.numpy())
        if message.numpy().startswith(b"last"):
          return

    threads = [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
      thread.start()
    sent = 0
    deadline = time.monotonic() + TIMEOUT_SECS

    def send_round(text):
      nonlocal sent
      for partition in range(2):
        self.kafka.send(topic, [text + b"%d" % sent], partition=partition)
        sent += 1
      while len({*read[0], *read[1]}) < sent:
        self.assertLess(time.monotonic(), deadline, "messages are missing")
        time.sleep(0.01)

    while not (read[0] and read[1]):
      send_round(b"")
    send_round(b"last")
    for thread in threads:
      thread.join(TIMEOUT_SECS)
      self.assertFalse(thread.is_alive())
    # The last two messages went to different members.
    last = {b"last%d" % (sent - 2), b"last%d" % (sent - 1)}
    self.assertEqual({read[0][-1], read[1][-1]}, last)

  def test_settings(self):
    configuration = ["conf.topic.auto.offset.reset=earliest", "client.id=a=b", "group.id=other"]
    with flagsaver.flagsaver(kafka_other_metadata="client.rack=c=d=,client.id==e"):
      with record_ops() as op:
        self.plain(configuration=configuration, poll_batch_size=7)
    self.assertEqual(op.call_args.kwargs["topics"], [self.topic])
    self.assertEqual(
      op.call_args.kwargs["metadata"],
      [
        *configuration,
        f"group.id={self.group}",
        f"bootstrap.servers={self.kafka.servers}",
        "batch.num.messages=7",
        "client.rack=c=d=",
        "client.id==e",
      ],
    )

  def test_settings_reach_the_client(self):
    self.kafka.send(self.topic, [b"a", b"b"])
    # The last of equal keys counts, values may contain an equals sign, blanks do not matter.
    configuration = [
      "auto.offset.reset=error", "conf.topic.auto.offset.reset = earliest", "client.id=a=b",
    ]  # fmt: skip
    with flagsaver.flagsaver(kafka_other_metadata="batch.num.messages=1"):
      dataset = self.plain(configuration=configuration)
    batches = [x.message.numpy().tolist() for x in dataset.take(2)]
    self.assertEqual(batches, [[b"a"], [b"b"]])

  def test_bad_arguments(self):
    for kwargs, text in (
      ({"stream_timeout": -2}, "stream_timeout is -2"),
      ({"message_poll_timeout": 0}, "message_poll_timeout is 0"),
      ({"poll_batch_size": 0}, "poll_batch_size is 0"),
      ({"configuration": ["no value"]}, "'no value', want key=value"),
      ({"kafka_other_metadata": "a=b,=c"}, "'=c', want key=value"),
      ({"topics": " , "}, "topics is empty"),
    ):
      with self.assertRaisesRegex(ValueError, text):
        self.plain(**kwargs)
    with self.assertRaisesRegex(ValueError, "group_id is empty"):
      datasets.create_plain_kafka_dataset(self.topic, "", self.kafka.servers)
    with self.assertRaisesRegex(ValueError, "servers is empty"):
      datasets.create_plain_kafka_dataset(self.topic, "g", [])

  def test_unknown_setting(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no.such.setting"):
      next(iter(self.plain(configuration=["no.such.setting=1"])))
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "session.timeout.ms=soon"):
      next(iter(self.plain(configuration=["session.timeout.ms=soon"])))

  def test_bad_arguments_of_the_op(self):
    for kwargs, text in (
      ({"topics": []}, "topics is empty"),
      ({"metadata": ["group.id"]}, "'group.id', want key=value"),
      ({"metadata": ["batch.num.messages=many"]}, "batch.num.messages is many, want at least 1"),
      ({"metadata": ["batch.num.messages=0"]}, "batch.num.messages is 0, want at least 1"),
      ({"message_poll_timeout": 0}, "message_poll_timeout is 0"),
      ({"message_poll_timeout": 1 << 40}, "message_poll_timeout is 1099511627776"),
      ({"stream_timeout": -2}, "stream_timeout is -2"),
    ):
      options = {
        "topics": ["t"], "metadata": [], "message_poll_timeout": 1, "stream_timeout": 1, **kwargs
      }  # fmt: skip
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
        kafka_dataset.gen_monolith_ops.monolith_kafka_dataset(**options)

  def test_shared_name(self):
    self.kafka.send(self.topic, [b"a", b"b", b"c"])

    def read(poll_batch_size=1):
      # Uses the source alone: a dataset above it might read ahead.
      return iter(
        kafka_dataset._MessageDataset(
          self.topic, self.group, self.kafka.servers, -1, 10000, poll_batch_size, CONFIGURATION,
          "", "one", None,
        )
      )  # fmt: skip

    first, second = read(), read()
    before = count_consumers()
    messages = [next(iterator)[0].numpy().tolist() for iterator in (first, second, first)]
    self.assertEqual(messages, [[b"a"], [b"b"], [b"c"]])
    self.assertEqual(count_consumers(), before + 1)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "shared_name 'one' is a reader"):
      next(read(poll_batch_size=2))
    del first
    self.assertEqual(count_consumers(), before + 1)
    del second
    self.assertEqual(count_consumers(), before)

  def test_shared_name_and_container(self):
    self.kafka.send(self.topic, [b"a"])
    first = iter(self.plain(container="c", shared_name="two"))
    self.assertEqual(next(first).message.numpy().tolist(), [b"a"])
    self.group = uuid.uuid4().hex
    second = iter(self.plain(container="d", shared_name="two"))
    self.assertEqual(next(second).message.numpy().tolist(), [b"a"])


class FramedTest(_KafkaTest):
  def test_every_type(self):
    example, instance, batch = PbType.EXAMPLE, PbType.INSTANCE, PbType.EXAMPLEBATCH
    payloads = {
      example: [make_example({"a": [fid_v2(7, uid)]}, uid=uid) for uid in (1, 2, 3)],
      instance: [make_instance([fid_v1(7, uid)], uid=uid) for uid in (1, 2, 3)],
      batch: [make_batch(1, 2), make_batch(3)],
    }
    for input_type, protos in payloads.items():
      topic = self.kafka.create_topic(f"{input_type.to_name()}-{uuid.uuid4().hex}")
      serialized = [proto.SerializeToString() for proto in protos]
      # Two records in one message, the rest in another.
      frames = [frame(payload, ZERO) for payload in serialized]
      self.kafka.send(topic, [b"".join(frames[:2]), b"".join(frames[2:])])

      def read(output_type, number=3, topic=topic, input_type=input_type):
        dataset = datasets.KafkaDataset(
          [topic],
          uuid.uuid4().hex,
          [self.kafka.servers],
          variant_type=input_type.to_name(),
          output_pb_type=output_type,
          configuration=CONFIGURATION,
        )
        dtype = tf.string if output_type == PbType.PLAINTEXT else tf.variant
        self.assertEqual(dataset.element_spec, tf.TensorSpec([], dtype))
        return dataset.take(number)

      with self.subTest(input_type.to_name()):
        self.assertEqual(uids(read(example)), [1, 2, 3])
        self.assertEqual(uids(read(instance), parsers.parse_instances), [1, 2, 3])
        plain = [text.numpy() for text in read(PbType.PLAINTEXT, len(serialized))]
        self.assertEqual(plain, serialized)
        default = instance if input_type == instance else example
        self.assertEqual(read(None)._input_dataset.output_pb_type, default)
        if input_type == batch:
          batches = [proto_of(x, example_pb2.ExampleBatch) for x in read(batch, 2)]
          self.assertEqual([x.batch_size for x in batches], [2, 1])
        else:
          with self.assertRaisesRegex(ValueError, "cannot become examplebatch"):
            read(batch)

  def test_plaintext(self):
    self.kafka.send(self.topic, [frame(b"a\0") + frame(b"") + frame(b"b"), b"", frame(b"c")])
    dataset = self.framed(
      input_pb_type=PbType.PLAINTEXT, output_pb_type=PbType.PLAINTEXT, has_sort_id=False
    )
    self.assertEqual([x.numpy() for x in dataset.take(3)], [b"a\0", b"b", b"c"])
    with self.assertRaisesRegex(ValueError, "plaintext cannot become example"):
      self.framed(input_pb_type=PbType.PLAINTEXT)

  def test_headers(self):
    prefix = struct.pack("<Q", 3) + b"abc"
    for i, (kwargs, header) in enumerate(
      (
        ({}, ZERO),
        ({}, prefix),
        ({"has_sort_id": False}, b""),
        ({"kafka_dump": True}, ZERO * 2),
        ({"kafka_dump_prefix": True}, ZERO * 3),
        ({"kafka_dump_prefix": True}, prefix),
        ({"has_sort_id": False, "kafka_dump_prefix": True, "kafka_dump": True}, ZERO * 3),
        ({"lagrangex_header": True}, ZERO),
      )
    ):
      topic = self.kafka.create_topic(f"headers-{i}-{uuid.uuid4().hex}")
      self.kafka.send(topic, [framed_examples(1, 2, header=header)])
      dataset = datasets.KafkaDataset(
        topic,
        uuid.uuid4().hex,
        self.kafka.servers,
        variant_type="example",
        configuration=CONFIGURATION,
        **kwargs,
      )
      self.assertEqual(uids(dataset.take(2)), [1, 2], kwargs)

  def test_data_source(self):
    header = bytes([0, 0xF3, 0x0D, 0, 0, 0, 0, 0])  # "pc"
    self.kafka.send(self.topic, [framed_examples(1, header=header)])
    (sample,) = self.framed(lagrangex_header=True).take(1)
    self.assertEqual(proto_of(sample, example_pb2.Example).data_source_key, 914176)

    messages = [frame(make_example(chnid=chnid).SerializeToString()) for chnid in (3, 4)]
    topic = self.kafka.create_topic(f"sources-{uuid.uuid4().hex}")
    self.kafka.send(topic, messages)
    dataset = datasets.KafkaDataset(
      topic,
      uuid.uuid4().hex,
      self.kafka.servers,
      variant_type="example",
      has_sort_id=False,
      configuration=CONFIGURATION,
      chnids=[3],
      datasources=["pc"],
      default_datasource="mobile",
    )
    keys = [proto_of(x, example_pb2.Example).data_source_key for x in dataset.take(2)]
    self.assertEqual(keys, [914176, 1250992640])

  def test_without_header(self):
    messages = [make_example(uid=uid).SerializeToString() for uid in (1, 2)]
    self.kafka.send(self.topic, [messages[0], None, messages[1]])
    dataset = self.framed(has_header=False, lagrangex_header=True)
    self.assertEqual(uids(dataset.take(2)), [1, 2])

  def test_reserved_features_fill_the_fields(self):
    example = example_pb2.Example()
    value = make_line_id(uid=5).SerializeToString()
    example.named_feature.add(name="__LINE_ID__").feature.bytes_list.value.append(value)
    example.named_raw_feature.add(name="raw")
    self.kafka.send(self.topic, [frame(example.SerializeToString(), ZERO)])
    (sample,) = self.framed().take(1)
    read = proto_of(sample, example_pb2.Example)
    self.assertEqual(read.line_id.uid, 5)
    self.assertEmpty(read.named_raw_feature)

  def test_filter_empty(self):
    raw_only = example_pb2.Example()
    raw_only.named_raw_feature.add(name="raw")
    records = [b"", raw_only.SerializeToString(), make_example(uid=1).SerializeToString()]
    self.kafka.send(self.topic, [b"".join(frame(record, ZERO) for record in records)])
    # A record without payload is no sample; one without content is, unless configured otherwise.
    (first,) = self.framed().take(1)
    self.assertEqual(proto_of(first, example_pb2.Example), example_pb2.Example())
    self.group = uuid.uuid4().hex
    (first,) = self.framed(filter_empty=True).take(1)
    self.assertEqual(proto_of(first, example_pb2.Example).line_id.uid, 1)

    instances = [proto_parser_pb2.Instance(data_source_key=0), make_instance(uid=2)]
    topic = self.kafka.create_topic(f"instances-{uuid.uuid4().hex}")
    self.kafka.send(topic, [frame(x.SerializeToString(), ZERO) for x in instances])
    dataset = datasets.KafkaDataset(
      topic, uuid.uuid4().hex, self.kafka.servers, filter_empty=True, configuration=CONFIGURATION
    )
    self.assertEqual(uids(dataset.take(1), parsers.parse_instances), [2])

  def test_bad_messages_are_named_and_spoil_no_other(self):
    good = framed_examples(1)
    dead_beef = ZERO + struct.pack("<Q", 0xFEFEFEFE)
    bad = (
      (good[:-1], tf.errors.DataLossError, "truncated record"),
      (b"short", tf.errors.DataLossError, "truncated record"),
      (dead_beef, tf.errors.InvalidArgumentError, "DEADBEEF value found"),
      (ZERO + b"\xff" * 8, tf.errors.DataLossError, "impossible length"),
      (frame(b"\xff\xff", ZERO), tf.errors.FailedPreconditionError, "Failed to parse the Example"),
    )
    self.kafka.send(self.topic, [good, *(message for message, _, _ in bad), framed_examples(2)])

    iterator = iter(self.framed())

    self.assertEqual(proto_of(next(iterator), example_pb2.Example).line_id.uid, 1)
    for offset, (_, error, text) in enumerate(bad, 1):
      origin = f"topic {self.topic}, partition 0, offset {offset}"
      with self.assertRaises(error) as caught:
        next(iterator)
      self.assertIn(text, str(caught.exception))
      self.assertIn(origin, str(caught.exception))
    self.assertEqual(proto_of(next(iterator), example_pb2.Example).line_id.uid, 2)

  def test_methods_know_the_type(self):
    self.kafka.send(self.topic, [framed_examples(1)])
    dataset = self.framed().instance_reweight("1", "1:1:1")
    self.assertIsInstance(dataset, datasets.InstanceReweightDataset)

  def test_poll_batch_size(self):
    with record_ops() as op:
      self.framed()
      self.framed(input_pb_type=PbType.EXAMPLEBATCH)
      self.framed(poll_batch_size=5)
      datasets.PyKafkaDataset(self.topic, self.group, self.kafka.servers)
    for call, size in zip(op.call_args_list, (128, 16, 5, 1024)):
      self.assertIn(f"batch.num.messages={size}", call.kwargs["metadata"])

  def test_py_kafka_dataset(self):
    self.kafka.send(self.topic, [framed_examples(1, 2), framed_examples(3)])
    dataset = datasets.PyKafkaDataset(
      self.topic,
      self.group,
      self.kafka.servers,
      variant_type="example",
      configuration=CONFIGURATION,
    )
    self.assertEqual(uids(dataset.take(3)), [1, 2, 3])

  def test_py_kafka_dataset_converts_nothing(self):
    self.kafka.send(self.topic, [frame(make_batch(1, 2).SerializeToString(), ZERO)])
    dataset = datasets.PyKafkaDataset(
      self.topic,
      self.group,
      self.kafka.servers,
      variant_type="example_batch",
      configuration=CONFIGURATION,
    )
    (sample,) = dataset.take(1)
    self.assertEqual(proto_of(sample, example_pb2.ExampleBatch).batch_size, 2)

  def test_kafka_gen(self):
    self.kafka.send(self.topic, [b"a", b"b\0", b"c"])
    with flagsaver.flagsaver(kafka_other_metadata=",".join(CONFIGURATION)):
      generator = datasets.KafkaGen(self.topic, self.group, self.kafka.servers, poll_batch_size=2)
    iterator = iter(generator)
    self.assertEqual([next(iterator), next(iterator)], [[b"a", b"b\0"], [b"c"]])
    iterator.close()
    with self.assertRaises(ValueError):
      datasets.KafkaGen(self.topic, self.group, self.kafka.servers, stream_timeout=-2)

  def test_contradicting_types(self):
    with self.assertRaisesRegex(ValueError, "variant_type is instance, but input_pb_type example"):
      self.framed(variant_type="instance")
    with self.assertRaisesRegex(ValueError, "want one of"):
      self.framed(input_pb_type=None, variant_type="sample")


class DispatchTest(_KafkaTest):
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


class CheckpointTest(_KafkaTest):
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


class LifecycleTest(_KafkaTest):
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
    self.assertRegex(process.stderr, "FailedPreconditionError.*monolith.kafka")
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
