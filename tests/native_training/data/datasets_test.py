"""Tests of file sources and the datasets that read them: `datasets` and `sample_datasets`."""

import gzip
import os
import pathlib
import struct
import subprocess
import sys
import threading
import zlib

import pyarrow as pa
import tensorflow as tf
from absl.testing import flagsaver

from idl.matrix.proto import example_pb2, proto_parser_pb2
from monolith import data
from monolith.native_training import native_task_context
from monolith.native_training.data import datasets, feature_utils, parsers
from monolith.native_training.runtime.ops import gen_monolith_ops
from tests.native_training.data.data_test_utils import (
  fid_v1,
  fid_v2,
  frame,
  make_example,
  make_instance,
  make_line_id,
  needs_parquet,
  proto_of,
  write_records,
)

PbType = datasets.PbType
ZERO = struct.pack("<Q", 0)


def uids(dataset, parse=parsers.parse_examples):
  """Reads `LineId.uid` of all samples."""
  if parse is parsers.parse_instances:
    batches = dataset.batch(2).map(lambda x: parse(x, extra_features=["uid"]))
  else:
    batches = dataset.batch(2).map(lambda x: parse(x, [], extra_features=["uid"]))
  return [int(uid) for batch in batches for uid in batch["uid"].numpy().flatten()]


class _FileTest(tf.test.TestCase):
  def path(self, name):
    return os.path.join(os.environ["TEST_TMPDIR"], name)

  def write_examples(self, name="data", n=5, header=ZERO):
    payloads = [make_example(uid=i + 1).SerializeToString() for i in range(n)]
    return write_records(self.path(name), payloads, header)


