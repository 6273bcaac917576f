"""A gRPC server in the chief, through which a training run is controlled.

Differences from ByteDance's Monolith: the server listens only on the address that it announces.
"""

from __future__ import annotations

import os
from concurrent import futures

import grpc
import tensorflow as tf
from absl import logging
from tensorflow.python.lib.io import file_io
from tensorflow.python.training import training_util

from monolith.native_training import barrier_ops, net_utils, save_utils
from monolith.native_training.hooks.server import constants, service_pb2, service_pb2_grpc

_NUM_THREADS = 2
_STOP_GRACE_SECONDS = 20


class ControllerServicer(service_pb2_grpc.ControllerServicer):
  """The service, on a session that trains in another thread."""

  def __init__(
    self,
    session: tf.compat.v1.Session,
    barrier_op: barrier_ops.BarrierOp,
    saver_hook: save_utils.NoFirstSaveCheckpointSaverHook,
    global_step: tf.Tensor,
  ):
    self._session = session
    self._barrier_op = barrier_op
    self._saver_hook = saver_hook
    self._global_step = global_step

  def StopTraining(self, request, context):
    try:
      self._barrier_op.place_barrier(self._session)
    except barrier_ops.BarrierAlreadyPlacedError:
      context.abort(grpc.StatusCode.ALREADY_EXISTS, "Barrier is placed already.")
    return service_pb2.StopTrainingResponse()

  def ResumeTraining(self, request, context):
    self._barrier_op.remove_barrier(self._session)
    return service_pb2.ResumeTrainingResponse()

  def GetBlockStatus(self, request, context):
    return service_pb2.GetBlockStatusResponse(
      blocked_indices=self._barrier_op.get_blocked_indices(self._session),
      unblocked_indices=self._barrier_op.get_unblocked_indices(self._session),
    )

  def SaveCheckpoint(self, request, context):
    try:
      self._saver_hook.trigger_save(self._session)
    except Exception as e:
      logging.exception("The checkpoint that the controller was asked for is not saved.")
      context.abort(grpc.StatusCode.INTERNAL, f"The checkpoint is not saved: {e}")
    return service_pb2.SaveCheckpointResponse()

  def GetTrainingStatus(self, request, context):
    return service_pb2.GetTrainingStatusResponse(
      global_step=int(self._session.run(self._global_step))
    )


class ServerHook(tf.compat.v1.train.SessionRunHook):
  """Serves the controller of a session, and writes its address into the model folder."""

  def __init__(
    self,
    model_dir: str,
    barrier_op: barrier_ops.BarrierOp,
    saver_hook: save_utils.NoFirstSaveCheckpointSaverHook,
  ):
    self._model_dir = model_dir
    self._barrier_op = barrier_op
    self._saver_hook = saver_hook
    self._global_step: tf.Tensor | None = None
    self._server: grpc.Server | None = None

  def begin(self) -> None:
    self._global_step = training_util._get_or_create_global_step_read()
    if self._global_step is None:
      raise RuntimeError("Global step should be created to use ServerHook.")

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._stop()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=_NUM_THREADS))
    service_pb2_grpc.add_ControllerServicer_to_server(
      ControllerServicer(session, self._barrier_op, self._saver_hook, self._global_step), server
    )
    port = server.add_insecure_port(net_utils.get_local_server_addr(0))
    if port == 0:
      raise RuntimeError(f"cannot listen on {net_utils.get_local_ip()}")
    server.start()
    self._server = server
    address = net_utils.get_local_server_addr(port)
    tf.io.gfile.makedirs(self._model_dir)
    file_io.atomic_write_string_to_file(
      os.path.join(self._model_dir, constants.SERVER_ADDR_FILENAME), address
    )
    logging.info("The controller listens on %s", address)
    net_utils.warn_if_public(address, "The controller")

  def end(self, session: tf.compat.v1.Session) -> None:
    self._stop()

  def _stop(self) -> None:
    if self._server is not None:
      self._server.stop(_STOP_GRACE_SECONDS).wait()
      self._server = None
