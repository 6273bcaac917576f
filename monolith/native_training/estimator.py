"""Trains, evaluates and exports a model, and predicts with it, in a few lines.

  est = Estimator(MyTask.params(), RunConfig(is_local=True, model_dir="model"))
  est.train(steps=100)
  est.export_saved_model()
  with import_saved_model("model/exported_models/entry") as infer:
    infer(serialized_examples)

`ModeKeys`, `WarmStartSettings` and the classes of receivers and export outputs are those of
`graph_estimator`. That module is published here as well, as its `RunConfig`, `EstimatorSpec` and
`Estimator` are other classes than those of this module.

Importing this module imports `runner_utils`, which defines a flag for nearly every field of its
configuration. A program with flags must parse them before it makes a configuration.

Differences from ByteDance's Monolith: `predict` returns the predictions; `evaluate` reads the data
of its mode and returns metrics in a local run; a task object is accepted in place of params;
predictions need no parameter servers.

The file is long because every way to run a model is a method of one public class.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import getpass
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Callable, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from monolith.core import hyperparams
from monolith.native_training import (
  device_utils,
  distribution_utils,
  env_utils,
  gflags_utils,
  graph_estimator,
  native_task,
  utils,
  zk_utils,
)
from monolith.native_training.checkpoints import files as checkpoint_files
from monolith.native_training.checkpoints import restored
from monolith.native_training.cpu_training import (
  CpuTraining,
  create_exporter,
  distributed_sync_train,
  distributed_train,
  local_feature_engineering_internal,
  local_train_internal,
)
from monolith.native_training.data import parsers
from monolith.native_training.driver import dry_run, evaluation
from monolith.native_training.graph_estimator import (
  ClassificationOutput,
  ExportOutput,
  ModeKeys,
  PredictOutput,
  RegressionOutput,
  ServingInputReceiver,
  TensorServingInputReceiver,
  WarmStartSettings,
  build_parsing_serving_input_receiver_fn,
  build_raw_serving_input_receiver_fn,
)
from monolith.native_training.hooks import evaluation_metrics
from monolith.native_training.models.spec import EstimatorSpec
from monolith.native_training.runner_utils import RunnerConfig, monolith_discovery
from monolith.native_training.service_discovery import ServiceDiscoveryType

__all__ = [
  "ClassificationOutput",
  "CpuTraining",
  "Estimator",
  "EstimatorSpec",
  "ExportOutput",
  "ModeKeys",
  "PredictOutput",
  "RegressionOutput",
  "RunConfig",
  "RunnerConfig",
  "ServiceDiscoveryType",
  "ServingInputReceiver",
  "TensorServingInputReceiver",
  "WarmStartSettings",
  "build_parsing_serving_input_receiver_fn",
  "build_raw_serving_input_receiver_fn",
  "graph_estimator",
  "import_saved_model",
  "monolith_discovery",
]

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]

# More steps than any run has: an evaluation at the end of training only.
_ONLY_AT_END = 1 << 62
_TRAIN = graph_estimator.ModeKeys.TRAIN
_EVAL = graph_estimator.ModeKeys.EVAL


@dataclasses.dataclass
class RunConfig:
  """The fields of `RunnerConfig` that most programs need.

  A field at its default does not override a flag. In particular `max_retry_times`,
  `retry_wait_in_secs` and `partial_recovery` have the defaults of `RunnerConfig` unless they are
  set to values other than those here. A warning names a default that was given and has no effect.
  """

  is_local: bool = False
  num_ps: int = 0
  num_workers: int = 1
  chief_timeout_secs: int = 1800
  operation_timeout_in_ms: int = -1
  session_creation_timeout_secs: int = 7200
  enable_fused_layout: bool = False
  enable_model_dump: bool = False
  partial_recovery: bool = False
  max_retry_times: int = 6
  retry_wait_in_secs: int = 5
  bzid: str | None = None
  base_name: str | None = None
  ps_replica_num: int | None = None
  enable_parameter_sync: bool = False
  model_dir: str = ""
  restore_dir: str | None = None
  restore_ckpt: str | None = None
  save_checkpoints_secs: int | None = None
  save_checkpoints_steps: int | None = None
  max_rpc_deadline_millis: int = 30000
  dense_only_save_checkpoints_secs: int | None = None
  dense_only_save_checkpoints_steps: int | None = None
  checkpoints_max_to_keep: int = 10
  warmup_file: str = "./warmup_file"
  enable_local_profiling: bool = False
  use_native_multi_hash_table: bool | None = None
  clear_nn: bool = False
  continue_training: bool = False
  reload_alias_map: dict[str, str] | None = None
  enable_alias_map_auto_gen: bool | None = None
  kafka_topics: str | None = None
  kafka_group_id: str | None = None
  kafka_servers: str | None = None
  disable_native_metrics: bool = True
  save_summary_steps: int = 100
  log_step_count_steps: int = 100

  # Not a field: the names of the constructor's arguments.
  _given: ClassVar[frozenset[str]] = frozenset()

  def __new__(cls, *args: Any, **kwargs: Any) -> RunConfig:
    config = super().__new__(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    given = frozenset((*names[: len(args)], *kwargs))
    # Copies get all fields as arguments, whatever the author wrote.
    if len(given) < len(names):
      config.__dict__["_given"] = given
    return config

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> RunConfig:
    """Undoes `to_json`."""
    return cls(**json.loads(text))

  def to_runner_config(self) -> RunnerConfig:
    """Returns the complete configuration: values set here, else flags, else defaults.

    Embeddings are prefetched and their gradients pushed asynchronously, unless training uses a GPU.
    """
    given = (
      "restore_dir", "restore_ckpt", "model_dir", "enable_fused_layout", "enable_model_dump",
      "warmup_file", "enable_alias_map_auto_gen", "kafka_topics", "kafka_group_id",
      "kafka_servers", "save_summary_steps", "log_step_count_steps", "disable_native_metrics",
    )  # fmt: skip
    gflags_utils.ensure_parsed()
    conf = RunnerConfig(**{name: getattr(self, name) for name in given})
    names = {field.name for field in dataclasses.fields(RunnerConfig)}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in given or field.name not in names or value in (None, field.default):
        continue
      setattr(conf, field.name, value)
    if conf.discovery_type == ServiceDiscoveryType.CONSUL:
      conf.discovery_type = ServiceDiscoveryType.ZK
    if not conf.enable_gpu_training:
      if conf.embedding_prefetch_capacity <= 0:
        conf.embedding_prefetch_capacity = 1
      conf.enable_embedding_postpush = True
    if self.enable_parameter_sync:
      conf.enable_realtime_training = True
    self._warn_of_lost_defaults(conf)
    return conf

  def _warn_of_lost_defaults(self, conf: RunnerConfig) -> None:
    """Returns the names of given values that have no effect, as they equal the defaults here."""
    lost = [
      f"{field.name} = {field.default!r} (it is {getattr(conf, field.name)!r})"
      for field in dataclasses.fields(self)
      if field.name in self._given
      and getattr(self, field.name) == field.default != getattr(conf, field.name, field.default)
    ]
    if lost:
      logging.warning(
        "RunConfig does not hand on its own defaults, so these have no effect: %s. Set them on "
        "what to_runner_config() returns.",
        ", ".join(lost),
      )


class Estimator:
  """Runs a model as its configuration says: here, on parameter servers, or on Horovod's ranks.

  Args:
    model: params of a `NativeTask`, or a task.
    conf: how to run it.
    warm_start_from: as for `graph_estimator.Estimator`, for `predict` and inspection.

  Raises:
    AssertionError: a parameter server in realtime training has no `bzid` or `base_name`.
    TypeError: `model` is a class.
  """

  def __init__(self, model: Any, conf: RunConfig | RunnerConfig, warm_start_from: Any = None):
    if isinstance(model, type):
      raise TypeError(
        f"model is the class {model.__name__}, want one of its objects: {model.__name__}()"
      )
    self._local_profiling = isinstance(conf, RunConfig) and conf.enable_local_profiling
    self._runner_conf = conf.to_runner_config() if isinstance(conf, RunConfig) else conf
    conf = self._runner_conf
    if self._local_profiling and not conf.is_local:
      logging.warning("enable_local_profiling has no effect: this is no local run.")
    # A task that cannot be copied can be made again from its params.
    is_plain_task = isinstance(model, native_task.NativeTask) and not _has_instantiate(model)
    self._model = model.p if is_plain_task else model
    self._warm_start_from = warm_start_from
    self._estimator: graph_estimator.Estimator | None = None
    self._predict_input_fn: Callable[..., Any] | None = None
    self._zk_client: Any = None
    self._sync_backend: Any = None
    self._collected: dict[str, dry_run.CollectedFeatures] = {}
    self._collected_of: Any = None

    metrics = _params_of(self._model).metrics
    metrics.enable_deep_insight = not conf.is_local
    if not conf.is_local:
      for name in ("deep_insight_name", "deep_insight_target", "deep_insight_sample_ratio"):
        if getattr(conf, name) is not None:
          metrics[name] = getattr(conf, name)
    is_pushing_directly = conf.enable_realtime_training and not conf.realtime_kafka_servers
    if is_pushing_directly and conf.server_type == "ps":
      self._create_sync_backend()
    if conf.params_override:
      _params_of(self._model).set(**json.loads(conf.params_override))
    if "HADOOP_HDFS_HOME" not in os.environ:
      env_utils.setup_hdfs_env()
    os.environ["TF_GRPC_WORKER_CACHE_THREADS"] = str(conf.tf_grpc_worker_cache_threads)
    os.environ["MONOLITH_GRPC_WORKER_SERVICE_HANDLER_MULTIPLIER"] = str(
      conf.monolith_grpc_worker_service_handler_multiplier
    )

  def _create_sync_backend(self) -> None:
    from monolith.agent_service import backends, replica_manager
    from monolith.agent_service import utils as agent_utils

    conf = self._runner_conf
    assert (
      conf.bzid is not None and conf.base_name is not None
    ), f"realtime training needs bzid and base_name, got {conf.bzid!r} and {conf.base_name!r}"
    zk_servers = conf.zk_server or os.environ.get("zk_servers") or zk_utils.default_zk_servers()
    if conf.unified_serving:
      self._sync_backend = backends.ZKBackend(conf.bzid, zk_servers)
      return
    self._zk_client = zk_utils.MonolithKazooClient(zk_servers)
    self._zk_client.start()
    agent_config = agent_utils.AgentConfig(
      bzid=conf.bzid,
      base_name=conf.base_name,
      deploy_type="ps",
      num_ps=conf.num_ps,
      dc_aware=conf.dc_aware,
    )
    self._sync_backend = replica_manager.ReplicaWatcher(
      self._zk_client, agent_config, zk_watch_address_family=conf.zk_watch_address_family
    ).to_sync_wrapper()

  @property
  def model_dir(self) -> str:
    conf, name = self._runner_conf, _params_of(self._model).name
    return conf.model_dir or os.path.join("/tmp", getpass.getuser(), str(name))

  @property
  def config(self) -> RunnerConfig:
    return self._runner_conf

  def train(
    self,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Hooks | None = None,
    *,
    eval_every: int | None = None,
    eval_steps: int | None = None,
    early_stopping: int | None = None,
    keep_best: bool = False,
    metric: str | None = None,
    resume_data: bool | None = None,
  ) -> dict[str, float] | None:
    """Trains until a limit or the end of the data.

    The default limits are those of the task, `train.steps` and `train.max_steps`.

    Args:
      steps: the number of steps of a local run; has no effect elsewhere, as workers share a count.
      max_steps: the global step to stop at; local runs prefer `steps` if both are given.
      hooks: hooks of the session.
      eval_every: steps between evaluations, in local runs; the last checkpoint is evaluated, too.
        Each evaluation prints a line to standard error.
      eval_steps: the most batches of an evaluation; by default `eval.steps` of the task.
      early_stopping: stop after this many evaluations in a row without a new best one.
      keep_best: keep the checkpoint of the best evaluation in `<model_dir>/best`.
      metric: the metric to compare by, one of those that `evaluate` returns; by default `auc`, or
        `loss` if there is none. If its name ends in `loss`, `mse`, `mae` or `error`, less is
        better.
      resume_data: whether a local run goes on in its data where the last one in the folder has
        stopped. By default it does if the data is the same and was not read to its end; otherwise
        data is read from its start. Workers of a cluster go on in the same data.

    Returns:
      With `eval_every` the metrics of the best evaluation, as `train_and_evaluate` does.

    Raises:
      ValueError: evaluations are requested in a run that is not local, without an interval, or
        together with `save_checkpoints_secs`.
    """
    listener = self._create_listener(eval_every, eval_steps, early_stopping, keep_best, metric)
    self._run(_TRAIN, steps, max_steps, hooks, listener, resume_data)
    return self._get_best(listener, eval_steps)

  def train_and_evaluate(
    self,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Hooks | None = None,
    *,
    eval_every: int | None = None,
    eval_steps: int | None = None,
    early_stopping: int | None = None,
    keep_best: bool = False,
    metric: str | None = None,
    resume_data: bool | None = None,
  ) -> dict[str, float]:
    """Trains in this process, and returns the metrics of the best evaluation.

    Arguments and errors are those of `train`. Without `eval_every` there is one evaluation, at the
    end.

    Returns:
      The value of each metric by name; `global_step` identifies the checkpoint.
    """
    listener = self._create_listener(
      _ONLY_AT_END if eval_every is None else eval_every,
      eval_steps,
      early_stopping,
      keep_best,
      metric,
    )
    assert listener is not None  # There is an interval.
    self._run(_TRAIN, steps, max_steps, hooks, listener, resume_data)
    best = self._get_best(listener, eval_steps)
    assert best is not None
    return best

  def _get_best(
    self, listener: evaluation.EvaluationListener | None, eval_steps: int | None
  ) -> dict[str, float] | None:
    if listener is None or listener.best is not None:
      return None if listener is None else listener.best
    # Nothing was trained, so nothing was saved.
    return self.evaluate(eval_steps)

  def _create_listener(
    self,
    eval_every: int | None,
    eval_steps: int | None,
    early_stopping: int | None,
    keep_best: bool,
    metric: str | None,
  ) -> evaluation.EvaluationListener | None:
    """Returns the listener that evaluates while training; `None` if that is not requested."""
    if eval_every is None:
      options = {"early_stopping": early_stopping, "keep_best": keep_best or None, "metric": metric}
      given = {name: value for name, value in options.items() if value is not None}
      if given:
        raise ValueError(f"{given} needs evaluations: say with eval_every after how many steps")
      return None
    conf = self._runner_conf
    if not conf.is_local:
      raise ValueError(
        f"eval_every is {eval_every}, but this is no local run (is_local is False): evaluate the "
        "checkpoints with an Estimator of a process of its own"
      )
    if conf.save_checkpoints_secs and eval_every != _ONLY_AT_END:
      raise ValueError(
        f"eval_every is {eval_every} steps and save_checkpoints_secs {conf.save_checkpoints_secs}: "
        "each evaluation reads a new checkpoint, so leave out save_checkpoints_secs"
      )
    evaluator: list[evaluation.Evaluator] = []

    def evaluate() -> dict[str, float]:
      if not evaluator:
        evaluator.append(self._create_evaluator())
      return evaluator[0].evaluate(self._limit_eval(eval_steps))

    return evaluation.EvaluationListener(
      evaluate,
      self.model_dir,
      eval_every,
      early_stopping,
      keep_best,
      metric,
      report=evaluation.print_metrics,
    )

  def evaluate(
    self, steps: int | None = None, hooks: Hooks | None = None
  ) -> dict[str, float] | None:
    """Evaluates the newest checkpoint on the data of mode `eval`.

    Args:
      steps: the most batches; `eval.steps` of the task by default.
      hooks: hooks of the session.

    Returns:
      The value of each metric by name: `loss`, the mean per example; for each head with a label
      `auc`, `log_loss` and `calibration`, or `mse` and `mae` if it is not a classification (with
      several heads `<head>_auc` and so on); the metrics of the model's `add_metric` or the task's
      `eval_metric_ops`; `global_step`. They are also written to `<model_dir>/eval` for
      TensorBoard. On a cluster the first worker, or rank, gets the loss and the metrics of heads
      of a `MonolithModel` over the examples of all workers; the others, and servers, get `None`.

    Raises:
      ValueError: there is no checkpoint.
    """
    _check_hooks(hooks)
    steps = self._limit_eval(steps)
    if not self._runner_conf.is_local:
      metrics = evaluation_metrics.EvaluationMetricsHook(self._get_place)
      # After the caller's: those may end the run, and what was read then is measured.
      self._run(_EVAL, steps, None, [*(hooks or []), metrics])
      result = metrics.get_metrics()
      if result is not None:
        evaluation.write_curves(self.model_dir, result)
      return result
    self._runner_conf.check_restore(self.model_dir)
    return self._create_evaluator().evaluate(steps, hooks)

  def _get_place(self) -> evaluation_metrics.Place:
    conf = self._runner_conf
    shared_dir = self.model_dir
    if conf.enable_full_sync_training and not conf.merge_sync_training_ckpt:
      # In a folder of its own, no rank would find the counts of the others.
      shared_dir = distribution_utils.get_shared_dir(self.model_dir, conf.index)
    return evaluation_metrics.Place(shared_dir, conf.index, conf.num_workers)

  def _limit_eval(self, steps: int | None) -> int | None:
    return _params_of(self._model).eval.steps if steps is None else steps

  def _create_evaluator(self) -> evaluation.Evaluator:
    model = copy.deepcopy(self._model)
    params = _params_of(model)
    params.mode = _EVAL
    return evaluation.Evaluator(model, self._runner_conf, self.model_dir, self._get_collected())

  def _get_collected(self) -> dict[str, dry_run.CollectedFeatures]:
    """Returns the storage of the dry run, which training and evaluation share.

    A model that was changed in between declares its features again.
    """
    params = copy.deepcopy(_params_of(self._model))
    attributes = {} if self._model is _params_of(self._model) else dict(vars(self._model))
    if self._collected_of is not None:
      old_params, old_attributes = self._collected_of
      is_same = (
        old_params == params
        and old_attributes.keys() == attributes.keys()
        and all(old_attributes[name] is value for name, value in attributes.items())
      )
      if not is_same:
        self._collected = {}
    self._collected_of = params, attributes
    return self._collected

  def _run(
    self,
    mode: str,
    steps: int | None,
    max_steps: int | None,
    hooks: Hooks | None,
    listener: evaluation.EvaluationListener | None = None,
    resume_data: bool | None = None,
  ) -> None:
    _check_hooks(hooks)
    if resume_data is not None and not self._runner_conf.is_local:
      raise ValueError(
        f"resume_data is {resume_data}, but this is no local run: workers of a cluster always go "
        "on in the same data"
      )
    if mode == _EVAL and steps is not None:
      hooks = [*(hooks or []), _StopAfterRunsHook(steps)]
    if not self._runner_conf.is_local and self._runner_conf.enable_full_sync_training:
      # The caller's configuration must know, too, which rank this is and where its files are.
      distribution_utils.init_sync_train_and_update_conf(self._runner_conf)
    conf = copy.copy(self._runner_conf)
    conf.mode = mode
    if mode == _EVAL and conf.server_type != utils.PS_JOB_NAME:
      checkpoint_files.require_newest(self.model_dir)
    utils.set_metric_prefix(f"monolith.training.{conf.deep_insight_name}")
    model = copy.deepcopy(self._model)
    params = _params_of(model)
    params.mode = mode
    _set_limits(params.train, mode, steps, max_steps)
    logging.debug("%s with %s", mode, params)
    if params.train.steps is not None and not conf.is_local and mode == _TRAIN:
      logging.warning(
        "train.steps = %d has no effect: this is no local run, use max_steps.", params.train.steps
      )
    try:
      if conf.is_local:
        # The task's steps must not override the given limit.
        by_max_steps = params.train.steps is None or (steps is None and max_steps is not None)
        self._run_local(conf, model, by_max_steps, hooks, listener, resume_data)
      elif conf.enable_full_sync_training:
        self._start_sync_backend()
        distributed_sync_train(conf, model, self._sync_backend, hooks)
      else:
        self._run_distributed(conf, model, hooks)
    finally:
      self.close()

  def _run_local(
    self,
    conf: RunnerConfig,
    model: Any,
    by_max_steps: bool,
    hooks: Hooks | None,
    listener: evaluation.EvaluationListener | None,
    resume_data: bool | None,
  ) -> None:
    if conf.only_feature_engineering:
      local_feature_engineering_internal(model, conf, self.model_dir, self._local_profiling)
      return
    train = _params_of(model).train
    if listener is not None and listener.every != _ONLY_AT_END:
      # An evaluation reads a checkpoint: there must be one, at the latest then.
      given = conf.save_checkpoints_steps or train.save_checkpoints_steps
      conf.save_checkpoints_steps = min(given or listener.every, listener.every)
    local_train_internal(
      model,
      conf,
      self.model_dir,
      steps=None if by_max_steps else train.steps,
      profiling=self._local_profiling,
      user_hooks=hooks,
      max_steps=train.max_steps if by_max_steps else None,
      saving_listeners=None if listener is None else [listener],
      resume_data=resume_data,
      collected=self._get_collected(),
    )

  def _run_distributed(self, conf: RunnerConfig, model: Any, hooks: Hooks | None) -> None:
    with monolith_discovery(self._runner_conf) as discovery:
      # The discovery may know the role of this process.
      conf.server_type, conf.index = self._runner_conf.server_type, self._runner_conf.index
      if conf.enable_gpu_training:
        device_utils.enable_gpu_training()
      if conf.enable_partial_sync_training and conf.server_type == "worker":
        distribution_utils.try_init_cuda()
        conf.device_fn = device_utils.get_device_fn()
        # Ranks meet in every step: none can come later.
        _params_of(model).train.slow_start_steps = 0
      self._start_sync_backend()
      assert discovery is not None  # only of local runs
      distributed_train(conf, discovery, model, self._sync_backend, hooks)

  def _start_sync_backend(self) -> None:
    if self._sync_backend is not None:
      conf = self._runner_conf
      self._sync_backend.start()
      self._sync_backend.subscribe_model(conf.model_name or conf.deep_insight_name)

  def predict(
    self,
    predict_keys: Any = None,
    hooks: Hooks | None = None,
    checkpoint_path: str | None = None,
    yield_single_examples: bool = True,
  ) -> Iterator[Any]:
    """Returns an iterator over the predictions for the task's data.

    Arguments are those of `graph_estimator.Estimator.predict`; the default of `checkpoint_path` is
    the newest checkpoint.

    Raises:
      ValueError: there is no checkpoint.
    """
    model, input_fn = self._get_estimator(), self._predict_input_fn
    assert input_fn is not None  # made with the estimator

    def predict(prefix: str) -> Iterator[Any]:
      predictions = model.predict(
        input_fn,
        predict_keys=predict_keys,
        hooks=hooks,
        checkpoint_path=prefix,
        yield_single_examples=yield_single_examples,
      )
      # The first one restores the checkpoint.
      return itertools.chain(list(itertools.islice(predictions, 1)), predictions)

    def predict_newest() -> Iterator[Any]:
      yield from restored.with_newest(self.model_dir, predict)

    return predict_newest() if checkpoint_path is None else predict(checkpoint_path)

  def export_saved_model(
    self,
    batch_size: int = 64,
    name: str | None = None,
    dense_only: bool = False,
    enable_fused_layout: bool = False,
    *,
    self_contained: bool = True,
  ) -> ExportPath | dict[str, ExportPath]:
    """Exports the newest checkpoint according to the task's serving params.

    Args:
      batch_size: the size of the task's batches while its features are collected.
      name: the task's name, `demo_export` by default.
      dense_only: leave out the tables.
      enable_fused_layout: build the fused-layout graph.
      self_contained: copy the tables' rows into the export, so that it can be moved and the
        checkpoint deleted; otherwise it reads them from the checkpoint, if the task's
        `serving.shared_embedding` says so.

    Returns:
      The folder of the model; with several graphs, their folders by name.

    Raises:
      ValueError: the model has no `serving_input_receiver_fn`.
    """
    model = copy.deepcopy(self._model)
    params = _params_of(model)
    params.mode = graph_estimator.ModeKeys.PREDICT
    params.name = name or "demo_export"
    params.train.per_replica_batch_size = batch_size
    if self_contained:
      params.serving.shared_embedding = False
    conf = copy.copy(self._runner_conf)
    conf.mode = graph_estimator.ModeKeys.PREDICT
    conf.enable_fused_layout = enable_fused_layout
    conf.server_type = "worker"
    with parsers.ParserCtx(enable_fused_layout):
      task = model.instantiate()
      exporter = create_exporter(
        CpuTraining(conf, task),
        self.model_dir,
        conf.warmup_file,
        os.path.join(self.model_dir, params.serving.export_dir_base),
        dense_only,
      )
      receiver_fn = task.create_serving_input_receiver_fn()
      if receiver_fn is None:
        raise ValueError(
          f"{type(task).__name__} cannot be exported: it has no serving_input_receiver_fn, which "
          "says what the exported model is fed"
        )
      exported = restored.with_newest(
        self.model_dir, lambda prefix: exporter.export_saved_model(receiver_fn, prefix)
      )
    if isinstance(exported, dict):
      return {graph: ExportPath(tf.compat.as_text(path)) for graph, path in exported.items()}
    return ExportPath(tf.compat.as_text(exported))

  def get_variable_value(self, name: str) -> np.ndarray:
    return self._get_estimator().get_variable_value(name)

  def get_variable_names(self) -> list[str]:
    return self._get_estimator().get_variable_names()

  def latest_checkpoint(self) -> str | None:
    return self._get_estimator().latest_checkpoint()

  def close(self) -> None:
    """Releases the connections of parameter synchronisation; errors are only logged."""
    backend, self._sync_backend = self._sync_backend, None
    client, self._zk_client = self._zk_client, None
    for resource in (backend, client):
      if resource is not None:
        try:
          resource.stop()
        except Exception:
          logging.exception("cannot stop %s", resource)

  def _get_estimator(self) -> graph_estimator.Estimator:
    """Returns the estimator of the graph in PREDICT mode, made on first use."""
    if self._estimator is not None:
      return self._estimator
    self._runner_conf.check_restore(self.model_dir)
    model = copy.deepcopy(self._model)
    _params_of(model).mode = graph_estimator.ModeKeys.PREDICT
    conf = copy.copy(self._runner_conf)
    conf.mode = graph_estimator.ModeKeys.PREDICT
    conf.server_type = "worker"
    # There are no servers: this process reads their files.
    conf.num_ps = 0
    training = CpuTraining(
      conf, model.instantiate(), collected=self._get_collected().get("features")
    )
    session_config = tf.compat.v1.ConfigProto()
    # Grappler breaks on ragged inputs.
    session_config.graph_options.rewrite_options.disable_meta_optimizer = True
    with evaluation.without_tf_config():
      self._estimator = graph_estimator.Estimator(
        training.create_model_fn(),
        config=graph_estimator.RunConfig(
          model_dir=self.model_dir,
          session_config=session_config,
          log_step_count_steps=conf.log_step_count_steps,
        ),
        warm_start_from=self._warm_start_from,
      )
    self._predict_input_fn = training.create_input_fn(graph_estimator.ModeKeys.PREDICT)
    return self._estimator


class ExportPath(str):
  """The folder of an export."""

  def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Returns the path as text, for programs that expect bytes."""
    del encoding, errors
    return str(self)