class FilePBDatasetTest(_FileTest):
  def read(self, path, **kwargs):
    kwargs.setdefault("input_pb_type", PbType.EXAMPLE)
    return datasets.FilePBDataset(path, **kwargs)

  def test_examples(self):
    dataset = self.read(self.write_examples())
    self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.variant))
    self.assertEqual(uids(dataset), [1, 2, 3, 4, 5])

  def test_headers(self):
    prefix = struct.pack("<Q", 3)
    for flags, header in (
      ({"has_sort_id": False}, b""),
      ({"has_sort_id": True}, struct.pack("<Q", 2) + b"ab"),
      ({"kafka_dump": True}, ZERO + ZERO),
      ({"kafka_dump_prefix": True}, ZERO * 3),
      ({"kafka_dump_prefix": True}, prefix + b"abc"),
      ({"lagrangex_header": True}, bytes.fromhex("00f30d0000000000")),
    ):
      dataset = self.read(self.write_examples(header=header), **flags)
      self.assertEqual(uids(dataset), [1, 2, 3, 4, 5])

  def test_compression(self):
    content = b"".join(frame(make_example(uid=i + 1).SerializeToString(), ZERO) for i in range(3))
    for compression, compress in (
      (datasets.CompressType.ZLIB, zlib.compress),
      (datasets.CompressType.GZIP, gzip.compress),
      (datasets.CompressType.NO, lambda x: x),
    ):
      with open(self.path("compressed"), "wb") as stream:
        stream.write(compress(content))
      dataset = self.read(self.path("compressed"), compression_type=compression)
      self.assertEqual(uids(dataset), [1, 2, 3])

  def test_torn_gzip_and_zlib(self):
    payloads = [make_example(uid=i + 1).SerializeToString() for i in range(3)]
    content = b"".join(frame(payload, ZERO) for payload in payloads)
    path = self.path("torn")
    for compression, whole, name in (
      (datasets.CompressType.ZLIB, zlib.compress(content), "zlib data"),
      (datasets.CompressType.GZIP, gzip.compress(content), "gzip member"),
    ):
      dataset = self.read(path, compression_type=compression)
      for size in range(len(whole)):
        pathlib.Path(path).write_bytes(whole[:size])
        with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}.*truncated {name}"):
          list(dataset)
      pathlib.Path(path).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
      with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}.*corrupt .*incorrect"):
        list(dataset)
    pathlib.Path(path).write_bytes(zlib.compress(content) + b"more")
    with self.assertRaisesRegex(tf.errors.DataLossError, "more bytes after the end of the zlib"):
      list(self.read(path, compression_type=datasets.CompressType.ZLIB))

  def test_position_beyond_the_end_is_no_end(self):
    path = self.write_examples()
    dataset = self.read(path)
    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    for _ in range(4):
      next(iterator)
    saved = checkpoint.save(self.path("position"))
    os.truncate(path, 20)
    restored = iter(dataset)
    with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}: cannot go on at offset"):
      tf.train.Checkpoint(iterator=restored).restore(saved)
      next(restored)

  def snappy(self, content):
    """Returns a literal-only snappy chunk in a Hadoop block."""
    literal = bytes([60 << 2 | 0]) if len(content) <= 256 else bytes([61 << 2])
    size = bytes([len(content) - 1]) if len(content) <= 256 else struct.pack("<H", len(content) - 1)
    length, varint = len(content), b""
    while length >= 0x80:
      varint, length = varint + bytes([length & 0x7F | 0x80]), length >> 7
    chunk = varint + bytes([length]) + literal + size + content
    return struct.pack(">I", len(content)) + struct.pack(">I", len(chunk)) + chunk

  def test_hadoop_snappy(self):
    blocks = [frame(make_example(uid=i + 1).SerializeToString(), ZERO) for i in range(3)]
    with open(self.path("data.snappy"), "wb") as stream:
      stream.write(b"".join(self.snappy(block) for block in blocks))
    self.assertEqual(uids(self.read(self.path("data.snappy"))), [1, 2, 3])
    with open(self.path("bad.snappy"), "wb") as stream:
      stream.write(self.snappy(blocks[0])[:-3])
    with self.assertRaisesRegex(tf.errors.DataLossError, "truncated snappy chunk"):
      uids(self.read(self.path("bad.snappy")))
    with open(self.path("bad.snappy"), "wb") as stream:
      stream.write(b"")
    with self.assertRaisesRegex(tf.errors.DataLossError, "truncated snappy block"):
      uids(self.read(self.path("bad.snappy")))
    # Hadoop writes these for nothing.
    with open(self.path("none.snappy"), "wb") as stream:
      stream.write(bytes(4))
    self.assertEqual(uids(self.read(self.path("none.snappy"))), [])
    with open(self.path("bad.snappy"), "wb") as stream:
      stream.write(struct.pack(">II", 100, 4) + b"\xff" * 4)
    with self.assertRaisesRegex(tf.errors.DataLossError, "corrupt snappy chunk"):
      uids(self.read(self.path("bad.snappy")))

  def test_contradicting_compression(self):
    with self.assertRaisesRegex(ValueError, "use_snappy is True"):
      self.read("x", use_snappy=True, compression_type=datasets.CompressType.GZIP)
    with self.assertRaisesRegex(ValueError, "compression_type is ZSTD, but TFRecord files"):
      datasets.TFRecordDatasetWrapper("x", datasets.CompressType.ZSTD)

  def zstd(self, content, name="data.zst"):
    with open(self.path(name), "wb") as stream:
      stream.write(content)
    return self.read(self.path(name), compression_type=datasets.CompressType.ZSTD)

  def zstd_frames(self, num_frames, num_records):
    """Reads frames that know their size and one that does not; more than the buffers hold."""
    records = [
      frame(make_example({"a": list(range(i % 500))}, uid=i + 1).SerializeToString(), ZERO)
      for i in range(num_records)
    ]
    part = num_records // num_frames
    frames = [
      pa.compress(b"".join(records[i * part : (i + 1) * part]), "zstd", asbytes=True)
      for i in range(num_frames - 1)
    ]
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
      stream.write(b"".join(records[(num_frames - 1) * part :]))
    return [*frames, sink.getvalue().to_pybytes()]

  def test_zstd(self):
    frames = self.zstd_frames(3, 1500)
    self.assertEqual(uids(self.zstd(b"".join(frames))), list(range(1, 1501)))
    empty = pa.compress(b"", "zstd", asbytes=True)
    self.assertEqual(uids(self.zstd(empty)), [])

  def test_zstd_resumes(self):
    dataset = self.zstd(b"".join(self.zstd_frames(2, 400)))
    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    for _ in range(250):
      next(iterator)
    path = checkpoint.save(self.path("checkpoint"))
    self.assertLen(list(iterator), 150)

    restored = iter(dataset)
    tf.train.Checkpoint(iterator=restored).restore(path)

    self.assertEqual(proto_of(next(restored), example_pb2.Example).line_id.uid, 251)
    self.assertLen(list(restored), 149)

  def test_bad_zstd(self):
    frames = self.zstd_frames(2, 40)
    content = b"".join(frames)
    for broken, text in (
      (b"", "truncated zstd frame"),
      (content[:-1], "truncated zstd frame"),
      (content[: len(frames[0]) + 3], "truncated zstd frame"),
      (b"no zstd at all", "corrupt zstd data"),
      (frames[0] + b"garbage" * 10, "corrupt zstd data"),
    ):
      with self.assertRaisesRegex(tf.errors.DataLossError, text):
        uids(self.zstd(broken))

  def test_zstd_without_library(self):
    self.zstd(b"")
    code = (
      "from monolith.native_training.data import datasets\n"
      f"list(datasets.FilePBDataset({self.path('data.zst')!r},"
      " compression_type=datasets.CompressType.ZSTD))"
    )
    result = subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      env={**os.environ, "MONOLITH_LIBZSTD": "/no/such/libzstd.so"},
    )
    self.assertNotEqual(result.returncode, 0)
    self.assertIn("ZSTD compression needs libzstd.so.1", result.stderr)
    self.assertIn("/no/such/libzstd.so", result.stderr)

  def test_conversions(self):
    instance = make_instance([fid_v1(3, 7), fid_v1(4, 8), fid_v1(3, 9)], [1.0], uid=5)
    instance.feature.add(name="v2", fid=[fid_v2(9, 1)])
    path = write_records(self.path("instance"), [instance.SerializeToString()])
    dataset = datasets.FilePBDataset(path, output_pb_type=PbType.EXAMPLE)
    features = next(
      iter(
        dataset.batch(1).map(
          lambda x: parsers.parse_examples(
            x, ["fc_slot_3", "fc_slot_4", "v2"], ["label", "instance_weight"], [1, 1]
          )
        )
      )
    )
    self.assertEqual(features["fc_slot_3"].to_list(), [[fid_v2(3, 7), fid_v2(3, 9)]])
    self.assertEqual(features["v2"].to_list(), [[fid_v2(9, 1)]])
    self.assertAllEqual(features["label"], [[1]])

    example = make_example({"v2": [fid_v2(9, 1)]}, [2.0], uid=6)
    example.named_feature.add(name="slots").feature.fid_v1_list.value.append(fid_v1(3, 7))
    path = write_records(self.path("example"), [example.SerializeToString()])
    dataset = self.read(path, output_pb_type=PbType.INSTANCE)
    features = next(
      iter(
        dataset.batch(1).map(
          lambda x: parsers.parse_instances(x, [3], ["v2"], ["label"], [1], extra_features=["uid"])
        )
      )
    )
    self.assertEqual(features["slot_3"].to_list(), [[fid_v2(3, 7)]])
    self.assertEqual(features["v2"].to_list(), [[fid_v2(9, 1)]])
    self.assertAllEqual(features["label"], [[2]])
    self.assertAllEqual(features["uid"], [[6]])

  def write_batches(self):
    payloads = []
    for first in (1, 4):
      batch = example_pb2.ExampleBatch(batch_size=3)
      column = batch.named_feature_list.add(name="__LINE_ID__")
      for uid in range(first, first + 3):
        line_id = make_line_id(uid=uid).SerializeToString()
        column.feature.add().bytes_list.value.append(line_id)
      batch.named_feature_list.add(name="a", type=example_pb2.SHARED).feature.add()
      payloads.append(batch.SerializeToString())
    return write_records(self.path("batch"), payloads)

  def test_example_batch(self):
    path = self.write_batches()
    self.assertEqual(uids(self.read(path, input_pb_type=PbType.EXAMPLEBATCH)), [1, 2, 3, 4, 5, 6])
    instances = self.read(path, input_pb_type=PbType.EXAMPLEBATCH, output_pb_type=PbType.INSTANCE)
    self.assertEqual(uids(instances, parsers.parse_instances), [1, 2, 3, 4, 5, 6])
    batches = self.read(
      path, input_pb_type=PbType.EXAMPLEBATCH, output_pb_type=PbType.EXAMPLEBATCH
    ).map(lambda x: parsers.parse_example_batch(x, [], extra_features=["uid"]))
    self.assertEqual(
      [batch["uid"].numpy().tolist() for batch in batches], [[[1], [2], [3]], [[4], [5], [6]]]
    )

  def test_plaintext(self):
    dataset = self.read(self.write_examples(n=1), output_pb_type=PbType.PLAINTEXT)
    self.assertEqual(dataset.element_spec.dtype, tf.string)
    payload = next(iter(dataset)).numpy()
    self.assertEqual(example_pb2.Example.FromString(payload).line_id.uid, 1)

  def test_iterator_is_restored_inside_a_batch(self):
    dataset = self.read(self.write_batches(), input_pb_type=PbType.EXAMPLEBATCH)
    dataset = dataset.map(lambda x: parsers.parse_examples(x[None], [], extra_features=["uid"]))
    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    for _ in range(4):
      next(iterator)
    saved = checkpoint.save(self.path("ckpt"))
    rest = [int(x["uid"][0, 0]) for x in iterator]

    iterator = iter(dataset)
    tf.train.Checkpoint(iterator=iterator).restore(saved)
    self.assertEqual(rest, [5, 6])
    self.assertEqual([int(x["uid"][0, 0]) for x in iterator], rest)

  def test_variants_survive_a_checkpoint(self):
    dataset = self.read(self.write_examples()).shuffle(3, seed=1)
    iterator = iter(dataset)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    next(iterator)
    saved = checkpoint.save(self.path("ckpt"))

    def rest(iterator):
      return [
        int(parsers.parse_examples(x[None], [], extra_features=["uid"])["uid"][0, 0])
        for x in iterator
      ]

    expected = rest(iterator)
    iterator = iter(dataset)
    tf.train.Checkpoint(iterator=iterator).restore(saved)
    self.assertEqual(rest(iterator), expected)

  def test_bad_files(self):
    with self.assertRaises(tf.errors.NotFoundError):
      uids(self.read(self.path("missing")))
    path = self.write_examples(n=2)
    with open(path, "rb") as stream:
      content = stream.read()
    for size in (1, 8, 12, 17, len(content) - 1):
      with open(path, "wb") as stream:
        stream.write(content[:size])
      with self.assertRaisesRegex(tf.errors.DataLossError, "truncated record at offset"):
        uids(self.read(path))
    write_records(path, [b"\xff\xff\xff"])
    for pb_type, name in (
      (PbType.EXAMPLE, "Example"),
      (PbType.INSTANCE, "Instance"),
      (PbType.EXAMPLEBATCH, "ExampleBatch"),
    ):
      with self.assertRaisesRegex(
        tf.errors.FailedPreconditionError, f"Failed to parse the {name}."
      ):
        list(self.read(path, input_pb_type=pb_type))
    for length, error, message in (
      (0xFEFEFEFE, tf.errors.InvalidArgumentError, "DEADBEEF value found"),
      (1 << 60, tf.errors.DataLossError, "impossible length"),
    ):
      with open(path, "wb") as stream:
        stream.write(ZERO + struct.pack("<Q", length) + b"abc")
      with self.assertRaisesRegex(error, message):
        list(self.read(path))

  def test_bad_arguments(self):
    path = self.write_examples()
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "feature_pruning_type is 3"):
      self.read(path, feature_pruning_type=3)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "buffer_size is 0"):
      self.read(path, buffer_size=0)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "output_pb_type"):
      self.read(path, output_pb_type=PbType.EXAMPLEBATCH)

  def test_empty_payload_is_a_default_sample(self):
    path = write_records(self.path("empty"), [b"", b""])
    self.assertEqual(uids(self.read(path)), [0, 0])

  def test_pruning(self):
    example = make_example({"a": [1]}, uid=1)
    example.named_raw_feature.add(name="raw")
    path = write_records(self.path("raw"), [example.SerializeToString()])
    for pruning, features, raw in ((0, 1, 1), (1, 0, 1), (2, 1, 0)):
      dataset = self.read(path, feature_pruning_type=pruning)
      read = proto_of(dataset.get_single_element(), example_pb2.Example)
      self.assertEqual((len(read.named_feature), len(read.named_raw_feature)), (features, raw))


