"""Local host of a YARN container, and control of the application through the Primus master.

Without `PRIMUS_AM_RPC_HOST` and `PRIMUS_AM_RPC_PORT` the application calls do nothing. Channels
are cached per address.

Differences from ByteDance's Monolith: the cache is locked.
"""

import os
import threading
import time
from typing import Optional

import grpc
from absl import logging

from monolith.native_training import net_utils
from monolith.native_training.proto import primus_am_service_pb2, primus_am_service_pb2_grpc

_RPC_TIMEOUT_SECS = 10
_GRACEFUL_SHUTDOWN_TIMEOUT_MS = 20000
_SAVEPOINT_POLL_SECS = 5

_CHANNEL_MAP: dict[str, grpc.Channel] = {}
_CHANNEL_MAP_LOCK = threading.Lock()


def get_local_host() -> str:
  """Returns the address under which other containers reach this one."""
  if "CLOUDNATIVE_INET_ADDR" in os.environ:
    host = os.environ["CLOUDNATIVE_INET_ADDR"].split(",")[0]
  elif "YARN_INET_ADDR" in os.environ:
    host = os.environ["YARN_INET_ADDR"]
  else:
    host = net_utils.get_local_ip()
  assert host, "the local host is empty, check CLOUDNATIVE_INET_ADDR and YARN_INET_ADDR"
  return host


def _get_primus_am_host() -> str:
  host = os.environ.get("PRIMUS_AM_RPC_HOST")
  port = os.environ.get("PRIMUS_AM_RPC_PORT")
  return f"{host}:{port}" if host and port else ""


def _get_channel(addr: str) -> grpc.Channel:
  with _CHANNEL_MAP_LOCK:
    if addr not in _CHANNEL_MAP:
      _CHANNEL_MAP[addr] = grpc.insecure_channel(addr)
    return _CHANNEL_MAP[addr]


def _get_stub(addr: str) -> primus_am_service_pb2_grpc.AppMasterServiceStub:
  return primus_am_service_pb2_grpc.AppMasterServiceStub(_get_channel(addr))


def maybe_kill_application(reason: str) -> bool:
  """Asks the master to kill the application.

  Returns:
    Whether the master accepted; False also when there is no master.
  """
  addr = _get_primus_am_host()
  if not addr:
    logging.info("Current framework doesn't support kill. Ignore killing...")
    return False
  req = primus_am_service_pb2.KillRequest(exit_code=1, diagnose=reason)
  req.graceful_shutdown_timeout_ms.value = _GRACEFUL_SHUTDOWN_TIMEOUT_MS
  try:
    _get_stub(addr).kill(req, timeout=_RPC_TIMEOUT_SECS)
  except grpc.RpcError as e:
    logging.error("Failed to kill application: %s", e)
    return False
  logging.info("Successfully killed application.")
  return True


def maybe_finish_application() -> Optional[bool]:
  """Marks the application as succeeded.

  Returns:
    True when the master accepted, None when it failed or there is no master.
  """
  addr = _get_primus_am_host()
  if not addr:
    return None
  req = primus_am_service_pb2.SucceedRequest()
  req.graceful_shutdown_timeout_ms.value = _GRACEFUL_SHUTDOWN_TIMEOUT_MS
  try:
    _get_stub(addr).succeed(req, timeout=_RPC_TIMEOUT_SECS)
  except grpc.RpcError as e:
    logging.error("Failed to finish application: %s", e)
    return None
  logging.info("Successfully mark the application success.")
  return True


def create_primus_save_point(dst: str) -> Optional[bool]:
  """Has the master write a savepoint to `dst`, and waits until it is done.

  Returns:
    True when it was written, False on any failure, None when there is no master.
  """
  addr = _get_primus_am_host()
  if not addr:
    return None
  stub = _get_stub(addr)
  try:
    created = stub.createSavepoint(
      primus_am_service_pb2.CreateSavepointRequest(savepoint_dir=dst), timeout=_RPC_TIMEOUT_SECS
    )
    if created.code != 0:
      logging.error("Failed to create primus save point: %s", created.message)
      return False
    return _wait_for_savepoint(stub, created.savepoint_id)
  except grpc.RpcError as e:
    logging.error("Failed to create primus save point: %s", e)
    return False


def _wait_for_savepoint(
  stub: primus_am_service_pb2_grpc.AppMasterServiceStub, savepoint_id: str
) -> bool:
  states = primus_am_service_pb2.CreateSavepointStatusResponse.CreateSavepointState
  req = primus_am_service_pb2.CreateSavepointStatusRequest(savepoint_restore_id=savepoint_id)
  while True:
    status = stub.createSavepointStatus(req, timeout=_RPC_TIMEOUT_SECS)
    state = status.create_savepoint_state
    if state == states.SUCCEEDED:
      logging.info("Create primus save point succeeded.")
      return True
    if state not in (states.PENDING, states.RUNNING):
      logging.error("Failed to create primus save point: %s", status)
      return False
    time.sleep(_SAVEPOINT_POLL_SECS)
