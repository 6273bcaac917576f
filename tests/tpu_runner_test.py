"""Tests of `monolith.tpu_runner` on CPU: the command line, flags and evaluation.

Covers `tasks/base_tpu_test.py`, and the tasks `tasks/parity_data.py` and `tasks/parity_example.py`.
"""

import glob
import os
import pathlib
import subprocess
import sys
import textwrap
import unittest
from unittest import mock

import pytest
import tensorflow as tf

if not hasattr(tf, "estimator"):
  raise unittest.SkipTest("TPUEstimator ended with TensorFlow 2.15")

from absl import app, flags
from absl.testing import flagsaver

from monolith import tpu_runner
from monolith.core import model_registry
from monolith.tasks import parity_data
from monolith.tasks.base_tpu_test import BaseTPUTest
from tests.tpu_runner_testing import EXAMPLE, SIMPLE, DataTestCase, read_scalars

pytestmark = pytest.mark.thorough

tf.compat.v1.disable_v2_behavior()

ROOT = pathlib.Path(__file__).absolute().parent.parent


def run_command(*args, python_path=(), check=True):
  """Runs `python -m monolith.tpu_runner` in a process of its own; returns it and its output."""
  environment = dict(os.environ)
  environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *python_path])
  process = subprocess.run(
    [sys.executable, "-m", "monolith.tpu_runner", *args],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=300,
    check=False,
  )
  if check and process.returncode:
    raise AssertionError(f"exit status {process.returncode}:\n{process.stdout[-5000:]}")
  return process


class CommandLineTest(DataTestCase):
  def test_train_evaluate_and_resume(self):
    run_command(
      "--cpu_test",
      "--mode=train",
      f"--task={EXAMPLE}",
      f"--model_dir={self.model_dir}",
      "--save_checkpoints_steps=25",
      "--host_call_every_n_steps=1",
    )

    reader = tf.train.load_checkpoint(self.model_dir)
    self.assertEqual(reader.get_tensor("global_step"), 100)
    shapes = reader.get_variable_to_shape_map()
    for name, shape in {
      "table_1_0": [50, 1],
      "table_1_1": [50, 4],
      "table_2_0": [20, 1],
      "table_2_1": [20, 4],
    }.items():
      self.assertEqual(shapes[name], shape)
      self.assertIn(f"{name}/Adagrad", shapes)
    bias = reader.get_tensor("table_2_0")[:, 0]
    # From 0; how much is left to the tower depends on its random start.
    self.assertTrue((bias[1::2] > 0.1).all() and (bias[0::2] < -0.1).all(), bias)
    first = tf.train.load_checkpoint(os.path.join(self.model_dir, "model.ckpt-0"))
    self.assertTrue((first.get_tensor("table_2_0") == 0).all())
    host_call = read_scalars(os.path.join(self.model_dir, "host_call"))
    # One call for each step. It reads the global step while the step is counted: two calls may read
    # the same number.
    self.assertEqual(sum(map(len, host_call["loss_avg"].values())), 100)
    self.assertLessEqual(set(host_call["loss_avg"]), set(range(101)))
    self.assertGreater(host_call["auc"][max(host_call["auc"])][-1], 0.8)
    self.assertIn("sampled_labels_variable_avg", host_call)

    process = run_command(
      "--cpu_test", "--mode=eval", f"--task={EXAMPLE}", f"--model_dir={self.model_dir}"
    )
    self.assertIn("Current step: 100", process.stdout)
    self.assertIn("Evaluation finished after step 100", process.stdout)
    scalars = read_scalars(os.path.join(self.model_dir, "eval"))
    for tag in ("auc", "loss"):  # written by the estimator and by the runner
      self.assertEqual({s: len(v) for s, v in scalars[tag].items()}, {100: 2})
    self.assertEqual(scalars["global_step"], {100: [100]})
    # A perfect model reaches 1 - FLIPPED_SHARE on what it has not seen.
    self.assertAlmostEqual(scalars["auc"][100][0], 1 - parity_data.FLIPPED_SHARE, delta=0.03)
    self.assertLess(scalars["loss"][100][0], 0.4)  # 0.325 is the entropy of the flips

    (pathlib.Path(self.folder) / "longer_parity.py").write_text(
      textwrap.dedent(
        """
        from monolith.core import model_registry
        from monolith.tasks import parity_example

        @model_registry.RegisterSingleTaskModel
        class Longer(parity_example.ParityExample):
          def task(self):
            return super().task().set(**{'train.max_steps': 120})
        """
      )
    )
    process = run_command(
      "--cpu_test",
      "--task=longer_parity.Longer",
      f"--model_dir={self.model_dir}",
      "--save_checkpoints_steps=30",
      "--host_call_every_n_steps=0",
      python_path=[self.folder],
    )
    self.assertIn("Current step: 100", process.stdout)
    self.assertEqual(tf.train.load_variable(self.model_dir, "global_step"), 120)

  def test_no_tpu_name(self):
    process = run_command(f"--task={EXAMPLE}", check=False)
    self.assertNotEqual(process.returncode, 0)
    self.assertIn("ValueError: Please provide a TPU Name to connect to.", process.stdout)


