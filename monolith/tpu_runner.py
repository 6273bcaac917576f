"""Trains or evaluates a registered task with a `TPUEstimator`, on a TPU or, for tests, on CPU.

    python -m monolith.tpu_runner --task=<module>.<Class> --model_dir=<folder> --mode=train

`tf.compat.v1.disable_v2_behavior()` must be in force before `TPURunner.run`; the command line does
it. Importing this module defines absl flags and nothing else.

TPUEstimator exists up to TensorFlow 2.15: take that version to train on a TPU.

Differences from ByteDance's Monolith: `--cpu_test` honours `--model_dir` and can evaluate;
`train_and_eval` is refused before a TPU is touched; evaluation looks at every checkpoint that is
kept, not only at the latest; its event file has a name of its own, so that none is overwritten; bad
flags are refused early.
"""

import os
import time
from collections.abc import Iterator
from typing import Any, Callable, Optional

import tensorflow as tf
from absl import app, flags, logging

from monolith import _install, base_runner
from monolith.core import (
  auto_checkpoint_feed_hook,
  base_embedding_task,
  hyperparams,
)

FLAGS = flags.FLAGS

_CPU_BATCH_SIZE = 128
_REPLICAS_PER_HOST = 8
_WORKER_JOB = "worker"
_HOST_CALL_EVERY_N_STEPS_WHEN_DISABLED = 100
_PARTITION_STRATEGIES = ("mod", "div")
_CHECKPOINT_TIMEOUT_SECONDS = 18000

_define = base_runner.define_flag

base_runner.define_task_flags()
_define(flags.DEFINE_string, "tf_version", "nightly", "Accepted, not used.")
_define(
  flags.DEFINE_string, "tpu", None, "Name of the Cloud TPU, or grpc://ip:8470[,grpc://ip:8470...]."
)
_define(flags.DEFINE_string, "gcp_project", None, "Project of the TPU; None: detected.")
_define(flags.DEFINE_string, "tpu_zone", None, "Zone of the TPU; None: detected.")
_define(flags.DEFINE_integer, "iterations_per_loop", 10000, "Steps of one loop on the device.")
_define(
  flags.DEFINE_bool,
  "pipeline_execution",
  False,
  "Whether lookups overlap with the dense model, one step stale.",
)
_define(
  flags.DEFINE_bool,
  "enable_tpu_version_config",
  True,
  "Whether the TPU is first reset to this TensorFlow version.",
)
_define(
  flags.DEFINE_integer, "host_call_every_n_steps", 500, "Steps between host calls; 0: no host call."
)
_define(
  flags.DEFINE_bool,
  "enable_stopping_signals",
  False,
  "Whether training ends, with a final checkpoint, when the data ends.",
)
_define(flags.DEFINE_bool, "cpu_test", False, "Whether to run on the local CPU.")
_define(flags.DEFINE_string, "partition_strategy", "mod", "Sharding of tables, mod or div.")
_define(flags.DEFINE_string, "overwrite_end_date", "", "Replaces train.end_date, YYYYMMDD.")


