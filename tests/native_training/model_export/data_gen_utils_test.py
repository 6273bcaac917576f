"""Tests of random samples, files of them, and warm-up requests."""

import os
import subprocess
import sys

import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from monolith.native_training import utils
from monolith.native_training.data import datasets, parsers
from monolith.native_training.data import utils as data_utils
from monolith.native_training.graph import export_context
from monolith.native_training.model_export import data_gen_utils

PbType = datasets.PbType
FeatureMeta = data_gen_utils.FeatureMeta
ParserArgs = data_gen_utils.ParserArgs


def _path(name):
  return os.path.join(utils.get_test_tmp_dir(), name)


def _instance_args(**kwargs):
  return ParserArgs(
    variant_type="instance",
    fidv1_features=[3, 1023],
    fidv2_features=["fc_slot_2000"],
    dense_features=["label", "instance_weight", "floats", "ints", "text"],
    dense_feature_shapes=[2, 1, 3, 2, 1],
    dense_feature_types=[tf.float32, tf.float32, tf.float32, tf.int64, tf.string],
    extra_features=["uid", "actions", "sample_rate", "did", "req_time"],
    extra_feature_shapes=[1, 2, 1, 1, 1],
    **{"drop_rate": 0, **kwargs},
  )


def _example_args(variant_type="example", **kwargs):
  return ParserArgs(
    variant_type=variant_type,
    sparse_features=["fc_slot_7", "user"],
    dense_features=["label", "floats", "ints", "text"],
    dense_feature_shapes=[2, 3, 2, 1],
    dense_feature_types=[tf.float32, tf.float32, tf.int64, tf.string],
    extra_features=["uid", "actions", "sample_rate", "did"],
    extra_feature_shapes=[1, 2, 1, 1],
    **{"drop_rate": 0, **kwargs},
  )


def _parse(args, tensor):
  dense = (args.dense_features, args.dense_feature_shapes, args.dense_feature_types)
  extra = (args.extra_features, args.extra_feature_shapes)
  if args.variant_type == "instance":
    return parsers.parse_instances(tensor, args.fidv1_features, args.fidv2_features, *dense, *extra)
  parse = parsers.parse_examples if args.variant_type == "example" else parsers.parse_example_batch
  return parse(tensor, args.sparse_features, *dense, *extra)


class HeaderTest(tf.test.TestCase):
  def test_lg_header(self):
    self.assertEqual(data_gen_utils.lg_header("pc"), bytes.fromhex("00f30d0000000000"))
    for source, key in (("datasource_inst", 1561460736), ("mobile", 1250992640), ("1", 12544)):
      self.assertEqual(data_gen_utils.lg_header(source), key.to_bytes(8, "little"))
    for source in (None, ""):
      self.assertEqual(data_gen_utils.lg_header(source), bytes(8))

  def test_sort_header(self):
    for flags, size in (
      ((False, False, False), 0),
      ((True, False, False), 8),
      ((True, True, False), 16),
      ((True, False, True), 24),
    ):
      self.assertEqual(data_gen_utils.sort_header(*flags), bytes(size))

  def test_sort_header_of_other_combinations(self):
    for flags in ((True, True, True), (False, True, False), (False, False, True)):
      with self.assertRaisesRegex(Exception, "is not supported: a dump has a sort id"):
        data_gen_utils.sort_header(*flags)


