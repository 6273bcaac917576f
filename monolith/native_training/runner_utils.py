"""`RunnerConfig`, the choice of a discovery, and restoring from a chosen checkpoint.

Importing this module replaces TensorFlow's `get_checkpoint_state` (in
`tensorflow.python.checkpoint.checkpoint_management`, `tf.train` and `tf.compat.v1.train`) by one
that honours `--restore_ckpt`, so that Estimator and `tf.train.latest_checkpoint` do too. This is
done once, however often the module is loaded. `os.path.isabs` is left alone: `hdfs:/` paths are
resolved here.

It also defines a flag for nearly every field of `RunnerConfig`; import it before flags are parsed.
"""

import contextlib
import dataclasses
import enum
import functools
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Callable, Optional

import tensorflow as tf
from absl import flags, logging
from google.protobuf import text_format
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.lib.io import file_io
from tensorflow.python.training import checkpoint_management as checkpoint_management_shim
from tensorflow.python.training.checkpoint_state_pb2 import CheckpointState

from monolith.native_training import env_utils, gflags_utils, graph_estimator, save_utils
from monolith.native_training.checkpoints import state as checkpoint_state
from monolith.native_training.mlp_utils import add_mpi_exception_hook, mlp_pass
from monolith.native_training.monolith_checkpoint_state_pb2 import MonolithCheckpointState
from monolith.native_training.net_utils import AddressFamily
from monolith.native_training.service_discovery import (
  ConsulServiceDiscovery,
  MLPServiceDiscovery,
  ServiceDiscovery,
  ServiceDiscoveryType,
  TfConfigServiceDiscovery,
  ZKServiceDiscovery,
)
from monolith.native_training.settings import rank_environment as mpi_utils
from monolith.native_training.settings.training_config import DistributedCpuTrainingConfig

FLAGS = flags.FLAGS

_CHECKPOINT_FILE = "checkpoint"
_RESTORE_MARKER_FILE = "restore_ckpt"

_MAX_READ_RETRIES = 5
_FIRST_READ_BACKOFF_SECS = 0.1
_CHECKPOINT_POLL_SECS = 30

# Input pipelines and models read these from their flags.
_READ_THROUGH_FLAGS = (
  "data_type",
  "feature_list",
  "lagrangex_header",
  "sort_id",
  "kafka_dump",
  "kafka_dump_prefix",
  "input_path",
  "wildcard",
  "start_date",
  "end_date",
  "is_hourly",
  "start_hour",
  "end_hour",
  "enable_dynamic_sharding",
  "max_task_num_per_worker",
  "disable_native_metrics",
  "num_extra_dsworker_on_gpu_worker",
)

old_isabs = os.path.isabs


def isabs(path: str) -> bool:
  """Does what `os.path.isabs` does, and knows `hdfs:/` paths."""
  return path.startswith("hdfs:/") or old_isabs(path)


def gen_get_checkpoint_state() -> Callable[..., Optional[CheckpointState]]:
  """Makes the replacement of `tf.train.get_checkpoint_state` (same arguments and result).

  With `--restore_ckpt` the state points to the checkpoint of that base name, if it is still
  listed. In training this happens once per folder: the choice is written to the `checkpoint` file
  and the marker file `restore_ckpt` is left, so that a restarted job goes on from its own newest
  checkpoint. Evaluation and prediction always use the chosen one, and write nothing: they may read
  the folder of a running training job.
  """

  @functools.wraps(old_get_checkpoint_state)
  def get_checkpoint_state(checkpoint_dir, latest_filename=None):
    checkpoint_dir = os.fspath(checkpoint_dir)
    latest_filename = latest_filename or _CHECKPOINT_FILE
    state = _read_checkpoint_state(checkpoint_dir, latest_filename)
    if state is None or latest_filename != _CHECKPOINT_FILE:
      return state
    try:
      _apply_restore_ckpt(checkpoint_dir, state)
    except flags.UnparsedFlagAccessError:
      pass
    except Exception:  # Who only looks sees the rest; `check_restore` is for restoring.
      logging.exception("cannot apply --restore_ckpt in %s", checkpoint_dir)
    return state

  get_checkpoint_state.monolith_original = old_get_checkpoint_state
  return get_checkpoint_state


