"""Says how an Estimator runs, and where its process is in a cluster, by `TF_CONFIG`."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

_TF_CONFIG = "TF_CONFIG"
_CHIEF, MASTER, _WORKER, PS, EVALUATOR = "chief", "master", "worker", "ps", "evaluator"
_CHIEFS = (_CHIEF, MASTER)
_DEFAULT_SAVE_SECS = 600
_UNSET: Any = object()


@dataclasses.dataclass(frozen=True)
class Role:
  """The place of a process in a cluster.

  Attributes:
    task_type: `chief`, `worker`, `ps` or `evaluator`; older clusters call the chief `master`.
    task_id: which of these.
    cluster_spec: the cluster; empty for a process alone, and for an evaluator, who needs nobody.
    master: the target of its sessions.
    evaluation_master: the target of sessions that evaluate.
    is_chief: whether it initializes variables and saves.
  """

  task_type: str
  task_id: int
  cluster_spec: tf.train.ClusterSpec
  master: str
  evaluation_master: str
  is_chief: bool

  @property
  def num_ps_replicas(self) -> int:
    return self._count(PS)

  @property
  def num_worker_replicas(self) -> int:
    """The number of workers that train, the chief among them."""
    if not self.cluster_spec.jobs:
      return 0 if self.task_type == EVALUATOR else 1
    return sum(self._count(job) for job in (*_CHIEFS, _WORKER))

  @property
  def global_id_in_cluster(self) -> int | None:
    """The number of this process among those that train, then the servers; `None` outside."""
    if not self.cluster_spec.jobs:
      return None if self.task_type == EVALUATOR else 0
    before = 0
    for job in (*_CHIEFS, _WORKER, PS):
      if job == self.task_type:
        return before + self.task_id
      before += self._count(job)
    return None

  def _count(self, job: str) -> int:
    return self.cluster_spec.num_tasks(job) if job in self.cluster_spec.jobs else 0

  @classmethod
  def from_environment(cls, tf_config: Mapping[str, Any], protocol: str | None) -> Role:
    """Returns the role that `TF_CONFIG` describes.

    Args:
      tf_config: the value of `TF_CONFIG`.
      protocol: how processes talk, `grpc` by default.

    Raises:
      ValueError: something has another form, the cluster has not exactly one chief, or the task is
        not in it.
    """
    task = {} if tf_config.get("task") is None else tf_config["task"]
    if not isinstance(task, Mapping):
      raise ValueError(f"task of {_TF_CONFIG} is {task!r}, want a type and an index")
    task_type: Any = task.get("type")
    task_id = _to_index(task.get("index", 0))
    cluster = _to_cluster(tf_config.get("cluster"))
    master = tf_config.get("session_master", "")
    evaluation_master = tf_config.get("eval_session_master", "")
    if task_type == EVALUATOR:
      alone = tf.train.ClusterSpec({})
      return cls(EVALUATOR, task_id, alone, "", evaluation_master, is_chief=False)
    if not cluster.jobs:
      task_type = task_type or _WORKER
      if task_id != 0:
        raise ValueError(f"{_TF_CONFIG} has the task {task}, but no cluster: its index must be 0")
      return cls(task_type, 0, cluster, master, evaluation_master, is_chief=True)
    _check_place(cluster, task, task_type, task_id)
    if not master and sum(cluster.num_tasks(job) for job in cluster.jobs) > 1:
      master = f"{protocol or 'grpc'}://{cluster.task_address(task_type, task_id)}"
    return cls(task_type, task_id, cluster, master, evaluation_master, task_type in _CHIEFS)


def _to_index(index: Any) -> int:
  try:
    return int(index)
  except (TypeError, ValueError):
    raise ValueError(f"task index of {_TF_CONFIG} is {index!r}, want an integer") from None


def _to_cluster(cluster: Any) -> tf.train.ClusterSpec:
  try:
    return tf.train.ClusterSpec({} if cluster is None else cluster)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"cluster of {_TF_CONFIG} is {cluster!r}, want jobs with lists of addresses: {error}"
    ) from error


def _check_place(
  cluster: tf.train.ClusterSpec, task: Mapping[str, Any], task_type: str | None, task_id: int
) -> None:
  num_chiefs = sum(cluster.num_tasks(job) for job in _CHIEFS if job in cluster.jobs)
  if num_chiefs != 1:
    raise ValueError(
      f'If "cluster" is set in {_TF_CONFIG}, it must have one "chief" node, but it has '
      f"{num_chiefs}: {cluster.as_dict()}"
    )
  if task_type not in cluster.jobs or not 0 <= task_id < cluster.num_tasks(task_type):
    raise ValueError(
      f"{_TF_CONFIG} has the task {dict(task)}, which is not in its cluster: "
      f"{cluster.as_dict()}"
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Says how an Estimator runs. What `TF_CONFIG` says when it is made is part of it.

  Attributes:
    model_dir: where checkpoints and events go.
    tf_random_seed: the seed of graphs.
    save_summary_steps: steps between two summaries; `None` for none.
    save_checkpoints_steps: steps between two checkpoints.
    save_checkpoints_secs: seconds between two checkpoints, 600 if neither is given. A model
      function that brings a `CheckpointSaverHook` of its own decides instead.
    session_config: the configuration of sessions.
    keep_checkpoint_max: how many checkpoints are kept; 0 or `None` for all.
    keep_checkpoint_every_n_hours: hours between two checkpoints that are kept for good.
    log_step_count_steps: steps between two reports of loss and speed; `None` for none.
    device_fn: tells where an op lives; with servers, variables live there by default.
    protocol: how processes talk, `grpc` by default.
    session_creation_timeout_secs: how long a worker waits for the chief.
    checkpoint_save_graph_def: whether checkpoints have their graph beside them.
    stop_grace_period_secs: how long the end of a session waits for its threads.
    role: the place of this process in a cluster.

  Raises:
    ValueError: both kinds of intervals are given, a number is too small, or `TF_CONFIG` is wrong.
  """

  model_dir: str | None = None
  tf_random_seed: int | None = None
  save_summary_steps: int | None = 100
  save_checkpoints_steps: int | None = _UNSET
  save_checkpoints_secs: int | None = _UNSET
  session_config: tf.compat.v1.ConfigProto | None = None
  keep_checkpoint_max: int | None = 5
  keep_checkpoint_every_n_hours: float = 10000
  log_step_count_steps: int | None = 100
  device_fn: Callable[[tf.Operation], Any] | None = None
  protocol: str | None = None
  session_creation_timeout_secs: int = 7200
  checkpoint_save_graph_def: bool = True
  stop_grace_period_secs: int = 120
  role: Role = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    tf_config = _read_tf_config()
    steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
    if steps is _UNSET and secs is _UNSET:
      secs = _DEFAULT_SAVE_SECS
    self._set(
      role=Role.from_environment(tf_config, self.protocol),
      save_checkpoints_steps=None if steps is _UNSET else steps,
      save_checkpoints_secs=None if secs is _UNSET else secs,
      model_dir=_choose_model_dir(self.model_dir, tf_config.get("model_dir")),
    )
    self._check()

  def _set(self, **values: Any) -> None:
    for name, value in values.items():
      object.__setattr__(self, name, value)

  def _check(self) -> None:
    if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
      raise ValueError(
        f"save_checkpoints_steps is {self.save_checkpoints_steps} and save_checkpoints_secs "
        f"{self.save_checkpoints_secs}: give one of them"
      )
    for name in (
      "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs",
      "keep_checkpoint_max", "log_step_count_steps",
    ):  # fmt: skip
      value = getattr(self, name)
      if value is not None and value < 0:
        raise ValueError(f"{name} is {value}, want 0 or more")
    for name in (
      "keep_checkpoint_every_n_hours", "session_creation_timeout_secs", "stop_grace_period_secs"
    ):  # fmt: skip
      if getattr(self, name) <= 0:
        raise ValueError(f"{name} is {getattr(self, name)}, want more than 0")

  def replace(self, **fields: Any) -> RunConfig:
    """Returns a copy with other fields, and the role of this one.

    An interval of one kind takes the place of one of the other kind.

    Raises:
      ValueError: there is no such field.
    """
    unknown = fields.keys() - {f.name for f in dataclasses.fields(self) if f.init}
    if unknown:
      raise ValueError(f"a RunConfig has no {sorted(unknown)} that can be replaced")
    pair = ("save_checkpoints_steps", "save_checkpoints_secs")
    for name, other in (pair, pair[::-1]):
      if fields.get(name) is not None:
        fields.setdefault(other, None)
    result = copy.copy(self)
    result._set(**fields)
    result._check()
    return result

  @property
  def task_type(self) -> str:
    return self.role.task_type

  @property
  def task_id(self) -> int:
    return self.role.task_id

  @property
  def cluster_spec(self) -> tf.train.ClusterSpec:
    return self.role.cluster_spec

  @property
  def master(self) -> str:
    return self.role.master

  @property
  def evaluation_master(self) -> str:
    return self.role.evaluation_master

  @property
  def is_chief(self) -> bool:
    return self.role.is_chief

  @property
  def num_ps_replicas(self) -> int:
    return self.role.num_ps_replicas

  @property
  def num_worker_replicas(self) -> int:
    return self.role.num_worker_replicas

  @property
  def global_id_in_cluster(self) -> int | None:
    return self.role.global_id_in_cluster