class ParserArgsTest(tf.test.TestCase):
  def test_metas(self):
    args = _instance_args()
    self.assertEqual(args.dense_metas[3], FeatureMeta("ints", None, 2, tf.int64))
    self.assertEqual(
      [(m.shape, m.dtype) for m in args.extra_metas],
      [(1, tf.int64), (2, tf.int64), (1, tf.float32), (1, tf.string), (1, tf.int64)],
    )

  def test_defaults(self):
    args = ParserArgs(dense_features=["a", "sample_rate"])
    self.assertEqual(
      [(m.shape, m.dtype, m.extra) for m in args.dense_metas], [(1, tf.float32, False)] * 2
    )
    self.assertEqual(args.model_name, "entry")
    self.assertEqual((args.batch_size, args.max_records, args.drop_rate), (64, 1000, 0.5))
    self.assertEqual(args.signature_name, ["serving_default"])
    self.assertEqual(args.warmup_file, "./warmup_file")
    self.assertEqual(ParserArgs(signature_name="one").signature_name, ["one"])

  def test_variant_types(self):
    self.assertEqual(ParserArgs(dense_features=["a"]).variant_type, "instance")
    self.assertEqual(ParserArgs(fidv1_features=[1]).variant_type, "instance")
    self.assertEqual(ParserArgs(sparse_features=["a"]).variant_type, "example")
    self.assertEqual(ParserArgs(variant_type="examplebatch").variant_type, "example_batch")

  def test_errors(self):
    for kwargs, message in (
      ({"variant_type": "text"}, "variant_type is 'text'"),
      ({"batch_size": 0}, "batch_size is 0"),
      ({"max_records": 0}, "max_records is 0"),
      ({"drop_rate": 1.5}, "drop_rate is 1.5, want 0 to 1"),
      ({"variant_type": "example", "fidv1_features": [9]}, r"fidv1_features is \[9\]: a sample"),
      ({"dense_features": ["a"], "dense_feature_shapes": []}, "1 names, but there are 0 shapes"),
      ({"dense_features": ["a"], "dense_feature_types": []}, "1 names, but there are 0 types"),
      ({"extra_feature_shapes": [1]}, "extra_features has 0 names, but there are 1 shapes"),
      ({"extra_features": ["nothing"]}, "'nothing', which is no field of LineId"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        ParserArgs(**kwargs)

  def test_from_collections(self):
    for args in (_instance_args(), _example_args(), _example_args("example_batch")):
      with tf.Graph().as_default():
        _parse(args, tf.compat.v1.placeholder(tf.string, [None]))
        noted = ParserArgs.from_collections()
      self.assertEqual(noted.variant_type, args.variant_type)
      for name in ("fidv1_features", "fidv2_features", "sparse_features", "dense_features",
                   "dense_feature_shapes", "dense_feature_types", "extra_features",
                   "extra_feature_shapes"):  # fmt: skip
        self.assertEqual(list(getattr(noted, name) or []), list(getattr(args, name) or []), name)

  def test_from_collections_knows_the_signatures(self):
    with tf.Graph().as_default() as graph:
      _parse(_example_args(), tf.compat.v1.placeholder(tf.string, [None]))
      tf.compat.v1.add_to_collection("signature_name", "extra")
      with export_context.enter_export_mode(export_context.ExportMode.STANDALONE) as ctx:
        ctx.add_signature(graph, "lookup", {}, {})
        self.assertEqual(ParserArgs.from_collections().signature_name, ["serving_default", "extra"])

  def test_from_collections_wants_one_parser(self):
    with tf.Graph().as_default():
      with self.assertRaisesRegex(ValueError, "The graph has 0 parsers of samples"):
        ParserArgs.from_collections()
      for _ in range(2):
        _parse(_example_args(), tf.compat.v1.placeholder(tf.string, [None]))
      with self.assertRaisesRegex(ValueError, "The graph has 2 parsers of samples"):
        ParserArgs.from_collections()


class DataFileTest(tf.test.TestCase):
  _HEADERS = (
    ({}, {"has_sort_id": True}),
    ({"kafka_dump": True}, {"has_sort_id": True, "kafka_dump": True}),
    ({"kafka_dump_prefix": True}, {"has_sort_id": True, "kafka_dump_prefix": True}),
    ({"sort_id": False}, {"has_sort_id": False, "lagrangex_header": True}),
    ({"sort_id": False, "source": "pc"}, {"has_sort_id": False, "lagrangex_header": True}),
  )

  _SLOTS = {
    "instance": {"slot_3": 3, "slot_1023": 1023, "fc_slot_2000": 2000},
    "example": {"fc_slot_7": 7, "user": None},
    "example_batch": {"fc_slot_7": 7, "user": None},
  }

  def _check(self, args, features, rows):
    for name, slot in self._SLOTS[args.variant_type].items():
      # Both example parsers, and the instance parser with v2 features, return v2 ids.
      slots = {fid >> 48 for fid in features[name].flat_values.numpy()}
      self.assertEqual(slots, {slot or data_utils.get_slot_from_feature_name(name)})
      self.assertAllInRange(features[name].row_lengths(), 1, 4)
    for meta in (*args.dense_metas, *args.extra_metas):
      self.assertEqual(features[meta.name].shape, (rows, meta.shape), meta.name)
    self.assertAllInSet(features["label"], [0.0, 1.0])
    self.assertAllEqual(features["actions"], [[4, 5]] * rows)
    self.assertAllInRange(features["floats"], 0.0, 1.0)
    self.assertGreater(len(set(features["uid"].numpy().flatten())), 1)
    self.assertAllEqual([len(text) for text in features["text"].numpy().flatten()], [8] * rows)

  def test_instances(self):
    args = _instance_args(batch_size=4)
    for written, read in self._HEADERS:
      with self.subTest(written):
        path = _path("instances")
        data_gen_utils.gen_random_data_file(path, args, num_batch=3, actions=[4, 5], **written)
        dataset = datasets.FilePBDataset(
          path, input_pb_type=PbType.INSTANCE, output_pb_type=PbType.INSTANCE, **read
        )
        batches = list(dataset.batch(4).map(lambda x: _parse(args, x)))
        self.assertLen(batches, 3)
        for features in batches:
          self._check(args, features, 4)
          self.assertAllEqual(features["instance_weight"], [[1.0]] * 4)

  def test_examples(self):
    args = _example_args(batch_size=5)
    for written, read in self._HEADERS:
      with self.subTest(written):
        path = _path("examples")
        data_gen_utils.gen_random_data_file(path, args, num_batch=2, actions=[4, 5], **written)
        dataset = datasets.PBDataset(
          path, input_pb_type=PbType.EXAMPLE, output_pb_type=PbType.EXAMPLE, **read
        )
        batches = list(dataset.batch(5).map(lambda x: _parse(args, x)))
        self.assertLen(batches, 2)
        for features in batches:
          self._check(args, features, 5)

  def test_example_batches(self):
    args = _example_args("example_batch", batch_size=6)
    for written, read in self._HEADERS:
      with self.subTest(written):
        path = _path("batches")
        data_gen_utils.gen_random_data_file(path, args, num_batch=2, actions=[4, 5], **written)
        dataset = datasets.PBDataset(
          path, input_pb_type=PbType.EXAMPLEBATCH, output_pb_type=PbType.EXAMPLEBATCH, **read
        )
        batches = list(dataset.map(lambda x: _parse(args, x)))
        self.assertLen(batches, 2)
        for features in batches:
          self._check(args, features, 6)

  def test_example_batches_as_examples(self):
    args = _example_args("example_batch", batch_size=6)
    path = _path("batches")
    data_gen_utils.gen_random_data_file(path, args, num_batch=2, actions=[4, 5])
    dataset = datasets.PBDataset(
      path, input_pb_type=PbType.EXAMPLEBATCH, output_pb_type=PbType.EXAMPLE
    )
    (features,) = dataset.batch(12).map(lambda x: _parse(_example_args(), x))
    self._check(_example_args(), features, 12)

  def test_number_of_records(self):
    path = _path("data")
    for num_batch, count in ((0, 0), (7, 14)):
      data_gen_utils.gen_random_data_file(path, _example_args(batch_size=2), num_batch)
      dataset = datasets.PBDataset(path, input_pb_type=PbType.EXAMPLE)
      self.assertLen(list(dataset), count)

  def test_headers_that_no_reader_has(self):
    for flags in ({"kafka_dump": True, "kafka_dump_prefix": True},
                  {"sort_id": False, "kafka_dump": True}):  # fmt: skip
      with self.assertRaisesRegex(Exception, "is not supported"):
        data_gen_utils.gen_random_data_file(_path("none"), _example_args(), **flags)
    self.assertFalse(os.path.exists(_path("none")))

  def test_drop_rate(self):
    path = _path("data")
    args = _example_args(batch_size=64, drop_rate=0.5)
    data_gen_utils.gen_random_data_file(path, args, num_batch=1)
    dataset = datasets.PBDataset(path, input_pb_type=PbType.EXAMPLE)
    (features,) = dataset.batch(64).map(lambda x: _parse(args, x))
    lengths = list(features["user"].row_lengths().numpy())
    self.assertBetween(lengths.count(0), 1, 63)


class WarmupTest(tf.test.TestCase):
  def _read(self, path):
    return [
      prediction_log_pb2.PredictionLog.FromString(record)
      for record in tf.compat.v1.io.tf_record_iterator(path)
    ]

  def test_prediction_log(self):
    for args, key, rows in (
      (_instance_args(batch_size=3), "instances", 3),
      (_example_args(batch_size=3), "examples", 3),
      (_example_args("example_batch", batch_size=3), "example_batch", 1),
    ):
      args.model_name = "ctr"
      args.signature_name = ["serving_default", "other", "beyond"]
      args.max_records = 2
      logs = data_gen_utils.gen_prediction_log(args)
      self.assertEqual(
        [log.predict_log.request.model_spec.signature_name for log in logs],
        ["serving_default", "other"],
      )
      for log in logs:
        request = log.predict_log.request
        self.assertEqual(request.model_spec.name, "ctr")
        self.assertEqual(list(request.inputs), [key])
        samples = tf.make_ndarray(request.inputs[key])
        self.assertEqual(samples.shape, (rows,))
        parsed = _parse(args, tf.constant(samples))
        self.assertAllEqual(parsed["label"].shape, [3, 2])

  def test_file_of_args(self):
    path = _path("warmup")
    args = _example_args(batch_size=2, input_name="samples", warmup_file=path)
    self.assertEqual(data_gen_utils.write_warmup_file(args), path)
    (log,) = self._read(path)
    self.assertEqual(list(log.predict_log.request.inputs), ["samples"])
    self.assertEqual(os.listdir(os.path.dirname(path)).count("warmup-tmp"), 0)

  def test_file_of_the_graph(self):
    path = _path("warmup")
    with tf.Graph().as_default():
      _parse(_instance_args(), tf.compat.v1.placeholder(tf.string, [None]))
      data_gen_utils.gen_warmup_file(path, drop_rate=1.0)
    (log,) = self._read(path)
    request = log.predict_log.request
    self.assertEqual(request.model_spec.signature_name, "serving_default")
    samples = tf.make_ndarray(request.inputs["instances"])
    parsed = _parse(_instance_args(), tf.constant(samples))
    self.assertAllEqual(parsed["slot_3"].row_lengths(), [0] * len(samples))

  def test_default_path(self):
    folder = _path("folder")
    os.makedirs(folder)
    before = os.getcwd()
    os.chdir(folder)
    try:
      with tf.Graph().as_default():
        _parse(_example_args(), tf.compat.v1.placeholder(tf.string, [None]))
        data_gen_utils.gen_warmup_file()
      self.assertEqual(os.listdir("."), ["warmup_file"])
    finally:
      os.chdir(before)

  def test_nothing_known(self):
    with tf.Graph().as_default(), self.assertRaisesRegex(ValueError, "0 parsers of samples"):
      data_gen_utils.gen_warmup_file(_path("nothing"))
    self.assertFalse(os.path.exists(_path("nothing")))

  def test_serving_protos_are_optional(self):
    code = (
      "import sys\n"
      "sys.modules['tensorflow_serving'] = None\n"
      "from monolith import _install\n"
      "from monolith.native_training.model_export import data_gen_utils\n"
      "args = data_gen_utils.ParserArgs(fidv1_features=[1])\n"
      "data_gen_utils.gen_instance([1])\n"
      "try:\n"
      "  data_gen_utils.write_warmup_file(args)\n"
      "except ImportError as e:\n"
      "  assert _install.install_line('serving') in str(e), e\n"
      "else:\n"
      "  raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


if __name__ == "__main__":
  tf.test.main()