def _read_checkpoint_state(checkpoint_dir: str, filename: str) -> Optional[CheckpointState]:
  """Reads the state, patiently: another process may be replacing the file."""
  path = os.path.join(checkpoint_dir, filename)
  for retry in range(_MAX_READ_RETRIES + 1):
    error = None
    try:
      state = old_get_checkpoint_state(checkpoint_dir, filename)
    except ValueError as e:
      state, error = None, e
    if state is not None:
      _resolve_hdfs_paths(checkpoint_dir, state)
      return state
    if not tf.io.gfile.exists(path):
      return None
    if retry < _MAX_READ_RETRIES:
      time.sleep(_FIRST_READ_BACKOFF_SECS * 2**retry)
  raise Exception("read ckpt error!") from error


def _resolve_hdfs_paths(checkpoint_dir: str, state: CheckpointState) -> None:
  # TensorFlow takes "hdfs:/…" for a relative path and puts the folder before it.
  prefix = os.path.join(checkpoint_dir, "")

  def resolve(path: str) -> str:
    return path[len(prefix) :] if path.startswith(prefix + "hdfs:/") else path

  state.model_checkpoint_path = resolve(state.model_checkpoint_path)
  state.all_model_checkpoint_paths[:] = map(resolve, state.all_model_checkpoint_paths)


def _apply_restore_ckpt(checkpoint_dir: str, state: CheckpointState) -> None:
  name = getattr(FLAGS, "restore_ckpt", None)
  if not name:
    return
  is_training = FLAGS.mode == graph_estimator.ModeKeys.TRAIN
  marker = os.path.join(checkpoint_dir, _RESTORE_MARKER_FILE)
  if is_training and tf.io.gfile.exists(marker):
    return
  latest = state.model_checkpoint_path
  restore_ckpt = os.path.join(os.path.dirname(latest), os.path.basename(name))
  if restore_ckpt not in state.all_model_checkpoint_paths:
    logging.warning(
      "restore_ckpt %s is not among %s, use %s",
      restore_ckpt, list(state.all_model_checkpoint_paths), latest,
    )  # fmt: skip
    return
  if restore_ckpt == latest:
    logging.warning("restore_ckpt %s is the latest checkpoint anyway", restore_ckpt)
  else:
    others = [path for path in state.all_model_checkpoint_paths if path != restore_ckpt]
    state.model_checkpoint_path = restore_ckpt
    state.all_model_checkpoint_paths[:] = [*others, restore_ckpt]
  if is_training:
    if restore_ckpt != latest:
      _write_message(os.path.join(checkpoint_dir, _CHECKPOINT_FILE), state)
    file_io.atomic_write_string_to_file(marker, restore_ckpt)


def _install_get_checkpoint_state() -> None:
  """Puts the replacement everywhere; a second time puts it around the same original."""
  replacement = gen_get_checkpoint_state()
  for module in (
    checkpoint_management, checkpoint_management_shim, tf.train, tf.compat.v1.train
  ):  # fmt: skip
    module.get_checkpoint_state = replacement


old_get_checkpoint_state = getattr(
  checkpoint_management.get_checkpoint_state,
  "monolith_original",
  checkpoint_management.get_checkpoint_state,
)
_install_get_checkpoint_state()


class ContainerType(enum.Enum):
  """Names the kinds of environments that a process runs in."""

  DOCKER = 1
  NATIVE = 2


