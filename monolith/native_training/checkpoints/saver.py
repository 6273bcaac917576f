"""A saver that restores only what was lost, and never leaves a half-written newest checkpoint.

`save_utils` publishes its names; `files` describes the leftovers of a killed save.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.core.protobuf import saver_pb2
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.client import session as session_lib
from tensorflow.python.framework import device as pydev
from tensorflow.python.lib.io import file_io
from tensorflow.python.training import py_checkpoint_reader, training_util
from tensorflow.python.training import saver as tf_saver

from monolith.native_training import utils
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import restored
from monolith.native_training.checkpoints.state import (
  MONOLITH_CKPT_STATE_FILE_NAME,
  get_monolith_checkpoint_state,
)
from monolith.native_training.dense_reload_utils import CUSTOM_RESTORE_OP, calc_feed_dict
from monolith.native_training.graph import export_context

_CLEAR_NN_FILE_NAME = "clear_nn"
_PADDED_STEP_DIGITS = 8


class PsMonitor:
  """Knows which parameter servers hold their state and which are new.

  Every server process has a queue of one element, which is filled when training has begun there. A
  replaced server has an empty one.
  """

  def __init__(self, ps_num: int):
    """Builds the queues in the default graph.

    Args:
      ps_num: the number of parameter servers.
    """
    self._sizes: dict[str, tf.Tensor] = {}
    self._enqueues: dict[str, tf.Operation] = {}
    for i in range(ps_num):
      device = utils.ps_device(i)
      with tf.control_dependencies(None), tf.device(device):
        queue = tf.queue.FIFOQueue(1, tf.int32, shapes=[()], shared_name=f"ps_monitor_{i}")
        self._sizes[_task_of(device)] = queue.size()
        self._enqueues[_task_of(device)] = queue.enqueue(1)

  def is_ps_uninitialized(self, sess: tf.compat.v1.Session, device: str) -> bool:
    """Returns whether a server has no state; true for devices of other jobs."""
    size = self._sizes.get(_task_of(device))
    return size is None or sess.run(size) == 0

  def setup_ps_initialized_state(self, sess: tf.compat.v1.Session) -> None:
    """Marks all servers as initialized."""
    sizes = sess.run(self._sizes)
    sess.run([op for task, op in self._enqueues.items() if sizes[task] == 0])


def _task_of(device: str) -> str:
  """Returns job and task of a device in a canonical form; they identify the owner of state."""
  spec = tf.DeviceSpec.from_string(pydev.canonical_name(device) or "")
  return tf.DeviceSpec(job=spec.job, replica=spec.replica or 0, task=spec.task or 0).to_string()


class SaverBuilder(tf_saver.BulkSaverBuilder):
  """Remembers the restore op of every device of a sharded saver."""

  def __init__(self, write_version: int = saver_pb2.SaverDef.V2):
    super().__init__(write_version)
    self._restore_ops_per_device: dict[str, tf.Operation] = {}

  @property
  def restore_ops_per_device(self) -> dict[str, tf.Operation]:
    """Device -> one op that restores everything on it; empty for unsharded savers."""
    return self._restore_ops_per_device

  def _AddShardedRestoreOps(
    self,
    filename_tensor: tf.Tensor,
    per_device: list[tuple[str, list[Any]]],
    restore_sequentially: bool,
    reshape: bool,
  ) -> tf.Operation:
    self._restore_ops_per_device = {}
    for shard, (device, saveables) in enumerate(per_device):
      with tf.device(device):
        self._restore_ops_per_device[device] = self._AddRestoreOps(
          filename_tensor,
          saveables,
          restore_sequentially,
          reshape,
          preferred_shard=shard,
          name="restore_shard",
        )
    return tf.group(*self._restore_ops_per_device.values(), name="restore_all")


class PartialRecoverySaver(tf_saver.Saver):
  """A `tf.compat.v1.train.Saver` that restores only the servers that lost their state.

  It also keeps exempt checkpoints forever, deletes the assets of a checkpoint with it, and
  restores from checkpoints with other variable names (`dense_reload_utils`).
  """

  # It tells `restored` what it restores.
  remembers_restores = True

  # Made by the base class.
  _last_checkpoints: list[tuple[str, float]]
  _checkpoints_to_be_deleted: list[tuple[str, float]]
  _object_restore_saver: tf_saver.Saver | None

  def __init__(
    self,
    var_list: Any = None,
    reshape: bool = False,
    sharded: bool = False,
    max_to_keep: int = 5,
    keep_checkpoint_every_n_hours: float = 10000.0,
    name: str | None = None,
    restore_sequentially: bool = False,
    saver_def: saver_pb2.SaverDef | None = None,
    builder: tf_saver.BaseSaverBuilder | None = None,
    defer_build: bool = False,
    allow_empty: bool = False,
    pad_step_number: bool = False,
    save_relative_paths: bool = False,
    filename: str | None = None,
    ps_monitor: PsMonitor | None = None,
    exempt_checkpoint_paths: Iterable[str] | None = None,
    skip_save: bool = False,
    model_dir: str | None = None,
  ):
    """Builds the ops. Other arguments are those of `tf.compat.v1.train.Saver`.

    Args:
      ps_monitor: knows the servers that need to be restored; None restores all.
      exempt_checkpoint_paths: checkpoints that are never deleted, identified by base name.
      skip_save: whether another process saves.
      model_dir: the folder whose `monolith_checkpoint`, if it lists exempt checkpoints, replaces
        `exempt_checkpoint_paths`.
    """
    self._ps_monitor = ps_monitor
    self._exempt_checkpoint_paths = list(exempt_checkpoint_paths or [])
    self._skip_save = skip_save
    self._model_dir = model_dir
    self._twins: set[str] = set()
    super().__init__(
      var_list=var_list,
      reshape=reshape,
      sharded=sharded,
      max_to_keep=max_to_keep,
      keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
      name=name,
      restore_sequentially=restore_sequentially,
      saver_def=saver_def,
      builder=builder or SaverBuilder(),
      defer_build=defer_build,
      allow_empty=allow_empty,
      pad_step_number=pad_step_number,
      save_relative_paths=save_relative_paths,
      filename=filename,
    )
    # The base class uses a clock of its own.
    self._next_checkpoint_time = time.time() + self._keep_seconds()

  def _keep_seconds(self) -> float:
    saver_def = self.saver_def
    hours = self._keep_checkpoint_every_n_hours
    if saver_def is not None and not tf.executing_eagerly():
      hours = saver_def.keep_checkpoint_every_n_hours
    return hours * 3600

  def build(self) -> None:
    super().build()
    self._next_checkpoint_time = time.time() + self._keep_seconds()

  @property
  def skip_save(self) -> bool:
    return self._skip_save

  @property
  def exempt_checkpoint_paths(self) -> set[str]:
    """Base names of the checkpoints that are never deleted."""
    return {os.path.basename(path) for path in self._read_exempt_checkpoint_paths() or []}

  def _read_exempt_checkpoint_paths(self) -> list[str] | None:
    """Returns the exempt checkpoints, None if they cannot be known now."""
    if self._model_dir:
      state = get_monolith_checkpoint_state(self._model_dir)
      if state is None:
        path = os.path.join(self._model_dir, MONOLITH_CKPT_STATE_FILE_NAME)
        if tf.io.gfile.exists(path):
          return None
      elif state.exempt_model_checkpoint_paths:
        return list(state.exempt_model_checkpoint_paths)
    return self._exempt_checkpoint_paths

  def _RecordLastCheckpoint(self, latest_save_path: str) -> None:
    if not self.saver_def.max_to_keep:
      return
    self._last_checkpoints = [p for p in self._last_checkpoints if p[0] != latest_save_path]
    self._last_checkpoints.append((latest_save_path, time.time()))
    exempt = self._read_exempt_checkpoint_paths()
    if exempt is None:
      logging.error("No checkpoint is deleted as long as it is unknown which ones are exempt.")
      return
    names = {os.path.basename(path) for path in exempt}
    counted = [p for p in self._last_checkpoints if os.path.basename(p[0]) not in names]
    excess = counted[: max(0, len(counted) - self.saver_def.max_to_keep)]
    self._last_checkpoints = [p for p in self._last_checkpoints if p not in excess]
    self._checkpoints_to_be_deleted.extend(excess)

  def _condemn_old_checkpoints(self) -> None:
    """Chooses the old checkpoints to delete, and marks them in case the process is killed."""
    condemned = []
    for prefix, saved_time in self._checkpoints_to_be_deleted:
      if saved_time > self._next_checkpoint_time:
        self._next_checkpoint_time += self._keep_seconds()
      else:
        condemned.append((prefix, saved_time))
    self._checkpoints_to_be_deleted = condemned
    for prefix, _ in condemned:
      try:
        checkpoint_files.mark_unfinished(prefix)
      except tf.errors.OpError as e:
        logging.warning("Cannot mark the old checkpoint %s: %s", prefix, e.message)

  def _MaybeDeleteOldCheckpoints(self, meta_graph_suffix: str = "meta") -> None:
    del meta_graph_suffix  # All suffixes are deleted.
    while self._checkpoints_to_be_deleted:
      prefix, _ = self._checkpoints_to_be_deleted.pop(0)
      try:
        checkpoint_files.delete_checkpoint(prefix)
      except tf.errors.OpError as e:
        logging.warning("Cannot delete the old checkpoint %s: %s", prefix, e.message)

  def set_aside_if_recorded(self, checkpoint_file: str, latest_filename: str | None = None) -> None:
    """Points the state file to a copy of the newest checkpoint, if that is about to be overwritten.

    The copy (of links, where the file system has them) is dropped when the save has succeeded.

    Args:
      checkpoint_file: the prefix that will be written.
      latest_filename: name of the state file.
    """
    directory = os.path.dirname(checkpoint_file)
    try:
      state = tf.train.get_checkpoint_state(directory, latest_filename)
    except ValueError:
      return
    if state is None or os.path.basename(state.model_checkpoint_path) != os.path.basename(
      checkpoint_file
    ):
      return
    if not checkpoint_management.checkpoint_exists_internal(checkpoint_file):
      return
    checkpoint_files.set_aside(checkpoint_file)
    twin = checkpoint_files.twin_of(checkpoint_file)
    others = [p for p in state.all_model_checkpoint_paths if p != state.model_checkpoint_path]
    self._twins.add(twin)
    self._write_state(directory, twin, [*others, twin], latest_filename)
    checkpoint_files.mark_finished(twin)
    self._last_checkpoints = [
      (twin, saved_time) if path == checkpoint_file else (path, saved_time)
      for path, saved_time in self._last_checkpoints
    ]

  def _drop_twin(self, checkpoint_file: str) -> None:
    twin = checkpoint_files.twin_of(checkpoint_file)
    if twin in self._twins or twin in self.last_checkpoints:
      self._twins.discard(twin)
      self._last_checkpoints = [p for p in self._last_checkpoints if p[0] != twin]
      self._checkpoints_to_be_deleted.append((twin, 0.0))

  def _write_state(
    self, directory: str, newest: str, paths: list[str], latest_filename: str | None
  ) -> None:
    checkpoint_management.update_checkpoint_state_internal(
      save_dir=directory,
      model_checkpoint_path=newest,
      all_model_checkpoint_paths=paths,
      latest_filename=latest_filename,
      save_relative_paths=self._save_relative_paths,
    )

  def save(
    self,
    sess: tf.compat.v1.Session | None,
    save_path: str,
    global_step: Any = None,
    latest_filename: str | None = None,
    meta_graph_suffix: str = "meta",
    write_meta_graph: bool = True,
    write_state: bool = True,
    strip_default_attrs: bool = False,
    save_debug_info: bool = False,
  ) -> str | None:
    """Saves variables as the base class does, but writes the state file last, after the meta graph.

    Returns:
      The prefix of the checkpoint; None for an empty saver and with `skip_save`.

    Raises:
      ValueError: the folder does not exist, or `latest_filename` is bad.
    """
    if self._skip_save:
      return None
    eager = tf.executing_eagerly()
    if not self._is_built and not eager:
      raise RuntimeError("`build()` should be called before save if defer_build==True")
    latest_filename = latest_filename or "checkpoint"
    if os.path.split(latest_filename)[0]:
      raise ValueError("'latest_filename' must not contain path components")
    save_path = tf.compat.as_str(save_path)
    checkpoint_file = self._get_checkpoint_file(sess, save_path, global_step, latest_filename)
    if not eager and not isinstance(sess, session_lib.SessionInterface):
      raise TypeError(f"'sess' must be a Session; {sess}")

    directory = os.path.dirname(save_path)
    try:
      if write_state and not self._is_empty:
        self.set_aside_if_recorded(checkpoint_file, latest_filename)
      model_checkpoint_path = self._write_variables(sess, checkpoint_file)
      checkpoint_files.write_manifest(checkpoint_file)
      if write_meta_graph and not eager:
        self._write_meta_graph(
          sess, checkpoint_file, meta_graph_suffix, strip_default_attrs, save_debug_info
        )
      if write_state and model_checkpoint_path is not None:
        self._drop_twin(checkpoint_file)
        self._RecordLastCheckpoint(model_checkpoint_path)
        self._condemn_old_checkpoints()
        self._write_state(directory, model_checkpoint_path, self.last_checkpoints, latest_filename)
        self._MaybeDeleteOldCheckpoints(meta_graph_suffix=meta_graph_suffix)
    except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError) as e:
      if not tf.io.gfile.isdir(directory):
        raise ValueError(f"Parent directory of {save_path} doesn't exist, can't save.") from e
      raise
    return model_checkpoint_path

  def _get_checkpoint_file(
    self, sess: Any, save_path: str, global_step: Any, latest_filename: str
  ) -> str:
    if global_step is None:
      if os.path.basename(save_path) == latest_filename and not self._sharded:
        raise ValueError(
          f"'latest_filename' collides with 'save_path': '{latest_filename}' and '{save_path}'"
        )
      return save_path
    if not isinstance(global_step, tf.compat.integral_types):
      global_step = training_util.global_step(sess, global_step)
    width = _PADDED_STEP_DIGITS if self._pad_step_number else 0
    return f"{save_path}-{global_step:0{width}d}"

  def _write_variables(self, sess: Any, checkpoint_file: str) -> str | None:
    if self._is_empty:
      return None
    if tf.executing_eagerly():
      self._build_eager(checkpoint_file, build_save=True, build_restore=False)
      return tf.compat.as_str(self.saver_def.save_tensor_name)
    saved = sess.run(
      self.saver_def.save_tensor_name, {self.saver_def.filename_tensor_name: checkpoint_file}
    )
    return tf.compat.as_str(saved)

  def _write_meta_graph(
    self,
    sess: tf.compat.v1.Session,
    checkpoint_file: str,
    suffix: str,
    strip_default_attrs: bool,
    save_debug_info: bool,
  ) -> None:
    filename = checkpoint_management.meta_graph_filename(checkpoint_file, meta_graph_suffix=suffix)
    with sess.graph.as_default():
      self.export_meta_graph(
        filename, strip_default_attrs=strip_default_attrs, save_debug_info=save_debug_info
      )

  def restore(self, sess: tf.compat.v1.Session | None, save_path: str) -> None:
    """Restores variables as the base class does.

    Runs the restore that `dense_reload_utils.CustomRestoreListener` left in the graph, if any,
    instead, once.

    Tables and filters of a session that starts come from the same checkpoint (`restored`).

    Raises:
      ValueError: there is no checkpoint `save_path`.
      tf.errors.DataLossError: one of its files is damaged; the message names it. Or it is a
        `CheckpointChangedError`: it was deleted meanwhile.
    """
    if sess is None or save_path is None:
      self._restore(sess, save_path)
      return
    restored.begin(sess, tf.compat.as_text(save_path))
    try:
      self._restore(sess, save_path)
    except (tf.errors.OpError, ValueError) as e:
      restored.check(sess, e)
      raise

  def _restore(self, sess: tf.compat.v1.Session | None, save_path: str) -> None:
    graph = getattr(sess, "graph", None)
    if export_context.is_exporting() or graph is None or self._is_empty:
      self._origin_restore(sess, save_path)
      return
    custom_restores = graph.get_collection(CUSTOM_RESTORE_OP)
    if not custom_restores:
      self._origin_restore(sess, save_path)
    else:
      restore_ops, placeholders, alias_map = custom_restores[0]
      if alias_map is not None:
        self._restore_with_alias_map(sess, save_path, restore_ops, placeholders, alias_map)
      else:
        self._clear_nn(sess, save_path, restore_ops, placeholders)
      # Not with `clear_collection`, which a finalized graph refuses.
      del graph.get_collection_ref(CUSTOM_RESTORE_OP)[:]
    self._create_shared_resources(sess)

  def _create_shared_resources(self, sess: tf.compat.v1.Session) -> None:
    """Creates tables: a session manager that restores does not run the init op.

    Without this, no monitored session with a group of tables could start from a checkpoint.
    """
    resources = sess.graph.get_collection(tf.compat.v1.GraphKeys.RESOURCES)
    ready = sess.run([resource.is_initialized for resource in resources])
    sess.run([resource.create for resource, is_ready in zip(resources, ready) if not is_ready])

  def _restore_with_alias_map(
    self, sess: Any, save_path: str, restore_ops: list, placeholders: list, alias_map: dict
  ) -> None:
    self._check_checkpoint_exists(save_path)
    reader = py_checkpoint_reader.NewCheckpointReader(save_path)
    is_partial = getattr(restore_ops[0], "is_partial", False)
    # New servers were found before the session chose its checkpoint.
    known = sorted(
      set(getattr(restore_ops[0], "new", ())) & set(reader.get_variable_to_shape_map())
    )
    if known:
      raise tf.errors.DataLossError(
        None,
        None,
        f"{save_path} has {known}, which an older checkpoint did not have: another process saves "
        "in this folder. Start again.",
      )
    feed_dict = calc_feed_dict(reader, alias_map, placeholders, always=is_partial)
    if feed_dict is None:
      self._origin_restore(sess, save_path)
    else:
      logging.info("Restoring parameters one by one from %s", save_path)
      sess.run(restore_ops, feed_dict)

  def _clear_nn(self, sess: Any, save_path: str, restore_ops: list, placeholders: list) -> None:
    flag_file = os.path.join(restore_ops[0].model_dir, _CLEAR_NN_FILE_NAME)
    if tf.io.gfile.exists(flag_file):
      self._origin_restore(sess, save_path)
      return
    logging.info("Initializing all variables again, instead of restoring %s", save_path)
    sess.run(restore_ops[0])
    if len(restore_ops) > 1:
      self._check_checkpoint_exists(save_path)
      reader = py_checkpoint_reader.NewCheckpointReader(save_path)
      global_step = reader.get_tensor(tf.compat.v1.GraphKeys.GLOBAL_STEP)
      sess.run(restore_ops[1:], {placeholders[0]: global_step})
    file_io.atomic_write_string_to_file(flag_file, "")

  def _check_checkpoint_exists(self, save_path: str) -> None:
    if save_path is None:
      raise ValueError("Can't load save_path when it is None.")
    if not checkpoint_management.checkpoint_exists_internal(tf.compat.as_text(save_path)):
      raise ValueError(
        f"The passed save_path is not a valid checkpoint: {tf.compat.as_text(save_path)} "
        f"has no index. {checkpoint_files.remedy(tf.compat.as_text(save_path))}"
      )

  def _origin_restore(self, sess: Any, save_path: str) -> None:
    """Restores device by device, leaving out servers that hold their state."""
    if self._is_empty:
      return
    self._check_checkpoint_exists(save_path)
    save_path = tf.compat.as_text(save_path)
    self._raise_if_damaged(save_path, checkpoint_files.find_wrong_size(save_path))
    logging.info("Restoring parameters from %s", save_path)
    try:
      if tf.executing_eagerly():
        self._build_eager(save_path, build_save=False, build_restore=True)
      else:
        sess.run(self._get_restore_ops(sess), {self.saver_def.filename_tensor_name: save_path})
    except tf.errors.OpError as e:
      self._explain_damage(save_path, e)
      if isinstance(e, tf.errors.NotFoundError):
        self._restore_object_based(sess, save_path, e)
      elif isinstance(e, tf.errors.InvalidArgumentError):
        raise tf_saver._wrap_restore_error_with_msg(
          e, "a mismatch between the current graph and the graph"
        ) from e
      else:
        raise

  def _get_restore_ops(self, sess: tf.compat.v1.Session) -> list:
    per_device = getattr(self._builder, "restore_ops_per_device", None)
    if self._ps_monitor is None or not per_device:
      return [self.saver_def.restore_op_name]
    lost = [d for d in per_device if self._ps_monitor.is_ps_uninitialized(sess, d)]
    logging.info("Devices to be restored: %s of %s", lost, list(per_device))
    return [per_device[device] for device in lost]

  def _explain_damage(self, save_path: str, error: tf.errors.OpError) -> None:
    """Raises a better error if the files of the checkpoint are bad."""
    if isinstance(error, (tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
      # The graph has probably changed: no reason to read everything.
      damage = checkpoint_files.find_missing_file(save_path)
    elif isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
      # A server is gone; the session will be made again.
      damage = None
    else:
      damage = checkpoint_files.find_damaged_variables(save_path)
    self._raise_if_damaged(save_path, damage, error)

  def _raise_if_damaged(
    self, save_path: str, damage: str | None, cause: tf.errors.OpError | None = None
  ) -> None:
    if damage is not None:
      raise tf.errors.DataLossError(
        cause and cause.node_def,
        cause and cause.op,
        f"Cannot restore the checkpoint {save_path}: {damage}. "
        + checkpoint_files.remedy(save_path),
      ) from cause

  def _restore_object_based(
    self, sess: Any, save_path: str, error: tf.errors.NotFoundError
  ) -> None:
    """Tries to read an object-based checkpoint, when a variable was not found by name."""
    try:
      names_to_keys = tf_saver.object_graph_key_mapping(save_path)
    except tf.errors.NotFoundError:
      raise tf_saver._wrap_restore_error_with_msg(
        error, "a Variable name or other graph key that is missing"
      ) from error
    logging.warning(
      "Restoring an object-based checkpoint using a name-based saver, which builds it again. "
      "Consider tf.train.Checkpoint."
    )
    self._object_restore_saver = tf_saver.saver_from_object_based_checkpoint(
      checkpoint_path=save_path,
      var_list=self._var_list,
      builder=self._builder,
      names_to_keys=names_to_keys,
      cached_saver=self._object_restore_saver,
    )
    self._object_restore_saver.restore(sess=sess, save_path=save_path)

  def setup_ps_initialized_state(self, sess: tf.compat.v1.Session) -> None:
    """Marks all servers as holding their state, so that it is not restored again."""
    if self._ps_monitor is not None:
      self._ps_monitor.setup_ps_initialized_state(sess)