def _golden(pattern):
  """Returns the files of all versions that have such a name."""
  return sorted(pathlib.Path(__file__).with_name("golden").glob(f"*/{pattern}"))


class GoldenFilesTest(tf.test.TestCase):
  """Files that earlier versions wrote are read by every later one."""

  def test_lines(self):
    columns = {"user": data.Text(), "stars": data.Number(), "day": data.Number(dtype="int64")}
    paths = _golden("rows.csv*")
    self.assertGreaterEqual(len(paths), 2)
    for path in paths:
      [rows] = data.csv(str(path), columns, 8)
      self.assertEqual(rows["user"].numpy().tolist(), [b"ann", b"bob", b"cy, dy"], path)
      self.assertEqual(rows["stars"].numpy().tolist(), [4.5, -100.0, 3.0])
      self.assertEqual(rows["day"].numpy().tolist(), [9007199254740993, -7, 0])

  def test_tfrecords(self):
    paths = _golden("records.*")
    self.assertGreaterEqual(len(paths), 3)
    for path in paths:
      kind = datasets.CompressType[path.suffix[1:].upper()]
      records = [x.numpy() for x in datasets.TFRecordDatasetWrapper(str(path), kind)]
      self.assertEqual(records, [b"record 0", b"record 1", b"record 2"], path)

  def test_samples(self):
    for name, make, slot in (("instance", fid_v1, 3), ("example", fid_v2, 2)):
      self._check_samples(name, PbType[name.upper()], make, slot)
    self._check_samples("examplebatch", PbType.EXAMPLEBATCH, fid_v2, 2)

  def _check_samples(self, name, pb_type, make, slot):
    paths = _golden(f"{name}.*")
    self.assertGreaterEqual(len(paths), 5)
    for path in paths:
      dataset = datasets.FilePBDataset(
        str(path),
        input_pb_type=pb_type,
        output_pb_type=PbType.INSTANCE if name == "instance" else PbType.EXAMPLE,
        compression_type=datasets.CompressType[path.suffix[1:].upper()],
      )
      proto = proto_parser_pb2.Instance if name == "instance" else example_pb2.Example
      samples = [proto_of(sample, proto) for sample in dataset]
      self.assertEqual([sample.line_id.uid for sample in samples], [1, 2, 3], path)
      self.assertEqual([self._ids_of(s) for s in samples], [[make(slot, i)] * i for i in range(3)])

  def _ids_of(self, sample):
    if isinstance(sample, proto_parser_pb2.Instance):
      return list(sample.fid)
    return [fid for f in sample.named_feature for fid in f.feature.fid_v2_list.value]

  @needs_parquet
  def test_parquet(self):
    paths = _golden("*.parquet")
    self.assertGreaterEqual(len(paths), 6)
    for path in paths:
      dataset = datasets.ParquetDataset(
        str(path), PbType.EXAMPLE, ["__UID__", "a"], ["int", "fid_v2"]
      )
      samples = [proto_of(sample, example_pb2.Example) for sample in dataset]
      self.assertEqual([sample.line_id.uid for sample in samples], [1, 2, 3], path)
      self.assertEqual([self._ids_of(s) for s in samples], [[fid_v2(2, i)] * i for i in range(3)])