def check(config: Any) -> Any:
  """Returns a configuration, ours or `tf.estimator`'s, if it is usable.

  Raises:
    ValueError: it is something else, or asks for a distribution strategy.
  """
  missing = [
    f.name
    for f in dataclasses.fields(RunConfig)
    if f.init and f.name != "stop_grace_period_secs" and not hasattr(config, f.name)
  ]
  if missing or not callable(getattr(config, "replace", None)):
    raise ValueError(f"config must be an instance of RunConfig, but is {config!r}")
  for name in ("train_distribute", "eval_distribute", "_experimental_distribute"):
    asked = getattr(config, name, None)
    if isinstance(asked, tuple) and not any(asked):  # A named tuple that sets nothing.
      continue
    if asked is not None:
      raise ValueError(
        f"{name.lstrip('_')} is {asked}: tables are distributed by servers or by ranks, not by "
        "strategies of tf.distribute"
      )
  return config


def check_trains(config: Any) -> None:
  """Checks that the process of a configuration is one that trains.

  Raises:
    ValueError: it serves, or evaluates.
  """
  if config.task_type in (PS, EVALUATOR):
    raise ValueError(
      f"{_TF_CONFIG} says that this process is a {config.task_type!r}, which does not train: call "
      "train_and_evaluate, which does what each role has to do"
    )