class _StopAfterRunsHook(tf.compat.v1.train.SessionRunHook):
  """Ends an evaluation after this many batches: its global step may stand still."""

  def __init__(self, runs: int):
    self._left = runs

  def after_run(
    self,
    run_context: tf.compat.v1.train.SessionRunContext,
    run_values: tf.compat.v1.train.SessionRunValues,
  ) -> None:
    self._left -= 1
    if self._left <= 0:
      run_context.request_stop()


def _set_limits(
  train: hyperparams.Params, mode: str, steps: int | None, max_steps: int | None
) -> None:
  """Makes the limits that a caller gave win over those of the task."""
  if mode == _EVAL:
    # The task's limits are those of its training, which may have reached them.
    train.steps = train.max_steps = None
  if steps is not None:
    train.steps = steps
  if max_steps is not None:
    train.max_steps = max_steps


def _check_hooks(hooks: Hooks | None) -> None:
  assert hooks is None or (
    isinstance(hooks, list) and all(isinstance(h, tf.compat.v1.train.SessionRunHook) for h in hooks)
  ), f"hooks is {hooks!r}, want a list of SessionRunHooks"


def _has_instantiate(model: native_task.NativeTask) -> bool:
  return callable(getattr(type(model), "instantiate", None))


def _params_of(model: Any) -> hyperparams.Params:
  return model if isinstance(model, hyperparams.Params) else model.p


