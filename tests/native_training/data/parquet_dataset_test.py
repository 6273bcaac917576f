"""Tests of samples from Parquet files."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from absl.testing import flagsaver

from idl.matrix.proto import example_pb2, line_id_pb2, proto_parser_pb2
from monolith.native_training import native_task_context
from monolith.native_training.checkpoints import ckpt_hooks
from monolith.native_training.data import datasets, parquet_dataset, parsers
from tests.native_training.data.data_test_utils import fid_v1, fid_v2, needs_parquet, proto_of

PbType = datasets.PbType
COLUMNS = ["__LABEL__", "__UID__", "user", "item", "age", "price"]
TYPES = ["float", "int", "fid_v1", "fid_v2", "int", "float"]


def parquet(path, **kwargs):
  arguments = {
    "output_pb_type": PbType.EXAMPLE,
    "select_columns": COLUMNS,
    "select_columns_type": TYPES,
    **kwargs,
  }
  return datasets.ParquetDataset(path, **arguments)


def uids(dataset):
  batches = dataset.batch(7).map(lambda x: parsers.parse_examples(x, [], extra_features=["uid"]))
  return [int(uid) for batch in batches for uid in batch["uid"].numpy().flatten()]


@needs_parquet
class ParquetDatasetTest(tf.test.TestCase):
  def path(self, name="data.parquet"):
    return os.path.join(os.environ["TEST_TMPDIR"], name)

  def write(self, columns, name="data.parquet", **kwargs):
    pq.write_table(pa.table(columns), self.path(name), **kwargs)
    return self.path(name)

  def write_rows(self, rows, name="data.parquet", first=0, **kwargs):
    numbers = range(first, first + rows)
    columns = {
      # Columns that are not selected do not matter.
      "unused": pa.array([None] * rows, pa.string()),
      "price": pa.array([i / 2 for i in numbers], pa.float64()),
      "__LABEL__": pa.array([i % 2 for i in numbers], pa.float32()),
      "__UID__": pa.array(numbers, pa.int64()),
      "user": pa.array([[fid_v1(1, i)] * (i % 3) for i in numbers], pa.list_(pa.int64())),
      "item": pa.array([fid_v2(2, i) for i in numbers], pa.int64()),
      "age": pa.array(numbers, pa.int32()),
    }
    return self.write(columns, name, **kwargs)

  def error_of(self, dataset, error=tf.errors.InvalidArgumentError):
    with self.assertRaises(error) as caught:
      list(dataset)
    return str(caught.exception)

  def test_examples(self):
    dataset = parquet(self.write_rows(5))
    self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.variant))
    protos = [proto_of(sample, example_pb2.Example) for sample in dataset]
    self.assertEqual([proto.line_id.uid for proto in protos], [0, 1, 2, 3, 4])
    self.assertEqual([list(proto.label) for proto in protos], [[0], [1], [0], [1], [0]])
    named = {feature.name: feature for feature in protos[4].named_feature}
    self.assertEqual(
      {name: feature.id for name, feature in named.items()},
      {"user": 10002, "item": 10003, "age": 10004, "price": 10005},
    )
    self.assertEqual(list(named["user"].feature.fid_v1_list.value), [fid_v1(1, 4)])
    self.assertEqual(list(named["item"].feature.fid_v2_list.value), [fid_v2(2, 4)])
    self.assertEqual(list(named["age"].feature.int64_list.value), [4])
    self.assertEqual(list(named["price"].feature.float_list.value), [2.0])

  def test_examples_are_parsed(self):
    features = next(
      iter(
        parquet(self.write_rows(3))
        .batch(3)
        .map(
          lambda x: parsers.parse_examples(
            x,
            ["user", "item"],
            ["label", "age", "price"],
            [1, 1, 1],
            [tf.float32, tf.int64, tf.float32],
            extra_features=["uid"],
          )
        )
      )
    )
    self.assertEqual(features["user"].to_list(), [[], [fid_v2(1, 1)], [fid_v2(1, 2)] * 2])
    self.assertEqual(features["item"].to_list(), [[fid_v2(2, i)] for i in range(3)])
    self.assertAllEqual(features["label"], [[0], [1], [0]])
    self.assertAllEqual(features["age"], [[0], [1], [2]])
    self.assertAllEqual(features["price"], [[0], [0.5], [1]])
    self.assertAllEqual(features["uid"], [[0], [1], [2]])

  def parsed_batches(self, dataset):
    return dataset.map(
      lambda x: parsers.parse_example_batch(
        x, ["user", "item"], ["label"], [1], extra_features=["uid"]
      )
    )

  def test_example_batches(self):
    path = self.write_rows(10, row_group_size=3)
    for drop_remainder, sizes in ((True, [4, 4]), (False, [4, 4, 2])):
      dataset = parquet(
        path,
        output_pb_type=PbType.EXAMPLEBATCH,
        batch_size=4,
        drop_remainder=drop_remainder,
      )
      batches = list(self.parsed_batches(dataset))
      self.assertEqual([len(batch["uid"]) for batch in batches], sizes)
      rows = sum((batch["uid"].numpy().flatten().tolist() for batch in batches), [])
      self.assertEqual(rows, list(range(sum(sizes))))
      self.assertEqual(batches[0]["item"].to_list(), [[fid_v2(2, i)] for i in range(4)])
      self.assertAllEqual(batches[1]["label"], [[0], [1], [0], [1]])
    proto = proto_of(next(iter(dataset)), example_pb2.ExampleBatch)
    self.assertEqual(proto.batch_size, 4)
    columns = {column.name: column.id for column in proto.named_feature_list}
    self.assertEqual(columns["__LABEL__"], 10000)
    self.assertEqual(columns["price"], 10005)

  def test_defaults(self):
    dataset = parquet(self.write_rows(1100), output_pb_type=PbType.EXAMPLEBATCH)
    self.assertEqual([len(x["uid"]) for x in self.parsed_batches(dataset)], [512, 512])
    # Only incomplete batches are dropped, not rows.
    self.assertEqual(uids(parquet(self.path())), list(range(1100)))

  def test_instances(self):
    dataset = parquet(self.write_rows(3), output_pb_type=PbType.INSTANCE)
    protos = [proto_of(sample, proto_parser_pb2.Instance) for sample in dataset]
    self.assertEqual([proto.line_id.uid for proto in protos], [0, 1, 2])
    self.assertEqual(list(protos[2].fid), [fid_v1(1, 2)] * 2)
    features = {feature.name: feature for feature in protos[2].feature}
    self.assertEqual(list(features["item"].fid), [fid_v2(2, 2)])

  def test_no_rows(self):
    path = self.write_rows(0)
    self.assertEqual(uids(parquet(path)), [])
    self.assertEmpty(list(parquet(path, output_pb_type=PbType.EXAMPLEBATCH)))

  def test_types_of_columns(self):
    path = self.write(
      {
        "small": pa.array([-5], pa.int8()),
        "unsigned": pa.array([(1 << 64) - 1], pa.uint64()),
        "negative": pa.array([-1], pa.int64()),
        "text": pa.array(["a\u00e9"]),
        "blob": pa.array([b"\xff\x00"]),
        "texts": pa.array([["x", "y"]], pa.large_list(pa.large_string())),
        "dictionary": pa.array(["k"]).dictionary_encode(),
        "doubles": pa.array([[0.1, float("inf")]], pa.list_(pa.float64())),
        "count": pa.array([7], pa.int64()),
        "instance_weight": pa.array([0.5], pa.float64()),
      }
    )
    columns = {
      "small": "int", "unsigned": "fid_v2", "negative": "fid_v1", "text": "bytes",
      "blob": "string", "texts": "bytes", "dictionary": "bytes", "doubles": "float",
      "count": "float", "instance_weight": "float",
    }  # fmt: skip
    dataset = parquet(
      path, select_columns=list(columns), select_columns_type=list(columns.values())
    )
    proto = proto_of(dataset.get_single_element(), example_pb2.Example)
    named = {feature.name: feature.feature for feature in proto.named_feature}
    self.assertEqual(list(named["small"].int64_list.value), [-5])
    self.assertEqual(list(named["unsigned"].fid_v2_list.value), [(1 << 64) - 1])
    self.assertEqual(list(named["negative"].fid_v1_list.value), [(1 << 64) - 1])
    self.assertEqual(list(named["text"].bytes_list.value), ["a\u00e9".encode()])
    self.assertEqual(list(named["blob"].bytes_list.value), [b"\xff\x00"])
    self.assertEqual(list(named["texts"].bytes_list.value), [b"x", b"y"])
    self.assertEqual(list(named["dictionary"].bytes_list.value), [b"k"])
    self.assertAllClose(list(named["doubles"].float_list.value), [0.1, float("inf")])
    self.assertEqual(list(named["count"].float_list.value), [7.0])
    self.assertEqual(proto.instance_weight, 0.5)

  def test_line_id(self):
    path = self.write(
      {
        "__ACTIONS__": pa.array([[1, 2], []], pa.list_(pa.int32())),
        "__ITEM_ID__": pa.array([-1, 3], pa.int64()),
        "__SAMPLE_RATE__": pa.array([0.5, 1.0], pa.float64()),
        "__REQ_ID__": pa.array(["a", "b"]),
        "__req_time__": pa.array([10, 20], pa.int64()),
        "__LABEL__": pa.array([[1, 0], [0, 1]], pa.list_(pa.int64())),
      }
    )
    names = pq.read_schema(path).names
    dataset = parquet(path, select_columns=names, select_columns_type=["int"] * len(names))
    first, second = (proto_of(sample, example_pb2.Example) for sample in dataset)
    self.assertEqual(
      first.line_id,
      line_id_pb2.LineId(
        actions=[1, 2], item_id=(1 << 64) - 1, sample_rate=0.5, req_id="a", req_time=10
      ),
    )
    self.assertEqual(second.line_id.item_id, 3)
    self.assertEqual([list(first.label), list(second.label)], [[1, 0], [0, 1]])
    self.assertEmpty(first.named_feature)

  def test_graph_mode(self):
    path = self.write_rows(5)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:

      def batches():
        return (
          parquet(path)
          .batch(2)
          .map(lambda x: parsers.parse_examples(x, ["item"], extra_features=["uid"]))
        )

      one_shot = tf.compat.v1.data.make_one_shot_iterator(batches()).get_next()
      iterator = tf.compat.v1.data.make_initializable_iterator(batches())
      initializable = iterator.get_next()
      # The same holds for other files that a program names.
      self.assertFalse(ckpt_hooks._get_meta().enable_iter_save_restore)
      session.run(iterator.initializer)
      session.run(initializable)
      session.run(iterator.initializer)
      for following in (one_shot, initializable):
        read = [session.run(following)["uid"].flatten().tolist() for _ in range(3)]
        self.assertEqual(read, [[0, 1], [2, 3], [4]])
        with self.assertRaises(tf.errors.OutOfRangeError):
          session.run(following)

  def test_method_style_ops_know_the_type(self):
    dataset = parquet(self.write_rows(4))
    self.assertEqual(uids(dataset.instance_reweight("", "")), [0, 1, 2, 3])
    # All samples come from data source "".
    self.assertEqual(uids(dataset.split_flow([""], 0)), [0, 1, 2, 3])

  def test_several_iterators(self):
    dataset = parquet(self.write_rows(6), batch_size=2)
    first = iter(dataset)
    next(first)
    self.assertEqual(uids(dataset), list(range(6)))
    self.assertLen(list(first), 5)
    self.assertEqual(uids(dataset.repeat(2)), 2 * list(range(6)))

  def test_other_file_systems(self):
    self.assertEqual(uids(parquet("file://" + self.write_rows(600))), list(range(600)))

  def test_pb_dataset(self):
    path = self.write_rows(6)
    columns = {"select_columns": COLUMNS, "select_columns_type": TYPES}
    for dataset in (
      datasets.PBDataset(path, use_parquet=True, **columns),
      datasets.PBDataset(file_name=path, use_parquet=True, **columns),
      datasets.PBDataset(path, 1024, PbType.EXAMPLE, PbType.EXAMPLE, use_parquet=True, **columns),
    ):
      self.assertIsInstance(dataset, datasets.ParquetDataset)
      self.assertEqual(uids(dataset), list(range(6)))
    batches = datasets.PBDataset(
      path,
      output_pb_type=PbType.EXAMPLEBATCH,
      use_parquet=True,
      batch_size=4,
      drop_remainder=False,
      **columns,
    )
    self.assertEqual([len(x["uid"]) for x in self.parsed_batches(batches)], [4, 2])
    with flagsaver.flagsaver(dataset_input_use_parquet=True):
      self.assertEqual(uids(datasets.PBDataset(path, **columns)), list(range(6)))
      with self.assertRaisesRegex(ValueError, "use_parquet needs select_columns"):
        datasets.PBDataset(path)
      with flagsaver.flagsaver(dataset_input_use_tfrecord=True):
        with self.assertRaisesRegex(AssertionError, "both set"):
          datasets.PBDataset(path, **columns)
    with self.assertRaisesRegex(ValueError, "use_parquet needs file_name"):
      datasets.PBDataset(use_parquet=True, **columns)

  def test_distributed(self):
    for i in range(4):
      self.write_rows(3, f"part_{i}.parquet", first=3 * i)
    columns = {"select_columns": COLUMNS, "select_columns_type": TYPES}
    dataset = datasets.PBDataset([self.path("part_*.parquet")], use_parquet=True, **columns)
    self.assertEqual(sorted(uids(dataset)), list(range(12)))
    self.assertEqual(dataset.output_pb_type, PbType.EXAMPLE)
    single = native_task_context.get()
    read = []
    for index in range(2):
      ctx = single._replace(num_workers=2, worker_index=index)
      # The outermost context stays, so the usual one has to be outside.
      with native_task_context.with_ctx(single), native_task_context.with_ctx(ctx):
        dataset = datasets.DistributedFilePBDataset(
          [self.path("part_*.parquet")], use_parquet=True, **columns
        )
        read.append(uids(dataset))
    self.assertEqual([len(part) for part in read], [6, 6])
    self.assertEqual(sorted(sum(read, [])), list(range(12)))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      dataset = datasets.DistributedFilePBDataset(
        self.path("part_*.parquet"),
        output_pb_type=PbType.EXAMPLEBATCH,
        use_parquet=True,
        batch_size=3,
        **columns,
      )
      self.assertTrue(ckpt_hooks._get_meta().enable_iter_save_restore)
      following = tf.compat.v1.data.make_one_shot_iterator(self.parsed_batches(dataset)).get_next()
      rows = sum((session.run(following)["uid"].flatten().tolist() for _ in range(4)), [])
      self.assertEqual(sorted(rows), list(range(12)))
      with self.assertRaises(tf.errors.OutOfRangeError):
        session.run(following)

  def test_missing_file(self):
    message = self.error_of(parquet(self.path("none.parquet")), tf.errors.NotFoundError)
    self.assertIn("none.parquet", message)

  def test_corrupt_file(self):
    path = self.write_rows(1000)
    with open(path, "rb") as stream:
      content = stream.read()
    middle = len(content) // 2
    for broken in (
      b"",
      b"PAR1",
      b"no Parquet file at all",
      content[:middle],
      content[:4] + b"\x00" * (middle - 4) + content[middle:],
    ):
      with open(self.path("broken.parquet"), "wb") as stream:
        stream.write(broken)
      message = self.error_of(parquet(self.path("broken.parquet")))
      self.assertRegex(message, "broken.parquet cannot be read as a Parquet file")

  def test_bad_page_is_named_with_its_row_group(self):
    path = self.write_rows(
      100, row_group_size=30, write_page_checksum=True, compression="none", use_dictionary=False
    )
    with open(path, "rb") as stream:
      content = bytearray(stream.read())
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(3)
    self.assertEqual(chunk.path_in_schema, "__UID__")
    # In the middle of the numbers: only the checksum can tell.
    content[chunk.data_page_offset + chunk.total_compressed_size - 8 * 15] ^= 1
    with open(self.path("broken.parquet"), "wb") as stream:
      stream.write(content)

    message = self.error_of(parquet(self.path("broken.parquet")))

    self.assertRegex(message, "broken.parquet cannot be read as a Parquet file: .*row group 2: ")
    self.assertRegex(message, "(?i)crc|checksum")

  def test_row_group_that_ends_early_is_an_error(self):
    path = self.write({"__UID__": pa.array(range(100), pa.int64())}, row_group_size=50)
    with open(path, "rb") as stream:
      content = stream.read()
    # The second group: its chunk is of a file whose groups have fewer rows.
    short = self.write({"__UID__": pa.array(range(100), pa.int64())}, "short", row_group_size=40)
    with open(short, "rb") as stream:
      other = stream.read()
    chunks = [pq.ParquetFile(name).metadata.row_group(1).column(0) for name in (path, short)]
    begin, source = (self.start_of(chunk) for chunk in chunks)
    replacement = other[source : source + chunks[1].total_compressed_size]
    size = chunks[0].total_compressed_size
    content = content[:begin] + replacement.ljust(size, b"\0") + content[begin + size :]
    with open(path, "wb") as stream:
      stream.write(content)
    dataset = parquet(path, select_columns=["__UID__"], select_columns_type=["int"])
    self.assertRegex(self.error_of(dataset), "data.parquet cannot be read .*row group 1: ")

  def start_of(self, chunk):
    return min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)

  def test_wrong_columns(self):
    path = self.write_rows(3)

    def read(name, type_name):
      return parquet(path, select_columns=["age", name], select_columns_type=["int", type_name])

    self.assertRegex(
      self.error_of(read("salary", "int")),
      "has 0 columns 'salary', want one; it has: unused, price",
    )
    for name, type_name, message in (
      ("price", "int", "column 'price' of .* is double, which cannot become int"),
      ("price", "fid_v2", "column 'price' of .* is double, which cannot become fid_v2"),
      ("unused", "float", "column 'unused' of .* is string, which cannot become float"),
      ("item", "bytes", "column 'item' of .* is int64, which cannot become bytes"),
    ):
      self.assertRegex(self.error_of(read(name, type_name)), message)
    path = self.write(
      {
        "age": [1],
        "flag": [True],
        "__UID__": ["text"],
        "__CHNID__": pa.array([[1, 2]], pa.list_(pa.int64())),
      }
    )
    for name, message in (
      ("flag", "column 'flag' of .* is bool, which cannot become int"),
      ("__UID__", "column '__UID__' of .* is string, which cannot become LineId.uid"),
      ("__CHNID__", "column '__CHNID__' of .* is list.*, but LineId.chnid is one value"),
    ):
      self.assertRegex(self.error_of(read(name, "int")), message)

  def test_nulls(self):
    path = self.write(
      {
        "a": pa.array([1, 2, None], pa.int64()),
        "b": pa.array([[1], None, [2]], pa.list_(pa.int64())),
        "c": pa.array([[1.0, None], [], [2.0]], pa.list_(pa.float32())),
        "__UID__": pa.array([None, 1, 2], pa.int64()),
      }
    )
    for name, type_name, row in (
      ("a", "int", 2), ("b", "fid_v2", 1), ("c", "float", 0), ("__UID__", "int", 0)
    ):  # fmt: skip
      dataset = parquet(path, select_columns=[name], select_columns_type=[type_name], batch_size=2)
      self.assertRegex(
        self.error_of(dataset), f"row {row} of column '{name}' of .*: null is not a value"
      )

  def test_values_out_of_range(self):
    path = self.write(
      {
        "big": pa.array([1, 1 << 63], pa.uint64()),
        "__RANK__": pa.array([1, 1 << 62], pa.int64()),
      }
    )
    for name in ("big", "__RANK__"):
      dataset = parquet(path, select_columns=[name], select_columns_type=["int"])
      self.assertRegex(self.error_of(dataset), f"row 1 of column '{name}' of .*out of range")

  def test_text_that_is_not_utf8(self):
    path = self.write({"__REQ_ID__": pa.array([b"good", b"\xff"])})
    dataset = parquet(path, select_columns=["__REQ_ID__"], select_columns_type=["bytes"])
    self.assertRegex(self.error_of(dataset), "row 1 of column '__REQ_ID__' of .*not UTF-8")

  def test_bad_arguments(self):
    for kwargs, message in (
      ({"output_pb_type": "example"}, "output_pb_type is 'example', want a PbType"),
      ({"batch_size": 0}, "batch_size is 0, want at least 1"),
      ({"select_columns": [], "select_columns_type": []}, "select_columns is empty"),
      ({"select_columns": ["a"]}, "select_columns has 1 names, select_columns_type has 6 types"),
      (
        {"select_columns": ["a"], "select_columns_type": ["double"]},
        r"select_columns_type\[0\] is 'double', want one of int, fid_v1, fid_v2, float",
      ),
      (
        {"select_columns": ["a", "a"], "select_columns_type": ["int", "int"]},
        "select_columns has 'a' twice",
      ),
      (
        {"select_columns": ["__NO_SUCH__"], "select_columns_type": ["int"]},
        "select_columns.0. is '__NO_SUCH__', but LineId has no value 'no_such'",
      ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        parquet("data.parquet", **kwargs)

  def test_without_library(self):
    code = (
      "from monolith.native_training.data import datasets\n"
      f"path = {self.write_rows(1)!r}\n"
      "dataset = datasets.ParquetDataset(path, datasets.PbType.EXAMPLE, ['age'], ['int'])\n"
      "print('made')\n"
      "list(dataset)\n"
    )
    result = subprocess.run(
      [sys.executable, "-c", code],
      capture_output=True,
      text=True,
      env={**os.environ, "MONOLITH_PARQUET_LIBRARY": "/no/such/library.so"},
    )
    self.assertNotEqual(result.returncode, 0)
    self.assertEqual(result.stdout, "made\n")
    self.assertRegex(
      result.stderr,
      r"FailedPreconditionError.*pip install '(\.|monolith-recsys)\[parquet\]'.*/no/such/library",
    )

  def test_op_library_does_not_need_arrow(self):
    code = (
      "import sys; sys.modules['pyarrow'] = None\n"
      "from monolith.native_training.runtime.ops import gen_monolith_ops\n"
      "loaded = open('/proc/self/maps').read()\n"
      "assert 'libarrow' not in loaded and 'libmonolith_parquet' not in loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

  def test_plaintext(self):
    path = self.write_rows(10)
    for drop_remainder, sizes in ((True, [4, 4]), (False, [4, 4, 2])):
      dataset = parquet(
        path, output_pb_type=PbType.PLAINTEXT, batch_size=4, drop_remainder=drop_remainder
      )
      self.assertEqual(dataset.element_spec, tf.TensorSpec([], tf.string))
      batches = [example_pb2.ExampleBatch.FromString(x.numpy()) for x in dataset]
      self.assertEqual([batch.batch_size for batch in batches], sizes)
      parsed = list(self.parsed_batches(dataset))
      rows = sum((batch["uid"].numpy().flatten().tolist() for batch in parsed), [])
      self.assertEqual(rows, list(range(sum(sizes))))

  def restored(self, dataset, number):
    """Saves after `number` elements; returns the rest, as read on and as read after a restore."""
    iterator = iter(dataset)
    for _ in range(number):
      next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(self.path("checkpoint"))
    rest = list(iterator)
    resumed = iter(dataset)
    tf.train.Checkpoint(iterator=resumed).restore(path).assert_consumed()
    return rest, list(resumed)

  def test_position_is_saved(self):
    path = self.write_rows(50, row_group_size=7)
    for number in (0, 1, 4, 7, 13, 49, 50):
      for pb_type, proto in (
        (PbType.EXAMPLE, example_pb2.Example), (PbType.INSTANCE, proto_parser_pb2.Instance)
      ):  # fmt: skip
        rest, resumed = self.restored(parquet(path, output_pb_type=pb_type, batch_size=5), number)
        uid = [proto_of(sample, proto).line_id.uid for sample in resumed]
        self.assertEqual(uid, list(range(number, 50)))
        self.assertLen(rest, 50 - number)
    for number in range(4):
      for pb_type in (PbType.EXAMPLEBATCH, PbType.PLAINTEXT):
        dataset = parquet(path, output_pb_type=pb_type, batch_size=16)
        rest, resumed = self.restored(self.parsed_batches(dataset), number)
        self.assertLen(rest, 3 - number)
        for x, y in zip(rest, resumed):
          self.assertAllEqual(x["uid"], y["uid"])
          self.assertAllEqual(x["user"], y["user"])

  def test_position_in_several_files(self):
    for i in range(3):
      self.write_rows(10, f"many_{i}.parquet", first=10 * i)
    dataset = datasets.DistributedFilePBDataset(
      [self.path("many_*.parquet")], use_parquet=True, select_columns=COLUMNS,
      select_columns_type=TYPES, num_parallel_calls=None, deterministic=True,
    )  # fmt: skip
    rest, resumed = self.restored(dataset, 11)
    uid = [[proto_of(x, example_pb2.Example).line_id.uid for x in part] for part in (rest, resumed)]
    self.assertLen(uid[0], 19)
    self.assertEqual(uid[0], uid[1])

  def test_file_that_became_shorter(self):
    path = self.write_rows(10)
    dataset = parquet(path)
    iterator = iter(dataset)
    for _ in range(6):
      next(iterator)
    saved = tf.train.Checkpoint(iterator=iterator).save(self.path("checkpoint"))
    self.write_rows(3)
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "row 6 is not one of 3"):
      tf.train.Checkpoint(iterator=iter(dataset)).restore(saved)

  def test_errors_repeat(self):
    path = self.write({"a": pa.array([1, 2, None, 4], pa.int64())})
    iterator = iter(parquet(path, select_columns=["a"], select_columns_type=["int"], batch_size=2))
    for _ in range(2):
      next(iterator)
    for _ in range(2):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "row 2 .*null is not a value"):
        next(iterator)

  def test_half_floats_and_null_dictionaries(self):
    path = self.write(
      {
        "half": pa.array([np.float16(1.5), np.float16(-2)], pa.float16()),
        "word": pa.array([None, None], pa.dictionary(pa.int32(), pa.string())),
      }
    )
    (first, second) = parquet(path, select_columns=["half"], select_columns_type=["float"])
    for sample, value in ((first, 1.5), (second, -2)):
      feature = proto_of(sample, example_pb2.Example).named_feature[0].feature
      self.assertEqual(list(feature.float_list.value), [value])
    words = parquet(path, select_columns=["word"], select_columns_type=["bytes"])
    self.assertRegex(self.error_of(words), "row 0 of column 'word' of .*: null is not a value")

  def test_bad_arguments_of_the_op(self):
    for kwargs, text in (
      ({"batch_size": 0}, "batch_size is 0"),
      ({"output_pb_type": "none"}, "output_pb_type is 'none'"),
      ({"out_type": tf.string}, "out_type is string"),
      ({"select_columns": []}, "select_columns is empty"),
      ({"select_columns_type": []}, "has 1 names, select_columns_type has 0 types"),
      ({"select_columns_type": ["double"]}, "select_columns_type.0. is 'double'"),
      ({"select_columns": ["__NO__"]}, "LineId has no value 'no'"),
      ({"file_name": ["a", "b"]}, "file_name"),
    ):
      options = {
        "file_name": "x", "output_pb_type": "example", "select_columns": ["a"],
        "select_columns_type": ["int"], **kwargs,
      }  # fmt: skip
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
        parquet_dataset.gen_monolith_ops.parquet_dataset(**options)


if __name__ == "__main__":
  tf.test.main()
