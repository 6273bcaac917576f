"""Readers of a user's own files: `columns`, `string_hash`, `bad_rows`, `text_files`.

Covers `tfrecord_files` and `file_rows`, too.
"""

import gzip
import math
import os
import re
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from monolith import data

_COLUMNS = {
  "user": data.Ids(),
  "genres": data.Ids(separator="|"),
  "stars": data.Number(),
  "age": data.Buckets([18, 30]),
}
_CSV = 'user,genres,stars,age\nann,Drama|War,4.5,17\n"bob, jr",,-1e2,30\n\nann,"""War""",3,\n'


def _hash(*texts):
  return data.hash_strings(tf.constant(texts)).numpy().tolist()


class ReadersTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))

  def _write(self, text, name="a.csv"):
    path = os.path.join(self._folder, name)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(path, "wb") as f:
      f.write(text if isinstance(text, bytes) else text.encode())
    return path

  def test_hash_does_not_change(self):
    # FarmHash's Fingerprint64 modulo 2^63 - 1, written down because tables outlive versions.
    self.assertEqual(_hash("Ann", "\u00fc"), [7724264549523847549, 3883267778305733891])

  def test_hash_keeps_shapes_and_refuses_numbers(self):
    matrix = data.hash_strings([["a", "b"], ["b", "a"]]).numpy()
    self.assertEqual(matrix[0].tolist(), matrix[1].tolist()[::-1])
    ragged = data.hash_strings(tf.ragged.constant([["a"], [], ["a", "b"]]))
    self.assertEqual(ragged.to_list(), [_hash("a"), [], _hash("a", "b")])
    with self.assertRaisesRegex(TypeError, "values are int32, want strings"):
      data.hash_strings([1, 2])

  def test_csv_reads_ids_numbers_and_buckets(self):
    [features] = data.csv(self._write(_CSV), _COLUMNS, 10)

    self.assertEqual(features["user"].to_list(), [_hash("ann"), _hash("bob, jr"), _hash("ann")])
    self.assertEqual(features["genres"].to_list(), [_hash("Drama", "War"), [], _hash('"War"')])
    self.assertEqual(features["stars"].numpy().tolist(), [4.5, -100.0, 3.0])
    self.assertEqual(features["age"].to_list(), [[0], [2], []])
    self.assertEqual(features["user"].dtype, tf.int64)

  def test_csv_of_several_files_with_label_epochs_and_shards(self):
    self._write(_CSV, "1.csv")
    self._write(_CSV, "2.csv.gz")
    pattern = self._folder + "/*.csv*"

    batches = list(data.csv(pattern, _COLUMNS, 4, label="stars", epochs=2, shuffle=100, seed=1))
    halves = [list(data.csv(pattern, _COLUMNS, 100, shard=(i, 2))) for i in range(2)]

    self.assertNotIn("stars", batches[0][0])
    stars = sorted(np.concatenate([label for _, label in batches]).tolist())
    self.assertEqual(stars, sorted([4.5, -100.0, 3.0] * 4))
    stars = sorted(np.concatenate([half[0]["stars"] for half in halves]).tolist())
    self.assertEqual(stars, sorted([4.5, -100.0, 3.0] * 2))

  def test_files_longer_than_a_block_keep_order_and_line_numbers(self):
    # Two files, two epochs: batches go over the ends of blocks, files and epochs.
    rows = [list(range(1500)), list(range(1500, 2600))]
    for name, numbers in zip(("1.csv", "2.csv"), rows):
      self._write("n\n" + "".join(f"{n}\n" for n in numbers), name)
    dataset = data.csv(self._folder + "/*.csv", {"n": data.Number()}, 700, epochs=2)

    sizes = [len(batch["n"]) for batch in dataset]
    numbers = np.concatenate([batch["n"] for batch in dataset]).astype(int).tolist()
    self.assertEqual(numbers, (rows[0] + rows[1]) * 2)
    self.assertEqual(sizes, [700] * 7 + [300])

    path = self._write("n\n" + "1\n" * 1300 + "x\n", "bad.csv")
    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, f"{path}:1302: column `n` is `x`"):
      list(data.csv(path, {"n": data.Number()}, 64))

  def test_a_header_that_is_replaced_is_an_error(self):
    columns = {"a": data.Number(), "b": data.Number()}
    texts = ["a,b\n1,2\n", "\ufeffa,b\r\n3,4\r\n"]
    for options in ({}, {"shuffle": 2}, {"shard": (1, 2)}):
      for count in (1, 2):
        paths = [self._write(texts[i], f"{i}.csv") for i in range(count)]
        dataset = data.csv(paths, columns, 8, **options)
        expected = (
          {1: [1.0], 2: [1.0, 3.0]}[count] if "shard" not in options else {1: [], 2: [3.0]}[count]
        )
        self.assertEqual(sorted(x for f in dataset for x in f["a"].numpy()), expected)

        for other in ("b,a\n2,1\n", ""):
          self._write(other, f"{count - 1}.csv")
          told = f"{paths[-1]}:1: the header is `{other[:3]}`, but was `a,b` when"
          with self.assertRaisesRegex(tf.errors.InvalidArgumentError, told):
            list(dataset)

  def test_csv_without_header(self):
    path = self._write("7\tann\n-8\tbob\n")
    columns = {"id": data.Ids(hashed=False), "name": data.Text()}
    [features] = data.csv(path, columns, 10, field_names=["id", "name"], separator="\t")
    self.assertEqual(features["id"].to_list(), [[7], [-8]])
    self.assertEqual(features["name"].numpy().tolist(), [b"ann", b"bob"])

  def test_bad_row_is_named_by_file_and_line(self):
    cases = (
      ("ann,War,many,20", "column `stars` is `many`, want a number"),
      ("ann,War,,20", "column `stars` is ``, want a number"),
      ("ann,War,nan,20", "column `stars` is `nan`, want a number"),
      ("ann,War,1e99,20", "column `stars` is `1e99`, want a number"),
      ("ann,War,4,old", "column `age` is `old`, want a number or nothing"),
      ("ann,War,4", "is not UTF-8 text of 4 fields separated by commas: `ann,War,4`"),
      ("ann,War,4,20,5", "is not UTF-8 text of 4 fields separated by commas: `ann,War,4,20,5`"),
      ('ann,"War,4,20', 'is not UTF-8 text of 4 fields separated by commas: `ann,"War,4,20`'),
    )
    path = self._write(_CSV + "\n".join(line for line, _ in cases) + "\n")
    problems = [f"{path}:{6 + i}: {problem}" for i, (_, problem) in enumerate(cases)]

    bad_rows = data.BadRows()
    list(data.csv(path, _COLUMNS, 3, on_bad_row="skip", bad_rows=bad_rows))
    with self.assertRaises(tf.errors.InvalidArgumentError) as raised:
      list(data.csv(path, _COLUMNS, 3))

    self.assertCountEqual(bad_rows.first, problems)
    self.assertIn(problems[0], str(raised.exception))

  def test_bad_rows_are_skipped_and_counted(self):
    path = self._write(_CSV + "x\n" + b"\xff,War,4,20".decode("latin1") + "\nann,,x,\nann,,7,\n")
    bad_rows = data.BadRows(limit=2)

    batches = list(data.csv(path, _COLUMNS, 4, on_bad_row="skip", bad_rows=bad_rows))

    stars = np.concatenate([batch["stars"] for batch in batches]).tolist()
    self.assertEqual(stars, [4.5, -100.0, 3.0, 4.0, 7.0])
    self.assertEqual(sum(batch["user"].nrows().numpy() for batch in batches), 5)
    self.assertEqual(bad_rows.count, 2)
    self.assertStartsWith(bad_rows.first[0], f"{path}:6: is not UTF-8 text of 4 fields")
    self.assertEqual(bad_rows.first[1], f"{path}:8: column `stars` is `x`, want a number")

  def test_bytes_that_are_not_utf8_are_named(self):
    for bad in (b"\xff,War,4,20", b"ann,War,4\xff,20", b"ann," + b"x" * 79 + b"\xc3\xbc,4,old"):
      path = self._write(_CSV.encode() + bad + b"\n")
      with self.assertRaises(tf.errors.InvalidArgumentError) as raised:
        list(data.csv(path, _COLUMNS, 3))
      self.assertIn(f"{path}:6: ", str(raised.exception))

    path = self._write(b"us\xffer," + _CSV.encode())
    with self.assertRaisesRegex(ValueError, f"{path}:1: the header is not UTF-8 text"):
      data.csv(path, _COLUMNS, 3)

  def test_torn_gzip_is_named_with_its_line(self):
    rows = np.random.default_rng(1).integers(0, 1 << 60, 50_000)
    text = "n\n" + "".join(f"{row}\n" for row in rows)
    columns = {"n": data.Ids(hashed=False)}
    path = self._write(text, "half.csv.gz")
    os.truncate(path, os.path.getsize(path) // 2)
    for options in (dict(), dict(shuffle=10), dict(on_bad_row="skip")):
      dataset = data.csv(path, columns, 512, **options)
      read = []
      with self.assertRaises(tf.errors.DataLossError) as raised:
        for features in dataset:
          read += features["n"].values.numpy().tolist()
      told = re.search(rf"{path}:(\d+): truncated gzip member", str(raised.exception))
      self.assertIsNotNone(told, str(raised.exception))
      # Whole batches of the rows before.
      before = int(told[1]) - 2
      self.assertBetween(len(read), before - 512 - 10, before)
      if "shuffle" not in options:
        self.assertEqual(read, rows[: len(read)].tolist())

  def test_cuts_of_a_compressed_file_are_errors(self):
    whole = gzip.compress(b"n\n1\n2\n3\n", mtime=0)
    path = self._write("n\n", "cut.csv.gz")
    columns = {"n": data.Number()}
    dataset = data.csv(path, columns, 2)

    def put(content):
      with open(path, "wb") as f:
        f.write(content)

    for size in (0, 1, 9, 10, 11, 15, len(whole) - 8, len(whole) - 1):
      put(whole[:size])
      with self.assertRaisesRegex(tf.errors.DataLossError, rf"{path}:\d: truncated gzip member"):
        list(dataset)
    for broken, problem in (
      (whole[:-8] + bytes(4) + whole[-4:], "incorrect data check"),
      (whole + b"garbage", "incorrect header check"),
      (b"n\n1\n", "incorrect header check"),
    ):
      put(broken)
      with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}:.*{problem}"):
        list(dataset)
    # The header is read before the dataset is made.
    for broken in (whole[:11], b"n\n1\n", whole[:10] + b"\xff" + whole[11:]):
      put(broken)
      with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}:1: torn or corrupt gzip data"):
        data.csv(path, columns, 2)
    put(b"")
    with self.assertRaisesRegex(ValueError, f"{path} has no header"):
      data.csv(path, columns, 2)

  def test_a_plain_file_of_no_bytes_has_no_rows(self):
    path = self._write("")
    self.assertEmpty(list(data.csv(path, {"n": data.Number()}, 2, field_names=["n"])))
    self.assertEmpty(list(data.tfrecord(path, {"n": data.Number()}, 2)))

  def test_gzip_of_several_members(self):
    path = self._write(b"", "two.csv.gz")
    with open(path, "wb") as f:
      f.write(gzip.compress(b"n\n1\n2") + gzip.compress(b"") + gzip.compress(b"3\n4\n"))
    [features] = data.csv(path, {"n": data.Number()}, 9)
    self.assertEqual(features["n"].numpy().tolist(), [1, 23, 4])

  def test_carriage_returns_are_dropped(self):
    path = self._write("n,t\r\n1,a\rb\r\n2,c")
    [features] = data.csv(path, {"n": data.Number(), "t": data.Text()}, 9)
    self.assertEqual(features["t"].numpy().tolist(), [b"ab", b"c"])

  def test_a_byte_order_mark_is_no_text(self):
    columns = {"t": data.Text(), "n": data.Number()}
    first = self._write("\ufeff\ufeffa,1\n\ufeffb,2\n", "1.csv")
    paths = [first, self._write(chr(0xFEFF) + '"c",3', "2.csv")]
    for shuffle in (0, 1):
      [features] = data.csv(paths, columns, 9, field_names=["t", "n"], shuffle=shuffle)
      wanted = ["\ufeffa", "\ufeffb", "c"]
      self.assertEqual(features["t"].numpy().tolist(), [text.encode() for text in wanted])
    [features] = data.csv(self._write("\ufefft,n\nd,4\n"), columns, 9)
    self.assertEqual(features["t"].numpy().tolist(), [b"d"])

  def test_a_row_of_empty_fields_is_a_row(self):
    columns = {"n": data.Number(default=7), "m": data.Number(default=8)}
    for separator in "\t ,":
      path = self._write("n_m\n1_2\n_\n\n\f\n3_4\n".replace("_", separator))
      [features] = data.csv(path, columns, 9, separator=separator)
      self.assertEqual(features["n"].numpy().tolist(), [1, 7, 3])
      self.assertEqual(features["m"].numpy().tolist(), [2, 8, 4])

  def test_a_name_that_reads_as_a_pattern_is_a_file(self):
    path = self._write("n\n5\n", "day[1].csv")
    [features] = data.csv(path, {"n": data.Number()}, 9)
    self.assertEqual(features["n"].numpy().tolist(), [5])

  def test_whole_numbers_keep_every_digit(self):
    wanted = [(1 << 24) + 1, (1 << 53) + 1, -(1 << 63), (1 << 63) - 1, -1]
    column = data.Number(default=(1 << 53) + 1, dtype=tf.int64)
    path = self._write("n,m\n" + "".join(f"{n},x\n" for n in [*wanted, ""]))
    [features] = data.csv(path, {"n": column}, 9)
    self.assertEqual(features["n"].dtype, tf.int64)
    self.assertEqual(features["n"].numpy().tolist(), [*wanted, (1 << 53) + 1])

    records = self._write_records([dict(n=[n]) for n in wanted] + [dict(m=[1])])
    [features] = data.tfrecord(records, {"n": column}, 9)
    self.assertEqual(features["n"].numpy().tolist(), [*wanted, (1 << 53) + 1])

    bad = self._write("n\n" + "\n".join(["1.5", "9223372036854775808", "1e3", "x", "7"]) + "\n")
    bad_rows = data.BadRows()
    columns = {"n": data.Number(dtype="int64")}
    [features] = data.csv(bad, columns, 9, on_bad_row="skip", bad_rows=bad_rows)
    self.assertEqual(features["n"].numpy().tolist(), [7])
    self.assertEqual(
      bad_rows.first[0], f"{bad}:2: column `n` is `1.5`, want a whole number of 64 bits"
    )
    for default, dtype, problem in (
      (0.5, tf.int64, "default is 0.5, want a whole number"),
      (1 << 63, tf.int64, "want a whole number of 64 bits"),
      (float("nan"), tf.int64, "want a whole number of 64 bits"),
      (None, tf.int32, "dtype is int32, want float32 or int64"),
    ):
      with self.assertRaisesRegex(ValueError, problem):
        data.Number(default=default, dtype=dtype)

  def test_whole_numbers_that_float32_would_round_are_bad(self):
    kept = ["16777216", "-16777218", "1e20", "16777217.0", "0.123456789012", "20000000000"]
    rounded = ["16777217", " -1700000001 ", str((1 << 63) - 1), "1" * 30]
    path = self._write("at\n" + "\n".join(kept + rounded) + "\n")
    for default in (None, 0):
      bad_rows = data.BadRows()
      columns = {"at": data.Number(default)}

      [features] = data.csv(path, columns, 100, on_bad_row="skip", bad_rows=bad_rows)

      self.assertEqual(features["at"].numpy().tolist(), [np.float32(n) for n in kept])
      self.assertEqual(bad_rows.count, len(rounded))
      self.assertRegex(
        bad_rows.first[0],
        r"column `at` is `16777217`, want a number( or nothing)?; float32 rounds it, "
        r'dtype="int64" keeps every digit$',
      )

  def test_ids_beyond_int64_are_bad_rows(self):
    limits = ["9223372036854775807", "-9223372036854775808", "0009", "9222999999999999999"]
    beyond = ["9223372036854775808", "-9223372036854775809", "99999999999999999999", "1.5", "x"]
    path = self._write("id\n" + "\n".join(limits + beyond) + "\n")
    bad_rows = data.BadRows()
    columns = {"id": data.Ids(hashed=False)}

    [features] = data.csv(path, columns, 100, on_bad_row="skip", bad_rows=bad_rows)

    self.assertEqual(features["id"].to_list(), [[int(limit)] for limit in limits])
    self.assertEqual(bad_rows.count, len(beyond))
    self.assertIn("want an id of 64 bits in decimal digits", bad_rows.first[0])

  def test_iterator_over_files_goes_on_where_it_was(self):
    lines = "".join(f"{i}\n" for i in range(3000))
    self._write("n\n" + lines, "1.csv")
    self._write("n\n" + lines, "2.csv.gz")
    for options in (dict(), dict(shard=(0, 1))):
      dataset = data.csv(self._folder + "/[12].csv*", {"n": data.Number()}, 700, **options)
      iterator = iter(dataset)
      checkpoint = tf.train.Checkpoint(iterator=iterator)
      for _ in range(6):
        next(iterator)
      saved = checkpoint.save(self._folder + "/position")
      rest = [features["n"].numpy().tolist() for features in iterator]

      iterator = iter(dataset)
      tf.train.Checkpoint(iterator=iterator).restore(saved)

      self.assertEqual([features["n"].numpy().tolist() for features in iterator], rest)
      self.assertEqual(sum(map(len, rest)), 1800)

  def test_iterator_that_skips_is_saved_and_restored(self):
    path = self._write("id\n1\nx\n2\n3\n")
    columns = {"id": data.Ids(hashed=False)}
    iterator = iter(data.csv(path, columns, 1, on_bad_row="skip"))
    self.assertEqual(next(iterator)["id"].to_list(), [[1]])

    checkpoint = tf.train.Checkpoint(iterator=iterator)
    saved = checkpoint.save(self._folder + "/iterator")
    rest = [features["id"].to_list() for features in iterator]
    checkpoint.restore(saved)

    self.assertEqual([f["id"].to_list() for f in iterator], rest)
    self.assertEqual(rest, [[], [[2]], [[3]]])

  def test_wrong_arguments(self):
    path = self._write(_CSV)
    other = self._write("user,stars\n", "other.csv")
    for error, message, arguments in (
      (FileNotFoundError, "there is no file '/nowhere", dict(files="/nowhere/*.csv")),
      (ValueError, "files is empty", dict(files=[])),
      (ValueError, "columns is empty", dict(columns={})),
      (TypeError, "column 'user' is 8, want Ids", dict(columns={"user": 8})),
      (ValueError, "has no field 'usr', its fields are", dict(columns={"usr": data.Ids()})),
      (ValueError, "has the fields .* but .*a.csv has", dict(files=[path, other])),
      (ValueError, "label is 'x', want one of the columns", dict(label="x")),
      (ValueError, "batch_size is 0", dict(batch_size=0)),
      (ValueError, "batch_size is -4", dict(batch_size=-4)),
      (ValueError, "epochs is 0", dict(epochs=0)),
      (ValueError, "shuffle is -1", dict(shuffle=-1)),
      (ValueError, "separator is ',,', want one", dict(separator=",,")),
      (ValueError, "separator is '§', want one character of ASCII", dict(separator="§")),
      (ValueError, "field_names has 'user' more", dict(field_names=["user", "x", "user"])),
      (ValueError, "is a folder, want files: .*csv'", dict(files=self._folder)),
      (ValueError, r"shard is \(2, 2\)", dict(shard=(2, 2))),
      (ValueError, "on_bad_row is 'stop'", dict(on_bad_row="stop")),
      (ValueError, "give on_bad_row='skip'", dict(bad_rows=data.BadRows())),
      (ValueError, "has no header", dict(files=self._write("", "empty.csv"))),
      (ValueError, "names a field twice", dict(files=self._write("a,a\n", "twice.csv"))),
    ):
      with self.assertRaisesRegex(error, message):
        data.csv(**{"files": path, "columns": _COLUMNS, "batch_size": 2, **arguments})
    for boundaries in ([], [2, 1], [1, 1]):
      with self.assertRaisesRegex(ValueError, "boundaries are"):
        data.Buckets(boundaries)
    with self.assertRaisesRegex(ValueError, "separator is empty"):
      data.Ids(separator="")

  def test_log_buckets(self):
    ids = data.LogBuckets().ids_of(tf.constant([-2.0, 0.0, 1.0, 2.0, 100.0, 10_000.0]))
    self.assertEqual(ids.numpy().tolist(), [-2, 0, 1, 2, 21, 84])
    self.assertEqual(data.bucketize([[0.5, 1.0]], [1.0]).numpy().tolist(), [[0, 1]])

  def test_arguments_that_are_none(self):
    path = self._write(_CSV)
    with self.assertRaisesRegex(TypeError, "columns is a list, want a mapping"):
      data.csv(path, ["user"], 8)
    with self.assertRaisesRegex(ValueError, "shard is 3, want"):
      data.csv(path, _COLUMNS, 8, shard=3)
    for boundaries in ([math.nan], [1, math.nan, 3]):
      with self.assertRaisesRegex(ValueError, "want numbers that ascend"):
        data.Buckets(boundaries)
    # Read as one line, it would have no rows.
    with self.assertRaisesRegex(ValueError, "a.csv:1: a carriage return is inside of the header"):
      data.csv(self._write("a,b\r1,2\r"), {"a": data.Number()}, 8)

  def test_criteo(self):
    numbers = ["100"] + [""] * 11 + ["-1"]
    row = "\t".join(["1", *numbers, "68fd1e64", *[""] * 25])
    path = self._write(row + "\n", "day_0")

    [buckets] = data.criteo(path, 8)
    [(floats, label)] = data.criteo(path, 8, numbers="floats", label="label")

    self.assertEqual(buckets["I1"].to_list(), [[21]])
    self.assertEqual(buckets["I2"].to_list(), [[]])
    self.assertEqual(buckets["C1"].to_list(), [_hash("68fd1e64")])
    self.assertEqual(buckets["C26"].to_list(), [[]])
    self.assertEqual(buckets["label"].numpy().tolist(), [1.0])
    self.assertLen(buckets, 40)
    np.testing.assert_allclose(floats["numbers"], [[np.log(101)] + [0.0] * 12], rtol=1e-6)
    self.assertEqual(label.numpy().tolist(), [1.0])
    with self.assertRaisesRegex(ValueError, "numbers is 'logs'"):
      data.criteo(path, 8, numbers="logs")
    with self.assertRaisesRegex(
      tf.errors.InvalidArgumentError, "day_1:1: .* of 40 fields separated by tabs"
    ):
      list(data.criteo(self._write("1\t2\n", "day_1"), 8))

  def _write_records(self, records):
    path = os.path.join(self._folder, "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
      for record in records:
        writer.write(record if isinstance(record, bytes) else _example(**record))
    return path

  def test_tfrecord(self):
    path = self._write_records(
      [
        dict(user=[b"ann"], genres=[b"Drama", b"War"], stars=[4.5], age=[17.0], item=[7, 8]),
        dict(user=[b"bob"], stars=[3.0]),
      ]
    )
    columns = {**_COLUMNS, "item": data.Ids(hashed=False), "no": data.Text()}

    [(features, label)] = data.tfrecord(path, columns, 8, label="stars")

    self.assertEqual(features["user"].to_list(), [_hash("ann"), _hash("bob")])
    self.assertEqual(features["genres"].to_list(), [_hash("Drama", "War"), []])
    self.assertEqual(features["age"].to_list(), [[0], []])
    self.assertEqual(features["item"].to_list(), [[7, 8], []])
    self.assertEqual(features["no"].numpy().tolist(), [b"", b""])
    self.assertEqual(label.numpy().tolist(), [4.5, 3.0])

  def test_values_of_records_are_cut_as_fields_are(self):
    path = self._write_records([dict(genres=[b"Drama|War", b" War| "]), {}, dict(genres=[b"War"])])
    columns = {"genres": data.Ids(separator="|")}

    [features] = data.tfrecord(path, columns, 8)

    self.assertEqual(features["genres"].to_list(), [_hash("Drama", "War", "War"), [], _hash("War")])
    with self.assertRaisesRegex(ValueError, r"column 'item' has the separator '\|', want None"):
      data.tfrecord(path, {"item": data.Ids(separator="|", hashed=False)}, 8)

  def test_records_whose_number_is_in_no_bucket_are_bad(self):
    good = dict(user=[b"ann"], stars=[1.0], age=[20.0])
    for column in (data.Buckets([18, 30]), data.LogBuckets()):
      columns = {"user": data.Ids(), "stars": data.Number(), "age": column}
      for number in (math.nan, math.inf):
        path = self._write_records([good, dict(good, age=[1.0, number]), good])
        told = "a.tfrecord:2: feature `age` has NaN or infinity"
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, re.escape(told)):
          list(data.tfrecord(path, columns, 8))

        bad_rows = data.BadRows()
        [features] = data.tfrecord(path, columns, 8, on_bad_row="skip", bad_rows=bad_rows)

        self.assertEqual(features["user"].to_list(), [_hash("ann")] * 2)
        self.assertEqual(features["stars"].shape, [2])
        self.assertEqual(features["age"].nrows(), 2)
        self.assertEqual(
          bad_rows.first, [f"{path}:2: feature `age` has NaN or infinity, want numbers"]
        )

  def test_bad_records_are_named_or_skipped(self):
    good = dict(user=[b"ann"], stars=[1.0])
    for bad, told, skipped in (
      (b"\xff\xff", r"a.tfrecord:2", "is no serialized tf.train.Example"),
      (_example(**good)[:-1], r"a.tfrecord:2", "is no serialized tf.train.Example"),
      (dict(user=[b"x"]), r"a.tfrecord:2.*stars", "has no feature 'stars'"),
      (
        dict(user=[1], stars=[1.0]),
        r"a.tfrecord:2.*user",
        "feature 'user' is a int64_list, want a bytes_list",
      ),
      (dict(stars=[1.0, 2.0]), r"a.tfrecord:2.*stars", "feature 'stars' has 2 values, want one"),
    ):
      path = self._write_records([good, bad, good])
      columns = {"user": data.Ids(), "stars": data.Number()}
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, told):
        list(data.tfrecord(path, columns, 8))

      bad_rows = data.BadRows()
      [features] = data.tfrecord(path, columns, 8, on_bad_row="skip", bad_rows=bad_rows)

      self.assertEqual(features["stars"].numpy().tolist(), [1.0, 1.0])
      self.assertEqual(bad_rows.first, [f"{path}:2: {skipped}"])

  def test_torn_record_files_are_named(self):
    path = self._write_records([dict(stars=[float(i)]) for i in range(3)])
    with open(path, "rb") as f:
      whole = f.read()
    size = len(whole) // 3
    columns = {"stars": data.Number()}

    other = os.path.join(self._folder, "b.gz")
    datasets = [data.tfrecord(name, columns, 2) for name in (path, self._write("", "b.gz"))]

    def read(content, name=path):
      with open(name, "wb") as f:
        f.write(content)
      return [x for batch in datasets[name == other] for x in batch["stars"].numpy().tolist()]

    for cut in (0, 1, 7, 8, 11, 12, size - 1, size, size + 11, 2 * size, 3 * size - 1):
      number, rest = divmod(cut, size)
      if rest == 0:
        self.assertEqual(read(whole[:cut]), [0.0, 1.0, 2.0][:number])
        continue
      told = f"{path}:{number + 1}: the file ends inside of the record at offset {cut - rest}"
      with self.assertRaisesRegex(tf.errors.DataLossError, told):
        read(whole[:cut])
    flipped = bytearray(whole)
    flipped[size + 14] ^= 1
    with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}:2: the record at .* checksum"):
      read(bytes(flipped))
    compressed = gzip.compress(whole)
    self.assertEqual(read(compressed, other), [0.0, 1.0, 2.0])
    for cut in (0, 1, 11, 40, len(compressed) - 1):
      with self.assertRaisesRegex(tf.errors.DataLossError, rf"{other}:\d: truncated gzip member"):
        read(compressed[:cut], other)

  def test_graph_mode_reads_the_same(self):
    path = self._write(_CSV + "x\n")
    with tf.Graph().as_default():
      dataset = data.csv(path, _COLUMNS, 10, on_bad_row="skip")
      features = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
      with tf.compat.v1.Session() as session:
        self.assertEqual(session.run(features["stars"]).tolist(), [4.5, -100.0, 3.0])

  def test_the_parser_is_called_as_it_was_traced(self):
    path = self._write(_CSV)

    @tf.function
    def other():
      return tf.constant(1)

    with tf.Graph().as_default() as graph:
      data.csv(path, _COLUMNS, 10)
      other()
      nodes = [n for f in graph.as_graph_def().library.function for n in f.node_def]
      [of_other] = [op.node_def for op in graph.get_operations() if "Call" in op.type]
    [of_parser] = [node for node in nodes if "PartitionedCall" in node.op]

    for node, is_as_traced in ((of_parser, True), (of_other, False)):
      config = tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s)
      rewrites = config.graph_options.rewrite_options
      self.assertEqual(rewrites.disable_meta_optimizer, is_as_traced, node.op)


def _example(**features):
  made = {}
  for name, values in features.items():
    if isinstance(values[0], bytes):
      made[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    elif isinstance(values[0], int):
      made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    else:
      made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
  return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


if __name__ == "__main__":
  absltest.main()
