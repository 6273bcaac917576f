"""`Estimator` as a parameter server and as a worker, in processes that TF_CONFIG describes."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
from concurrent import futures

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from monolith.agent_service import backends
from monolith.native_training import (
  estimator,
  multi_hash_table_ops,  # noqa: F401, loads the ops of exports
)
from monolith.native_training.runtime.parameter_sync import prediction_service_pb2
from tests import free_ports
from tests.wait_until import wait_until
from tests.zookeeper_server import ZooKeeperServer, require_zookeeper

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_eager_execution()

_ROOT = pathlib.Path(__file__).absolute().parents[3]
_TIMEOUT_SECS = 300
_SERVER_TYPES = {"chief": "worker", "worker": "worker", "ps": "ps"}

_PROGRAM = """
import os
import tensorflow as tf
from absl import app
from monolith.native_training.estimator import Estimator, RunnerConfig, ServiceDiscoveryType
from monolith.native_training.model import TestFFMModel

def main(_):
  tf.compat.v1.disable_eager_execution()
  conf = RunnerConfig(
    discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=os.environ["TF_CONFIG"],
    save_checkpoints_steps=10000, num_ps=1, num_workers=1)
  params = TestFFMModel.params()
  params.train.per_replica_batch_size = 64
  Estimator(params, conf).train(max_steps=20)
  print(conf.server_type, "is done")

app.run(main)
"""

_CLICKS = """
import json, os
import numpy as np
import tensorflow as tf
from absl import app
from monolith.native_training import entry, native_model, native_task_context
from monolith.native_training.estimator import Estimator, RunnerConfig, ServiceDiscoveryType

class Clicks(native_model.MonolithModel):
  # Users with even ids click.
  def input_fn(self, mode):
    users = np.arange(64) % 16
    data = tf.data.Dataset.from_tensor_slices((users, (users % 2 == 0).astype(np.float32)))
    if mode == "eval":
      context = native_task_context.get()
      data = data.shard(context.num_workers, context.worker_index)
    return data.repeat(None if mode == "train" else 1).batch(16).map(
      lambda user, label: {"user": tf.RaggedTensor.from_tensor(user[:, None]), "label": label})

  def model_fn(self, features, mode):
    optimizer = entry.AdagradOptimizer(learning_rate=0.5, initial_accumulator_value=1.0)
    vector = self.lookup_embedding_slice(["user"], "vec", 4, optimizer=optimizer)[0]
    loss, pred = native_model.get_sigmoid_loss_and_pred(
      "ctr", tf.reduce_sum(vector, axis=1), features["label"], None, mode=mode)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)
    return native_model.EstimatorSpec(features["label"], pred, "ctr", loss, optimizer)
"""

_EVALUATION_PROGRAM = (
  _CLICKS
  + """
def main(_):
  tf.compat.v1.disable_eager_execution()
  conf = RunnerConfig(
    discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=os.environ["TF_CONFIG"],
    num_ps=1, num_workers=2)
  print("metrics", json.dumps(Estimator(Clicks(), conf).evaluate()))
  print(conf.server_type, "is done")

app.run(main)
"""
)

# Trains until it is told to stop; servers push what they learn to those that serve.
_REALTIME_PROGRAM = """
import json, os, time
import tensorflow as tf
from absl import app
from monolith.native_training.estimator import Estimator, RunnerConfig, ServiceDiscoveryType
from monolith.native_training.model import TestFFMModel

class StopHook(tf.compat.v1.train.SessionRunHook):
  def after_run(self, run_context, run_values):
    time.sleep(0.05)
    if os.path.exists(os.environ["STOP_FILE"]):
      run_context.request_stop()

def main(_):
  tf.compat.v1.disable_eager_execution()
  conf = RunnerConfig(
    discovery_type=ServiceDiscoveryType.PRIMUS, tf_config=os.environ["TF_CONFIG"],
    server_type=json.loads(os.environ["TF_CONFIG"])["task"]["type"], index=0,
    num_ps=1, num_workers=1, save_checkpoints_steps=20, model_name="clicks",
    enable_realtime_training=True, force_shutdown_ps=True,
    unified_serving=True, bzid="shop", base_name="ranking", zk_server=os.environ["ZK_HOSTS"])
  params = TestFFMModel.params()
  params.train.per_replica_batch_size = 64
  params.serving.export_when_saving = True
  Estimator(params, conf).train(hooks=[StopHook()])
  print(conf.server_type, "is done")