class PBDatasetTest(_FileTest):
  def test_dispatch(self):
    self.assertIsInstance(datasets.PBDataset(""), datasets.FilePBDataset)
    path = self.write_examples()
    for dataset, kind in (
      (datasets.PBDataset(path, 1024, PbType.EXAMPLE), datasets.FilePBDataset),
      (datasets.PBDataset(file_name=path, input_pb_type=PbType.EXAMPLE), datasets.FilePBDataset),
      (datasets.PBDataset([path], None, PbType.EXAMPLE), datasets.DistributedFilePBDataset),
      (
        datasets.PBDataset(patterns=[path], input_pb_type=PbType.EXAMPLE),
        datasets.DistributedFilePBDataset,
      ),
    ):
      self.assertIsInstance(dataset, kind)
      self.assertEqual(uids(dataset), [1, 2, 3, 4, 5])
    kafka = datasets.PBDataset(["ab"], group_id="c", servers="d")
    self.assertIsInstance(kafka, datasets.KafkaDataset)

  def test_tfrecord(self):
    with tf.io.TFRecordWriter(self.path("records")) as writer:
      writer.write(b"abc")
    dataset = datasets.PBDataset(self.path("records"), use_tfrecord=True)
    self.assertEqual([x.numpy() for x in dataset], [b"abc"])

  def test_tfrecord_wrapper_takes_several_files(self):
    paths = [self.path(name) for name in ("1", "2")]
    for path in paths:
      with tf.io.TFRecordWriter(path) as writer:
        for i in range(3):
          writer.write(f"{path[-1]}{i}".encode())
    in_order = [b"10", b"11", b"12", b"20", b"21", b"22"]
    in_turn = [b"10", b"20", b"11", b"21", b"12", b"22"]
    for names in (paths, tf.constant(paths), tf.data.Dataset.from_tensor_slices(paths)):
      for reads, wanted in ((None, in_order), (1, in_order), (2, in_turn)):
        dataset = datasets.TFRecordDatasetWrapper(names, buffer_size=64, num_parallel_reads=reads)
        self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.string))
        self.assertEqual([x.numpy() for x in dataset], wanted)
    pathlib.Path(self.path("torn")).touch()
    for compression in (datasets.CompressType.ZLIB, datasets.CompressType.GZIP):
      torn = datasets.TFRecordDatasetWrapper(self.path("torn"), compression)
      with self.assertRaisesRegex(tf.errors.DataLossError, "torn:1: truncated "):
        list(torn)
    with self.assertRaises(tf.errors.NotFoundError):
      list(datasets.TFRecordDatasetWrapper(self.path("none")))

  def test_pattern_flag(self):
    for day in ("20201130", "20201202"):
      os.makedirs(self.path(f"data_{day}"))
      self.write_examples(f"data_{day}/hour_1", n=2)
    pattern = self.path("data_{DATE(20201130, 20201202)}/hour_{INT(0,2)}")
    with flagsaver.flagsaver(dataset_input_patterns=pattern):
      dataset = datasets.PBDataset(input_pb_type=PbType.EXAMPLE)
      self.assertEqual(sorted(uids(dataset)), [1, 1, 2, 2])
    with flagsaver.flagsaver(dataset_input_patterns=self.path("none_{INT(0,1)}")):
      with self.assertRaisesRegex(AssertionError, "no match files"):
        datasets.PBDataset()

  def test_gen_patterns(self):
    patterns = datasets.PBDataset.gen_patterns("/abc", "20220901", end_date="20220920")
    self.assertLen(patterns, 19)
    self.assertEqual((patterns[0], patterns[-1]), ("/abc/20220901/*", "/abc/20220919/*"))
    hourly = datasets.PBDataset.gen_patterns(
      "/abc", "20220901", 22, end_date="20220902", end_hour=1, is_hourly=True
    )
    self.assertEqual(hourly, ["/abc/20220901/22*", "/abc/20220901/23*", "/abc/20220902/00*"])
    self.assertEqual(datasets.PBDataset.gen_patterns(None, "20220901"), [])

  def test_files_are_shared_among_workers(self):
    for i in range(4):
      self.write_examples(f"part_{i}", n=1)
    read = []
    single = native_task_context.get()
    for index in range(2):
      ctx = single._replace(num_workers=2, worker_index=index)
      # The outermost context stays, so the usual one has to be outside.
      with native_task_context.with_ctx(single), native_task_context.with_ctx(ctx):
        dataset = datasets.DistributedFilePBDataset(
          [self.path("part_*")], input_pb_type=PbType.EXAMPLE
        )
        read.append(len(uids(dataset)))
    self.assertEqual(read, [2, 2])

  def test_names(self):
    self.assertEqual(PbType.EXAMPLEBATCH.to_name(), "examplebatch")


