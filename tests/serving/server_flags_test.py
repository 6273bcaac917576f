"""Flags that change how a server works: batching, a polled configuration file, retries, its end.

Covers `batching`, `options` and `remote_servers`.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.apis import model_management_pb2

from monolith.serving import (
  batching,
  errors,
  model_config,
  model_server,
  native_server,
  options,
  remote_servers,
)
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


class OptionsTest(unittest.TestCase):
  def _refuse(self, *arguments):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), self.assertRaises(SystemExit) as caught:
      options.parse(arguments)
    self.assertEqual(caught.exception.code, 2)
    return stderr.getvalue()

  def test_flags(self):
    flags = options.parse(
      ["--model_base_path=/m", "--enable_batching", "--enable_model_warmup=false"]
    )
    self.assertEqual((flags.port, flags.rest_api_port, flags.model_name), (8500, 0, "default"))
    self.assertEqual(flags.bind_address, "127.0.0.1")
    self.assertTrue(flags.enable_batching)
    self.assertFalse(flags.enable_model_warmup)

  def test_what_cannot_be_is_refused(self):
    self.assertIn("--model_base_path", self._refuse())
    self.assertIn("either", self._refuse("--model_base_path=/m", "--model_config_file=/c"))
    self.assertIn("no_such", self._refuse("--model_base_path=/m", "--no_such=1"))
    self.assertIn("70000", self._refuse("--model_base_path=/m", "--port=70000"))
    self.assertIn("both 0", self._refuse("--model_base_path=/m", "--port=0"))
    self.assertIn("maybe", self._refuse("--model_base_path=/m", "--allow_growth=maybe"))
    self.assertIn(
      "--enable_batching", self._refuse("--model_base_path=/m", "--batching_parameters_file=/b")
    )
    self.assertIn(
      "--row_log_servers", self._refuse("--model_base_path=/m", "--row_log_interval_secs=1")
    )
    self.assertIn("'kafka'", self._refuse("--model_base_path=/m", "--row_log_servers=a:1,kafka"))
    self.assertIn("nan", self._refuse("--model_base_path=/m", "--row_log_interval_secs=nan"))

  def test_the_server_in_cpp_gets_the_other_flags(self):
    arguments = ["--model_base_path=/m", "--native=true", "--port=7"]
    with mock.patch.object(native_server, "exec_server") as run:
      run.side_effect = FileNotFoundError("make server")
      with contextlib.redirect_stderr(io.StringIO()) as told:
        self.assertEqual(model_server.main(arguments), 1)
    run.assert_called_once_with(["--model_base_path=/m", "--port=7"])
    self.assertIn("make server", told.getvalue())

  def test_the_server_in_cpp_starts_without_tensorflow_in_python(self):
    program = """
import os, sys
from monolith.serving import model_server, native_server

def execute(path, arguments):
  print(path, *arguments, "tensorflow" in sys.modules)
  sys.exit(0)

native_server.find_binary, os.execv = lambda: "/program", execute
sys.exit(model_server.main())
"""
    flags = ["--native", "--model_base_path=/m"]
    done = subprocess.run(
      [sys.executable, "-c", program, *flags], capture_output=True, text=True, check=True
    )
    self.assertEqual(done.stdout.split(), ["/program", "/program", "--model_base_path=/m", "False"])

  def test_addresses(self):
    self.assertEqual(
      remote_servers.parse_addresses("ps_0=a:1|b:2, clicks:ps_1=[::1]:3"),
      {"ps_0": ["a:1", "b:2"], "clicks:ps_1": ["[::1]:3"]},
    )
    for text in ("ps_0", "ps_0=", "=a:1", "ps_0=a", "ps_0=a:0", "ps_0=a:1,ps_0=b:1", "ps_0=a:1|"):
      with self.subTest(text), self.assertRaisesRegex(errors.ServingError, "ps_address"):
        remote_servers.parse_addresses(text)

  def test_files_that_say_what_cannot_be(self):
    with tempfile.TemporaryDirectory() as folder:
      path = os.path.join(folder, "file")
      for text in (
        "max_batch_size { value: 0 }",
        "allowed_batch_sizes: [2, 4] max_batch_size { value: 8 }",
        "batch_timeout_micros { value: -1 }",
        "colour: 3",
      ):
        with open(path, "w") as stream:
          stream.write(text)
        with self.subTest(text), self.assertRaisesRegex(errors.ServingError, path):
          batching.BatchingParameters.from_file(path)
      with self.assertRaisesRegex(errors.ServingError, "nothing_here"):
        model_config.from_file(os.path.join(folder, "nothing_here"))

  def test_full_queues_refuse(self):
    batcher = batching.Batcher(batching.BatchingParameters(max_enqueued_batches=1))
    batcher._waiting = 1
    signature = mock.Mock(inputs={"x": None}, outputs={})
    signature.name = "one"
    with self.assertRaisesRegex(errors.ServingError, "1 batches wait"):
      batcher(mock.Mock(), signature, {"x": np.ones([1, 2])}, ())


if __name__ == "__main__":
  unittest.main()