app.run(main)
"""


def _read_curve(folder, name):
  """Returns the values of a curve that a process other than this one has drawn last."""
  files = sorted(pathlib.Path(folder).glob("events.*"), key=lambda path: path.stat().st_mtime)
  events = tf.compat.v1.train.summary_iterator(str(files[-1]))
  values = [value for event in events for value in event.summary.value if value.tag == name]
  return [np.float32(value.simple_value) for value in values]


class _Serving:
  """Serves an exported part of a model, and takes in the rows that training pushes.

  Attributes:
    pushes: by push, the model it was for, its rows, and what was served for their ids before and
      after it.
  """

  def __init__(self, export_dir):
    self.pushes = []
    graph = tf.Graph()
    self._session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
      model = tf.compat.v1.saved_model.load(self._session, ["serve"], export_dir)
    self._signatures = model.signature_def
    self._server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[self])
    self.address = f"localhost:{self._server.add_insecure_port('localhost:0')}"
    self._server.start()

  def service(self, details):
    if details.method == "/tensorflow.serving.PredictionService/Predict":
      return grpc.unary_unary_rpc_method_handler(self._predict)
    return None

  def _predict(self, data, context):
    request = prediction_service_pb2.PredictRequest.FromString(data)
    inputs = {
      alias: tf.make_ndarray(tensor_pb2.TensorProto.FromString(value))
      for alias, value in request.inputs.items()
    }
    ids = {alias: inputs[alias] for alias in ("id", "id_split")}
    before = self._call("raw_lookup", ids)["flat_emb"]
    self._call(request.model_spec.signature_name, inputs)
    after = self._call("raw_lookup", ids)["flat_emb"]
    self.pushes.append((request.model_spec.name, inputs["flat_value"], before, after))
    return prediction_service_pb2.PredictResponse().SerializeToString()

  def _call(self, name, inputs):
    signature = self._signatures[name]
    return self._session.run(
      {alias: info.name for alias, info in signature.outputs.items()},
      {signature.inputs[alias].name: value for alias, value in inputs.items()},
    )

  def stop(self):
    self._server.stop(None).wait()
    self._session.close()


class EstimatorProcessesTest(unittest.TestCase):
  def test_server_and_worker(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    ports = {role: free_ports.get_free_port() for role in ("ps", "worker")}
    cluster = {role: [f"127.0.0.1:{port}"] for role, port in ports.items()}
    processes = {role: self._start(cluster, role, model_dir) for role in ("worker", "ps")}
    self._wait(processes)
    checkpoint = tf.train.latest_checkpoint(model_dir)
    self.assertEqual(tf.train.load_variable(checkpoint, "global_step"), 20)

  def test_evaluation_on_two_workers_returns_what_one_in_a_single_process_does(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    names: dict = {}
    exec(_CLICKS, names)
    local = estimator.Estimator(
      names["Clicks"](), estimator.RunConfig(is_local=True, model_dir=model_dir)
    )
    local.train(steps=5)
    expected = local.evaluate()

    roles = ("chief", "worker", "ps")
    cluster = {role: [f"127.0.0.1:{free_ports.get_free_port()}"] for role in roles}
    # Leftovers of another evaluation count for nothing.
    left = pathlib.Path(model_dir, "eval", "parts", "1.npz")
    left.parent.mkdir(parents=True)
    np.savez(left, loss_sum=1e6, num_examples=1)
    self._wait({role: self._start(cluster, role, model_dir, _EVALUATION_PROGRAM) for role in roles})

    self.assertIsNone(self._metrics("ps"))
    self.assertIsNone(self._metrics("worker"))
    metrics = self._metrics("chief")
    self.assertCountEqual(metrics, expected)
    for name, value in expected.items():
      self.assertAlmostEqual(metrics[name], value, 4, name)
    self.assertEqual(
      _read_curve(os.path.join(model_dir, "eval"), "auc"), [np.float32(metrics["auc"])]
    )

  def test_unified_serving(self):
    require_zookeeper()
    zookeeper = ZooKeeperServer()
    self.addCleanup(zookeeper.close)
    zookeeper.start()
    folder = pathlib.Path(os.environ["TEST_TMPDIR"])
    cluster = {role: [f"127.0.0.1:{free_ports.get_free_port()}"] for role in ("ps", "worker")}
    environment = {"ZK_HOSTS": zookeeper.hosts, "STOP_FILE": str(folder / "stop")}
    processes = {
      role: self._start(cluster, role, str(folder / "model"), _REALTIME_PROGRAM, environment)
      for role in ("ps", "worker")
    }
    serving = _Serving(self._wait_for_export(folder / "model/exported_models/ps_0", processes))
    self.addCleanup(serving.stop)
    backend = backends.ZKBackend("shop", zookeeper.hosts)
    backend.start()
    self.addCleanup(backend.stop)
    container = backends.Container("cluster", "1")

    backend.report_service_info(container, backends.ContainerServiceInfo(grpc=serving.address))
    backend.sync_available_saved_models(container, {backends.SavedModel("clicks", "ps_0")})
    wait_until(lambda: self._check(processes) or serving.pushes, _TIMEOUT_SECS)
    (folder / "stop").touch()
    self._wait(processes)

    name, pushed, before, after = serving.pushes[0]
    self.assertEqual(name, "clicks:ps_0")
    # The server answers, in half precision, with what training has learnt since the export.
    np.testing.assert_allclose(after, pushed, atol=1e-3)
    self.assertFalse(np.allclose(before, pushed, atol=1e-2))

  def _wait_for_export(self, base, processes):
    """Returns the folder of the first version, once it is complete."""
    versions = []

    def is_there():
      self._check(processes)
      versions[:] = [path for path in base.glob("*") if path.name.isdigit()]
      return versions

    wait_until(is_there, _TIMEOUT_SECS)
    return str(versions[0])

  def _check(self, processes):
    for role, process in processes.items():
      self.assertIn(process.poll(), (None, 0), self._log(role))

  def _wait(self, processes):
    """Waits until all processes ended well."""
    for role, process in processes.items():
      return_code = process.wait(timeout=_TIMEOUT_SECS)
      output = self._log(role).read_text()
      self.assertEqual(return_code, 0, output)
      self.assertIn(f"{_SERVER_TYPES[role]} is done", output)

  def _start(self, cluster, role, model_dir, program=_PROGRAM, environment=None):
    tf_config = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    values = {"TF_CONFIG": tf_config, "PYTHONPATH": str(_ROOT), **(environment or {})}
    with self._log(role).open("w") as log:
      process = subprocess.Popen(
        [sys.executable, "-c", program, f"--model_dir={model_dir}"],
        env={**os.environ, **values},
        stdout=log,
        stderr=subprocess.STDOUT,
      )
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    return process

  def _metrics(self, role):
    [metrics] = re.findall(r"^metrics (.*)$", self._log(role).read_text(), re.MULTILINE)
    return json.loads(metrics)

  def _log(self, role):
    return pathlib.Path(os.environ["TEST_TMPDIR"], f"{role}.log")


if __name__ == "__main__":
  unittest.main()