class DynamicMatchingFilesDatasetTest(_FileTest):
  def _touch(self, *names):
    for name in names:
      pathlib.Path(self.path(name)).touch()

  def _dataset(self):
    return datasets.DynamicMatchingFilesDataset([self.path("*.x"), self.path("y*")])

  def _names(self, names):
    return [os.path.basename(name.numpy().decode()) for name in names]

  def test_files_are_looked_for_when_reading_begins(self):
    dataset = self._dataset()
    self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.string))
    self.assertEmpty(list(dataset))
    self._touch("c.x", "y1", "a.x", "z")
    self.assertEqual(self._names(dataset), ["a.x", "c.x", "y1"])

  def test_saved_position_keeps_the_files_of_then(self):
    self._touch("a.x", "c.x", "y1")
    iterator = iter(self._dataset())
    next(iterator)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    saved = checkpoint.write(self.path("saved"))
    self._touch("b.x")
    self.assertEqual(self._names(iterator), ["c.x", "y1"])
    checkpoint.read(saved)
    self.assertEqual(self._names(iterator), ["c.x", "y1"])
    self.assertEqual(self._names(self._dataset()), ["a.x", "b.x", "c.x", "y1"])

  def test_patterns_of_two_dimensions(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, r"patterns has shape \[1,1\]"):
      gen_monolith_ops.dynamic_matching_files_dataset([["a"]])


