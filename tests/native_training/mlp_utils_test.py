import json
import os
import socket
import subprocess
import sys
import threading
import time
import types
import unittest
from unittest import mock

import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from monolith import _tensorflow
from monolith.native_training import graph_estimator, mlp_utils
from tests.free_ports import get_free_port

tf.compat.v1.disable_eager_execution()

flags.DEFINE_bool("enable_sync_training", False, "as the runner's configuration defines it")

# Ours, and that of `tf.estimator` where it exists.
_HOOK_CLASSES = (
  graph_estimator.DatasetInitializerHook,
  *_tensorflow.original_initializer_hooks(),
)

# The periods are shortened; everything else is as on the platform.
_PROCESS = """
import json, socket, sys, threading
from absl import flags
import tensorflow as tf
from monolith.native_training import mlp_utils
mlp_utils._JOIN_CHECK_TIMEOUT_SECS = 1
mlp_utils._JOIN_PERIOD_SECS = 0.1
mlp_utils._WAIT_PERIOD_SECS = 0.1
flags.DEFINE_integer("num_extra_dsworker_on_gpu_worker", 1, "")
flags.FLAGS(["program", "--dataset_use_dataservice"])
env = mlp_utils.MLPEnv()
if env.role == "WORKER":
  container = socket.create_server(("127.0.0.1", int(env.ssh_port)))
  # Accepts, as sshd does: the others look ten times a second, and once the queue of connections
  # that nobody accepted is full, a new one is not answered, and they take this task for gone.
  def accept():
    while True:
      container.accept()[0].close()
  threading.Thread(target=accept, daemon=True).start()
mlp_utils.mlp_pass()
assert env.role == "WORKER", "a server must not return"
dataset = tf.data.Dataset.range(200).apply(
  tf.data.experimental.service.distribute(
    processing_mode="distributed_epoch", service=flags.FLAGS.data_service_dispatcher))
print(json.dumps({
  "dispatcher": flags.FLAGS.data_service_dispatcher,
  "extra": len(mlp_utils.EXTRA_DSWORKERS),
  "elements": [int(x) for x in dataset.as_numpy_iterator()],
}), flush=True)
"""


def _env(**values):
  clean = {
    n: v for n, v in os.environ.items()
    if not n.startswith(("MLP_", "MPI_", "OMPI_")) and n != "CLOUDNATIVE_INET_ADDR"
  }  # fmt: skip
  return mock.patch.dict(os.environ, {**clean, "YARN_INET_ADDR": "me", **values}, clear=True)


