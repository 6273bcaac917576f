"""A model is trained, evaluated, exported and served through `Estimator`."""

import copy
import dataclasses
import itertools
import json
import os
import shutil
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl import flags, logging
from absl.testing import flagsaver

from monolith.native_training import estimator, graph_estimator, input, model, utils
from monolith.native_training.graph import export_context
from monolith.native_training.runner_utils import RunnerConfig
from monolith.native_training.service_discovery import ServiceDiscoveryType

tf.compat.v1.disable_eager_execution()

FLAGS = flags.FLAGS


def _params(export_dir_base="exported_models"):
  params = model.TestFFMModel.params()
  params.name = "test_ffm_model"
  params.train.per_replica_batch_size = 64
  params.serving.export_dir_base = export_dir_base
  params.serving.shared_embedding = False
  return params


def _examples():
  np.random.seed(0)
  return [input.generate_ffm_example([5] * 6) for _ in range(64)]


class _CountHook(tf.compat.v1.train.SessionRunHook):
  def __init__(self):
    self.num_runs = 0

  def after_run(self, run_context, run_values):
    self.num_runs += 1


class EstimatorTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, cls._folder)
    cls._conf = RunnerConfig(
      is_local=True,
      num_ps=0,
      model_dir=os.path.join(cls._folder, "model"),
      use_native_multi_hash_table=False,
    )
    cls._export_base = os.path.join(cls._folder, "exports")
    cls._est = estimator.Estimator(_params(cls._export_base), cls._conf)
    cls._hook = _CountHook()
    cls._est.train(steps=10, hooks=[cls._hook])

  def test_train(self):
    self.assertEqual(self._hook.num_runs, 10)
    self.assertEqual(self._est.get_variable_value("global_step"), 10)
    self.assertIn("global_step", self._est.get_variable_names())
    self.assertEndsWith(self._est.latest_checkpoint(), "model.ckpt-10")
    self.assertEqual(self._est.model_dir, self._conf.model_dir)
    self.assertIs(self._est.config, self._conf)
    self.assertEqual(utils.get_metric_prefix(), "monolith.training.None")
    self.assertEqual(os.environ["TF_GRPC_WORKER_CACHE_THREADS"], "16")
    self.assertEqual(os.environ["MONOLITH_GRPC_WORKER_SERVICE_HANDLER_MULTIPLIER"], "1.0")

  def test_predict(self):
    predictions = list(itertools.islice(self._est.predict(), 64))
    self.assertLen(predictions, 64)
    self.assertTrue(all(0 < prediction < 1 for prediction in predictions))

  def test_export_and_infer(self):
    predictions = list(itertools.islice(self._est.predict(), 64))
    exported = self._est.export_saved_model()
    self.assertEqual(list(exported), ["entry"])
    self.assertIsInstance(exported["entry"], str)
    entry = os.path.join(self._export_base, "entry")
    os.makedirs(os.path.join(entry, "temp-999"))
    for path in (entry, entry + "/", exported["entry"].decode()):
      with estimator.import_saved_model(path) as infer:
        result = infer(_examples())
      self.assertEqual(list(result), ["output"])
      self.assertAllClose(result["output"], predictions, atol=1e-4)
    with estimator.import_saved_model(entry, ["instances"], None, "serving_default") as infer:
      self.assertEqual(list(infer(_examples())), ["output"])
    with self.assertRaisesRegex(KeyError, "no output 'nothing'"):
      with estimator.import_saved_model(entry, output_name="nothing"):
        pass

  def test_import_without_version(self):
    with self.assertRaisesRegex(RuntimeError, f"no models in dir {utils.get_test_tmp_dir()}"):
      with estimator.import_saved_model(utils.get_test_tmp_dir()):
        pass

  def test_bad_hooks(self):
    with self.assertRaisesRegex(AssertionError, "want a list of SessionRunHooks"):
      self._est.train(hooks=["hook"])
    with self.assertRaisesRegex(AssertionError, "want a list of SessionRunHooks"):
      self._est.evaluate(hooks=(_CountHook(),))