class CacheOneDatasetTest(_FileTest):
  def test_marks_the_last_element(self):
    dataset = datasets.CacheOneDataset(tf.data.Dataset.from_tensor_slices([1, 2]))
    self.assertEqual([(int(x), bool(last)) for x, last in dataset], [(1, False), (2, True)])
    self.assertEqual(list(datasets.CacheOneDataset(tf.data.Dataset.range(0))), [])

  def test_restore(self):
    dataset = datasets.CacheOneDataset(tf.data.Dataset.range(4))
    iterator = iter(dataset)
    next(iterator)
    saved = tf.train.Checkpoint(iterator=iterator).save(self.path("ckpt"))
    iterator = iter(dataset)
    tf.train.Checkpoint(iterator=iterator).restore(saved)
    self.assertEqual(
      [(int(x), bool(last)) for x, last in iterator], [(1, False), (2, False), (3, True)]
    )


class InstanceReweightDatasetTest(_FileTest):
  def reweight(self, samples, **kwargs):
    path = write_records(self.path("data"), [s.SerializeToString() for s in samples])
    dataset = datasets.FilePBDataset(path, input_pb_type=PbType.EXAMPLE)
    dataset = dataset.instance_reweight(**kwargs)
    labels = (parsers.parse_examples(x[None], [], ["label"], [1])["label"] for x in dataset)
    return [float(label[0, 0]) for label in labels]

  def test_repeats_by_weight(self):
    kwargs = {"action_priority": "2,7", "reweight": "2:3:-1,7:2:1"}
    self.assertEqual(self.reweight([make_example(label=[5], actions=[2])], **kwargs), [-1.0] * 3)
    self.assertEqual(self.reweight([make_example(label=[5], actions=[7])], **kwargs), [1.0] * 2)
    self.assertEqual(self.reweight([make_example(label=[5])], **kwargs), [5.0])
    self.assertEqual(self.reweight([make_example(actions=[2])], **kwargs), [])
    # A worse action follows a better one that was emitted already.
    sample = make_example(label=[5], actions=[7], pre_actions=[2])
    self.assertEqual(self.reweight([sample], **kwargs), [])
    # The better action corrects the emitted one: labels differ, so both count.
    sample = make_example(label=[5], actions=[2], pre_actions=[7])
    self.assertEqual(self.reweight([sample], **kwargs), [-1.0] * 5)
    same = {"action_priority": "2,7", "reweight": "2:1:1,7:3:1"}
    sample = make_example(label=[5], actions=[2], pre_actions=[7])
    self.assertEqual(self.reweight([sample], **same), [-1.0] * 2)

  def test_needs_samples(self):
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "want one scalar variant"):
      datasets.InstanceReweightDataset(tf.data.Dataset.range(2), "1", "1:1:1")
    with self.assertRaisesRegex(ValueError, "want action:weight:label"):
      datasets.InstanceReweightDataset(tf.data.Dataset.range(2), "1", "1:1")


