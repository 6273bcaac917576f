"""Tests of lists of input files."""

import datetime
import os

import tensorflow as tf

from monolith.native_training.data import file_patterns


class FilePatternsTest(tf.test.TestCase):
  def test_expand_pattern(self):
    self.assertEqual(
      file_patterns.expand_pattern("a_{DATE(20201130,20201201)}/{INT(8, 9)}x"),
      ["a_20201130/8x", "a_20201130/9x", "a_20201201/8x", "a_20201201/9x"],
    )
    self.assertEqual(
      file_patterns.expand_pattern("{DATE(2020113023,2020120100)}"), ["2020113023", "2020120100"]
    )
    self.assertEqual(file_patterns.expand_pattern("a/*.gz"), ["a/*.gz"])

  def test_a_reversed_range_has_no_file(self):
    self.assertEqual(file_patterns.expand_pattern("{INT(3,2)}"), [])

  def test_ends_of_dates_must_be_alike(self):
    for pattern in ("{DATE(20201130,2020113001)}", "{DATE(2020,2021)}"):
      with self.assertRaisesRegex(ValueError, "want YYYYMMDD or YYYYMMDDHH, both alike"):
        file_patterns.expand_pattern(pattern)

  def test_days_and_hours(self):
    days = file_patterns.gen_patterns("/abc", "20220227", end_date="20220302", wildcard="part*")
    self.assertEqual(days, [f"/abc/{day}/part*" for day in ("20220227", "20220228", "20220301")])
    hours = file_patterns.gen_patterns(
      "/abc", "20220901", 23, end_date="20220902", end_hour=1, is_hourly=True
    )
    self.assertEqual(hours, ["/abc/20220901/23*", "/abc/20220902/00*"])

  def test_days_end_with_yesterday(self):
    today = datetime.date.today()
    first = today - datetime.timedelta(days=2)

    patterns = file_patterns.gen_patterns("/abc", first.strftime("%Y%m%d"))

    # Midnight may have come between the two looks at the clock.
    self.assertBetween(len(patterns), 2, 3)
    self.assertEqual(patterns[0], f"/abc/{first:%Y%m%d}/*")

  def test_nothing_without_path_or_first_day(self):
    self.assertEqual(file_patterns.gen_patterns(None, "20220901"), [])
    self.assertEqual(file_patterns.gen_patterns("/abc", None), [])

  def test_only_patterns_with_files_are_kept(self):
    folder = self.create_tempdir()
    folder.create_file("part_1")
    base = os.path.join(folder.full_path, "part_")

    self.assertEqual(file_patterns.match_patterns(base + "{INT(0,2)}"), [base + "1"])
    with self.assertRaisesRegex(AssertionError, "no match files"):
      file_patterns.match_patterns(base + "{INT(2,3)}")


if __name__ == "__main__":
  tf.test.main()
