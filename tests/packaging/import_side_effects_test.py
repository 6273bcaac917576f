"""Importing graph, cluster and core modules starts nothing, opens nothing and patches nothing."""

import os
import subprocess
import sys
import unittest

import pytest

pytestmark = pytest.mark.thorough

_GRAPH = (
  "device_utils", "graph_meta", "graph_utils", "learning_rate_functions", "nested_tensors",
  "prefetch_queue", "session_run_hooks", "summary.utils", "sync_hooks", "utils", "variables",
)  # fmt: skip
_CLUSTER = (
  "cluster_manager", "consul", "env_utils", "gflags_utils", "mlp_utils", "net_utils",
  "service_discovery", "yarn_runtime", "zk_utils",
)  # fmt: skip
_CORE = (
  "base_layer", "base_model_params", "base_task", "dense", "hyperparams", "model_imports",
  "model_registry", "optimizers", "py_utils", "util", "variance_scaling",
)  # fmt: skip

_PROGRAM = """
import importlib, os, signal, socket, sys, threading
import absl.flags, absl.logging, grpc, kazoo.client
import tensorflow as tf
from tensorflow.python.training import checkpoint_management, monitored_session
import monolith  # has a patch of its own, which lazy_import_test.py checks
from monolith import _tensorflow
from monolith.native_training import graph_estimator

_tensorflow.import_keras_v1()  # tf_keras gives tf.compat another object

def sockets():
  found = set()
  for fd in os.listdir("/proc/self/fd"):
    try:
      link = os.readlink("/proc/self/fd/" + fd)
    except OSError:
      continue
    if link.startswith("socket:"):
      found.add(link)
  return found

PATCHABLE = (
  tf, tf.train, tf.compat.v1, tf.compat.v1.train, tf.compat.v1.Session, tf.Variable,
  checkpoint_management, monitored_session, monitored_session.MonitoredSession,
  graph_estimator.DatasetInitializerHook, *_tensorflow.original_initializer_hooks(), os, os.path,
  socket, socket.socket, threading.Thread,
  kazoo.client.KazooClient, grpc, sys.modules["builtins"],
)

def state():
  for module in (tf, tf.train, tf.compat.v1, tf.compat.v1.train, tf.keras):
    dir(module)
  values = [{k: id(v) for k, v in vars(o).items() if not k.startswith("__")} for o in PATCHABLE]
  handlers = [signal.getsignal(s) for s in signal.valid_signals()]
  return values, handlers, sys.excepthook, threading.excepthook

state()
before, sockets_before, threads_before = state(), sockets(), threading.active_count()
for name in sys.argv[1:]:
  importlib.import_module(name)
  assert threading.active_count() == threads_before, (name, threading.enumerate())
  assert sockets() <= sockets_before, (name, sockets())
  after = state()
  for owner, old, new in zip(PATCHABLE, before[0], after[0]):
    # Lazily loaded attributes may appear; none may become another object.
    changed = [k for k in old if k in new and new[k] != old[k]]
    assert not changed, (name, owner, changed)
  assert after[1:] == before[1:], (name, "signal handlers or exception hooks")
"""


class ImportSideEffectsTest(unittest.TestCase):
  def _check(self, modules):
    process = subprocess.run(
      [sys.executable, "-c", _PROGRAM, *modules], capture_output=True, text=True
    )
    self.assertEqual(process.returncode, 0, process.stderr[-2000:])

  def test_stand_alone_modules(self):
    self._check(
      [f"monolith.native_training.{name}" for name in (*_GRAPH, *_CLUSTER)]
      + [f"monolith.core.{name}" for name in _CORE]
    )

  def test_ops_let_tensorflow_share_gpus_unless_the_user_decides(self):
    program = (
      "import os; from monolith.native_training.runtime.ops import gen_monolith_ops; "
      "print(os.environ['TF_FORCE_GPU_ALLOW_GROWTH'])"
    )
    name = "TF_FORCE_GPU_ALLOW_GROWTH"
    without = {key: value for key, value in os.environ.items() if key != name}
    for environment, want in ((without, "true"), ({**without, name: "false"}, "false")):
      process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
      )
      self.assertEqual(process.stdout.strip(), want, process.stderr[-2000:])

  def test_the_check_notices_a_patch(self):
    # runner_utils must patch tf.train.get_checkpoint_state when it is imported, signal_utils
    # installs a handler.
    for name, what in (("runner_utils", "get_checkpoint_state"), ("signal_utils", "signal")):
      with self.assertRaisesRegex(AssertionError, what):
        self._check([f"monolith.native_training.{name}"])


if __name__ == "__main__":
  unittest.main()