class NegativeGenDatasetTest(_FileTest):
  def samples(self, n):
    result = []
    for i in range(n):
      sample = make_example({"user": [1000 + i], "item": [i]}, [1.0], item_id=i + 1, actions=[1])
      result.append(sample.SerializeToString())
    return result

  def generate(self, n, **kwargs):
    path = write_records(self.path("data"), self.samples(n))
    dataset = datasets.FilePBDataset(path, input_pb_type=PbType.EXAMPLE)
    kwargs.setdefault("item_features", ["item"])
    dataset = dataset.negative_gen(**kwargs).map(
      lambda x: parsers.parse_examples(
        x[None],
        ["user", "item"],
        ["label", "instance_weight"],
        [1, 1],
        extra_features=["item_id", "actions"],
      )
    )
    return [
      {
        name: (value.to_list()[0] if isinstance(value, tf.RaggedTensor) else value.numpy()[0][0])
        for name, value in x.items()
      }
      for x in dataset
    ]

  def test_negatives_come_before_the_positive(self):
    out = self.generate(3, neg_num=2, start_num=1, negative_action=9)
    labels = [x["label"] for x in out]
    # One item is not more than start_num.
    self.assertEqual(labels, [1, -1, -1, 1, -1, -1, 1])
    positive, negative = out[3], out[1]
    self.assertEqual(negative["user"], positive["user"])
    self.assertEqual(negative["item"], [negative["item_id"] - 1])
    self.assertEqual(negative["actions"], 9)
    self.assertEqual(positive["instance_weight"], 1)
    self.assertGreater(negative["instance_weight"], 1)

  def test_weight_of_the_newest_item(self):
    out = self.generate(1, neg_num=5, start_num=0)
    self.assertEqual(out[0]["instance_weight"], 6.0)
    self.assertEqual(out[1]["instance_weight"], 3.5)

  def test_throw_origin(self):
    out = self.generate(3, neg_num=1, start_num=0, throw_origin=True)
    self.assertEqual([x["label"] for x in out], [-1, -1, -1])

  def test_channel_zero_is_never_drawn(self):
    out = self.generate(3, neg_num=1, start_num=0, per_channel=True, channel_feature="none")
    self.assertEqual([x["label"] for x in out], [1, 1, 1])

  def test_instances(self):
    payloads = [
      make_instance([fid_v1(1, i), fid_v1(2, i)], [1.0], item_id=i).SerializeToString()
      for i in range(1, 4)
    ]
    path = write_records(self.path("instances"), payloads)
    dataset = datasets.FilePBDataset(path).negative_gen(
      neg_num=1, start_num=0, item_features=["2"], sampled_neg_instance_weight=0.5
    )
    out = [
      parsers.parse_instances(
        x[None], [1, 2], dense_features=["label", "instance_weight"], dense_feature_shapes=[1, 1]
      )
      for x in dataset
    ]
    self.assertEqual([float(x["label"][0, 0]) for x in out], [-1, 1, -1, 1, -1, 1])
    self.assertEqual(out[0]["instance_weight"].numpy().item(), 0.5)
    for x in out:
      self.assertEqual((len(x["slot_1"].values), len(x["slot_2"].values)), (1, 1))


