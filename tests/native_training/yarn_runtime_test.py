import contextlib
import os
import shutil
import tempfile
import threading
import time
import unittest
from concurrent import futures
from unittest import mock

import grpc

from monolith.native_training import yarn_runtime
from monolith.native_training.proto import primus_am_service_pb2 as pb
from monolith.native_training.proto import primus_am_service_pb2_grpc as pb_grpc

_States = pb.CreateSavepointStatusResponse.CreateSavepointState


def _env(**values):
  """Returns the environment with exactly these of the variables that the module reads."""
  names = ("CLOUDNATIVE_INET_ADDR", "YARN_INET_ADDR", "PRIMUS_AM_RPC_HOST", "PRIMUS_AM_RPC_PORT")
  clean = {name: value for name, value in os.environ.items() if name not in names}
  return mock.patch.dict(os.environ, {**clean, **values}, clear=True)


class YarnRuntimeTest(unittest.TestCase):
  def setUp(self):
    # Unix sockets are made in the current folder; their paths have to be short.
    self._folder = tempfile.mkdtemp()
    self._old_folder = os.getcwd()
    os.chdir(self._folder)
    self.addCleanup(shutil.rmtree, self._folder)
    self.addCleanup(os.chdir, self._old_folder)

  @contextlib.contextmanager
  def _primus(self, name, **handlers):
    """A real master at `unix:<name>` with these methods, and the variables that point to it."""
    servicer = pb_grpc.AppMasterServiceServicer()
    for method, handler in handlers.items():
      setattr(servicer, method, handler)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    pb_grpc.add_AppMasterServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{name}")
    server.start()
    try:
      with _env(PRIMUS_AM_RPC_HOST="unix", PRIMUS_AM_RPC_PORT=name):
        yield
    finally:
      server.stop(None).wait()

  def test_get_local_host_overwrite(self):
    with _env(YARN_INET_ADDR="1.2.3.4"):
      self.assertEqual(yarn_runtime.get_local_host(), "1.2.3.4")

  def test_get_local_host_overwrite_by_cloudnative(self):
    with _env(CLOUDNATIVE_INET_ADDR="1.2.3.4,5.6.7.8", YARN_INET_ADDR="9.9.9.9"):
      self.assertEqual(yarn_runtime.get_local_host(), "1.2.3.4")

  def test_get_local_host_basic(self):
    with _env():
      self.assertTrue(yarn_runtime.get_local_host())

  def test_get_local_host_empty(self):
    with _env(YARN_INET_ADDR=""), self.assertRaises(AssertionError):
      yarn_runtime.get_local_host()

  def test_kill(self):
    requests = []

    def kill(request, context):
      requests.append(request)
      return pb.KillResponse()

    with self._primus("test_kill", kill=kill):
      self.assertIs(yarn_runtime.maybe_kill_application("some reason"), True)

    (request,) = requests
    self.assertEqual(request.diagnose, "some reason")
    self.assertEqual(request.exit_code, 1)
    self.assertEqual(request.graceful_shutdown_timeout_ms.value, 20000)

  def test_finish(self):
    requests = []

    def succeed(request, context):
      requests.append(request)
      return pb.SucceedResponse()

    with self._primus("test_succeed", succeed=succeed):
      self.assertIs(yarn_runtime.maybe_finish_application(), True)

    self.assertEqual(requests[0].graceful_shutdown_timeout_ms.value, 20000)

  def test_save_primus(self):
    def create_savepoint(request, context):
      self.assertEqual(request.savepoint_dir, "/some/dir")
      return pb.CreateSavepointResponse(code=0, savepoint_id="id1")

    def status(request, context):
      self.assertEqual(request.savepoint_restore_id, "id1")
      return pb.CreateSavepointStatusResponse(create_savepoint_state=_States.SUCCEEDED)

    with self._primus(
      "test_save_primus", createSavepoint=create_savepoint, createSavepointStatus=status
    ):
      self.assertIs(yarn_runtime.create_primus_save_point("/some/dir"), True)

  def test_save_primus_waits_for_a_running_savepoint(self):
    states = [_States.PENDING, _States.RUNNING, _States.SUCCEEDED]
    sleeps = []

    with self._primus(
      "test_wait",
      createSavepoint=lambda request, context: pb.CreateSavepointResponse(),
      createSavepointStatus=lambda request, context: pb.CreateSavepointStatusResponse(
        create_savepoint_state=states.pop(0)
      ),
    ), mock.patch("time.sleep", sleeps.append):  # fmt: skip
      self.assertIs(yarn_runtime.create_primus_save_point("d"), True)

    self.assertEqual(sleeps, [5, 5])
    self.assertEqual(states, [])

  def test_save_primus_failures(self):
    def refuse(request, context):
      return pb.CreateSavepointResponse(code=3, message="no space")

    def accept(request, context):
      return pb.CreateSavepointResponse()

    def failed(request, context):
      return pb.CreateSavepointStatusResponse(create_savepoint_state=_States.FAILED)

    def broken(request, context):
      context.abort(grpc.StatusCode.INTERNAL, "broken")

    for name, handlers in {
      "refused": {"createSavepoint": refuse},
      "failed": {"createSavepoint": accept, "createSavepointStatus": failed},
      "status_error": {"createSavepoint": accept, "createSavepointStatus": broken},
      "error": {"createSavepoint": broken},
    }.items():
      with self.subTest(name), self._primus(name, **handlers):
        self.assertIs(yarn_runtime.create_primus_save_point("d"), False)

  def test_server_answers_an_error(self):
    def fail(request, context):
      context.abort(grpc.StatusCode.PERMISSION_DENIED, "not yours")

    with self._primus("test_error", kill=fail, succeed=fail):
      self.assertIs(yarn_runtime.maybe_kill_application("reason"), False)
      self.assertIsNone(yarn_runtime.maybe_finish_application())

  def test_server_answers_late(self):
    release = threading.Event()
    self.addCleanup(release.set)

    def late(request, context):
      release.wait(60)
      return pb.KillResponse()

    with self._primus("test_late", kill=late), \
        mock.patch.object(yarn_runtime, "_RPC_TIMEOUT_SECS", 0.2):  # fmt: skip
      start = time.monotonic()
      self.assertIs(yarn_runtime.maybe_kill_application("reason"), False)
      self.assertLess(time.monotonic() - start, 30)
      release.set()

  def test_server_is_not_there(self):
    with _env(PRIMUS_AM_RPC_HOST="unix", PRIMUS_AM_RPC_PORT="nobody"):
      self.assertIs(yarn_runtime.maybe_kill_application("reason"), False)
      self.assertIsNone(yarn_runtime.maybe_finish_application())
      self.assertIs(yarn_runtime.create_primus_save_point("d"), False)

  def test_no_master_configured(self):
    for values in ({}, {"PRIMUS_AM_RPC_HOST": "h"}, {"PRIMUS_AM_RPC_PORT": "1"}):
      with _env(**values):
        self.assertEqual(yarn_runtime._get_primus_am_host(), "")
        self.assertIs(yarn_runtime.maybe_kill_application("reason"), False)
        self.assertIsNone(yarn_runtime.maybe_finish_application())
        self.assertIsNone(yarn_runtime.create_primus_save_point("d"))

  def test_threads_share_one_channel(self):
    barrier = threading.Barrier(8)

    def get():
      barrier.wait()
      return yarn_runtime._get_channel("unix:shared")

    with futures.ThreadPoolExecutor(8) as pool:
      channels = [f.result() for f in [pool.submit(get) for _ in range(8)]]

    self.assertEqual(len(set(map(id, channels))), 1)
    self.assertIs(yarn_runtime._CHANNEL_MAP["unix:shared"], channels[0])
    self.assertIsNot(yarn_runtime._get_channel("unix:other"), channels[0])


if __name__ == "__main__":
  unittest.main()
