"""Datasets that read a Kafka broker, in eager mode: messages, and records in messages."""

import struct
import threading
import time
import uuid

import pytest
import tensorflow as tf
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
from tests.native_training.data.kafka_testing import (
  CONFIGURATION,
  ZERO,
  KafkaTestCase,
  PbType,
  count_consumers,
  framed_examples,
  make_batch,
  record_ops,
  uids,
)
from tests.native_training.data.mock_kafka import TIMEOUT_SECS

pytestmark = pytest.mark.thorough


class PlainTest(KafkaTestCase):
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


class FramedTest(KafkaTestCase):
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


if __name__ == "__main__":
  tf.test.main()
