"""Promise: importing the package and TensorFlow through it leaves the screen empty."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import unittest

import pytest

from monolith import _quiet
from monolith.serving import model_server
from tests import free_ports

pytestmark = pytest.mark.thorough

_NOISE = b"E cuda_dnn.cc:9261] Unable to register cuDNN factory: it is there\n"


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
  """Returns what a program printed, without the settings of this process."""
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name not in ("MONOLITH_VERBOSE", "TF_CPP_MIN_LOG_LEVEL")
  }
  return subprocess.run(
    [sys.executable, "-c", program],
    env={**inherited, **environment},
    capture_output=True,
    text=True,
    check=True,
  )


class ImportTest(unittest.TestCase):
  def test_says_nothing(self):
    done = run("import monolith.gpu_runner, monolith.keras; monolith.HashTable; print('done')")

    self.assertEqual((done.stdout, done.stderr), ("done\n", ""))

  @unittest.skipUnless(platform.machine() == "x86_64", "TensorFlow says nothing elsewhere")
  def test_shows_everything_to_who_asks(self):
    for environment in ({"MONOLITH_VERBOSE": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}):
      with self.subTest(environment):
        said = run("import monolith, tensorflow", **environment).stderr
        self.assertRegex(said, "Unable to register cuDNN factory|cudart_stub.cc")

  def test_a_machine_without_a_driver_of_cuda_is_no_error(self):
    done = run("import monolith, tensorflow as tf; monolith.HashTable; print(int(tf.constant(1)))")

    self.assertEqual(done.stdout, "1\n")
    self.assertNotIn("cuInit", done.stderr)

  def test_loads_no_tensorflow(self):
    done = run("import sys, monolith; print('tensorflow' in sys.modules)")

    self.assertEqual((done.stdout, done.stderr), ("False\n", ""))


class RunTest(unittest.TestCase):
  def test_a_run_of_an_example_says_what_matters(self):
    """Trains twice, evaluates and exports, with messages of level INFO on the screen."""
    examples = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")
    with tempfile.TemporaryDirectory() as folder:
      done = run(f"""
import sys
sys.path.insert(0, {os.path.join(examples, "serving")!r})
import clicks
from absl import app, logging
import tensorflow as tf

def main(argv):
  assert logging.get_verbosity() >= logging.INFO
  estimator = clicks.make_estimator({folder!r})
  estimator.train(steps=3)
  estimator.train(steps=3)
  estimator.evaluate(steps=2)
  estimator.export_saved_model()

tf.compat.v1.disable_eager_execution()
app.run(main)
""")

    self.assertIn("step 6", done.stderr)
    for noise in (
      "CheckpointRestorerHook",
      "Cannot identify data type",
      "encountered when serializing",
      "parsers of samples",
      "factory",
      "was interrupted",
      "cancelled",
      "rendezvous",
      "deprecated",
    ):
      self.assertNotIn(noise, done.stderr)


_CLUSTER_PROGRAM = """
import sys
import monolith.keras
import keras
import tensorflow as tf

ids = keras.Input([1], dtype="int64", name="ids")
vectors = monolith.keras.layers.Embedding(4, name="items")(ids)
units = keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(vectors))
model = keras.Model(ids, units)
model.compile("adam", "binary_crossentropy")

def read(*unused):
  numbers = tf.reshape(tf.range(6000, dtype=tf.int64) % 100, [-1, 1])
  return tf.data.Dataset.from_tensor_slices((numbers, numbers % 2)).batch(30)

print("saved", monolith.keras.train(model, read, sys.argv[1]))
"""


class ClusterTest(unittest.TestCase):
  def test_a_good_run_says_nothing_of_its_end(self):
    jobs = ("ps", "chief", "worker")
    cluster = {job: [f"localhost:{free_ports.get_free_port()}"] for job in jobs}
    with tempfile.TemporaryDirectory() as folder:
      processes = {job: self._start(job, cluster, f"{folder}/model") for job in jobs}
      # The chief first: if it fails, nobody tells the others to stop.
      done = {job: processes[job].communicate(timeout=600) for job in ("chief", "worker", "ps")}

    for job, (said, errors) in done.items():
      with self.subTest(job):
        self.assertEqual(processes[job].returncode, 0, errors)
        self.assertIn("saved", said)
        self.assertNotRegex(errors, "(?i)cancelled|rendezvous|RecvTensor|Traceback|interrupted")

  def _start(
    self, job: str, cluster: dict[str, list[str]], model_dir: str
  ) -> "subprocess.Popen[str]":
    inherited = {
      name: value
      for name, value in os.environ.items()
      if name not in ("MONOLITH_VERBOSE", "TF_CPP_MIN_LOG_LEVEL")
    }
    task = {"cluster": cluster, "task": {"type": job, "index": 0}}
    process = subprocess.Popen(
      [sys.executable, "-c", _CLUSTER_PROGRAM, model_dir],
      env={**inherited, "TF_CONFIG": json.dumps(task)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(self._end, process)
    return process

  def _end(self, process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
      process.kill()
      process.communicate()


class ServerTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    try:
      self.program = model_server.find_binary()
    except FileNotFoundError as error:
      self.skipTest(str(error))

  def run_server(self, **environment: str) -> subprocess.CompletedProcess:
    """Returns what the server in C++ said that was asked for its version."""
    return run(
      f"import os; os.execv({self.program!r}, [{self.program!r}, '--version'])", **environment
    )

  def test_the_server_in_cpp_says_nothing_of_gpu_libraries(self):
    done = self.run_server()

    self.assertIn("monolith_model_server", done.stdout)
    self.assertEqual(done.stderr, "")

  @unittest.skipUnless(platform.machine() == "x86_64", "TensorFlow says nothing elsewhere")
  def test_the_server_in_cpp_shows_everything_to_who_asks(self):
    for environment in ({"MONOLITH_VERBOSE": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "0"}):
      with self.subTest(environment):
        said = self.run_server(**environment).stderr
        self.assertRegex(said, "Unable to register cuDNN factory|oneDNN custom|cudart_stub.cc")

  def test_the_server_in_cpp_starts_without_stderr(self):
    shell = f"exec {self.program} --version 2>&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)

    self.assertIn("monolith_model_server", done.stdout)


@unittest.skipUnless(platform.machine() == "x86_64", "nothing is left out elsewhere")
class StderrTest(unittest.TestCase):
  @contextlib.contextmanager
  def stderr(self, lines: list[bytes]):
    """Gives the process another stderr for a while, and appends what came there."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
      os.dup2(file.fileno(), 2)
      try:
        yield
      finally:
        os.dup2(before, 2)
        os.close(before)
        file.seek(0)
        lines += file.readlines()

  def test_other_lines_are_kept(self):
    lines: list[bytes] = []
    with self.stderr(lines), _quiet.import_of_tensorflow():
      os.write(2, b"W first\n" + _NOISE + b"E last, without an end")

    self.assertEqual(lines, [b"W first\n", b"E last, without an end"])

  def test_a_failed_import_shows_what_it_said(self):
    lines: list[bytes] = []
    with (
      self.stderr(lines),
      self.assertRaisesRegex(ImportError, "libcuda"),
      _quiet.import_of_tensorflow(),
    ):
      os.write(2, _NOISE + b"E no libcuda\n")
      raise ImportError("libcuda")

    self.assertEqual(lines, [b"E no libcuda\n"])

  def test_a_closed_stderr_is_no_error(self):
    program = "import os; os.close(2); import monolith, tensorflow as tf; print(tf.int8.size)"

    self.assertEqual(run(program).stdout, "1\n")


if __name__ == "__main__":
  unittest.main()
