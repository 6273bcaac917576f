"""Tests of `dataset_service`: samples that a tf.data service in another process reads."""

import os
import subprocess
import sys
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from monolith.native_training.data import datasets, parsers
from tests.native_training.data.data_test_utils import fid_v2, frame, make_example, needs_parquet
from tests.native_training.data.mock_kafka import MockKafka

pytestmark = pytest.mark.thorough

PbType = datasets.PbType
COLUMNS = {"select_columns": ["__UID__", "item"], "select_columns_type": ["int", "fid_v2"]}

# Loads the op library, but knows no dataset. Runs until its standard input ends.
SERVER = """
import os
import sys
import tensorflow as tf
from monolith.native_training.runtime.ops import gen_monolith_ops
service = tf.data.experimental.service
dispatcher = service.DispatchServer()
address = dispatcher.target.split("://")[1]
worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
print(dispatcher.target, flush=True)
sys.stdin.read()
os._exit(0)  # a worker that reads an endless stream waits for its next message before it stops
"""


class _ServiceTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.process = subprocess.Popen(
      [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    cls.addClassCleanup(cls.process.wait)
    cls.addClassCleanup(cls.process.stdin.close)
    cls.addClassCleanup(cls.process.stdout.close)
    cls.target = cls.process.stdout.readline().strip()
    assert cls.target, "the server did not start"

  def off(self, dataset):
    """Lets every worker of the service read everything."""
    return dataset.apply(
      tf.data.experimental.service.distribute(
        tf.data.experimental.service.ShardingPolicy.OFF, self.target
      )
    )

  def parsed(self, dataset, batch=2):
    return dataset.batch(batch).map(
      lambda x: parsers.parse_examples(x, ["item"], extra_features=["uid"])
    )

  def check(self, batches, expected):
    read = []
    for features in batches:
      read += features["uid"].numpy().flatten().tolist()
      ids = [[fid_v2(2, uid)] for uid in features["uid"].numpy().flatten().tolist()]
      self.assertEqual(features["item"].to_list(), ids)
    self.assertEqual(read, expected)


@needs_parquet
class ParquetTest(_ServiceTest):
  def write(self, name, first, rows):
    path = os.path.join(os.environ["TEST_TMPDIR"], name)
    numbers = range(first, first + rows)
    columns = {
      "__UID__": pa.array(numbers, pa.int64()),
      "item": pa.array([fid_v2(2, i) for i in numbers], pa.int64()),
    }
    pq.write_table(pa.table(columns), path)
    return path

  def test_rows(self):
    path = self.write("one.parquet", 0, 9)
    dataset = datasets.ParquetDataset(path, PbType.EXAMPLE, **COLUMNS)
    self.check(self.off(self.parsed(dataset)), list(range(9)))

  def test_samples_cross_the_border(self):
    path = self.write("samples.parquet", 0, 5)
    dataset = datasets.ParquetDataset(path, PbType.EXAMPLE, **COLUMNS)
    self.check(self.parsed(self.off(dataset)), list(range(5)))

  def test_batches_and_plaintext(self):
    path = self.write("batches.parquet", 0, 8)
    for pb_type in (PbType.EXAMPLEBATCH, PbType.PLAINTEXT):
      dataset = datasets.ParquetDataset(path, pb_type, batch_size=4, **COLUMNS)
      parsed = self.off(dataset).map(
        lambda x: parsers.parse_example_batch(x, ["item"], extra_features=["uid"])
      )
      self.check(parsed, list(range(8)))

  def test_files_are_shared_out(self):
    for i in range(3):
      self.write(f"part_{i}.parquet", 4 * i, 4)
    pattern = os.path.join(os.environ["TEST_TMPDIR"], "part_*.parquet")
    dataset = datasets.PBDataset([pattern], use_parquet=True, cycle_length=1, **COLUMNS)
    distributed = datasets.distribute(
      self.parsed(dataset, 4), self.target, job_name=uuid.uuid4().hex
    )
    read = [batch["uid"].numpy().flatten().tolist() for batch in distributed]
    self.assertCountEqual(sum(read, []), range(12))

  def test_error_reaches_the_reader(self):
    path = os.path.join(os.environ["TEST_TMPDIR"], "none.parquet")
    dataset = datasets.ParquetDataset(path, PbType.EXAMPLE, **COLUMNS)
    with self.assertRaisesRegex(tf.errors.NotFoundError, "none.parquet"):
      list(self.off(self.parsed(dataset)))


class KafkaTest(_ServiceTest):
  def test_samples(self):
    with MockKafka() as kafka:
      topic = kafka.create_topic("samples", partitions=2)
      for partition, uids in ((0, (1, 2, 3)), (1, (4, 5))):
        for uid in uids:
          example = make_example({"item": [fid_v2(2, uid)]}, uid=uid)
          kafka.send(topic, [frame(example.SerializeToString())], partition=partition)
      dataset = datasets.KafkaDataset(
        topic,
        uuid.uuid4().hex,
        kafka.servers,
        variant_type="example",
        has_sort_id=False,
        stream_timeout=8000,
        message_poll_timeout=8000,
        configuration=["conf.topic.auto.offset.reset=earliest", "fetch.wait.max.ms=50"],
      )
      distributed = datasets.distribute(
        self.parsed(dataset), self.target, job_name=uuid.uuid4().hex
      )
      read = [batch["uid"].numpy().flatten().tolist() for batch in distributed]
      self.assertCountEqual(sum(read, []), [1, 2, 3, 4, 5])

  def test_messages(self):
    with MockKafka() as kafka:
      topic = kafka.create_topic("messages")
      kafka.send(topic, [b"a", b"b\0"], [b"k", b"l"])
      dataset = datasets.create_plain_kafka_dataset(
        topic,
        uuid.uuid4().hex,
        kafka.servers,
        configuration=["conf.topic.auto.offset.reset=earliest", "fetch.wait.max.ms=50"],
      )
      (element,) = self.off(dataset).take(1)
      self.assertEqual(element.message.numpy().tolist(), [b"a", b"b\0"])
      self.assertEqual(element.key.numpy().tolist(), [b"k", b"l"])


if __name__ == "__main__":
  tf.test.main()