class EstimatorVariantsTest(tf.test.TestCase):
  def test_evaluate_runs_hooks(self):
    conf = RunnerConfig(is_local=True, model_dir=utils.get_test_tmp_dir())
    est = estimator.Estimator(_params(), conf)
    hook = _CountHook()
    est.train(steps=1)
    est.evaluate(steps=10, hooks=[hook])
    self.assertEqual(hook.num_runs, 10)
    self.assertEqual(conf.mode, graph_estimator.ModeKeys.TRAIN)

  def test_a_class_is_no_model(self):
    with self.assertRaisesRegex(TypeError, r"is the class TestFFMModel, want .* TestFFMModel\(\)"):
      estimator.Estimator(model.TestFFMModel, estimator.RunConfig(is_local=True))

  def test_a_task_and_a_run_config_and_servers(self):
    params = _params()
    params.serving.export_mode = export_context.ExportMode.DISTRIBUTED
    conf = estimator.RunConfig(is_local=True, num_ps=2, model_dir=utils.get_test_tmp_dir())
    est = estimator.Estimator(params.instantiate(), conf)
    est.train(steps=3)
    self.assertLen(list(itertools.islice(est.predict(), 64)), 64)
    self.assertCountEqual(est.export_saved_model(), ["entry", "ps_0", "ps_1"])

  def _train(self, override=None, **limits):
    """Returns the global step after a local training run."""
    params = _params()
    params.train.steps = 3
    conf = RunnerConfig(
      is_local=True, model_dir=self.create_tempdir().full_path, params_override=override
    )
    est = estimator.Estimator(params, conf)
    est.train(**limits)
    self.assertEqual(params.train.steps, 2 if override else 3)
    return est.get_variable_value("global_step")

  def test_limits_of_the_task_count_unless_others_are_given(self):
    self.assertEqual(self._train(), 3)
    self.assertEqual(self._train('{"train.steps": 2}'), 2)
    self.assertEqual(self._train('{"train.steps": 2}', steps=4), 4)
    self.assertEqual(self._train('{"train.steps": 2}', max_steps=4), 4)
    self.assertEqual(self._train('{"train.steps": 2}', steps=1, max_steps=4), 1)

  def test_limits_reach_distributed_training(self):
    conf = RunnerConfig(
      discovery_type=ServiceDiscoveryType.PRIMUS,
      tf_config='{"cluster": {"chief": ["c:1"]}, "task": {"type": "chief", "index": 0}}',
      params_override='{"train.max_steps": 5, "train.slow_start_steps": 7}',
    )
    for given, want in (({}, 5), ({"max_steps": 9}, 9), ({"steps": 2}, 5)):
      est = estimator.Estimator(_params(), conf)
      with mock.patch.object(estimator, "distributed_train") as distributed_train:
        with self.assertLogs("absl", "INFO") as logs:
          est.train(**given)

      train = distributed_train.call_args[0][2].train
      self.assertEqual((train.max_steps, train.slow_start_steps), (want, 7))
      self.assertEqual(
        any("train.steps = 2 has no effect" in line for line in logs.output), "steps" in given
      )

  def test_evaluation_has_limits_of_its_own(self):
    params = _params()
    params.train.max_steps = 1
    params.eval.steps = 3
    est = estimator.Estimator(
      params, RunnerConfig(is_local=True, model_dir=self.create_tempdir().full_path)
    )
    est.train()
    hook = _CountHook()

    est.evaluate(hooks=[hook])

    self.assertEqual(hook.num_runs, 3)

  def test_checkpoint_that_cannot_be_restored_ends_the_job(self):
    folder = self.create_tempdir().full_path
    with flagsaver.flagsaver():
      conf = RunnerConfig(is_local=True, model_dir=folder, restore_ckpt="model.ckpt-7")
      for run in ("train", "evaluate", "predict", "latest_checkpoint"):
        with self.assertRaisesRegex(ValueError, f"restore_ckpt is model.ckpt-7, but {folder}"):
          getattr(estimator.Estimator(_params(), conf), run)()
    self.assertEqual(os.listdir(folder), [])

  def test_every_process_of_a_cluster_ends_without_its_checkpoint(self):
    folder = self.create_tempdir().full_path
    cluster = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    for role in cluster:
      with flagsaver.flagsaver():
        conf = RunnerConfig(
          discovery_type=ServiceDiscoveryType.PRIMUS,
          tf_config=json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}),
          num_ps=1,
          model_dir=folder,
          restore_ckpt="model.ckpt-7",
        )
        with self.assertRaisesRegex(ValueError, f"restore_ckpt is model.ckpt-7, but {folder}"):
          estimator.Estimator(_params(), conf).train(max_steps=1)

  def test_local_profiling(self):
    folder = self.create_tempdir().full_path
    conf = estimator.RunConfig(is_local=True, model_dir=folder, enable_local_profiling=True)

    estimator.Estimator(_params(), conf).train(steps=2)

    self.assertLen(os.listdir(os.path.join(folder, "plugins", "profile")), 1)

  def test_local_profiling_elsewhere_is_answered(self):
    with self.assertLogs("absl", "WARNING") as logs:
      estimator.Estimator(_params(), estimator.RunConfig(enable_local_profiling=True))

    self.assertIn("enable_local_profiling has no effect", "".join(logs.output))

  def test_local_feature_engineering(self):
    folder = self.create_tempdir().full_path
    conf = RunnerConfig(is_local=True, model_dir=folder, only_feature_engineering=True)
    params = _params()
    original = model.TestFFMModel.create_input_fn

    def one_batch(self, mode):
      return lambda: original(self, mode)().take(1)

    with mock.patch.object(model.TestFFMModel, "create_input_fn", one_batch):
      estimator.Estimator(params, conf).train()

    self.assertLen(os.listdir(os.path.join(folder, "features")), 1)
    self.assertIsNone(tf.train.latest_checkpoint(folder))

  def test_params_override(self):
    conf = RunnerConfig(is_local=True, params_override='{"train.repeat": true, "name": "other"}')
    params = _params()
    est = estimator.Estimator(params, conf)
    self.assertTrue(params.train.repeat)
    self.assertEndsWith(est.model_dir, "/other")

  def test_metrics(self):
    params = _params()
    estimator.Estimator(
      params, RunnerConfig(deep_insight_name="job", deep_insight_sample_ratio=0.5)
    )
    self.assertTrue(params.metrics.enable_deep_insight)
    self.assertEqual(params.metrics.deep_insight_name, "job")
    self.assertEqual(params.metrics.deep_insight_target, "ctr_head")
    self.assertEqual(params.metrics.deep_insight_sample_ratio, 0.5)
    estimator.Estimator(params, RunnerConfig(is_local=True))
    self.assertFalse(params.metrics.enable_deep_insight)

  def test_realtime_servers_need_names(self):
    conf = RunnerConfig(enable_realtime_training=True, server_type="ps", bzid="b")
    with self.assertRaisesRegex(AssertionError, "needs bzid and base_name"):
      estimator.Estimator(_params(), conf)