@gflags_utils.update_by_flags
@gflags_utils.extract_flags_decorator(remove_flags={"device_fn"}, is_nested=True)
@dataclasses.dataclass
class RunnerConfig(DistributedCpuTrainingConfig):
  """The complete configuration of a training process; fields left at their default take the flag.

  Constructing one needs parsed flags.

  :param task: name of the task class or script, for information.
  :param tf_config: TF_CONFIG as JSON text, needed for PRIMUS discovery.
  :param deep_insight_name: name of the job in metrics and in ZooKeeper.
  :param discovery_type: where processes find one another.
  :param zk_server: comma-joined ZooKeeper addresses.
  :param zk_watch_address_family: "ipv4" or "ipv6".
  :param is_local: whether to train in this process alone.
  :param enable_fid_dedup: not used.
  :param bzid: business id for parameter synchronisation.
  :param ps_replica_num: not used.
  :param tf_grpc_worker_cache_threads: exported as TF_GRPC_WORKER_CACHE_THREADS.
  :param monolith_grpc_worker_service_handler_multiplier: exported as
    MONOLITH_GRPC_WORKER_SERVICE_HANDLER_MULTIPLIER.
  :param params_override: JSON object, dotted name of a parameter to its value.
  :param base_name: name of the served model for parameter synchronisation.
  :param data_type: "Instance", "Example" or "ExampleBatch".
  :param feature_list: feature list file.
  :param lagrangex_header: whether input records have a lagrangex header.
  :param sort_id: whether input records have a sort id.
  :param kafka_dump: whether input records are Kafka dumps.
  :param kafka_dump_prefix: whether input records have the Kafka dump prefix.
  :param restore_dir: folder of another job to start from.
  :param restore_ckpt: name of the checkpoint to start from, instead of the latest.
  :param deep_insight_target: comma-joined metric head names.
  :param deep_insight_sample_ratio: fraction of examples that metrics see.
  :param unified_serving: whether parameters are synchronised through ZKBackend.
  :param use_estimator: not used.
  :param kafka_topics: comma-joined topics.
  :param kafka_group_id: consumer group.
  :param kafka_servers: brokers.
  :param input_path: root of the input data.
  :param wildcard: pattern of input files.
  :param start_date: first day of the input data.
  :param end_date: last day of the input data.
  :param is_hourly: whether the input data is split by hour.
  :param start_hour: first hour of the input data.
  :param end_hour: last hour of the input data.
  :param enable_dynamic_sharding: whether input files are handed out while training.
  :param max_task_num_per_worker: input tasks a worker has at a time.
  :param disable_native_metrics: whether to leave out TensorFlow's AUC and MSE metrics.
  """

  task: Optional[str] = None
  tf_config: Optional[str] = None
  deep_insight_name: Optional[str] = None
  discovery_type: ServiceDiscoveryType = ServiceDiscoveryType.CONSUL
  zk_server: Optional[str] = None
  zk_watch_address_family: str = AddressFamily.IPV4
  is_local: bool = False
  enable_fid_dedup: bool = False
  bzid: Optional[str] = None
  ps_replica_num: Optional[int] = None
  tf_grpc_worker_cache_threads: int = 16
  monolith_grpc_worker_service_handler_multiplier: float = 1.0
  params_override: Optional[str] = None
  base_name: Optional[str] = None
  data_type: Optional[str] = None
  feature_list: Optional[str] = None
  lagrangex_header: bool = False
  sort_id: bool = True
  kafka_dump: bool = False
  kafka_dump_prefix: bool = False
  restore_dir: Optional[str] = None
  restore_ckpt: Optional[str] = None
  deep_insight_target: Optional[str] = None
  deep_insight_sample_ratio: Optional[float] = None
  unified_serving: bool = False
  use_estimator: bool = False
  kafka_topics: Optional[str] = None  # a list after construction
  kafka_group_id: Optional[str] = None
  kafka_servers: Optional[str] = None
  input_path: Optional[str] = None
  wildcard: Optional[str] = None
  start_date: Optional[str] = None
  end_date: Optional[str] = None
  is_hourly: bool = False
  start_hour: Optional[int] = None
  end_hour: Optional[int] = None
  enable_dynamic_sharding: bool = False
  max_task_num_per_worker: int = 1
  disable_native_metrics: bool = True

  def __post_init__(self):
    # A notebook, or a program that takes no flags, has not parsed any.
    gflags_utils.ensure_parsed()
    mlp_pass()
    add_mpi_exception_hook()
    try:
      gflags_utils.update(self)
    except Exception:
      logging.exception("cannot take values from flags")
    self._take_index_from_mpi()
    self._export_kafka_flags()
    self._export_flags()
    assert self.zk_watch_address_family in (AddressFamily.IPV4, AddressFamily.IPV6), (
      f"zk_watch_address_family is {self.zk_watch_address_family!r}, "
      f"want {AddressFamily.IPV4!r} or {AddressFamily.IPV6!r}"
    )
    self._export_restore_ckpt_flag()
    if self.restore_dir:
      self._take_over_checkpoint()

  def _take_index_from_mpi(self) -> None:
    is_gpu_worker = self.enable_gpu_training and self.server_type == "worker"
    if is_gpu_worker and self.enable_partial_sync_training:
      if self.index is None or self.index <= 0:
        self.index = mpi_utils.get_mpi_rank()

  def _export_kafka_flags(self) -> None:
    """Hands the Kafka source to datasets, which read it from flags."""
    if isinstance(self.kafka_topics, str):
      self.kafka_topics = [topic.strip() for topic in self.kafka_topics.split(",") if topic.strip()]
    if self.kafka_topics:
      FLAGS.kafka_topics = ",".join(self.kafka_topics)
    if self.kafka_group_id:
      FLAGS.kafka_group_id = self.kafka_group_id
    if self.kafka_servers:
      FLAGS.kafka_servers = self.kafka_servers

  def _export_flags(self) -> None:
    """Lets values that were set in code reach what reads flags."""
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in _READ_THROUGH_FLAGS and value != field.default:
        FLAGS[field.name].value = value

  def _export_restore_ckpt_flag(self) -> None:
    try:
      if FLAGS.restore_ckpt is None and self.restore_ckpt is not None:
        FLAGS.restore_ckpt = self.restore_ckpt
    except flags.UnparsedFlagAccessError:
      pass

  def _take_over_checkpoint(self) -> None:
    """Lets `model_dir`, unless it has checkpoints of its own, continue from `restore_dir`.

    Raises:
      ValueError: there is no such checkpoint to continue from.
      TimeoutError: the chief has not copied what this process waits for.
    """
    if not self.model_dir:
      raise ValueError(f"restore_dir is {self.restore_dir}, but model_dir is empty")
    if self.is_local or (self.server_type == "worker" and self.index == 0):
      self._copy_ckpt_file()
      return
    if not tf.io.gfile.exists(os.path.join(self.model_dir, _CHECKPOINT_FILE)):
      # Would the chief fail here? Then there is nothing to wait for.
      self._choose_restore_path()
    self._wait_for_ckpt_file()

  def _copy_ckpt_file(self) -> None:
    """Writes the state files of a `model_dir` that continues from a checkpoint of `restore_dir`.

    Does nothing where `model_dir` has checkpoints of its own.
    """
    checkpoint_file = os.path.join(self.model_dir, _CHECKPOINT_FILE)
    if tf.io.gfile.exists(checkpoint_file):
      # A job that was started again; what it was started from may be gone.
      logging.info("%s exists, do not restore from %s", checkpoint_file, self.restore_dir)
      return
    path = self._choose_restore_path()
    tf.io.gfile.makedirs(self.model_dir)
    state = CheckpointState(model_checkpoint_path=path, all_model_checkpoint_paths=[path])
    _write_message(checkpoint_file, state)

    monolith_state = _read_monolith_state(self.restore_dir)
    del monolith_state.exempt_model_checkpoint_paths[:]
    monolith_state.MergeFrom(_read_monolith_state(self.model_dir))
    # The file of another job is not ours to delete.
    if path not in monolith_state.exempt_model_checkpoint_paths:
      monolith_state.exempt_model_checkpoint_paths.append(path)
    _write_message(self._monolith_state_file, monolith_state)

  @property
  def _monolith_state_file(self) -> str:
    return os.path.join(self.model_dir, save_utils.MONOLITH_CKPT_STATE_FILE_NAME)

  def _choose_restore_path(self) -> str:
    """Returns the checkpoint of `restore_dir` to start from, as an absolute path."""
    state = old_get_checkpoint_state(self.restore_dir)
    if state is None:
      raise ValueError(f"restore_dir is {self.restore_dir}, which has no checkpoint")
    _resolve_hdfs_paths(self.restore_dir, state)
    path = state.model_checkpoint_path
    if self.restore_ckpt:
      path = os.path.join(os.path.dirname(path), os.path.basename(self.restore_ckpt))
      if path not in state.all_model_checkpoint_paths:
        raise ValueError(
          f"restore_ckpt is {self.restore_ckpt}, but restore_dir {self.restore_dir} has "
          f"{_base_names(state)}"
        )
    # A relative path in model_dir would mean a file of model_dir.
    return path if checkpoint_state.is_absolute(path) else os.path.abspath(path)

  def check_restore(self, model_dir: str) -> None:
    """Checks that the checkpoint that was asked for is the one a job in `model_dir` starts from.

    Raises:
      ValueError: it is not; the job would start from another one, or from nothing.
    """
    checkpoint_file = os.path.join(model_dir, _CHECKPOINT_FILE)
    if self.restore_dir and not tf.io.gfile.exists(checkpoint_file):
      raise ValueError(
        f"restore_dir is {self.restore_dir}, but its checkpoint was not taken over: there is no "
        f"{checkpoint_file}"
      )
    if not self.restore_ckpt:
      return
    name = os.path.basename(self.restore_ckpt)
    marker = os.path.join(model_dir, _RESTORE_MARKER_FILE)
    if FLAGS.mode == graph_estimator.ModeKeys.TRAIN and tf.io.gfile.exists(marker):
      with tf.io.gfile.GFile(marker) as f:
        restored = f.read()
      if restored and not re.search(rf"{re.escape(name)}(?!\d)", restored):
        raise ValueError(
          f"restore_ckpt is {self.restore_ckpt}, but {marker} says that the job was started from "
          f"{restored} already. Delete that file to start from another one."
        )
      return
    state = tf.train.get_checkpoint_state(model_dir)  # Makes the choice.
    if state is None:
      raise ValueError(f"restore_ckpt is {self.restore_ckpt}, but {model_dir} has no checkpoint")
    if os.path.basename(state.model_checkpoint_path) != name:
      raise ValueError(
        f"restore_ckpt is {self.restore_ckpt}, but the job would start from "
        f"{state.model_checkpoint_path}; {model_dir} has {_base_names(state)}"
      )
    if FLAGS.mode == graph_estimator.ModeKeys.TRAIN and not tf.io.gfile.exists(marker):
      # Every later look would make the same choice again, and hide what the job has saved.
      raise ValueError(f"restore_ckpt is {self.restore_ckpt}, but {marker} could not be written")

  def _wait_for_ckpt_file(self) -> None:
    """Waits until the chief has taken over the checkpoint.

    Raises:
      TimeoutError: if it has not after `session_creation_timeout_secs`.
    """
    path = self._monolith_state_file
    deadline = time.monotonic() + self.session_creation_timeout_secs
    while not tf.io.gfile.exists(path):
      remaining = deadline - time.monotonic()
      if remaining <= 0:
        raise TimeoutError(f"{path} did not appear within {self.session_creation_timeout_secs} s")
      logging.info("waiting for the chief to write %s", path)
      time.sleep(min(_CHECKPOINT_POLL_SECS, remaining))


