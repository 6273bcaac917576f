"""Tests of the TPU path of `monolith.tpu_runner`, with a faked TPU.

There is no TPU: a fake Cloud TPU client stands for the service, an in-process TensorFlow server for
the TPU's host, and where the complete TPU graph is built, faked system metadata for its cores.
"""

import contextlib
import os
import re
import sys
import types
import unittest
from unittest import mock

import pytest

CALLS = []
ENDPOINTS = []


class FakeClient:
  """The part of the Cloud TPU client that TensorFlow and the runner use."""

  def __init__(
    self,
    tpu=None,
    zone=None,
    project=None,
    credentials="default",
    service=None,
    discovery_url=None,
  ):
    CALLS.append(("client", tpu, zone, project))
    self._tpu = tpu

  def name(self):
    return self._tpu

  def configure_tpu_version(self, version, restart_type="always"):
    CALLS.append(("configure", version, restart_type))

  def wait_for_healthy(self, timeout_s=1200, interval=30):
    CALLS.append(("healthy",))

  def network_endpoints(self):
    return list(ENDPOINTS)

  def api_available(self):
    return True

  def get_local_ip(self):
    return "127.0.0.1"


# The runner imports the client when it needs it, TensorFlow when it is imported itself, which it
# may have been before this file.
_client_module = types.ModuleType("cloud_tpu_client.client")
_client_module.Client = FakeClient
_package = types.ModuleType("cloud_tpu_client")
_package.client = _client_module
sys.modules["cloud_tpu_client"] = _package
sys.modules["cloud_tpu_client.client"] = _client_module

import tensorflow as tf  # noqa: E402

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from absl.testing import flagsaver  # noqa: E402
from tensorflow.python.client import session as session_lib  # noqa: E402
from tensorflow.python.distribute.cluster_resolver.tpu import (  # noqa: E402
  tpu_cluster_resolver,
)
from tensorflow.python.tpu import tpu_system_metadata  # noqa: E402

from monolith import _install, tpu_runner  # noqa: E402
from monolith.core import model_registry  # noqa: E402
from monolith.core.auto_checkpoint_feed_hook import (  # noqa: E402
  TPUInfeedOutfeedSessionWithEndOfStreamHandlingHook,
)
from monolith.tasks import parity_example  # noqa: E402
from tests.tpu_runner_testing import (  # noqa: E402
  EXAMPLE,
  SIMPLE,
  DataTestCase,
  SimpleTask,
  read_scalars,
)

pytestmark = pytest.mark.thorough

tpu_cluster_resolver.client = _client_module
tf.compat.v1.disable_v2_behavior()

REAL_ESTIMATOR = tf.compat.v1.estimator.tpu.TPUEstimator


@contextlib.contextmanager
def fake_tpu(hosts=1):
  """A TPU whose hosts are in-process servers; yields the calls of the client."""
  servers = []
  for _ in range(hosts):
    # Booted as job `local`: the cluster spec that TPUEstimator sends names job `worker`.
    servers.append(tf.distribute.Server.create_local_server())
  CALLS.clear()
  ENDPOINTS[:] = [
    {"ipAddress": "localhost", "port": server.target.rpartition(":")[2]} for server in servers
  ]
  yield CALLS
  ENDPOINTS.clear()


@contextlib.contextmanager
def captured_estimator(force_cpu=True):
  """Notes the arguments of TPUEstimator and, if so wanted, makes it run on CPU."""
  captured = {}

  class Estimator(REAL_ESTIMATOR):
    def __init__(self, *args, **kwargs):
      assert not args
      captured.update(kwargs)
      if force_cpu:
        kwargs["use_tpu"] = False
        spec = kwargs["embedding_config_spec"]
        if spec is not None:
          kwargs["embedding_config_spec"] = spec._replace(partition_strategy="div")
      super().__init__(**kwargs)

  with mock.patch.object(tf.compat.v1.estimator.tpu, "TPUEstimator", Estimator):
    yield captured