@contextlib.contextmanager
def import_saved_model(
  saved_model_path: str,
  input_name: str | Sequence[str] = "instances",
  output_name: str | Sequence[str] | None = "output",
  signature: str | None = None,
) -> Iterator[Callable[[Any], dict[str, np.ndarray]]]:
  """Loads an exported model for the length of a `with` block.

  Args:
    saved_model_path: the folder of a version, or the one above, whose largest version is taken.
    input_name: name of the signature's input, or names.
    output_name: name of the output, or names; by default all of them.
    signature: name of the signature.

  Yields:
    A function that takes the input, or a dict of several by name, and returns a dict of outputs by
    name.

  Raises:
    RuntimeError: the folder has no version.
    KeyError: the model has no such signature, input or output.
  """
  signature = signature or tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
  with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as sess:
    meta_graph = tf.compat.v1.saved_model.load(
      sess, [tf.saved_model.SERVING], _find_version(saved_model_path)
    )
    signature_def = _get(meta_graph.signature_def, signature, "signature")
    input_names = [input_name] if isinstance(input_name, str) else list(input_name)
    output_names = [output_name] if isinstance(output_name, str) else list(output_name or [])
    inputs = {name: _get(signature_def.inputs, name, "input").name for name in input_names}
    outputs = {
      name: _get(signature_def.outputs, name, "output").name
      for name in output_names or signature_def.outputs
    }

    def infer(features: Any) -> dict[str, np.ndarray]:
      if len(inputs) == 1:
        feed_dict = {next(iter(inputs.values())): features}
      else:
        feed_dict = {inputs[name]: value for name, value in features.items()}
      return sess.run(outputs, feed_dict)

    yield infer


def _find_version(path: str) -> str:
  path = path.rstrip("/")
  if os.path.basename(path).isdigit():
    return path
  names = [name.rstrip("/") for name in tf.io.gfile.listdir(path)]
  versions = [name for name in names if name.isdigit()]
  if not versions:
    raise RuntimeError(f"no models in dir {path}")
  return os.path.join(path, max(versions, key=int))


def _get(mapping: Any, name: str, what: str) -> Any:
  # Indexing a map of messages creates missing ones.
  if name not in mapping:
    raise KeyError(f"the model has no {what} {name!r}, but {sorted(mapping)}")
  return mapping[name]