class ParityOnCpuTest(DataTestCase, BaseTPUTest):
  def test_run_with_cpu(self):
    runner = self.runWithCPU(EXAMPLE)
    self.assertEqual(runner._task_param.accelerator, "tpu")
    self.assertIsNone(runner._model_dir)

  def test_merge_vector(self):
    runner = self.runMergeVectorTestOnCPU(EXAMPLE)
    self.assertEqual(runner._task._env._slot_to_merged_dims, {1: [1, 4], 2: [1, 4]})


class FlagsTest(DataTestCase):
  def _runner(self, task_settings=None, task=SIMPLE, **values):
    with flagsaver.flagsaver(**values):
      return tpu_runner.TPURunner(model_registry.GetParams(task).set(**(task_settings or {})))

  def test_defaults(self):
    want = {
      "tf_version": "nightly",
      "tpu": None,
      "gcp_project": None,
      "tpu_zone": None,
      "task": None,
      "model_dir": None,
      "mode": "train",
      "save_checkpoints_steps": None,
      "iterations_per_loop": 10000,
      "pipeline_execution": False,
      "enable_tpu_version_config": True,
      "host_call_every_n_steps": 500,
      "enable_stopping_signals": False,
      "cpu_test": False,
      "partition_strategy": "mod",
      "overwrite_end_date": "",
    }
    self.assertEqual({name: flags.FLAGS[name].default for name in want}, want)

  def test_attributes(self):
    runner = self._runner(
      tpu="t",
      tpu_zone="z",
      gcp_project="p",
      model_dir="m",
      pipeline_execution=True,
      iterations_per_loop=5,
      enable_tpu_version_config=False,
      host_call_every_n_steps=3,
      enable_stopping_signals=True,
      cpu_test=True,
      partition_strategy="div",
      save_checkpoints_steps=9,
      mode="eval",
    )
    self.assertEqual(
      (
        runner._tpu,
        runner._tpu_zone,
        runner._gcp_project,
        runner._model_dir,
        runner._pipeline_execution,
        runner.iterations_per_loop,
        runner._enable_tpu_version_config,
        runner._host_call_every_n_steps,
        runner._enable_stopping_signals,
        runner._cpu_test,
        runner._partition_strategy,
        runner._save_checkpoints_steps,
        runner._mode,
        runner._task,
        runner._num_replicas_per_host,
      ),
      ("t", "z", "p", "m", True, 5, False, 3, True, True, "div", 9, "eval", None, 8),
    )
    self.assertEqual(runner._task_param.accelerator, "tpu")

  def test_checkpoint_steps_of_the_task_win(self):
    runner = self._runner({"train.save_checkpoints_steps": 4}, save_checkpoints_steps=9)
    self.assertEqual(runner._save_checkpoints_steps, 4)

  def test_overwrite_end_date(self):
    for date in ("20200229", "2020-02-29"):  # what a date looks like is the task's business
      runner = self._runner(task=EXAMPLE, overwrite_end_date=date)
      self.assertEqual(runner._task_param.train.end_date, date)
    with self.assertLogs("absl", level="WARNING") as logs:
      self._runner(overwrite_end_date="20200229")
    self.assertIn("The task has no train.end_date", str(logs.output))

  def test_wrong_flags(self):
    for values, error, message in (
      ({"mode": "train_and_eval"}, TypeError, r"^train_and_eval has not been supported\.$"),
      ({"cpu_test": True, "tpu": "t"}, ValueError, "--cpu_test and --tpu=t contradict"),
      ({"partition_strategy": "x"}, ValueError, "--partition_strategy=x, want one of"),
      ({"host_call_every_n_steps": -1}, ValueError, "--host_call_every_n_steps=-1 is negative"),
      ({"save_checkpoints_steps": -5}, ValueError, "--save_checkpoints_steps=-5 is negative"),
      ({"iterations_per_loop": 0}, ValueError, "--iterations_per_loop=0, want at least 1"),
      ({"mode": "eval"}, TypeError, "--mode=eval needs --model_dir"),
    ):
      with self.subTest(values=values):
        with mock.patch.object(tpu_runner.TPURunner, "create_tpu_estimator") as create:
          with self.assertRaisesRegex(error, message):
            self._runner(**values).run()
        create.assert_not_called()  # no TPU was touched

  def test_wrong_params_for_eval(self):
    for settings, cpu_test, error, message in (
      ({"input.eval_examples": None}, True, TypeError, "input.eval_examples of task SimpleTask"),
      (
        {"eval.per_replica_batch_size": None},
        False,
        TypeError,
        "eval.per_replica_batch_size of task SimpleTask",
      ),
      ({"input.eval_examples": 7}, True, ValueError, "fewer than one batch of 8 examples"),
      (
        {"input.eval_examples": 100, "eval.per_replica_batch_size": None},
        True,
        ValueError,
        "fewer than one batch of 128 examples",
      ),
    ):
      with self.subTest(settings=settings), self.assertRaisesRegex(error, message):
        self._runner(settings, mode="eval", model_dir="m", cpu_test=cpu_test).run()

  def test_no_checkpoint_is_announced(self):
    with self.assertLogs("absl", level="WARNING") as logs:
      self._runner(cpu_test=True)._validate()
    self.assertIn("No checkpoint will be written", "".join(logs.output))

  def test_unknown_mode(self):
    with flagsaver.flagsaver(), self.assertRaises(flags.IllegalFlagValueError):
      flags.FLAGS(["prog", "--mode=x"])

  def test_task_names(self):
    with flagsaver.flagsaver(task=None), self.assertRaisesRegex(app.UsageError, "--task"):
      tpu_runner.main(["prog"])
    with self.assertRaisesRegex(app.UsageError, "Unexpected arguments"):
      tpu_runner.main(["prog", "eval"])
    for task, error, message in (
      ("no_such_module.X", LookupError, "^Could not find any valid import paths"),
      (EXAMPLE + "s", LookupError, f"Did you mean: .*{EXAMPLE}"),
      ("monolith.tasks.parity_exampel.ParityExample", LookupError, f"Did you mean: .*{EXAMPLE}"),
      ("nodot", ValueError, "^Invalid model name nodot$"),
    ):
      with self.subTest(task=task), flagsaver.flagsaver(task=task):
        with self.assertRaisesRegex(error, message):
          tpu_runner.main(["prog"])

  def test_import_defines_a_flag_only_once(self):
    tpu_runner._define(flags.DEFINE_string, "task", None, "Defined by another runner.")
    self.assertEqual(flags.FLAGS["task"].help, "Registered task, <module>.<Class>.")