class TpuPathTest(DataTestCase):
  def _flags(self, **values):
    return flagsaver.flagsaver(tpu="fake-tpu", model_dir=self.model_dir, **values)

  def test_train_and_evaluate(self):
    with fake_tpu() as calls, captured_estimator() as captured:
      with self._flags(
        task=SIMPLE, tpu_zone="zone", gcp_project="project", save_checkpoints_steps=3
      ):
        tpu_runner.main(["prog"])
        self.assertEqual(
          calls[:4],
          [
            ("client", "fake-tpu", "zone", "project"),
            ("configure", tf.__version__, "always"),
            ("healthy",),
            ("client", "fake-tpu", "zone", "project"),
          ],
        )
        self.assertEqual(captured["train_batch_size"], 128)
        self.assertEqual(captured["eval_batch_size"], 64)
        self.assertIs(captured["use_tpu"], True)
        self.assertIsNone(captured["embedding_config_spec"])
        config = captured["config"]
        self.assertEqual(config.model_dir, self.model_dir)
        self.assertEqual(config.save_checkpoints_steps, 3)
        self.assertTrue(config.master.startswith("grpc://"))
        self.assertTrue(config.session_config.graph_options.rewrite_options.disable_meta_optimizer)
        params = {
          "model_dir": self.model_dir,
          "enable_host_call": True,
          "num_replicas": 8,
          "accelerator": "tpu",
          "host_call_every_n_steps": 500,
          "enable_stopping_signals": False,
          "cpu_test": False,
        }
        self.assertEqual(captured["params"], params)
        seen = SimpleTask.seen["input_train"]
        self.assertEqual({name: seen[name] for name in params}, params)
        self.assertEqual(seen["batch_size"], 128)
      self.assertEqual(tf.train.load_variable(self.model_dir, "global_step"), 6)

      with self._flags(task=SIMPLE, mode="eval"):
        with mock.patch.object(
          REAL_ESTIMATOR, "evaluate", autospec=True, side_effect=REAL_ESTIMATOR.evaluate
        ) as evaluate:
          tpu_runner.main(["prog"])
        self.assertEqual({call.kwargs["steps"] for call in evaluate.call_args_list}, {4})
        self.assertEqual(SimpleTask.seen["input_eval"]["batch_size"], 64)
    scalars = read_scalars(os.path.join(self.model_dir, "eval"))
    self.assertEqual(scalars["global_step"], {6: [6]})
    self.assertIn("auc", scalars)

  def _create(self, task=SIMPLE, hosts=1, features=None, tables=None, task_settings=None, **values):
    with fake_tpu(hosts), captured_estimator() as captured, self._flags(**values):
      params = model_registry.GetParams(task).set(**(task_settings or {}))
      runner = tpu_runner.TPURunner(params)
      _, replicas = runner.create_tpu_estimator(
        lambda features, mode, params: None, features, tables
      )
    return captured, replicas

  def test_batch_sizes(self):
    captured, replicas = self._create(task_settings={"eval.per_replica_batch_size": None})
    self.assertEqual(
      (replicas, captured["train_batch_size"], captured["eval_batch_size"]), (8, 128, 128)
    )
    captured, replicas = self._create(hosts=4, task_settings={"train.per_replica_batch_size": 128})
    self.assertEqual((replicas, captured["train_batch_size"]), (32, 4096))
    with self.assertRaisesRegex(TypeError, "train.per_replica_batch_size of task SimpleTask"):
      self._create(task_settings={"train.per_replica_batch_size": None})

  def test_tpu_config(self):
    captured, _ = self._create(
      iterations_per_loop=77, host_call_every_n_steps=0, enable_stopping_signals=True
    )
    config = captured["config"].tpu_config
    self.assertEqual(config.iterations_per_loop, 77)
    self.assertEqual(config.experimental_host_call_every_n_steps, 100)
    self.assertEqual(
      config.per_host_input_for_training,
      tf.compat.v1.estimator.tpu.InputPipelineConfig.PER_HOST_V2,
    )
    self.assertTrue(config.experimental_allow_per_host_v2_parallel_get_next)
    self.assertIs(config.experimental_feed_hook, TPUInfeedOutfeedSessionWithEndOfStreamHandlingHook)
    self.assertFalse(captured["params"]["enable_host_call"])
    captured, _ = self._create(host_call_every_n_steps=7)
    config = captured["config"].tpu_config
    self.assertEqual(config.experimental_host_call_every_n_steps, 7)
    self.assertIsNone(config.experimental_feed_hook)

  def test_embedding_config(self):
    task = parity_example.ParityExample().task().instantiate()
    task.init_slot_to_env()
    features, tables = task.create_feature_and_table_config_dict()
    for strategy in ("mod", "div"):
      captured, _ = self._create(
        task=EXAMPLE,
        features=features,
        tables=tables,
        partition_strategy=strategy,
        pipeline_execution=True,
        task_settings={"gradient_multiplier": 2.5},
      )
      spec = captured["embedding_config_spec"]
      self.assertEqual(spec.partition_strategy, strategy)
      self.assertEqual(spec.feature_to_config_dict, features)
      self.assertEqual(spec.table_to_config_dict, tables)
      self.assertTrue(spec.pipeline_execution_with_tensor_core)
      self.assertEqual(spec.experimental_gradient_multiplier_fn(7), 2.5)
      self.assertEqual(spec.optimization_parameters.learning_rate, 1.0)
    captured, _ = self._create(features=features, tables={})
    self.assertIsNone(captured["embedding_config_spec"])

  def test_version_config_can_be_switched_off(self):
    with fake_tpu() as calls, captured_estimator(), self._flags(enable_tpu_version_config=False):
      runner = tpu_runner.TPURunner(model_registry.GetParams(SIMPLE))
      runner.create_tpu_estimator(lambda features, mode, params: None, None, None)
      self.assertEqual({call[0] for call in calls}, {"client"})

  def test_raw_address_is_not_waited_for(self):
    with fake_tpu() as calls, flagsaver.flagsaver(tpu="grpc://localhost:1"):
      tpu_runner.TPURunner(model_registry.GetParams(SIMPLE))._configure_tpu_version()
      self.assertEqual([call[0] for call in calls], ["client", "configure"])

  def test_missing_google_client(self):
    error = RuntimeError("Missing runtime dependency on the Google API client. Run ...")
    with self._flags(), mock.patch.object(FakeClient, "configure_tpu_version", side_effect=error):
      with self.assertRaisesRegex(RuntimeError, re.escape(_install.install_line("tpu"))):
        tpu_runner.TPURunner(model_registry.GetParams(SIMPLE))._configure_tpu_version()

  def test_client_of_tensorflow_without_cloud_tpu_client(self):
    with mock.patch.dict(sys.modules, {"cloud_tpu_client": None}):
      self.assertEqual(
        tpu_runner._import_tpu_client().__name__, "tensorflow.python.tpu.client.client"
      )

  def test_local_tpu_is_one_host(self):
    with flagsaver.flagsaver(tpu="local", enable_tpu_version_config=False):
      with captured_estimator() as captured:
        runner = tpu_runner.TPURunner(model_registry.GetParams(SIMPLE))
        _, replicas = runner.create_tpu_estimator(lambda features, mode, params: None, None, None)
    self.assertEqual((replicas, captured["train_batch_size"]), (8, 128))


