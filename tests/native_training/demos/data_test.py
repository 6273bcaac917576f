"""Datasets of the demo: generated ones, and those made of MovieLens files."""

import os

import numpy as np
from absl.testing import absltest

from monolith.native_training import utils
from monolith.native_training.demos import data


class DataTest(absltest.TestCase):
  def test_auc(self):
    self.assertEqual(data.compute_auc([0, 0, 1, 1], [0.1, 0.2, 0.3, 0.4]), 1.0)
    self.assertEqual(data.compute_auc([1, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]), 0.0)
    self.assertEqual(data.compute_auc([0, 1, 0, 1], [0.5] * 4), 0.5)
    self.assertEqual(data.compute_auc([0, 1, 1], [0.5, 0.5, 0.6]), 0.75)
    self.assertTrue(np.isnan(data.compute_auc([1, 1], [0.1, 0.2])))

  def test_generated_data_is_reused(self):
    folder = os.path.join(utils.get_test_tmp_dir(), "data")
    first = data.generate(folder, 1000, 10, 10)
    modified = os.path.getmtime(first.train_file)

    self.assertEqual(data.generate(folder, 1000, 10, 10), first)
    self.assertEqual(os.path.getmtime(first.train_file), modified)
    self.assertEqual(data.load(folder), first)
    self.assertEqual((first.num_train, first.num_eval), (900, 100))
    self.assertLen(data.read_labels(first), 100)
    self.assertEqual(data.generate(folder, 2000, 10, 10).num_train, 1800)

  def test_planted_structure_shows_in_the_labels(self):
    info = data.generate(os.path.join(utils.get_test_tmp_dir(), "planted"), 20000, 50, 30)
    records = np.fromfile(info.train_file, "<i8").reshape(-1, data.NUM_FIELDS)

    self.assertLen(records, info.num_train)
    self.assertEqual(os.path.getsize(info.train_file), info.num_train * data.RECORD_BYTES)
    self.assertGreater(info.best_auc, 0.7)
    # A movie's genres and a user's occupation never change.
    for owner, first, last in ((1, 3, 6), (0, 2, 3)):
      for number in np.unique(records[:, owner]):
        own = records[records[:, owner] == number, first:last]
        self.assertLen(np.unique(own, axis=0), 1)
    # Movies differ in how often they are liked by more than chance.
    liked = [records[records[:, 1] == movie, -1].mean() for movie in range(30)]
    self.assertGreater(np.std(liked), 0.1)

  def test_formats(self):
    folder = utils.get_test_tmp_dir()
    for name, text in (
      ("ratings.csv", "userId,movieId,rating,timestamp\n1,2,4.5,0\n3,4,3.0,0\n"),
      ("ratings.dat", "1::2::5::0\n3::4::1::0\n"),
      ("u.data", "1\t2\t5\t0\n3\t4\t1\t0\n\n"),
    ):
      path = os.path.join(folder, name)
      with open(path, "w") as f:
        f.write(text)
      info = data.read_movielens(path, os.path.join(folder, name + "_data"))
      # However few there are, one is for evaluation.
      self.assertEqual((info.num_train, info.num_eval), (1, 1))
      records = [np.fromfile(file, "<i8") for file in (info.train_file, info.eval_file)]
      self.assertCountEqual(
        [record[[0, 1, 6]].tolist() for record in records], [[1, 2, 1], [3, 4, 0]], msg=name
      )
      self.assertIsNone(info.best_auc)

  def test_too_few_ratings(self):
    path = os.path.join(utils.get_test_tmp_dir(), "ratings.csv")
    for count in (0, 1):
      with open(path, "w") as f:
        f.write("userId,movieId,rating,timestamp\n" + "1,2,4,0\n" * count)
      with self.assertRaisesRegex(ValueError, f"ratings.csv has {count} ratings, want one to"):
        data.read_movielens(path, os.path.join(utils.get_test_tmp_dir(), "d"))

  def test_bad_file(self):
    path = os.path.join(utils.get_test_tmp_dir(), "bad.csv")
    with open(path, "w") as f:
      f.write("1,2,4\n1,two,4\n")
    with self.assertRaisesRegex(ValueError, "line 2 of .*bad.csv"):
      data.read_movielens(path, os.path.join(utils.get_test_tmp_dir(), "d"))


if __name__ == "__main__":
  absltest.main()
