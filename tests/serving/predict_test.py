"""Files of examples are scored, with a SavedModel and against a server; warm-up files are made.

Also tests of `sample_files`, `scorer` and `servable`, and of the programs beside them:
`model_export/saved_model_visulizer.py`, `model_export/warmup_data_gen.py`,
`model_export/warmup_data_decoder.py` and `model_export/warmup_example_batch.py`.
"""

import contextlib
import glob
import io
import os
import shutil
import struct
import tempfile
import unittest

import numpy as np
import tensorflow as tf

from monolith.native_training import distributed_serving_ops
from monolith.native_training.model_export import (
  saved_model_visulizer,
  warmup_data_decoder,
  warmup_data_gen,
  warmup_example_batch,
)
from monolith.serving import predict
from monolith.serving.errors import ServingError
from monolith.serving.sample_files import RecordHeader, read_records, read_tfrecords
from tests.serving import saved_models, server_process
from tests.wait_until import wait_until

tf.compat.v1.disable_eager_execution()

_TEXTS = [b"a", b"", b"\xc3\xbc", b"d", b"e"]
# Flags of a header, and its bytes before the length of a record.
_HEADERS = {
  RecordHeader(): b"",
  RecordHeader(has_sort_id=True): struct.pack("<Q", 2) + b"ab",
  RecordHeader(has_sort_id=True, kafka_dump=True): struct.pack("<Q", 1) + b"a" + bytes(8),
  RecordHeader(has_sort_id=True, kafka_dump_prefix=True): bytes(16) + struct.pack("<Q", 0),
  RecordHeader(kafka_dump_prefix=True, has_sort_id=True, kafka_dump=True): (
    struct.pack("<Q", 3) + b"abc" + bytes(8)
  ),
  RecordHeader(lagrangex_header=True): b"\x00\xf3\x0d" + bytes(5),
}


class PredictTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.base = f"{cls.folder}/m"
    saved_models.write_scale_model(cls.base, 1, 1.0)
    cls.model = saved_models.write_scale_model(cls.base, 2, 2.0)
    cls.server = server_process.ServerProcess(f"--model_base_path={cls.base}")
    cls.addClassCleanup(cls.server.stop)
    cls.address = cls.server.address
    cls.server.wait_until_listening().wait_until_available("default", 2)

  def _write(self, name, content):
    path = f"{self.folder}/{name}"
    with open(path, "wb") as stream:
      stream.write(content)
    return path

  def _write_records(self, name, header):
    before = _HEADERS[header]
    return self._write(
      name, b"".join(before + struct.pack("<Q", len(text)) + text for text in _TEXTS)
    )

  def _run(self, *arguments):
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
      status = predict.main(arguments)
    return status, stdout.getvalue(), stderr.getvalue()

  def test_csv_with_a_saved_model_and_against_a_server(self):
    path = self._write("examples.csv", b"k,x\n1,0.5 1\n9007199254740993,2 2.5\n-3,0 0\n")
    wanted = "k2,y\n2,3.0\n18014398509481986,9.0\n-6,0.0\n"
    # The newest version of a folder of versions.
    for where in (
      [f"--saved_model={self.model}"],
      [f"--saved_model={self.base}"],
      [f"--server={self.address}"],
    ):
      for batch_size in (2, 512):
        status, output, told = self._run(*where, f"--input={path}", f"--batch_size={batch_size}")
        self.assertEqual((status, output), (0, wanted), told)
        self.assertIn("3 examples", told)

  def test_output_file(self):
    path = self._write("one.csv", b"x\n1 1\n")
    output = f"{self.folder}/scores.csv"
    arguments = [f"--saved_model={self.model}", f"--input={path}", "--signature_name=one"]
    self.assertEqual(self._run(*arguments, f"--output={output}")[0], 0)
    with open(output) as stream:
      self.assertEqual(stream.read(), "y\n4.0\n")

  def test_serialized_samples(self):
    wanted = "text\na a\na \na ü\na d\na e\n"
    arguments = [f"--saved_model={self.model}", "--signature_name=text", "--batch_size=2"]
    path = f"{self.folder}/tfrecord"
    with tf.io.TFRecordWriter(path) as writer:
      for text in _TEXTS:
        writer.write(text)
    self.assertEqual(self._run(*arguments, f"--input={path}", "--format=tfrecord")[1], wanted)
    for number, header in enumerate(_HEADERS):
      path = self._write_records(f"records{number}", header)
      flags = [f"--{name}" for name in header._fields if getattr(header, name)]
      for kind in ("instance", "example", "example_batch"):
        status, output, told = self._run(*arguments, f"--input={path}", f"--format={kind}", *flags)
        self.assertEqual((status, output), (0, wanted), (header, told))

  def test_bad_input_is_told_with_its_place(self):
    model = [f"--saved_model={self.model}"]
    for content, *words in (
      (b"k\n1\n", "missing", "'x'"),
      (b"k,x,z\n1,1 1,1\n", "surplus", "'z'"),
      (b"k,x\n1,1 1\n2\n", "line 3"),
      (b"k,x\n1,1 1\none,1 1\n", "'one'", "k"),
      (b"k,x\n1,1 1\n1,1\n", "[1, 2]", "x"),
      (b"k,x\n9223372036854775808,1 1\n", "int64", "k"),
      (b"k,x\n1.5,1 1\n", "1.5"),
      (b"k,x\n,1 1\n", "k"),
      (b"k,x\n1,1 1\n\xff,1 1\n", "line 3", "bad.csv"),
      (b"k,x\n" + b"1" * 200_000 + b",1 1\n", "line 2", "bad.csv"),
    ):
      path = self._write("bad.csv", content)
      status, _, told = self._run(*model, f"--input={path}")
      self.assertEqual(status, 1, content)
      for word in words:
        self.assertIn(word, told)
    self.assertIn("nothing_here", self._run(*model, "--input=/nothing_here")[2])
    self.assertIn("/nowhere", self._run("--saved_model=/nowhere", "--input=/x")[2])
    self.assertIn("nobody", self._run(
      f"--server={self.address}", "--model_name=nobody", "--input=/x")[2])  # fmt: skip
    path = self._write("text", b"abc")
    told = self._run(*model, f"--input={path}", "--format=instance")[2]
    self.assertIn("one input of strings", told)

  def test_torn_records(self):
    whole = open(self._write_records("whole", RecordHeader()), "rb").read()  # noqa: SIM115
    for size in range(1, len(whole)):
      path = self._write("torn", whole[:size])
      try:
        count = len(list(read_records(path, RecordHeader())))
      except ServingError as error:
        self.assertIn(path, str(error))
      else:
        self.assertLess(count, len(_TEXTS))  # cut between two records
    path = self._write("foreign", b"\xff" * 64)
    with self.assertRaisesRegex(ServingError, "length"):
      list(read_records(path, RecordHeader()))

  def test_torn_tfrecords(self):
    path = f"{self.folder}/whole.tfrecord"
    with tf.io.TFRecordWriter(path) as writer:
      for text in _TEXTS:
        writer.write(text)
    whole = open(path, "rb").read()  # noqa: SIM115
    ends = [0]
    for text in _TEXTS:
      ends.append(ends[-1] + 16 + len(text))
    for size in range(len(whole) + 1):
      path = self._write("torn", whole[:size])
      if size in ends:
        self.assertEqual(list(read_tfrecords(path)), list(_TEXTS[: ends.index(size)]))
        continue
      with self.assertRaisesRegex(tf.errors.DataLossError, path):
        list(read_tfrecords(path))
    path = self._write("flipped", whole[:-1] + bytes([whole[-1] ^ 1]))
    with self.assertRaisesRegex(tf.errors.DataLossError, f"{path}: record {len(_TEXTS) - 1}: "):
      list(read_tfrecords(path))

  def test_warm_up_from_samples(self):
    header = RecordHeader(has_sort_id=True)
    samples = self._write_records("samples", header)
    base = f"{self.folder}/warm"
    shutil.copytree(self.model, f"{base}/1")
    path = f"{base}/1/assets.extra/tf_serving_warmup_requests"
    with contextlib.redirect_stdout(io.StringIO()) as told:
      status = warmup_data_gen.main(
        [f"--input={samples}", f"--output={path}", "--batch_size=2", "--has_sort_id",
         "--signature_name=text,echo", "--input_name=s", "--model_name=m"]
      )  # fmt: skip
    self.assertEqual(status, 0)
    self.assertIn("4 requests", told.getvalue())

    self.assertEqual(
      list(warmup_data_decoder.decode(path)),
      ["m text: s string[2]", "m echo: s string[2]"] * 2,
    )
    shutil.copytree(f"{base}/1", f"{base}/2")
    torn = path.replace("/1/", "/2/")
    os.truncate(torn, os.path.getsize(torn) - 3)
    config = "model_version_policy { all {} }"
    with self._serve("warm", config) as started:
      started.wait_until_available("warm", 1)
      wait_until(lambda: torn in str(started.get("/v1/models/warm/versions/2")[1]))
      (state,) = started.get("/v1/models/warm/versions/2")[1]["model_version_status"]
      self.assertEqual(state["state"], "END")

  def _serve(self, name, config=""):
    """Returns a server of the models in a folder of the test's."""
    model = f'config {{ name: "{name}" base_path: "{self.folder}/{name}" {config} }}'
    path = self._write(f"{name}.config", f"model_config_list {{ {model} }}".encode())
    started = server_process.ServerProcess(f"--model_config_file={path}")
    self.addCleanup(started.stop)
    return started.wait_until_listening()

  def test_warm_up_with_a_request_per_batch(self):
    samples = self._write_records("batches", RecordHeader())
    path = f"{self.folder}/requests"
    with contextlib.redirect_stdout(io.StringIO()):
      status = warmup_example_batch.main(
        [f"--input={samples}", f"--output={path}", "--batch_size=3", "--max_records=4"]
      )
    self.assertEqual(status, 0)
    found = list(warmup_data_decoder.decode(path))
    self.assertEqual(found, ["entry serving_default: example_batch string[1]"] * 4)

  def test_warm_up_files_that_cannot_be_made(self):
    path = f"{self.folder}/requests"
    whole = open(self._write_records("whole", RecordHeader()), "rb").read()  # noqa: SIM115
    for content, flags, word in (
      (b"", ["--format=example_batch"], "fewer than 1 samples"),
      (whole, ["--batch_size=6"], "fewer than 6 samples"),
      (whole[:-1], ["--batch_size=1"], "whole"),
      (whole, ["--batch_size=0"], "--batch_size is 0, want at least 1"),
      (whole, ["--max_records=0"], "--max_records is 0"),
    ):
      samples = self._write("whole", content)
      with self.subTest(flags=flags), contextlib.redirect_stderr(io.StringIO()) as told:
        try:
          status = warmup_data_gen.main([f"--input={samples}", f"--output={path}", *flags])
        except SystemExit as error:
          status = error.code
        self.assertNotEqual(status, 0)
        self.assertIn(word, told.getvalue())
        self.assertEqual(glob.glob(f"{path}*"), [])

  def test_a_graph_for_tensorboard(self):
    folder = f"{self.folder}/events"
    self.assertEqual(saved_model_visulizer.main([self.model, folder]), 0)
    (path,) = (f"{folder}/{name}" for name in os.listdir(folder))
    graphs = [
      tf.compat.v1.GraphDef.FromString(event.graph_def)
      for event in tf.compat.v1.train.summary_iterator(path)
      if event.HasField("graph_def")
    ]
    self.assertIn("weight", {node.name for node in graphs[0].node})
    for model, tag, word in ((self.base, "serve", self.base), (self.model, "train", "'train'")):
      with contextlib.redirect_stderr(io.StringIO()) as told:
        self.assertEqual(saved_model_visulizer.main([model, folder, f"--tag={tag}"]), 1)
      self.assertIn(word, told.getvalue())

  def test_a_model_whose_servers_are_not_there_is_loaded_cold(self):
    folder = f"{self.folder}/calls/1"
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
      (y,) = distributed_serving_ops.remote_predict(
        ["x"], [x], ["y"], "m:ps_0", 0, "ps_0", output_types=[tf.float32]
      )
      tf.compat.v1.saved_model.simple_save(session, folder, {"x": x}, {"y": y})
    request = saved_models.make_request("calls", x=np.ones(1, np.float32))
    saved_models.write_warmup(folder, request)

    with self._serve("calls") as started:
      started.wait_until_available("calls")
      self.assertIn("is not warm", started.log())


class ArgumentsTest(unittest.TestCase):
  def test_either_a_model_or_a_server(self):
    for arguments in (["--input=x"], ["--input=x", "--saved_model=a", "--server=b"]):
      with contextlib.redirect_stderr(io.StringIO()) as told, self.assertRaises(SystemExit):
        predict.main(arguments)
      self.assertIn("either --saved_model or --server", told.getvalue())

  def test_cells(self):
    self.assertEqual(predict._to_cell(np.array([1.5, 2.0], np.float32)), "1.5 2.0")
    self.assertEqual(predict._to_cell(b"\xff"), "\\xff")


if __name__ == "__main__":
  unittest.main()