class _GraphIsComplete(Exception):
  """Raised by a hook when the session would be created."""


class _SentinelHook(tf.compat.v1.train.SessionRunHook):
  def begin(self):
    self.graph = tf.compat.v1.get_default_graph()
    raise _GraphIsComplete(self.graph)


class TpuGraphTest(DataTestCase):
  """Builds the complete `use_tpu=True` graph."""

  def _build(self, task_settings=None, **values):
    device = "/job:worker/replica:0/task:0/device:"
    names = [("CPU", 0), ("TPU_SYSTEM", 0), *(("TPU", i) for i in range(8))]
    devices = [
      session_lib._DeviceAttributes(f"{device}{kind}:{i}", kind, 0, 0) for kind, i in names
    ]
    metadata = tpu_system_metadata.TPUSystemMetadata(
      num_cores=8, num_hosts=1, num_of_cores_per_host=8, topology=None, devices=devices
    )

    class Task(parity_example.ParityTask):
      def create_model_fn(self):
        model_fn = super().create_model_fn()

        def model_fn_with_sentinel(features, mode, params):
          spec = model_fn(features, mode, params)
          return spec._replace(training_hooks=(*spec.training_hooks, _SentinelHook()))

        return model_fn_with_sentinel

    params = parity_example.ParityExample().task().set(**(task_settings or {}))
    params.cls = Task
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver
    with contextlib.ExitStack() as stack:
      stack.enter_context(fake_tpu())
      stack.enter_context(
        flagsaver.flagsaver(
          tpu="fake-tpu", model_dir=self.model_dir, save_checkpoints_steps=10, **values
        )
      )
      stack.enter_context(mock.patch.object(resolver, "master", return_value=""))
      stack.enter_context(
        mock.patch.object(tpu_system_metadata, "_query_tpu_system_metadata", return_value=metadata)
      )
      with self.assertRaises(_GraphIsComplete) as caught:
        tpu_runner.TPURunner(params).run()
    graph = caught.exception.args[0]
    return graph, {op.type for op in graph.get_operations()}

  OPS = {
    "CrossReplicaSum",
    "EnqueueTPUEmbeddingArbitraryTensorBatch",
    "InfeedEnqueueTuple",
    "OutfeedDequeueTuple",
    "LoadTPUEmbeddingAdagradParameters",
    "LoadTPUEmbeddingFTRLParameters",
    "RecvTPUEmbeddingActivations",
    "SendTPUEmbeddingGradients",
    "TPUReplicatedInput",
  }

  def test_graph(self):
    for strategy in ("mod", "div"):
      with self.subTest(strategy=strategy):
        graph, types_ = self._build(partition_strategy=strategy)
        self.assertLessEqual(self.OPS, types_)
        names = {v.op.name.partition("/")[0] for v in graph.get_collection("variables")}
        self.assertLessEqual({"table_1_0", "table_1_1", "table_2_0", "table_2_1", "tower"}, names)

  def test_graph_with_stopping_signals(self):
    _, types_ = self._build({"train.repeat": False}, enable_stopping_signals=True)
    self.assertLessEqual(self.OPS, types_)

  def test_graph_with_cached_variables(self):
    graph, types_ = self._build(
      {"enable_caching_with_tpu_var_mode": True}, host_call_every_n_steps=10
    )
    self.assertLessEqual(self.OPS, types_)
    inputs = [
      op
      for op in graph.get_operations()
      if op.type == "TPUReplicatedInput" and op.name.startswith("labels_tpu_variable")
    ]
    self.assertEqual(len(inputs), 1)
    # No job, because the faked master is this process.
    self.assertEqual(
      [tensor.op.device for tensor in inputs[0].inputs],
      [f"/task:0/device:TPU:{i}" for i in range(8)],
    )

  def test_graph_with_merged_vectors(self):
    _, types_ = self._build({"merge_vector": True})
    self.assertLessEqual(self.OPS, types_)


if __name__ == "__main__":
  unittest.main()