class TPURunner(base_runner.BaseRunner):
  """Runs one task, as the flags say."""

  def __init__(self, task_param: hyperparams.InstantiableParams, *args: Any, **kwargs: Any):
    """Args:
    task_param: params of a `BaseTask`; its `accelerator` is set to `tpu`.
    """
    super().__init__(*args, **kwargs)
    self._tpu = FLAGS.tpu
    self._tpu_zone = FLAGS.tpu_zone
    self._gcp_project = FLAGS.gcp_project
    self._model_dir = FLAGS.model_dir
    self._pipeline_execution = FLAGS.pipeline_execution
    self.iterations_per_loop = FLAGS.iterations_per_loop
    self._enable_tpu_version_config = FLAGS.enable_tpu_version_config
    self._host_call_every_n_steps = FLAGS.host_call_every_n_steps
    self._enable_stopping_signals = FLAGS.enable_stopping_signals
    self._cpu_test = FLAGS.cpu_test
    self._partition_strategy = FLAGS.partition_strategy
    self._mode = FLAGS.mode
    self._num_replicas_per_host = _REPLICAS_PER_HOST
    self._checkpoint_timeout_seconds = _CHECKPOINT_TIMEOUT_SECONDS
    self._task = None
    self._task_param = task_param
    self._task_param.accelerator = "tpu"
    self._save_checkpoints_steps = task_param.train.save_checkpoints_steps
    if self._save_checkpoints_steps is None:
      self._save_checkpoints_steps = FLAGS.save_checkpoints_steps
    if FLAGS.overwrite_end_date:
      if "end_date" in self._task_param.train:
        self._task_param.train.end_date = FLAGS.overwrite_end_date
      else:
        logging.warning("The task has no train.end_date: --overwrite_end_date is ignored")

  def _experimental_gradient_multiplier_fn(self, global_step: Any) -> float:
    del global_step
    return self._task_param.gradient_multiplier

  def _create_params(self, total_replicas: int) -> dict[str, Any]:
    """Returns the params of the input and model functions, but for what TPUEstimator adds."""
    return {
      "model_dir": self._model_dir,
      "enable_host_call": self._host_call_every_n_steps > 0,
      "num_replicas": total_replicas,
      "accelerator": "tpu",
      "host_call_every_n_steps": self._host_call_every_n_steps,
      "enable_stopping_signals": self._enable_stopping_signals,
      "cpu_test": self._cpu_test,
    }

  # -------------------------------------------------------------------- estimators

  def create_tpu_estimator(
    self,
    model_fn: Callable[..., Any],
    feature_config: Optional[dict[str, Any]],
    table_config: Optional[dict[str, Any]],
  ) -> tuple[tf.compat.v1.estimator.tpu.TPUEstimator, int]:
    """Connects to the TPU and returns the estimator and the number of replicas.

    Args:
      model_fn: the task's.
      feature_config: TPU embedding features by name; None or empty without embeddings.
      table_config: TPU embedding tables by name.

    Raises:
      ValueError: there is no such TPU.
      TypeError: `train.per_replica_batch_size` is None.
    """
    if self._enable_tpu_version_config:
      self._configure_tpu_version()
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
      self._tpu, zone=self._tpu_zone, project=self._gcp_project
    )
    cluster_spec = resolver.cluster_spec()
    # A local TPU has no worker job: it is one host.
    hosts = cluster_spec.num_tasks(_WORKER_JOB) if _WORKER_JOB in cluster_spec.jobs else 1
    total_replicas = hosts * self._num_replicas_per_host
    per_replica = self._require(self._task_param.train, "train", "per_replica_batch_size")
    train_batch_size = total_replicas * per_replica
    eval_per_replica = self._task_param.eval.per_replica_batch_size
    eval_batch_size = (
      train_batch_size if eval_per_replica is None else eval_per_replica * total_replicas
    )
    logging.info("TPU hosts: %d, replicas: %d", hosts, total_replicas)

    feed_hook = None
    if self._enable_stopping_signals:
      feed_hook = auto_checkpoint_feed_hook.TPUInfeedOutfeedSessionWithEndOfStreamHandlingHook
    run_config = tf.compat.v1.estimator.tpu.RunConfig(
      cluster=resolver,
      model_dir=self._model_dir,
      save_checkpoints_steps=self._save_checkpoints_steps,
      tpu_config=self._create_tpu_config(feed_hook),
    )
    run_config.session_config.graph_options.rewrite_options.disable_meta_optimizer = True
    estimator = tf.compat.v1.estimator.tpu.TPUEstimator(
      use_tpu=True,
      model_fn=model_fn,
      config=run_config,
      train_batch_size=train_batch_size,
      eval_batch_size=eval_batch_size,
      params=self._create_params(total_replicas),
      embedding_config_spec=self._create_embedding_config_spec(
        feature_config, table_config, partition_strategy=self._partition_strategy
      ),
    )
    return estimator, total_replicas

  def create_tpu_estimator_on_cpu(
    self,
    model_fn: Callable[..., Any],
    feature_config: Optional[dict[str, Any]],
    table_config: Optional[dict[str, Any]],
  ) -> tuple[tf.compat.v1.estimator.tpu.TPUEstimator, int]:
    """Returns an estimator that runs in this process on CPU, and 1."""
    run_config = tf.compat.v1.estimator.tpu.RunConfig(
      cluster=None,
      model_dir=self._model_dir,
      save_checkpoints_steps=self._save_checkpoints_steps,
      tpu_config=self._create_tpu_config(feed_hook=None),
    )
    estimator = tf.compat.v1.estimator.tpu.TPUEstimator(
      use_tpu=False,
      model_fn=model_fn,
      config=run_config,
      train_batch_size=_CPU_BATCH_SIZE,
      eval_batch_size=self._task_param.eval.per_replica_batch_size or _CPU_BATCH_SIZE,
      params=self._create_params(total_replicas=1),
      # TensorFlow checks the spec and then ignores it: the task looks its tables up itself.
      embedding_config_spec=self._create_embedding_config_spec(feature_config, table_config),
    )
    return estimator, 1

  def _configure_tpu_version(self) -> None:
    """Resets the TPU to this TensorFlow version."""
    client = _import_tpu_client().Client(
      tpu=self._tpu, zone=self._tpu_zone, project=self._gcp_project
    )
    try:
      client.configure_tpu_version(version=tf.__version__, restart_type="always")
    except RuntimeError as error:
      if "Google API client" not in str(error):
        raise
      raise RuntimeError(
        "Configuring the TPU version needs the Google API client: "
        f"{_install.install_line('tpu')}, or pass --noenable_tpu_version_config"
      ) from error
    if str(self._tpu).startswith("grpc://"):
      logging.info("The health of the raw address %s cannot be known: not waiting", self._tpu)
    else:
      client.wait_for_healthy()

  def _create_tpu_config(self, feed_hook: Optional[type]) -> Any:
    tpu = tf.compat.v1.estimator.tpu
    return tpu.TPUConfig(
      iterations_per_loop=self.iterations_per_loop,
      experimental_host_call_every_n_steps=(
        self._host_call_every_n_steps or _HOST_CALL_EVERY_N_STEPS_WHEN_DISABLED
      ),
      per_host_input_for_training=tpu.InputPipelineConfig.PER_HOST_V2,
      experimental_allow_per_host_v2_parallel_get_next=True,
      experimental_feed_hook=feed_hook,
    )

  def _create_embedding_config_spec(
    self,
    feature_config: Optional[dict[str, Any]],
    table_config: Optional[dict[str, Any]],
    **kwargs: Any,
  ) -> Optional[Any]:
    if not (feature_config and table_config):
      return None
    return tf.compat.v1.estimator.tpu.experimental.EmbeddingConfigSpec(
      feature_to_config_dict=feature_config,
      table_to_config_dict=table_config,
      pipeline_execution_with_tensor_core=self._pipeline_execution,
      experimental_gradient_multiplier_fn=self._experimental_gradient_multiplier_fn,
      # Every table has its own parameters, these are never used, but they are required.
      optimization_parameters=tf.compat.v1.tpu.experimental.AdagradParameters(learning_rate=1.0),
      **kwargs,
    )

  # --------------------------------------------------------------------------- run

  def run(self) -> None:
    """Trains or evaluates.

    Raises:
      TypeError: the mode is `train_and_eval`, or something the mode needs is None.
      ValueError: flags or params contradict each other.
    """
    if self._mode == "train_and_eval":
      raise TypeError("train_and_eval has not been supported.")
    self._validate()
    logging.info("Current step: %d", self._load_global_step())

    self._task = self._task_param.instantiate()
    feature_config, table_config = None, None
    if isinstance(self._task, base_embedding_task.BaseEmbeddingTask):
      self._task.init_slot_to_env()
      feature_config, table_config = self._task.create_feature_and_table_config_dict()
    train_input_fn = self._task.create_input_fn(tf.estimator.ModeKeys.TRAIN)
    model_fn = self._task.create_model_fn()
    if self._cpu_test:
      if isinstance(self._task, base_embedding_task.BaseEmbeddingTask):
        model_fn = self._wrap_model_fn_for_cpu(model_fn)
      estimator, total_replicas = self.create_tpu_estimator_on_cpu(
        model_fn, feature_config, table_config
      )
    else:
      estimator, total_replicas = self.create_tpu_estimator(model_fn, feature_config, table_config)

    if self._mode == "train":
      estimator.train(train_input_fn, max_steps=self._task_param.train.max_steps)
    else:
      self._evaluate(estimator, total_replicas)

  def _validate(self) -> None:
    """Refuses, before anything is started, what cannot work."""
    if self._cpu_test and self._tpu:
      raise ValueError(f"--cpu_test and --tpu={self._tpu} contradict each other: give one of them")
    if self._partition_strategy not in _PARTITION_STRATEGIES:
      raise ValueError(
        f"--partition_strategy={self._partition_strategy}, want one of {_PARTITION_STRATEGIES}"
      )
    for flag, value in (
      ("host_call_every_n_steps", self._host_call_every_n_steps),
      ("save_checkpoints_steps", self._save_checkpoints_steps or 0),
    ):
      if value < 0:
        raise ValueError(f"--{flag}={value} is negative")
    if self.iterations_per_loop < 1:
      raise ValueError(f"--iterations_per_loop={self.iterations_per_loop}, want at least 1")
    if self._mode == "eval":
      self._validate_eval()
      return
    if self._save_checkpoints_steps is None:
      logging.warning(
        "No checkpoint will be written: set --save_checkpoints_steps or "
        "train.save_checkpoints_steps"
      )
    if self._cpu_test and self._task_param.train.max_steps is None:
      logging.warning("train.max_steps is None: training goes on until the data ends")
    if self._cpu_test and self._enable_stopping_signals:
      logging.warning("--enable_stopping_signals has no effect with --cpu_test")

  def _validate_eval(self) -> None:
    if not self._model_dir:
      raise TypeError("--mode=eval needs --model_dir, the folder of the checkpoints")
    if not tf.io.gfile.isdir(self._model_dir):
      logging.warning("--model_dir=%s does not exist yet", self._model_dir)
    params = self._task_param
    examples = self._require(params.input, "input", "eval_examples")
    if self._cpu_test:
      batch_size = params.eval.per_replica_batch_size or _CPU_BATCH_SIZE
    else:
      batch_size = self._require(params.eval, "eval", "per_replica_batch_size")
    if examples < batch_size:
      raise ValueError(
        f"input.eval_examples is {examples}, fewer than one batch of {batch_size} examples"
      )

  def _wrap_model_fn_for_cpu(self, model_fn: Callable[..., Any]) -> Callable[..., Any]:
    task = self._task

    def model_fn_on_cpu(features: dict[str, Any], mode: str, params: dict[str, Any]) -> Any:
      is_sparse = {name: isinstance(value, tf.SparseTensor) for name, value in features.items()}
      features = task.process_features_for_cpu_test(features)
      for name, value in features.items():
        if is_sparse.get(name):
          # Batches are complete, but lookups lose the static batch size that host calls need.
          features[name] = tf.ensure_shape(value, [params["batch_size"], *value.shape[1:]])
      return model_fn(features, mode, params)

    return model_fn_on_cpu

  # -------------------------------------------------------------------- evaluation

  def _evaluate(self, estimator: Any, total_replicas: int) -> None:
    """Evaluates the newest checkpoint, and newer ones until one has reached `train.max_steps`."""
    params = self._task_param
    input_fn = self._task.create_input_fn(tf.estimator.ModeKeys.EVAL)
    per_replica = params.eval.per_replica_batch_size or _CPU_BATCH_SIZE
    steps = params.input.eval_examples // (per_replica * total_replicas)
    if steps < 1:
      raise ValueError(
        f"input.eval_examples is {params.input.eval_examples}, fewer than one batch of "
        f"{per_replica} x {total_replicas} examples"
      )
    writer = self._open_eval_writer("tpu_runner")
    try:
      for checkpoint in self._iterate_checkpoints():
        step = _checkpoint_step(checkpoint)
        try:
          start = time.time()
          logging.info("Evaluating %s", checkpoint)
          results = estimator.evaluate(input_fn, steps=steps, checkpoint_path=checkpoint)
        except (tf.errors.NotFoundError, ValueError) as error:
          # The estimator says that a checkpoint is gone by a ValueError, but not by that alone.
          if isinstance(error, ValueError) and tf.compat.v1.train.checkpoint_exists(checkpoint):
            raise
          logging.warning("Skipping %s, which may have been deleted: %s", checkpoint, error)
          continue
        logging.info("Results at step %d: %s, %.1f s", step, results, time.time() - start)
        self.write_summary(results, writer, step)
        writer.flush()
        if params.train.max_steps is not None and step >= params.train.max_steps:
          logging.info("Evaluation finished after step %d", step)
          return
    finally:
      writer.close()

  def _iterate_checkpoints(self) -> Iterator[str]:
    """Returns the newest checkpoint in the model folder, then each newer one when it appears."""

    def on_timeout() -> bool:
      logging.warning(
        "No new checkpoint in %s for %d s: evaluation ends",
        self._model_dir,
        self._checkpoint_timeout_seconds,
      )
      return True

    return tf.train.checkpoints_iterator(
      self._model_dir, timeout=self._checkpoint_timeout_seconds, timeout_fn=on_timeout
    )


def _checkpoint_step(checkpoint: str) -> int:
  """Returns the step of `.../model.ckpt-<step>`, read from the checkpoint if its name has none."""
  suffix = os.path.basename(checkpoint).partition("-")[2]
  if suffix.isdigit():
    return int(suffix)
  return int(tf.train.load_variable(checkpoint, "global_step"))


def _import_tpu_client() -> Any:
  """Returns the module of the Cloud TPU client that TensorFlow itself uses.

  Importing the other one as well would define its flags twice.
  """
  try:
    from cloud_tpu_client import client
  except ImportError:
    logging.info("cloud-tpu-client is not installed (%s)", _install.install_line("tpu"))
    from tensorflow.python.tpu.client import client
  return client


def main(argv: list[str]) -> None:
  """Runs the task that the flags name.

  Raises:
    app.UsageError: `--task` is missing, or there are arguments that are not flags.
    LookupError: there is no such task; the nearest names are suggested.
  """
  base_runner.run_task(TPURunner, argv)


def cli() -> None:
  """Runs the command line."""
  tf.compat.v1.disable_v2_behavior()
  app.run(main)


if __name__ == "__main__":
  cli()