def _mpi_env(rank):
  return {
    "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  }  # fmt: skip


_CLUSTER = {
  "MLP_FRAMEWORK": "tensorflow",
  "MLP_ROLE": "worker",
  "MLP_ROLE_INDEX": "1",
  "MLP_PORT": "3000",
  "MLP_SSH_PORT": "22",
  "MLP_WORKER_NUM": "2",
  "MLP_WORKER_0_PRIMARY_HOST": '"w0"',
  "MLP_WORKER_0_HOST": "w0b",
  "MLP_WORKER_0_PORT": "3001",
  "MLP_WORKER_1_PRIMARY_HOST": "'w1'",
  "MLP_WORKER_1_PORT": "3002",
  "MLP_WORKER_ALL_PRIMARY_HOSTS": "w0,w1",
  "MLP_WORKER_ALL_ADDRS": "w0b:1,w1b:2",
  "MLP_DISPATCHER_NUM": "1",
  "MLP_DISPATCHER_0_PRIMARY_HOST": "::1",
  "MLP_DISPATCHER_0_PORT": "5000",
  "MLP_GPU": "8",
  "MLP_GPU_TYPE": "h",
}


class CheckPortTest(unittest.TestCase):
  def test_listening(self):
    with socket.create_server(("127.0.0.1", 0)) as server:
      self.assertTrue(mlp_utils.check_port("127.0.0.1", server.getsockname()[1]))
      self.assertTrue(mlp_utils.check_port("localhost", str(server.getsockname()[1])))

  def test_ipv6_with_and_without_brackets(self):
    try:
      server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as e:
      self.skipTest(f"needs IPv6 on loopback: {e}")
    with server:
      self.assertTrue(mlp_utils.check_port("::1", server.getsockname()[1]))
      self.assertTrue(mlp_utils.check_port("[::1]", server.getsockname()[1]))

  def test_nobody_listens(self):
    start = time.monotonic()
    self.assertFalse(mlp_utils.check_port("127.0.0.1", get_free_port(), timeout=0.3))
    self.assertGreaterEqual(time.monotonic() - start, 0.3)

  def test_does_not_spin_after_a_refusal(self):
    port = get_free_port()
    with mock.patch("time.sleep", wraps=time.sleep) as sleep:
      mlp_utils.check_port("127.0.0.1", port, timeout=0.5)
    self.assertLessEqual(sleep.call_count, 6)

  def test_server_that_comes_up_later(self):
    port = get_free_port()
    servers = []
    timer = threading.Timer(0.3, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    timer.start()

    self.assertTrue(mlp_utils.check_port("127.0.0.1", port, timeout=60))

    timer.join()
    servers[0].close()

  def test_unresolvable_host(self):
    self.assertFalse(mlp_utils.check_port("host.invalid", 80, timeout=0.1))


class MLPEnvTest(unittest.TestCase):
  def test_outside_the_platform(self):
    with _env():
      env = mlp_utils.MLPEnv()

    self.assertFalse(env.avaiable)
    self.assertEqual((env.role, env.index, env.port, env.host), ("", 0, 2222, "me"))
    self.assertEqual(env.all_roles, {})
    self.assertIsNone(env.framework)
    self.assertEqual((env.cpu, env.gpu, env.gpu_type, env.mem), (0, 0, "", 0))
    self.assertEqual(env.dispatcher_target(), "grpc://localhost:5050")
    self.assertEqual(env.queue_device, "/device:CPU:0")
    self.assertEqual(env.num_replicas("ps"), 0)
    self.assertEqual(env.get_all_addrs("ps"), [])
    self.assertIsNone(env.get_addr("ps", 0))

  def test_platform(self):
    with _env(**_CLUSTER):
      env = mlp_utils.MLPEnv()

    self.assertTrue(env.avaiable)
    self.assertFalse(env.enable_mpi)
    self.assertEqual((env.role, env.index, env.port), ("WORKER", 1, 3000))
    self.assertEqual(env.all_roles, {"WORKER": 2, "DISPATCHER": 1})
    self.assertEqual((env.framework, env.ssh_port, env.gpu), ("tensorflow", "22", 8))
    self.assertEqual((env.num_replicas(), env.num_replicas("dispatcher")), (2, 1))
    self.assertEqual((env.get_host(), env.get_host("worker", 0)), ("w1", "w0"))
    self.assertEqual(env.get_host("worker", 0, is_primary=False), "w0b")
    self.assertEqual(env.get_host("dispatcher"), "::1")
    self.assertEqual(env.get_port(), 3002)
    self.assertEqual(env.get_port("ps", 7), 2222)
    self.assertEqual(env.get_addr(), "w1:3002")
    self.assertEqual(env.dispatcher_addr(), "[::1]:5000")
    self.assertEqual(env.dispatcher_target(), "grpc://[::1]:5000")
    self.assertEqual(env.dispatcher_target("worker"), "grpc://w1:3002")
    self.assertEqual(env.dispatcher_target("unknown"), "grpc://localhost:5050")
    self.assertEqual(env.get_all_host(), "w0,w1")
    self.assertEqual(env.get_all_addrs(is_primary=False), ["w0b:1", "w1b:2"])
    self.assertEqual(env.queue_device, "/job:worker/task:0/device:CPU:0")

  def test_queue_device_with_ps(self):
    with _env(**_CLUSTER, MLP_PS_NUM="1"):
      self.assertEqual(mlp_utils.MLPEnv().queue_device, "/job:ps/task:0/device:CPU:0")

  def test_mpi(self):
    with _env(**_CLUSTER, **_mpi_env(3)):
      env = mlp_utils.MLPEnv()

      self.assertTrue(env.enable_mpi)
      self.assertEqual((env.index, env.port, env.all_roles["WORKER"]), (3, 3003, 4))
      self.assertEqual(env.num_replicas(), 4)
      self.assertEqual((env.get_host(), env.get_host(index=1)), ("w1", "w0"))
      self.assertEqual((env.get_port(), env.get_port(index=1)), (3004, 3002))
      self.assertEqual(env.get_addr(), "w1:3004")

  def test_mpi_is_for_workers_only(self):
    with _env(**{**_CLUSTER, "MLP_ROLE": "ps"}, **_mpi_env(3)):
      env = mlp_utils.MLPEnv()
      self.assertFalse(env.enable_mpi)
      self.assertEqual(env.index, 1)

  def test_role_names_have_three_parts(self):
    with _env(MLP_WORKER_NUM="2", MLP_A_B_NUM="3", MLP_NUM="4", MPI_PS_NUM="5"):
      self.assertEqual(mlp_utils.MLPEnv().all_roles, {"WORKER": 2, "PS": 5})

  def test_malformed_number(self):
    for name in ("MLP_PORT", "MLP_WORKER_NUM", "MLP_ROLE_INDEX", "MLP_GPU"):
      with _env(**{**_CLUSTER, name: "many"}):
        with self.assertRaisesRegex(ValueError, f"{name} is 'many'"):
          mlp_utils.MLPEnv()

  def test_wait(self):
    with socket.create_server(("127.0.0.1", 0)) as server:
      port = str(server.getsockname()[1])
      with _env(**{**_CLUSTER, "MLP_WORKER_0_PRIMARY_HOST": "127.0.0.1"}, MLP_X_NUM="1"):
        os.environ.update(MLP_SSH_PORT=port, MLP_WORKER_0_PORT=str(get_free_port()))
        env = mlp_utils.MLPEnv()
        with mock.patch("time.sleep", side_effect=AssertionError("must not sleep")):
          env.wait("worker", 0)
          env.wait("x")  # no host: returns
        sleeps = []
        with mock.patch.object(mlp_utils, "check_port", lambda host, port: False), \
            mock.patch("time.sleep", sleeps.append):  # fmt: skip
          env.wait("worker", 0, timeout=12, use_ssh=False)
        self.assertEqual(sleeps, [5, 5, 5])

  def test_join_waits_for_the_end_and_exits(self):
    answers = [True, True, True, False]  # one for the start, then until the task is gone
    with _env(**_CLUSTER), \
        mock.patch.object(mlp_utils, "check_port", lambda *args, **kwargs: answers.pop(0)), \
        mock.patch("time.sleep") as sleep, mock.patch("os._exit") as exit_process:  # fmt: skip
      mlp_utils.MLPEnv().join()
    self.assertEqual(sleep.call_args_list, [mock.call(10)] * 2)
    exit_process.assert_called_once_with(0)

  def test_join_of_nobody(self):
    with _env(), self.assertRaisesRegex(ValueError, "no host of worker 0"):
      mlp_utils.MLPEnv().join()

  def test_profiler_trace(self):
    with _env(**_CLUSTER, TENSORBOARD_LOG_PATH="/logs", MLP_DSWORKER_ALL_PRIMARY_ADDRS="a:1,b:2"):
      env = mlp_utils.MLPEnv()
      with mock.patch("tensorflow.profiler.experimental.client.trace") as trace:
        env.profiler_trace(delay_ms=500)
        env.profiler_trace("worker", 0)
      with self.assertRaisesRegex(ValueError, "no address of ps"):
        env.profiler_trace("ps")
    self.assertEqual(trace.call_args_list[0].args, ("grpc://a:1,grpc://b:2", "/logs", 500))
    self.assertEqual(trace.call_args_list[0].kwargs["options"].host_tracer_level, 2)
    self.assertEqual(trace.call_args_list[1].args[0], "grpc://w0:3001")


class MpiExceptionHookTest(unittest.TestCase):
  def setUp(self):
    self.addCleanup(setattr, sys, "excepthook", sys.excepthook)

  def test_without_mpi(self):
    before = sys.excepthook
    with _env():
      mlp_utils.add_mpi_exception_hook()
    self.assertIs(sys.excepthook, before)

  def test_uncaught_exception_aborts_all_ranks(self):
    mpi = mock.Mock()
    modules = {"mpi4py": types.SimpleNamespace(MPI=mpi)}
    with _env(**_mpi_env(1)), mock.patch.dict(sys.modules, modules):
      mlp_utils.add_mpi_exception_hook()
      sys.excepthook(ValueError, ValueError("x"), None)
    mpi.COMM_WORLD.Abort.assert_called_once_with(1)


class DatasetInitializerHookTest(unittest.TestCase):
  def setUp(self):
    for hook_class in _HOOK_CLASSES:
      for name in ("begin", "after_create_session"):
        self.addCleanup(setattr, hook_class, name, getattr(hook_class, name))

  def _run_hook(self):
    """Runs the hook in a graph with a registered id; returns the first element read after it."""
    with tf.Graph().as_default() as graph:
      iterator = tf.compat.v1.data.make_initializable_iterator(tf.data.Dataset.range(5, 7))
      element = iterator.get_next()
      tf.compat.v1.add_to_collection("registed_dataset_id", tf.constant("1000"))
      hook = graph_estimator.DatasetInitializerHook(iterator)
      hook.begin()
      self.assertEqual(graph.get_collection("registed_dataset_id"), [])
      with tf.compat.v1.Session() as session:
        hook.after_create_session(session, None)
        return session.run(element)

  def test_not_patched_without_the_flag(self):
    before = [hook_class.begin for hook_class in _HOOK_CLASSES]
    with _env(), flagsaver.flagsaver(dataset_use_dataservice=False):
      mlp_utils.mlp_pass()
    self.assertEqual([hook_class.begin for hook_class in _HOOK_CLASSES], before)

  def test_single_process(self):
    with _env(), flagsaver.flagsaver(dataset_use_dataservice=True):
      mlp_utils.mlp_pass()
      mlp_utils.mlp_pass()
      for hook_class in _HOOK_CLASSES:
        self.assertIs(hook_class.begin, mlp_utils.begin)
      self.assertEqual(self._run_hook(), 5)

  def test_dataset_id_is_broadcast(self):
    lib = types.ModuleType("horovod.tensorflow")
    lib.broadcast = mock.Mock(side_effect=lambda tensor, root, name: tf.identity(tensor, name))
    modules = {"horovod": types.ModuleType("horovod"), "horovod.tensorflow": lib}
    modules["horovod"].tensorflow = lib
    with _env(**_mpi_env(1)), mock.patch.dict(sys.modules, modules), \
        flagsaver.flagsaver(dataset_use_dataservice=True, enable_sync_training=True):  # fmt: skip
      mlp_utils.mlp_pass()
      self.assertEqual(self._run_hook(), 5)
    lib.broadcast.assert_called_once_with(mock.ANY, 0, name="broadcast_dataset_id")
    self.assertNotEqual(lib.broadcast.call_args.args[0].dtype, tf.string)  # Horovod refuses texts.

  def test_byteps_is_chosen_by_a_switch(self):
    def broadcast_of(package):
      lib = types.ModuleType(f"{package}.tensorflow")
      lib.broadcast = mock.Mock(side_effect=lambda tensor, root, name: tf.identity(tensor, name))
      modules[package] = types.ModuleType(package)
      modules[f"{package}.tensorflow"] = modules[package].tensorflow = lib
      return lib.broadcast

    for text, want in (("0", "horovod"), ("false", "horovod"), ("1", "byteps")):
      modules = {}
      broadcasts = {package: broadcast_of(package) for package in ("horovod", "byteps")}
      with self.subTest(text), _env(**_mpi_env(1), MONOLITH_WITH_BYTEPS=text), \
          mock.patch.dict(sys.modules, modules), \
          flagsaver.flagsaver(dataset_use_dataservice=True, enable_sync_training=True):  # fmt: skip
        mlp_utils.mlp_pass()
        self._run_hook()
        called = [package for package, broadcast in broadcasts.items() if broadcast.called]
        self.assertEqual(called, [want])

  def test_without_horovod_the_data_is_read_all_the_same(self):
    modules = {"horovod": None, "horovod.tensorflow": None}
    with _env(**_mpi_env(1)), mock.patch.dict(sys.modules, modules), \
        flagsaver.flagsaver(dataset_use_dataservice=True, enable_sync_training=True):  # fmt: skip
      mlp_utils.mlp_pass()
      self.assertEqual(self._run_hook(), 5)


class MissingRolesTest(unittest.TestCase):
  """A role that is None is not in the job."""

  def _pass(self, role, **roles):
    """Returns for whom the process waited, whom it joined, the target, and the servers' mock."""
    waits, joins = [], []
    server = mock.Mock(side_effect=lambda *args: mock.Mock(target="grpc://here"))
    with _env(**{**_CLUSTER, "MLP_ROLE": role}), \
        flagsaver.flagsaver(dataset_use_dataservice=True, data_service_dispatcher=""), \
        mock.patch.object(mlp_utils.MLPEnv, "wait", lambda env, *args, **_: waits.append(args)), \
        mock.patch.object(mlp_utils.MLPEnv, "join", lambda env, *args: joins.append(args)), \
        mock.patch.object(mlp_utils.MLPEnv, "start_profiler"), \
        mock.patch.object(mlp_utils.dsvc, "DispatchServer", server), \
        mock.patch.object(mlp_utils, "_start_dsworker", server):  # fmt: skip
      mlp_utils.mlp_pass(**roles)
      return waits, joins, flags.FLAGS.data_service_dispatcher, server

  def setUp(self):
    for hook_class in _HOOK_CLASSES:
      for name in ("begin", "after_create_session"):
        self.addCleanup(setattr, hook_class, name, getattr(hook_class, name))

  def test_worker_waits_for_nobody(self):
    waits, joins, target, _ = self._pass(
      "worker", dispatcher_role=None, dsworker_role=None, ps_role=None
    )

    self.assertEqual((waits, joins, target), ([], [], "grpc://[::1]:5000"))

  def test_nobody_is_a_worker(self):
    waits, joins, target, server = self._pass("worker", worker_role=None)

    self.assertEqual((waits, joins, target), ([], [], ""))
    server.assert_not_called()

  def test_nobody_is_a_dispatcher(self):
    waits, joins, _, server = self._pass("dispatcher", dispatcher_role=None)

    self.assertEqual((waits, joins), ([], []))
    server.assert_not_called()

  def test_dispatcher_ends_with_the_platforms_worker(self):
    waits, joins, _, server = self._pass("dispatcher", worker_role=None)

    self.assertEqual((waits, joins), ([], [()]))
    server.assert_called_once()

  def test_dsworker_without_a_dispatcher_role(self):
    waits, joins, _, server = self._pass("dsworker", dispatcher_role=None)

    self.assertEqual((waits, joins), ([], [("WORKER",)]))
    self.assertEqual(server.call_args.args[1], "[::1]:5000")


class DataServiceTest(unittest.TestCase):
  def test_three_processes(self):
    dispatcher_port, dsworker_port, ssh_port = (get_free_port() for _ in range(3))
    # The extra data worker of a trainer listens on the next port.
    worker_port = get_free_port(num_successors=1)
    cluster = {"MLP_SSH_PORT": str(ssh_port)}
    ports = {"dispatcher": dispatcher_port, "dsworker": dsworker_port, "worker": worker_port}
    for role, port in ports.items():
      cluster[f"MLP_{role.upper()}_NUM"] = "1"
      cluster[f"MLP_{role.upper()}_0_PRIMARY_HOST"] = "127.0.0.1"
      cluster[f"MLP_{role.upper()}_0_PORT"] = str(port)
    processes = {}
    # The trainer comes first, so that it really has to wait for the others.
    for role in ("worker", "dsworker", "dispatcher"):
      with _env(
        **cluster, MLP_ROLE=role, MLP_ROLE_INDEX="0", MLP_PORT=str(ports[role]),
        YARN_INET_ADDR="127.0.0.1",
      ):  # fmt: skip
        process = subprocess.Popen(
          [sys.executable, "-c", _PROCESS],
          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
      self.addCleanup(process.wait)
      self.addCleanup(process.kill)
      processes[role] = process

    outputs = {role: process.communicate(timeout=240) for role, process in processes.items()}

    for role, process in processes.items():
      self.assertEqual(process.returncode, 0, f"{role}: {outputs[role][1]}")
    result = json.loads(outputs["worker"][0])
    self.assertCountEqual(result["elements"], range(200))
    self.assertEqual(result["dispatcher"], f"grpc://127.0.0.1:{dispatcher_port}")
    self.assertEqual(result["extra"], 1)


if __name__ == "__main__":
  unittest.main()
