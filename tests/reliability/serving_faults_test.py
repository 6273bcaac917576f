"""Promise: no request fails with one retry while models come and go and serving processes die."""

from __future__ import annotations

import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
import unittest

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from monolith.agent_service import agent_controller, backends
from monolith.native_training import distributed_serving_ops
from tests.free_ports import get_free_port
from tests.serving import server_process
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LAYOUT = "/demo/layouts/all"
_SETTINGS = """
bzid demo
deploy_type unified
agent_version 3
layout_pattern all
zk_servers {zk_servers}
"""


def _save(folder, make_output):
  """Exports a model with input `x` and output `y`."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    x = tf.compat.v1.placeholder(tf.float32, [None])
    y = make_output(x)
    tf.compat.v1.saved_model.simple_save(session, str(folder), {"x": x}, {"y": y})


def _export(base, model_name):
  """Writes an entry that asks a parameter server to double its input."""

  def ask(x):
    (y,) = distributed_serving_ops.remote_predict(
      ["x"],
      [x],
      ["y"],
      model_name=f"{model_name}:ps_0",
      task=0,
      old_model_name="ps_0",
      max_rpc_deadline_millis=5000,
      output_types=[tf.float32],
    )
    return tf.reshape(y, tf.shape(x))

  _save(base / "entry" / "1", ask)
  _save(base / "ps_0" / "1", lambda x: 2 * x)
  return str(base)


class _Pod:
  """An agent and its server, which can be killed and started again."""

  def __init__(self, name, zk_servers):
    self.folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    self.name = name
    self.conf = self.folder / f"{name}.conf"
    self.conf.write_text(_SETTINGS.format(zk_servers=zk_servers))
    self.server_port, self.agent_port = get_free_port(), get_free_port()
    self.address = f"127.0.0.1:{self.server_port}"
    self.process = None

  def start(self):
    log = self.folder / f"{self.name}.log"
    with open(log, "ab") as output:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "monolith.agent_service.agent", "--conf", self.conf],
        cwd=_ROOT,
        env={
          **os.environ,
          "MY_POD_NAME": self.name,
          "MY_HOST_IP": "127.0.0.1",
          "PORT2": str(self.agent_port),
          "PORT3": str(self.server_port),
          "MONOLITH_SERVING_COMMAND": shlex.join(server_process.command()),
        },
        stdout=output,
        stderr=output,
      )

  def server_pid(self):
    for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
      for pid in (task / "children").read_text().split():
        return int(pid)
    return None

  def close(self):
    if self.process is not None and self.process.poll() is None:
      self.process.kill()
    if self.process is not None:
      self.process.wait()


class _Load(threading.Thread):
  """Asks entries in turn, and another one when the first fails."""

  def __init__(self, addresses, model_name):
    super().__init__(daemon=True)
    channels = [
      grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 500)])
      for address in addresses
    ]
    self._stubs = [prediction_service_pb2_grpc.PredictionServiceStub(c) for c in channels]
    self._request = predict_pb2.PredictRequest()
    self._request.model_spec.name = f"{model_name}:entry"
    self._request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.5, -2.0], tf.float32))
    self._ended = threading.Event()
    self.answers, self.retries, self.failures = 0, 0, []

  def run(self):
    for turn in itertools.count():
      if self._ended.wait(0.01):
        return
      errors = []
      for stub in (self._stubs[turn % 2], self._stubs[(turn + 1) % 2]):
        try:
          response = stub.Predict(self._request, timeout=10)
          np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), [3.0, -4.0])
          self.answers += 1
          break
        except (grpc.RpcError, AssertionError) as error:
          errors.append(f"{time.time():.1f} {error}")
      self.retries += len(errors) == 1
      if len(errors) == 2:
        self.failures.append(errors)

  def end(self):
    self._ended.set()
    self.join()


@unittest.skipUnless(os.environ.get("MONOLITH_SOAK") == "1", "minutes long: make soak")
class ServingFaultsTest(unittest.TestCase):
  def test_no_request_fails(self):
    require_zookeeper()
    self.phases = []
    zookeeper = ZooKeeperServer()
    self.addCleanup(zookeeper.close)
    zookeeper.start()
    backend = backends.ZKBackend("demo", zookeeper.hosts)
    backend.start()
    self.addCleanup(backend.stop)
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    for name in ("m", "n"):
      self.assertEqual(
        agent_controller.declare_saved_model(backend, _export(folder / name, name)), name
      )
    pods = [_Pod(f"pod{i}", zookeeper.hosts) for i in range(2)]
    for pod in pods:
      self.addCleanup(pod.close)
      pod.start()
    agent_controller.map_model_to_layout(backend, "m", _LAYOUT, "pub")

    reader = backends.ZKBackend("demo", zookeeper.hosts)
    reader.start()
    self.addCleanup(reader.stop)
    reader.register_layout_callback(_LAYOUT, lambda layout: None)

    def are_served(model_name, addresses):
      services = reader.get_service_map()
      return all(
        sorted(services.get(f"{model_name}:{sub_graph}", [])) == sorted(addresses)
        for sub_graph in ("entry", "ps_0")
      )

    everywhere = [pod.address for pod in pods]
    self.wait(lambda: are_served("m", everywhere), pods)
    load = _Load(everywhere, "m")
    load.start()
    self.addCleanup(load.end)
    wait_until(lambda: load.answers + len(load.failures) > 20)

    # A second model comes and goes.
    agent_controller.map_model_to_layout(backend, "n", _LAYOUT, "pub")
    self.wait(lambda: are_served("n", everywhere), pods)
    other = _Load(everywhere, "n")
    other.start()
    wait_until(lambda: other.answers > 20)
    other.end()
    agent_controller.map_model_to_layout(backend, "n", _LAYOUT, "unpub")
    self.wait(lambda: not backend.zk.get_children("/demo/binding/n"), pods)

    # A server dies, and with it its agent; then an agent, and with it its server.
    os.kill(pods[0].server_pid(), signal.SIGKILL)
    self.assertEqual(pods[0].process.wait(timeout=120), 1)
    self.wait(lambda: are_served("m", everywhere[1:]), pods)
    pods[0].start()
    self.wait(lambda: are_served("m", everywhere), pods)
    pods[1].process.kill()
    pods[1].process.wait()
    self.wait(lambda: are_served("m", everywhere[:1]), pods)
    pods[1].start()
    self.wait(lambda: are_served("m", everywhere), pods)

    # ZooKeeper is away for a minute.
    zookeeper.stop()
    time.sleep(60)
    zookeeper.start()
    self.wait(lambda: are_served("m", everywhere), pods)

    load.end()
    print(f"{load.answers} answers, {load.retries} by the second entry")
    for failures in (load.failures, other.failures):
      self.assertFalse(
        failures, f"{len(failures)} failed, the first: {failures[:1]}; {self.phases}"
      )
    self.assertGreater(load.answers, 100)

  def test_a_pod_with_roles(self):
    """The older way: the parts of one model under the names of its sub graphs."""
    require_zookeeper()
    self.phases = []
    zookeeper = ZooKeeperServer()
    self.addCleanup(zookeeper.close)
    zookeeper.start()
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    pod = _Pod("mixed", zookeeper.hosts)
    pod.conf.write_text(
      f"bzid demo\nbase_name m\nbase_path {_export(folder / 'm', 'm')}\n"
      f"stand_alone_serving yes\nzk_servers {zookeeper.hosts}\n"
    )
    self.addCleanup(pod.close)
    pod.start()
    # A pod that is slow to start must not find a client that looks every two minutes only.
    channel = grpc.insecure_channel(pod.address, options=[("grpc.max_reconnect_backoff_ms", 1000)])
    self.addCleanup(channel.close)
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "entry"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([1.5], tf.float32))

    def answers():
      try:
        return tf.make_ndarray(stub.Predict(request, timeout=10).outputs["y"]).tolist() == [3.0]
      except grpc.RpcError:
        return False

    self.wait(answers, [pod])
    pod.process.terminate()
    self.assertEqual(pod.process.wait(timeout=120), 0)

  def wait(self, predicate, pods):
    self.phases.append(f"{time.time():.1f}")
    try:
      wait_until(predicate, timeout_secs=240, poll_secs=0.1)
    except AssertionError as error:
      logs = [(pod.folder / f"{pod.name}.log").read_text(errors="replace")[-4000:] for pod in pods]
      raise AssertionError(f"{error}\n" + "\n---\n".join(logs)) from None


if __name__ == "__main__":
  unittest.main()