class DataServiceHelpersTest(_FileTest):
  def test_merged_window(self):
    rows = tf.data.Dataset.from_tensor_slices(
      {"x": tf.range(8), "r": tf.ragged.constant([[i] * (i % 3) for i in range(8)])}
    )
    merged = rows.batch(2).merged_window(2)
    batches = list(merged)
    self.assertLen(batches, 2)
    self.assertAllEqual(batches[1]["x"], [4, 5, 6, 7])
    self.assertEqual(batches[0]["r"].to_list(), [[], [1], [2, 2], []])

  def test_method_distribute_is_the_identity(self):
    dataset = tf.data.Dataset.range(3)
    self.assertIs(dataset.distribute("x", y=1), dataset)

  def test_distribute_reads_through_a_service(self):
    dispatcher = tf.data.experimental.service.DispatchServer()
    worker = tf.data.experimental.service.WorkerServer(
      tf.data.experimental.service.WorkerConfig(dispatcher.target.split("://")[1])
    )
    for i in range(3):
      self.write_examples(f"part_{i}", n=2)
    with flagsaver.flagsaver(data_service_dispatcher=dispatcher.target):
      dataset = datasets.PBDataset(patterns=[self.path("part_*")], input_pb_type=PbType.EXAMPLE)
    dataset = datasets.distribute(dataset, target=dispatcher.target, num_worker=1, worker_idx=0)
    # Samples cross from the worker's runner to the client as encoded variants.
    self.assertEqual(sorted(uids(dataset)), [1, 1, 1, 2, 2, 2])
    del worker

  def _service(self):
    dispatcher = tf.data.experimental.service.DispatchServer()
    worker = tf.data.experimental.service.WorkerServer(
      tf.data.experimental.service.WorkerConfig(dispatcher.target.split("://")[1])
    )
    return dispatcher, worker

  def test_distribute_joins_batches(self):
    dispatcher, worker = self._service()
    dataset = tf.data.Dataset.range(10).batch(2)
    batches = datasets.distribute(dataset, dispatcher.target, window_size=2)
    # The only worker of the service has all elements, so their order stays.
    self.assertEqual(
      [batch.numpy().tolist() for batch in batches], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    )
    del worker

  def test_distribute_shares_what_worker_0_registered(self):
    dispatcher, service_worker = self._service()
    parameter_server = tf.distribute.Server.create_local_server()

    servers = []

    def open_worker(index):
      server = tf.distribute.Server.create_local_server()
      addresses = [each.target.split("://")[1] for each in (server, parameter_server)]
      cluster = tf.train.ClusterSpec({"worker": {index: addresses[0]}, "ps": [addresses[1]]})
      config = tf.compat.v1.ConfigProto(cluster_def=cluster.as_cluster_def())
      config.experimental.share_session_state_in_clusterspec_propagation = True
      with tf.Graph().as_default() as graph:
        with tf.device(f"/job:worker/task:{index}/device:CPU:0"):
          dataset = datasets.distribute(
            # Worker 1's own elements differ, and must not be read.
            tf.data.Dataset.range(100 * index, 100 * index + 4),
            dispatcher.target,
            num_worker=2,
            worker_idx=index,
            queue_device="/job:ps/task:0/device:CPU:0",
          )
          iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
          element = iterator.get_next()
      session = tf.compat.v1.Session(server.target, graph=graph, config=config)
      self.addCleanup(session.close)
      servers.append(server)
      return session, iterator.initializer, element

    def read(session, element):
      elements = []
      while True:
        try:
          elements.append(int(session.run(element)))
        except tf.errors.OutOfRangeError:
          return elements

    (first, first_init, first_element), (other, other_init, other_element) = map(
      open_worker, (0, 1)
    )
    waiting = threading.Thread(target=other.run, args=(other_init,))
    waiting.start()
    first.run(first_init)
    waiting.join()
    self.assertEqual(sorted(read(first, first_element) + read(other, other_element)), [0, 1, 2, 3])

    # Either worker may start again, in any order.
    other.run(other_init)
    first.run(first_init)
    other.run(other_init)
    self.assertLen(servers, 2)  # alive until here
    del service_worker

  def test_distribute_needs_a_target(self):
    with self.assertRaisesRegex(ValueError, "target is empty"):
      datasets.distribute(tf.data.Dataset.range(1))
    with self.assertRaisesRegex(ValueError, "worker_idx is 2"):
      datasets.distribute(tf.data.Dataset.range(1), "grpc://x", num_worker=2, worker_idx=2)
    with self.assertRaisesRegex(ValueError, "window_size is 0"):
      datasets.distribute(tf.data.Dataset.range(1), "grpc://x", window_size=0)
    with self.assertRaisesRegex(ValueError, "queue_device is /cpu:0, but workers share a queue"):
      datasets.distribute(tf.data.Dataset.range(1), "grpc://x", num_worker=2, queue_device="/cpu:0")


class VariantTypeTest(_FileTest):
  def test_needs_one_known_type(self):
    strings = tf.data.Dataset.from_tensors(make_example(label=[1]).SerializeToString())
    samples = strings.map(feature_utils.string_to_variant)
    with tf.Graph().as_default():
      with self.assertRaisesRegex(AssertionError, "give variant_type"):
        datasets._variant_type(tf.data.Dataset.range(1), None)
    out = list(samples.instance_reweight("1", "1:1:1", variant_type="example"))
    self.assertLen(out, 1)


if __name__ == "__main__":
  tf.test.main()
