"""`Estimator` as a parameter server and as a worker, in processes that TF_CONFIG describes."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import tensorflow as tf

from monolith.native_training import mlp_utils
from tests import free_ports

_ROOT = pathlib.Path(__file__).absolute().parent.parent.parent
_TIMEOUT_SECS = 300

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


class EstimatorProcessesTest(unittest.TestCase):
  def test_server_and_worker(self):
    model_dir = os.path.join(os.environ["TEST_TMPDIR"], "model")
    ports = {role: free_ports.get_free_port() for role in ("ps", "worker")}
    cluster = {role: [f"127.0.0.1:{port}"] for role, port in ports.items()}
    processes = {"ps": self._start(cluster, "ps", model_dir)}
    # TF_CONFIG does not say who is there already; a worker that is first would have to try again.
    self.assertTrue(mlp_utils.check_port("127.0.0.1", ports["ps"], timeout=_TIMEOUT_SECS))
    processes["worker"] = self._start(cluster, "worker", model_dir)
    for role, process in processes.items():
      return_code = process.wait(timeout=_TIMEOUT_SECS)
      output = self._log(role).read_text()
      self.assertEqual(return_code, 0, output)
      self.assertIn(f"{role} is done", output)
    checkpoint = tf.train.latest_checkpoint(model_dir)
    self.assertEqual(tf.train.load_variable(checkpoint, "global_step"), 20)

  def _start(self, cluster, role, model_dir):
    tf_config = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
    with self._log(role).open("w") as log:
      process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, f"--model_dir={model_dir}"],
        env={**os.environ, "TF_CONFIG": tf_config, "PYTHONPATH": str(_ROOT)},
        stdout=log,
        stderr=subprocess.STDOUT,
      )
    self.addCleanup(process.kill)
    return process

  def _log(self, role):
    return pathlib.Path(os.environ["TEST_TMPDIR"], f"{role}.log")


if __name__ == "__main__":
  unittest.main()
