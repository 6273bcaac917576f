"""Lets an operator stop a training run or save a checkpoint, through a variable or a file.

Differences from ByteDance's Monolith: an unknown action is answered as such.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging
from google.protobuf import text_format
from tensorflow.python.lib.io import file_io

from monolith.native_training import barrier_ops, utils
from monolith.native_training.hooks.controller_hooks_pb2 import ControllerHooksProto

STOP_ACTION = "Stop"
# Seconds between looks at the request file.
QUERY_INTERVAL = 60

_MAX_STOP_SECONDS = 30
_POLL_SECONDS = 0.1
_REQUEST_FILE = "monolith_action"
_RESPONSE_FILE = "monolith_action_response"

_STOP, _TRIGGER_SAVE = 0, 1


class ControllerHook(tf.compat.v1.train.SessionRunHook):
  """Does after a step what `stop_op` or `trigger_save_op`, run in any process, asks for."""

  def __init__(
    self,
    num_ps: int = 0,
    barrier_op: barrier_ops.BarrierOp | None = None,
    trigger_save: Callable[[], None] | None = None,
  ):
    """Builds the variable and its ops.

    Args:
      num_ps: the number of parameter servers; the variable is on the first of them.
      barrier_op: stops the workers.
      trigger_save: saves a checkpoint.
    """
    self._barrier_op = barrier_op
    self._trigger_save = trigger_save
    with tf.device(utils.ps_device(0) if num_ps > 0 else None):
      self._control_var = tf.compat.v1.get_variable(
        "control_var",
        initializer=[False, False],
        dtype=tf.bool,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
      )
      self._control = self._control_var.read_value()
      self._stop_op = self._set(_STOP, True)
      self._trigger_save_op = self._set(_TRIGGER_SAVE, True)
      self._reset_trigger_save_op = self._set(_TRIGGER_SAVE, False)

  def _set(self, index: int, value: bool) -> tf.Operation:
    return tf.group(tf.compat.v1.scatter_update(self._control_var, [index], [value]))

  @property
  def stop_op(self) -> tf.Operation:
    return self._stop_op

  @property
  def trigger_save_op(self) -> tf.Operation:
    return self._trigger_save_op

  def before_run(
    self, run_context: tf.compat.v1.train.SessionRunContext
  ) -> tf.compat.v1.train.SessionRunArgs:
    return tf.compat.v1.train.SessionRunArgs(self._control)

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    session = run_context.session
    if run_values.results[_STOP]:
      self._stop(session)
    elif run_values.results[_TRIGGER_SAVE]:
      session.run(self._reset_trigger_save_op)
      if self._trigger_save is not None:
        self._trigger_save()

  def _stop(self, session: tf.compat.v1.Session) -> None:
    if self._barrier_op is None:
      return
    self._barrier_op.place_barrier(session, STOP_ACTION)
    deadline = time.monotonic() + _MAX_STOP_SECONDS
    while not self._barrier_op.is_all_blocked(session) and time.monotonic() < deadline:
      time.sleep(_POLL_SECONDS)
    # Every worker that waited has seen the action and stops when it is let go.
    self._barrier_op.remove_barrier(session)


class StopHelper:
  """Stops a session for which a barrier with `STOP_ACTION` was placed."""

  def __init__(self):
    self._should_stop = False

  def create_barrier_callback(self) -> barrier_ops.BarrierCallback:
    """Returns the callback to give to the `BarrierOp`."""

    def remember_stop(action: str, session: tf.compat.v1.Session) -> None:
      if action == STOP_ACTION:
        self._should_stop = True

    return remember_stop

  def create_stop_hook(self) -> tf.compat.v1.train.SessionRunHook:
    """Returns the hook that requests the stop."""
    return _StopHook(self)

  @property
  def should_stop(self) -> bool:
    return self._should_stop


class _StopHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self, helper: StopHelper):
    self._helper = helper

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    if self._helper.should_stop:
      run_context.request_stop()


class QueryActionHook(tf.compat.v1.train.SessionRunHook):
  """Runs actions that an operator writes into `<model_dir>/monolith_action`.

  The file holds a text `ControllerHooksProto`. It is deleted, and the answer, `OK` or an error, is
  in `monolith_action_response` beside it.
  """

  def __init__(self, model_dir: str, hook: ControllerHook):
    self._request_path = os.path.join(model_dir, _REQUEST_FILE)
    self._response_path = os.path.join(model_dir, _RESPONSE_FILE)
    self._hook = hook
    self._stopped = threading.Event()
    self._thread: threading.Thread | None = None

  def after_create_session(
    self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
  ) -> None:
    self._stop_thread()
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=self._poll, args=(session, self._stopped), name="QueryAction", daemon=True
    )
    self._thread.start()

  def end(self, session: tf.compat.v1.Session) -> None:
    self._stop_thread()

  def _stop_thread(self) -> None:
    if self._thread is not None:
      self._stopped.set()
      self._thread.join()
      self._thread = None

  def _poll(self, session: tf.compat.v1.Session, stopped: threading.Event) -> None:
    while not stopped.wait(QUERY_INTERVAL):
      try:
        self._look_for_request(session)
      except Exception:  # A bad disk or request must not end the thread.
        logging.exception("Error when looking for %s", self._request_path)

  def _look_for_request(self, session: tf.compat.v1.Session) -> None:
    if not tf.io.gfile.exists(self._request_path):
      return
    try:
      with tf.io.gfile.GFile(self._request_path) as f:
        text = f.read()
      self._respond(self._run_action(session, text))
    finally:
      tf.io.gfile.remove(self._request_path)

  def _run_action(self, session: tf.compat.v1.Session, text: str) -> str:
    try:
      action = text_format.Parse(text, ControllerHooksProto()).action
      if action == ControllerHooksProto.TRIGGER_SAVE:
        session.run(self._hook.trigger_save_op)
      elif action == ControllerHooksProto.STOP:
        session.run(self._hook.stop_op)
      else:
        return f"Unknown action: {text}"
    except (text_format.ParseError, tf.errors.OpError, RuntimeError) as e:
      return str(e)
    return "OK"

  def _respond(self, text: str) -> None:
    file_io.atomic_write_string_to_file(self._response_path, text)