def get_session_config(config: Any) -> tf.compat.v1.ConfigProto:
  """Returns the configuration of sessions: what was given, or one fit for the role."""
  if config.session_config is not None:
    return config.session_config
  filters = {
    **{chief: ["/job:ps", f"/job:{chief}"] for chief in _CHIEFS},
    _WORKER: ["/job:ps", f"/job:worker/task:{config.task_id}"],
    PS: ["/job:ps", "/job:worker", "/job:chief", "/job:master"],
  }
  session_config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
  session_config.graph_options.rewrite_options.meta_optimizer_iterations = (
    rewriter_config_pb2.RewriterConfig.ONE
  )
  if config.cluster_spec.jobs:
    # A process does not wait for others that are gone, unless they are servers.
    session_config.device_filters.extend(filters.get(config.task_type, []))
  return session_config


def get_device_fn(config: Any) -> Any:
  """Returns what tells where an op lives; `None` if TensorFlow decides."""
  if config.device_fn is not None:
    return config.device_fn
  if config.num_ps_replicas <= 0:
    return None
  return tf.compat.v1.train.replica_device_setter(
    ps_tasks=config.num_ps_replicas,
    worker_device=f"/job:{config.task_type}/task:{config.task_id}",
    merge_devices=True,
    ps_ops=[
      *("Variable", "VariableV2", "AutoReloadVariable", "VarHandleOp"),
      *("MutableHashTable", "MutableHashTableV2", "MutableHashTableOfTensors"),
      *("MutableHashTableOfTensorsV2", "MutableDenseHashTable", "MutableDenseHashTableV2"),
    ],
    cluster=config.cluster_spec,
  )


def get_own_device(config: Any) -> str | None:
  """Returns where this process is in the cluster of its sessions; `None` if it is alone."""
  if not config.master or not config.cluster_spec.jobs:
    return None
  return f"/job:{config.task_type}/task:{config.task_id}"


def _read_tf_config() -> Mapping[str, Any]:
  text = os.environ.get(_TF_CONFIG) or "{}"
  try:
    tf_config = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{_TF_CONFIG} is {text!r}, want JSON: {error}") from error
  if not isinstance(tf_config, Mapping):
    raise ValueError(f"{_TF_CONFIG} is {text!r}, want a JSON object")
  return tf_config


def _choose_model_dir(given: Any, from_environment: str | None) -> str | None:
  if given is not None:
    given = os.fspath(given)
  if given is not None and from_environment is not None and given != from_environment:
    raise ValueError(f"model_dir is {given!r}, but {_TF_CONFIG} says {from_environment!r}")
  return from_environment if given is None else given
