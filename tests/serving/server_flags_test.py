"""Flags that change how a server works: batching, a polled configuration file, retries, its end.

Covers `remote_servers` and `errors`, too.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.apis import model_management_pb2

import monolith
from monolith.serving import errors, remote_servers
from tests import free_ports
from tests.serving import saved_models, server_process
from tests.wait_until import wait_until

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_BATCHING = """
max_batch_size { value: 8 }
batch_timeout_micros { value: 20000 }
num_batch_threads { value: 2 }
max_enqueued_batches { value: 1000 }
allowed_batch_sizes: [4, 8]
"""
_CONFIG = "model_config_list {{ {} }}"
_PAIRS = np.array([[1, 2], [3, 4]], np.float32)
_MODEL = 'config {{ name: "{0}" base_path: "{1}/{0}" model_platform: "tensorflow" }}'


class ServerFlagsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    for name, scale in (("first", 1.0), ("second", 2.0)):
      saved_models.write_scale_model(f"{cls.folder}/{name}", 1, scale)
    cls._write_config("first")
    cls._write("batching", _BATCHING)
    cls.server = server_process.ServerProcess(
      f"--model_config_file={cls.folder}/config",
      "--model_config_file_poll_wait_seconds=1",
      "--enable_batching=true",
      f"--batching_parameters_file={cls.folder}/batching",
      "--tensorflow_intra_op_parallelism=1",
      "--tensorflow_inter_op_parallelism=2",
      "--grpc_channel_arguments=grpc.max_receive_message_length=1000000",
      "--enable_model_warmup=false",
    )
    cls.addClassCleanup(cls._stop)
    cls.server.wait_until_listening().wait_until_available("first")

  @classmethod
  def _stop(cls):
    """Ends the server with a signal, which must end it well."""
    status = cls.server.stop()
    assert status == 0, f"exit status {status}"

  @classmethod
  def _write(cls, name, text):
    path = os.path.join(cls.folder, name)
    with open(path + ".tmp", "w") as stream:
      stream.write(text)
    os.rename(path + ".tmp", path)
    return path

  @classmethod
  def _write_config(cls, *names):
    cls._write("config", _CONFIG.format(" ".join(_MODEL.format(n, cls.folder) for n in names)))

  def test_joined_requests_get_their_own_answers(self):
    answers, failures = {}, []

    def ask(number):
      x = np.full([1 + number % 3, 2], number, np.float32)
      try:
        if number % 10 == 9:
          request = saved_models.make_request("first", "boom", k=np.array([number]))
          with self.assertRaises(grpc.RpcError) as caught:
            self.server.prediction.Predict(request, timeout=60)
          self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
          return
        request = saved_models.make_request("first", "one", x=x)
        response = self.server.prediction.Predict(request, timeout=60)
        answers[number] = tf.make_ndarray(response.outputs["y"]).tolist()
      except (grpc.RpcError, AssertionError) as error:
        failures.append(error)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(60)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertEqual(failures, [])
    wanted = {n: [2.0 * n] * (1 + n % 3) for n in range(60) if n % 10 != 9}
    self.assertEqual(answers, wanted)

  def test_a_request_beyond_the_batch_size_is_answered(self):
    request = saved_models.make_request("first", "one", x=np.ones([20, 2], np.float32))
    response = self.server.prediction.Predict(request, timeout=60)
    self.assertEqual(list(response.outputs["y"].float_val), [2.0] * 20)

  def test_an_answer_over_http_that_takes_too_long(self):
    body = {"signature_name": "slow", "inputs": 1 << 40}
    with server_process.ServerProcess(
      "--model_name=first",
      f"--model_base_path={self.folder}/first",
      "--rest_api_timeout_in_ms=1000",
    ) as server:
      server.wait_until_listening().wait_until_available("first")
      status, answer = server.post("/v1/models/first:predict", body)
      server.kill()  # It would count for days.
    self.assertEqual((status, list(answer)), (504, ["error"]))

  def test_channel_arguments(self):
    call = self.server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    with self.assertRaises(grpc.RpcError) as caught:
      call(bytes(2_000_000), timeout=60)
    self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)

  def test_the_configuration_file_is_followed(self):
    self._write_config("first", "second")
    self.server.wait_until_available("second")
    self._write_config("second")
    request = saved_models.make_request("first", "one", x=np.ones([1, 2], np.float32))

    def is_gone():
      try:
        self.server.prediction.Predict(request, timeout=60)
      except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.NOT_FOUND
      return False

    wait_until(is_gone)
    # A file that cannot be read changes nothing.
    self._write("config", "model_config_list { config { name: ")
    wait_until(lambda: f"{self.folder}/config" in self.server.log())
    self.server.wait_until_available("second")
    self._write_config("first")
    self.server.wait_until_available("first")


class LoadRetriesTest(unittest.TestCase):
  """A server that looks into folders once, and tries again what it could not load."""

  @classmethod
  def setUpClass(cls):
    cls.folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    part = saved_models.write_sum_model(f"{cls.folder}/ps_0/1")
    entry = saved_models.write_entry_model(f"{cls.folder}/entry/1")
    saved_models.write_warmup(entry, saved_models.make_request("entry", x=_PAIRS))
    saved_models.write_scale_model(f"{cls.folder}/back", 1, 3.0)
    cls.torn, cls.whole = f"{part}/saved_model.pb", f"{cls.folder}/whole"
    shutil.copyfile(cls.torn, cls.whole)
    os.truncate(cls.torn, os.path.getsize(cls.torn) // 2)
    # It has the part that its entry asks.
    port = free_ports.get_free_port()
    cls.server = cls._start(
      ["entry", "ps_0"],
      "--max_num_load_retries=100000",
      "--load_retry_interval_micros=200000",
      f"--ps_address=ps_0=127.0.0.1:{port}",
      "--fetch_ps_timeout_ms=60000",
      port=port,
    )
    os.makedirs(f"{cls.folder}/lost/1")
    cls.hasty = cls._start(
      ["lost", "back"], "--max_num_load_retries=2", "--load_retry_interval_micros=-1"
    )

  @classmethod
  def _start(cls, names, *flags, port=None):
    config = os.path.join(cls.folder, "-".join(names) + ".config")
    with open(config, "w") as stream:
      stream.write(cls._config(names))
    server = server_process.ServerProcess(
      f"--model_config_file={config}", "--file_system_poll_wait_seconds=0", *flags, port=port
    )
    cls.addClassCleanup(server.stop)
    return server.wait_until_listening()

  @classmethod
  def _config(cls, names):
    return _CONFIG.format(" ".join(_MODEL.format(name, cls.folder) for name in names))

  def _reload(self, server, *names):
    """Changes the configuration; whether all of its models load is not what is tested."""
    request = model_management_pb2.ReloadConfigRequest()
    text_format.Parse(self._config(names), request.config)
    with contextlib.suppress(grpc.RpcError):
      server.models.HandleReloadConfigRequest(request, timeout=60)

  def _count_failures(self, server, name):
    server.check_alive()
    told = rf"Cannot load version 1 of model {name}|Loading \{{name: {name} version: 1\}} failed"
    return len(re.findall(told, server.log()))

  def test_a_torn_part_is_mended_after_its_entry_was_refused(self):
    for name in ("entry", "ps_0"):
      wait_until(lambda name=name: self._count_failures(self.server, name))
    saved_models.write_sum_model(f"{self.folder}/ps_0/2")

    os.replace(self.whole, self.torn)

    for name in ("ps_0", "entry"):
      self.server.wait_until_available(name)
    request = saved_models.make_request("entry", x=_PAIRS)
    response = self.server.prediction.Predict(request, timeout=60)
    self.assertEqual(tf.make_ndarray(response.outputs["y"]).tolist(), [6.0, 14.0])
    # To try again is not to look for new versions.
    states = self.server.get("/v1/models/ps_0")[1]["model_version_status"]
    self.assertEqual([state["version"] for state in states], ["1"])

  def test_a_model_that_is_wanted_again_while_it_is_unloaded(self):
    request = saved_models.make_request("back", "slow", loops=np.int64(100_000))

    def is_answered_while_it_is_unloaded():
      self.hasty.wait_until_available("back")
      asked = self.hasty.prediction.Predict.future(request, timeout=60)
      self._reload(self.hasty, "lost")
      self._reload(self.hasty, "lost", "back")
      if asked.code() == grpc.StatusCode.NOT_FOUND:  # The request came after the model had gone.
        return False
      self.assertEqual(asked.result().outputs["loops"].int64_val[0], 100_000)
      return True

    wait_until(is_answered_while_it_is_unloaded)

    self.hasty.wait_until_available("back")

  def test_a_version_is_given_up_after_the_last_try(self):
    wait_until(lambda: self._count_failures(self.hasty, "lost") >= 3)
    self._reload(self.hasty, "lost")
    self._reload(self.hasty, "lost", "back")
    self.hasty.wait_until_available("back")

    self.assertEqual(self._count_failures(self.hasty, "lost"), 3)


class LabelsTest(unittest.TestCase):
  def test_a_label_of_the_first_configuration_is_set_though_nobody_looks_for_new_versions(self):
    with tempfile.TemporaryDirectory() as folder:
      saved_models.write_scale_model(f"{folder}/m", 7, 7.0)
      config = os.path.join(folder, "config")
      with open(config, "w") as stream:
        labels = 'version_labels { key: "stable" value: 7 }'
        stream.write(_CONFIG.format(_MODEL.format("m", folder).replace(" }", f" {labels} }}")))
      with server_process.ServerProcess(
        f"--model_config_file={config}", "--file_system_poll_wait_seconds=0"
      ) as server:
        server.wait_until_listening().wait_until_available("m")
        body = {"signature_name": "one", "instances": [[1, 1]]}
        answer = server.post("/v1/models/m/labels/stable:predict", body)
    self.assertEqual(answer, (200, {"predictions": [14.0]}))


class FlagsTest(unittest.TestCase):
  """Flags and files that a server does not start with."""

  def test_flags_are_understood(self):
    for flags in (
      ["--model_base_path=/m", "--enable_batching", "--enable_model_warmup=false"],
      ["--model_base_path", "/m", "--allow_growth", "false", "--rest_api_port", "0"],
      ["--model_base_path=/m", "--ps_address=ps_0=a:1|b:2, clicks:ps_1=[::1]:3"],
    ):
      self.assertEqual(server_process.refusal_of(flags), "", flags)

  def test_what_cannot_be_is_refused(self):
    model = "--model_base_path=/m"
    for word, *flags in (
      ("--model_base_path",),
      ("either", model, "--model_config_file=/c"),
      ("no_such", model, "--no_such=1"),
      ("--native", model, "--native"),
      ("70000", model, "--port=70000"),
      ("both 0", model, "--port=0"),
      ("maybe", model, "--allow_growth=maybe"),
      ("--enable_batching", model, "--batching_parameters_file=/b"),
      ("--row_log_servers", model, "--row_log_interval_secs=1"),
      ("'kafka'", model, "--row_log_servers=a:1,kafka"),
      ("nan", model, "--row_log_interval_secs=nan"),
      ("grpc.keepalive", model, "--grpc_channel_arguments=grpc.keepalive=1"),
      ("instead of", model, "--tensorflow_session_parallelism=1",
       "--tensorflow_intra_op_parallelism=1"),
      ("from 0 to 1", model, "--per_process_gpu_memory_fraction=2"),
    ):  # fmt: skip
      with self.subTest(word):
        self.assertIn(word, server_process.refusal_of(flags))

  def test_addresses(self):
    self.assertEqual(
      remote_servers.parse_addresses("ps_0=a:1|b:2, clicks:ps_1=[::1]:3"),
      {"ps_0": ["a:1", "b:2"], "clicks:ps_1": ["[::1]:3"]},
    )
    for text in ("ps_0", "ps_0=", "=a:1", "ps_0=a", "ps_0=a:0", "ps_0=a:1,ps_0=b:1", "ps_0=a:1|"):
      with self.subTest(text):
        with self.assertRaisesRegex(errors.ServingError, "ps_address"):
          remote_servers.parse_addresses(text)
        status, told = server_process.run("--model_base_path=/m", f"--ps_address={text}")
        self.assertEqual(status, 1)
        self.assertIn("ps_address", told)

  def test_files_that_say_what_cannot_be(self):
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, "file")
      batching = ["--model_base_path=/m", "--enable_batching", f"--batching_parameters_file={path}"]
      for text in (
        "max_batch_size { value: 0 }",
        "allowed_batch_sizes: [2, 4] max_batch_size { value: 8 }",
        "batch_timeout_micros { value: -1 }",
        "colour: 3",
      ):
        with open(path, "w") as stream:
          stream.write(text)
        with self.subTest(text):
          status, told = server_process.run(*batching)
          self.assertEqual(status, 1)
          self.assertIn(path, told)
      for flag in ("model_config_file", "batching_parameters_file", "ssl_config_file"):
        flags = ["--enable_batching"] if flag.startswith("batching") else []
        flags += ["--model_base_path=/m"] if not flag.startswith("model") else []
        status, told = server_process.run(*flags, f"--{flag}={folder}/nothing_here")
        self.assertEqual(status, 1)
        self.assertIn("nothing_here", told)

  def test_full_queues_refuse(self):
    with tempfile.TemporaryDirectory() as folder:
      saved_models.write_scale_model(f"{folder}/m", 1, 1.0)
      with open(f"{folder}/batching", "w") as stream:
        stream.write(
          "max_batch_size { value: 1000 } batch_timeout_micros { value: 10000000 } "
          "max_enqueued_batches { value: 1 }"
        )
      with server_process.ServerProcess(
        "--model_name=m",
        f"--model_base_path={folder}/m",
        "--enable_batching",
        f"--batching_parameters_file={folder}/batching",
      ) as server:
        server.wait_until_listening().wait_until_available("m")
        one = saved_models.make_request("m", "one", x=_PAIRS)
        waits = server.prediction.Predict.future(one, timeout=60)
        other = saved_models.make_request("m", "echo", s=np.array([b"a"], object))

        def is_refused():
          try:
            server.prediction.Predict(other, timeout=60)
          except grpc.RpcError as error:
            self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertIn("batches wait", error.details())
            return True
          return False

        wait_until(is_refused)
        self.assertEqual(tf.make_ndarray(waits.result().outputs["y"]).tolist(), [3.0, 7.0])


class LauncherTest(unittest.TestCase):
  def _launch(self, setup, *flags):
    program = f"import os, sys\nfrom monolith.serving import model_server\n{setup}\n"
    return subprocess.run(
      [sys.executable, "-c", f"{program}sys.exit(model_server.main())", *flags],
      capture_output=True,
      text=True,
    )

  def test_the_server_starts_without_tensorflow_in_python(self):
    done = self._launch(
      """
def execute(path, arguments, environment):
  print(path, *arguments, "tensorflow" in sys.modules, environment["LD_LIBRARY_PATH"])
  sys.exit(0)

model_server.find_binary, os.execve = lambda: "/program", execute
os.environ["LD_LIBRARY_PATH"] = "/mine"
""",
      "--model_base_path=/m",
    )
    *words, folders = done.stdout.split()
    self.assertEqual(words, ["/program", "/program", "--model_base_path=/m", "False"], done.stderr)
    self.assertEqual(folders, f"{os.path.dirname(tf.__file__)}:/mine")

  def test_a_program_that_is_not_built_is_one_line(self):
    done = self._launch("import pathlib; model_server._PROGRAM = pathlib.Path('/no/program')")
    self.assertEqual(done.returncode, 1)
    (line,) = done.stderr.splitlines()
    for word in ("/no/program", "libnghttp2-dev", "make build"):
      self.assertIn(word, line)

  def test_version(self):
    status, text = server_process.run("--version")
    self.assertEqual(status, 0)
    self.assertIn(f"monolith {monolith.__version__}\n", text)
    self.assertIn(f"TensorFlow {tf.__version__}", text)


if __name__ == "__main__":
  unittest.main()
