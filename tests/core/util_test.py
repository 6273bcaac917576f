"""Tests of `monolith.core.util`."""

import os
import sys
import tempfile
import unittest
from unittest import mock

import tensorflow as tf

from monolith.core import util

tf.compat.v1.disable_eager_execution()

_ROOT = "gs://test_folder/unzipped_tf_records_corrected_repartitioned/"


def _filtered(paths, start, end):
  with tf.Graph().as_default():
    dataset = tf.data.Dataset.from_tensor_slices([_ROOT + path for path in paths])
    dataset = util.range_dateset(dataset, _ROOT, start, end)
    element = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    kept = []
    with tf.compat.v1.Session() as session:
      while True:
        try:
          kept.append(session.run(element).decode()[len(_ROOT) :])
        except tf.errors.OutOfRangeError:
          return kept


class UtilTest(unittest.TestCase):
  def test_range_dataset_single(self):
    paths = ["20200501/00/part", "20200502/00/part", "20200503/00/part"]
    self.assertEqual(_filtered(paths, "20200502", "20200502"), paths[1:2])

  def test_range_dataset_multiple(self):
    paths = [
      "20200501/00/part",
      "20200502/00/part",
      "20200503/00/part",
      "20200503/01/part",
      "20200504/01/part",
    ]
    self.assertEqual(_filtered(paths, "20200502", "20200503"), paths[1:4])

  def test_range_dataset_out_of_boundary(self):
    paths = ["20200501/00/part", "20200502/00/part"]
    self.assertEqual(_filtered(paths, "20200401", "20200505"), paths)

  def test_range_dataset_no_start_date(self):
    paths = ["20200501/00/part", "20200502/00/part"]
    self.assertEqual(_filtered(paths, None, "20200505"), paths)

  def test_range_dataset_no_end_date(self):
    paths = ["20200501/00/part", "20200502/00/part"]
    self.assertEqual(_filtered(paths, "20200502", None), paths[1:])

  def test_range_dataset_without_a_date(self):
    with self.assertRaises(tf.errors.InvalidArgumentError):
      _filtered(["not_a_date/part"], "20200502", None)

  def test_range_dataset_bad_argument(self):
    with self.assertRaises(ValueError):
      _filtered(["20200501/00/part"], "yesterday", None)

  def test_bucket_name(self):
    split = util.get_bucket_name_and_relavite_path
    self.assertEqual(split("gs://bucket/a/b.txt"), ("bucket", "a/b.txt"))
    self.assertEqual(split("gs://bucket"), ("bucket", ""))
    self.assertEqual(split("gs://bucket/"), ("bucket", ""))
    with self.assertRaisesRegex(AssertionError, "^File name: /a/b$"):
      split("/a/b")

  def test_download_without_the_package(self):
    with mock.patch.dict(sys.modules, {"google.cloud": None}):
      with self.assertRaisesRegex(ImportError, "gs://bucket/a.*pip install google-cloud-storage"):
        util.download_gcs_file("gs://bucket/a", "/nowhere")

  def test_download(self):
    storage = mock.MagicMock()
    package = mock.MagicMock(storage=storage)
    with mock.patch.dict(sys.modules, {"google.cloud": package, "google.cloud.storage": storage}):
      util.download_gcs_file("gs://bucket/a/b", "local")
    bucket = storage.Client.return_value.bucket
    bucket.assert_called_once_with("bucket")
    bucket.return_value.blob.assert_called_once_with("a/b")
    bucket.return_value.blob.return_value.download_to_filename.assert_called_once_with("local")

  def test_skip_file_number(self):
    skip = util.calculate_shard_skip_file_number
    self.assertEqual(skip([10, 20, 30, 40], 2, 1, 4), [1, 1])
    self.assertEqual(skip([4, 2, 2], 1, 1, 1), [3])
    self.assertEqual(skip([8, 5, 2], 1, 1, 1), [1])  # not over the unfinished second file
    self.assertEqual(skip([1, 2], 3, 0, 4), [0, 0, 0])
    self.assertEqual(skip([], 2, 5, 4), [0, 0])


class FilesTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = folder.name

  def _write(self, name, text=""):
    path = os.path.join(self.folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as out:
      out.write(text)
    return path

  def test_meta_file(self):
    meta = self._write("meta", "file,0,\nno comma here\ng,12,x\n")
    self.assertEqual(util.parse_example_number_meta_file(meta, ","), [("file", 0), ("g", 12)])
    meta = self._write("meta", "a,b\t3\nc\t4\n")
    self.assertEqual(util.parse_example_number_meta_file(meta, "\t"), [("a,b", 3), ("c", 4)])

  def test_meta_file_must_ascend(self):
    for text in ("b,1\na,2\n", "a,1\na,2\n"):
      with self.assertRaisesRegex(
        AssertionError, "^File name must be in dictionary ascending order."
      ):
        util.parse_example_number_meta_file(self._write("meta", text), ",")

  def test_completed_steps(self):
    self.assertEqual(util.get_checkpoint_completed_step_number(self.folder + "/none"), 0)
    self.assertEqual(util.get_checkpoint_completed_step_number(self.folder), 0)
    for name in ("model.ckpt-9.meta", "model.ckpt-10.meta", "model.ckpt-99.index", "xmeta"):
      self._write(name)
    self.assertEqual(util.get_checkpoint_completed_step_number(self.folder), 10)

  def test_list_files_with_prefix(self):
    for name in ("data/a1", "data/a2/b", "data/a2/c/d", "data/x"):
      self._write(name)
    found = util._list_files_with_prefix(os.path.join(self.folder, "data/a"))
    self.assertEqual(
      [os.path.relpath(path, self.folder) for path in found],
      ["data/a1", "data/a2/b", "data/a2/c/d"],
    )

  def test_list_gcs_files(self):
    with mock.patch.object(
      util, "_list_files_with_prefix", return_value=["gs://b/p/x", "gs://b/p/y/z"]
    ) as listing:
      bucket, blobs = util.list_gcs_files_with_prefix("gs://b/p/")
    listing.assert_called_once_with("gs://b/p/")
    self.assertEqual((bucket, [blob.name for blob in blobs]), ("b", ["p/x", "p/y/z"]))

  def _training_files(self, meta_names):
    paths = [self._write(f"train/{name}") for name in ("f2", "f3")]
    meta = self._write(
      "meta", "".join(f"{self.folder}/train/{n},{i + 10}\n" for i, n in enumerate(meta_names))
    )
    return os.path.dirname(paths[0]), meta

  def test_example_numbers(self):
    train, meta = self._training_files(["f1", "f2", "f3", "f4"])
    numbers = util.get_per_file_example_numbers_for_checkpoint_reload
    self.assertEqual(numbers(train, meta, ","), [11, 12])
    self.assertEqual(numbers(train + "/f*", meta, ","), [11, 12])
    with self.assertRaisesRegex(AssertionError, "No training file"):
      numbers(train + "/g*", meta, ",")

  def test_example_numbers_not_contiguous(self):
    for names in (["f2", "f25", "f3"], ["f2"], ["f1"], ["f1", "f3", "f4"]):
      with self.subTest(names=names):
        train, meta = self._training_files(names)
        with self.assertRaises(AssertionError):
          util.get_per_file_example_numbers_for_checkpoint_reload(train, meta, ",")

  def _resolver(self, hosts):
    resolver = mock.MagicMock()
    resolver.cluster_spec.return_value = tf.train.ClusterSpec(
      {"worker": [f"host{i}:1" for i in range(hosts)]}
    )
    return resolver

  def _params(self, **kwargs):
    return {
      "batch_size_per_core": None,
      "global_batch_size": None,
      "model_dir": self.folder,
      **kwargs,
    }

  def test_update_params(self):
    params = self._params(global_batch_size=2048)
    util.update_params(params, self._resolver(2))
    self.assertEqual((params["shard_num"], params["batch_size_per_core"]), (2, 128))
    self.assertIsInstance(params["batch_size_per_core"], int)
    self.assertNotIn("shard_skip_file_number", params)
    params = self._params(batch_size_per_core=4)
    util.update_params(params, self._resolver(1))
    self.assertEqual(params["global_batch_size"], 32)

  def test_update_params_errors(self):
    with self.assertRaisesRegex(
      AssertionError, "^batch_size_per_core and global_batch_size can't be both None.$"
    ):
      util.update_params(self._params(), self._resolver(1))
    for sizes in ({"global_batch_size": 33}, {"global_batch_size": 32, "batch_size_per_core": 5}):
      with self.assertRaises(AssertionError):
        util.update_params(self._params(**sizes), self._resolver(1))

  def test_update_params_resumes(self):
    self._write("model.ckpt-1.meta")
    train, meta = self._training_files(["f2", "f3"])
    params = self._params(
      batch_size_per_core=2, train_dataset_path=train, gcs_file_example_number=meta
    )
    util.update_params(params, self._resolver(1))
    self.assertEqual(params["shard_skip_file_number"], [1])  # 16 examples done of 10 + 11


if __name__ == "__main__":
  unittest.main()