class RunConfigTest(tf.test.TestCase):
  def test_defaults_do_not_override(self):
    conf = estimator.RunConfig().to_runner_config()
    self.assertEqual(conf.max_retry_times, 0)
    self.assertEqual(conf.retry_wait_in_secs, 30)
    self.assertEqual(conf.discovery_type, ServiceDiscoveryType.ZK)
    self.assertEqual(conf.embedding_prefetch_capacity, 1)
    self.assertTrue(conf.enable_embedding_postpush)
    self.assertFalse(conf.enable_realtime_training)
    self.assertIsNone(conf.partial_recovery)

  def test_given_defaults_without_effect_are_named(self):
    config = estimator.RunConfig(
      is_local=True, max_retry_times=6, retry_wait_in_secs=7, partial_recovery=False, num_ps=0
    )
    for given in (config, copy.deepcopy(config)):
      with self.assertLogs("absl", "WARNING") as logs:
        given.to_runner_config()

      self.assertEqual(
        logs.output,
        [
          "WARNING:absl:RunConfig does not hand on its own defaults, so these have no effect: "
          "partial_recovery = False (it is None), max_retry_times = 6 (it is 0). Set them on what "
          "to_runner_config() returns."
        ],
      )

  def test_defaults_that_are_not_given_are_not_named(self):
    config = estimator.RunConfig(is_local=True)
    for quiet in (
      config,
      dataclasses.replace(config),
      estimator.RunConfig.from_json(config.to_json()),
    ):
      with self.assertLogs("absl", "WARNING") as logs:
        quiet.to_runner_config()
        logging.warning("the only one")
      self.assertEqual(len(logs.output), 1, logs.output)

  def test_values_override(self):
    conf = estimator.RunConfig(
      is_local=True, num_ps=3, max_retry_times=2, enable_parameter_sync=True, warmup_file="w",
      reload_alias_map={"a": "b"}, kafka_topics="x,y",
    ).to_runner_config()  # fmt: skip
    self.assertTrue(conf.is_local)
    self.assertEqual(conf.num_ps, 3)
    self.assertEqual(conf.max_retry_times, 2)
    self.assertEqual(conf.warmup_file, "w")
    self.assertEqual(conf.reload_alias_map, {"a": "b"})
    self.assertEqual(conf.kafka_topics, ["x", "y"])
    self.assertTrue(conf.enable_realtime_training)

  @flagsaver.flagsaver(num_ps=4, checkpoints_max_to_keep=7)
  def test_code_beats_flags(self):
    self.assertEqual(estimator.RunConfig().to_runner_config().num_ps, 4)
    conf = estimator.RunConfig(num_ps=2).to_runner_config()
    self.assertEqual(conf.num_ps, 2)
    self.assertEqual(conf.checkpoints_max_to_keep, 7)

  def test_json(self):
    conf = estimator.RunConfig(num_ps=2, reload_alias_map={"a": "b"})
    self.assertEqual(estimator.RunConfig.from_json(conf.to_json()), conf)
    self.assertLen(dataclasses.fields(conf), 37)


class EstimatorSpecTest(tf.test.TestCase):
  def test_defaults(self):
    spec = estimator.EstimatorSpec("label", "pred")
    self.assertEqual(tuple(spec), ("label", "pred", None, None, None, True))
    self.assertEqual(spec._replace(loss=1).loss, 1)


if __name__ == "__main__":
  tf.test.main()