class EvaluationTest(DataTestCase):
  def _runner(self, max_steps=30):
    with flagsaver.flagsaver(cpu_test=True, mode="eval", model_dir=self.model_dir):
      params = model_registry.GetParams(SIMPLE).set(**{"train.max_steps": max_steps})
      runner = tpu_runner.TPURunner(params)
    runner._checkpoint_timeout_seconds = 2
    return runner

  def _save(self, *names):
    os.makedirs(self.model_dir, exist_ok=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
      step = tf.compat.v1.train.get_or_create_global_step()
      saver = tf.compat.v1.train.Saver()
      for i, name in enumerate(names):
        session.run(step.assign(i))
        saver.save(session, os.path.join(self.model_dir, name), write_meta_graph=False)

  def test_no_checkpoint_ends_with_a_message(self):
    with self.assertLogs("absl", level="WARNING") as logs:
      self._runner().run()
    self.assertIn(
      f"No new checkpoint in {self.model_dir} for 2 s: evaluation ends", str(logs.output)
    )

  def _evaluated(self, runner, evaluate):
    runner._task = runner._task_param.instantiate()
    runner._evaluate(mock.Mock(evaluate=evaluate), 1)

  def test_newest_checkpoint_then_newer_ones_until_max_steps(self):
    self._save("model.ckpt-10", "model.ckpt-20")
    evaluated = []

    def evaluate(input_fn, steps, checkpoint_path):
      evaluated.append((os.path.basename(checkpoint_path), steps))
      self._save({1: "model.ckpt-25", 2: "model.ckpt-30", 3: "model.ckpt-40"}[len(evaluated)])
      return {"loss": 1.0}

    self._evaluated(self._runner(), evaluate)
    self.assertEqual(
      evaluated, [("model.ckpt-20", 32), ("model.ckpt-25", 32), ("model.ckpt-30", 32)]
    )

  def test_name_without_a_step(self):
    self._save("best")
    self._evaluated(self._runner(max_steps=0), lambda *args, **kwargs: {"loss": 1.0})
    scalars = read_scalars(os.path.join(self.model_dir, "eval"))
    self.assertEqual(sorted(scalars["loss"]), [0])

  def test_deleted_checkpoint_is_skipped(self):
    self._save("model.ckpt-10")
    evaluated = []

    def evaluate(input_fn, steps, checkpoint_path):
      evaluated.append(os.path.basename(checkpoint_path))
      if len(evaluated) == 1:
        self._save("model.ckpt-20")
        raise tf.errors.NotFoundError(None, None, "gone before it was read to its end")
      if len(evaluated) == 2:
        for path in glob.glob(f"{checkpoint_path}.*"):
          os.remove(path)
        self._save("model.ckpt-30")
        raise ValueError(f"Could not find trained model in {checkpoint_path}")
      return {"loss": 1.0}

    self._evaluated(self._runner(), evaluate)
    self.assertEqual(evaluated, ["model.ckpt-10", "model.ckpt-20", "model.ckpt-30"])
    with self.assertRaisesRegex(ValueError, "a defect of the model"):
      self._evaluated(self._runner(), mock.Mock(side_effect=ValueError("a defect of the model")))

  def test_no_event_file_is_lost_within_a_second(self):
    """The estimator and the runner, and two evaluations, open their files at the same time."""
    eval_dir = os.path.join(self.model_dir, "eval")
    writers = []

    def evaluate(input_fn, steps, checkpoint_path):
      if not writers:  # as the estimator does: one writer per folder, without a suffix
        writers.append(tf.compat.v1.summary.FileWriter(eval_dir))
      step = int(checkpoint_path.rpartition("-")[2])
      summary = tf.compat.v1.Summary()
      summary.value.add(tag="of_estimator", simple_value=step)
      writers[0].add_summary(summary, step)
      writers[0].flush()
      self._save(f"model.ckpt-{step + 10}")
      return {"of_runner": step}

    for _ in range(2):
      self._save("model.ckpt-0")
      self._evaluated(self._runner(), evaluate)
    writers[0].close()
    scalars = read_scalars(eval_dir)
    want = {step: [step, step] for step in (0, 10, 20, 30)}
    self.assertEqual(scalars["of_estimator"], want)
    self.assertEqual(scalars["of_runner"], want)
    self.assertEqual(len(os.listdir(eval_dir)), 3)


if __name__ == "__main__":
  unittest.main()