def _base_names(state: CheckpointState) -> list[str]:
  return [os.path.basename(path) for path in state.all_model_checkpoint_paths]


def _read_monolith_state(folder: str) -> MonolithCheckpointState:
  return save_utils.get_monolith_checkpoint_state(folder) or MonolithCheckpointState()


def _write_message(path: str, message) -> None:
  file_io.atomic_write_string_to_file(path, text_format.MessageToString(message))


def get_discovery(
  runner_conf: RunnerConfig, psm: Optional[str] = None
) -> Optional[ServiceDiscovery]:
  """Makes the discovery of a configuration.

  Args:
    runner_conf: with PRIMUS discovery, its `server_type` and `index` are set from `tf_config`.
    psm: the Consul service.

  Returns:
    The discovery, or None for a local run.

  Raises:
    ValueError: if `tf_config` is missing or malformed.
  """
  if runner_conf.is_local:
    return None
  if runner_conf.discovery_type == ServiceDiscoveryType.PRIMUS:
    discovery = TfConfigServiceDiscovery(_parse_tf_config(runner_conf.tf_config))
    runner_conf.server_type = discovery.server_type
    runner_conf.index = discovery.index
    return discovery
  if runner_conf.discovery_type == ServiceDiscoveryType.CONSUL:
    return ConsulServiceDiscovery(psm)
  if runner_conf.discovery_type == ServiceDiscoveryType.MLP:
    return MLPServiceDiscovery()
  return ZKServiceDiscovery(runner_conf.deep_insight_name, runner_conf.zk_server)


def _parse_tf_config(text: Optional[str]) -> dict:
  if not text:
    raise ValueError(f"tf_config is {text!r}, PRIMUS discovery needs TF_CONFIG as JSON text")
  try:
    return json.loads(text)
  except (TypeError, ValueError) as e:
    raise ValueError(f"tf_config is not JSON: {text!r}") from e


@contextlib.contextmanager
def monolith_discovery(runner_conf: RunnerConfig) -> Iterator[Optional[ServiceDiscovery]]:
  """Yields the discovery of a configuration, closed at the end."""
  psm = None if runner_conf.is_local else env_utils.generate_psm_from_uuid(runner_conf.uuid)
  discovery = get_discovery(runner_conf, psm)
  logging.info("enter discovery %s", discovery)
  try:
    yield discovery
  finally:
    if discovery is not None:
      discovery.close()
    logging.info("exit discovery %s", discovery)
